"""Runs a script against a machine, and checks the results with the model."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import CommandTimeout, IserblkError, LocalProtocolError, ScsiError
from iserblk.iscsi import bhs
from iserblk.scsi import sense
from iserblk.scsi.sense import Sense
from iserblk.scsi.sense_words import ASCQ_WORDS, KEY_WORDS
from tests.model.blocks import GRANULE, Model, content
from tests.model.machine import AnyMachine, Machine
from tests.model.script import (
    EXTENTS,
    FLUSH,
    GRANULES,
    READ,
    TRIM,
    WRITE,
    ZERO,
    Fault,
    Flush,
    Group,
    Op,
    Reopen,
    Step,
)
from tests.support.faces import NBD, one_disk
from tests.support.faults.behaviours import (
    FIN,
    RST,
    Corrupt,
    Delay,
    Drop,
    Duplicate,
    Reorder,
    Sips,
)
from tests.support.faults.framing import Unit
from tests.support.nbd_disk import NbdError

JUNK = b"\xee"
OPENINGS = 5
PATIENCE_S = 60.0  # of one step; only a failing test waits that long


@dataclass
class Tally:
    """Counts of operations, errors and faults of a run."""

    operations: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    errors: int = 0

    def add(self, other: Tally) -> None:
        self.operations += other.operations
        self.errors += other.errors
        for kind, count in other.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count


def _after_login(unit: Unit) -> bool:
    """Whether the unit comes after MPA start-up and login. Faults spare the login: its PDUs have no
    checksum in Traditional iSCSI."""
    start = unit.data.startswith(b"MPA ID Re")
    return not start and unit.opcode not in (bhs.LOGIN_REQUEST, bhs.LOGIN_RESPONSE)


class Runner:
    """Runs scripts. ``seed``: of what the face chooses by itself. ``may_fail``: operations may end
    with an error (outages outlast io-timeout)."""

    def __init__(
        self, machine: AnyMachine, face: str, options: str, seed: object, may_fail: bool
    ) -> None:
        self._machine = machine
        self._face = face
        self._url = machine.url + options
        self._seed = seed
        self._may_fail = may_fail
        # Answers overtake each other: on different connections, and on their way to the tasks that
        # wait. Of flushes that run at once, none is known to have ended before another one.
        self._overtaking = face.startswith(NBD)
        self._flushed = False  # a flush of the group that runs has succeeded
        self._blinks = 0
        self.model = Model(GRANULES, durable=not machine.write_cache)
        self.tally = Tally()
        self._disk: AsyncDisk

    async def run(self, steps: list[Step]) -> Tally:
        """Run the script. At its end the whole disk is read, and again after client and target have
        lost their memory."""
        life: list[Step] = []
        for step in [*steps, Reopen()]:
            if isinstance(step, Reopen):
                await self._live(life)
                await self._die()
                life = []
            else:
                life.append(step)
        await self._live([])
        return self.tally

    async def _live(self, steps: list[Step]) -> None:
        """Run the steps of one client, from open to close."""
        if isinstance(self._machine, Machine):
            self._machine.troubles.forget()
        async with AsyncExitStack() as stack:
            self._disk = await self._opened(stack)
            for step in steps:
                with trio.fail_after(PATIENCE_S):
                    if isinstance(step, Group):
                        await self._group(step)
                    else:
                        assert isinstance(step, Flush)
                        await self._flush(step.fault)
            with trio.fail_after(PATIENCE_S):
                await self._everything()

    async def _opened(self, stack: AsyncExitStack) -> AsyncDisk:
        """Opening sends commands, too, which may not end in time on a busy machine."""
        for left in reversed(range(OPENINGS if self._may_fail else 1)):
            try:
                return await stack.enter_async_context(
                    one_disk(self._face, self._url, seed=self._seed)
                )
            except CommandTimeout:
                if not left:
                    raise
        raise AssertionError

    async def _die(self) -> None:
        """The client's journal and the target's cache are lost."""
        await trio.to_thread.run_sync(self._machine.crash, True)
        await trio.to_thread.run_sync(self._machine.start)
        self._count("power")
        self.model.lost()

    async def _everything(self) -> None:
        """Read the whole disk."""
        step = 128
        for at in range(0, GRANULES, step):
            await self._one(Op(READ, at, step))

    @property
    def _epoch(self) -> tuple[int, int, int]:
        return len(self._machine.proxy.links), self._machine.crashes, self._blinks

    # -- a group ---------------------------------------------------------------------------------

    async def _group(self, group: Group) -> None:
        done = 0
        struck = trio.Event()

        async def one(index: int, op: Op) -> None:
            nonlocal done
            if group.spread:
                await trio.sleep(group.spread / 1000 * index / len(group.ops))
            await self._one(op)
            done += 1
            if done >= min(group.after, len(group.ops)):
                struck.set()

        async def strike(fault: Fault) -> None:
            if group.after:
                await struck.wait()
            await self._strike(fault)

        async with trio.open_nursery() as nursery:
            if group.fault is not None:
                nursery.start_soon(strike, group.fault)
            for index, op in enumerate(group.ops):
                nursery.start_soon(one, index, op)
        await self._after(group.fault)
        if self._flushed and not self.model.has_told:
            self.model.flushed()
        self._flushed = False
        self.model.end_group()

    async def _flush(self, fault: Fault | None) -> None:
        self.tally.operations += 1
        async with trio.open_nursery() as nursery:
            if fault is not None:
                nursery.start_soon(self._strike, fault)
            await self._flush_now()
        await self._after(fault)

    async def _flush_now(self, in_group: bool = False) -> None:
        try:
            await self._disk.flush()
        except IserblkError as error:
            self._failed(error)
            return
        if in_group and self._overtaking:
            self._flushed = True
        else:
            self.model.flushed()

    async def _after(self, fault: Fault | None) -> None:
        """Do what must end before the next step."""
        if fault is not None and fault.kind == "turn":
            assert isinstance(self._machine, Machine)
            # The next command gets the unit attention. Until then the client cannot know.
            await self._disk.read_into(memoryview(bytearray(GRANULE)), 0)
            await trio.to_thread.run_sync(self._machine.settle)

    async def _one(self, op: Op) -> None:
        self.tally.operations += 1
        offset, length = op.granule * GRANULE, op.count * GRANULE
        if op.kind == READ:
            buffer = bytearray(length)
            epoch = self._epoch
            try:
                await self._disk.read_into(memoryview(buffer), offset)
            except IserblkError as error:
                self._failed(error)
            else:
                same = epoch if epoch == self._epoch else None
                self.model.check_read(op.granule, bytes(buffer), same)
            return
        if op.kind == FLUSH:
            await self._flush_now(in_group=True)
            return
        if op.kind == EXTENTS:
            try:
                self.model.check_extents(await self._disk.extents(offset, length))
            except IserblkError as error:
                self._failed(error)
            return
        version = self.model.begin_write(op.granule, op.count, op.kind != WRITE)
        acknowledged = False
        try:
            if op.kind == WRITE:
                data = b"".join(content(version, op.granule + index) for index in range(op.count))
                buffer = bytearray(data)
                try:
                    await self._disk.write(memoryview(buffer), offset, op.fua)
                finally:
                    buffer[:] = JUNK * len(buffer)  # it is the caller's again
            elif op.kind == ZERO:
                await self._disk.zero(offset, length, may_trim=op.fua, fua=op.fua)
            else:
                assert op.kind == TRIM
                await self._disk.trim(offset, length)
            acknowledged = True
        except IserblkError as error:
            self._failed(error)
        finally:
            self.model.end_write(
                op.granule, op.count, version, acknowledged, op.fua, op.kind == TRIM
            )

    def _failed(self, error: IserblkError) -> None:
        self.tally.errors += 1
        assert not isinstance(error, NbdError) or error.errno == errno.EIO, repr(error)
        if self.model.may_tell and isinstance(error, NbdError) and not error.has_text:
            self.model.perhaps_told()
        elif self.model.may_tell and "were lost at the target" in str(error):
            self.model.told()  # possible after any reconnection
        elif self.model.may_tell and self._is_aborted_flush(error):
            self.model.perhaps_told()  # a flush beside it has met a loss: it is not sent again
        elif self._is_failed_flush(error):
            # It is the report of whatever was lost before, too.
            if self.model.may_tell:
                self.model.perhaps_told()
        elif not self._is_repeated(error):
            assert self._may_fail and not isinstance(error, LocalProtocolError), repr(error)

    @staticmethod
    def _is_aborted_flush(error: IserblkError) -> bool:
        """Whether the error is one of a flush that would be sent again, had nothing been lost. (An
        NBD client has the words alone.)"""
        if isinstance(error, NbdError):
            return KEY_WORDS[sense.ABORTED_COMMAND] in str(error)
        return bool(error.losses) and (
            isinstance(error, ScsiError)
            and isinstance(error.sense, Sense)
            and error.sense.key == sense.ABORTED_COMMAND
        )

    def _is_repeated(self, error: IserblkError) -> bool:
        """Whether the error is the report of a loss of which another connection was told before."""
        if not isinstance(error, NbdError) or not error.may_repeat:
            return False
        return error.tells_of_loss or not error.has_text

    def _is_failed_flush(self, error: IserblkError) -> bool:
        """Whether the error is one that the "flush" fault causes."""
        if "flush" not in self.tally.faults:
            return False
        if isinstance(error, NbdError):
            return not error.has_text or ASCQ_WORDS[sense.WRITE_ERROR] in str(error)
        return (
            isinstance(error, ScsiError)
            and isinstance(error.sense, Sense)
            and error.sense.code == sense.WRITE_ERROR
        )

    # -- faults ----------------------------------------------------------------------------------

    def _count(self, kind: str) -> None:
        self.tally.faults[kind] = self.tally.faults.get(kind, 0) + 1

    async def _strike(self, fault: Fault) -> None:
        self._count(fault.kind)
        machine, proxy = self._machine, self._machine.proxy
        kind, _, way = fault.kind.partition(" ")
        if kind in ("rst", "fin", "hole"):
            proxy.cut({"rst": RST, "fin": FIN, "hole": "black hole"}[kind])
        elif kind in ("after", "truncate"):
            proxy.arm(way == "up", fault.amount, RST if kind == "after" else FIN)
        elif kind in ("delay", "sips"):
            for up in (True, False):
                proxy.stack(up, lambda _: Delay(0.002, 0.01) if kind == "delay" else Sips(900))
        elif way:
            made = {"corrupt": Corrupt, "drop": Drop, "twice": Duplicate, "swap": Reorder}[kind]
            proxy.stack(way == "up", lambda _: made(_after_login, fault.amount))
        elif kind in ("passing", "identify", "recovered", "flush"):
            assert isinstance(machine, Machine)
            machine.troubles.add(kind, 1 + fault.amount)
            if kind == "identify":
                proxy.cut(RST)
        elif kind == "less":
            assert isinstance(machine, Machine)
            machine.troubles.refuse(fault.amount)
        elif kind == "blink":
            assert isinstance(machine, Machine)
            self.model.power()
            self._blinks += 1
            await trio.to_thread.run_sync(machine.blink)
            self._blinks += 1  # a read that began meanwhile may have come before it, or after
        elif kind == "turn":
            assert isinstance(machine, Machine)
            if not machine.write_cache:
                self.model.turned()
            await trio.to_thread.run_sync(machine.turn)
        elif fault.kind in ("refuse", "outage"):
            proxy.refuse()
            proxy.cut(RST)
            await trio.sleep(fault.amount / 1000)
            proxy.admit()
        else:
            assert fault.kind in ("crash", "power")
            if fault.kind == "power":
                self.model.power()
            await trio.to_thread.run_sync(machine.crash, fault.kind == "power")
            await trio.to_thread.run_sync(machine.start)
