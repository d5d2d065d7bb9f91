"""Logout, and what a target says unasked: NOP-In pings, Async Message, Reject.

The session calls the latter in ``progress``. They may raise RemoteProtocolError or ConnectionLost,
which end the connection.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING

from iserblk.errors import CommandRejected, ConnectionLost, RemoteProtocolError
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu, reasons

if TYPE_CHECKING:
    from iserblk.initiator.session.session import Session

log = logging.getLogger(__name__)

# After its Logout Response the target closes the connection, and is given this long for it (tgtd
# never does): when both ends close at the same time, LIO on siw warns of a failed QP.
PARTING_S = 0.25
DRAIN_S = 30.0  # commands in flight may delay a logout by this much, if the target is as patient
ANSWER_S = 3.0  # for the Logout Response
MOST_WAIT_S = 20.0  # of Time2Wait: commands have deadlines


def fill_logout(slot: TaskSlot) -> None:
    """A Logout Request that closes the session (RFC 7143 section 11.14)."""
    pdu.LogoutRequest(
        reason=pdu.LOGOUT_CLOSE_SESSION, itt=0, cid=0, cmd_sn=0, exp_stat_sn=0
    ).pack_into(slot.bhs)


def answer_ping(session: Session, lun: bytes, ttt: int) -> None:
    """A NOP-In that asks for an answer: echo its Target Transfer Tag (RFC 7143 section 11.18).

    Nothing answers the answer, so its slot may be used again only when it has left. Slots take
    turns; while the wire is full no more pings are answered than there are slots to go through.
    """
    session.unsent_pongs = session.unsent_pongs + 1 if session.wants_write() else 0
    slot = session.take_control() if session.unsent_pongs < session.free_controls else None
    if slot is None:
        raise RemoteProtocolError("iSCSI", "flood of NOP-In pings")
    session.send_pong(slot, lun, ttt)


def async_message(session: Session, message: pdu.AsyncMessage) -> None:
    """RFC 7143 section 11.9. An announced drop is the end of the connection, at once."""
    words = reasons.async_event(message.event)
    log.warning("%s: asynchronous message: %s", session.portal, words)
    if message.event in (pdu.ASYNC_LOGOUT_REQUEST, pdu.ASYNC_NEGOTIATE):
        if session.on_loss is not None and session.parting is None:
            session.parting = Parting(session, monotonic() + min(message.parameter3, DRAIN_S))
            session.hold()
    elif message.event in (pdu.ASYNC_CONNECTION_DROP, pdu.ASYNC_SESSION_DROP):
        _stay_away(session, message.parameter2)
        raise ConnectionLost(f"{session.portal}: the target announced: {words}")


def _stay_away(session: Session, time2wait: int) -> None:
    """The target wants to be left alone for ``time2wait`` seconds."""
    session.reconnect_at = monotonic() + min(time2wait, MOST_WAIT_S)


class Parting:
    """A logout from a session that goes on: commands in flight may end, new ones wait for the next
    connection. Implements Waiter for the Logout Response."""

    def __init__(self, session: Session, by: float, why: str = "as the target had asked") -> None:
        """``by``: when the Logout Request must have been sent. ``why``: for messages."""
        self._session = session
        self._by = by
        self.why = why
        self.pending = 0

    def tick(self, now: float) -> None:
        session = self._session
        if self.pending:
            if now >= self._by:
                session.disconnect()  # no answer
            return
        if session.sent and now < self._by:
            return
        control = session.take_control()
        if control is None:
            if now >= self._by:
                session.disconnect()
            return
        fill_logout(control)
        self.pending = 1
        self._by = now + ANSWER_S
        session.send_immediate(control, self)

    def task_done(self) -> None:
        """The answer (``parted`` tells what it means), or the connection is lost."""


def parted(session: Session, message: pdu.LogoutResponse, parting: Parting) -> None:
    """The end of a connection that the target wanted to be rid of, or we."""
    _stay_away(session, message.time2wait)
    session.left_nothing = not message.response and not session.sent
    raise ConnectionLost(f"{session.portal}: logged out, {parting.why}")


def rejected(session: Session, message: memoryview, at: int) -> None:
    """A Reject carries the header of the PDU that it rejects; end that task (section 11.17)."""
    reject = pdu.Reject.unpack_from(message, at)
    words = reasons.reject_reason(reject.reason)
    header = bhs.data_segment_untrusted(message, at)
    log.warning("%s: target rejected a PDU: %s", session.portal, words)
    slot = None
    if len(header) >= bhs.BHS_LENGTH:
        slot = session.find(bhs.ITT.unpack_from(header, bhs.ITT_OFFSET)[0])
    if slot is not None:
        session.end_rejected(
            slot, CommandRejected(f"{session.portal}: target rejected a command: {words}")
        )
