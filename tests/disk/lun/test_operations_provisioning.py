"""Trim and zero of large ranges: many commands, a few at once, and what time they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from iserblk.commands.command import Operation
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import CommandTimeout, IserblkError
from iserblk.scsi import opcodes
from iserblk.scsi.sense import ILLEGAL_REQUEST, encode_fixed
from tests.disk import fake_target
from tests.disk.fake_target import BLOCK, FakeSession, FakeTarget, disk
from tests.support import clocks

BLOCKS = 2048
EACH = 8  # blocks that one command may have
COMMANDS = BLOCKS // EACH


class Slow:
    """A LUN that carries out one command after the other, each of which takes ``seconds`` of a
    clock that is only moved by that. What is not done at its deadline is aborted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now = 1000.0
        self.seconds = seconds
        self.most = 0  # in flight at once
        self.answers: Callable[[int], bytes] = lambda number: b""
        self.ended = 0
        clocks.give(monkeypatch, lambda: self.now)
        self.session = FakeSession()
        self.session.io_timeout = 5.0
        self.target = FakeTarget(BLOCKS)
        self.core: DiskCore = disk(self.session, BLOCKS)
        self.core.geometry.max_unmap_blocks = EACH
        self.core.geometry.max_write_same_blocks = EACH

    def run(self, operation: Operation[None]) -> None:
        for step in operation:
            while not isinstance(step, float) and step.pending:
                self.most = max(self.most, len(self.session.flight))
                self.end_oldest()

    def end_oldest(self) -> None:
        slot = self.session.flight[0]
        self.now += self.seconds
        if self.now >= slot.deadline:
            self.session.end(slot, error=CommandTimeout("aborted"))
            return
        sense = self.answers(self.ended)
        self.ended += 1
        if not sense:
            self.target.execute(slot)
        self.session.end(slot, sense=sense)


def operation(slow: Slow, what: str, patient: bool) -> Operation[None]:
    if what == "trim":
        return slow.core.trim(0, BLOCKS * BLOCK, False, patient)
    return slow.core.zero(0, BLOCKS * BLOCK, False, False, False, patient)


@pytest.mark.parametrize("seconds", [0.001, 0.1, 0.5, 3.0])
@pytest.mark.parametrize("what", ["trim", "zero"])
def test_a_patient_request_goes_on_as_long_as_it_gets_on(
    monkeypatch: pytest.MonkeyPatch, what: str, seconds: float
) -> None:
    slow = Slow(monkeypatch, seconds)
    slow.target.stable = [b"x" * BLOCK] * BLOCKS
    slow.run(operation(slow, what, patient=True))
    assert all(slow.target.block(lba) == bytes(BLOCK) for lba in range(BLOCKS))
    assert slow.ended == COMMANDS
    assert slow.session.queue.busy == 0
    # Several at once, and as few as the LUN has time for.
    assert slow.most == {0.001: 16, 0.1: 8, 0.5: 2, 3.0: 1}[seconds]


@pytest.mark.parametrize("what", ["trim", "zero"])
def test_any_other_has_one_deadline(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A front-end needs the bound where its own client repeats requests that take too long."""
    slow = Slow(monkeypatch, 0.1)
    with pytest.raises(CommandTimeout):
        slow.run(operation(slow, what, patient=False))
    assert slow.now <= 1000.0 + slow.session.io_timeout + 16 * slow.seconds
    assert slow.session.queue.busy == 0


def test_a_command_that_takes_too_long_ends_a_patient_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch, 6.0)
    with pytest.raises(CommandTimeout):
        slow.run(operation(slow, "trim", patient=True))


def test_a_lun_that_wants_data_with_write_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command finds out, alone; not many commands at once."""
    slow = Slow(monkeypatch, 0.001)
    refusal = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
    slow.answers = lambda number: refusal if number == 0 else b""
    slow.target.stable = [b"x" * BLOCK] * BLOCKS
    slow.run(operation(slow, "zero", patient=False))
    assert slow.ended == COMMANDS + 1
    assert all(slow.target.block(lba) == bytes(BLOCK) for lba in range(BLOCKS))


def test_the_journal_is_flushed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal holds each command, and stays within its bound, with room for those in flight."""
    slow = Slow(monkeypatch, 0.001)
    slow.core.keep_journal(4096)
    journal = slow.core.durability.journal
    assert journal is not None
    sizes: list[int] = []
    for step in slow.core.trim(0, BLOCKS * BLOCK):
        while not isinstance(step, float) and step.pending:
            sizes.append(journal.size)
            slow.end_oldest()
    assert max(sizes) <= 4096 + 16 * 128
    assert opcodes.SYNCHRONIZE_CACHE_16 in slow.target.executed


def test_a_write_into_the_range_waits_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, 0.001)
    trim = slow.core.trim(0, 4 * EACH * BLOCK)
    step = next(trim)  # the first command, alone
    slow.end_oldest()
    step = next(trim)
    assert not isinstance(step, float) and len(slow.session.flight) == 2
    write = slow.core.write(memoryview(b"W" * BLOCK), EACH * BLOCK)
    next(write)
    assert len(slow.session.flight) == 2  # the write is not sent
    slow.run(trim)
    slow.run(write)
    assert slow.target.block(EACH) == b"W" * BLOCK


def test_the_first_error_ends_it_when_all_in_flight_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Slow(monkeypatch, 0.001)
    slow.answers = lambda number: fake_target.MEDIUM_ERROR if number == 4 else b""
    with pytest.raises(IserblkError):
        slow.run(operation(slow, "trim", patient=True))
    assert slow.ended == 7  # 1 and 2 and 4
    assert slow.session.queue.busy == 0 and not slow.session.flight
