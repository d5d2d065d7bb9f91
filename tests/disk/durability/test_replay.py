"""Sending the journal again: the order, the sizes of commands, and what each error leads to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from iserblk.disk.durability.replay import replay
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import CommandTimeout, ConnectionLost, IserblkError, ScsiError
from iserblk.initiator.commands import PARALLEL
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi import opcodes
from iserblk.scsi.sense import NOT_READY, encode_fixed
from tests.disk import fake_target
from tests.disk.fake_target import BLOCK, LUN, MEDIUM_ERROR, POWER_ON, FakeSession, FakeTarget
from tests.support import logs

BLOCKS = 256
STANDBY = encode_fixed(NOT_READY, 0x04, 0x0B)
Answer = Callable[[TaskSlot], None]


def blocks_of(slot: TaskSlot) -> tuple[int, int]:
    """(first block, blocks) of a WRITE (16)."""
    return int.from_bytes(slot.cdb[2:10], "big"), int.from_bytes(slot.cdb[10:14], "big")


class Bench:
    """A disk whose journal holds what was written, and a fresh session to send it on. ``rounds``:
    the commands that were in flight at once."""

    def __init__(self, max_transfer: int = 8 * BLOCK) -> None:
        self.session = FakeSession()
        self.target = FakeTarget(BLOCKS)
        self.core: DiskCore = fake_target.disk(self.session, BLOCKS, max_transfer)
        self.core.keep_journal(1 << 20)
        self.fresh = FakeSession()
        self.rounds: list[list[TaskSlot]] = []

    def write(self, first: int, blocks: int, byte: int) -> None:
        data = memoryview(bytes((byte,)) * blocks * BLOCK)
        fake_target.run(self.core.write(data, first * BLOCK), self.session, self.target)

    def lose(self) -> None:
        self.session.suspend()
        self.target.cached.clear()
        self.core.durability.replay_needed = True

    def answered(self, slot: TaskSlot) -> None:
        self.target.execute(slot)
        self.fresh.end(slot)

    def replay(self, answer: Answer | None = None) -> list[float]:
        """Returns the pauses. The newest command is answered first."""
        core = self.core
        steps = replay(self.fresh, LUN, core.info, core.durability, core.pack_write)  # type: ignore[arg-type]
        pauses: list[float] = []
        try:
            for step in steps:
                if isinstance(step, float):
                    pauses.append(step)
                    continue
                self.rounds.append(list(self.fresh.flight))
                while step.pending:
                    (answer or self.answered)(self.fresh.flight[-1])
        finally:
            assert self.fresh.busy == 0 and not self.fresh.flight
        return pauses

    @property
    def sizes(self) -> list[int]:
        return [len(each) for each in self.rounds]


def test_nothing_is_sent_where_nothing_was_lost() -> None:
    bench = Bench()
    bench.write(0, 1, 1)
    bench.replay()
    assert not bench.rounds


def test_the_journal_is_written_again_and_stays() -> None:
    """A flush must still cover it: the target may lose its cache once more."""
    bench = Bench()
    bench.write(3, 2, 7)
    for _ in range(2):
        bench.lose()
        bench.replay()
        assert not bench.core.durability.replay_needed
        assert [bench.target.block(at)[:1] for at in range(2, 6)] == [b"\0", b"\7", b"\7", b"\0"]
    journal = bench.core.durability.journal
    assert journal is not None and journal.size == 2 * BLOCK


def test_changes_of_the_same_blocks_keep_their_order() -> None:
    """Commands that are in flight at once have no block in common."""
    bench = Bench()
    for byte, (first, blocks) in enumerate([(0, 4), (8, 1), (3, 2), (4, 1), (20, 1)], 1):
        bench.write(first, blocks, byte)
    bench.lose()
    bench.replay()
    assert bench.sizes == [2, 1, 2]
    content = [bench.target.block(at)[0] for at in range(9)]
    assert content == [1, 1, 1, 3, 4, 0, 0, 0, 2]


def test_only_so_many_are_in_flight_at_once() -> None:
    bench = Bench()
    for at in range(2 * PARALLEL + 1):
        bench.write(2 * at, 1, 1)
    bench.lose()
    bench.replay()
    assert bench.sizes == [PARALLEL, PARALLEL, 1]


def test_commands_are_no_larger_than_the_lun_takes_now() -> None:
    """The limit may be lower on the new connection than it was when the data was written."""
    bench = Bench(8 * BLOCK)
    bench.write(10, 8, 5)
    bench.core.info = fake_target.disk(FakeSession(), BLOCKS, 3 * BLOCK).info
    bench.lose()
    cdbs: list[tuple[int, int]] = []

    def answer(slot: TaskSlot) -> None:
        cdbs.append(blocks_of(slot))
        bench.answered(slot)

    bench.replay(answer)
    assert sorted(cdbs) == [(10, 3), (13, 3), (16, 2)]
    assert all(bench.target.block(at)[0] == 5 for at in range(10, 18))
    assert not any(bench.target.block(9) + bench.target.block(18))


def test_a_trim_is_sent_again_though_tgtd_reports_a_residual() -> None:
    bench = Bench()
    bench.write(0, 4, 1)
    bench.session.residual_of_unmap = bench.fresh.residual_of_unmap = True
    fake_target.run(bench.core.trim(0, 2 * BLOCK), bench.session, bench.target)
    bench.lose()
    bench.target.executed.clear()
    bench.replay()
    assert bench.target.executed == [opcodes.WRITE_16, opcodes.UNMAP]
    assert [bench.target.block(at)[0] for at in range(4)] == [0, 0, 1, 1]


@pytest.mark.logs(logs.LOST_WRITES)
def test_a_refused_change_is_given_up_and_told_by_the_next_flush() -> None:
    bench = Bench()
    for at in (0, 2):
        bench.write(at, 1, 9)
    bench.lose()

    def answer(slot: TaskSlot) -> None:
        if blocks_of(slot) == (0, 1):
            bench.fresh.end(slot, sense=MEDIUM_ERROR)
        else:
            bench.answered(slot)

    bench.replay(answer)
    assert not bench.core.durability.replay_needed
    assert (bench.target.block(0)[0], bench.target.block(2)[0]) == (0, 9)
    bench.session.resume()
    with pytest.raises(IserblkError, match="lost"):
        fake_target.run(bench.core.flush(), bench.session, bench.target)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ({"error": ConnectionLost("gone")}, ConnectionLost),
        ({"sense": STANDBY}, ScsiError),  # the port's state, not the LUN's
        ({"error": CommandTimeout("late")}, CommandTimeout),
    ],
)
def test_what_the_next_connection_may_do_better_is_kept(
    end: dict[str, IserblkError], kind: type[IserblkError]
) -> None:
    bench = Bench()
    bench.write(0, 1, 9)
    bench.lose()
    with pytest.raises(kind):
        bench.replay(lambda slot: bench.fresh.end(slot, **end))  # type: ignore[arg-type]
    assert bench.core.durability.replay_needed
    bench.replay()
    assert bench.target.block(0)[0] == 9 and not bench.core.durability.replay_needed


def test_a_busy_target_is_waited_for() -> None:
    bench = Bench()
    bench.write(0, 1, 9)
    bench.lose()
    answers = iter([8, 0x28, 0])

    def answer(slot: TaskSlot) -> None:
        status = next(answers)
        if status:
            bench.fresh.end(slot, status=status)
        else:
            bench.answered(slot)

    pauses = bench.replay(answer)
    assert len(pauses) == 2 and 0 < pauses[0] < pauses[1]
    assert bench.target.block(0)[0] == 9
    assert bench.fresh.shrunk == 2


@pytest.mark.logs(logs.LOST_POWER)
def test_another_loss_during_the_replay_begins_it_again() -> None:
    """What was sent before the loss may be gone."""
    bench = Bench()
    for at in (0, 2):
        bench.write(at, 1, 9)
    bench.lose()
    bench.core.listen_resuming(bench.fresh)  # type: ignore[arg-type]
    reports = iter([True])

    def answer(slot: TaskSlot) -> None:
        if next(reports, False):
            bench.target.cached.clear()
            bench.fresh.end(slot, sense=POWER_ON)
        else:
            bench.answered(slot)

    bench.core.durability.wrote()
    bench.replay(answer)
    assert not bench.core.durability.replay_needed
    assert (bench.target.block(0)[0], bench.target.block(2)[0]) == (9, 9)
    assert len(bench.rounds) > 2
