"""Which errors a command is sent again for, and for how long."""

from __future__ import annotations

import pytest

from iserblk.commands.running import ATTEMPTS, command
from iserblk.errors import ScsiError
from iserblk.scsi import cdb, status
from iserblk.scsi.sense import (
    ABORTED_COMMAND,
    NOT_READY,
    RECOVERED_ERROR,
    UNIT_ATTENTION,
    encode_fixed,
)
from tests.disk.fake_lun import FakeLun, FakeLuns, finish
from tests.disk.fake_target import LUN, FakeSession, FakeTarget, disk, run

# Additional sense codes of states that end by themselves, and of states that do not, or that
# destroy the data.
SOON = [0x01, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0A, 0x0E, 0x11, 0x13, 0x14, 0x1A, 0x1C, 0x1D]
NOT_SOON = [0x00, 0x02, 0x03, 0x04, 0x0B, 0x0C, 0x12, 0x16, 0x1B, 0x1E, 0x20, 0x22, 0x24]
PATIENCE = {f"04/{ascq:02x}": encode_fixed(NOT_READY, 0x04, ascq) for ascq in SOON}


def ask(session: FakeLuns) -> list[float]:
    """Run TEST UNIT READY to its end; the pauses that it made, in seconds."""
    steps = command(session, LUN, cdb.test_unit_ready(), "lun0")  # type: ignore[arg-type]
    return finish(steps)[1]


@pytest.mark.parametrize("error", [status.BUSY, status.TASK_SET_FULL, *PATIENCE.values()], ids=str)
def test_what_ends_by_itself_is_waited_for(error: bytes | int) -> None:
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": [error] * 100}))
    pauses = ask(session)
    assert len(session.asked) == 101 and len(pauses) == 100
    assert 0 < pauses[0] < 0.1 and pauses[-1] == 1.0
    assert pauses[1:] == [min(2 * pause, 1.0) for pause in pauses[:-1]]
    assert session.shrunk == (100 if isinstance(error, int) else 0)


@pytest.mark.parametrize("error", [status.BUSY, status.TASK_SET_FULL, PATIENCE["04/01"]], ids=str)
def test_until_the_deadline(error: bytes | int) -> None:
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": error}))
    session.io_timeout = 0.5
    with pytest.raises(ScsiError):
        ask(session)
    assert len(session.asked) > 1 and session.queue.busy == 0


@pytest.mark.parametrize("ascq", NOT_SOON)
def test_what_does_not_end_by_itself_is_an_error(ascq: int) -> None:
    error = encode_fixed(NOT_READY, 0x04, ascq)
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": [error]}))
    with pytest.raises(ScsiError):
        ask(session)
    assert len(session.asked) == 1


@pytest.mark.parametrize(
    "error",
    [encode_fixed(UNIT_ATTENTION, 0x3F, 0x03), encode_fixed(ABORTED_COMMAND, 0x47, 0x00)],
)
def test_what_need_not_end_is_tried_a_few_times(error: bytes) -> None:
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": error}))
    with pytest.raises(ScsiError):
        ask(session)
    assert len(session.asked) == ATTEMPTS + 1


RESET = encode_fixed(UNIT_ATTENTION, 0x29, 0x00)


@pytest.mark.parametrize("error", [status.BUSY, status.TASK_SET_FULL, *PATIENCE.values()], ids=str)
def test_what_was_waited_for_leaves_the_tries(error: bytes | int) -> None:
    """An array that starts says BUSY for a while, and then that it was reset."""
    errors: list[bytes | int] = [*[error] * (ATTEMPTS + 2), *[RESET] * ATTEMPTS, error]
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": errors.copy()}))
    ask(session)
    assert len(session.asked) == len(errors) + 1


def test_waits_give_no_tries_back() -> None:
    """A LUN that is BUSY now and then is not tried for ever."""
    errors: list[bytes | int] = [RESET, status.BUSY] * (ATTEMPTS + 2)
    session = FakeLuns(FakeLun(errors={"TEST UNIT READY": errors}))
    with pytest.raises(ScsiError, match="29/00"):
        ask(session)
    assert len(session.asked) == 2 * ATTEMPTS + 1


def test_a_recovered_error_is_not_asked_again() -> None:
    session = FakeLuns(
        FakeLun(errors={"TEST UNIT READY": [encode_fixed(RECOVERED_ERROR, 0x5D, 0)]})
    )
    assert ask(session) == [] and len(session.asked) == 1


@pytest.mark.parametrize("refusal", [status.BUSY, status.TASK_SET_FULL])
def test_a_full_target_gets_less_at_once(refusal: int) -> None:
    """The target refuses 12 of 16 commands of one write: no error, and the session counts each."""
    session, target = FakeSession(), FakeTarget(64)
    core = disk(session, 64, max_transfer=512)
    write = core.write(memoryview(b"W" * 16 * 512), 0)
    next(write)
    assert len(session.flight) == 16
    for slot in session.flight[4:]:
        session.end(slot, status=refusal)
    run(write, session, target)
    assert session.shrunk == 12 and session.queue.busy == 0
    assert all(target.block(lba) == b"W" * 512 for lba in range(16))


def test_the_fast_way_tells_of_it_too() -> None:
    session = FakeSession()
    core = disk(session, 64)
    waiter = session.new_waiter()
    slot = core.begin_read(memoryview(bytearray(512)), 0, waiter)
    assert slot is not None
    session.end(slot, status=status.TASK_SET_FULL)
    assert core.ended(slot) is not None  # a pause: the general path sends it again
    assert session.shrunk == 1
