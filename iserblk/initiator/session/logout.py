"""Logout: the request, and the times that belong to it (RFC 7143 sections 11.14, 11.15)."""

from __future__ import annotations

from typing import Final

from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.sending import NO_ANSWER, SendQueue
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import pdu

AS_ASKED: Final = "as the target had asked"
# How long the target has to close the connection after its Logout Response (tgtd never does). When
# both ends close at the same time, LIO on siw warns of a failed QP.
CLOSE_S = 0.25
DRAIN_S = 30.0  # commands in flight may delay a logout by this much, if the target is as patient
ANSWER_S = 3.0  # how long the Logout Response is waited for
MOST_WAIT_S = 20.0  # the most of Time2Wait that is obeyed: commands have deadlines


class LogoutWaiter:
    """Waits for the Logout Response. Implements Waiter. ``response``: before it has come, and where
    it never comes, the one that it was made with. Times are seconds."""

    def __init__(self, response: int) -> None:
        self.pending = 1
        self.response = response
        self.time2wait = 0
        self.time2retain = 0

    def take(self, message: pdu.LogoutResponse) -> None:
        """It has come; ``task_done`` follows."""
        self.response = message.response
        self.time2wait = message.time2wait
        self.time2retain = message.time2retain

    def task_done(self) -> None:
        self.pending = 0


def fill_connection_logout(slot: TaskSlot, reason: int, cid: int) -> None:
    """A Logout Request for one connection, which may be another than the one that carries it."""
    pdu.LogoutRequest(reason=reason, itt=0, cid=cid, cmd_sn=0, exp_stat_sn=0).pack_into(slot.bhs)


def fill_logout(slot: TaskSlot) -> None:
    """A Logout Request that closes the session (RFC 7143 section 11.14)."""
    pdu.LogoutRequest(
        reason=pdu.LOGOUT_CLOSE_SESSION, itt=0, cid=0, cmd_sn=0, exp_stat_sn=0
    ).pack_into(slot.bhs)


class ConnectionLogout(LogoutWaiter):
    """Logs out ``connection`` when its commands have ended, or when the time that the target gave
    is over (RFC 7143 section 11.9.1). The session goes on by the others. All methods belong to the
    runner of ``Session.progress``.

    ``asked``: the Logout Request has been sent.
    """

    def __init__(self, queue: SendQueue, connection: Connection, by: float) -> None:
        """``by``: when the Logout Request must have been sent. Behind ``queue.begin_logout``."""
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
