"""Every block operation on a LUN of some peer, compared with a model of what it has to hold.

The LUN is the test's own. All offsets, sizes and data come from a seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import UNSOLICITED, PduSlot
from iserblk.disk.aio import TrioDisk, open_disks
from iserblk.disk.seam import EXTENT_HOLE, EXTENT_ZERO
from iserblk.errors import NotSupported, OutOfRange

KIB, MIB = 1 << 10, 1 << 20
AREA = 32 * MIB  # of the LUN; what follows stays untouched but for the last block
SIZES = (512, 4 * KIB, 8 * KIB, 64 * KIB, MIB, 8 * MIB)
DEPTHS = (1, 8, 64)
PER_STEP = 4 * MIB  # of one size and depth; where two requests are more, of these
TIMEOUT_S = 500  # the machine is emulated


@dataclass(slots=True)
class Outcome:
    """What was done, for the report."""

    operations: int = 0
    compared: int = 0  # bytes
    invalidated: int = 0  # responses that invalidated an STag remotely
    tagged: int = 0  # commands that advertised one
    data_outs: int = 0  # unsolicited Data-Outs over iSER
    connection: dict[str, object] = field(default_factory=dict)
    peer: str = ""
    skipped: list[str] = field(default_factory=list)


class Model:
    """The area of the LUN, and what it has to hold."""

    def __init__(self, disk: TrioDisk, outcome: Outcome) -> None:
        self.disk = disk
        self.outcome = outcome
        self.dice = random.Random(7145)
        self.holds = bytearray(AREA)
        self._random = memoryview(self.dice.randbytes(9 * MIB))

    async def write(self, offset: int, size: int, fua: bool = False) -> None:
        at = self.dice.randrange(MIB)
        data = self._random[at : at + size]
        self.holds[offset : offset + size] = data
        await self.disk.write(data, offset, fua)
        self.outcome.operations += 1

    async def compare(self, offset: int, size: int) -> None:
        buffer = bytearray(b"\xa5" * size)
        await self.disk.read_into(memoryview(buffer), offset)
        self.outcome.operations += 1
        self.outcome.compared += size
        if buffer != self.holds[offset : offset + size]:
            at = next(n for n in range(size) if buffer[n] != self.holds[offset + n])
            raise AssertionError(
                f"{size} bytes at {offset}: differ from byte {at} on: "
                f"{bytes(buffer[at : at + 16]).hex()} is not "
                f"{bytes(self.holds[offset + at : offset + at + 16]).hex()}"
            )

    async def at_depth(self, depth: int, jobs: list[Callable[[], object]]) -> None:
        limit = trio.Semaphore(depth)

        async def one(job: Callable[[], object]) -> None:
            async with limit:
                await job()  # type: ignore[misc]

        async with trio.open_nursery() as nursery:
            for job in jobs:
                nursery.start_soon(one, job)

    async def transfers(self, size: int, depth: int) -> None:
        """Writes in any order, then reads in another."""
        count = min(2 * depth, max(2, PER_STEP // size))
        if depth > DEPTHS[1] > count:
            return  # as many in flight as with the depth before
        print(f"{size} bytes at depth {depth}", flush=True)
        places = self.dice.sample(range(AREA // size), count)
        await self.at_depth(depth, [lambda p=p: self.write(p * size, size) for p in places])  # type: ignore[misc]
        self.dice.shuffle(places)
        await self.at_depth(depth, [lambda p=p: self.compare(p * size, size) for p in places])  # type: ignore[misc]

    async def odd_sizes(self) -> None:
        """Neither sizes nor offsets on block boundaries."""
        for offset, size in ((1, 1), (513, 1022), (4095, 2), (100_001, 77_777), (MIB - 1, 3)):
            await self.write(offset, size)
            await self.compare(max(0, offset - 600), size + 1200)

    async def durable(self) -> None:
        await self.write(3 * MIB, 64 * KIB, fua=True)
        await self.write(4 * MIB, 64 * KIB)
        await self.disk.flush()
        await self.disk.cache(3 * MIB, MIB)
        await self.compare(3 * MIB, MIB + 64 * KIB)
        self.outcome.operations += 2

    async def deallocate(self) -> None:
        disk = self.disk
        offset, size = 8 * MIB, 2 * MIB
        await self.write(offset - MIB, 4 * MIB)
        await disk.zero(offset, size)
        self.holds[offset : offset + size] = bytes(size)
        await self.compare(offset - MIB, 4 * MIB)
        await disk.zero(offset + size + 100, MIB - 300)
        self.holds[offset + size + 100 : offset + size + MIB - 200] = bytes(MIB - 300)
        await self.compare(offset - MIB, 4 * MIB)
        self.outcome.operations += 2
        if not disk.info.can_trim:
            self.outcome.skipped.append("trim")
            return
        try:
            await disk.trim(offset, size)
        except NotSupported:
            self.outcome.skipped.append("trim")
            return
        self.outcome.operations += 1
        # Its content is undefined, and so no longer compared; the neighbours' is not.
        await self.write(offset, size)
        await self.compare(offset - MIB, 4 * MIB)

    async def extents(self) -> None:
        """Blocks that were just written are no holes."""
        if not self.disk.info.can_extents:
            self.outcome.skipped.append("extents")
        await self.write(16 * MIB, MIB)
        await self.disk.flush()
        found = await self.disk.extents(16 * MIB, MIB)
        assert found[0][0] == 16 * MIB
        assert not found[0][2] & (EXTENT_HOLE | EXTENT_ZERO)
        self.outcome.operations += 1

    async def the_end(self) -> None:
        """The last block can be had, the one behind it cannot; nothing is hurt by asking."""
        disk = self.disk
        block = disk.info.block_size
        data = self.dice.randbytes(block)
        await disk.write(memoryview(data), disk.size - block)
        buffer = bytearray(block)
        await disk.read_into(memoryview(buffer), disk.size - block)
        assert buffer == data
        for offset in (disk.size - block + 1, disk.size):
            try:
                await disk.read_into(memoryview(buffer), offset)
            except OutOfRange:
                continue
            raise AssertionError(f"a read at {offset} was not refused")
        await self.compare(0, 64 * KIB)


class Counting:
    """Counts what responses did with the STags of commands, and Data-Outs, while entered."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._original = IserInitiator.deallocate_task_resources
        self._send_control = IserInitiator.send_control

    def __enter__(self) -> None:
        original, outcome = self._original, self._outcome

        def counting(datamover: IserInitiator, slot: PduSlot, invalidated: int) -> None:
            outcome.tagged += bool(slot.stag)
            outcome.invalidated += bool(invalidated)
            original(datamover, slot, invalidated)

        def sending(datamover: IserInitiator, slot: PduSlot) -> None:
            outcome.data_outs += slot.direction == UNSOLICITED
            send(datamover, slot)

        send = self._send_control
        IserInitiator.deallocate_task_resources = counting  # type: ignore[assignment,method-assign]
        IserInitiator.send_control = sending  # type: ignore[assignment,method-assign]

    def __exit__(self, *_: object) -> None:
        IserInitiator.send_control = self._send_control  # type: ignore[method-assign]
        IserInitiator.deallocate_task_resources = self._original  # type: ignore[method-assign]


async def everything(url: str, options: dict[str, str]) -> Outcome:
    """Run every step on the LUN of ``url``. Raises AssertionError where data differs."""
    outcome = Outcome()
    with Counting(outcome), trio.fail_after(TIMEOUT_S):
        async with open_disks([url], options) as disks:
            disk = disks.disks[disks.default]
            info = disk.info
            outcome.connection = dict(info.connection)
            outcome.peer = f"{info.vendor} {info.product} {info.revision}"
            assert info.size >= AREA + 8 * MIB
            model = Model(disk, outcome)  # type: ignore[arg-type]
            await disk.zero(0, AREA)
            await model.compare(0, 4 * MIB)
            for depth in DEPTHS:
                for size in SIZES:
                    await model.transfers(size, depth)
            await model.odd_sizes()
            await model.durable()
            await model.deallocate()
            await model.extents()
            await model.the_end()
            for offset in range(0, AREA, 8 * MIB):
                await model.compare(offset, 8 * MIB)
    return outcome
