"""The logout of one connection of several, which the target has asked for."""

from __future__ import annotations

from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.logout import ANSWER_S, LogoutWaiter, fill_connection_logout
from iserblk.initiator.session.sending import NO_ANSWER, SendQueue
from iserblk.iscsi import pdu


class Departure(LogoutWaiter):
    """Logs out ``connection`` when its commands have ended, or when the time that the target gave
    is over (RFC 7143 section 11.9.1). The session goes on by the others. All methods belong to the
    runner of ``Session.progress``.

    ``asked``: the Logout Request has been sent.
    """

    def __init__(self, queue: SendQueue, connection: Connection, by: float) -> None:
        """``by``: when the Logout Request must have been sent. ``queue.depart`` was called."""
        super().__init__(NO_ANSWER)
        self.connection = connection
        self.asked = False
        self._queue = queue
        self._by = by

    @property
    def closed(self) -> bool:
        """The target has logged the connection out; its tasks have ended there."""
        return not self.pending and self.response == pdu.LOGOUT_SUCCESS

    def stalled(self, seconds: float) -> None:
        """See Session."""
        self._by += seconds

    def tick(self, now: float) -> None:
        """Send the request when it is due. A connection that cannot be logged out is cut."""
        connection = self.connection
        if self.asked:
            if not self.closed and (now >= self._by or not self.pending):
                connection.datamover.disconnect()
            return
        if connection.in_flight > 0 and now < self._by:
            return
        control = self._queue.take_control(connection)
        if control is None:
            if now >= self._by:
                connection.datamover.disconnect()
            return
        fill_connection_logout(control, pdu.LOGOUT_CLOSE_CONNECTION, connection.cid)
        self.asked = True
        self._by = now + ANSWER_S
        self._queue.send_immediate(control, self)
