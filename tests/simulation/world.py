"""A world of one disk: an initiator, a target and the network between them, in one thread.

Clients read, write and flush at random; meanwhile connections are lost in all ways that the network
has, the target restarts, with its cache or without, and the client dies with its journal. A
``History`` checks what the disk shows. All of it comes from a seed: ``play`` with the same seed
does the same again, in the same order.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

import trio

from iserblk.disk.aio import TrioDisk, TrioDiskSet, open_disks
from iserblk.disk.seam import EXTENT_DATA
from iserblk.errors import IserblkError, ScsiError, WritesLost
from iserblk.metrics.target_reading import TargetReading
from iserblk.scsi import sense
from iserblk.scsi.sense import Sense
from iserblk.target.scsi.device import LogicalUnit
from iserblk.target.store.store import OnLoss, no_loss
from iserblk.target.store.volatile import VolatileStore
from tests.model.machine import Media
from tests.model.trouble import TroubledDevice, Troubles
from tests.simulation.history import History, Wrong
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import End
from tests.simulation.running import Simulation
from tests.support.target_here import serve
from tests.support.until import all_ended, until

IQN: Final = "iqn.2026-11.example:disk"
INITIATOR: Final = "iqn.2026-11.example:initiator"
PLACES: Final = ("10.0.0.2:3260", "10.0.0.3:3260", "10.0.0.4:3260")
SIZE: Final = 1 << 20
CACHE: Final = 256 << 10  # smaller than the disk: some of it is written back now and then
MOST: Final = 128  # granules of one request
HOT: Final = 24  # granules, to which half of the requests go: they meet there
PATIENCE_S: Final = 3600.0  # of one request, in made-up time: it would never end
AGAIN: Final = 0.3  # how often another fault follows at once
SOON_S: Final = (0.0005, 0.003, 0.2)  # within about so many seconds
WRITTEN_BACK: Final = 0.3  # of a cache that is lost: a cache may write back at any time
AT_END: Final = 400  # lines of a trace that are kept
_JUNK: Final = b"\xee"

READ, WRITE, FLUSH, FUA, ZERO, TRIM, EXTENTS = (
    "read", "write", "flush", "write with FUA", "zero", "trim", "extents"
)  # fmt: skip
OPERATIONS: Final = {READ: 40, WRITE: 40, FLUSH: 8, FUA: 2, ZERO: 2, TRIM: 2, EXTENTS: 2}

CUT, HALVE, HOLE, LIMIT, SLOW, DARK = "cut", "halve", "hole", "limit", "slow", "dark"
RESTART, STRIKE, DIE = "restart", "restart without its cache", "death of the client"
BLINK, PASSING = "cache lost in place", "temporary errors"
RECOVERED, FAIL, LESS = "recovered errors", "failed flush", "other refusals"
FAULTS: Final = {
    CUT: 10, HALVE: 5, HOLE: 2, LIMIT: 10, SLOW: 3, DARK: 2, RESTART: 5, STRIKE: 8, DIE: 2,
    BLINK: 4, PASSING: 4, RECOVERED: 2, FAIL: 2, LESS: 2,
}  # fmt: skip
_KINDS: Final = {PASSING: "passing", RECOVERED: "recovered", FAIL: "flush"}


class Settings(NamedTuple):
    """``granule``: bytes, of which requests are multiples; may be less than a ``block``.
    ``between``: operations between two faults, in the mean. ``keeps``: the client has a journal.
    ``hesitates``: how often the target needs a thread. ``options``: of the disk."""

    scheme: str
    portals: int
    block: int
    granule: int
    clients: int
    between: int
    keeps: bool
    hesitates: float
    options: dict[str, str]


def draw(chance: Random) -> Settings:
    """What a world of this seed is like."""
    scheme = chance.choice(("iscsi", "iser"))
    options = {"initiator-name": INITIATOR, "io-timeout": "forever"}
    options["journal"] = chance.choice(("56M", "1M", "256k", "64k", "off"))
    options["queue-depth"] = chance.choice(("128", "128", "4", "1"))
    options["connections"] = chance.choice(("1", "1", "2", "3"))
    options["error-recovery-level"] = chance.choice(("0", "0", "1", "2"))
    options["immediate-data"] = chance.choice(("yes", "yes", "no"))
    options["max-transfer"] = chance.choice(("1M", "1M", "16384"))
    if scheme == "iser":
        options["style"] = chance.choice(("cm", "stream"))
        options["mpa-crc"] = chance.choice(("yes", "no"))
    elif chance.random() < 0.3:
        options["header-digest"] = options["data-digest"] = "crc32c"
    # (A granule is what a loss leaves whole.)
    block, granule = chance.choice(((512, 512), (4096, 512), (4096, 4096)))
    return Settings(
        scheme,
        chance.choice((1, 1, 2, 3)),
        block,
        granule,
        chance.choice((1, 2, 4, 8, 16)),
        chance.choice((5, 20, 60)),
        options["journal"] != "off",
        chance.choice((0.0, 0.1, 0.5)),
        options,
    )


@dataclass
class Result:
    """``trace``: a sum over all that has happened, in its order. ``seconds``: of made-up time."""

    settings: Settings
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    losses: int = 0
    seconds: float = 0.0
    trace: int = 0


class Trace:
    """A line for each thing that happens. ``lines``: the last ones. ``print``: gets each."""

    def __init__(self, loop: SimulatedLoop, print_line: Callable[[str], object] | None) -> None:
        self.lines: deque[str] = deque(maxlen=AT_END)
        self.sum = 0
        self._loop = loop
        self._print = print_line

    def __call__(self, words: str, *values: object) -> None:
        line = f"{self._loop.now():.6f} {words % values}"
        self.sum = zlib.crc32(line.encode(), self.sum)
        self.lines.append(line)
        if self._print is not None:
            self._print(line)


class Hesitant:
    """Implements Store over a cache that often would have to wait: then a thread does the work, and
    its end may overtake that of other work."""

    def __init__(self, cache: VolatileStore, chance: Random, hesitates: float) -> None:
        self._cache = cache
        self._chance = chance
        self._hesitates = hesitates
        self.size = cache.size
        self.on_loss: OnLoss = no_loss  # this cache has none
        self.flush = cache.flush
        self.unmap = cache.unmap
        self.punch = cache.punch
        self.zero = cache.zero
        self.extents = cache.extents
        self.prefetch = cache.prefetch
        self.usage = cache.usage
        self.measure = cache.measure
        self.close = cache.close

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        return not self._waits(nowait) and self._cache.read_into(buffer, offset, nowait)

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        return not self._waits(nowait) and self._cache.write(data, offset, durable, nowait)

    def _waits(self, nowait: bool) -> bool:
        return nowait and self._chance.random() < self._hesitates


class _Troubles(Troubles):
    def take_time(self) -> None:
        """The loop does."""


class Target:
    """The target, which may end in the middle of its commands. What is on ``media`` stays."""

    def __init__(self, world: World) -> None:
        self.media = Media(SIZE)
        self._world = world
        self._cache = self._new_cache()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.troubles = _Troubles(world.chance.random())
        self.read: Callable[[], TargetReading]
        self._device: TroubledDevice

    async def start(self) -> None:
        await self._world.nursery.start(self._run)

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        unit = LogicalUnit(
            self._cache, serial="SIMULATED", block=self._world.settings.block, write_cache=True
        )

        async def watch(read: Callable[[], TargetReading]) -> None:
            self.read = read

        def device(*words: Any) -> TroubledDevice:
            self._device = TroubledDevice(self.troubles, *words)
            return self._device

        self._ended = trio.Event()
        with trio.CancelScope() as self._scope:
            await serve(
                PLACES[: self._world.settings.portals],
                IQN,
                {0: unit},
                lambda _url: task_status.started(),
                make_device=device,
                watch=watch,
            )
        self._ended.set()

    async def stop(self, loses: bool) -> None:
        """``loses``: its cache, but for what was written back before."""
        self._world.cut_all()
        self._scope.cancel()
        await self._ended.wait()
        if loses:
            self._lose()
            self._cache = self._new_cache()

    def _lose(self) -> None:
        chance = self._world.chance
        with self.media.losing(lambda: chance.random() >= WRITTEN_BACK):
            self._cache.flush()

    def blink(self) -> None:
        """Lose the content of the cache, and tell of it; connections stay."""
        self._lose()
        self._device.reset()

    def _new_cache(self) -> Hesitant:
        cache = VolatileStore(self.media, CACHE)
        return Hesitant(cache, self._world.chance, self._world.settings.hesitates)


class World:
    """``play`` runs it, once."""

    def __init__(
        self, seed: int, operations: int, print_line: Callable[[str], object] | None = None
    ) -> None:
        self.chance = Random(f"world {seed}")
        self.settings = draw(self.chance)
        simulation = self.simulation = Simulation(seed)
        self.loop = simulation.loop
        self.network = simulation.network
        self.trace = self.network.trace = Trace(self.loop, print_line)
        granule = self.settings.granule
        self.history = History(SIZE // granule, granule, self.settings.keeps)
        self.network.on_line = self._disturbed
        self.nursery: trio.Nursery
        self._operations = operations
        self._result = Result(self.settings)
        self._under_way: Counter[str] = Counter()
        self._done = 0
        self._next_fault = 0
        self._next_death = operations
        self._fault_is_due = trio.Event()
        self._over = trio.Event()
        self._reconnects = 0

    def play(self) -> Result:
        """Raises Wrong, Stuck, and what the product raises where it must not."""
        self.simulation.run(self._body)
        result = self._result
        result.trace = self.trace.sum
        result.seconds = self.loop.now()
        result.losses = self.history.losses
        return result

    async def _body(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self._target = Target(self)
            await self._target.start()
            while self._done < self._operations:
                await self._life()
                await self._restart(True)
                self.history.died(self.loop.now())
            await self._life()  # reads all that is there
            await self._check_target()
            await self._target.stop(False)
            self.nursery.cancel_scope.cancel()
        self._check_end()

    def _disturbed(self) -> None:
        self.history.disturbed(self.loop.now())

    # -- a client's life --------------------------------------------------------------------------

    async def _life(self) -> None:
        """Of one client with its journal, from the opening of the disk to its death."""
        self._over = trio.Event()
        self._reconnects = 0
        self._target.troubles.forget()
        async with AsyncExitStack() as stack:
            scheme, places = self.settings.scheme, PLACES[: self.settings.portals]
            urls = [f"{scheme}://{place}/{IQN}/0" for place in places]
            opened = await stack.enter_async_context(open_disks(urls, self.settings.options))
            disk = opened.disks[opened.default]
            assert isinstance(disk, TrioDisk)
            self.trace("the disk is open")
            await self._everything(disk)
            if self._done < self._operations:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._trouble, opened)
                    async with trio.open_nursery() as clients:
                        for number in range(self.settings.clients):
                            clients.start_soon(self._client, disk, number)
                    nursery.cancel_scope.cancel()
                self._target.troubles.forget()
                if self._over.is_set():
                    return
                await self._everything(disk)
            with trio.fail_after(PATIENCE_S):
                await self._flush(disk)
            if self._under_way.total():
                raise Wrong(f"requests are under way: {self._under_way}")
            with trio.fail_after(PATIENCE_S):
                await all_ended(disk.driver.session.queue)
            self.trace("the disk is closed")

    async def _everything(self, disk: TrioDisk) -> None:
        for at in range(0, SIZE // self.settings.granule, MOST):
            with trio.fail_after(PATIENCE_S):
                await self._read(disk, at, MOST)

    async def _client(self, disk: TrioDisk, number: int) -> None:
        chance = self.chance
        while self._done < self._operations and not self._over.is_set():
            self._done += 1
            if self._done >= self._next_fault:
                self._fault_is_due.set()
            kind = chance.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            granule = self.settings.granule
            if chance.random() < 0.5:
                count = chance.randint(1, HOT // 2)
                at = chance.randrange(HOT - count + 1)
            else:
                count = chance.randint(1, min(chance.choice((1, 16, MOST)), MOST * 512 // granule))
                at = chance.randrange(SIZE // granule - count + 1)
            self._result.operations[kind] += 1
            self._under_way[kind] += 1
            began = self.loop.now()
            try:
                with trio.fail_after(PATIENCE_S):
                    await self._operate(disk, kind, at, count)
            except trio.TooSlowError:
                raise Wrong(f"{kind} of {count} blocks at {at} never ends") from None
            except IserblkError:
                if not self._over.is_set():
                    raise
                return  # it is dead
            finally:
                self._under_way[kind] -= 1
            self.trace("client %d: %s, %d at %d, since %.6f", number, kind, count, at, began)
            if chance.random() < 0.05:
                await trio.sleep(chance.expovariate(20.0))

    async def _operate(self, disk: TrioDisk, kind: str, at: int, count: int) -> None:
        if kind == READ:
            await self._read(disk, at, count)
        elif kind == FLUSH:
            await self._flush(disk)
        elif kind == EXTENTS:
            await self._extents(disk, at, count)
        else:
            await self._change(disk, kind, at, count)

    def _look(self, disk: TrioDisk) -> None:
        """Whether the disk has been connected again: only then it takes changes for lost."""
        reconnects = disk.driver.session.reconnects
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            self._disturbed()

    async def _read(self, disk: TrioDisk, at: int, count: int) -> None:
        size = self.settings.granule
        buffer = bytearray(count * size)
        read = self.history.begin_read(at, self.loop.now())
        await disk.read_into(memoryview(buffer), at * size)
        self._look(disk)
        self.history.end_read(read, bytes(buffer), self.loop.now())

    async def _change(self, disk: TrioDisk, kind: str, at: int, count: int) -> None:
        size = self.settings.granule
        writes = kind in (WRITE, FUA)
        change = self.history.begin_change(
            at, count, self.loop.now(), zeroes=not writes, keeps=kind == TRIM
        )
        done = True
        try:
            if writes:
                buffer = bytearray(self.history.data(change))
                await disk.write(memoryview(buffer), at * size, kind == FUA)
                buffer[:] = _JUNK * len(buffer)  # it is the caller's again
            elif kind == ZERO:
                await disk.zero(at * size, count * size, may_trim=bool(at & 1))
            else:
                await disk.trim(at * size, count * size)
        except IserblkError as error:
            if not self._may_fail(error):
                self.history.end_change(change, self.loop.now(), False)
                raise
            self.trace("a change fails: %s", error)
            done = False
        self._look(disk)
        self.history.end_change(change, self.loop.now(), done, kind == FUA)

    async def _flush(self, disk: TrioDisk) -> None:
        begun = self.loop.now()
        try:
            await disk.flush()
        except IserblkError as error:
            if not error.losses and not self._has_failed(error):
                raise
            self._look(disk)
            self.trace("a flush tells of a loss")
            failed = self._has_failed(error)
            self.history.end_flush_with_loss(begun, self.loop.now(), failed)
        else:
            self.history.end_flush(begun, self.loop.now())

    def _may_fail(self, error: IserblkError) -> bool:
        """A change that is to be durable when it ends: one with FUA, or that no journal holds."""
        return self._has_failed(error) or (
            isinstance(error, WritesLost)
            and (not self.settings.keeps or FAIL in self._result.faults)
        )

    def _has_failed(self, error: IserblkError) -> bool:
        """The target has said that it could not write what it had cached."""
        return (
            FAIL in self._result.faults
            and isinstance(error, ScsiError)
            and isinstance(error.sense, Sense)
            and error.sense.code == sense.WRITE_ERROR
        )

    async def _extents(self, disk: TrioDisk, at: int, count: int) -> None:
        size, begun = self.settings.granule, self.loop.now()
        for offset, length, flags in await disk.extents(at * size, count * size):
            if flags != EXTENT_DATA:
                first = -(-offset // size)
                self.history.check_hole(first, (offset + length) // size - first, begun)

    # -- faults -----------------------------------------------------------------------------------

    async def _trouble(self, disks: TrioDiskSet) -> None:
        chance = self.chance
        again = False
        while True:
            if again:  # into the recovery from the one before
                await trio.sleep(chance.expovariate(1 / chance.choice(SOON_S)))
            else:
                pause = int(chance.expovariate(1 / self.settings.between)) + 1
                self._next_fault = self._done + pause
                self._fault_is_due = trio.Event()
                await self._fault_is_due.wait()
                await trio.sleep(chance.choice((0.0, chance.uniform(0.0, 0.002))))
            again = chance.random() < AGAIN
            kind = chance.choices(list(FAULTS), list(FAULTS.values()))[0]
            self._result.faults[kind] += 1
            self.trace("fault: %s", kind)
            if kind == DIE:
                self._die(disks)
                return
            with trio.CancelScope(shield=True):  # clients may have ended meanwhile
                await self._strike(kind)

    def _die(self, disks: TrioDiskSet) -> None:
        """What the client had under way may arrive, or not; nothing more comes from it."""
        self._over.set()
        self.cut_all()
        assert disks.ending is not None
        disks.ending.give_up()

    def cut_all(self) -> None:
        for line in self.network.alive():
            self.network.cut(line[0])

    async def _strike(self, kind: str) -> None:
        chance, network = self.chance, self.network
        if kind in (RESTART, STRIKE):
            await self._restart(kind == STRIKE)
            return
        if kind == BLINK:
            self._target.blink()
            self.history.struck(self.loop.now(), self._target.media.content)
            return
        if kind in _KINDS:
            self.history.trouble()
            self._target.troubles.add(_KINDS[kind], chance.randint(1, 6))
            return
        if kind == LESS:
            self._target.troubles.refuse(chance.randrange(32))
            return
        if kind == SLOW:
            before, network.delay = network.delay, (0.001, chance.choice((0.01, 0.3)))
            await trio.sleep(chance.uniform(0.0, 2.0))
            network.delay = before
            return
        if kind == DARK:
            places = [place for place in network.listeners if chance.random() < 0.7]
            network.dark.update(places)
            for line in network.alive():
                for end in line:
                    if line[0].remote in places:
                        network.lose(end)
            await trio.sleep(chance.expovariate(0.1))
            network.dark.clear()
            self._disturbed()
            return
        ends: list[End] = [end for line in network.alive() for end in line]
        if not ends:
            return
        end = chance.choice(ends)
        if kind == CUT:
            network.cut(end)
        elif kind == HALVE:
            network.halve(end)
        elif kind == HOLE:
            network.lose(end)
        else:
            assert kind == LIMIT
            network.limit(end, chance.choice((1, 48, chance.randint(1, 100_000))))
        self._disturbed()

    async def _restart(self, loses: bool) -> None:
        await self._target.stop(loses)
        if loses:
            self.trace("the target has lost its cache")
            self.history.struck(self.loop.now(), self._target.media.content)
        else:
            self._disturbed()
        await trio.sleep(self.chance.choice((0.0, self.chance.expovariate(1.0))))
        await self._target.start()

    # -- the end ----------------------------------------------------------------------------------

    async def _check_target(self) -> None:
        """Nothing of its clients is left at the target."""
        with trio.move_on_after(PATIENCE_S):
            await until(lambda: not self._target.read().connections)
        left = self._target.read()
        if left.memory or left.memory_beside or left.connections or left.in_flight or left.sessions:
            raise Wrong(f"the target keeps {left}")

    def _check_end(self) -> None:
        loop = self.loop
        if loop.open or loop.watched:
            raise Wrong(f"open at the end: {loop.describe()}; {loop.watched} are watched")


def play(seed: int, operations: int, print_line: Callable[[str], object] | None = None) -> Result:
    """Raises Wrong and so on, with the end of the trace as notes."""
    world = World(seed, operations, print_line)
    try:
        return world.play()
    except BaseException as error:
        error.add_note("\n".join(["what happened last:", *world.trace.lines]))
        raise
