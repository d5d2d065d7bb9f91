"""A second host of a simulated world: an initiator of its own, with a disk of its own on the LUN.

It reads, writes and flushes its part of the LUN, of which it alone writes (``History.foreign`` says
what the other host may see there), and resets the LUN now and then. Where it ``fences``, it
reserves the LUN, with a persistent reservation of any type, and lets it go again, in any way. Where
it ``invades``, it also writes to the part of the first host while that is shut out, and knows it:
what the first host has written before must not come back then.
"""

from __future__ import annotations

import math
from contextlib import AsyncExitStack
from random import Random
from typing import Final, Protocol

import trio

from iserblk.disk.aio import TrioDisk, open_disks
from iserblk.disk.multipath.paths import reset_lun
from iserblk.errors import ConnectionLost, IserblkError, WritesLost
from iserblk.scsi import reservations as pr
from iserblk.scsi import status as sam
from iserblk.scsi.reservations import OutParameters
from tests.simulation.history import History, Wrong
from tests.simulation.loop import SimulatedLoop
from tests.simulation.nbd_face import FLUSH, FUA, READ, TRIM, WRITE, ZERO
from tests.support.cores import session_of
from tests.support.until import all_ended

INITIATOR: Final = "iqn.2026-11.example:other"
KEY: Final = 0x07E5
TASKS: Final = 2  # that use its disk
PATIENCE_S: Final = 3600.0  # as the world's
AGAIN_S: Final = 0.01
IDLE_S: Final = 1.0  # it waits so long for the first host to begin something
MOST: Final = 24  # granules of one request
HOT: Final = 24  # granules that both use much
OPERATIONS: Final = {READ: 30, WRITE: 40, FLUSH: 8, FUA: 2, ZERO: 2, TRIM: 2}
FOREIGN: Final = 0.3  # of its reads
RESETS: Final = 0.05  # a LOGICAL UNIT RESET between two operations
FENCES: Final = 0.05
HELD: Final = (1, 10)  # operations during which it keeps a reservation
INVASIONS: Final = 0.5  # a write to the part of the first host, at each operation of that time
PAUSE: Final = 2.0  # operations of the first host between two of its, in the mean

_EXCLUSIVE_ACCESS: Final = (
    pr.EXCLUSIVE_ACCESS, pr.EXCLUSIVE_ACCESS_REGISTRANTS, pr.EXCLUSIVE_ACCESS_ALL
)  # fmt: skip

RELEASED, UNREGISTERED, CLEARED = "released", "unregistered", "cleared"
RESET, RESERVED, REFUSED = "reset by the other host", "reserved by the other host", "refused"
REFUSED_READ = "read refused"
INVADED = "written to by the other host"
BESIDE, FENCED = (RESET,), (RESERVED, REFUSED, REFUSED_READ)
STATES: Final = (*BESIDE, *FENCED, INVADED)


class Around(Protocol):
    """What the host needs of its world."""

    loop: SimulatedLoop
    history: History  # of the first host

    def trace(self, words: str, *values: str | float) -> None: ...

    def place(self, at: int) -> int:
        """Where granule ``at`` lies on the LUN, in bytes."""
        ...

    def count(self, state: str) -> None: ...

    def may_have_failed(self, error: IserblkError) -> bool:
        """The target has said that it could not write what it had cached, or may have."""
        ...

    def disturbed(self) -> None:
        """A disk has been connected again."""
        ...


class Shut:
    """Since when the first host is shut out, and until when: as far as that is known to the other
    host, whose commands take their time."""

    def __init__(self) -> None:
        self._asked = math.inf  # it may be shut out since then
        self._since = math.inf  # it is, since then
        self._until = math.inf  # and until then
        self._over = -math.inf  # when it was no longer, last

    def ask(self, now: float) -> None:
        self._asked = now
        self._since = self._until = math.inf

    def begin(self, now: float) -> None:
        self._since = now

    def let_go(self, now: float) -> None:
        self._until = now

    def end(self, now: float) -> None:
        self._asked = math.inf
        self._over = now

    def surely(self, begun: float, ended: float) -> bool:
        """All the time."""
        return self._since <= begun and ended <= self._until

    def perhaps(self, begun: float) -> bool:
        """At some moment since ``begun``."""
        return self._asked < math.inf or begun <= self._over


class OtherHost:
    """``part``: granules, of which it alone writes: first, and behind the last. ``options``: of its
    disk. ``several``: that has several connections. ``writes``, ``reads``: of the first host, that
    its reservations refuse."""

    def __init__(
        self,
        around: Around,
        urls: list[str],
        options: dict[str, str],
        part: range,
        granule: int,
        fences: bool,
        invades: bool,
        several: bool,
        seed: str,
    ) -> None:
        self._around = around
        self._urls = urls
        self._options = options
        self._part = part
        self._granule = granule
        self._fences = fences
        self._invades = invades
        self._is_known = False  # the first host has heard of the reservation
        self._seed = seed
        # (A command of the caller's own, as each that reserves, ends the journal until the next
        # flush.)
        self.history = History(part.stop, granule, hindered=fences, several=several)
        self.writes, self.reads = Shut(), Shut()
        self.door = trio.Lock()  # held while the LUN may be reserved
        self._goes = trio.Event()
        self._is_over = False
        self._reconnects = 0

    def heard(self) -> None:
        """A command of the first host was refused."""
        self._is_known = True

    def forgotten(self) -> None:
        """The first host has died."""
        self._is_known = False

    def go_on(self) -> None:
        """The first host begins an operation."""
        self._goes.set()

    def end(self) -> None:
        """It ends when what it does is done."""
        self._is_over = True
        self._goes.set()

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        """Body of a task, which has started when its disk is open. Raises Wrong, and what its disk
        must not raise."""
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(open_disks(self._urls, self._options))
            disk = opened.disks[opened.default]
            assert isinstance(disk, TrioDisk)
            self._around.trace("the other host's disk is open")
            task_status.started()
            async with trio.open_nursery() as nursery:
                for number in range(TASKS):
                    nursery.start_soon(self._use, disk, number)
                nursery.start_soon(self._disturb, disk)
            with trio.fail_after(PATIENCE_S):
                for at in range(self._part.start, self._part.stop, MOST):
                    await self._read(disk, self.history, at, min(MOST, self._part.stop - at))
                await self._flush(disk)
                await all_ended(session_of(disk).queue)

    async def _pause(self, chance: Random) -> None:
        """Until the first host has begun something: what waits for ever is to be noticed."""
        for _ in range(int(chance.expovariate(1 / PAUSE)) + 1):
            with trio.move_on_after(IDLE_S):
                await self._goes.wait()
            if not self._is_over:
                self._goes = trio.Event()

    async def _use(self, disk: TrioDisk, number: int) -> None:
        chance = Random(f"other host {self._seed} {number}")
        kinds, weights = list(OPERATIONS), list(OPERATIONS.values())
        while not self._is_over:
            await self._pause(chance)
            kind = chance.choices(kinds, weights)[0]
            count = chance.randint(1, MOST)
            at = self._part.start + chance.randrange(len(self._part) - count + 1)
            history = self.history
            if kind == READ and chance.random() < FOREIGN:
                at = chance.randrange(self._part.start - count + 1)
                history = self._around.history
            self._around.trace("other host %d begins: %s, %d at %d", number, kind, count, at)
            with trio.fail_after(PATIENCE_S):
                if kind == READ:
                    await self._read(disk, history, at, count)
                elif kind == FLUSH:
                    await self._flush(disk)
                else:
                    await self._change(disk, kind, at, count)
            self._around.trace("other host %d: %s, %d at %d", number, kind, count, at)

    async def _disturb(self, disk: TrioDisk) -> None:
        chance = Random(f"other host {self._seed} disturbs")
        while not self._is_over:
            await self._pause(chance)
            if chance.random() < RESETS:
                await self._reset(disk)
            if self._fences and chance.random() < FENCES:
                async with self.door:
                    await self._reserve(disk, chance)

    # -- its part ---------------------------------------------------------------------------------

    def _look(self, disk: TrioDisk) -> None:
        reconnects = session_of(disk).counts.reconnects
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            self.history.heard()
            self._around.disturbed()

    async def _read(self, disk: TrioDisk, history: History, at: int, count: int) -> None:
        now, buffer = self._around.loop.now, bytearray(count * self._granule)
        read = history.begin_read(at, now(), foreign=history is not self.history)
        await disk.read_into(memoryview(buffer), self._around.place(at))
        self._look(disk)
        history.end_read(read, bytes(buffer), now())

    async def _change(self, disk: TrioDisk, kind: str, at: int, count: int) -> None:
        now, size, history = self._around.loop.now, self._granule, self.history
        writes = kind in (WRITE, FUA)
        change = history.begin_change(at, count, now(), zeroes=not writes, keeps=kind == TRIM)
        done = True
        try:
            if writes:
                await disk.write(
                    memoryview(history.data(change)), self._around.place(at), kind == FUA
                )
            elif kind == ZERO:
                await disk.zero(self._around.place(at), count * size)
            else:
                await disk.trim(self._around.place(at), count * size)
        except IserblkError as error:
            if not self._may_fail(error):
                raise
            done = False
        self._look(disk)
        history.end_change(change, now(), done, kind == FUA)

    async def _flush(self, disk: TrioDisk) -> None:
        now = self._around.loop.now
        begun = now()
        try:
            await disk.flush()
        except IserblkError as error:
            if not self._may_fail(error):
                raise
            self._look(disk)
            self.history.end_flush_with_loss(begun, now(), failed=True)
        else:
            self.history.end_flush(begun, now())

    def _may_fail(self, error: IserblkError) -> bool:
        return self._around.may_have_failed(error) or (
            self._fences and (bool(error.losses) or isinstance(error, WritesLost))
        )

    # -- the whole LUN ----------------------------------------------------------------------------

    async def _reset(self, disk: TrioDisk) -> None:
        self._around.trace("the other host resets the LUN")
        try:
            await disk.driver.run_operation(reset_lun(session_of(disk), 0))
        except ConnectionLost:
            return  # it may be carried out, or not
        self._around.count(RESET)

    async def _reserve(self, disk: TrioDisk, chance: Random) -> None:
        """Shut the first host out for a while."""
        now, kind = self._around.loop.now, chance.choice(pr.TYPES)
        shuts = [self.writes]
        if kind in _EXCLUSIVE_ACCESS:
            shuts.append(self.reads)
        await self._out(disk, pr.REGISTER_AND_IGNORE, 0, OutParameters(0, KEY, pr.APTPL))
        for each in shuts:
            each.ask(now())
        await self._out(disk, pr.RESERVE, kind, OutParameters(KEY))
        for each in shuts:
            each.begin(now())
        self._around.trace("the other host has reserved the LUN, type %d", kind)
        self._around.count(RESERVED)
        self._is_known = False
        for _ in range(chance.randint(*HELD)):
            await self._pause(chance)
            if self._invades and self._is_known and chance.random() < INVASIONS:
                await self._invade(disk, chance)
        how = chance.choice((RELEASED, UNREGISTERED, CLEARED))
        for each in shuts:
            each.let_go(now())
        if how == RELEASED:
            await self._out(disk, pr.RELEASE, kind, OutParameters(KEY))
        if how == CLEARED:
            await self._out(disk, pr.CLEAR, 0, OutParameters(KEY))
        else:
            await self._out(disk, pr.REGISTER_AND_IGNORE, 0, OutParameters(0, 0))
        for each in shuts:
            each.end(now())
        self._around.trace("the other host's reservation is over: %s", how)

    async def _invade(self, disk: TrioDisk, chance: Random) -> None:
        """Write to the part of the first host, so that it is durable."""
        now, history = self._around.loop.now, self._around.history
        count = chance.randint(1, MOST)
        at = chance.randrange(chance.choice((HOT, self._part.start)) - count + 1)
        change = history.begin_change(at, count, now())
        self._around.trace("the other host writes version %d, %d at %d", change.version, count, at)
        done = True
        try:
            await disk.write(memoryview(history.data(change)), self._around.place(at), True)
        except IserblkError as error:
            if not self._may_fail(error):
                raise
            done = False
        history.end_change(change, now(), done, fua=True)
        self._around.trace("the other host has written version %d", change.version)
        self._around.count(INVADED)

    async def _out(self, disk: TrioDisk, action: int, kind: int, parameters: OutParameters) -> None:
        """Until it is done: each of these may be done twice, but for CLEAR, which ends the
        registration with which it could be."""
        tried = False
        while True:
            try:
                result = await disk.command(
                    pr.reserve_out(action, kind), data_out=pr.encode_parameters(parameters)
                )
            except IserblkError as error:
                self._around.trace("PERSISTENT RESERVE OUT %d: %s", action, str(error))
            else:
                if result.status == sam.GOOD:
                    return
                if result.status == sam.RESERVATION_CONFLICT:
                    if action == pr.CLEAR and tried:
                        return
                    raise Wrong(f"PERSISTENT RESERVE OUT {action} of the holder is refused")
            tried = True
            await trio.sleep(AGAIN_S)
