"""TCP between the sockets of a simulated world: bytes in memory, with delays and faults of a seed.

What the product gets are a socket of trio's (``trio.socket.set_custom_socket_factory``), and the
plain socket that such a one becomes (``iserblk.sockets.plain``); all above them is the product's
own. A connection behaves as the kernel's does: a send takes what there is room for, what has been
sent comes in order and in pieces of any size, a close with unread bytes resets.
"""

from __future__ import annotations

import errno
import os
import socket
import termios
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Final, Self

import trio

from iserblk.sockets.plain import LoopSocket
from tests.simulation.loop import SimulatedLoop

HOST: Final = "10.0.0.1"  # of each connection that an initiator begins
DELAY_S: Final = (10e-6, 200e-6)  # one way, of a piece
ROOM: Final = 256 << 10  # bytes of one direction that wait to be read, or are on their way
PIECES: Final = 3  # of a send, at most
WHOLE: Final = 0.6  # of all sends come in one piece
FIRST_PORT: Final = 40000
WITHOUT_DIGEST: Final = 4096  # bytes: a login is shorter
_SEGMENT: Final = 1448


def problem(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class End:
    """One end of a connection: a descriptor. The faults of a line are those of ``Network``."""

    def __init__(self, network: Network, local: tuple[str, int], remote: tuple[str, int]) -> None:
        self.network = network
        self.local = local
        self.remote = remote
        self.number = network.loop.add(self)
        self.numbers = [self.number]  # of it, and of its copies, as long as they are open
        self.peer: End | None = None
        self.inbox = bytearray()
        self.at_least = 1  # bytes that make it readable (SO_RCVLOWAT)
        self.on_its_way = 0  # bytes sent that the other end has not read
        self.arrival = 0.0  # of what was sent last
        self.finished = False  # the other end sends no more
        self.silent = False  # this end sends no more
        self.deaf = False  # this end reads no more
        self.error = 0  # to be raised, once
        self.broken = False  # it has met an error
        self.gone = False  # this end knows of no connection any more
        self.lost = False  # what this end sends never arrives
        self.limit = -1  # bytes, after which the line is reset
        self.received = 0  # bytes
        self.damage_at = -1  # of all that is received: this byte is another then
        self.closed = False
        self.on_close: Callable[[], object] = lambda: None

    def __repr__(self) -> str:
        return f"{self.local} to {self.remote}"

    # -- Descriptor -------------------------------------------------------------------------------

    def readable(self) -> bool:
        return (
            len(self.inbox) >= self.at_least
            or self.finished
            or self.deaf
            or self.broken
            or self.error != 0
        )

    def writable(self) -> bool:
        return self.on_its_way < ROOM or self.broken or self.silent

    # -- what the product does --------------------------------------------------------------------

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Raises OSError: BlockingIOError where there is no room."""
        self._check()
        if self.silent or self.broken or self.peer is None:
            raise problem(errno.EPIPE)
        data = b"".join(buffers)
        if len(data) > ROOM - self.on_its_way:
            data = data[: ROOM - self.on_its_way]
        if not data:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.on_its_way += len(data)
        chance = self.network.chance
        size = len(data)
        if chance.random() < WHOLE:
            self._carry(partial(self.peer.come, data))
        else:
            at = 0
            for left in reversed(range(chance.randint(2, PIECES))):
                stop = size if not left else min(size, at + chance.randint(1, size))
                if stop > at:
                    self._carry(partial(self.peer.come, data[at:stop]))
                at = stop
        self.network.trace("%d sends %d", self.number, size)
        return size

    def receive_into(self, buffers: Sequence[memoryview | bytearray], peek: bool = False) -> int:
        """Raises OSError: BlockingIOError where there is nothing."""
        inbox = self.inbox
        if not inbox:
            self._check()
            if self.finished or self.deaf or self.broken:
                return 0
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        at, there = 0, len(inbox)
        for buffer in buffers:
            count = min(len(buffer), there - at)
            buffer[:count] = inbox[at : at + count]
            at += count
            if at == there:
                break
        if not peek:
            del inbox[:at]
            if self.peer is not None:
                self.peer.on_its_way -= at
                self.peer.touch()
        return at

    def shut_down(self, how: int) -> None:
        if self.broken or self.peer is None:
            raise problem(errno.ENOTCONN)
        if how != socket.SHUT_RD and not self.silent:
            self.silent = True
            self._carry(self.peer.finish)
        if how != socket.SHUT_WR:
            self.deaf = True
            self.touch()

    def copy(self) -> int:
        """One more descriptor of it, as a process gets with SCM_RIGHTS; returns the number."""
        number = self.network.loop.add(self)
        self.numbers.append(number)
        return number

    def touch(self) -> None:
        for number in self.numbers:
            self.network.loop.touch(number)

    def close(self, discard: bool = False, number: int | None = None) -> None:
        """One of its descriptors: the last one ends it."""
        number = self.number if number is None else number
        if number not in self.numbers:
            return
        self.numbers.remove(number)
        self.network.loop.remove(number)
        if self.numbers:
            return
        self.closed = True
        if self.peer is not None and not self.broken:
            if discard or self.inbox:
                self._carry(self.peer.reset)
            elif not self.silent:
                self.silent = True
                self._carry(self.peer.finish)
        self.on_close()

    @property
    def unread(self) -> int:
        """Bytes that the other end has not read: a broken connection keeps none."""
        return 0 if self.broken else self.on_its_way

    def take_error(self) -> int:
        number, self.error = self.error, 0
        return number

    def _check(self) -> None:
        if self.closed:
            raise problem(errno.EBADF)
        if self.error:
            number, self.error = self.error, 0
            raise problem(number)

    # -- what the network does --------------------------------------------------------------------

    def _carry(self, function: Callable[[], object]) -> None:
        """Call ``function`` when what is sent now comes there, behind all before it."""
        if self.lost:
            return
        loop = self.network.loop
        now = loop.now()
        when = now + self.network.chance.uniform(*self.network.delay)
        self.arrival = max(self.arrival, when)
        loop.later(self.arrival - now, partial(self._arrive, function))

    def _arrive(self, function: Callable[[], object]) -> None:
        if not self.lost:
            function()

    def come(self, data: bytes) -> None:
        if self.closed or self.gone:
            if self.peer is not None:
                self.peer.reset()  # nobody is there
            return
        if self.broken:
            return
        if self.limit >= 0:
            data, self.limit = data[: self.limit], max(0, self.limit - len(data))
        self.inbox += data
        if self.received <= self.damage_at < self.received + len(data):
            self.inbox[self.damage_at - self.received - len(data)] ^= 0x10
        self.received += len(data)
        self.touch()
        if not self.limit:
            self.network.cut(self)

    def finish(self) -> None:
        if not self.closed:
            self.finished = True
            self.touch()

    def reset(self) -> None:
        """The other end, or something between them, has reset the connection."""
        if not self.closed and not self.broken:
            self.error = errno.ECONNRESET
            self.broken = True
            self.touch()


class Listener:
    """A descriptor that takes connections at ``address``."""

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        self.network = network
        self.address = address
        self.number = network.loop.add(self)
        self.waiting: deque[End] = deque()

    def readable(self) -> bool:
        return bool(self.waiting)

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        self.network.listeners.pop(self.address, None)
        self.network.loop.remove(self.number)
        for end in self.waiting:
            end.close(discard=True)


class Network:
    """``delay``: of a piece, one way. ``dark``: addresses where nothing arrives, and nobody is
    told. ``on_line``: called when there is another connection."""

    def __init__(self, loop: SimulatedLoop, chance: Random) -> None:
        self.loop = loop
        self.chance = chance
        self.delay = DELAY_S
        self.dark: set[tuple[str, int]] = set()
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.lines: list[tuple[End, End]] = []  # the initiator's end, the target's
        self.trace: Callable[..., None] = lambda *words: None
        self.on_line: Callable[[], object] = lambda: None
        self._port = FIRST_PORT

    def pair(self) -> tuple[PlainSocket, PlainSocket]:
        """Two sockets that are connected, for a test."""
        here, there = self._line((HOST, 1), (HOST, 2))
        return PlainSocket(here), PlainSocket(there)

    def _line(self, local: tuple[str, int], remote: tuple[str, int]) -> tuple[End, End]:
        here, there = End(self, local, remote), End(self, remote, local)
        here.peer, there.peer = there, here
        return here, there

    async def connect(self, address: tuple[str, int]) -> End:
        """Raises OSError."""
        ended = trio.Event()
        made: list[End] = []
        gone = False

        def arrive() -> None:
            listener = self.listeners.get(address)
            if address in self.dark or gone:
                return
            if listener is not None:
                self._port += 1
                here, there = self._line((HOST, self._port), address)
                self.lines = [each for each in self.lines if not self._is_over(each)]
                self.lines.append((here, there))
                self.trace("%d and %d are a line", here.number, there.number)
                listener.waiting.append(there)
                self.loop.touch(listener.number)
                made.append(here)
                self.on_line()
            self.loop.later(self.chance.uniform(*self.delay), ended.set)

        self.loop.later(self.chance.uniform(*self.delay), arrive)
        try:
            await ended.wait()
        except BaseException:
            gone = True
            for end in made:
                end.close(discard=True)
            raise
        if not made:
            raise problem(errno.ECONNREFUSED)
        return made[0]

    @staticmethod
    def _is_over(line: tuple[End, End]) -> bool:
        return all(end.closed for end in line)

    # -- faults -----------------------------------------------------------------------------------

    def alive(self) -> list[tuple[End, End]]:
        return [line for line in self.lines if not any(end.closed or end.broken for end in line)]

    def cut(self, end: End) -> None:
        """Both ends are told that the connection is reset; what was on its way is lost."""
        for each in (end, end.peer):
            if each is not None:
                each.lost = True
                each.reset()

    def halve(self, end: End) -> None:
        """``end`` loses the connection; the other one is told when it sends."""
        end.lost = True
        end.gone = True
        end.reset()

    def lose(self, end: End) -> None:
        """What ``end`` sends from now on, and what is on its way, never arrives."""
        end.lost = True

    def limit(self, end: End, size: int) -> None:
        """The connection is reset when ``end`` has received ``size`` bytes more."""
        end.limit = size

    def damage(self, end: End, size: int) -> bool:
        """A byte is changed behind the next ``size`` that ``end`` receives. Returns whether it is:
        what an end receives first, its login, has no digest."""
        if end.received < WITHOUT_DIGEST:
            return False
        end.damage_at = end.received + size
        return True

    def start(self) -> None:
        """For trio's sockets of this run, which has begun."""
        trio.socket.set_custom_socket_factory(_Factory(self))

    def plain(self, sock: LoopSocket) -> socket.socket:
        """See ``iserblk.sockets.plain.source``."""
        assert isinstance(sock, TrioSocket)
        return PlainSocket(sock.give_away())


class _Factory(trio.abc.SocketFactory):
    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, family: int = 0, type: int = 0, proto: int = 0) -> TrioSocket:
        return TrioSocket(self._network, family, type)


class TrioSocket(trio.socket.SocketType):
    """A socket of trio's."""

    def __init__(self, network: Network, family: int, kind: int, end: End | None = None) -> None:
        assert family == socket.AF_INET and kind == socket.SOCK_STREAM, "there is only TCP"
        self._network = network
        self._end: End | Listener | None = end
        self._address = ("", 0)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET

    @property
    def type(self) -> socket.SocketKind:
        return socket.SOCK_STREAM

    @property
    def proto(self) -> int:
        return socket.IPPROTO_TCP

    def __enter__(self) -> TrioSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return -1 if self._end is None else self._end.number

    def give_away(self) -> End:
        end, self._end = self._end, None
        assert isinstance(end, End)
        return end

    def detach(self) -> int:
        return self.give_away().number

    def close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def setsockopt(self, level: int, option: int, *value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
            (self._connected().at_least,) = value

    def getsockopt(self, level: int, option: int, *_: Any) -> Any:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return int(isinstance(self._end, Listener))

    async def bind(self, address: tuple[Any, ...]) -> None:
        await trio.lowlevel.checkpoint()
        host, port = address[:2]
        self._address = host, port or 3260

    def listen(self, backlog: int = 0) -> None:
        if self._address in self._network.listeners:
            raise problem(errno.EADDRINUSE)
        self._end = self._network.listeners[self._address] = Listener(self._network, self._address)

    async def accept(self) -> tuple[TrioSocket, object]:
        await trio.lowlevel.checkpoint()
        assert isinstance(self._end, Listener)
        while not self._end.waiting:
            await self._network.loop.until_readable(self._end.number)
        end = self._end.waiting.popleft()
        return TrioSocket(self._network, self.family, self.type, end), end.remote

    async def connect(self, address: tuple[Any, ...]) -> None:
        await trio.lowlevel.checkpoint()
        self._end = await self._network.connect(address[:2])

    def getsockname(self) -> tuple[str, int]:
        return self._end.local if isinstance(self._end, End) else self._address

    def getpeername(self) -> tuple[str, int]:
        return self._connected().remote

    def _connected(self) -> End:
        if not isinstance(self._end, End):
            raise problem(errno.ENOTCONN)
        return self._end

    async def recv(self, size: int, flags: int = 0) -> bytes:
        await trio.lowlevel.checkpoint()
        buffer = bytearray(size)
        while True:
            with suppress(BlockingIOError):
                peek = bool(flags & socket.MSG_PEEK)
                return bytes(buffer[: self._connected().receive_into([buffer], peek)])
            await self._network.loop.until_readable(self.fileno())

    async def send(self, data: Any, flags: int = 0) -> int:
        await trio.lowlevel.checkpoint()
        while True:
            with suppress(BlockingIOError):
                return self._connected().send([data])
            await self._network.loop.until_writable(self.fileno())


class PlainSocket(socket.socket):
    """The product's, without a descriptor of the system."""

    def __init__(self, end: End, number: int | None = None) -> None:  # it makes no descriptor
        self._end = end
        self._number = end.number if number is None else number
        self._is_closed = False  # (another copy may get the number)
        self._discards = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def end(self) -> End:
        return self._end

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET

    @property
    def type(self) -> socket.SocketKind:
        return socket.SOCK_STREAM

    @property
    def proto(self) -> int:
        return socket.IPPROTO_TCP

    def fileno(self) -> int:
        return -1 if self._is_closed or self._end.closed else self._number

    def copy(self) -> PlainSocket:
        """What another process gets of it."""
        return PlainSocket(self._end, self._end.copy())

    def setblocking(self, flag: bool) -> None: ...

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        if self._end.closed:
            raise problem(errno.EBADF)
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            self._discards = True

    def getsockopt(self, level: int, option: int, *_: Any) -> Any:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            return self._end.take_error()
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        return _SEGMENT

    def getsockname(self) -> tuple[str, int]:
        return self._end.local

    def getpeername(self) -> tuple[str, int]:
        return self._end.remote

    def send(self, data: Any, flags: int = 0) -> int:
        return self._end.send([data])

    def sendall(self, data: Any, flags: int = 0) -> None:
        assert self._end.send([data]) == len(data)

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        return self._end.send(list(buffers))

    def recv(self, size: int, flags: int = 0) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self._end.receive_into([buffer])])

    def recv_into(self, buffer: Any, *_: Any) -> int:
        return self._end.receive_into([buffer])

    def recvmsg_into(self, buffers: Any, *_: Any) -> tuple[int, list[Any], int, Any]:
        return self._end.receive_into(list(buffers)), [], 0, None

    def shutdown(self, how: int) -> None:
        self._end.shut_down(how)

    def count(self, which: int) -> int:
        """What ioctl(2) tells. (What has not been read counts as not acknowledged, as in a Unix
        socket.)"""
        return self._end.unread if which == termios.TIOCOUTQ else len(self._end.inbox)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._end.close(self._discards, self._number)


class ListeningSocket(socket.socket):
    """As ``PlainSocket``, one that listens at ``address``."""

    def __init__(self, network: Network, address: tuple[str, int]) -> None:
        self._listener = network.listeners[address] = Listener(network, address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._listener.number

    def setblocking(self, flag: bool) -> None: ...

    def accept(self) -> tuple[PlainSocket, Any]:
        if not self._listener.waiting:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        end = self._listener.waiting.popleft()
        return PlainSocket(end), end.remote

    def close(self) -> None:
        self._listener.close()


def ioctl(sock: PlainSocket, which: int, count: MutableSequence[int]) -> int:
    """In place of fcntl.ioctl."""
    count[0] = sock.count(which)
    return 0
