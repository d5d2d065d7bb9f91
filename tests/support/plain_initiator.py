"""An initiator that is not iSCSI's: it hands the commands of a disk to a LUN in this process, in
any order, without connections or PDUs. What it implements is all that a disk needs."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import TypeVar

import trio

from iserblk.commands.command import (
    FREE,
    NO_BYTES,
    NOBODY,
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
from iserblk.disk.aio import TrioDisk
from iserblk.disk.lun.identify import identify
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import IserblkError
from iserblk.loop import strands
from iserblk.loop.strands import Strand, park
from iserblk.scsi import luns, opcodes
from iserblk.scsi import sense as sense_data
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import DATA_OUT, Nexus
from iserblk.target.store.store import FileStore

T = TypeVar("T")
DEPTH = 32
NAME = "of the same machine"


class PlainWaiter:
    """Implements Waiter, for one task or one strand."""

    def __init__(self, strand: Strand | None) -> None:
        self.pending = 0
        self.owner = None if strand is None else strand.owner
        self.strand: Strand | None = None
        self.done = trio.Event()

    def task_done(self) -> None:
        self.pending -= 1
        if self.pending:
            return
        if self.strand is not None:
            self.strand.wake()
            self.strand = None
        else:
            self.done.set()


class _Place:
    """Implements Place."""

    def __init__(self, session: PlainSession, command: Command) -> None:
        self._session = session
        self._number = session.numbers[command.index]

    def may_overtake(self, command: Command) -> bool:
        return self._session.numbers[command.index] < self._number


class PlainSession:
    """Implements CommandSession and CommandQueue: the LUNs of ``device``, in ``depth`` commands.
    ``seed``: of the order in which commands are carried out that are under way at the same time.
    """

    io_timeout = command_timeout = patience = 30.0
    portal = NAME
    error: IserblkError | None = None
    suspended: IserblkError | None = None
    gives_up = can_reconnect = False
    suspended_at = 0.0

    def __init__(self, device: DeviceServer, seed: object = 0, depth: int = DEPTH) -> None:
        self.queue = self
        self.listeners = LunListeners()
        self.tasks = [PlainCommand(index) for index in range(depth)]
        self.numbers = [0] * depth  # of the commands, in the order in which they were sent
        self.executed: list[int] = []  # operation codes
        self._free: list[PlainCommand] = list(self.tasks)
        self._takers: list[Waiter] = []
        self._sent: list[PlainCommand] = []
        self._count = 0
        self._doubted: set[bytes] = set()
        self._random = random.Random(f"{seed}")
        self._device = device
        self._nexus = Nexus(NAME, bytes(6))
        self._token = trio.lowlevel.current_trio_token()
        device.attach(self._nexus)

    # -- CommandSession ---------------------------------------------------------------------------

    def extended(self, deadline: float) -> float:
        return deadline

    def new_waiter(self) -> PlainWaiter:
        return PlainWaiter(strands.here().running)

    def describe(self) -> dict[str, object]:
        return {"provider": "none"}

    def disconnect(self) -> None:
        raise AssertionError("there is no connection")

    # -- CommandQueue -----------------------------------------------------------------------------

    def take(self, waiter: Waiter) -> PlainCommand | None:
        command = self.take_now()
        if command is None:
            waiter.pending += 1
            self._takers.append(waiter)
        return command

    def take_now(self) -> PlainCommand | None:
        if not self._free:
            return None
        command = self._free.pop()
        command.state = TAKEN
        return command

    def forget(self, waiter: Waiter) -> None:
        if waiter in self._takers:
            self._takers.remove(waiter)
            waiter.pending -= 1

    def release(self, command: Command) -> None:
        assert command.state == TAKEN
        mine = self.tasks[command.index]
        mine.state = FREE
        mine.data = mine.data_in = mine.error = None
        mine.waiter = NOBODY
        mine.last = -1
        mine.deadline = 0.0
        self._free.append(mine)
        if self._takers:
            self._takers.pop(0).task_done()

    def submit(self, command: Command) -> None:
        mine = self.tasks[command.index]
        mine.state = QUEUED
        mine.deadline = mine.deadline or monotonic() + self.io_timeout
        if mine.lun in self._doubted and mine.cdb[0] not in opcodes.TELL_WHAT_IT_IS:
            self.refuse([mine])
            return
        self._count += 1
        self.numbers[mine.index] = self._count
        mine.tag += 1
        mine.state = SENT
        self._sent.append(mine)
        self._token.run_sync_soon(self._carry_out)

    def shrink(self) -> None:
        """There is always room for another command."""

    def place(self, command: Command) -> _Place:
        return _Place(self, command)

    def doubt(self, lun: bytes) -> Sequence[Command]:
        self._doubted.add(lun)
        return []  # none waits to be sent

    def refuse(self, commands: Sequence[Command]) -> None:
        for command in commands:
            command.error = InDoubt(f"{NAME}: another LUN may have the number")
            self._end(command)

    def believe(self, lun: bytes) -> None:
        self._doubted.discard(lun)

    # -- the LUN ----------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        """One of the commands that are under way."""
        command = self._sent.pop(self._random.randrange(len(self._sent)))
        try:
            self._execute(command)
        except Exception as error:  # the test is to fail, and not to wait for ever
            command.error = IserblkError(f"{NAME}: {error!r}")
        self._end(command)

    def _execute(self, command: Command) -> None:
        self.executed.append(command.cdb[0])
        command.response = command.residual = 0
        command.error = None
        task = self._device.begin(self._nexus, luns.decode(command.lun), bytes(command.cdb))
        data = NO_BYTES if command.data is None else command.data
        buffer = memoryview(bytearray(task.length))
        if not task.status and task.direction & DATA_OUT:
            if len(data) != task.length:
                self._device.fit(task, len(data))
            buffer = data[: task.length]
        if not task.status and not self._device.run(task, buffer, nowait=True):
            assert self._device.run(task, buffer)
        if task.direction & DATA_OUT:
            moved = task.length
        else:
            moved = min(task.transferred, len(data))
            if moved:
                data[:moved] = buffer[:moved]
        command.status = task.status
        command.sense = task.sense
        if not task.status:
            command.residual = command.length - moved
        if task.sense:
            self.listeners.hear(command)
            if sense_data.tells_of_success(task.sense):
                command.status = 0

    def _end(self, command: Command) -> None:
        command.state = TAKEN
        command.waiter.task_done()


class PlainDriver:
    """Implements Driver of a disk. Commands under way are waited for, as they end soon."""

    def __init__(self, session: PlainSession) -> None:
        self.session = session
        self.new_waiter = session.new_waiter

    def check_here(self) -> None:
        """There is one thread."""

    def begin_batch(self) -> bool:
        return False

    def end_batch(self, held: bool) -> None:
        """Each command is sent at once."""

    def abandon(self, mine: Callable[[Waiter], bool]) -> int:
        return sum(each.state == SENT and mine(each.waiter) for each in self.session.tasks)

    async def wait(self, waiter: Waiter) -> None:
        assert isinstance(waiter, PlainWaiter)
        if not waiter.pending:
            return
        strand = strands.here().running
        if strand is not None:
            waiter.strand = strand
            await park()
            return
        try:
            await waiter.done.wait()
        except trio.Cancelled:
            self.session.forget(waiter)
            with trio.CancelScope(shield=True):
                while waiter.pending:
                    await trio.lowlevel.checkpoint()
            raise
        finally:
            waiter.done = trio.Event()

    async def run_operation(self, operation: Operation[T]) -> T:
        try:
            while True:
                step = next(operation)
                if isinstance(step, float):
                    await strands.elsewhere(trio.sleep, step)
                else:
                    await self.wait(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()


@asynccontextmanager
async def plain_disk(size: int, block: int = 512, seed: object = 0) -> AsyncIterator[TrioDisk]:
    """A disk whose LUN is in the memory of this process; empty at first."""
    fd = os.memfd_create("lun")
    os.ftruncate(fd, size)
    device = DeviceServer({0: LogicalUnit(FileStore(fd, size), serial="S1", block=block)}, "iqn")
    try:
        session = PlainSession(device, seed)
        driver = PlainDriver(session)
        steps = identify(session, 0, "lun0", "memory:", "iqn")
        info, geometry = await driver.run_operation(steps)
        yield TrioDisk(DiskCore(session, luns.encode(0), info, geometry), driver)
        assert all(each.state == FREE for each in session.tasks)  # none was forgotten
    finally:
        device.close()
