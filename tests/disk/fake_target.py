"""A session without a wire, and a target with a cache that can be lost: tests decide when each
command is executed, and when its answer comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

from iserblk.commands.command import (
    FREE,
    QUEUED,
    SENT,
    TAKEN,
    Command,
    InDoubt,
    Operation,
    PlainCommand,
    Waiter,
)
from iserblk.commands.listeners import LunListeners
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ScsiError
from iserblk.scsi import lba as lba_data
from iserblk.scsi import opcodes
from iserblk.scsi import sense as sense_data
from iserblk.scsi.luns import encode
from tests.initiator.fake import CountingWaiter

BLOCK = 512
LUN = encode(0)
POWER_ON = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0x00)
CAPACITY = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x2A, 0x09)
MODE_CHANGED = sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x2A, 0x01)
RECOVERED = sense_data.encode_fixed(sense_data.RECOVERED_ERROR, 0x5D, 0x00)
NOT_READY = sense_data.encode_fixed(sense_data.NOT_READY, 0x04, 0x01)
GET_LBA_STATUS = 0x12
MEDIUM_ERROR = sense_data.encode_fixed(sense_data.MEDIUM_ERROR, 0x0C, 0x00)
DEFERRED = bytes((sense_data.FIXED_DEFERRED,)) + MEDIUM_ERROR[1:]


class Sent:
    """Implements Place."""

    def __init__(self, session: FakeSession, command: Command) -> None:
        self._session = session
        self._place = session.order.get(command.index, 0)

    def may_overtake(self, command: Command) -> bool:
        return self._session.order.get(command.index, 0) < self._place


class FakeSession:
    """A session that is not iSCSI's. ``flight``: submitted and not ended, oldest first."""

    new_waiter = CountingWaiter

    def __init__(self, depth: int = 64) -> None:
        self.io_timeout = 30.0
        self.immediate_limit = 0
        self.portal = "portal:3260"
        self.tasks = [PlainCommand(index) for index in range(depth)]
        # By index: the place of a command among those that were sent. All have the same without.
        self.order: dict[int, int] = {}
        self._free: list[Command] = list(self.tasks)
        self.flight: list[Command] = []
        self.listeners = LunListeners()
        self.queue = self
        self.disconnected = False
        self.core: DiskCore | None = None  # the disk whose session it is
        self.doubted: set[bytes] = set()
        self.suspended = False
        self.gives_up = False
        self.suspended_at = 0.0
        self.shrunk = 0
        self.residual_of_unmap = False  # as tgtd's: of the whole parameter list

    @property
    def command_timeout(self) -> float:
        return self.io_timeout

    patience = command_timeout

    def extended(self, deadline: float) -> float:
        return deadline

    def take_now(self) -> Command | None:
        if not self._free:
            return None
        slot = self._free.pop()
        slot.state = TAKEN
        return slot

    def take(self, _waiter: Waiter, _again: bool = False) -> Command:
        slot = self.take_now()
        assert slot is not None
        return slot

    def place(self, slot: Command) -> Sent:
        return Sent(self, slot)

    def submit(self, slot: Command) -> None:
        if self._refuses(slot):
            self.refuse([slot])
            return
        slot.state = QUEUED
        if not slot.deadline:
            now = monotonic()
            slot.begun = int(now * 1e9)
            slot.deadline = now + self.io_timeout
        self.flight.append(slot)
        if not self.suspended:
            self._send(slot)

    def _send(self, slot: Command) -> None:
        self.tasks[slot.index].tag += 1
        slot.state = SENT

    def release(self, slot: Command) -> None:
        assert slot.state == TAKEN
        slot.state = FREE
        slot.data = None
        slot.error = None
        slot.last = -1
        slot.deadline = 0.0
        self._free.append(slot)

    def shrink(self) -> None:
        self.shrunk += 1

    def doubt(self, lun: bytes) -> list[Command]:
        self.doubted.add(lun)
        refused = [slot for slot in self.flight if slot.state == QUEUED and self._refuses(slot)]
        self.flight = [slot for slot in self.flight if slot not in refused]
        return refused

    def refuse(self, slots: list[Command]) -> None:
        for slot in slots:
            slot.error = InDoubt("held back")
            slot.state = TAKEN
            slot.waiter.task_done()

    def believe(self, lun: bytes) -> None:
        self.doubted.discard(lun)

    def _refuses(self, slot: Command) -> bool:
        return slot.lun in self.doubted and slot.cdb[0] not in opcodes.TELL_WHAT_IT_IS

    @property
    def busy(self) -> int:
        return len(self.tasks) - len(self._free)

    def disconnect(self) -> None:
        self.disconnected = True

    def suspend(self) -> None:
        """The connection is lost: what was in flight will be sent again, in order."""
        self.suspended_at += 1.0
        self.suspended = True
        for slot in self.flight:
            slot.state = QUEUED

    def resume(self) -> None:
        self.suspended = self.disconnected = False
        for slot in self.flight:
            self._send(slot)

    def end(
        self, slot: Command, status: int = 0, sense: bytes = b"", error: IserblkError | None = None
    ) -> None:
        self.flight.remove(slot)
        slot.status = 2 if sense else status
        slot.sense = sense
        slot.error = error
        slot.response = slot.residual = 0
        if self.residual_of_unmap and slot.cdb[0] == opcodes.UNMAP and not slot.status:
            slot.residual = slot.length
        if slot.status and error is None:
            self.listeners.hear(slot)
        if sense_data.tells_of_success(sense):  # as ``Session`` does
            slot.status = 0
        slot.state = TAKEN
        slot.waiter.task_done()


class FakeTarget:
    """Blocks, of which ``cached`` are not on stable storage yet; none while ``write_through``.
    ``refusal``: the sense data with which a command is refused, for ``answer``. ``statuses``: the
    provisioning statuses that blocks with data have, one after another."""

    def __init__(self, blocks: int) -> None:
        self.write_through = False
        self.refusal: Callable[[Command], bytes] = lambda _slot: b""
        self.statuses: tuple[int, ...] = (0,)
        self.stable = [bytes(BLOCK)] * blocks
        self.cached: dict[int, bytes] = {}
        self.executed: list[int] = []

    def block(self, lba: int) -> bytes:
        return self.cached.get(lba, self.stable[lba])

    def answer(self, session: FakeSession, slot: Command) -> None:
        """Carry the command out, or refuse it, and end it."""
        sense = self.refusal(slot)
        if not sense:
            self.execute(slot)
        session.end(slot, sense=sense)

    def execute(self, slot: Command) -> None:
        self._execute(slot)
        if self.write_through:
            self._synchronize()

    def _synchronize(self) -> None:
        for at, content in self.cached.items():
            self.stable[at] = content
        self.cached.clear()

    def _execute(self, slot: Command) -> None:
        operation = slot.cdb[0]
        self.executed.append(operation)
        lba = int.from_bytes(slot.cdb[2:10], "big")
        blocks = int.from_bytes(slot.cdb[10:14], "big")
        if operation == opcodes.WRITE_16:
            assert slot.data is not None and len(slot.data) == blocks * BLOCK
            for at in range(blocks):
                content = bytes(slot.data[at * BLOCK : at * BLOCK + BLOCK])
                if slot.cdb[1] & 8:
                    self.stable[lba + at] = content
                    self.cached.pop(lba + at, None)
                else:
                    self.cached[lba + at] = content
        elif operation == opcodes.WRITE_SAME_16:
            self.cached.update((lba + at, bytes(BLOCK)) for at in range(blocks))
        elif operation == opcodes.UNMAP:
            assert slot.data is not None
            lba = int.from_bytes(slot.data[8:16], "big")
            blocks = int.from_bytes(slot.data[16:20], "big")
            self.cached.update((lba + at, bytes(BLOCK)) for at in range(blocks))
        elif operation == opcodes.READ_16:
            assert slot.data is not None
            slot.data[:] = b"".join(self.block(lba + at) for at in range(blocks))
        elif operation == opcodes.SERVICE_ACTION_IN_16 and slot.cdb[1] & 0x1F == GET_LBA_STATUS:
            assert slot.data is not None
            answer = lba_data.encode_lba_status(
                [
                    (at, 1, self.statuses[at % len(self.statuses)] if any(self.block(at)) else 1)
                    for at in range(lba, len(self.stable))
                ]
            )
            slot.data[: len(answer)] = answer
        elif operation == opcodes.SERVICE_ACTION_IN_16:
            assert slot.data is not None
            slot.data[:12] = (len(self.stable) - 1).to_bytes(8, "big") + BLOCK.to_bytes(4, "big")
        else:
            assert operation == opcodes.SYNCHRONIZE_CACHE_16
            self._synchronize()

    def lose(self, seed: int) -> None:
        """Power is lost: of what was cached, some has made it to stable storage."""
        choice = random.Random(seed)
        for at, content in self.cached.items():
            if choice.random() < 0.3:
                self.stable[at] = content
        self.cached.clear()


def disk(
    session: FakeSession, blocks: int, max_transfer: int = 1 << 20, wce: bool = True
) -> DiskCore:
    info = LunInfo(
        name="lun0", url="iser://portal/iqn/0", target="iqn", lun=0, size=blocks * BLOCK,
        block_size=BLOCK, physical_block_size=BLOCK, read_only=False, rotational=False,
        write_cache=wce, fua=True, can_trim=True, can_zero=True, zero_by_unmap=True,
        can_extents=True, vendor="", product="", revision="", serial="S", identifiers=(),
        max_transfer=max_transfer, optimal_transfer=0,
    )  # fmt: skip
    core = DiskCore(session, LUN, info, Geometry(block=BLOCK, long_cdbs=True))  # type: ignore[arg-type]

    def look(asked: CommandSession) -> Operation[tuple[LunInfo, Geometry]]:
        """The target is asked for no more than its size."""
        try:
            found = yield from core.sizing.ask(asked, LUN, BLOCK, True, 0.0)
        except ScsiError as error:
            if not isinstance(error.sense, sense_data.Sense) or not error.sense.is_not_there:
                raise
            found = core.size  # it refuses all service actions
        return replace(core.info, size=found), core.geometry

    core.look = look
    session.core = core
    return core


def run(
    operation: Operation[object],
    session: FakeSession,
    target: FakeTarget,
    newest_first: bool = False,
) -> object:
    """Run the operation to its end; ``newest_first`` decides the order of execution. A connection
    that is cut is made again."""
    try:
        while True:
            step = next(operation)
            if session.disconnected and session.core is not None:
                reconnect(session.core, target, lost=False)
            while not isinstance(step, float) and step.pending:
                slot = session.flight[-1 if newest_first else 0]
                target.answer(session, slot)
    except StopIteration as stop:
        return stop.value


def reconnect(core: DiskCore, target: FakeTarget, lost: bool = True) -> FakeSession:
    """What the reconnector does: a fresh session takes the place of the core's."""
    session: FakeSession = core.session  # type: ignore[assignment]
    session.suspend()
    fresh = FakeSession()
    fresh.residual_of_unmap = session.residual_of_unmap
    core.listen_resuming(fresh)  # type: ignore[arg-type]
    if lost:
        slot = fresh.queue.take_now()
        assert slot is not None
        slot.lun, slot.waiter = core.lun, CountingWaiter()
        slot.state = SENT
        fresh.flight.append(slot)
        fresh.end(slot, sense=POWER_ON)
        fresh.queue.release(slot)
    run(core.replay(fresh), fresh, target, newest_first=True)  # type: ignore[arg-type]
    assert fresh.queue.busy == 0
    session.resume()
    return fresh
