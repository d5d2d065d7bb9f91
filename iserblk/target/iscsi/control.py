"""The target's answers to PDUs that are no SCSI commands (RFC 7143 section 11)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypedDict

from iserblk.datamover.seam import TargetDatamover
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, keys, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import LoginTarget
from iserblk.iscsi.text_target import Declare, TextResponder
from iserblk.iscsi.unexpected import FromTarget
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.iscsi.tasks.slot import ENDED, TargetTask

log = logging.getLogger(__name__)

CONTROL_INLINE: Final = 8192
_BATCH = 16  # slots that are made at a time
_TAGS = 0x7FFFFFFF  # Target Transfer Tags of our pings: 1 up to this
# Responses to a Logout (11.15.1).
CLOSED = 0
CID_NOT_FOUND = 1
RECOVERY_NOT_SUPPORTED = 2
CLEANUP_FAILED = 3
_AT_ANY_TIME: Final = ("MaxRecvDataSegmentLength", "InitiatorAlias")
# The OUI in the ISIDs of open-iscsi. Over iSER, its kernel takes no more than 128 bytes of data in
# a control-type PDU of full feature phase, whatever InitiatorRecvDataSegmentLength says.
_OPEN_ISCSI: Final = bytes.fromhex("00023d")
_OPEN_ISCSI_DATA: Final = 128


class AnswerLimit:
    """How much data one answer may have: the initiator takes no more. ``length``: in bytes."""

    def __init__(self, login: LoginTarget) -> None:
        self._login = login
        self._parameters: SessionParameters | None = None  # in full feature phase
        self.length = CONTROL_INLINE

    def begin(self) -> None:
        """Login is over."""
        self._parameters = self._login.parameters
        self._set(self._parameters.initiator_recv_data_segment_length)

    def _set(self, most: int) -> None:
        """Limit answers to ``most`` bytes of data in one PDU: the initiator takes no more."""
        login = self._login
        if (
            login.parameters.rdma_extensions
            and not login.discovery
            and login.isid.startswith(_OPEN_ISCSI)
        ):
            most = min(most, _OPEN_ISCSI_DATA)
        self.length = min(CONTROL_INLINE, most)

    def declare(self, key: str, value: str) -> str | None:
        """Take a key that a Text Request declares in full feature phase. Returns the answer, or
        None. No later PDU is longer than the initiator declares (RFC 7143 section 13.12)."""
        if key not in _AT_ANY_TIME or self._parameters is None:
            return keys.NOT_UNDERSTOOD
        parameters = self._parameters
        answer = keys.answer(parameters, key, value, self._login.discovery)
        if answer is None and not parameters.rdma_extensions:  # iSER has a key of its own
            most = parameters.max_recv_data_segment_length
            parameters.initiator_recv_data_segment_length = most
            self._set(most)
        return answer


class _Stamp(TypedDict):
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


class ControlAnswers:
    """Fills and queues answers, and PDUs that answer nothing. ``give_back`` returns a slot when its
    PDU has left. ``unexpected``: those that answer nothing, as far as they are outstanding; none is
    queued beyond what the initiator takes, whatever it would have told (RFC 7145 section 8.1.2).

    Control PDUs use the command window, too. So the number of answers is at most the width of the
    window, plus the number of unexpected PDUs. Memory for them is allocated when it is first
    needed. A peer that asks for more answers without receiving them is cut off; not one that has
    sent many requests at once, and receives."""

    def __init__(
        self,
        datamover: TargetDatamover,
        numbers: Numbers,
        slots: list[TargetTask],
        declare: Declare,
        hold: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """``hold``: has so many bytes more count, or returns False: there is no memory."""
        self._hold = hold
        self._dm = datamover
        self._numbers = numbers
        self._free = slots
        self._inline = 0
        self._more = 0  # slots that may still be made
        self.held = 0  # bytes of those that were made
        self._ping_tag = 0  # of the last ping
        self.unexpected = FromTarget()
        self._text = TextResponder(declare)

    def enlarge(self, inline: int, most: int) -> None:
        """Allow ``most`` more slots, each with room for ``inline`` bytes of data."""
        self._inline = inline
        self._more = most

    def _make(self) -> None:
        """Make slots, if there may be more and there is memory for them."""
        count = min(_BATCH, self._more)
        if not count or not self._hold(count * self._inline):
            return
        self._more -= count
        self.held += count * self._inline
        slots = [TargetTask(index, True) for index in range(count)]
        self._dm.add_resources(slots, self._inline, 0)
        self._free += slots

    def give_back(self, slot: TargetTask) -> None:
        self._free.append(slot)

    def _take(self, data: bytes | memoryview = b"") -> TargetTask:
        if not self._free:
            self._make()
        if not self._free:
            # Of what has come at once not all is looked at yet, and answers may leave meanwhile.
            self._dm.flush()
        if not self._free and self._more:
            raise ConnectionLost("there is no memory for answers")
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
        numbers.window.ended(first & bhs.IMMEDIATE)
        return {
            "stat_sn": numbers.take_stat_sn(),
            "exp_cmd_sn": numbers.window.exp_cmd_sn,
            "max_cmd_sn": numbers.window.max_cmd_sn,
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
        if not self._numbers.window.accept(request.opcode, request.cmd_sn):
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

    def heard(self, message: memoryview, at: int) -> None:
        """A PDU has come, any PDU of an initiator: its ExpStatSN retires what is outstanding, and
        so does the answer to a ping."""
        header = pdu.NopOut.unpack_from(message, at)
        answers = (
            header.opcode & bhs.OPCODE_MASK == bhs.NOP_OUT and header.itt == bhs.NO_TAG
        )  # of other PDUs these bytes mean something else
        self.unexpected.heard(header.exp_stat_sn, header.ttt if answers else bhs.NO_TAG)

    def ping(self) -> None:
        """Queue a NOP-In that the initiator has to answer. It takes no StatSN (11.19.4). Nothing is
        sent while one is unanswered, and if no slot is free: the answers under way show as well
        whether the peer is alive."""
        if not self._free or self.unexpected.asked or not self.unexpected.ping_allowed:
            return
        numbers = self._numbers
        slot = self._take()
        self._ping_tag = self._ping_tag % _TAGS + 1
        pdu.NopIn(
            itt=bhs.NO_TAG,
            ttt=self._ping_tag,
            stat_sn=numbers.stat_sn,
            exp_cmd_sn=numbers.exp_cmd_sn,
            max_cmd_sn=numbers.max_cmd_sn,
        ).pack_into(slot.bhs)
        self.unexpected.sent(numbers.stat_sn, self._ping_tag)
        self._dm.send_control(slot)

    def _may_tell(self) -> bool:
        """Whether an unexpected PDU other than a ping may be sent. If not, a ping asks the
        initiator for an ExpStatSN that retires those before it."""
        if self.unexpected.full:
            self.ping()
            return False
        if not self._free:
            self._make()
        return bool(self._free)

    def async_message(
        self,
        event: int,
        *,
        lun: bytes = bytes(8),
        sense: bytes = b"",
        parameter1: int = 0,
        parameter2: int = 0,
        parameter3: int = 0,
    ) -> bool:
        """Queue an Asynchronous Message (11.9). ``event``: AsyncEvent. ``lun``: the LUN field.
        ``sense``: of a SCSI event. ``parameter1`` to ``parameter3``: as the event defines them.
        False: the initiator takes no more PDUs that answer nothing, and nothing was queued."""
        if not self._may_tell():
            return False
        data = len(sense).to_bytes(2, "big") + sense if sense else b""
        slot = self._take(data)
        stamp = self._stamp(bhs.IMMEDIATE)
        pdu.AsyncMessage(
            event=event,
            lun=lun,
            data_length=len(data),
            parameter1=parameter1,
            parameter2=parameter2,
            parameter3=parameter3,
            **stamp,
        ).pack_into(slot.bhs)
        self.unexpected.sent(stamp["stat_sn"])
        self._dm.send_control(slot)
        return True

    def text(self, message: memoryview, at: int, targets: dict[str, list[str]], limit: int) -> None:
        """Answer a Text Request: SendTargets, in discovery and in normal sessions (appendix C).
        ``limit``: bytes of one answer; a longer answer is split."""
        request = pdu.TextRequest.unpack_from(message, at)
        if not self._numbers.window.is_next(request.opcode, request.cmd_sn):
            return
        question = bytes(bhs.data_segment_untrusted(message, at))
        part = self._text.receive(request, question, targets, limit)
        if part is None:
            self.reject(message, at, pdu.REJECT_PROTOCOL_ERROR, in_place_of_a_response=True)
            return
        self._numbers.window.accept(request.opcode, request.cmd_sn)
        slot = self._take(part.data)
        pdu.TextResponse(
            flags=part.flags,
            itt=request.itt,
            ttt=part.ttt,
            data_length=len(part.data),
            **self._stamp(request.opcode),
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def logout(
        self, request: pdu.LogoutRequest, response: int, time2wait: int = 0, time2retain: int = 0
    ) -> None:
        """Answer a Logout. The times are seconds, for tasks that may be reassigned (11.15.3)."""
        slot = self._take()
        pdu.LogoutResponse(
            response=response,
            itt=request.itt,
            time2wait=time2wait,
            time2retain=time2retain,
            **self._stamp(request.opcode),
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def task_management(self, request: pdu.TaskManagementRequest, response: int) -> None:
        slot = self._take()
        pdu.TaskManagementResponse(
            response=response, itt=request.itt, **self._stamp(request.opcode)
        ).pack_into(slot.bhs)
        self._dm.send_control(slot)

    def reject(
        self,
        message: memoryview,
        at: int,
        reason: int,
        *,
        in_place_of_a_response: bool,
        data_sn: int = 0,
    ) -> None:
        """Reject the PDU at ``at``: its header goes back as data (11.17).
        ``in_place_of_a_response``: the initiator waits for an answer to it. If not, and the
        initiator takes no more PDUs that answer nothing, it is not told. ``data_sn``: see
        ``pdu.Reject``."""
        if not in_place_of_a_response and not self._may_tell():
            log.info("a PDU %#x was rejected, but the initiator takes no Reject", message[at])
            return
        slot = self._take(message[at : at + bhs.BHS_LENGTH])
        stamp = self._stamp(bhs.IMMEDIATE)  # a rejected PDU used up no CmdSN
        pdu.Reject(reason=reason, data_length=bhs.BHS_LENGTH, data_sn=data_sn, **stamp).pack_into(
            slot.bhs
        )
        if not in_place_of_a_response:
            self.unexpected.sent(stamp["stat_sn"])
        self._dm.send_control(slot)
