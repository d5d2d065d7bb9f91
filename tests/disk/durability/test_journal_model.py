"""Random writes, answers, errors, flushes and losses, against what each block may hold.

The cache may turn volatile in the midst of it. What is lost then of writes that were under way need
not be made good, but told: no flush succeeds before one, or a write that needs one, has failed.

Another way of keeping changes must do as well as the journal in memory: the disk knows no more of
it than ``disk.durability.seam`` says.

The steps come from a seed: it takes many in a row to get anywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from iserblk.commands.command import Command, Operation
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import IserblkError
from iserblk.scsi import opcodes
from iserblk.scsi.sense import ILLEGAL_REQUEST, encode_fixed
from tests.disk.durability.list_journal import ListJournal
from tests.disk.fake_target import (
    BLOCK,
    MEDIUM_ERROR,
    MODE_CHANGED,
    NOT_READY,
    POWER_ON,
    RECOVERED,
    FakeSession,
    FakeTarget,
    disk,
    reconnect,
)
from tests.initiator.fake import CountingWaiter
from tests.support import logs

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.LOST_WRITES, logs.REFUSED)
UNKNOWN = encode_fixed(ILLEGAL_REQUEST, 0x20, 0x00)
INVALID = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)

BLOCKS = 6
HEAD = 16  # bytes of a buffer in front of the data


@dataclass
class Change:
    """One write, trim or zero. ``began`` and ``ended``: moments; ``content``: of each block."""

    first: int
    blocks: int
    content: bytes
    began: int
    ended: int = 1 << 60
    good: bool = False
    excused: bool = False  # from before a loss
    flush: bool = False
    extents: bool = False
    buffer: bytearray = field(default_factory=bytearray)
    slot: Command | None = None
    operation: Operation[None] | None = None
    waiter: CountingWaiter | None = None


class Machine:
    def __init__(self, limit: int, volatile: bool, policy: str) -> None:
        self.session = FakeSession(depth=512)
        self.session.residual_of_unmap = True
        self.target = FakeTarget(BLOCKS)
        self.target.write_through = not volatile
        self.target.statuses = (0, 3, 4)
        self.core: DiskCore = disk(self.session, BLOCKS, 2 * BLOCK, wce=volatile)
        self.core.geometry.zero_when_unmapped = True
        if policy == "memory":
            self.core.keep_journal(limit)
        else:
            self.core.durability.assign(ListJournal(limit), shared=False)
        self.turned = False  # volatile, in the midst
        self.owed = False  # a loss that no flush has told yet
        self.now = 0
        self.changes: list[Change] = []
        self.running: list[Change] = []
        self.buffers: list[bytearray] = []  # that were returned for those that were taken over

    def content(self) -> bytes:
        return (len(self.changes) + 1).to_bytes(4, "big") * (BLOCK // 4)

    def write(self, at: int, size: int) -> None:
        """Begin a write; by ``begin_write`` alone where that takes it."""
        first, blocks = at % BLOCKS, 1 + size % 4
        blocks = min(blocks, BLOCKS - first)
        change = Change(first, blocks, self.content(), self.now)
        change.buffer = self.buffer(change.content * blocks)
        view = memoryview(change.buffer)[-blocks * BLOCK :]
        change.waiter = CountingWaiter()
        if size % 8 < 6:
            change.slot = self.core.begin_write(view, first * BLOCK, change.waiter)
        if change.slot is None:
            change.operation = self.core.write(view, first * BLOCK, fua=size % 8 == 7)
        self.begin(change)

    def buffer(self, content: bytes) -> bytearray:
        """One that ends with ``content``; a used one where there is one."""
        for buffer in self.buffers:
            if len(buffer) == HEAD + len(content):
                self.buffers.remove(buffer)
                buffer[HEAD:] = content
                return buffer
        return bytearray(HEAD) + content

    def zero(self, at: int, size: int) -> None:
        first, blocks = at % BLOCKS, min(1 + size % 3, BLOCKS - at % BLOCKS)
        change = Change(first, blocks, bytes(BLOCK), self.now)
        offset, length = first * BLOCK, blocks * BLOCK
        if size % 2:
            change.operation = self.core.trim(offset, length)
        else:
            change.operation = self.core.zero(offset, length, False, False, False)
        self.begin(change)

    def begin(self, change: Change) -> None:
        self.changes.append(change)
        self.running.append(change)
        if change.operation is not None:
            self.step(change)

    def step(self, change: Change) -> None:
        """Advance its operation until it waits for an answer."""
        try:
            if change.operation is not None:
                while True:
                    waits = next(change.operation)
                    if self.session.disconnected:
                        self.reconnect()
                    if isinstance(waits, float):  # others go on meanwhile
                        change.waiter = CountingWaiter()
                        return
                    change.waiter = waits  # type: ignore[assignment]
                    if waits.pending:
                        return
            assert change.slot is not None
            if self.now % 2:
                other = self.core.take_over(change.slot, change.buffer)
                if other is not None:
                    assert len(other) == len(change.buffer)
                    change.buffer = other
                    self.buffers.append(other)
            rest = self.core.ended_write(change.slot)
            change.slot = None
            if rest is not None:
                view = memoryview(change.buffer)[HEAD:]
                at = change.first * BLOCK
                change.operation = self.core.write(view, at, deadline=rest.deadline)
                self.step(change)
                return
            change.good = True
        except StopIteration as stop:
            change.good = True
            if change.extents:
                self.check_extents(change, stop.value)
            assert not (change.flush and self.owed), "a flush succeeded, and a loss was not told"
        except IserblkError as error:
            # A flush has told it, or the flush that a write needs.
            told = error.losses > 0
            assert not told or self.turned, "what the journal has is told as lost"
            self.owed = self.owed and not told
        change.ended = self.now
        self.running.remove(change)
        change.buffer[:] = b"\xee" * len(change.buffer)  # it is the caller's again

    def go_on(self, at: int) -> None:
        """A thread whose commands have ended wakes up."""
        able = [each for each in self.running if each.waiter and not each.waiter.pending]
        if able:
            self.step(able[at % len(able)])

    def answer(self, at: int, how: int) -> None:
        if not self.session.flight:
            return
        slot = self.session.flight[at % len(self.session.flight)]
        if how % 8 == 0:
            if slot.cdb[0] == opcodes.SYNCHRONIZE_CACHE_16:
                if how & 8:  # said once, and forgotten
                    self.target.lose(how)
            elif how & 8 and not self.target.refusal(slot):
                self.target.execute(slot)
            self.session.end(slot, sense=MEDIUM_ERROR)
            self.excuse()
        elif how % 8 == 1:
            if how & 8:
                self.session.end(slot, status=8)  # BUSY
            else:
                self.session.end(slot, sense=NOT_READY)
        elif how == 3 and not self.target.refusal(slot):
            self.target.execute(slot)
            self.session.end(slot, sense=RECOVERED)
        else:
            self.target.answer(self.session, slot)

    def refuse(self, how: int) -> None:
        """The LUN refuses more than before, or less: nothing of it is a loss."""
        most = {opcodes.WRITE_16: 1 + how % 2, opcodes.READ_16: 1 + how // 2 % 2}

        def refusal(slot: Command) -> bytes:
            kind = slot.cdb[0]
            if kind == opcodes.WRITE_SAME_16 and how & 4:
                return UNKNOWN if how & 8 else INVALID
            if kind == opcodes.WRITE_SAME_16 and how & 16 and slot.data is None:
                return INVALID  # NDOB
            if kind == opcodes.WRITE_16 and how & 32 and slot.cdb[1] & 8:
                return INVALID  # FUA
            if kind == opcodes.SERVICE_ACTION_IN_16 and how & 8:
                return INVALID
            blocks = int.from_bytes(slot.cdb[10:14], "big")
            return INVALID if blocks > most.get(kind, 1 << 32) else b""

        self.target.refusal = refusal

    def flush(self) -> None:
        """Begin a flush; ``answer`` and ``go_on`` bring it to its end."""
        change = Change(0, 0, b"", self.now, flush=True)
        change.operation = self.core.flush()
        self.running.append(change)
        self.step(change)

    def extents(self) -> None:
        change = Change(0, 0, b"", self.now, extents=True)
        change.operation = self.core.extents(0, BLOCKS * BLOCK)  # type: ignore[assignment]
        self.running.append(change)
        self.step(change)

    def check_extents(self, asked: Change, found: list[tuple[int, int, int]]) -> None:
        """Extents show no hole where there has been data all the time."""
        for offset, length, flags in found:
            for lba in range(offset // BLOCK, (offset + length) // BLOCK) if flags else ():
                assert any(not any(each) for each in self.legal(lba, asked.began)), f"block {lba}"

    def turn(self) -> None:
        """The cache turns volatile, and a command hears of it."""
        if not self.session.flight or not self.target.write_through:
            return
        self.target.write_through = False
        self.turned = True
        self.session.end(self.session.flight[0], sense=MODE_CHANGED)

    def lose(self, seed: int) -> None:
        """Cache and connection are lost; some commands in flight were executed, unanswered."""
        for at, slot in enumerate(self.session.flight):
            if seed >> at & 1 and not self.target.refusal(slot):
                self.target.execute(slot)
        if seed % 3:
            self.target.lose(seed)
        self.session.suspend()
        reconnect(self.core, self.target)
        self.excuse()
        self.check()

    def lose_alive(self, seed: int) -> None:
        """The cache is lost, the connection stays: the oldest command's sense data tells of it."""
        if not self.session.flight:
            return
        self.target.lose(seed)
        self.session.end(self.session.flight[0], sense=POWER_ON)
        self.excuse()
        if self.session.disconnected:
            for at in range(seed % 4):  # they came together
                self.answer(seed, at + 2)
                self.go_on(seed)
            if self.session.disconnected:
                self.reconnect(lost=bool(seed & 1))

    def reconnect(self, lost: bool = False) -> None:
        reconnect(self.core, self.target, lost)
        self.excuse()
        self.check()

    def excuse(self) -> None:
        """Where the cache turned volatile something of all this may be gone, but only if that is
        told."""
        if self.turned and self.core.client.owed:
            self.owed = True
            for change in self.changes:
                change.excused = True

    def check(self) -> None:
        """Each block holds the last write to it, or a write that ran at the same time."""
        for lba in range(BLOCKS):
            held = self.target.block(lba)
            legal = self.legal(lba)
            assert held in legal, f"block {lba}: {held[:4]!r} of {[x[:4] for x in legal]}"

    def legal(self, lba: int, since: int = 1 << 60) -> list[bytes]:
        """Contents that the block may hold now, or may have held at some moment since then."""
        here = [c for c in self.changes if c.first <= lba < c.first + c.blocks]
        surely = [c for c in here if c.good and not c.excused and c.ended < since]
        legal = [c.content for c in here if not any(c.ended < o.began for o in surely)]
        if not surely:
            legal.append(bytes(BLOCK))
        return legal

    def finish(self) -> None:
        while self.running:
            self.now += 1
            while self.session.flight:
                self.answer(0, 2)
            self.go_on(self.now)


STEPS = ["write"] * 6 + ["answer"] * 8 + ["go_on"] * 8 + ["zero", "flush", "lose", "lose_alive"]
STEPS += ["turn", "extents", "flush"]


@pytest.mark.parametrize("policy", ["memory", "a list"])
@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("volatile", [True, False])
@pytest.mark.parametrize("limit", [4 * BLOCK, 1 << 20])
@settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 1 << 32), st.sampled_from([8, 40, 200]))
def test_nothing_acknowledged_is_lost_or_overwritten_by_older(
    limit: int, volatile: bool, refuses: bool, policy: str, seed: int, steps: int
) -> None:
    machine = Machine(limit, volatile, policy)
    choice = random.Random(seed)
    for _ in range(steps):
        machine.now += 1
        what = choice.choice(STEPS + ["refuse"] * refuses)
        one, two = choice.randrange(64), choice.randrange(64)
        if what == "write":
            machine.write(one, two)
        elif what == "zero":
            machine.zero(one, two)
        elif what == "answer":
            machine.answer(one, two)
        elif what == "go_on":
            machine.go_on(one)
        elif what == "flush":
            machine.flush()
        elif what == "extents":
            machine.extents()
        elif what == "turn":
            machine.turn()
        elif what == "refuse":
            machine.refuse(one)
        elif what == "lose":
            machine.lose(one * 64 + two)
        else:
            machine.lose_alive(one * 64 + two)
    machine.lose(0)
    machine.finish()
    machine.check()
    assert machine.session.queue.busy == 0
    for _ in range(2):  # the first may tell a loss
        machine.flush()
        machine.finish()
    assert not machine.owed
    journal = machine.core.durability.journal
    assert journal is None or not journal.active
    machine.target.lose(1)
    machine.check()
    assert not machine.owed
