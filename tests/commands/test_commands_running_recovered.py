"""CHECK CONDITION with RECOVERED ERROR or NO SENSE: the command was carried out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from iserblk.commands.running import command
from iserblk.errors import IserblkError, ScsiError
from iserblk.scsi import cdb
from iserblk.scsi import sense as sense_data
from tests.disk.durability.test_promise import BLOCK, Bench
from tests.initiator.fake import CountingWaiter
from tests.support import logs

pytestmark = [pytest.mark.logs(logs.CARRIED_OUT), pytest.mark.usefixtures("clock")]

# FAILURE PREDICTION THRESHOLD EXCEEDED, in both formats, and "no sense" with nothing to add.
CARRIED_OUT = [
    sense_data.encode_fixed(sense_data.RECOVERED_ERROR, 0x5D, 0x00),
    sense_data.encode_descriptor(sense_data.RECOVERED_ERROR, 0x5D, 0x00),
    sense_data.encode_fixed(sense_data.NO_SENSE, 0x00, 0x00),
]
POWER_ON = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0x00)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.peer.close()


@pytest.mark.parametrize("sense", CARRIED_OUT, ids=["fixed", "descriptor", "no sense"])
@pytest.mark.parametrize("way", ["write", "fast write", "flush", "read", "fast read", "zero"])
def test_every_way_succeeds(
    bench: Bench, way: str, sense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    disk = bench.disk
    waiter = CountingWaiter()
    buffer = memoryview(bytearray(512))
    if way == "fast write":
        slot = disk.begin_write(BLOCK, 0, waiter)
        assert slot is not None
        bench.answer(sense)
        assert disk.ended_write(slot) is None
    elif way == "fast read":
        slot = disk.begin_read(buffer, 0, waiter)
        assert slot is not None
        bench.answer(sense)
        assert disk.ended(slot) is None
    else:
        operation = {  # type: ignore[no-untyped-call]
            "write": lambda: disk.write(BLOCK, 0),
            "flush": disk.flush,
            "read": lambda: disk.read(buffer, 0),
            "zero": lambda: disk.zero(0, 512, False, False, False),
        }[way]()
        bench.end(bench.begin(operation), sense)
    assert len(bench.peer.heard) == 1  # nothing was sent again
    assert str(sense_data.decode(sense)) in caplog.text
    assert bench.session.queue.busy == 0


@pytest.mark.parametrize("fast", [True, False])
def test_the_write_is_in_the_journal(bench: Bench, fast: bool) -> None:
    disk = bench.disk
    disk.keep_journal(1 << 20)
    journal = disk.durability.journal
    assert journal is not None
    if fast:
        slot = disk.begin_write(BLOCK, 512, CountingWaiter())
        assert slot is not None
        bench.answer(CARRIED_OUT[0])
        assert disk.ended_write(slot) is None
    else:
        bench.end(bench.begin(disk.write(BLOCK, 512)), CARRIED_OUT[0])
    (entry,) = journal.begin_replay()
    assert (entry.first, entry.last) == (1, 1)
    journal.end_replay()


def test_what_was_not_moved_is_still_an_error(bench: Bench) -> None:
    operation = bench.begin(bench.disk.read(memoryview(bytearray(1024)), 0))
    (heard,) = bench.heard()
    bench.peer.respond(heard, status=2, sense=CARRIED_OUT[0], flags=0x82, residual=512)
    bench.session.progress(1.0)
    with pytest.raises(ScsiError, match="of 1024 bytes moved 512"):
        next(operation)


@pytest.mark.parametrize("sense", CARRIED_OUT, ids=["fixed", "descriptor", "no sense"])
def test_a_question_is_answered(bench: Bench, sense: bytes) -> None:
    """A command that identifies a LUN succeeds as well, though no listener has that LUN."""
    answer = memoryview(bytearray(8))
    asked = command(
        bench.session, bytes((0, 9)) + bytes(6), cdb.read_capacity10(), "lun9", data_in=answer
    )
    bench.end(bench.begin(asked), sense)


@pytest.mark.parametrize(
    "sense",
    [
        b"",  # no sense data
        b"\x70\0",  # the sense key is cut off
        bytes((0x70, 0, 0x20)) + bytes(15),  # NO SENSE with ILI
        bytes(18),  # no known format
        bytes((0x7F, 0, 0)) + bytes(15),  # vendor specific format
    ],
    ids=["none", "cut", "ili", "zero", "vendor"],
)
def test_what_does_not_say_so_is_no_success(bench: Bench, sense: bytes) -> None:
    operation = bench.begin(bench.disk.write(BLOCK, 0))
    (heard,) = bench.heard()
    bench.peer.respond(heard, status=2, sense=sense)
    bench.session.progress(1.0)
    with pytest.raises(IserblkError):
        next(operation)
