"""The face of a simulated world that speaks NBD: the product's server above the disk, and clients.

Each connection is a client of its own to the server, and one who flushes (``Hearer``) to the
history. Clients end connections in all ways there are, with requests under way, connect again, and
repeat a flush that was not answered. What a client had asked for when its connection went may be
done until the server has closed its end.

Where servers succeed each other (``servers``), all connections are of one client, as those of the
kernel are: it flushes, ends none of them, and none may end.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from random import Random
from typing import Final, Protocol

import trio

from iserblk.disk.seam import EXTENT_DATA, DirectDisk
from iserblk.nbd import messages as nbd
from iserblk.nbd.exports import Export
from iserblk.nbd.server import NbdServer
from tests.simulation import nbd_wire
from tests.simulation.cases import DISC, MIDWAY, MUTE, NBD_CLOSE, NBD_CUT, VANISH
from tests.simulation.faces import (
    DURABLE_AT_ONCE,
    EXTENTS,
    FLUSH,
    FUA,
    READ,
    TRIM,
    WRITE,
    ZERO,
    ZERO_FUA,
    Around,
)
from tests.simulation.history import Change, Hearer, Wrong
from tests.simulation.nbd_wire import Connection, Gone, Refused
from tests.simulation.network import HOST, End, ListeningSocket, Network, TrioSocket

PLACE: Final = (HOST, 10809)
AGAIN_S: Final = 0.01  # about so long a client waits before it connects again
PATIENCE_S: Final = 30.0  # of a client that has said DISC, or whose answers do not come

GONE_WITH_FLUSH = "NBD: gone with a flush under way"
REPEATED = "NBD: flush repeated"
TOLD = "NBD: loss told"
UNREAD = "NBD: gone with the answer to a flush unread"
EARLY = "NBD: comes again before its end is noticed"
UNFLUSHED = "NBD: DISC with writes unflushed"
WITH_REQUESTS = "NBD: DISC with requests under way"
STATES: Final = (GONE_WITH_FLUSH, REPEATED, TOLD, UNREAD, EARLY, UNFLUSHED, WITH_REQUESTS)


class _Line:
    """A connection, with what the history knows of it. ``there``: the server's end. ``hearer``:
    None before it has asked for the export. ``left``: changes that were not answered. ``told``: of
    a loss, at least once. ``doubted``: flushes were under way when another connection began."""

    def __init__(self, connection: Connection, here: End, there: End) -> None:
        self.connection = connection
        self.here = here
        self.there = there
        self.hearer: Hearer | None = None
        self.left: list[Change] = []
        self.told = False
        self.doubted = False
        self.heard = 0
        self.at_flush: Callable[[], object] | None = None
        self.is_gone = False


class _Place:
    """Where one connection is at a time."""

    def __init__(self) -> None:
        self.line: _Line | None = None
        self.lock = trio.Lock()


class Serving(Protocol):
    """Who serves. ``only_client``: all connections are of one."""

    @property
    def only_client(self) -> bool: ...

    def serving(self, listening: socket.socket) -> AbstractAsyncContextManager[None]:
        """At the end, for which all connections are closed, all requests have ended."""
        ...

    def check_end(self) -> None:
        """Nothing is left. Raises Wrong."""
        ...

    def die(self) -> None:
        """The machine does; the connections have gone."""
        ...


class OneServer:
    """Implements Serving: of ``disk``, for as long as that is open."""

    only_client = False

    def __init__(self, disk: DirectDisk) -> None:
        self._server = NbdServer({"disk": Export("disk", disk)}, "disk", 0)

    @asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        async with self._server.serving([listening]):
            yield

    def check_end(self) -> None:
        memory = self._server.memory
        if memory.used or memory.open or self._server.clients:
            raise Wrong(f"the server keeps {memory.used} bytes of {memory.open} requests")

    def die(self) -> None:
        """Its requests end by themselves."""


class NbdFace:
    """``places``: connections at a time. ``seed``: of all that its clients decide."""

    def __init__(self, around: Around, servers: Serving, places: int, seed: str) -> None:
        self._around = around
        self._chance = Random(f"nbd {seed}")
        self._network = Network(around.loop, Random(f"nbd network {seed}"))
        self._network.trace = around.trace
        self._servers = servers
        self._only: Hearer | None = None
        self._flushes: dict[trio.Event, None] = {}  # that are not answered
        self._places = [_Place() for _ in range(places)]
        self._lines: dict[_Line, None] = {}  # of which the server has not closed its end
        self._is_dirty = False
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """At the end all connections have been closed, and all requests have ended."""
        if self._servers.only_client:
            self._only = self._around.history.begin_hearer()
        with ListeningSocket(self._network, PLACE) as listening:
            async with self._servers.serving(listening), trio.open_nursery() as self._nursery:
                if self._only is not None:
                    for number in range(len(self._places)):
                        await self._line(number)
                yield
                for place in self._places:
                    if place.line is not None:
                        place.line.connection.disconnect()
                if self._only is not None:
                    self._around.history.end_hearer(self._only)
                self._nursery.cancel_scope.deadline = trio.current_time() + PATIENCE_S
        if self._lines:
            raise Wrong(f"the server keeps {len(self._lines)} connections")
        self._servers.check_end()

    def die(self) -> None:
        """The server's machine does."""
        for line in self._network.alive():
            self._network.cut(line[0])
        self._servers.die()

    # -- connections ------------------------------------------------------------------------------

    async def _line(self, number: int) -> _Line:
        """That of a place, made if there is none. Raises Gone where no server is left."""
        place = self._places[number]
        async with place.lock:
            while place.line is None or place.line.connection.is_over:
                if self._around.is_over():
                    raise Gone
                if self._only is not None and place.line is not None:
                    raise Wrong("a server has ended a connection of the device")
                place.line = await self._connect(number)
                if place.line is None:
                    await trio.sleep(self._chance.expovariate(1 / AGAIN_S))
            return place.line

    async def _connect(self, number: int) -> _Line | None:
        try:
            here = await self._network.connect(PLACE)
        except OSError:
            return None
        assert here.peer is not None
        sock = TrioSocket(self._network, socket.AF_INET, socket.SOCK_STREAM, here)
        line = _Line(Connection(sock, self._chance.choice(nbd_wire.STYLES)), here, here.peer)
        self._lines[line] = None
        line.there.on_close = partial(self._closed, line)
        if line.there.closed:
            self._closed(line)
        connection = line.connection
        self._nursery.start_soon(
            connection.run, partial(self._begins, line), partial(self._is_over, line)
        )
        await connection.ready.wait()
        if connection.is_over:
            return None
        assert line.hearer is not None
        if self._only is None:
            self._around.history.settle_hearer(line.hearer)
        self._around.trace("connection %d of place %d: %s", here.number, number, connection.style)
        return line

    def _begins(self, line: _Line) -> None:
        """It asks for the export."""
        if self._only is not None:
            line.hearer = self._only
            return
        for each in self._lines:
            each.doubted = each.doubted or each.connection.has_open(nbd.FLUSH)
            if each.is_gone:
                self._around.count(EARLY)
        if line in self._lines:
            line.hearer = self._around.history.begin_hearer(anew=True)

    def _is_over(self, line: _Line) -> None:
        """The client has closed its end."""
        line.is_gone = True
        self._around.trace("connection %d is over", line.here.number)

    def _closed(self, line: _Line) -> None:
        """The server has."""
        del self._lines[line]
        history = self._around.history
        for change in line.left:
            history.end_change(change, self._around.loop.now(), False)
        if line.hearer is not None and self._only is None:
            if line.told:
                history.leave()
            history.end_hearer(line.hearer)
        self._around.trace("the server has closed connection %d", line.here.number)

    # -- requests ---------------------------------------------------------------------------------

    async def operate(self, chance: Random, kind: str, at: int, count: int) -> None:
        """Raises Wrong; Gone where no server is left."""
        number = chance.randrange(len(self._places))
        if kind == FLUSH:
            while not await self._flush(number):
                self._around.count(REPEATED)
            return
        line = await self._line(number)
        if kind == READ:
            await self._read(line.connection, at, count)
        elif kind == EXTENTS:
            await self._extents(line.connection, at, count)
        else:
            await self._change(line, kind, at, count)

    async def _read(self, connection: Connection, at: int, count: int) -> None:
        history, size = self._around.history, self._around.history.size
        read = history.begin_read(at, self._around.loop.now())
        data = None
        try:
            data = await connection.read(self._around.place(at), count * size)
        except Gone:
            pass
        except Refused as error:
            self._check_refusal(READ, error)
        self._around.look()
        history.end_read(read, data, self._around.loop.now())

    async def _change(self, line: _Line, kind: str, at: int, count: int) -> None:
        history, size, connection = self._around.history, self._around.history.size, line.connection
        writes = kind in (WRITE, FUA)
        now = self._around.loop.now
        change = history.begin_change(at, count, now(), zeroes=not writes, keeps=kind == TRIM)
        done = True
        try:
            if writes:
                self._around.trace("version %d, %d at %d", change.version, count, at)
                await connection.write(history.data(change), self._around.place(at), kind == FUA)
            elif kind in (ZERO, ZERO_FUA):
                place, fua = self._around.place(at), kind == ZERO_FUA
                await connection.zero(place, count * size, bool(at & 1), fua)
            else:
                await connection.trim(self._around.place(at), count * size)
        except Gone:
            if line in self._lines:
                line.left.append(change)
                return
            done = False
        except Refused as error:
            self._check_refusal(kind, error)
            done = False
        self._around.look()
        self._is_dirty = self._is_dirty or done
        history.end_change(change, now(), done, kind in DURABLE_AT_ONCE)

    async def _extents(self, connection: Connection, at: int, count: int) -> None:
        size, begun = self._around.history.size, self._around.loop.now()
        try:
            if connection.style == nbd_wire.SIMPLE:
                await connection.cache(self._around.place(at), count * size)
                return
            extents = await connection.extents(self._around.place(at), count * size)
        except Gone:
            return
        except Refused as error:
            self._check_refusal(EXTENTS, error)
            return
        for offset, length, flags in extents:
            if flags != EXTENT_DATA:
                start = offset - self._around.place(0)
                first = -(-start // size)
                self._around.history.check_hole(first, (start + length) // size - first, begun)

    async def _flush(self, number: int) -> bool:
        """Returns whether it was answered."""
        line = await self._line(number)
        history, now = self._around.history, self._around.loop.now
        assert line.hearer is not None
        begun = now()
        strikes, line.at_flush = line.at_flush, None
        if strikes is not None:
            strikes()
        answered = trio.Event()
        self._flushes[answered] = None
        try:
            await line.connection.flush()
            del self._flushes[answered]
            answered.set()
            if self._only is not None:  # of two at once the one tells, and the other may be first
                for each in [*self._flushes]:
                    await each.wait()
        except Gone:
            self._around.count(GONE_WITH_FLUSH)
            return False
        except Refused as error:
            line.heard += 1
            if self._around.is_over():
                raise Gone from error
            self._around.look()
            self._around.trace("a flush tells of a loss: %s", str(error))
            self._around.count(TOLD)
            line.told = True
            history.end_flush_with_loss(begun, now(), self._around.may_fail(FLUSH), line.hearer)
            if line.doubted or line not in self._lines:
                history.leave()
        else:
            while line.heard < line.connection.failed:  # an answer before this one: it is first
                await trio.lowlevel.checkpoint()
            self._is_dirty = False
            history.end_flush(begun, now(), line.hearer)
        finally:
            self._flushes.pop(answered, None)
            answered.set()
        return True

    def _check_refusal(self, kind: str, error: Refused) -> None:
        if not self._around.is_over() and not self._around.may_fail(kind):
            raise Wrong(f"{kind} fails: {error}")
        self._around.trace("%s fails: %s", kind, str(error))

    # -- faults -----------------------------------------------------------------------------------

    def strike(self, kind: str, chance: Random) -> None:
        lines = [each for each in self._lines if each.hearer and not each.connection.is_over]
        if not lines:
            return
        line = chance.choice(lines)
        later = self._around.loop.later
        patience = chance.choice((0.0, chance.uniform(0.0, 0.01), chance.uniform(0.0, PATIENCE_S)))
        self._around.trace("connection %d: %s", line.here.number, kind)
        if kind == DISC:
            if self._is_dirty:
                self._around.count(UNFLUSHED)
            if line.connection.open:
                self._around.count(WITH_REQUESTS)
            line.connection.disconnect()
            later(PATIENCE_S, line.connection.close)
        elif kind == NBD_CLOSE:
            line.connection.close()
        elif kind == NBD_CUT:
            self._network.cut(line.here)
        elif kind == MIDWAY:  # of a request, or of a reply
            end = chance.choice((line.here, line.there))
            self._network.limit(end, chance.choice((1, 17, chance.randint(1, 100_000))))
        elif kind == VANISH:
            self._vanish(line, patience)
        else:
            assert kind == MUTE
            line.at_flush = partial(self._mute, line, chance.uniform(0.0, 0.5), patience)

    def _mute(self, line: _Line, soon: float, patience: float) -> None:
        """No answer arrives any more; ``soon`` the client vanishes."""
        self._network.lose(line.there)
        self._around.loop.later(soon, partial(self._vanish, line, patience))

    def _vanish(self, line: _Line, patience: float) -> None:
        """The server notices when it sends something, or later."""
        if line.there.unread and line.connection.has_open(nbd.FLUSH):
            self._around.count(UNREAD)
        self._network.halve(line.here)
        self._around.loop.later(patience, line.there.reset)
