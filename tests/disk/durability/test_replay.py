"""Sending the journal again: the order, the sizes of commands, and what each error leads to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from time import monotonic

import pytest

from iserblk.commands.command import Command, Operation
from iserblk.commands.running import PARALLEL
from iserblk.disk.durability.replay import replay
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.lun.passthrough import send
from iserblk.errors import CommandTimeout, ConnectionLost, IserblkError, ScsiError
from iserblk.scsi import cdb, opcodes
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import UNMAP
from iserblk.scsi.sense import ILLEGAL_REQUEST, NOT_READY, encode_fixed
from tests.disk import fake_target
from tests.disk.fake_target import BLOCK, LUN, MEDIUM_ERROR, POWER_ON, FakeSession, FakeTarget
from tests.initiator.fake import CountingWaiter
from tests.support import logs

BLOCKS = 256
UNKNOWN = encode_fixed(ILLEGAL_REQUEST, 0x20, 0x00)
INVALID = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
PARAMETER = encode_fixed(ILLEGAL_REQUEST, 0x26, 0x00)
STANDBY = encode_fixed(NOT_READY, 0x04, 0x0B)
Answer = Callable[[Command], None]


def blocks_of(slot: Command) -> tuple[int, int]:
    """(first block, blocks) of a WRITE (16)."""
    return int.from_bytes(slot.cdb[2:10], "big"), int.from_bytes(slot.cdb[10:14], "big")


class Bench:
    """A disk whose journal holds what was written, and a fresh session to send it on. ``rounds``:
    the commands that were in flight at once. ``sent``: (operation, first block, blocks)."""

    def __init__(self, max_transfer: int = 8 * BLOCK) -> None:
        self.session = FakeSession()
        self.target = FakeTarget(BLOCKS)
        self.core: DiskCore = fake_target.disk(self.session, BLOCKS, max_transfer)
        self.core.keep_journal(1 << 20)
        self.fresh = FakeSession()
        self.rounds: list[list[Command]] = []
        self.sent: list[tuple[int, int, int]] = []

    def write(self, first: int, blocks: int, byte: int) -> None:
        """Each block begins with ``byte`` and its own number."""
        data = b"".join(bytes((byte, at)) * (BLOCK // 2) for at in range(first, first + blocks))
        operation = self.core.write(memoryview(data), first * BLOCK)
        fake_target.run(operation, self.session, self.target)

    def is_refused(self, operation: int = opcodes.WRITE_16, on_fresh: bool = False) -> None:
        """A command of ours hears that another host has reserved the LUN."""
        session = self.fresh if on_fresh else self.session
        slot = session.take_now()
        assert slot is not None
        slot.lun, slot.waiter = LUN, CountingWaiter()
        slot.cdb[0] = operation
        session.submit(slot)
        session.end(slot, status=sam.RESERVATION_CONFLICT)
        session.release(slot)

    def lose(self) -> None:
        self.session.suspend()
        self.target.cached.clear()
        self.core.durability.replay_needed = True

    def answered(self, slot: Command) -> None:
        self.target.execute(slot)
        self.fresh.end(slot)

    def replay(self, answer: Answer | None = None) -> list[float]:
        """Returns the pauses. The newest command is answered first."""
        core = self.core
        steps = replay(
            self.fresh,  # type: ignore[arg-type]
            LUN,
            core.info,
            core.geometry,
            core.durability,
            core.pack_write,
            core.pack_read,
        )
        pauses: list[float] = []
        try:
            for step in steps:
                if isinstance(step, float):
                    pauses.append(step)
                    continue
                self.rounds.append(list(self.fresh.flight))
                self.sent += [(slot.cdb[0], *blocks_of(slot)) for slot in self.fresh.flight]
                while step.pending:
                    (answer or self.answered)(self.fresh.flight[-1])
        finally:
            assert self.fresh.busy == 0 and not self.fresh.flight
        for at, content in self.target.cached.items():
            assert content[1] == at or not any(content), "the data of another block"
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


def test_of_each_block_the_newest_content_is_sent() -> None:
    bench = Bench()
    for byte, (first, blocks) in enumerate([(0, 4), (8, 1), (3, 2), (4, 1), (20, 1)], 1):
        bench.write(first, blocks, byte)
    bench.lose()
    bench.replay()
    assert [blocks_of(slot) for (*batch,) in bench.rounds for slot in batch] == [
        (0, 3), (8, 1), (3, 1), (4, 1), (20, 1)
    ]  # fmt: skip
    content = [bench.target.block(at)[0] for at in range(9)]
    assert content == [1, 1, 1, 3, 4, 0, 0, 0, 2]


def test_an_unmap_and_changes_of_its_blocks_keep_their_order() -> None:
    """Commands that are in flight at once have no block in common."""
    bench = Bench()
    bench.write(0, 8, 1)
    trim(bench, 2, 4)
    bench.write(3, 1, 2)
    bench.lose()
    kinds: list[int] = []

    def answer(slot: Command) -> None:
        kinds.append(slot.cdb[0])
        bench.answered(slot)

    bench.replay(answer)
    assert bench.sizes == [2, 3]
    write, unmap = opcodes.WRITE_16, opcodes.UNMAP
    assert kinds == [write, write, write, unmap, unmap]  # the newest of a batch is answered first
    assert [bench.target.block(at)[0] for at in range(8)] == [1, 1, 0, 2, 0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_what_the_lun_has_still_is_never_changed(seed: int) -> None:
    """Not for a moment: another host may read it, or shut this one out before the rest is sent."""
    chance = Random(seed)
    bench = Bench(32 * BLOCK)
    for byte in range(1, 40):
        first, blocks = chance.randrange(64), chance.randint(1, 32)
        if chance.random() < 0.2:
            zero(bench, first, blocks, may_trim=chance.random() < 0.5)
        else:
            bench.write(first, blocks, byte)
    before = [bytes(bench.target.block(at)) for at in range(96)]
    bench.core.durability.replay_needed = True
    bench.session.suspend()
    sent: list[int] = []

    def answer(slot: Command) -> None:
        first, blocks = blocks_of(slot)
        sent.extend(range(first, first + blocks))
        bench.answered(slot)
        assert [bytes(bench.target.block(at)) for at in range(96)] == before

    bench.replay(answer)
    assert len(sent) == len(set(sent))
    written = {at for at in range(96) if any(before[at])}
    assert written <= set(sent)


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

    def answer(slot: Command) -> None:
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


def zero(bench: Bench, first: int, blocks: int, may_trim: bool = True) -> None:
    steps = bench.core.zero(first * BLOCK, blocks * BLOCK, may_trim, False, False)
    fake_target.run(steps, bench.session, bench.target)


def trim(bench: Bench, first: int, blocks: int) -> None:
    fake_target.run(bench.core.trim(first * BLOCK, blocks * BLOCK), bench.session, bench.target)


def refusing(bench: Bench, refusal: Callable[[Command], bytes]) -> Answer:
    def answer(slot: Command) -> None:
        sense = refusal(slot)
        if not sense:
            bench.target.execute(slot)
        bench.fresh.end(slot, sense=sense)

    return answer


def unmapped(slot: Command) -> int:
    assert slot.data is not None
    return int.from_bytes(slot.data[16:20], "big")


def test_unmap_and_write_same_are_no_larger_than_the_lun_takes_now() -> None:
    bench = Bench()
    bench.write(0, 8, 1)
    zero(bench, 0, 100)
    bench.write(90, 8, 2)
    trim(bench, 95, 100)
    bench.lose()
    bench.core.geometry.max_write_same_blocks = 30
    bench.core.geometry.max_unmap_blocks = 40
    sent: list[tuple[int, int]] = []

    def refusal(slot: Command) -> bytes:
        count = unmapped(slot) if slot.cdb[0] == opcodes.UNMAP else blocks_of(slot)[1]
        sent.append((slot.cdb[0], count))
        most = {opcodes.UNMAP: 40, opcodes.WRITE_SAME_16: 30, opcodes.WRITE_16: 8}[slot.cdb[0]]
        return INVALID if count > most else b""

    bench.replay(refusing(bench, refusal))
    assert [count for kind, count in sent if kind == opcodes.UNMAP] == [20, 40, 40]
    assert sorted(n for kind, n in sent if kind == opcodes.WRITE_SAME_16) == [2, 30, 30, 30]
    assert [bench.target.block(at)[0] for at in (0, 89, 90, 94, 95, 194)] == [0, 0, 2, 2, 0, 0]


@pytest.mark.parametrize("may_trim", [False, True])
def test_what_was_deallocated_is_so_again(may_trim: bool) -> None:
    """Also where a part of it was written since."""
    bench = Bench()
    zero(bench, 0, 8, may_trim)
    bench.write(3, 1, 1)
    bench.lose()
    bench.replay()
    found = {blocks_of(slot): slot.cdb[1] & UNMAP for (*batch,) in bench.rounds for slot in batch}
    deallocates = UNMAP if may_trim else 0
    assert found == {(0, 3): deallocates, (3, 1): 0, (4, 4): deallocates}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("may_trim", [False, True])
def test_zeroes_are_written_where_write_same_is_not_known_any_more(
    told: bool, may_trim: bool
) -> None:
    """They must read as zeroes, deallocated or not; and order with other changes is kept."""
    bench = Bench()
    bench.write(0, 200, 1)
    zero(bench, 3, 150, may_trim)
    bench.write(100, 2, 2)
    bench.lose()
    if told:
        bench.core.info = replace(bench.core.info, can_zero=False)
    same: list[Command] = []

    def refusal(slot: Command) -> bytes:
        if slot.cdb[0] != opcodes.WRITE_SAME_16:
            assert blocks_of(slot)[1] <= 8  # no more than one transfer
            return b""
        same.append(slot)
        return UNKNOWN

    bench.replay(refusing(bench, refusal))
    assert len(same) == (0 if told else 2)  # it is in two parts, which are sent at once
    content = [bench.target.block(at)[0] for at in range(200)]
    assert content == [1] * 3 + [0] * 97 + [2] * 2 + [0] * 51 + [1] * 47
    assert not bench.core.durability.replay_needed


@pytest.mark.parametrize("most", [0, 1, 160])
@pytest.mark.parametrize("ndob", [False, True])
def test_write_same_in_the_form_that_is_taken(most: int, ndob: bool) -> None:
    """With data, or shorter, or else written."""
    bench = Bench()
    bench.write(0, 200, 1)
    zero(bench, 0, 200)
    bench.lose()

    def refusal(slot: Command) -> bytes:
        if slot.cdb[0] != opcodes.WRITE_SAME_16:
            return b""
        if slot.data is None and not ndob:
            return fake_target.MEDIUM_ERROR  # as tgtd, which waits for the data
        return INVALID if blocks_of(slot)[1] > most else b""

    bench.replay(refusing(bench, refusal))
    assert not any(bench.target.block(at)[0] for at in range(200))


@pytest.mark.parametrize("sense", [UNKNOWN, INVALID, PARAMETER])
def test_an_unmap_that_is_refused_is_left_out(sense: bytes) -> None:
    """What was trimmed has no content that could be lost. What was written behind it has."""
    bench = Bench()
    bench.write(0, 4, 1)
    trim(bench, 0, 4)
    bench.write(1, 1, 2)
    bench.lose()
    refusal = refusing(bench, lambda slot: sense if slot.cdb[0] == opcodes.UNMAP else b"")
    bench.replay(refusal)
    assert bench.target.block(1)[0] == 2
    bench.session.resume()
    fake_target.run(bench.core.flush(), bench.session, bench.target)  # nothing is lost


@pytest.mark.parametrize("most", [1, 3, 5])
def test_writes_that_are_too_long_now_are_sent_in_shorter_ones(most: int) -> None:
    """Also where the LUN does not say so."""
    bench = Bench()
    for byte, (first, blocks) in enumerate([(0, 8), (20, 8), (4, 8)], 1):
        bench.write(first, blocks, byte)
    bench.lose()

    def refusal(slot: Command) -> bytes:
        return INVALID if blocks_of(slot)[1] > most else b""

    bench.replay(refusing(bench, refusal))
    assert [bench.target.block(at)[0] for at in range(30)] == (
        [1] * 4 + [3] * 8 + [0] * 8 + [2] * 8 + [0] * 2
    )
    bench.session.resume()
    fake_target.run(bench.core.flush(), bench.session, bench.target)


@pytest.mark.logs(logs.LOST_WRITES)
def test_a_write_of_one_block_that_is_refused_is_lost_and_told() -> None:
    bench = Bench()
    bench.write(0, 4, 1)
    bench.lose()
    bench.replay(refusing(bench, lambda slot: INVALID))
    bench.session.resume()
    with pytest.raises(IserblkError, match="lost"):
        fake_target.run(bench.core.flush(), bench.session, bench.target)


@pytest.mark.logs(logs.LOST_WRITES)
def test_a_refused_change_is_given_up_and_told_by_the_next_flush() -> None:
    bench = Bench()
    for at in (0, 2):
        bench.write(at, 1, 9)
    bench.lose()

    def answer(slot: Command) -> None:
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

    def answer(slot: Command) -> None:
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

    def answer(slot: Command) -> None:
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


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("how", ["reserved", "failed", "refused"])
def test_what_was_refused_is_not_sent_again(how: str) -> None:
    """It was told. Where another host has reserved the LUN, nothing is: that host may have written
    anywhere since, and have gone."""
    reserved = how == "reserved"
    bench = Bench()
    bench.write(0, 4, 1)
    bench.write(1, 2, 2)
    bench.write(8, 2, 3)

    def answer(slot: Command) -> None:
        if blocks_of(slot)[0] == 8:
            bench.answered(slot)
        elif reserved:
            bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT)
        else:  # (What is refused is tried in shorter writes, down to one block.)
            bench.fresh.end(slot, sense=MEDIUM_ERROR if how == "failed" else INVALID)

    bench.lose()
    bench.replay(answer)
    assert bench.core.durability.losses.count > 0
    bench.session.resume()
    bench.write(3, 1, 9)
    bench.lose()
    bench.rounds.clear()
    bench.replay()
    sent = [(3, 1)] if reserved else [(3, 1), (8, 2)]
    assert sorted(blocks_of(slot) for each in bench.rounds for slot in each) == sent


@pytest.mark.logs(logs.LOST_WRITES)
def test_nothing_more_is_sent_where_another_host_has_reserved_the_lun() -> None:
    """It may have let go of it meanwhile."""
    bench = Bench(max_transfer=BLOCK)
    bench.write(0, 2 * PARALLEL, 1)
    bench.lose()
    bench.replay(lambda slot: bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT))
    assert bench.sizes == [PARALLEL]
    assert not bench.core.durability.replay_needed


@pytest.mark.logs(logs.LOST_WRITES)
def test_a_connection_that_is_lost_behind_a_refusal() -> None:
    """What had been taken before is not sent on the next one, either."""
    bench = Bench(max_transfer=BLOCK)
    bench.write(0, 4, 1)
    bench.lose()

    def answer(slot: Command) -> None:
        first = len(bench.fresh.flight) == 4
        if first:
            bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT)
        else:
            bench.fresh.end(slot, error=ConnectionLost("gone"))

    with pytest.raises(ConnectionLost):
        bench.replay(answer)
    bench.rounds.clear()
    bench.replay()
    assert not bench.rounds and bench.core.durability.losses.count == 1


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("status", [sam.BUSY, sam.TASK_ABORTED])
def test_nothing_is_tried_again_behind_a_reservation(status: int) -> None:
    """That host may have written, and have let go of the LUN, while the target was waited for."""
    bench = Bench(max_transfer=BLOCK)
    bench.write(0, 4, 1)
    bench.lose()

    def answer(slot: Command) -> None:
        refused = blocks_of(slot)[0] % 2
        bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT if refused else status)

    pauses = bench.replay(answer)
    assert bench.sizes == [4] and not pauses
    assert not bench.core.durability.replay_needed
    bench.lose()
    bench.replay()
    assert bench.sizes == [4] and bench.core.durability.losses.count > 0


@pytest.mark.logs(logs.LOST_WRITES)
def test_nothing_that_waits_for_a_slot_is_sent_behind_a_reservation() -> None:
    bench = Bench(max_transfer=BLOCK)
    bench.fresh = FakeSession(depth=2)
    bench.write(0, 4, 1)
    bench.lose()
    bench.replay(lambda slot: bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT))
    assert bench.sizes == [2]


def test_what_is_older_than_a_reservation_is_compared() -> None:
    """Another host may have written since. What was written behind that is sent again."""
    bench = Bench()
    bench.write(0, 4, 1)
    bench.is_refused()
    bench.write(2, 1, 2)
    bench.session.suspend()
    bench.core.durability.replay_needed = True
    bench.replay()
    read, write = opcodes.READ_16, opcodes.WRITE_16
    assert bench.sent == [(read, 0, 2), (read, 3, 1), (write, 2, 1)]
    assert not bench.core.durability.replay_needed and not bench.core.durability.losses.count
    # It is kept until a flush.
    bench.session.resume()
    fake_target.run(bench.core.flush(), bench.session, bench.target)
    bench.rounds.clear()
    bench.core.durability.replay_needed = True
    bench.replay()
    assert not bench.rounds


def test_a_reservation_that_is_heard_of_on_the_fresh_connection_counts() -> None:
    """By a command that looks at the LUN; the host may be gone when the journal's turn comes."""
    bench = Bench()
    bench.write(0, 4, 1)
    bench.session.suspend()
    bench.core.durability.replay_needed = True
    bench.core.listen_resuming(bench.fresh)  # type: ignore[arg-type]
    bench.is_refused(opcodes.MODE_SENSE_6, on_fresh=True)
    bench.replay()
    assert bench.sent == [(opcodes.READ_16, 0, 4)]


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("wrote", [True, False])
def test_what_another_host_has_written_stays(wrote: bool) -> None:
    """A reservation was heard of before the connection was lost. The loss is told, once."""
    bench = Bench()
    bench.write(0, 4, 1)
    bench.is_refused()
    if wrote:
        bench.target.cached[1] = bytes((7, 1)) * (BLOCK // 2)
        bench.session.suspend()
        bench.core.durability.replay_needed = True
    else:
        bench.lose()
    before = [bytes(bench.target.block(at)) for at in range(8)]
    bench.replay()
    assert [bytes(bench.target.block(at)) for at in range(8)] == before
    assert bench.core.durability.losses.count == 1
    bench.lose()
    bench.rounds.clear()
    bench.replay()
    assert not bench.rounds and bench.core.durability.losses.count == 1
    bench.session.resume()
    with pytest.raises(IserblkError, match="lost"):
        fake_target.run(bench.core.flush(), bench.session, bench.target)
    fake_target.run(bench.core.flush(), bench.session, bench.target)


@pytest.mark.parametrize("begins", ["before all", "behind the loss"])
def test_a_flush_of_which_no_answer_is_lost_leaves_the_comparison_its_proof(begins: str) -> None:
    """It had ended before, or was never sent on the connection that is lost."""
    bench = Bench()
    durability = bench.core.durability
    if begins == "before all":
        token = durability.begin_flush()
        durability.reinstated(monotonic())  # with nothing unflushed
        durability.end_flush(token, False)
    bench.write(0, 1, 1)
    bench.is_refused()
    since = monotonic()
    if begins == "behind the loss":
        durability.begin_flush()
        since -= 1.0
    bench.session.suspend()
    durability.reinstated(since)
    bench.replay()
    assert bench.sent == [(opcodes.READ_16, 0, 1)] and not durability.losses.count


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("leaves", [True, False])
def test_what_is_newer_is_compared_where_another_host_reserves_the_lun_once_more(
    leaves: bool,
) -> None:
    """While the older is compared. What that host writes then stays, also when it has gone."""
    bench = Bench()
    bench.write(0, 1, 1)
    bench.is_refused()
    bench.write(5, 2, 2)
    bench.session.suspend()
    durability = bench.core.durability
    durability.replay_needed = True
    bench.core.listen_resuming(bench.fresh)  # type: ignore[arg-type]
    reserved = iter([True] if leaves else [True, True])

    def answer(slot: Command) -> None:
        if next(reserved, False):
            bench.target.cached[6] = bytes((7, 6)) * (BLOCK // 2)
            bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT)
        else:
            bench.answered(slot)

    bench.replay(answer)
    assert bench.sent == [(opcodes.READ_16, 0, 1), (opcodes.READ_16, 5, 2)]
    assert bench.target.block(6)[0] == 7
    assert not durability.replay_needed and durability.losses.count == 2
    durability.replay_needed = True
    bench.replay()
    assert len(bench.sent) == 2 and durability.losses.count == 2


@pytest.mark.logs(logs.LOST_WRITES)
def test_a_shared_lun_that_another_host_has_reserved_is_compared_once() -> None:
    """Also what is in the journal still when its caller has yet to look."""
    bench = Bench()
    bench.core.keep_journal(1 << 20, shared=True)
    slot = bench.core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
    assert slot is not None
    bench.target.answer(bench.session, slot)
    bench.lose()
    bench.core.listen_resuming(bench.fresh)  # type: ignore[arg-type]
    bench.replay(lambda slot: bench.fresh.end(slot, status=sam.RESERVATION_CONFLICT))
    assert bench.sent == [(opcodes.READ_16, 0, 1)]
    assert not bench.core.durability.replay_needed and bench.core.durability.losses.count == 1


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("flush", ["answered", "in flight", "never sent"])
def test_a_flush_whose_answer_is_lost_leaves_no_proof_of_a_shared_lun(flush: str) -> None:
    """It may have brought the only report; and the target goes on showing what it could not write,
    and lets the next flush succeed. The loss is told once."""
    bench = Bench()
    bench.core.keep_journal(1 << 20, shared=True)
    durability = bench.core.durability
    bench.write(0, 2, 1)
    if flush == "answered":
        fake_target.run(bench.core.flush(), bench.session, bench.target)
        bench.write(0, 2, 1)
    since = monotonic()
    flushing = bench.core.flush()
    if flush == "in flight":
        next(flushing)
        since = monotonic()
    bench.session.suspend()
    if flush == "never sent":
        next(flushing)
    for _ in range(2):
        durability.reinstated(since)
        bench.replay()
        assert not durability.replay_needed
    assert durability.losses.count == (flush == "in flight")
    assert opcodes.WRITE_16 not in {operation for operation, _, _ in bench.sent}
    bench.session.resume()
    if flush == "in flight":
        with pytest.raises(IserblkError, match="lost"):
            fake_target.run(flushing, bench.session, bench.target)
        flushing = bench.core.flush()
    fake_target.run(flushing, bench.session, bench.target)


@pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("end", ["answered", "in flight", "never sent"])
@pytest.mark.parametrize("what", ["write with FUA", "command"])
def test_what_waits_for_the_medium_as_a_flush_does_leaves_no_proof_either(
    what: str, end: str, shared: bool
) -> None:
    """A WRITE with FUA, or the SYNCHRONIZE CACHE of a program: targets call fsync for them, too.
    (Not shared: what is older than another host's reservation.) To what was never sent there is no
    answer."""
    bench = Bench()
    bench.core.keep_journal(1 << 20, shared=shared)
    durability = bench.core.durability
    core, session = bench.core, bench.session
    waits: Operation[object]
    if what == "command":
        waits = send(core, cdb.synchronize_cache16(0, 0), None, None, None)
    else:
        waits = core.write(memoryview(bytes(BLOCK)), 8 * BLOCK, fua=True)
    session.suspended = end == "never sent"  # while it is submitted, as where its turn comes late
    next(waits)
    session.suspended = False
    slot = core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
    assert slot is not None
    bench.target.answer(session, slot)
    assert core.ended_write(slot) is None
    if end == "answered":
        fake_target.run(waits, session, bench.target)
        slot = core.begin_write(memoryview(bytes(BLOCK)), 0, CountingWaiter())
        assert slot is not None
        bench.target.answer(session, slot)
        assert core.ended_write(slot) is None
    if not shared:
        bench.is_refused()
    session.suspend()
    durability.reinstated(monotonic())
    bench.replay()
    assert durability.losses.count == (end == "in flight")


@pytest.mark.parametrize("operation", [opcodes.PERSISTENT_RESERVE_OUT, opcodes.RESERVE_6])
def test_a_key_that_is_refused_tells_of_no_other_host(operation: int) -> None:
    bench = Bench()
    bench.write(0, 4, 1)
    bench.is_refused(operation)
    bench.lose()
    bench.replay()
    assert bench.sent == [(opcodes.WRITE_16, 0, 4)]


@pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES)
@pytest.mark.parametrize(
    "how", ["failed", "aborted", "aborted, and lost", "lost", "lost once more"]
)
def test_what_a_flush_has_lost_is_not_proved_by_what_is_older_than_a_reservation(how: str) -> None:
    """A target may show what it could not write: what may not be sent again is lost. The rest is
    sent again."""
    bench = Bench()
    bench.write(0, 2, 1)
    bench.is_refused()
    bench.write(4, 2, 2)
    durability = bench.core.durability
    if how == "failed":
        bench.target.refusal = lambda slot: (
            MEDIUM_ERROR if slot.cdb[0] == opcodes.SYNCHRONIZE_CACHE_16 else b""
        )
        with pytest.raises(ScsiError):
            fake_target.run(bench.core.flush(), bench.session, bench.target)
    else:
        token = durability.begin_flush()
        if how == "lost once more":  # the connection that is to take the place of the first
            durability.reinstated(0.0)
        if how.startswith("aborted") or how == "lost once more":
            durability.doubt(None, "may have failed a flush", True)
            durability.end_flush(token, False)
        if how == "aborted":
            assert durability.renew()
        else:
            durability.reinstated(monotonic())
    assert durability.replay_needed and not durability.losses.untold
    bench.session.suspend()
    bench.replay()
    assert bench.sent == [(opcodes.WRITE_16, 4, 2)]
    assert not durability.replay_needed and durability.losses.count == 1
    # The next one is compared again.
    bench.write(8, 1, 3)
    bench.is_refused()
    durability.replay_needed = True
    bench.sent.clear()
    bench.replay()
    assert bench.sent == [(opcodes.READ_16, 8, 1), (opcodes.READ_16, 4, 2)]
    assert durability.losses.count == 1
