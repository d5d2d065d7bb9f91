"""The disk seam: a byte-addressed LUN, as the front-ends and the command line see it.

Two faces with the same names: ``BlockingDisk`` (any thread, never holds the GIL while it waits;
``iserblk.disk.blocking.open_disks``) and ``AsyncDisk`` (trio; ``iserblk.disk.aio.open_disks``).

Offsets and lengths are bytes, of any alignment: what does not fall on block boundaries is read,
modified and written back under a range lock (which cannot protect against other hosts). A length
of 0 does nothing. A range that leaves the disk raises OutOfRange and transfers nothing.
Writes to a read-only LUN raise WriteProtected. All other failures are those of
``iserblk.errors``: CommandError leaves the session usable, TransportError ends it (a connection
that is lost does not: it is made again, and requests wait for it until their time is over). After
an error of a write, trim or zero the range holds old data, new data, or a mix of both by block.

Buffers belong to the disk from the call to its return (also by exception), not longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

# Flags of an extent, with the meaning of NBD's base:allocation.
EXTENT_DATA = 0
EXTENT_HOLE = 1
EXTENT_ZERO = 2

Extent = tuple[int, int, int]  # offset, length, flags


@dataclass(slots=True, frozen=True)
class LunInfo:
    """Identity, geometry and abilities of a LUN, as read at login."""

    name: str  # lun0, or IQN:lun0 where two URLs would clash
    url: str  # without user info
    target: str  # IQN
    lun: int
    size: int  # bytes
    block_size: int  # logical block, bytes
    physical_block_size: int
    read_only: bool
    rotational: bool
    write_cache: bool  # WCE: a flush is needed before data is durable
    fua: bool  # DPOFUA
    can_trim: bool  # UNMAP
    can_zero: bool  # WRITE SAME(16)
    zero_by_unmap: bool  # LBPRZ and LBPWS: WRITE SAME with UNMAP deallocates and reads as zeroes
    can_extents: bool  # GET LBA STATUS
    vendor: str
    product: str
    revision: str
    serial: str
    identifiers: tuple[str, ...]  # VPD 83h, as "naa.6001…", "eui.…", "t10.…", "name.…"
    max_transfer: int  # bytes of the largest READ or WRITE that is sent
    optimal_transfer: int  # bytes, 0 unknown
    connection: dict[str, object] = field(default_factory=dict)  # provider, what was negotiated
    paths: tuple[dict[str, object], ...] = ()  # with several portals, each as it was at login


class BlockingDisk(Protocol):
    """One LUN for threads. Every method may be called from any thread at any time."""

    info: LunInfo

    @property
    def size(self) -> int:
        """Bytes, as far as is known: a change is known when the next command after it ends."""
        ...

    @property
    def dirty(self) -> bool:
        """Something was changed through this object, and no flush has succeeded since; or one that
        comes now would fail. For the flush at the end: a LUN that was only read needs none."""
        ...

    def refresh(self) -> int:
        """Ask the target for the size; returns it."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the whole ``buffer`` (writable, contiguous bytes) from ``offset`` on."""
        ...

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        """Write the whole ``buffer``; with ``fua`` it is on stable storage at return."""
        ...

    def flush(self) -> None:
        """All writes, trims and zeroes that have returned are on stable storage at return."""
        ...

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        """Tell that the range is not needed. Only whole blocks inside it; their content is
        undefined afterwards. Raises NotSupported where the LUN cannot.

        ``patient``: ``io-timeout`` is the time for each step, not for the whole request, which for
        a large range may have thousands. Not for callers who repeat what takes them too long, as
        the kernel's NBD client does: the first request may end behind what was written since."""
        ...

    def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        """The range reads as zeroes afterwards. ``may_trim``: it may be deallocated. ``fast``:
        raise NotSupported (nothing done) where it would be no faster than writing. ``patient``: as
        of ``trim``."""
        ...

    def extents(self, offset: int, length: int) -> list[Extent]:
        """Allocation of the range: ascending, adjoining, from ``offset`` on, at least one entry;
        may end early. One EXTENT_DATA entry where the LUN cannot tell."""
        ...

    def cache(self, offset: int, length: int) -> None:
        """Ask the LUN to read the range ahead (PRE-FETCH). A hint: a refusal is no error."""
        ...


class AsyncDisk(Protocol):
    """One LUN for trio tasks of the loop that opened it. The methods are ``BlockingDisk``'s.

    Cancelling an operation aborts its commands at the target; the buffer is free when Cancelled
    comes out.
    """

    info: LunInfo

    @property
    def size(self) -> int: ...

    @property
    def dirty(self) -> bool: ...

    async def refresh(self) -> int: ...

    async def read_into(self, buffer: memoryview, offset: int) -> None: ...

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None: ...

    async def flush(self) -> None: ...

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None: ...

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None: ...

    async def extents(self, offset: int, length: int) -> list[Extent]: ...

    async def cache(self, offset: int, length: int) -> None: ...
