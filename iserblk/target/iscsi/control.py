"""The target's answers to PDUs that are no SCSI commands (RFC 7143 section 11)."""

from __future__ import annotations

from typing import TypedDict

from iserblk.datamover.seam import TargetDatamover
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.text_target import Declare, TextResponder
from iserblk.target.iscsi.slot import ENDED, Numbers, TargetTask

_BATCH = 16  # slots that are made at a time
_PING_TAG = 1  # Target Transfer Tag of our pings: at most one is on its way
LOGOUT_FOR_RECOVERY = 2  # reason of a Logout
_CLOSED = 0  # responses to it
_RECOVERY_NOT_SUPPORTED = 2


class _Stamp(TypedDict):
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


class ControlAnswers:
    """Fills and queues answers. ``give_back`` returns a slot when its answer has left.

    Control PDUs use the command window, too. So the number of answers is at most the width of the
    window, plus the number of unexpected PDUs. Memory for them is allocated when it is first
    needed. A peer that asks for more answers without receiving them is cut off."""

    def __init__(
        self,
        datamover: TargetDatamover,
        numbers: Numbers,
        slots: list[TargetTask],
        declare: Declare,
    ) -> None:
        self._dm = datamover
        self._numbers = numbers
        self._free = slots
        self._inline = 0
        self._more = 0  # slots that may still be made
        self._text = TextResponder(declare)

    def enlarge(self, inline: int, most: int) -> None:
        """Allow ``most`` more slots, each with room for ``inline`` bytes of data."""
        self._inline = inline
        self._more = most

    def _make(self) -> None:
        count = min(_BATCH, self._more)
        self._more -= count
        slots = [TargetTask(index, True) for index in range(count)]
        self._dm.add_resources(slots, self._inline, 0)
        self._free += slots

    def give_back(self, slot: TargetTask) -> None:
        self._free.append(slot)

    def _take(self, data: bytes | memoryview = b"") -> TargetTask:
        if not self._free:
            self._make()
        if not self._free:
            raise RemoteProtocolError(
                "iSCSI", "too many control PDUs: the initiator does not take the answers"
            )
        slot = self._free.pop()
        slot.state = ENDED
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        return slot

    def _stamp(self, first: int) -> _Stamp:
        """The sequence numbers of an answer to the PDU whose byte 0 is ``first``."""
        numbers = self._numbers
        numbers.ended(first & bhs.IMMEDIATE)
        return {
            "stat_sn": numbers.take_stat_sn(),
            "exp_cmd_sn": numbers.exp_cmd_sn,
            "max_cmd_sn": numbers.max_cmd_sn,
        }

    def login(self, header: bytes, data: bytes) -> None:
        """Send a Login Response. ``header`` has its sequence numbers already."""
        slot = self._take(data)
        slot.bhs[:] = header
        self._dm.send_control(slot)

    def enable_datamover(self, header: bytes, data: bytes) -> TargetDatamover:
        """Send the final Login Response. Returns the datamover that all answers after it use."""
        slot = self._take(data)
        slot.bhs[:] = header
        self._dm = self._dm.enable_datamover(slot)
        return self._dm

    def nop_in(self, message: memoryview, at: int, limit: int) -> None:
        """Answer a ping with at most ``limit`` bytes of its data."""
        request = pdu.NopOut.unpack_from(message, at)
        if request.itt == bhs.NO_TAG:
            return  # the answer to a ping of the target, or only a new ExpStatSN
        if not self._numbers.accept(request.opcode, request.cmd_sn):
            return
        data = bhs.data_segment_untrusted(message, at)[:limit]
        slot = self._take(data)
        pdu.NopIn(
            lun=request.lun,
            itt=request.itt,
            data_length=len(data),
            **self._stamp(request.opcode),
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def ping(self) -> None:
        """Send a NOP-In that the initiator has to answer. It takes no StatSN (11.19.4). Nothing is
        sent if no slot is free: the answers under way show as well whether the peer is alive."""
        if not self._free:
            return
        numbers = self._numbers
        slot = self._take()
        pdu.NopIn(
            itt=bhs.NO_TAG,
            ttt=_PING_TAG,
            stat_sn=numbers.stat_sn,
            exp_cmd_sn=numbers.exp_cmd_sn,
            max_cmd_sn=numbers.max_cmd_sn,
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def text(self, message: memoryview, at: int, targets: dict[str, list[str]], limit: int) -> None:
        """Answer a Text Request: SendTargets, in discovery and in normal sessions (appendix C).
        ``limit``: bytes of one answer; a longer answer is split."""
        request = pdu.TextRequest.unpack_from(message, at)
        if not self._numbers.is_next(request.opcode, request.cmd_sn):
            return
        question = bytes(bhs.data_segment_untrusted(message, at))
        part = self._text.receive(request, question, targets, limit)
        if part is None:
            self.reject(message, at, pdu.REJECT_PROTOCOL_ERROR)
            return
        self._numbers.accept(request.opcode, request.cmd_sn)
        slot = self._take(part.data)
        pdu.TextResponse(
            flags=part.flags,
            itt=request.itt,
            ttt=part.ttt,
            data_length=len(part.data),
            **self._stamp(request.opcode),
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def logout(self, request: pdu.LogoutRequest) -> None:
        """Answer a Logout. To remove the connection for recovery is refused: only
        ErrorRecoveryLevel 2 has that (RFC 7143 sections 11.14.1, 11.15.1)."""
        recovery = request.reason == LOGOUT_FOR_RECOVERY
        slot = self._take()
        pdu.LogoutResponse(
            response=_RECOVERY_NOT_SUPPORTED if recovery else _CLOSED,
            itt=request.itt,
            **self._stamp(request.opcode),
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def task_management(self, request: pdu.TaskManagementRequest, response: int) -> None:
        slot = self._take()
        pdu.TaskManagementResponse(
            response=response, itt=request.itt, **self._stamp(request.opcode)
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def reject(self, message: memoryview, at: int, reason: int) -> None:
        """Reject the PDU at ``at``: its header goes back as data (11.17)."""
        slot = self._take(message[at : at + bhs.BHS_LENGTH])
        # As if the I bit were set: a rejected PDU used up no CmdSN.
        pdu.Reject(
            reason=reason, data_length=bhs.BHS_LENGTH, **self._stamp(bhs.IMMEDIATE)
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)
