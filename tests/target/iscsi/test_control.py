"""The target's answers to PDUs other than SCSI commands: fields, sequence numbers, and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from iserblk.datamover.seam import TargetSlot
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.text import encode
from iserblk.iscsi.text_target import understand_nothing
from iserblk.target.iscsi.control import CID_NOT_FOUND, CLOSED, ControlAnswers
from iserblk.target.iscsi.numbers import CommandWindow, Numbers
from iserblk.target.iscsi.tasks.slot import ENDED, TargetTask

INLINE = 512
TARGETS = {"iqn.2026-11.example:disk": ["192.0.2.1:3260,1"]}


class Datamover:
    """Keeps what is queued. ``made``: slots that were given memory later, by call. ``on_flush``:
    called when what is queued is to leave."""

    def __init__(self) -> None:
        self.sent: list[TargetTask] = []
        self.made: list[int] = []
        self.on_flush: Callable[[], None] = lambda: None

    def flush(self) -> None:
        self.on_flush()

    def add_resources(self, slots: Sequence[TargetSlot], inline_size: int, receives: int) -> None:
        assert receives == 0
        self.made.append(len(slots))
        for slot in slots:
            slot.bhs, slot.inline = memoryview(bytearray(48)), memoryview(bytearray(inline_size))

    def send_control(self, slot: TargetTask) -> None:
        assert slot.state == ENDED and slot.control
        self.sent.append(slot)


class Bench:
    """Answers with ``first`` slots at the beginning; the window is CmdSN 7 to 10. ``room``: bytes
    of memory for more slots."""

    def __init__(self, first: int = 4, room: int = 1 << 30) -> None:
        window = CommandWindow()
        window.exp_cmd_sn, window.max_cmd_sn = 7, 10
        self.numbers = Numbers(window)
        self.numbers.stat_sn = 100
        self.datamover = Datamover()
        slots = [TargetTask(index, True) for index in range(first)]
        if slots:
            self.datamover.add_resources(slots, INLINE, 0)
            self.datamover.made.clear()
        self.answers = ControlAnswers(
            self.datamover,  # type: ignore[arg-type]
            self.numbers,
            slots,
            understand_nothing,
            self._hold,
        )
        self._room = room

    def _hold(self, length: int) -> bool:
        if length > self._room:
            return False
        self._room -= length
        return True

    @property
    def window(self) -> tuple[int, int, int]:
        return self.numbers.stat_sn, self.numbers.exp_cmd_sn, self.numbers.max_cmd_sn

    def answer(self) -> tuple[bytes, bytes]:
        """The only answer: header and data."""
        (slot,) = self.datamover.sent
        return bytes(slot.bhs), bytes(slot.inline[: slot.inline_length])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def ping(data: bytes = b"", itt: int = 5, cmd_sn: int = 7, immediate: bool = False) -> memoryview:
    head = pdu.NopOut(
        opcode=bhs.NOP_OUT | (bhs.IMMEDIATE if immediate else 0),
        lun=b"\0\1" + bytes(6),
        itt=itt,
        cmd_sn=cmd_sn,
        exp_stat_sn=100,
        data_length=len(data),
    )
    return memoryview(head.pack() + data + bytes(-len(data) & 3))


@pytest.mark.parametrize(("limit", "echo"), [(512, b"are you there?"), (3, b"are"), (0, b"")])
def test_a_ping_is_echoed_up_to_the_limit(bench: Bench, limit: int, echo: bytes) -> None:
    bench.answers.nop_in(ping(b"are you there?"), 0, limit)
    header, data = bench.answer()
    found = pdu.NopIn.unpack_from(header)
    assert (found.itt, found.ttt, found.lun) == (5, bhs.NO_TAG, b"\0\1" + bytes(6))
    assert (found.data_length, data) == (len(echo), echo)
    assert (found.stat_sn, found.exp_cmd_sn, found.max_cmd_sn) == (100, 8, 11)
    assert bench.window == (101, 8, 11)


def test_an_immediate_ping_uses_up_no_command_number(bench: Bench) -> None:
    bench.answers.nop_in(ping(cmd_sn=9, immediate=True), 0, 512)
    assert len(bench.datamover.sent) == 1
    assert bench.window == (101, 7, 10)


@pytest.mark.parametrize("cmd_sn", [6, 8, 11])
def test_a_ping_out_of_order_is_ignored(bench: Bench, cmd_sn: int) -> None:
    bench.answers.nop_in(ping(cmd_sn=cmd_sn), 0, 512)
    assert not bench.datamover.sent and bench.window == (100, 7, 10)


def test_an_answer_to_a_ping_of_ours_gets_none(bench: Bench) -> None:
    bench.answers.nop_in(ping(itt=bhs.NO_TAG), 0, 512)
    assert not bench.datamover.sent and bench.window == (100, 7, 10)


def test_a_header_may_stand_anywhere_in_the_message(bench: Bench) -> None:
    message = memoryview(b"\xff" * 28 + bytes(ping(b"abc")))
    bench.answers.nop_in(message, 28, 512)
    assert bench.answer()[1] == b"abc"


def test_our_ping_takes_no_stat_sn(bench: Bench) -> None:
    bench.answers.ping()
    found = pdu.NopIn.unpack_from(bench.answer()[0])
    assert found.itt == bhs.NO_TAG and found.ttt != bhs.NO_TAG
    assert (found.stat_sn, found.exp_cmd_sn, found.max_cmd_sn) == (100, 7, 10)
    assert bench.window == (100, 7, 10)


def test_one_ping_at_a_time(bench: Bench) -> None:
    """The next one only when it is answered, and with a tag of its own."""
    bench.answers.ping()
    bench.answers.ping()
    assert len(bench.datamover.sent) == 1
    first = pdu.NopIn.unpack_from(bench.answer()[0])
    answer = pdu.NopOut(itt=bhs.NO_TAG, ttt=first.ttt, cmd_sn=7, exp_stat_sn=100)
    bench.answers.heard(memoryview(b"\xff" * 28 + answer.pack()), 28)
    bench.answers.ping()
    second = pdu.NopIn.unpack_from(bytes(bench.datamover.sent[1].bhs))
    assert second.ttt not in (first.ttt, bhs.NO_TAG)


def test_an_asynchronous_message(bench: Bench) -> None:
    """Its bytes, by RFC 7143 sections 11.9 and 11.9.1; the sense data behind its length (11.9.4).

    proves: ISER-7.3.7-1
    """
    sense = bytes((0x70, 0, 6, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x2A, 0x09, 0, 0, 0, 0))
    assert bench.answers.async_message(pdu.ASYNC_SCSI, lun=b"\0\3" + bytes(6), sense=sense)
    header, data = bench.answer()
    assert header.hex(" ", 4) == (
        "32800000 00000014 00030000 00000000"  # opcode, F, DataSegmentLength 20, LUN 3
        " ffffffff 00000000 00000064 00000007"  # no ITT, StatSN 100, ExpCmdSN 7
        " 0000000a 00000000 00000000 00000000"  # MaxCmdSN 10, AsyncEvent 0, no parameters
    )
    assert data == b"\0\x12" + sense
    assert bench.window == (101, 7, 10)


def test_a_request_for_a_logout(bench: Bench) -> None:
    """AsyncEvent 1; Parameter3 is the time for it, in seconds."""
    assert bench.answers.async_message(pdu.ASYNC_LOGOUT_REQUEST, parameter3=5)
    header, data = bench.answer()
    assert (header[36:44].hex(), data) == ("0100000000000005", b"")


def test_at_the_limit_nothing_is_told_but_a_ping_is_sent(bench: Bench) -> None:
    """An Asynchronous Message and a Reject are withheld, and count when they are not. What takes
    the place of a response is sent in any case. The answer to the ping makes room.

    proves: ISER-8.1.2-1, ISER-8.1.2-3, ISER-8.1.2-6, ISER-8.1.2-7, ISER-8.1.2-9
    """
    answers = bench.answers
    answers.enlarge(INLINE, 20)
    answers.unexpected.limit = 3
    message = memoryview(ping(b"data"))
    answers.reject(message, 0, 4, in_place_of_a_response=False)
    assert answers.async_message(pdu.ASYNC_LOGOUT_REQUEST)
    assert answers.unexpected.outstanding == 2
    for _ in range(2):
        answers.reject(message, 0, 4, in_place_of_a_response=False)
        assert not answers.async_message(pdu.ASYNC_LOGOUT_REQUEST)
        answers.reject(message, 0, 4, in_place_of_a_response=True)
    sent = [bytes(slot.bhs) for slot in bench.datamover.sent]
    opcodes = [bhs.REJECT, bhs.ASYNC_MESSAGE, bhs.NOP_IN, bhs.REJECT, bhs.REJECT]
    assert [head[0] for head in sent] == opcodes and answers.unexpected.outstanding == 3
    asked = pdu.NopIn.unpack_from(sent[2])
    answer = pdu.NopOut(itt=bhs.NO_TAG, ttt=asked.ttt, cmd_sn=7, exp_stat_sn=102)
    answers.heard(memoryview(answer.pack()), 0)
    assert answers.unexpected.outstanding == 0
    assert answers.async_message(pdu.ASYNC_LOGOUT_REQUEST)


def test_we_do_not_ping_while_all_answers_wait() -> None:
    """Their acknowledgement is a sign of life, too; and no memory is made for a ping."""
    bench = Bench(1)
    bench.answers.enlarge(INLINE, 8)
    bench.answers.logout(logout(0), CLOSED)
    bench.answers.ping()
    assert len(bench.datamover.sent) == 1 and not bench.datamover.made


def question(text: bytes, ttt: int = bhs.NO_TAG, cmd_sn: int = 7) -> memoryview:
    head = pdu.TextRequest(
        opcode=bhs.TEXT_REQUEST,
        flags=bhs.FLAG_FINAL,
        itt=5,
        ttt=ttt,
        cmd_sn=cmd_sn,
        exp_stat_sn=100,
        data_length=len(text),
    )
    return memoryview(head.pack() + text + bytes(-len(text) & 3))


def test_send_targets_is_answered(bench: Bench) -> None:
    bench.answers.text(question(encode([("SendTargets", "All")])), 0, TARGETS, INLINE)
    header, data = bench.answer()
    found = pdu.TextResponse.unpack_from(header)
    assert (found.flags, found.itt, found.ttt) == (bhs.FLAG_FINAL, 5, bhs.NO_TAG)
    assert found.data_length == len(data)
    ((name, addresses),) = TARGETS.items()
    assert data == encode([("TargetName", name), ("TargetAddress", addresses[0])])
    assert bench.window == (101, 8, 11)


def test_a_long_answer_goes_in_parts(bench: Bench) -> None:
    bench.answers.text(question(encode([("SendTargets", "All")])), 0, TARGETS, 20)
    first = pdu.TextResponse.unpack_from(bench.answer()[0])
    assert first.data_length == 20 and first.ttt != bhs.NO_TAG
    assert not first.flags & bhs.FLAG_FINAL


@pytest.mark.parametrize("cmd_sn", [6, 8])
def test_a_text_out_of_order_is_ignored(bench: Bench, cmd_sn: int) -> None:
    bench.answers.text(question(b"", cmd_sn=cmd_sn), 0, TARGETS, INLINE)
    assert not bench.datamover.sent and bench.window == (100, 7, 10)


def test_a_text_under_an_unknown_tag_is_rejected_and_was_not_received(bench: Bench) -> None:
    """Its CmdSN is still expected: the initiator sends it again (RFC 7143 section 7.3)."""
    message = question(b"", ttt=99)
    bench.answers.text(message, 0, TARGETS, INLINE)
    header, data = bench.answer()
    found = pdu.Reject.unpack_from(header)
    assert (found.reason, data) == (pdu.REJECT_PROTOCOL_ERROR, bytes(message[:48]))
    assert bench.window == (101, 7, 10)


def logout(reason: int) -> pdu.LogoutRequest:
    return pdu.LogoutRequest(
        opcode=bhs.LOGOUT_REQUEST | bhs.IMMEDIATE, reason=reason, itt=5, cmd_sn=7, exp_stat_sn=100
    )


@pytest.mark.parametrize(("reason", "response"), [(0, CLOSED), (1, CID_NOT_FOUND), (2, 2)])
def test_the_answer_to_a_logout(bench: Bench, reason: int, response: int) -> None:
    bench.answers.logout(logout(reason), response, 3, 4)
    found = pdu.LogoutResponse.unpack_from(bench.answer()[0])
    assert (found.response, found.itt, found.stat_sn) == (response, 5, 100)
    assert (found.time2wait, found.time2retain) == (3, 4)


def test_task_management(bench: Bench) -> None:
    request = pdu.TaskManagementRequest(
        opcode=bhs.TASK_MANAGEMENT_REQUEST,
        function=pdu.TMF_ABORT_TASK,
        lun=bytes(8),
        itt=5,
        cmd_sn=7,
        exp_stat_sn=100,
    )
    bench.answers.task_management(request, pdu.TMF_COMPLETE)
    found = pdu.TaskManagementResponse.unpack_from(bench.answer()[0])
    assert (found.response, found.itt) == (pdu.TMF_COMPLETE, 5)
    assert bench.window == (101, 7, 11)


def test_a_rejected_pdu_comes_back_and_moves_nothing(bench: Bench) -> None:
    message = memoryview(b"\xff" * 28 + bytes(ping(b"data")))
    bench.answers.reject(message, 28, 4, in_place_of_a_response=True)
    header, data = bench.answer()
    found = pdu.Reject.unpack_from(header)
    assert (found.reason, found.data_length, data) == (4, 48, bytes(message[28:76]))
    assert bench.window == (101, 7, 10)


def test_a_login_response_goes_out_as_it_is(bench: Bench) -> None:
    bench.answers.login(b"h" * 48, b"Key=value\0")
    assert bench.answer() == (b"h" * 48, b"Key=value\0")
    assert bench.window == (100, 7, 10)


def test_a_slot_is_used_again_when_it_has_left() -> None:
    bench = Bench(1)
    for _ in range(3):
        bench.answers.logout(logout(0), CLOSED)
        bench.answers.give_back(bench.datamover.sent.pop())
    assert not bench.datamover.made


def test_memory_is_made_when_it_is_needed_and_a_flood_is_cut_off() -> None:
    bench = Bench(1)
    bench.answers.enlarge(INLINE, 40)
    for _ in range(41):
        bench.answers.logout(logout(0), CLOSED)
    assert sum(bench.datamover.made) == 40 and len(bench.datamover.made) == 3
    with pytest.raises(RemoteProtocolError, match="control PDUs"):
        bench.answers.logout(logout(0), CLOSED)
    bench.answers.give_back(bench.datamover.sent.pop())
    bench.answers.logout(logout(0), CLOSED)


def test_who_takes_the_answers_is_not_cut_off() -> None:
    """However many requests have come at once: where no slot is free, answers leave first."""
    bench = Bench(2)

    def leave() -> None:
        while bench.datamover.sent:
            bench.answers.give_back(bench.datamover.sent.pop())

    bench.datamover.on_flush = leave
    for _ in range(100):
        bench.answers.logout(logout(0), CLOSED)
    assert not bench.datamover.made


def test_without_memory_there_are_no_more_slots() -> None:
    """What has to be answered ends the connection; what tells something by itself is not told."""
    bench = Bench(1, room=20 * INLINE)
    bench.answers.enlarge(INLINE, 40)
    for _ in range(17):
        bench.answers.logout(logout(0), CLOSED)
    assert bench.answers.held == 16 * INLINE
    assert not bench.answers.async_message(pdu.ASYNC_LOGOUT_REQUEST)
    with pytest.raises(ConnectionLost, match="no memory for answers"):
        bench.answers.logout(logout(0), CLOSED)
