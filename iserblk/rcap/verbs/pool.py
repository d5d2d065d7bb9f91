"""Registered memory for transfers: chunks of a few sizes, made when needed and kept.

A device reaches memory only where it was registered, and registering costs more than copying 4 KiB
does. So transfers go through chunks: each an mmap of its own with its own registration (bounds and
rights are checked by the device, for each chunk), in sizes of a power of two. A pool has one set of
rights; what the peer may read and what it may write are never the same memory.

A pool holds at most ``budget`` bytes. When that is used up, chunks of other sizes that nobody uses
give way; when none is left, ``take`` says Busy, and the caller tries again after a ``give``.

Threads: the queue pair calls under its lock.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from iserblk.errors import Busy, NotSupported

SMALLEST = 4096
SPARE_SIZES = 2  # a free chunk this many sizes larger is used before another is made


class Memory:
    """Anonymous memory at a fixed address. It is not handed on to forked children: they would copy
    it, and the device goes on with one of the copies."""

    __slots__ = ("_anchor", "_map", "address", "size", "view")

    def __init__(self, size: int) -> None:
        """``size`` is a multiple of the page size."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._map.madvise(mmap.MADV_DONTFORK)
        self._anchor: Any = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.size = size
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap. Slices of ``view`` that are still about keep it until they are gone."""
        self._anchor = None
        self.view.release()
        with suppress(BufferError):  # then it goes with the last slice
            self._map.close()


class Registration:
    """A memory region of the device. ``rkey`` is 0 where the peer has no rights."""

    __slots__ = ("lkey", "region", "rkey")

    def __init__(self, region: Any, lkey: int, rkey: int) -> None:
        self.region = region
        self.lkey = lkey
        self.rkey = rkey


# Registers memory at (address, length, access); OSError when the system refuses.
Register = Callable[[int, int, int], Registration]


class Chunk:
    """One piece of registered memory, and what is going on in it.

    ``stag``: by which the peer knows it, 0 when it does not. ``valid``: the peer may use it.
    ``buffer``, ``length``, ``rights``: what was advertised through it. ``window``: its type 2
    memory window, where the device has those; ``bound``: it was bound, or is about to be.
    """

    __slots__ = (
        "address",
        "buffer",
        "length",
        "lkey",
        "memory",
        "received",
        "registration",
        "rights",
        "rkey",
        "size",
        "stag",
        "valid",
        "view",
        "window",
    )

    def __init__(self, memory: Memory, registration: Registration) -> None:
        self.memory = memory
        self.registration = registration
        self.size = memory.size
        self.address = memory.address
        self.view = memory.view
        self.lkey = registration.lkey
        self.rkey = registration.rkey
        self.window: Any = None
        self.buffer: memoryview | None = None
        self.length = 0
        self.rights = 0
        self.stag = 0
        self.valid = False
        self.received = 0  # messages received when it was advertised


class Pool:
    """Chunks with one set of rights."""

    def __init__(self, register: Register, access: int, budget: int) -> None:
        """``budget``: bytes that may be registered at a time."""
        self._register = register
        self._access = access
        self._budget = budget
        self._free: dict[int, list[Chunk]] = {}
        self.chunks: set[Chunk] = set()
        self.held = 0  # bytes registered
        self.lent = 0  # chunks taken and not given back

    def take(self, size: int) -> Chunk:
        """A chunk of at least ``size`` bytes.

        Raises Busy when there is none until another is given back, NotSupported when there never
        will be one.
        """
        wanted = SMALLEST
        while wanted < size:
            wanted <<= 1
        chunk = self._find(wanted) or self._make(wanted)
        self.lent += 1
        return chunk

    def give(self, chunk: Chunk) -> None:
        """Nobody uses it any more, the peer least of all."""
        self.lent -= 1
        self._free.setdefault(chunk.size, []).append(chunk)

    def close(self) -> None:
        """Give all memory back, wherever it is used. The queue pair is in its error state."""
        for chunk in self.chunks:
            self._drop(chunk)
        self.chunks.clear()
        self._free.clear()

    def _find(self, wanted: int) -> Chunk | None:
        free = self._free.get(wanted)
        if free:
            return free.pop()
        for spare in range(1, SPARE_SIZES + 1):
            free = self._free.get(wanted << spare)
            if free:
                return free.pop()
        return None

    def _make(self, wanted: int) -> Chunk:
        if wanted > self._budget:
            raise NotSupported(
                f"{wanted} bytes for one transfer, but only {self._budget} may be registered: "
                "raise the locked-memory limit (ulimit -l, LimitMEMLOCK=)"
            )
        while self.held + wanted > self._budget:
            self._evict(wanted)
        while True:
            memory = Memory(wanted)
            try:
                registration = self._register(memory.address, wanted, self._access)
                break
            except OSError as error:
                memory.close()
                if error.errno not in (errno.ENOMEM, errno.EAGAIN):
                    raise
                self._evict(wanted)
        chunk = Chunk(memory, registration)
        self.chunks.add(chunk)
        self.held += wanted
        return chunk

    def _evict(self, wanted: int) -> None:
        """Drop the largest chunk that is free. Raises Busy when none is, or NotSupported when
        that is not because they are in use."""
        for size in sorted(self._free, reverse=True):
            if self._free[size]:
                chunk = self._free[size].pop()
                self.chunks.discard(chunk)
                self.held -= size
                self._drop(chunk)
                return
        if self.lent:
            raise Busy(f"no registered memory for {wanted} bytes until a transfer ends")
        raise NotSupported(
            f"{wanted} bytes of memory cannot be registered for RDMA: "
            "raise the locked-memory limit (ulimit -l, LimitMEMLOCK=)"
        )

    @staticmethod
    def _drop(chunk: Chunk) -> None:
        if chunk.window is not None:
            chunk.window.close()  # before the region that it may be bound to
            chunk.window = None
        chunk.registration.region.close()
        chunk.buffer = None
        chunk.memory.close()


class Strip:
    """Registered memory that is cut into pieces and never given back in parts: heads of messages,
    receive buffers. Grows by one registration when it is used up."""

    PIECE = 64  # pieces begin at multiples of this: no two share a cache line

    def __init__(self, register: Register, access: int, step: int) -> None:
        """``step``: bytes registered at a time, at least."""
        self._register = register
        self._access = access
        self._step = step
        self._memory: list[tuple[Memory, Registration]] = []
        self._used = 0

    def cut(self, size: int, expected: int = 0) -> tuple[memoryview, int, int]:
        """``size`` bytes: a view, the address, the local key. ``expected``: bytes that will be
        cut in all, this one included."""
        room = -(-max(size, 1) // self.PIECE) * self.PIECE
        if not self._memory or self._used + room > self._memory[-1][0].size:
            length = max(self._step, room, expected)
            length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = Memory(length)
            try:
                registration = self._register(memory.address, length, self._access)
            except BaseException:
                memory.close()
                raise
            self._memory.append((memory, registration))
            self._used = 0
        memory, registration = self._memory[-1]
        at = self._used
        self._used += room
        return memory.view[at : at + size], memory.address + at, registration.lkey

    def close(self) -> None:
        for memory, registration in self._memory:
            registration.region.close()
            memory.close()
        self._memory.clear()
