"""NBD servers of a simulated world, one after the other, as those of a device are: each is the
product's ``Life`` of a server, with a session of its own; a successor takes the connections over by
the product's rules (``iserblk.nbd.kernel.succession``), and the server before it ends.

What is made up is the socket between two servers (``_End``, in place of
``iserblk.nbd.kernel.channel.PacketSocket``), and the file in which a server notes its losses: no
server of a world begins behind one that was killed with the connections, as the kernel has none
then, either. A process that is killed does what the product does where it is cancelled.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Final, Protocol

import trio

from iserblk.disk.aio import TrioDisk
from iserblk.disk.ending import EndOfUse
from iserblk.disk.seam import LossCount
from iserblk.errors import IserblkError, first_error
from iserblk.loop.until_told import UntilTold
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.kernel.channel import Channel
from iserblk.nbd.kernel.handover import Kind, State, decode_untrusted
from iserblk.nbd.kernel.succession import Giver, Taker
from iserblk.nbd.server import NbdServer
from iserblk.nbd.serving import Life, Terms
from tests.simulation.faces import Around
from tests.simulation.history import Wrong
from tests.simulation.network import PlainSocket, problem
from tests.support.cores import session_of

HANDED_OVER = "hand-over: done"
UNTOLD = "hand-over: with a loss untold"
BEHIND_KILLED = "hand-over: the old server killed behind TAKEN"
NOT_FLUSHED = "hand-over: refused, as a flush has failed"
NOT_DRAINED = "hand-over: refused, as it takes too long"
KEPT = "hand-over: the successor dies, or is too late"
NOT_OPENED = "hand-over: the successor cannot open the LUN"
STATES: Final = (
    HANDED_OVER, UNTOLD, BEHIND_KILLED, NOT_FLUSHED, NOT_DRAINED, KEPT, NOT_OPENED,
)  # fmt: skip

LONGEST_S: Final = 3600.0  # of made-up time, for a server that ends
# About so long a successor takes for each message; with the last it is too late now and then.
_SLOW_S: Final = (0.0, 0.0, 0.0, 0.001, 0.001, 0.02, 0.02, 5.0)
_WHERE: Final = Path("successors")


class Servers(Around, Protocol):
    """What the servers need of their world."""

    def serves(self, disk: TrioDisk) -> None:
        """From now on clients use this one."""
        ...

    def served(self, disk: TrioDisk) -> None:
        """Its process has ended."""
        ...

    def begin_strike(self, chance: Random) -> None:
        """Something happens to the target, or to its connections, while a hand-over goes on."""
        ...


class _End:
    """Implements Channel: one end. ``heard``: is called with each packet that it gets, before
    that is returned. ``pause``: seconds, about so long each packet takes."""

    def __init__(self, chance: Random, pause: float) -> None:
        self.peer: _End
        self.heard: Callable[[bytes], object] = lambda _packet: None
        self.said: Callable[[bytes], object] = lambda _packet: None
        self._chance = chance
        self._pause = pause
        self.packets: deque[tuple[bytes, PlainSocket | None]] = deque()
        self.copies: list[PlainSocket] = []  # that have come here
        self.came = trio.Event()
        self.is_deaf = False
        self.is_closed = False

    async def receive(self) -> bytes:
        packet, sockets = await self.receive_with_sockets()
        for each in sockets:
            each.close()
        return packet

    async def receive_with_sockets(self) -> tuple[bytes, list[socket.socket]]:
        await self.until_received()
        if self._pause:
            await trio.sleep(self._chance.expovariate(1 / self._pause))
        if not self.packets:
            return b"", []
        packet, sock = self.packets.popleft()
        sockets: list[socket.socket] = [] if sock is None else [sock]
        self.heard(packet)
        try:
            await trio.lowlevel.checkpoint_if_cancelled()  # it may be the end of the process
        except BaseException:
            for each in sockets:
                each.close()
            raise
        return packet, sockets

    async def until_received(self) -> None:
        await trio.lowlevel.checkpoint()
        while not self.packets and not self.peer.is_closed:
            if self.is_closed:
                raise problem(errno.EBADF)
            self.came = trio.Event()
            await self.came.wait()

    def receive_last(self) -> bytes:
        self.is_deaf = True
        return self.receive_at_once()

    def receive_at_once(self) -> bytes:
        if self.packets:
            return self.packets.popleft()[0]
        if self.peer.is_closed:
            return b""
        raise BlockingIOError(errno.EAGAIN, "nothing has come")

    async def send(self, packet: bytes, sock: socket.socket | None = None) -> None:
        await trio.lowlevel.checkpoint()
        self._put(packet, sock)

    def send_at_once(self, packet: bytes) -> None:
        self._put(packet, None)

    def _put(self, packet: bytes, sock: socket.socket | None) -> None:
        if self.is_closed or self.peer.is_closed or self.peer.is_deaf:
            raise problem(errno.EPIPE)
        copy = None
        if sock is not None:
            assert isinstance(sock, PlainSocket)
            copy = sock.copy()
            self.peer.copies.append(copy)
        self.peer.packets.append((packet, copy))
        self.peer.came.set()
        self.said(packet)

    def close(self) -> None:
        self.is_closed = True
        for _, sock in self.packets:
            if sock is not None:
                sock.close()
        self.packets.clear()
        self.came.set()
        self.peer.came.set()

    def process_ended(self) -> None:
        """Nothing of it stays open."""
        self.close()
        for each in self.copies:
            each.close()


class _Succession:
    """Implements Succession, as that of ``iserblk.nbd.kernel.serving``. ``takes``: is called when
    the connections are this server's."""

    opens_last = False

    def __init__(self, taker: Taker | None, takes: Callable[[], object]) -> None:
        self.inherits = taker is not None
        self.successors: deque[_End] = deque()
        self.has_come = trio.Event()
        self._taker = taker
        self._takes = takes
        self._losses = LossCount()
        self._giver = Giver(lambda: self._losses)

    @property
    def given(self) -> bool:
        return self._giver.state is State.GIVEN

    def losses_before(self) -> LossCount:
        return LossCount() if self._taker is None else self._taker.losses

    def counted(self, count: LossCount) -> None:
        self._losses = count
        self._giver.tell()

    async def take(self) -> list[PausedConnection]:
        assert self._taker is not None
        taken = await self._taker.take()
        self._takes()
        return taken

    async def predecessor_ended(self, lost: Callable[[int], object]) -> None:
        assert self._taker is not None
        await self._taker.old_server_ended(lost)

    async def offer(self, server: NbdServer, flush: Callable[[], Awaitable[None]]) -> None:
        while not self.given:
            while not self.successors:
                self.has_come = trio.Event()
                await self.has_come.wait()
            await self._giver.attend(self.successors.popleft(), server, flush)

    def close(self) -> None:
        self._giver.close()
        if self._taker is not None:
            self._taker.close()
        for each in self.successors:
            each.close()


class _Process:
    """A server. ``settled``: it serves, or has ended. ``error``: what it has ended with."""

    def __init__(
        self,
        around: Servers,
        urls: Sequence[str],
        options: Mapping[str, str],
        taker: Taker | None = None,
    ) -> None:
        self.taker = taker
        self.channel: _End | None = None  # to the server before it
        self.succession = _Succession(taker, self._takes)
        self.disk: TrioDisk | None = None
        self.serves = False
        self.was_killed = False
        self.error: IserblkError | None = None
        self.settled = trio.Event()
        self.ended = trio.Event()
        self._around = around
        self._scope = trio.CancelScope()
        terms = Terms(
            until_unused=True, succession=self.succession, opened=lambda _infos: self._opened()
        )
        self.life = Life(urls, options, self._ready, lambda: None, terms, UntilTold(()))

    def _opened(self) -> None:
        (disk,) = self.life.served.values()
        assert isinstance(disk, TrioDisk)
        self.disk = disk

    def _takes(self) -> None:
        assert self.disk is not None
        self._around.serves(self.disk)

    def _ready(self) -> None:
        self.serves = True
        if self.taker is None:
            self._takes()
        self.settled.set()

    async def run(self, sockets: Sequence[socket.socket]) -> None:
        try:
            with self._scope:
                await self.life.run(sockets)
        except BaseExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, IserblkError):
                raise
            self.error = error
        except IserblkError as error:
            self.error = error
        finally:
            self.succession.close()
            if self.channel is not None:
                self.channel.process_ended()
            if self.disk is not None:
                self._around.served(self.disk)
            self.settled.set()
            self.ended.set()

    def kill(self) -> None:
        self.was_killed = True
        if self.disk is not None:
            EndOfUse([session_of(self.disk)]).give_up()
        self._scope.cancel()


class SuccessiveServers:
    """``failed``: what the last server has not flushed, in words; empty: nothing."""

    only_client = True

    def __init__(
        self, around: Servers, urls: Sequence[str], options: Mapping[str, str], seed: str
    ) -> None:
        self.failed: list[str] = []
        self._around = around
        self._urls = urls
        self._options = options
        self._chance = Random(f"servers {seed}")
        self._now = _Process(around, urls, options)  # that serves
        self._all: list[_Process] = []
        self._nursery: trio.Nursery

    @asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """The servers end when the last connection has. Raises Wrong, and IserblkError where the
        first one cannot open the LUN."""
        async with trio.open_nursery() as self._nursery:
            self._start(self._now, [listening])
            await self._now.settled.wait()
            if self._now.error is not None:
                raise self._now.error
            yield
            with trio.fail_after(LONGEST_S):
                await self._now.ended.wait()
            self._nursery.cancel_scope.cancel()
        self.failed = list(self._now.life.failed.values())
        if self._now.error is not None and not self._now.was_killed:
            raise Wrong(f"a server ends with {self._now.error}")

    @property
    def disk(self) -> TrioDisk:
        """That of the server that serves."""
        assert self._now.disk is not None
        return self._now.disk

    def check_end(self) -> None: ...

    def die(self) -> None:
        """The machine does."""
        for each in self._all:
            if not each.ended.is_set():
                each.kill()

    def _start(self, process: _Process, sockets: Sequence[socket.socket]) -> None:
        self._all.append(process)
        self._nursery.start_soon(process.run, sockets)

    # -- a hand-over ------------------------------------------------------------------------------

    async def hand_over(self, chance: Random) -> None:
        """To a successor, with whatever ``chance`` has happen. Raises Wrong."""
        old = self._now
        dies_at = chance.choice((None, None, None, None, chance.randrange(6)))
        kills = chance.random() < 0.3
        strikes = {chance.choice(list(Kind)) for _ in range(chance.choice((0, 1, 1, 2)))}
        pause = chance.choice(_SLOW_S)
        heard = 0

        def happens(packet: bytes) -> None:
            """Behind each packet."""
            nonlocal heard
            kind = Kind(decode_untrusted(packet).kind)
            self._around.trace("hand-over: %s", kind.name)
            if kind in strikes:
                strikes.discard(kind)
                self._around.begin_strike(chance)
            if kind in (Kind.HELLO, Kind.LOSSES, Kind.CONNECTION, Kind.ALL):
                if heard == dies_at:
                    new.kill()
                heard += 1
            if kind is Kind.TAKEN and kills and not new.was_killed:
                old.kill()

        def connect(_path: Path) -> Channel:
            if old.ended.is_set():
                raise problem(errno.ECONNREFUSED)
            here, there = _End(self._chance, pause), _End(self._chance, 0.0)
            here.peer, there.peer = there, here
            here.said = here.heard = happens
            new.channel = here
            old.succession.successors.append(there)
            old.succession.has_come.set()
            return here

        new = _Process(self._around, self._urls, self._options, Taker(_WHERE, connect))
        self._start(new, [])
        await new.settled.wait()
        if not new.serves:
            await new.ended.wait()
            self._look_at_failure(new, old)
            return
        self._now = new
        assert new.taker is not None
        losses = new.taker.losses
        self._around.trace("handed over: %d losses, %d told", losses.losses, losses.told)
        self._around.count(HANDED_OVER)
        if losses.told < losses.losses:
            self._around.count(UNTOLD)
        if old.was_killed and not self._around.is_over():
            self._around.count(BEHIND_KILLED)
        with trio.fail_after(LONGEST_S):
            await old.ended.wait()
        if not old.was_killed and (old.error is not None or old.life.failed):
            raise Wrong(f"the old server ends with {old.error} {old.life.failed}")

    def _look_at_failure(self, new: _Process, old: _Process) -> None:
        if self._around.is_over():
            return
        if old.ended.is_set() or old.succession.given:
            raise Wrong(f"no server has the connections: {new.error}")
        text = str(new.error)
        self._around.trace("not handed over: %s", text)
        if "the target could not flush" in text:
            self._around.count(NOT_FLUSHED)
        elif "requests are under way" in text:
            self._around.count(NOT_DRAINED)
        elif new.disk is None and not new.was_killed:
            self._around.count(NOT_OPENED)
        else:
            self._around.count(KEPT)
