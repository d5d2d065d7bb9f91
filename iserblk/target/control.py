"""The target's answers to PDUs that are no SCSI commands (RFC 7143 section 11)."""

from __future__ import annotations

from typing import TypedDict

from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.text_target import TextResponder
from iserblk.target.slot import ENDED, Numbers, TargetTask


class _Stamp(TypedDict):
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


class ControlAnswers:
    """Fills and queues answers. Its slots come back through ``give_back`` when they have left; a
    peer that asks without taking the answers runs out of them, and is cut off."""

    def __init__(
        self, datamover: IserTarget | TcpTarget, numbers: Numbers, slots: list[TargetTask]
    ) -> None:
        self._dm = datamover
        self._numbers = numbers
        self._free = slots
        self._text = TextResponder()

    def add(self, slots: list[TargetTask]) -> None:
        self._free += slots

    def give_back(self, slot: TargetTask) -> None:
        self._free.append(slot)

    def _take(self, data: bytes | memoryview = b"") -> TargetTask:
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
        slot = self._take()
        pdu.LogoutResponse(response=0, itt=request.itt, **self._stamp(request.opcode)).pack_into(
            slot.bhs
        )
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
