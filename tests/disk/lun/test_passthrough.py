"""Commands whose CDB the caller has made: what is refused, and what is passed on as it came."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from iserblk.commands.command import Unanswered
from iserblk.disk.lun.passthrough import MOST_DATA, check_cdb, send
from iserblk.disk.seam import CommandResult
from iserblk.errors import BadArgument, CommandTimeout, NotSupported
from iserblk.scsi import cdb, opcodes, sense, status
from tests.disk.fake_lun import FakeLun, FakeLuns, finish, known
from tests.disk.fake_target import BLOCK, FakeSession, FakeTarget, reconnect, run
from tests.disk.fake_target import disk as a_disk
from tests.support import logs

INQUIRY = bytes((0x12, 0, 0, 0, 255, 0))
LATER = sense.encode_fixed(sense.UNIT_ATTENTION, 0x2A, 0x09)


def answered(session: FakeLuns, block: bytes, data_in: Any = None, data_out: Any = None) -> Any:
    session.asked.clear()
    return finish(send(known_once(session), block, data_in, data_out, None))


def known_once(session: FakeLuns) -> Any:
    disk = known(session)
    session.asked.clear()
    return disk


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (b"", "an empty CDB"),
        (INQUIRY[:5], r"INQUIRY: its CDB has 6 bytes, not 5 \(operation code 0x12\)"),
        (INQUIRY + bytes(4), "INQUIRY: its CDB has 6 bytes, not 10"),
        (bytes((0x28,)) + bytes(8), r"READ\(10\): its CDB has 10 bytes, not 9"),
        (bytes((0x5A,)) + bytes(15), r"MODE SENSE\(10\): its CDB has 10 bytes, not 16"),
        (bytes((0x88,)) + bytes(9), r"READ\(16\): its CDB has 16 bytes, not 10"),
        (bytes((0xA0,)) + bytes(15), "REPORT LUNS: its CDB has 12 bytes, not 16"),
    ],
)
def test_cdbs_of_a_wrong_length(block: bytes, words: str) -> None:
    """Raise before anything is sent."""
    session = FakeLuns()
    with pytest.raises(BadArgument, match=words):
        answered(session, block)
    assert session.asked == [] and session.queue.busy == 0


def test_cdbs_of_other_groups() -> None:
    """Vendors' commands may have any length that fits; longer ones would need an AHS."""
    for length in (6, 10, 12, 16):
        for opcode in (0x7E, 0xC1, 0xFF):
            check_cdb(bytes((opcode,)) + bytes(length - 1))
    with pytest.raises(NotSupported, match="of 32 bytes: at most 16"):
        check_cdb(bytes((0x7F,)) + bytes(31))


@pytest.mark.parametrize(
    ("data_in", "data_out", "words"),
    [
        (bytes(36), None, "data_in: the buffer must be writable: give a bytearray"),
        (memoryview(bytearray(72))[::2], None, "data_in: the buffer must be contiguous"),
        (None, memoryview(bytes(72))[::2], "data_out: the buffer must be contiguous"),
        (bytearray(MOST_DATA + 1), None, "data_in: 1048577 bytes: one command moves at most"),
        (None, bytes(MOST_DATA + 1), "data_out: 1048577 bytes: one command moves at most"),
    ],
)
def test_buffers_that_cannot_be_used(data_in: Any, data_out: Any, words: str) -> None:
    session = FakeLuns()
    with pytest.raises(BadArgument, match=words):
        answered(session, INQUIRY, data_in, data_out)
    assert session.asked == [] and session.queue.busy == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_no_time(seconds: float) -> None:
    session = FakeLuns()
    with pytest.raises(BadArgument, match="give seconds"):
        finish(send(known_once(session), INQUIRY, None, None, seconds))
    assert session.asked == []


def test_a_timeout_names_the_callers_own_time() -> None:
    """The session's words are of io-timeout, which is not what ended the command."""
    session = FakeSession()
    core = a_disk(session, 8)
    asked = send(core, cdb.test_unit_ready(), None, None, 0.5)
    next(asked)
    aborted = CommandTimeout("portal: it did not end within 30 s; raise io-timeout")
    session.end(session.flight[0], error=aborted)
    with pytest.raises(CommandTimeout, match=r"TEST UNIT READY: not done within timeout_s=0\.5"):
        next(asked)
    asked = send(core, cdb.test_unit_ready(), None, None, None)
    next(asked)
    session.end(session.flight[0], error=aborted)
    with pytest.raises(CommandTimeout, match="within 30 s; raise io-timeout"):
        next(asked)
    assert session.busy == 0


def test_a_command_that_was_left_unanswered() -> None:
    """It is sent again if it changes nothing. What may have been carried out is not: the caller
    hears of it."""
    session = FakeSession()
    core = a_disk(session, 8)
    asked = send(core, cdb.test_unit_ready(), None, None, None)
    for _ in range(2):
        next(asked)
        session.end(session.flight[0], error=Unanswered("aborted"))
    next(asked)
    session.end(session.flight[0])
    with pytest.raises(StopIteration):
        next(asked)
    block = bytes((opcodes.COMPARE_AND_WRITE, *bytes(12), 1, 0, 0))
    asked = send(core, block, None, bytes(1024), None)
    next(asked)
    session.end(session.flight[0], error=Unanswered("aborted"))
    with pytest.raises(CommandTimeout, match="aborted"):
        next(asked)
    assert session.flight == [] and session.busy == 0


FLUSH = cdb.synchronize_cache16(0, 0)
THROUGH = cdb.RW16.pack(opcodes.WRITE_16, cdb.FUA, 4, 1, 0, 0)


@pytest.mark.logs(logs.LOST_WRITES, logs.LOST_POWER)
@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(
    ("how", "doubts", "told"),
    [
        ("late", True, True),
        ("left unanswered", True, True),
        ("given up", True, True),
        ("ended by another initiator", True, False),
        ("never sent", False, False),
        ("failed with nothing to flush", False, False),
    ],
)
def test_a_flush_of_the_callers_own_may_have_brought_the_only_report(
    how: str, doubts: bool, told: bool, journal: bool
) -> None:
    """Of what the disk has written: its own flush behind that would succeed."""
    session = FakeSession()
    core = a_disk(session, 8)
    if journal:
        core.keep_journal(1 << 20)
    if how != "failed with nothing to flush":
        run(core.write(memoryview(bytes(BLOCK)), 0), session, FakeTarget(8))
    session.suspended = how == "never sent"
    asked = send(core, FLUSH, None, None, None)
    next(asked)
    if how == "ended by another initiator":
        session.end(session.flight[0], status=status.TASK_ABORTED)
        with pytest.raises(StopIteration):
            next(asked)
    else:
        error = Unanswered if how == "left unanswered" else CommandTimeout
        session.end(session.flight[0], error=error("aborted"))
        if how == "given up":
            asked.close()
        elif how == "left unanswered":
            next(asked)  # it was sent again
        else:
            with pytest.raises(CommandTimeout):
                next(asked)
    assert core.durability.doubted is (doubts and journal)
    assert core.durability.losses.count == (told and not journal)


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("unflushed", [True, False])
def test_a_write_with_fua_of_the_callers_own_is_in_doubt_as_one_of_the_disk(
    unflushed: bool,
) -> None:
    """Without a journal no flush comes before it."""
    session = FakeSession()
    core = a_disk(session, 8)
    if unflushed:
        run(core.write(memoryview(bytes(BLOCK)), 0), session, FakeTarget(8))
    asked = send(core, THROUGH, None, bytes(BLOCK), None)
    next(asked)
    session.end(session.flight[0], error=CommandTimeout("aborted"))
    with pytest.raises(CommandTimeout):
        next(asked)
    assert core.durability.losses.count == unflushed


def test_what_is_unflushed_is_flushed_before_a_write_of_the_callers_own() -> None:
    """A replay would put it over that write, which the journal does not get."""
    session, target = FakeSession(), FakeTarget(4)
    core = a_disk(session, 4)
    core.keep_journal(1 << 20)
    own = bytearray(16)
    cdb.pack_write16(own, 0, 1, 0)
    for unflushed in (True, False):
        if unflushed:
            run(core.write(memoryview(b"\1" * BLOCK), 0), session, target)
        target.executed.clear()
        run(send(core, bytes(own), None, b"\2" * BLOCK, None), session, target)
        flushed = [opcodes.SYNCHRONIZE_CACHE_16] * unflushed
        assert target.executed == [*flushed, opcodes.WRITE_16]
        journal = core.durability.journal
        assert journal is not None and not journal.size


def test_what_is_unflushed_is_flushed_before_a_request_sense() -> None:
    """It takes a report away: nothing may be left that the target could say it has lost."""
    session, target = FakeSession(), FakeTarget(4)
    core = a_disk(session, 4)
    run(core.write(memoryview(bytes(BLOCK)), 0), session, target)
    asking = send(core, bytes((opcodes.REQUEST_SENSE, 0, 0, 0, 252, 0)), bytearray(252), None, None)
    next(asking)
    for operation in (opcodes.SYNCHRONIZE_CACHE_16, opcodes.REQUEST_SENSE):
        (slot,) = session.flight
        assert slot.cdb[0] == operation
        session.end(slot)
        with suppress(StopIteration):
            next(asking)
    assert not session.flight and session.busy == 0


def test_what_a_target_shows_that_has_lost_its_cache_is_read_again() -> None:
    """By a READ of the caller's own, too: behind the replay."""
    session, target = FakeSession(), FakeTarget(4)
    core = a_disk(session, 4)
    core.keep_journal(1 << 20)
    run(core.write(memoryview(b"\1" * BLOCK), 0), session, target)
    own, into = bytearray(16), bytearray(BLOCK)
    cdb.pack_read16(own, 0, 1, 0)
    reading = send(core, bytes(own), into, None, None)
    next(reading)
    target.cached.clear()
    target.answer(session, session.flight[0])
    reconnect(core, target)  # the answer was taken in, and nobody has looked yet
    run(reading, session, target)
    assert into == b"\1" * BLOCK


def test_the_answer_is_the_result() -> None:
    session = FakeLuns()
    buffer = bytearray(255)
    result, pauses = answered(session, INQUIRY, buffer)
    assert result == (status.GOOD, b"", 255 - 96, 0) and pauses == []
    assert buffer[8:14] == b"Vendor" and str(result) == "GOOD"
    assert session.asked == [(0, "INQUIRY")] and session.queue.busy == 0
    buffer.clear()  # BufferError while a view of it is left


def test_an_empty_buffer_is_none() -> None:
    session = FakeLuns()
    assert answered(session, cdb.test_unit_ready(), bytearray(), b"")[0] == (status.GOOD, b"", 0, 0)


@pytest.mark.parametrize(
    "error",
    [
        status.BUSY,
        status.TASK_SET_FULL,
        status.RESERVATION_CONFLICT,
        LATER,
        sense.encode_fixed(sense.ABORTED_COMMAND, 0, 0),
        sense.encode_descriptor(sense.ILLEGAL_REQUEST, 0x24, 0, field=1, bit=2),
    ],
    ids=str,
)
def test_no_status_has_it_sent_again(error: int | bytes) -> None:
    session = FakeLuns(FakeLun())
    disk = known_once(session)
    session.luns[0].errors["TEST UNIT READY"] = [error]
    result, pauses = finish(send(disk, cdb.test_unit_ready(), None, None, None))
    assert session.asked == [(0, "TEST UNIT READY")] and pauses == []
    if isinstance(error, int):
        assert result == (error, b"", 0, 0)
    else:
        assert result == (status.CHECK_CONDITION, error, 0, 0)
        assert result.decoded == sense.decode(error)
        assert str(result) == f"CHECK CONDITION: {sense.decode(error)}"


def test_those_that_change_nothing() -> None:
    """None of them has Data-Out of its own making, and none is a WRITE of any kind."""
    changing = {
        *(opcodes.WRITE_6, opcodes.WRITE_10, opcodes.WRITE_12, opcodes.WRITE_16),
        *(opcodes.WRITE_AND_VERIFY_10, opcodes.WRITE_AND_VERIFY_12, opcodes.WRITE_AND_VERIFY_16),
        *(opcodes.WRITE_SAME_10, opcodes.WRITE_SAME_16, opcodes.UNMAP, opcodes.FORMAT_UNIT),
        *(opcodes.MODE_SELECT_6, opcodes.MODE_SELECT_10, opcodes.PERSISTENT_RESERVE_OUT),
        *(opcodes.COMPARE_AND_WRITE, opcodes.XDWRITEREAD_10, opcodes.EXTENDED_COPY),
        *(opcodes.START_STOP_UNIT, opcodes.MAINTENANCE_OUT, opcodes.REQUEST_SENSE),
        *(opcodes.RESERVE_6, opcodes.RELEASE_6, opcodes.SEND_DIAGNOSTIC),
    }
    assert not changing & opcodes.CHANGE_NOTHING


def test_results_in_words() -> None:
    assert str(CommandResult(status.BUSY, b"", 512)) == "BUSY"
    assert CommandResult(status.GOOD, b"", 0).decoded.key == 0
