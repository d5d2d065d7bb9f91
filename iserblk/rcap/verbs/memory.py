"""What is open to the peer: chunks of registered memory, by STag.

Two modes. **region**: the chunk's own R_Key is the STag; the peer could use it for as long as the
connection lives, and what protects the memory is that a chunk holds nothing else until ``retire``.
**window**: a type 2 memory window is bound to the chunk for each use, with a fresh key and the
exact length; it dies by the peer's Send with Invalidate, or is invalidated here.

A window that the peer may be invalidating at this moment is never invalidated here as well: Linux
rxe panics when both do. So a local invalidation is posted only towards a peer that has never used
Send with Invalidate and has sent something since (the plain response, as a rule). In all other
cases the window is destroyed, which is safe in every state, and another takes its place.

Memory is copied: into the chunk when it is advertised (for the peer's writes, too: what it does not
write comes back unchanged, not as the data of an earlier transfer), out of it by ``retire``, and at
no other time.

Windows are not zero-based: the Base Offset is the chunk's address. LIO uses whatever offset it is
told, and a peer that says nothing about zero-based addresses may not want them; both work with
this.
"""

from __future__ import annotations

from iserblk.errors import LocalProtocolError
from iserblk.rcap import seam
from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.pool import Chunk, Pool, Register

_RIGHTS = (0, seam.REMOTE_READ, seam.REMOTE_WRITE, seam.REMOTE_READ | seam.REMOTE_WRITE)


def as_bytes(buffer: memoryview, rights: int) -> memoryview:
    """Raises LocalProtocolError for memory that cannot be advertised with these rights."""
    if not buffer.c_contiguous:
        raise LocalProtocolError("memory that is advertised must be contiguous")
    if rights & seam.REMOTE_WRITE and buffer.readonly:
        raise LocalProtocolError("read-only memory cannot be advertised for RDMA Writes")
    if buffer.format != "B" or buffer.ndim != 1:
        buffer = buffer.cast("B")
    return buffer


def remote_access(rights: int) -> int:
    """The device's flags for rights of the peer."""
    access = api.REMOTE_READ if rights & seam.REMOTE_READ else 0
    return access | (api.REMOTE_WRITE if rights & seam.REMOTE_WRITE else 0)


class Shelf:
    """The pools of one connection, one for each set of rights, and what is open.

    Threads: under the queue pair's lock.
    """

    def __init__(self, register: Register, budget: int, *, windows: bool, iwarp: bool) -> None:
        """``budget``: bytes of each pool. ``iwarp``: the sink of an RDMA Read is named on the wire
        and needs the right to be written by the peer."""
        self._pools: dict[int, Pool] = {}
        for rights in _RIGHTS:
            access = api.MW_BIND if windows and rights else remote_access(rights)
            if not rights & seam.REMOTE_READ or rights & seam.REMOTE_WRITE:
                access |= api.LOCAL_WRITE
            if iwarp and not rights:
                access |= api.REMOTE_WRITE
            self._pools[rights] = Pool(register, access, budget)
        self.local = self._pools[0]  # for our own transfers
        self.open: dict[int, Chunk] = {}

    def take(self, size: int, rights: int) -> Chunk:
        """A chunk for ``size`` bytes. Raises Busy or NotSupported, as Pool.take."""
        chunk = self._pools[rights].take(size)
        chunk.rights = rights
        chunk.length = size
        return chunk

    def show(self, chunk: Chunk, stag: int) -> None:
        """The peer may use it by this STag."""
        chunk.stag = stag
        chunk.valid = True
        self.open[stag] = chunk

    def owned(self, stag: int) -> Chunk:
        """What was shown as ``stag``; it is no longer. Raises LocalProtocolError."""
        try:
            return self.open.pop(stag)
        except KeyError:
            raise LocalProtocolError(
                f"STag 0x{stag:08x} is not one of ours, or was retired before"
            ) from None

    def give(self, chunk: Chunk) -> None:
        """Nobody uses it any more."""
        self._pools[chunk.rights].give(chunk)

    def forget(self) -> None:
        """Let go of all callers' memory; what is open can still be retired."""
        for chunk in self.open.values():
            chunk.buffer = None

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    @property
    def registered(self) -> int:
        """Bytes."""
        return sum(pool.held for pool in self._pools.values())
