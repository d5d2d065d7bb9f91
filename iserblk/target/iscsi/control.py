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
    """Fills and queues answers. Its slots come back through ``give_back`` when they have left.

    The command window is open to control PDUs as well, so there can be as many answers as that
    is wide, and as many again as unexpected PDUs are taken: memory for them is made when it is
    first needed. A peer that asks for more without taking the answers is cut off."""

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
        """Up to ``most`` slots more, with room for ``inline`` bytes of data each."""
        self._inline = inline
        self._more = most

    def _make(self) -> None:
        count = min(_BATCH, self._more)
        self._more -= count
        slots = [TargetTask(index, True) for index in range(count)]
        self._dm.allocate_connection_resources(slots, self._inline, 0)
        self._free += slots

    def give_back(self, slot: TargetTask) -> None:
        self._free.append(slot)

    def _take(self, data: bytes | memoryview = b"") -> TargetTask:
        if not self._free:
            self._make()
        if not self._free:
            raise RemoteProtocolError("iSCSI", "flood of control PDUs: answers are not taken")
        slot = self._free.pop()
        slot.state = ENDED
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        return slot

    def _stamp(self, first: int) -> _Stamp:
        """The numbers of an answer to the PDU with byte 0 ``first``."""
        numbers = self._numbers
        numbers.ended(first & bhs.IMMEDIATE)
        return {
            "stat_sn": numbers.take_stat_sn(),
            "exp_cmd_sn": numbers.exp_cmd_sn,
            "max_cmd_sn": numbers.max_cmd_sn,
        }

    def login(self, header: bytes, data: bytes) -> None:
        """A Login Response, complete with its numbers."""
        slot = self._take(data)
        slot.bhs[:] = header
        self._dm.send_control(slot)

    def nop_in(self, message: memoryview, at: int, limit: int) -> None:
        """Echo a ping: at most ``limit`` bytes of its data."""
        request = pdu.NopOut.unpack_from(message, at)
        if request.itt == bhs.NO_TAG:
            return  # the answer to a ping of ours, or news of ExpStatSN
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
        """Ask for a sign of life. It takes no StatSN (11.19.4). Nothing is sent where answers wait
        for the peer to take them: they ask as well."""
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
        """SendTargets, in discovery sessions and in normal ones (appendix C); ``limit``: bytes of
        one answer, of which a longer one gets several."""
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
        """A wish to remove the connection for recovery is refused: there is that at
        ErrorRecoveryLevel 2 only (RFC 7143 sections 11.14.1, 11.15.1)."""
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
        # What was rejected used up no CmdSN, whatever its I bit says.
        pdu.Reject(
            reason=reason, data_length=bhs.BHS_LENGTH, **self._stamp(bhs.IMMEDIATE)
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)
