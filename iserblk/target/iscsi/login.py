"""The login of one connection of the target, until full feature phase begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iserblk.datamover.seam import TargetDatamover
from iserblk.errors import Busy, RemoteProtocolError
from iserblk.iscsi import bhs
from iserblk.iscsi.login_target import LoginTarget
from iserblk.target.iscsi.control import CONTROL_INLINE, ControlAnswers
from iserblk.target.iscsi.owners import ConnectionOwner
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH, TaskSlots

UNEXPECTED: Final = 32  # immediate PDUs in addition to these (MaxOutstandingUnexpectedPDUs)
PINGS: Final = 1  # answers to pings of ours, in addition to these
LOGIN_SLOTS: Final = 4
CONTROL_SLOTS: Final = QUEUE_DEPTH + UNEXPECTED  # for answers to NOP, text, task management


class ConnectionLogin:
    """Takes Login Requests, and sends all Login Responses but the final one. ``target``: decides
    what the answers are; it has ``failed`` behind a Login Response that refuses the login."""

    def __init__(
        self,
        target: LoginTarget,
        owner: ConnectionOwner,
        datamover: TargetDatamover,
        slots: TaskSlots,
        answers: ControlAnswers,
    ) -> None:
        self.target = target
        self._owner = owner
        self._dm = datamover
        self._slots = slots
        self._answers = answers
        # A Login Request that waits: header, data, and user.
        self._attempt: tuple[bytes, bytes, str] | None = None

    def take(
        self, message: memoryview, at: int, opcode: int, resume: Callable[[], None]
    ) -> tuple[bytes, bytes] | None:
        """Take a PDU. ``resume``: called when a request that waits has its turn. Returns the final
        Login Response, header and data, which the caller sends; None: the login goes on, or has
        failed."""
        if opcode != bhs.LOGIN_REQUEST:
            raise RemoteProtocolError("iSCSI", f"opcode {opcode:#x} before the end of login")
        if self._attempt is not None:
            raise RemoteProtocolError("iSCSI", "a login request before the answer to the last one")
        if not self.target.begun:
            self._owner.login_begun()
        header = bytes(message[at : at + bhs.BHS_LENGTH])
        data = bhs.data_segment_untrusted(message, at)
        user = self.target.claimed_user(header, data)
        if user and self._owner.hold_attempt(user, resume):
            self._attempt = (header, bytes(data), user)
            return None
        return self.judge(header, data, user)

    def take_attempt(self) -> tuple[bytes, bytes, str] | None:
        """The request that waits, for ``judge``: it waits no more."""
        attempt, self._attempt = self._attempt, None
        return attempt

    def judge(
        self, header: bytes, data: bytes | memoryview, user: str
    ) -> tuple[bytes, bytes] | None:
        """Answer a Login Request. ``user``: whom the initiator claims to be with a response of
        CHAP, or "". Returns as ``take``."""
        target = self.target
        answers = target.receive(header, data)
        if user:
            self._owner.attempt_ended(user, target.user == user)
        if target.done:
            try:
                self._owner.take_place()
                self._allocate()
            except (Busy, OSError, MemoryError) as error:
                answers = [target.out_of_resources(str(error) or "no memory")]
        if target.done:
            return answers[0]
        for answer, text in answers:
            self._answers.login(answer, text)
        return None

    def _allocate(self) -> None:
        """Allocate what the session needs beside the login buffers, before the final Login Response
        promises it (RFC 7145 section 5.1.2)."""
        target = self.target
        self._dm.notice_key_values(target.parameters)
        if not target.discovery:
            self._slots.allocate()
        unasked = target.depth * target.unsolicited_of_each
        self._dm.add_resources([], 0, UNEXPECTED + PINGS + unasked)
        self._answers.enlarge(CONTROL_INLINE, CONTROL_SLOTS)
