"""ErrorRecoveryLevel 1 over TCP: what is damaged or lost on the wire comes again (RFC 7143 7).

The worlds of test_datamover_worlds lose PDUs of all kinds; here are exact numbers, what comes in
vain, bounds, and peers that lie."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from iserblk.crc import crc32c
from iserblk.datamover import arrivals, kept
from iserblk.datamover.seam import TargetDatamover, TargetSlot
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import sense
from iserblk.scsi.tasks import BIDIRECTIONAL, WRITE
from iserblk.sockets.stream import SocketStream
from tests.contract.datamovers import INLINE_SIZE, Numbers, Recorder, final_response
from tests.contract.lossy import DAMAGE, DROP, LEVEL_1, PASS, LossyEnds, Once, passing

SIZE = 40000  # five Data-In, or as many Data-Outs
DATA = bytes(i * 7 & 255 for i in range(SIZE))
SEGMENT = LEVEL_1.initiator_recv_data_segment_length


@pytest.fixture
def ends() -> Iterator[LossyEnds]:
    both = LossyEnds()
    yield both
    both.close()


def _write(ends: LossyEnds, index: int, data: bytes, unsolicited: int = 16384) -> bytearray:
    """A write up to the point where its target has all of its data: what came unsolicited, and what
    it fetched by R2Ts of up to MaxBurstLength."""
    whole = bytearray(len(data))
    ends.command(index, WRITE, memoryview(bytearray(data)))
    ends.settle()
    at = min(unsolicited, len(data))
    while at < len(data):
        size = min(len(data) - at, LEVEL_1.max_burst_length)
        ends.target.get_data(ends.answers[index], memoryview(whole)[at : at + size], at)
        ends.settle()
        at += size
    return whole


# -- the end of the login --------------------------------------------------------------------------


def test_what_comes_with_the_last_login_request() -> None:
    """A ping, and a SNACK for its answer: the datamover that has taken the connection over answers
    both, while that of the login is at work still."""
    ours, theirs = socket.socketpair()
    login, heard = TcpTarget(SocketStream(ours), 8192), Recorder()
    login.user, numbers = heard, Numbers()
    login.notice_numbers(numbers)
    login.allocate_connection_resources([TargetSlot(0)], INLINE_SIZE, 0)
    login.notice_key_values(replace(LEVEL_1, header_digest="None", data_digest="None"))
    ends: list[TargetDatamover] = []
    slot = TargetSlot(1)
    login.add_resources([slot], INLINE_SIZE, 0)

    def came(unit: bytes) -> None:
        if unit[0] & bhs.OPCODE_MASK == bhs.LOGIN_REQUEST:
            ends.append(login.enable_datamover(final_response(login)))
        elif unit[0] & bhs.OPCODE_MASK == bhs.NOP_OUT:
            slot.bhs[:] = pdu.NopIn(itt=5, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50).pack()
            ends[0].send_control(slot)
            numbers.stat_sn = 101
        else:
            assert ends[0].retransmit(pdu.SnackRequest.unpack_from(unit)) == (0, 0)

    heard.on_pdu = came
    request = bytearray(bhs.BHS_LENGTH)
    request[0] = bhs.LOGIN_REQUEST
    ping = pdu.NopOut(itt=5, cmd_sn=5, exp_stat_sn=100).pack()
    snack = pdu.SnackRequest(
        kind=pdu.SNACK_STATUS, lun=bytes(8), itt=bhs.NO_TAG, ttt=bhs.NO_TAG,
        exp_stat_sn=100, beg_run=100, run_length=1,
    ).pack()  # fmt: skip
    with ours, theirs:
        theirs.sendall(request + ping + snack)
        login.progress(0.0)
        ends[0].flush()
        said = theirs.recv(1 << 16)
        opcodes = [said[at] & bhs.OPCODE_MASK for at in range(0, len(said), bhs.BHS_LENGTH)]
        assert opcodes == [bhs.LOGIN_RESPONSE, bhs.NOP_IN, bhs.NOP_IN]
        assert ends[0] is not login and not slot.busy and slot in heard.sent


# -- an initiator: Data-In -------------------------------------------------------------------------


# shows: SYSTEM-40
@pytest.mark.parametrize("what", [DAMAGE, DROP])
@pytest.mark.parametrize("nth", range(5))
def test_a_lost_data_in(ends: LossyEnds, what: str, nth: int) -> None:
    """Its data is asked for; the command ends when it has come, and not before (7.8, 7.9)."""
    ends.down_wire.fate = Once(what, bhs.DATA_IN, nth)
    buffer = ends.read(0, SIZE)
    ends.answer(0, DATA)
    if what == DROP and nth == 4:  # with the status: nothing shows that there was one
        assert not ends.responses()
        ends.ping(77)
        ends.settle()
    assert bytes(buffer) == DATA
    assert ends.responses() == [0]
    asked = [each for each in ends.snacks() if each.kind == pdu.SNACK_DATA]
    length = 0 if nth == 4 else 1  # what follows the last would be too high a number for LIO
    assert [(each.itt, each.beg_run, each.run_length) for each in asked] in ([(0, nth, length)], [])
    assert asked or (what, nth) == (DROP, 4)


def test_a_last_data_in_that_is_damaged_again_and_again(ends: LossyEnds) -> None:
    """All that follows it is asked for each time, and never more than the status shows to be there:
    a target may end the connection over a number that is too high."""
    ends.down_wire.fate = Once(
        DAMAGE, bhs.DATA_IN, 0, lambda each: pdu.DataIn.unpack_from(each).data_sn == 4, times=3
    )
    ends.up_wire.fate = Once(DROP, bhs.SNACK_REQUEST, 1)
    buffer = ends.read(0, SIZE)
    ends.answer(0, DATA)
    assert not ends.responses()
    ends.tick(arrivals.PATIENCE)
    assert ends.responses() == [0] and bytes(buffer) == DATA
    assert [(each.beg_run, each.run_length) for each in ends.snacks()] == [(4, 0)] * 4
    assert not ends.reasons


def test_a_target_that_does_not_count_data(ends: LossyEnds) -> None:
    """Without an ExpDataSN the missing bytes show it."""
    ends.down_wire.fate = Once(DROP, bhs.DATA_IN, 2, times=3)
    ends.down_wire.change = lambda header: (
        header[:36] + bytes(4) + header[40:] if header[0] == bhs.SCSI_RESPONSE else header
    )
    buffer = bytearray(SIZE)
    answer = ends.commanded(0, BIDIRECTIONAL, memoryview(b"-"), memoryview(buffer))
    ends.target.put_data(answer, memoryview(DATA), 0)
    ends.respond(0)
    ends.settle()
    assert ends.responses() == [0] and bytes(buffer) == DATA
    assert [(each.beg_run, each.run_length) for each in ends.snacks()] == [(2, 0)]


def test_data_that_the_target_does_not_have_any_more(ends: LossyEnds) -> None:
    """The command ends with CHECK CONDITION, protocol service CRC error (7.8, a.2)."""
    ends.down_wire.fate = Once(DROP, bhs.DATA_IN, 1)
    ends.read(0, SIZE)
    ends.target.put_data(ends.answers[0], memoryview(DATA), 0)
    ends.respond(0)
    ends.target.flush()
    ends.target.forget_kept()
    ends.settle()
    assert ends.reasons == [(pdu.REJECT_SNACK, 0)]
    head, behind, _ = next(each for each in ends.up.pdus if each[0][0] == bhs.SCSI_RESPONSE)
    response = pdu.ScsiResponse.unpack_from(head)
    assert (response.status, response.itt) == (2, 0)
    found = sense.decode(behind[2:])
    assert (found.key, found.code) == (sense.ABORTED_COMMAND, 0x4705)


def test_an_r2t_in_whose_place_another_has_come(ends: LossyEnds) -> None:
    """The target does not send it any more. A bidirectional task that has all of its data is not
    ended for that."""
    out, back = DATA[:20000], bytearray(100)
    answer = ends.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    ends.down_wire.fate = Once(DROP, bhs.R2T, 0, times=2)
    ends.up_wire.fate = lambda header: DROP if header[0] & 0x3F == bhs.SNACK_REQUEST else PASS
    sink = bytearray(len(out))
    ends.target.get_data(answer, memoryview(sink), 0)
    for _ in range(9):
        ends.target.tick()
        ends.settle()
    assert ends.down.filled == [answer] and sink == out
    ends.up_wire.fate = passing
    ends.answer(0, DATA[:100])
    assert not ends.responses()
    ends.tick(arrivals.PATIENCE)
    assert ends.reasons[0][0] == pdu.REJECT_PROTOCOL_ERROR
    assert ends.responses() == [0] and back == DATA[:100]
    (head,) = [head for head, _, _ in ends.up.pdus if head[0] == bhs.SCSI_RESPONSE]
    assert pdu.ScsiResponse.unpack_from(head).status == 0


# -- an initiator: statuses ------------------------------------------------------------------------


def test_a_status_that_does_not_come(ends: LossyEnds) -> None:
    """It is asked for a few times, then the connection is given up."""
    ends.down_wire.fate = Once(DROP, bhs.SCSI_RESPONSE, 0, lambda each: each[19] == 0, 1000)
    ends.read(0, 100)
    ends.read(1, 100)
    ends.respond(0, status=2)
    ends.respond(1, status=2)
    ends.settle()
    with pytest.raises(RemoteProtocolError, match="status"):
        ends.tick(arrivals.PATIENCE * (arrivals.MOST_ASKED + 1))
    assert not ends.responses()
    assert len(ends.snacks()) == 1 + arrivals.MOST_ASKED


def test_a_status_that_the_target_cannot_send_again(ends: LossyEnds) -> None:
    ends.down_wire.fate = Once(DROP, bhs.SCSI_RESPONSE, 0)
    ends.read(0, 100)
    ends.up_wire.fate = Once(DROP, bhs.SNACK_REQUEST, 0)
    ends.respond(0, status=2)
    ends.ping(77)
    ends.settle()
    assert len(ends.snacks()) == 1
    snack = pdu.SnackRequest(kind=pdu.SNACK_STATUS, exp_stat_sn=100, beg_run=100, run_length=1)
    ends.reject(snack.pack(), pdu.REJECT_SNACK)
    with pytest.raises(RemoteProtocolError, match="lost for good"):
        ends.settle()


def test_a_task_that_ends_while_its_status_waits(ends: LossyEnds) -> None:
    """Nothing of it comes up later, and the others go on."""
    ends.down_wire.fate = Once(DROP, bhs.DATA_IN, 1, times=1000)
    ends.read(0, SIZE)
    ends.read(1, 100)
    ends.answer(0, DATA)
    ends.respond(1, status=2)
    ends.settle()
    assert not ends.responses()
    ends.initiator.deallocate_task_resources(ends.slots[0], 0)
    ends.down_wire.fate = passing
    ends.tick(arrivals.PATIENCE)
    assert ends.responses() == [1]
    ends.acknowledge()
    ends.settle()
    assert ends.answers[0].busy == 0


# -- a target that lies ----------------------------------------------------------------------------


def _tell(ends: LossyEnds, unit: pdu.Pdu) -> None:
    """A PDU past the target, on its way."""
    ends.down_wire.send([unit.pack() + crc32c(unit.pack()).to_bytes(4, "little")], 52)


def _say(ends: LossyEnds, unit: pdu.Pdu) -> None:
    _tell(ends, unit)
    ends.settle()


def _data_in(data_sn: int, flags: int = 0, stat_sn: int = 0) -> pdu.DataIn:
    return pdu.DataIn(
        flags=flags,
        data_length=0,
        lun=bytes(8),
        itt=0,
        stat_sn=stat_sn,
        exp_cmd_sn=5,
        max_cmd_sn=50,
        data_sn=data_sn,
        buffer_offset=0,
    )


@pytest.mark.parametrize(
    "unit, words",
    [
        (_data_in(0xFFFFFFF0), "DataSN"),
        (_data_in(101), "DataSN"),
        (_data_in(0, 0x81, 100 + arrivals.MOST_PDUS + 1), "StatSN"),
        (
            pdu.ScsiResponse(
                status=0, itt=0, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50, exp_data_sn=0x7FFFFFFF
            ),
            "DataSN",
        ),
        (
            pdu.NopIn(itt=bhs.NO_TAG, stat_sn=9000, exp_cmd_sn=5, max_cmd_sn=50),
            "StatSN",
        ),
        (
            pdu.ReadyToTransfer(
                lun=bytes(8),
                itt=0,
                ttt=1,
                stat_sn=100,
                exp_cmd_sn=5,
                max_cmd_sn=50,
                r2t_sn=0,
                buffer_offset=0,
                desired_length=100,
            ),
            "no such write",
        ),
    ],
)
def test_numbers_that_cannot_be(ends: LossyEnds, unit: pdu.Pdu, words: str) -> None:
    """For a read of 100 bytes."""
    ends.read(0, 100)
    with pytest.raises(RemoteProtocolError, match=words):
        _say(ends, unit)


def _say_data(ends: LossyEnds, data_sn: int, at: int, size: int) -> None:
    """Data-In for a read of DATA, past the target."""
    unit = replace(_data_in(data_sn), data_length=size, buffer_offset=at).pack()
    data = DATA[at : at + size]
    whole = [unit, crc32c(unit).to_bytes(4, "little"), data, crc32c(data).to_bytes(4, "little")]
    ends.down_wire.send(list(whole), 0)
    ends.settle()


@pytest.mark.parametrize("at", [0, 4, 1020])
def test_bytes_that_have_come_before(ends: LossyEnds, at: int) -> None:
    """In a Data-In with a new number: they would make up for others that are missing."""
    ends.read(0, 4096)
    _say_data(ends, 0, 0, 1024)
    with pytest.raises(RemoteProtocolError, match="1024 came before"):
        _say_data(ends, 1, at, 1024)


@pytest.mark.parametrize("at", [0, 1020, 1540, 2048, 3000])
def test_a_missing_data_in_with_the_bytes_of_another(ends: LossyEnds, at: int) -> None:
    """Three are missing, of which the middle one has come again. Where the first has its bytes, or
    those of a later one, the read would count as whole without being that."""
    buffer = ends.read(0, 4096)
    _say_data(ends, 0, 0, 1024)
    _say_data(ends, 4, 3072, 1024)
    _say_data(ends, 2, 1536, 512)
    with pytest.raises(RemoteProtocolError, match="1024 up to 1536 are missing"):
        _say_data(ends, 1, at, 512)
    assert buffer[1024:1536] == bytes(512)


def test_missing_data_in_of_other_sizes(ends: LossyEnds) -> None:
    """They come in any order, each with bytes of its own: the read is whole."""
    buffer = ends.read(0, 4096)
    _say_data(ends, 0, 0, 1024)
    _say_data(ends, 4, 3072, 1024)
    _say_data(ends, 3, 2048, 1024)
    _say_data(ends, 1, 1024, 4)
    _say_data(ends, 2, 1028, 1020)
    assert buffer == DATA[:4096]


def test_a_tick_between_the_bytes_of_the_last_missing_data_in(ends: LossyEnds) -> None:
    """Its header has come, and so has the status: the read is not whole before all bytes have."""
    ends.up_wire.fate = lambda _: DROP
    buffer = ends.read(0, 4096)
    _say_data(ends, 0, 0, 1024)
    _say_data(ends, 2, 2048, 2048)
    _say(
        ends,
        pdu.ScsiResponse(status=0, itt=0, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50, exp_data_sn=3),
    )
    data = DATA[1024:2048]
    head = replace(_data_in(1), data_length=1024, buffer_offset=1024).pack()
    unit = head + crc32c(head).to_bytes(4, "little") + data + crc32c(data).to_bytes(4, "little")
    ends.down_wire.fate = None  # its bytes leave as they are
    ends.down_wire.send([unit[:600]], 600)
    ends.tick(arrivals.PATIENCE)
    assert not ends.responses()
    ends.down_wire.send([unit[600:]], len(unit) - 600)
    ends.settle()
    assert ends.responses() == [0] and buffer == DATA[:4096]


@pytest.mark.parametrize(
    ("flags", "residual", "missing"),
    [
        (bhs.RESIDUAL_UNDERFLOW, 3072, False),
        (bhs.RESIDUAL_UNDERFLOW, 3071, True),
        (bhs.RESIDUAL_OVERFLOW, 3072, True),
        (bhs.BIDI_UNDERFLOW, 3072, True),
        (0, 3072, True),
    ],
)
def test_what_a_response_reports_of_data_that_did_not_come(
    ends: LossyEnds, flags: int, residual: int, missing: bool
) -> None:
    """It does not say how many Data-In there were: what it does not report is asked for. Only an
    underflow reports anything."""
    ends.up_wire.fate = lambda _: DROP
    buffer = ends.read(0, 4096)
    _say_data(ends, 0, 0, 1024)
    _say(
        ends,
        pdu.ScsiResponse(
            flags=bhs.FLAG_FINAL | flags,
            residual=residual,
            bidi_residual=residual,
            status=0,
            itt=0,
            stat_sn=100,
            exp_cmd_sn=5,
            max_cmd_sn=50,
        ),
    )
    asked = [(each.itt, each.beg_run, each.run_length) for each in ends.snacks()]
    assert asked == [(0, 1, 0)] * missing
    assert ends.responses() == [0] * (not missing)
    if missing:
        _say_data(ends, 1, 1024, 3072)
        assert ends.responses() == [0] and buffer == DATA[:4096]


def test_more_is_lost_than_comes(ends: LossyEnds) -> None:
    """What is remembered of one task, and asked for, has a bound."""
    ends.read(0, 1 << 20)
    ends.up_wire.fate = lambda _: DROP
    with pytest.raises(RemoteProtocolError, match="more is lost"):
        for number in range(arrivals.MOST_RUNS + 1):
            _say(ends, _data_in(2 * number + 1))


def test_statuses_that_pile_up(ends: LossyEnds) -> None:
    """Behind one that does not come."""
    ends.read(0, 100)
    ends.up_wire.fate = lambda _: DROP
    with pytest.raises(RemoteProtocolError, match="StatSN"):
        for number in range(arrivals.MOST_PDUS + 1):
            _say(ends, pdu.NopIn(itt=5, stat_sn=101 + number, exp_cmd_sn=5, max_cmd_sn=50))
    assert not ends.up.pdus


def test_a_target_that_takes_no_snack(ends: LossyEnds) -> None:
    """And brings about one by each of its PDUs: what waits to leave has a bound."""
    ends.read(0, 100)
    ends.up_wire.send = lambda *_: -1  # type: ignore[method-assign]
    with pytest.raises(RemoteProtocolError, match="does not take our SNACKs"):
        for number in range(33 * arrivals.MOST_RUNS):
            _tell(ends, _data_in(number, flags=0x40))
            ends.initiator.progress(0.0)


def test_snacks_that_leave_are_not_counted(ends: LossyEnds) -> None:
    ends.read(0, 100)
    ends.up_wire.fate = lambda _: DROP
    for number in range(33 * arrivals.MOST_RUNS):
        _tell(ends, _data_in(number, flags=0x40))
        ends.initiator.progress(0.0)
        ends.initiator.flush()
    assert len(ends.snacks()) == 33 * arrivals.MOST_RUNS


# -- a target: Data-Out ----------------------------------------------------------------------------


@pytest.mark.parametrize("what", [DAMAGE, DROP])
@pytest.mark.parametrize("nth", range(3))
def test_a_lost_data_out(ends: LossyEnds, what: str, nth: int) -> None:
    """A recovery R2T asks for it, with the next R2TSN (7.8)."""
    ends.up_wire.fate = Once(what, bhs.DATA_OUT, nth, lambda header: header[20:24] != b"\xff" * 4)
    whole = _write(ends, 0, DATA)
    if what == DROP and nth == 2:  # the last of them
        assert not ends.down.filled
        ends.tick(8)
    assert whole[16384:] == DATA[16384:]
    assert ends.down.filled == [ends.answers[0]]
    r2ts = [
        pdu.ReadyToTransfer.unpack_from(each) for each in ends.down_wire.sent if each[0] == bhs.R2T
    ]
    assert r2ts[-1].r2t_sn == 1 and r2ts[-1].buffer_offset == 16384 + nth * SEGMENT
    assert len({each.ttt for each in r2ts}) == 2
    assert len(ends.down.discarded) == (what == DAMAGE)
    ends.respond(0)
    ends.settle()
    assert ends.responses() == [0]


def test_r2ts_behind_a_lost_one(ends: LossyEnds) -> None:
    """The initiator asks for those that its number shows to be missing. (What it has asked for
    before, without knowing that, is lost.)"""
    ends.down_wire.fate = Once(DROP, bhs.R2T, 0, times=2)
    ends.up_wire.fate = Once(DROP, bhs.SNACK_REQUEST, 0, times=2)
    whole = _write(ends, 0, DATA)
    ends.tick(6)
    assert whole[16384:] == DATA[16384:]
    kinds = [(each.kind, each.beg_run, each.run_length) for each in ends.snacks()]
    assert kinds == [(pdu.SNACK_DATA, 0, 0)] * 2 + [(pdu.SNACK_DATA, 0, 1)]


def _to_the_initiator(ends: LossyEnds, ticks: int) -> None:
    """Time at the initiator only: the target sends nothing again by itself."""
    for _ in range(ticks):
        ends.initiator.tick()
        ends.settle()


# shows: SYSTEM-40
@pytest.mark.parametrize("nth", [0, 1])
def test_a_lost_r2t_that_the_target_never_sends_again(ends: LossyEnds, nth: int) -> None:
    """The initiator asks for the one that it expects and all that follow (11.16); the target sends
    it as it was."""
    data = DATA * 3
    ends.down_wire.fate = Once(DROP, bhs.R2T, nth)
    whole = bytearray(len(data))
    ends.command(0, WRITE, memoryview(bytearray(data)))
    ends.settle()
    at = 16384
    for _ in range(nth + 1):
        size = min(len(data) - at, LEVEL_1.max_burst_length)
        ends.target.get_data(ends.answers[0], memoryview(whole)[at : at + size], at)
        ends.settle()
        at += size
    assert len(ends.down.filled) == nth
    _to_the_initiator(ends, arrivals.PATIENCE - 1)
    assert not ends.snacks()
    _to_the_initiator(ends, 1)
    (snack,) = ends.snacks()
    assert (snack.kind, snack.itt, snack.ttt) == (pdu.SNACK_DATA, 0, bhs.NO_TAG)
    assert (snack.beg_run, snack.run_length) == (nth, 0)
    assert len(ends.down.filled) == nth + 1 and whole[16384:at] == data[16384:at]
    r2ts = [each for each in ends.down_wire.sent if each[0] == bhs.R2T]
    assert len(r2ts) == nth + 2 and r2ts[-1] == r2ts[-2]
    assert not ends.reasons


def test_an_r2t_that_the_target_has_not_sent_yet(ends: LossyEnds) -> None:
    """It rejects what it is asked for (11.16), and is asked in pauses that grow, a few times; the
    write goes on when the R2T comes."""
    ends.command(0, WRITE, memoryview(bytearray(DATA)))
    ends.settle()
    asked_at = []
    for tick in range(500):
        before = len(ends.snacks())
        _to_the_initiator(ends, 1)
        asked_at += [tick + 1] * (len(ends.snacks()) - before)
    pauses = [later - earlier for earlier, later in pairwise(asked_at)]
    assert asked_at[0] == arrivals.PATIENCE and len(asked_at) == arrivals.MOST_ASKED
    assert pauses == [4, 8] + [16] * (arrivals.MOST_ASKED - 3)
    assert ends.reasons == [(pdu.REJECT_PROTOCOL_ERROR, 0)] * arrivals.MOST_ASKED
    whole = bytearray(SIZE)
    ends.target.get_data(ends.answers[0], memoryview(whole)[16384:], 16384)
    ends.settle()
    assert whole[16384:] == DATA[16384:]
    ends.respond(0)
    ends.settle()
    assert ends.responses() == [0]


def test_writes_that_wait_for_no_r2t(ends: LossyEnds) -> None:
    """One whose data has all been sent, unsolicited or asked for, waits for its response; and what
    has not left yet the target cannot be silent about. Nor is asked about a read, or about a
    bidirectional command: a Reject would count for its Data-In."""
    ends.command(0, WRITE, memoryview(bytearray(DATA[:16384])))
    _write(ends, 1, DATA)
    ends.read(2, SIZE)
    ends.commanded(3, BIDIRECTIONAL, memoryview(bytearray(DATA)), memoryview(bytearray(SIZE)))
    ends.command(4, WRITE, memoryview(bytearray(DATA)))
    ends.settle()
    ends.target.get_data(ends.answers[4], memoryview(bytearray(SIZE))[16384:24576], 16384)
    ends.target.flush()
    ends.up_wire.send = lambda *_: -1  # type: ignore[method-assign]
    ends.initiator.progress(0.0)
    for _ in range(4 * arrivals.PATIENCE):
        ends.initiator.tick()
        ends.initiator.flush()
    assert not ends.snacks()
    assert ends.initiator.losses.snacks == 0


def test_nothing_is_asked_for_at_level_0() -> None:
    plain = LossyEnds(replace(LEVEL_1, error_recovery_level=0))
    try:
        plain.command(0, WRITE, memoryview(bytearray(DATA)))
        plain.settle()
        _to_the_initiator(plain, 100)
        assert not plain.snacks()
    finally:
        plain.close()


def test_data_that_never_comes_through(ends: LossyEnds) -> None:
    ends.up_wire.fate = Once(
        DAMAGE, bhs.DATA_OUT, 0, lambda header: header[20:24] != b"\xff" * 4, 100000
    )
    with pytest.raises(RemoteProtocolError, match="does not come through"):
        _write(ends, 0, DATA)


# -- a target: what a SNACK may ask for ------------------------------------------------------------


def _ask(ends: LossyEnds, exp_stat_sn: int = 100, **fields: Any) -> tuple[int, int]:
    """Send a SNACK past the initiator; returns reason and DataSN of its Reject, or zeros."""
    slot = ends.slots[6]
    slot.direction = 0
    slot.bhs[:] = pdu.SnackRequest(exp_stat_sn=exp_stat_sn, **fields).pack()
    before = len(ends.reasons)
    ends.initiator.send_control(slot)
    ends.settle()
    return ends.reasons[-1] if len(ends.reasons) > before else (0, 0)


# shows: SYSTEM-40
@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"kind": pdu.SNACK_STATUS, "beg_run": 100, "run_length": 0}, (0, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 0, "run_length": 0}, (0, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 100, "run_length": 1}, (0, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 100, "run_length": 2}, (4, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 101, "run_length": 1}, (4, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 99, "run_length": 1}, (4, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 100, "run_length": 0xFFFFFFFF}, (4, 0)),
        ({"kind": pdu.SNACK_STATUS, "beg_run": 0x80000000, "run_length": 5}, (4, 0)),
        ({"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 0, "run_length": 0}, (0, 0)),
        ({"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 4, "run_length": 1}, (0, 0)),
        ({"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 4, "run_length": 2}, (4, 5)),
        ({"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 5, "run_length": 0}, (4, 5)),
        ({"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 0xFFFFFFFF, "run_length": 1}, (4, 5)),
        ({"kind": pdu.SNACK_DATA, "itt": 99, "beg_run": 0, "run_length": 0}, (4, 0)),
        ({"kind": pdu.SNACK_DATA_ACK, "ttt": 7, "beg_run": 5, "run_length": 0}, (8, 0)),
        ({"kind": pdu.SNACK_DATA_ACK, "beg_run": 5, "run_length": 0}, (8, 0)),
        ({"kind": pdu.SNACK_R_DATA, "itt": 0, "ttt": 5, "beg_run": 0, "run_length": 0}, (0, 0)),
        ({"kind": pdu.SNACK_R_DATA, "itt": 0, "ttt": 0, "beg_run": 0, "run_length": 0}, (9, 0)),
        ({"kind": pdu.SNACK_R_DATA, "itt": 0, "ttt": 5, "beg_run": 1, "run_length": 0}, (9, 0)),
        ({"kind": pdu.SNACK_R_DATA, "itt": 98, "ttt": 5, "beg_run": 0, "run_length": 0}, (4, 0)),
        ({"kind": 9, "itt": 0, "beg_run": 0, "run_length": 0}, (9, 0)),
    ],
)
def test_snacks(ends: LossyEnds, fields: dict[str, int], reason: tuple[int, int]) -> None:
    """What was not sent, or was acknowledged, is a protocol error (11.16), with the number of the
    next Data-In (11.17.2)."""
    ends.read(0, SIZE)
    ends.down_wire.fate = Once(DROP, bhs.DATA_IN, 0, times=1000)  # nothing is acknowledged
    ends.answer(0, DATA)
    assert _ask(ends, **fields) == reason


def test_snacks_for_what_was_acknowledged(ends: LossyEnds) -> None:
    ends.read(0, SIZE)
    ends.answer(0, DATA)
    ends.acknowledge()
    ends.settle()
    status = {"kind": pdu.SNACK_STATUS, "beg_run": 100, "run_length": 1}
    assert _ask(ends, **status) == (pdu.REJECT_PROTOCOL_ERROR, 0)
    data = {"kind": pdu.SNACK_DATA, "itt": 0, "beg_run": 0, "run_length": 0}
    assert _ask(ends, **data) == (pdu.REJECT_PROTOCOL_ERROR, 0)


def test_r_data(ends: LossyEnds) -> None:
    """Data-In in pieces of the present length, from DataSN 0 on; then a SCSI Response with the
    SNACK Tag and the StatSN that the status had (11.16.3)."""
    ends.read(0, SIZE)
    ends.down_wire.fate = Once(DROP, bhs.DATA_IN, 0, times=1000)
    ends.answer(0, DATA)
    ends.way.initiator_recv_data_segment_length = 20000
    del ends.down_wire.sent[:]
    assert _ask(ends, kind=pdu.SNACK_R_DATA, itt=0, ttt=0x77, beg_run=0, run_length=0) == (0, 0)
    *data, last = ends.down_wire.sent[:3]
    assert [
        (each.data_sn, each.data_length, each.flags & 1)
        for each in map(pdu.DataIn.unpack_from, data)
    ] == [(0, 20000, 0), (1, 20000, 0)]
    response = pdu.ScsiResponse.unpack_from(last)
    assert (response.opcode, response.snack_tag) == (bhs.SCSI_RESPONSE, 0x77)
    assert (response.stat_sn, response.exp_data_sn) == (100, 2)


def test_r_data_before_the_response(ends: LossyEnds) -> None:
    ends.read(0, SIZE)
    assert _ask(ends, kind=pdu.SNACK_R_DATA, itt=0, ttt=0x78, beg_run=0, run_length=0) == (0, 0)
    ends.answer(0, DATA)
    response = pdu.ScsiResponse.unpack_from(ends.down_wire.sent[-1])
    assert (response.opcode, response.snack_tag) == (bhs.SCSI_RESPONSE, 0x78)
    assert (response.exp_data_sn, ends.responses()) == (5, [0])


def test_a_flood_of_snacks(ends: LossyEnds) -> None:
    """An initiator that asks, and does not take the answers, is cut off."""
    ends.read(0, SIZE)
    ends.answer(0, DATA)
    snack = pdu.SnackRequest(kind=pdu.SNACK_DATA, itt=0, exp_stat_sn=100, beg_run=0, run_length=0)
    with pytest.raises(RemoteProtocolError, match="flood"):
        for _ in range(100):
            ends.target.retransmit(snack)


@pytest.mark.parametrize("kind, tag", [(pdu.SNACK_DATA, bhs.NO_TAG), (pdu.SNACK_R_DATA, 5)])
def test_snacks_for_many_pdus(ends: LossyEnds, kind: int, tag: int) -> None:
    """Each may ask for thousands: those that have not left have a bound of their own."""
    ends.way.initiator_recv_data_segment_length = 512
    ends.read(0, 1 << 20)
    ends.down_wire.fate = lambda _: DROP  # nothing is acknowledged
    ends.answer(0, bytes(1 << 20))
    snack = pdu.SnackRequest(kind=kind, itt=0, ttt=tag, exp_stat_sn=100, beg_run=0, run_length=0)
    ends.down_wire.sent.clear()
    with pytest.raises(RemoteProtocolError, match="flood"):
        for _ in range(40):
            ends.target.retransmit(snack)
    ends.settle()
    while ends.target.wants_write():  # what one turn does not send
        ends.settle()
    assert 1 << 16 <= len(ends.down_wire.sent) <= (1 << 16) + 2048 + 32
    assert ends.target.retransmit(snack) == (0, 0)


# -- the bound of what is kept ---------------------------------------------------------------------


def test_the_oldest_reads_are_kept() -> None:
    store = kept.Kept(0)
    for sn in range(kept.MOST_READS + 5):
        pdu_kept = kept.KeptPdu(bytes((bhs.SCSI_RESPONSE,)) + bytes(47), b"", sn, bytes(8))
        if store.fits(4096):
            pdu_kept.data = memoryview(bytes(4096))
        store.add(sn, pdu_kept)
    assert store.reads == kept.MOST_READS and store.presses
    assert [each.itt for each in store.all() if each.data is not None] == list(
        range(kept.MOST_READS)
    )
    gone = store.acknowledge(3)
    assert [each.itt for each in gone] == [0, 1, 2]
    for each in gone:
        store.let_go(each)
    assert store.reads == kept.MOST_READS - 3 and store.oldest == 3


def test_the_oldest_statuses_are_kept() -> None:
    store = kept.Kept(0)
    for sn in range(kept.MOST_PDUS + 10):
        store.add(sn, kept.KeptPdu(bytes(48), b"", sn, b""))
        surplus = store.surplus()
        assert (surplus is not None) == (sn >= kept.MOST_PDUS)
    assert store.statuses(0, kept.MOST_PDUS - 1, sn + 1) != pdu.REJECT_SNACK
    assert store.statuses(kept.MOST_PDUS, 2, sn + 1) == pdu.REJECT_SNACK


@pytest.mark.plain("the bound is a constant of the compiled form")
def test_more_reads_ask_for_acknowledgements(ends: LossyEnds, monkeypatch: Any) -> None:
    """From half of the bound on, each by its A bit; so the memory comes back."""
    monkeypatch.setattr(kept, "MOST_READS", 6)
    for index in range(6):
        ends.read(index, 100)
        ends.answer(index, DATA[:100])
    # The fourth asks; its SNACK acknowledges by its ExpStatSN those before it, too.
    assert [each.kind for each in ends.snacks()] == [pdu.SNACK_DATA_ACK]
    assert [answer.busy for answer in ends.answers[:6]] == [0, 0, 0, 0, 1, 1]


def test_what_a_terminated_connection_has_kept_is_nobody_s(ends: LossyEnds) -> None:
    """Its slots may have another task by the time at which memory is short."""
    ends.read(0, SIZE)
    ends.answer(0, DATA)
    slot = ends.answers[0]
    busy, sent = slot.busy, len(ends.down.sent)
    assert busy  # its data is kept
    ends.target.connection_terminate()
    ends.target.forget_kept()
    assert (slot.busy, len(ends.down.sent), ends.target.kept_bytes) == (busy, sent, 0)
