"""A TCP proxy with faults, in a thread of its own.

    initiator ── up ──▶ [behaviours] ──▶ target
    initiator ◀── [behaviours] ◀── down ── target

Each connection (``Link``) gets fresh behaviours from ``plan``, so that what happens to the third
connection of a seed happens to the third connection again. All methods may be called from any
thread.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from tests.support.faults import behaviours as faults
from tests.support.faults.behaviours import FIN, RST, Behaviour, Hold, Item, Signal
from tests.support.faults.framing import Framer, Unit, framers

CHUNK = 65536
MOST_QUEUED = 4 << 20  # bytes of one direction; then its source is not read
MOST_REMEMBERED = 4096  # units of one direction
JOIN_S = 20.0
_LINGER_NONE = struct.pack("ii", 1, 0)

# What happens to connection ``number`` (0: the first): the behaviours of (up, down).
Plan = Callable[[int], tuple[Sequence[Behaviour], Sequence[Behaviour]]]


def nothing(_number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
    return (), ()


class Flow:
    """One direction of a link."""

    def __init__(self, link: Link, source: socket.socket, sink: socket.socket) -> None:
        self.link = link
        self.source = source
        self.sink = sink
        self.behaviours: list[Behaviour] = []
        self.framer: Framer | None = None
        self.queue: deque[Item] = deque()
        self.queued = 0
        self.reading = True
        self.ended = False  # FIN has been passed on, or the sink is gone
        self.taken = 0  # bytes of whole units, as they came
        self.passed = 0  # bytes
        self.units: deque[Unit] = deque(maxlen=MOST_REMEMBERED)  # what came, without its data
        self._due = 0.0

    def came(self, data: bytes) -> None:
        assert self.framer is not None
        for unit in self.framer.feed(data):
            self.units.append(Unit(b"", unit.offset, unit.bhs, unit.tagged))
            self.taken += len(unit.data)
            self.emit([unit])

    def source_ended(self, kind: str) -> None:
        self.reading = False
        if self.framer is not None and (rest := self.framer.rest()):
            self.emit([Unit(rest, 0)])
        self.emit([Signal(kind)])

    def emit(self, items: list[Item], behind: Behaviour | None = None) -> None:
        """Pass ``items`` through all behaviours, or those behind ``behind``, into the queue."""
        start = self.behaviours.index(behind) + 1 if behind is not None else 0
        now = monotonic()
        if behind is None:
            for item in items:
                item.due = now
        for behaviour in self.behaviours[start:]:
            items = [out for item in items for out in behaviour.take(item)]
        if self.ended:
            return  # the sink takes no more
        for item in items:
            self._due = item.due = max(self._due, item.due)
            self.queue.append(item)
            if isinstance(item, Unit):
                self.queued += len(item.data)

    def send(self, now: float) -> None:
        """Send the items that are due, as far as the sink takes them."""
        while self.queue and self.queue[0].due <= now and not self.ended:
            item = self.queue[0]
            if isinstance(item, Signal):
                self.queue.popleft()
                if item.kind == RST:
                    self.link.reset()
                    return
                self.ended = True
                with contextlib.suppress(OSError):
                    self.sink.shutdown(socket.SHUT_WR)
                return
            try:
                count = self.sink.send(item.data) if item.data else 0
            except BlockingIOError:
                return
            except OSError:
                self.ended = True  # the receiving end is gone
                self.queue.clear()
                return
            self.passed += count
            self.queued -= count
            if count < len(item.data):
                item.data = item.data[count:]
                return
            self.queue.popleft()

    @property
    def blocked(self) -> bool:
        """Whether the first item is due, and waits for the sink."""
        return bool(self.queue) and not self.ended and self.queue[0].due <= monotonic()


class Link:
    """One connection through the proxy, and its way to the target."""

    def __init__(
        self, proxy: FaultProxy, number: int, client: socket.socket, server: socket.socket
    ) -> None:
        self.proxy = proxy
        self.number = number
        self.client = client
        self.server = server
        self.up = Flow(self, client, server)
        self.down = Flow(self, server, client)
        up, down = proxy.plan(number)
        self.up.behaviours = list(up)
        self.down.behaviours = list(down)
        self.dead = False

    def reset(self) -> None:
        """Reset both ends."""
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
        self.close()

    def abandon(self) -> None:
        """Reset the client's end alone."""
        self.up.reading = False
        self.down.ended = True
        self.down.queue.clear()
        with contextlib.suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
        self.client.close()

    def close(self) -> None:
        self.dead = True
        self.client.close()
        self.server.close()

    def flow_of(self, sock: socket.socket) -> tuple[Flow, Flow]:
        """(the flow that reads from ``sock``, the flow that writes to it)."""
        return (self.up, self.down) if sock is self.client else (self.down, self.up)


class FaultProxy:
    """Listens on a free port of 127.0.0.1. ``target``: (host, port) to connect to, which may
    be changed. ``framing``: "auto" (PDUs or FPDUs, as the first byte tells) or "raw"."""

    def __init__(
        self, target: tuple[str, int], plan: Plan = nothing, framing: str = "auto", port: int = 0
    ) -> None:
        self.target = target
        self.plan = plan
        self.links: list[Link] = []  # all that were ever made
        self.refused = 0
        self._framing = framing
        self._lock = threading.RLock()
        self._listener: socket.socket | None = self._listen(port)
        self.port = self._listener.getsockname()[1]
        self._reset_new = False
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)
        self._thread.start()

    # -- what a test does ------------------------------------------------------------------------

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stopping = True
        self._poke()
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive()
        for link in self.links:
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._wake.close()
        self._woken.close()

    def through(self, url: str) -> str:
        """The target's ``url``, changed to lead through the proxy."""
        scheme, _, rest = url.partition("://")
        return f"{scheme}://127.0.0.1:{self.port}/{rest.partition('/')[2]}"

    @property
    def alive(self) -> list[Link]:
        with self._lock:
            return [link for link in self.links if not link.dead]

    def cut(self, how: str = RST) -> int:
        """End every connection: RST, FIN (both ways, behind what is queued), or "black hole".
        Returns how many there were."""
        with self._lock:
            links = [link for link in self.links if not link.dead]
            for link in links:
                if how == RST:
                    link.reset()
                    continue
                for flow in (link.up, link.down):
                    if how == FIN:
                        flow.emit([Signal(FIN)])
                    else:
                        gate = faults.Gate()
                        gate.closed = True
                        flow.behaviours.append(gate)
            self._poke()
            return len(links)

    def abandon(self) -> int:
        """Reset the initiators' side of every connection; the target's stays, with what is
        held or under way: as if the network had lost it. Returns how many there were."""
        with self._lock:
            links = [link for link in self.links if not link.dead and link.up.reading]
            for link in links:
                link.abandon()
            self._poke()
            return len(links)

    def stack(self, up: bool, make: Callable[[Flow], Behaviour]) -> int:
        """Add a behaviour to one direction of every connection, from now on. Returns how many
        there were."""
        with self._lock:
            links = [link for link in self.links if not link.dead]
            for link in links:
                flow = link.up if up else link.down
                flow.behaviours.append(make(flow))
            return len(links)

    def arm(self, up: bool, after: int, how: str = RST) -> int:
        """End every connection ``after`` bytes from now of one direction, as Cut does it."""
        return self.stack(up, lambda flow: faults.Cut(flow.taken + after, how))

    def refuse(self, by_reset: bool = False) -> None:
        """Refuse new connections (the port is closed), or reset each right after it was made."""
        with self._lock:
            if by_reset:
                self._reset_new = True
            elif self._listener is not None:
                self._listener.close()
                self._listener = None
            self._poke()

    def admit(self) -> None:
        """Take new connections again, on the same port."""
        with self._lock:
            self._reset_new = False
            if self._listener is None:
                self._listener = self._listen(self.port)
            self._poke()

    def release(self, hold: Hold) -> int:
        """Let what ``hold`` holds go on; returns how many bytes that was."""
        with self._lock:
            for link in self.links:
                for flow in (link.up, link.down):
                    if hold in flow.behaviours:
                        items = hold.let_go()
                        flow.emit(items, behind=hold)
                        self._poke()
                        return sum(len(item.data) for item in items if isinstance(item, Unit))
        raise AssertionError("no connection has met this behaviour")

    def seen(self, up: bool = True) -> list[Unit]:
        """The last units of all links from the initiators (``up``) or the target, without data."""
        with self._lock:
            return [unit for link in self.links for unit in (link.up if up else link.down).units]

    # -- the thread ------------------------------------------------------------------------------

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        listener.setblocking(False)
        return listener

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                wanted, timeout = self._wanted()
                selector = selectors.DefaultSelector()
                for sock, events in wanted.items():
                    selector.register(sock, events)
            with selector:
                ready = selector.select(timeout)
            with self._lock:
                for key, events in ready:
                    self._serve(key.fileobj, events)
                now = monotonic()
                for link in self.links:
                    for flow in (link.up, link.down):
                        if not link.dead and flow.queue:
                            flow.send(now)
                    if not link.dead and link.up.ended and link.down.ended:
                        link.close()

    def _wanted(self) -> tuple[dict[socket.socket, int], float | None]:
        wanted = {self._woken: selectors.EVENT_READ}
        if self._listener is not None:
            wanted[self._listener] = selectors.EVENT_READ
        due: float | None = None
        for link in self.links:
            if link.dead:
                continue
            for flow in (link.up, link.down):
                if flow.reading and flow.queued < MOST_QUEUED:
                    wanted[flow.source] = wanted.get(flow.source, 0) | selectors.EVENT_READ
                if flow.blocked:
                    wanted[flow.sink] = wanted.get(flow.sink, 0) | selectors.EVENT_WRITE
                elif flow.queue and not flow.ended:
                    first = flow.queue[0].due
                    due = first if due is None else min(due, first)
        return wanted, None if due is None else max(0.0, due - monotonic())

    def _serve(self, sock: object, events: int) -> None:
        if sock is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif sock is self._listener:
            self._accept()
        elif events & selectors.EVENT_READ:
            for link in self.links:
                if not link.dead and (sock is link.client or sock is link.server):
                    assert isinstance(sock, socket.socket)
                    self._read(link, sock)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        try:
            if self._reset_new:
                raise ConnectionRefusedError
            server = socket.create_connection(self.target, 5.0)
        except OSError:
            self.refused += 1
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            client.close()
            return
        for sock in (client, server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.links.append(Link(self, len(self.links), client, server))

    def _read(self, link: Link, sock: socket.socket) -> None:
        flow, other = link.flow_of(sock)
        try:
            data = sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            # This end was reset and can be told nothing more; the other end shall know.
            other.ended = True
            flow.source_ended(RST)
            return
        if not data:
            flow.source_ended(FIN)
            return
        if flow.framer is None:
            link.up.framer, link.down.framer = framers(data, self._framing)
        flow.came(data)
