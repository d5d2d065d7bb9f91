"""A device without a kernel: two links whose engines work on each other's memory at once.

Strict where rxe is fatal: a window that is invalidated twice fails the test, as does a region that
is closed under a window. Faults: ``break_with`` ends an end as its device would.

``slow``: as siw on a slow wire. Nothing that is posted has an effect before ``arrive``, but Sends
and RDMA Writes are complete at once, and 4 KiB of data or more are copied only of those that are
signaled.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from iserblk.rcap.verbs import api, statuses
from iserblk.rcap.verbs.link import Device
from iserblk.rcap.verbs.pool import Registration
from iserblk.rcap.verbs.queuepair import VerbsQueuePair

UNCOPIED = 4096  # bytes from which siw lets TCP send data from where they are
REM_INV = 9
REM_ACCESS = 10
LOC_LEN = 1
TOP = 2**64


@dataclass
class Area:
    """Memory that a key opens."""

    address: int
    length: int
    access: int
    window: bool = False

    def allows(self, address: int, length: int, access: int) -> bool:
        inside = self.address <= address and address + length <= self.address + self.length
        return inside and self.access & access == access


class FakeWindow:
    def __init__(self, end: FakeEnd) -> None:
        self._end = end
        end.made += 1
        self.rkey = end.new_key()
        self.bound = False

    def close(self) -> None:
        self._end.open.pop(self.rkey, None)
        self._end.made -= 1


class FakeRegion:
    def __init__(self, end: FakeEnd, key: int) -> None:
        self._end = end
        self.lkey = key

    def close(self) -> None:
        area = self._end.regions.pop(self.lkey)
        self._end.registered -= area.length
        for other in self._end.open.values():
            assert other is area or not (
                area.address <= other.address < area.address + area.length
            ), "a region is closed under a window"
        self._end.open.pop(self.lkey, None)


@dataclass
class FakeEvent:
    kind: int
    status: int = 0
    private_data: bytes = b""

    def close(self) -> None:
        """Nothing to acknowledge."""


class FakeChannel:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.events: deque[FakeEvent] = deque()

    def put(self, kind: int) -> None:
        self.events.append(FakeEvent(kind))
        os.eventfd_write(self.fd, 1)

    def take(self) -> FakeEvent | None:
        if self.events:
            os.eventfd_read(self.fd)
            if len(self.events) > 1:
                os.eventfd_write(self.fd, 1)
            return self.events.popleft()
        return None


class FakeEnd:
    """Stands in for Link and Engine both."""

    def __init__(
        self,
        *,
        windows: bool,
        rooms: tuple[int, int] = (1024, 1024),
        limit: int = 1 << 40,
        transport: str = "InfiniBand",
    ) -> None:
        self.windows = windows
        self.send_room, self.receive_room = rooms
        self.device = Device("fake0", transport, "" if windows else "none", 1, 1, 1, 1)
        self.channel = FakeChannel()
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.engine = self
        self.peer: FakeEnd
        self.limit = limit  # bytes that can be registered
        self.registered = 0
        self.made = 0  # windows
        self.regions: dict[int, Area] = {}  # by local key
        self.open: dict[int, Area] = {}  # by remote key
        self.entries: deque[tuple[int, int, int, int, int, int]] = deque()
        self.receives: deque[tuple[int, int, int, int]] = deque()
        self.waiting: deque[Callable[[], bool]] = deque()  # of the peer's, for a receive
        self.prepared: list[Callable[[], bool]] = []
        self.slow = False
        self.wire: list[Callable[[], bool]] = []
        self._complete_at_once: list[int] = []
        self.posts = 0
        self.local_invalidations = 0
        self.hold_signals = False  # Sends leave, but their completions wait in ``held``
        self.held: list[int] = []
        self.broken = 0
        self._armed = True
        self._keys = 0x100
        self.closed = False

    def new_key(self) -> int:
        self._keys += 0x100
        return self._keys

    # --- Link ---

    def register(self, address: int, length: int, access: int) -> Registration:
        if self.registered + length > self.limit:
            raise OSError(12, "Cannot allocate memory")
        self.registered += length
        key = self.new_key()
        area = Area(address, length, access)
        self.regions[key] = area
        remote = access & (api.REMOTE_READ | api.REMOTE_WRITE)
        if remote:
            self.open[key] = area
        return Registration(FakeRegion(self, key), key, key if remote else 0)

    def make_window(self) -> FakeWindow:
        return FakeWindow(self)

    def close_window(self, window: FakeWindow) -> None:
        window.close()

    def disconnect(self) -> None:
        if not self.closed and not self.peer.closed:
            self.peer.channel.put(statuses.DISCONNECTED)

    def close(self, before: Callable[[], None]) -> None:
        before()
        self.closed = True
        assert not self.registered and not self.made, "memory is left"
        os.close(self.channel.fd)
        os.close(self.completion_fd)

    # --- Engine ---

    def send(self, number: int, opcode: int, flags: int, stag: int, to: int, *pieces: int) -> None:
        parts = [pieces[at : at + 3] for at in (0, 3) if pieces[at + 1]]
        size = sum(part[1] for part in parts)
        signaled = bool(flags & api.SIGNALED)
        copies: list[bytes] | None = None
        if self.slow and opcode != api.WR_RDMA_READ:
            if signaled or size < UNCOPIED:
                copies = [self._read(part) for part in parts]
            if signaled:
                signaled = False
                self._complete_at_once.append(number)

        def run() -> bool:
            peer = self.peer
            sent = copies
            if sent is None and opcode != api.WR_RDMA_READ:
                sent = [self._read(part) for part in parts]
            if opcode in (api.WR_SEND, api.WR_SEND_WITH_INV):
                if peer.closed or peer.broken:
                    return True
                if not peer.receives:
                    return False
                assert sent is not None
                peer.deliver(b"".join(sent), stag if opcode != 2 else 0)
            elif size:
                access = api.REMOTE_WRITE if opcode == api.WR_RDMA_WRITE else api.REMOTE_READ
                area = None if peer.closed else peer.open.get(stag)
                if area is None or not area.allows(to, size, access):
                    self.break_with(number, REM_ACCESS)
                    peer.break_with(peer.receives[0][0] if peer.receives else 0, statuses.FLUSHED)
                    return True
                ((address, length, key),) = parts
                assert self.regions[key].allows(address, length, 0)
                if sent is not None:
                    ctypes.memmove(to, sent[0], length)
                else:
                    ctypes.memmove(address, to, length)
            if self.broken:
                return True
            if signaled:
                if self.hold_signals:
                    self.held.append(number)
                else:
                    self.complete(number)
            return True

        self.prepared.append(run)

    def bind(
        self, number: int, flags: int, window: Any, region: Any, address: int, length: int,
        access: int,
    ) -> int:  # fmt: skip
        key = (window.rkey & ~0xFF) | ((window.rkey + 1) & 0xFF)

        def run() -> bool:
            area = self.regions[region.lkey]
            assert area.access & api.MW_BIND and area.allows(address, length, 0)
            assert not (access & api.REMOTE_WRITE and not area.access & api.LOCAL_WRITE)
            assert window.rkey not in self.open, "bound while it is bound"
            self.open[key] = Area(address, length, access, True)
            if flags & api.SIGNALED:
                self.complete(number)
            return True

        self.prepared.append(run)
        # As the library: the next bind starts from this key, once this was posted.
        self.prepared.append(lambda: setattr(window, "rkey", key) is None)  # type: ignore[func-returns-value]
        return key  # type: ignore[no-any-return]

    def invalidate(self, number: int, flags: int, key: int) -> None:
        def run() -> bool:
            assert self.open.pop(key, None) is not None, "invalidated twice: rxe would panic"
            self.local_invalidations += 1
            self.complete(number)
            return True

        self.prepared.append(run)

    def post(self) -> None:
        self.posts += bool(self.prepared)
        self.wire += self.prepared
        self.prepared.clear()
        for number in self._complete_at_once:
            self.complete(number)
        self._complete_at_once.clear()
        if not self.slow:
            self.arrive()

    def arrive(self) -> None:
        """All that was posted reaches the peer."""
        self.peer.waiting.extend(self.wire)
        self.wire.clear()
        self.peer.settle()

    def settle(self) -> None:
        """Run what the peer posted, as far as there are receives for it."""
        while self.waiting and self.waiting[0]():
            self.waiting.popleft()
            if self.peer.broken:
                self.waiting.clear()

    def receive(self, number: int, address: int, length: int, key: int) -> None:
        assert self.regions[key].allows(address, length, api.LOCAL_WRITE)
        self.receives.append((number, address, length, key))

    def post_receives(self) -> None:
        assert len(self.receives) <= self.receive_room
        self.settle()

    def deliver(self, message: bytes, invalidate: int) -> None:
        number, address, length, _ = self.receives.popleft()
        if len(message) > length:
            self.break_with(number, LOC_LEN)
            self.peer.break_with(0, REM_INV)
            return
        if invalidate:
            area = self.open.get(invalidate)
            if area is None or not area.window:
                self.break_with(number, REM_INV)
                self.peer.break_with(0, REM_INV)
                return
            del self.open[invalidate]
        ctypes.memmove(address, message, len(message))
        flags = 5 if invalidate else 1
        self.push((number, 0, len(message), flags, invalidate, 0))

    def _read(self, part: tuple[int, ...]) -> bytes:
        address, length, key = part
        assert self.regions[key].allows(address, length, 0)
        return ctypes.string_at(address, length)

    def complete(self, number: int) -> None:
        self.push((number, 0, 0, 0, 0, 0))

    def release_signals(self) -> None:
        self.hold_signals = False
        for number in self.held:
            self.complete(number)
        self.held.clear()

    def break_with(self, number: int, status: int) -> None:
        """The queue pair goes to its error state."""
        if not (self.broken or self.closed):
            self.broken = status
            self.push((number, status, 0, 0, 0, 0))
            for receive in self.receives:
                self.push((receive[0], statuses.FLUSHED, 0, 0, 0, 0))
            self.receives.clear()

    def push(self, entry: tuple[int, int, int, int, int, int]) -> None:
        self.entries.append(entry)
        if self._armed:
            self._armed = False
            os.eventfd_write(self.completion_fd, 1)

    def poll(self, limit: int) -> list[tuple[int, int, int, int, int, int]]:
        return [self.entries.popleft() for _ in range(min(limit, len(self.entries)))]

    def event(self) -> bool:
        try:
            os.eventfd_read(self.completion_fd)
        except BlockingIOError:
            return False
        return True

    def arm(self) -> None:
        self._armed = True


_links: WeakKeyDictionary[VerbsQueuePair, FakeEnd] = WeakKeyDictionary()


def fake_links(windows: bool, **options: Any) -> tuple[FakeEnd, FakeEnd]:
    first, second = FakeEnd(windows=windows, **options), FakeEnd(windows=windows, **options)
    first.peer, second.peer = second, first
    return first, second


def fake_pair(
    windows: bool,
    *,
    ird: int = 64,
    ord: int = 64,
    receive_size: int = 8268,
    private_data: tuple[bytes, bytes] = (b"", b""),
    budget: int = 64 << 20,
    eager: bool = True,
    **options: Any,
) -> tuple[VerbsQueuePair, VerbsQueuePair]:
    """Two connected ends. ``eager``: windows are bound when they are advertised. ``link_of`` has
    the link of each."""
    depth = min(ird, ord)
    pairs = []
    for link, data in zip(fake_links(windows, **options), reversed(private_data), strict=True):
        pair = VerbsQueuePair(
            link,  # type: ignore[arg-type]
            receive_size=receive_size,
            receives=0,
            budget=budget,
        )
        pair.connected(depth, depth, data, "fake")
        _links[pair] = link
        if windows and eager:
            bind_at_once(pair)
        pairs.append(pair)
    return pairs[0], pairs[1]


def link_of(pair: object) -> FakeEnd:
    """The link of a queue pair of ``fake_pair``."""
    assert isinstance(pair, VerbsQueuePair)
    return _links[pair]


def bind_at_once(qp: VerbsQueuePair) -> None:
    """Windows are bound with the next post, ahead of the message that names them. Some tests hand
    STags over in other ways: so they post nothing, at once."""
    advertise = qp.advertise

    def advertised(buffer: memoryview, rights: int) -> tuple[int, int]:
        result = advertise(buffer, rights)
        qp.post([])
        return result

    qp.advertise = advertised  # type: ignore[method-assign]
