"""The memory that is open to the peer: chunks of registered memory, by STag.

Two modes. **region**: the STag is the R_Key of the chunk. The peer could use it for as long as the
connection lives; the memory is protected because the chunk holds nothing else until ``retire``.
**window**: a type 2 memory window is bound to the chunk for each use, with a fresh key and the
exact length. It ends by the peer's Send with Invalidate, or is invalidated here.

Linux rxe panics when both sides invalidate the same window. So a local invalidation is posted only
when the peer has never used Send with Invalidate, and has sent a message since the memory was
advertised (as a rule the response, without an invalidation). In all other cases the window is
destroyed, which is safe in every state, and the next use of the chunk makes a new window.

The caller's memory is copied into the chunk when it is advertised, and out of it by ``retire`` when
the peer may write; at no other time. It is copied in for writes of the peer, too: bytes that the
peer does not write then come back unchanged, not as the data of an earlier transfer.

Windows are not zero-based: the Base Offset is the address of the chunk. LIO uses any offset that it
is told, and a peer that does not declare zero-based addresses may not support them; this works with
both.
"""

from __future__ import annotations

from iserblk.errors import LocalProtocolError
from iserblk.rcap import seam
from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.pool import Pool, PoolChunk, Register

_RIGHTS = (0, seam.REMOTE_READ, seam.REMOTE_WRITE, seam.REMOTE_READ | seam.REMOTE_WRITE)


def as_bytes(buffer: memoryview, rights: int) -> memoryview:
    """``buffer`` as a view of plain bytes. Raises LocalProtocolError for memory that cannot be
    advertised with these rights."""
    if not buffer.c_contiguous:
        raise LocalProtocolError("memory that is advertised must be contiguous")
    if rights & seam.REMOTE_WRITE and buffer.readonly:
        raise LocalProtocolError("read-only memory cannot be advertised for RDMA Writes")
    if buffer.format != "B" or buffer.ndim != 1:
        buffer = buffer.cast("B")
    return buffer


def remote_access(rights: int) -> int:
    """The access flags of the device for ``rights`` of the peer."""
    access = api.REMOTE_READ if rights & seam.REMOTE_READ else 0
    return access | (api.REMOTE_WRITE if rights & seam.REMOTE_WRITE else 0)


class Shelf:
    """The pools of one connection, one for each set of rights, and the chunks open to the peer.

    Threads: the queue pair calls all methods under its lock.
    """

    def __init__(self, register: Register, budget: int, *, windows: bool, iwarp: bool) -> None:
        """``budget``: bytes of each pool. ``iwarp``: the STag of an RDMA Read's sink is sent to the
        peer, so the sink needs the right REMOTE_WRITE."""
        self._pools: dict[int, Pool] = {}
        for rights in _RIGHTS:
            access = api.MW_BIND if windows and rights else remote_access(rights)
            if not rights & seam.REMOTE_READ or rights & seam.REMOTE_WRITE:
                access |= api.LOCAL_WRITE
            if iwarp and not rights:
                access |= api.REMOTE_WRITE
            self._pools[rights] = Pool(register, access, budget)
        self.local = self._pools[0]  # for our own transfers
        self.open: dict[int, PoolChunk] = {}

    def take(self, size: int, rights: int) -> PoolChunk:
        """Take a chunk for ``size`` bytes. Raises Busy or NotSupported, as ``Pool.take``."""
        chunk = self._pools[rights].take(size)
        chunk.rights = rights
        chunk.length = size
        return chunk

    def show(self, chunk: PoolChunk, stag: int) -> None:
        """Note that the peer may use ``chunk`` by this STag from now on."""
        chunk.stag = stag
        chunk.valid = True
        self.open[stag] = chunk

    def owned(self, stag: int) -> PoolChunk:
        """Remove and return the chunk that was shown as ``stag``. Raises LocalProtocolError when
        there is none."""
        try:
            return self.open.pop(stag)
        except KeyError:
            raise LocalProtocolError(
                f"STag 0x{stag:08x} is not one of ours, or was retired before"
            ) from None

    def give(self, chunk: PoolChunk) -> None:
        """Give ``chunk`` back to its pool. Neither this side nor the peer may use it any more."""
        self._pools[chunk.rights].give(chunk)

    def forget(self) -> None:
        """Let go of all memory of callers. STags that are open can still be retired."""
        for chunk in self.open.values():
            chunk.buffer = None

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    @property
    def registered(self) -> int:
        """Bytes that all pools have registered."""
        return sum(pool.held for pool in self._pools.values())
