"""Logouts that come on one connection of the target (RFC 7143 section 11.14)."""

from __future__ import annotations

from iserblk.iscsi import pdu
from iserblk.target.iscsi.control import (
    CID_NOT_FOUND,
    CLEANUP_FAILED,
    CLOSED,
    RECOVERY_NOT_SUPPORTED,
    ControlAnswers,
)
from iserblk.target.iscsi.session import RECOVERY, TargetSession
from iserblk.target.iscsi.tasks.slot import RUNNING, Allegiance
from iserblk.target.seam import DeviceServer


class Logouts:
    """Logs ``connection`` out, its session, or another connection of its session."""

    def __init__(
        self,
        connection: Allegiance,
        device: DeviceServer,
        session: TargetSession,
        answers: ControlAnswers,
    ) -> None:
        self._connection = connection
        self._device = device
        self._session = session
        self._window = session.window
        self._tasks = session.tasks
        self._answers = answers

    def take(self, request: pdu.LogoutRequest) -> None:
        """End, or set aside, all that the logout is about, then answer it (RFC 7143 section 11.14).
        When it has the answer, the initiator may let another connection or session write."""
        session = self._session
        if not self._window.accept(request.opcode, request.cmd_sn):
            return  # as every PDU with a number outside of the window (4.2.2.1)
        recovery = request.reason == pdu.LOGOUT_FOR_RECOVERY
        if recovery and session.parameters.error_recovery_level != RECOVERY:
            self._answers.logout(request, RECOVERY_NOT_SUPPORTED)  # the session goes on
        elif request.reason == pdu.LOGOUT_CLOSE_SESSION:
            for each in [*session.lost, *session.connections]:
                if each is not self._connection:
                    session.log_out(each, False)
            self._log_out(request, True)
        elif request.reason > pdu.LOGOUT_FOR_RECOVERY:
            self._answers.logout(request, CLEANUP_FAILED)
        elif request.cid != self._connection.cid:
            other = session.find(request.cid)
            if other is None:
                self._answers.logout(request, CID_NOT_FOUND)
            else:
                session.log_out(other, recovery)
                self._answer_when_closed(request, other)
        elif recovery:
            self._set_aside(request)
        else:
            self._log_out(request, False)

    def _log_out(self, request: pdu.LogoutRequest, whole_session: bool) -> None:
        """Log this connection out, or the session, whose other connections are being closed."""
        session = self._session
        self._connection.leaving = True
        # Others of them, which wait for data, end when their connection is closed.
        running = [
            slot
            for slot in self._tasks.values()
            if slot.connection is not self._connection and slot.state == RUNNING
        ]
        session.discard_waiting(self._connection)
        mine = session.tasks_allegiant_to(self._connection)
        left = 1 + len(mine)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left or self._connection.done:
                return
            self._answers.logout(request, CLOSED)
            if whole_session or not session.has_others(self._connection):
                self.end_session()
            else:
                self._connection.stop()
                self._connection.flush_quietly()
                self._connection.notify_ended()

        if whole_session:
            for slot in running:
                left += 1
                slot.on_ended.append(one_ended)
            for each in session.connections:
                if each is not self._connection:
                    left += 1
                    each.on_closed.append(one_ended)
        luns_of_mine = {slot.lun for slot in mine}
        session.end_each(mine, one_ended, cancel=True)
        if session.attached and mine:
            self._device.tasks_cleared(session.nexus, luns_of_mine)
        one_ended()

    def end_session(self) -> None:
        """The session has ended. What is queued on this connection still leaves."""
        self._connection.stop()
        self._session.abandon(self._connection)
        self._connection.flush_quietly()
        for each in self._session.connections:
            each.notify_ended()

    def _set_aside(self, request: pdu.LogoutRequest) -> None:
        """Log this connection out for recovery: its tasks wait for a new allegiance."""
        session = self._session
        self._connection.leaving = True
        self._answers.logout(
            request, CLOSED, session.parameters.default_time2wait, session.time2retain
        )
        self._connection.stop()
        session.set_aside(self._connection)
        self._connection.flush_quietly()
        self._connection.notify_ended()

    def _answer_when_closed(self, request: pdu.LogoutRequest, other: Allegiance) -> None:
        """Answer the logout of another connection, when nothing of that touches the initiator's
        buffers any more, and no thread carries out a task that has ended with it."""
        session = self._session
        ending = [
            slot
            for slot in session.tasks_allegiant_to(other)
            if slot.aborted and slot.state == RUNNING  # else it ends when ``other`` is closed
        ]
        left = 1 + len(ending)

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left or self._connection.done:
                return
            self._answers.logout(
                request, CLOSED, session.parameters.default_time2wait, session.time2retain
            )
            self._connection.flush_quietly()

        for slot in ending:
            slot.on_ended.append(one_ended)
        if other in session.connections:
            left += 1
            other.on_closed.append(one_ended)
        one_ended()
