"""Pools of registered memory for transfers: chunks of a few sizes, made when needed and kept.

A device reaches only registered memory, and registering memory costs more than copying 4 KiB. So
transfers go through chunks. Each is a separate mmap with its own registration, so the device checks
bounds and rights for each chunk. Sizes are powers of two. A pool has one set of rights: memory that
the peer may only read and memory that it may write are never the same.

A pool holds at most ``budget`` bytes. When these are used up, unused chunks are dropped, the
largest first. When no unused chunk is left, ``take`` raises Busy, and the caller tries again after
a ``give``.

Threads: the queue pair calls all of it under its lock.
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
SPARE_SIZES = 2  # a free chunk up to so many sizes larger is used before a new chunk is made


class Memory:
    """Anonymous memory at a fixed address. Forked children do not get it (MADV_DONTFORK): a fork
    would give parent and child a copy each, and the device uses only one of the copies."""

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
        """Unmap the memory. Where slices of ``view`` still exist, it stays until they are freed."""
        self._anchor = None
        self.view.release()
        with suppress(BufferError):  # then it is unmapped with the last slice
            self._map.close()


class Registration:
    """A memory region of the device. ``rkey`` is 0 where the peer has no rights."""

    __slots__ = ("lkey", "region", "rkey")

    def __init__(self, region: Any, lkey: int, rkey: int) -> None:
        self.region = region
        self.lkey = lkey
        self.rkey = rkey


# Registers the memory at (address, length, access). Raises OSError when the system refuses.
Register = Callable[[int, int, int], Registration]


class PoolChunk:
    """One piece of registered memory, and the transfer that uses it.

    ``stag``: the STag by which the peer knows it, 0 when it has none. ``valid``: the peer may use
    it. ``buffer``, ``length``, ``rights``: what was advertised through it. ``window``: its type 2
    memory window, where these are used.
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
        self.received = 0  # messages received on the queue pair before it was advertised


class Pool:
    """The chunks with one set of rights."""

    def __init__(self, register: Register, access: int, budget: int) -> None:
        """``budget``: bytes that may be registered at a time."""
        self._register = register
        self._access = access
        self._budget = budget
        self._free: dict[int, list[PoolChunk]] = {}
        self.chunks: set[PoolChunk] = set()
        self.held = 0  # bytes registered
        self.lent = 0  # chunks taken and not given back

    def take(self, size: int) -> PoolChunk:
        """Take a chunk of at least ``size`` bytes; it is the caller's until ``give``.

        Raises Busy when there is none until another chunk is given back, NotSupported when there
        can never be one. Then nothing is taken.
        """
        wanted = SMALLEST
        while wanted < size:
            wanted <<= 1
        chunk = self._find(wanted) or self._make(wanted)
        self.lent += 1
        return chunk

    def give(self, chunk: PoolChunk) -> None:
        """Give a chunk back. Neither the caller nor the peer may use it any more."""
        self.lent -= 1
        self._free.setdefault(chunk.size, []).append(chunk)

    def close(self) -> None:
        """Free all memory, chunks in use included. The queue pair must be in its error state."""
        for chunk in self.chunks:
            self._drop(chunk)
        self.chunks.clear()
        self._free.clear()

    def _find(self, wanted: int) -> PoolChunk | None:
        free = self._free.get(wanted)
        if free:
            return free.pop()
        for spare in range(1, SPARE_SIZES + 1):
            free = self._free.get(wanted << spare)
            if free:
                return free.pop()
        return None

    def _make(self, wanted: int) -> PoolChunk:
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
        chunk = PoolChunk(memory, registration)
        self.chunks.add(chunk)
        self.held += wanted
        return chunk

    def _evict(self, wanted: int) -> None:
        """Drop the largest free chunk. Without a free chunk, raises Busy when chunks are in use,
        else NotSupported."""
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
    def _drop(chunk: PoolChunk) -> None:
        if chunk.window is not None:
            chunk.window.close()  # before the region that it may be bound to
            chunk.window = None
        chunk.registration.region.close()
        chunk.buffer = None
        chunk.memory.close()


class Strip:
    """Registered memory that is cut into pieces, for heads of messages and receive buffers.

    Single pieces are never given back. When it is used up, it grows by one registration."""

    PIECE = 64  # pieces begin at multiples of this, so that no two share a cache line

    def __init__(self, register: Register, access: int, step: int) -> None:
        """``step``: bytes registered at a time, at least."""
        self._register = register
        self._access = access
        self._step = step
        self._memory: list[tuple[Memory, Registration]] = []
        self._used = 0

    def cut(self, size: int, expected: int = 0) -> tuple[memoryview, int, int]:
        """Cut a piece of ``size`` bytes. Returns (view, address, local key). ``expected``: bytes
        that the caller will cut in all, this piece included. Raises OSError."""
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
