"""The STag table of one queue pair: which memory the peer may read or write, and how many bytes.

    STag, 32 bits:  | index, 24 bits | key, 8 bits |          (RFC 5041 section 4.2, RFC 5040 7.2)

The index selects a ``Region``. The key changes each time an index is used again, and a freed index
is used again after all other free ones, so that a stale STag stays invalid as long as possible.
Index 0 is never handed out: no STag is 0. Providers use index 0 for the sinks of RDMA Reads.

A table belongs to one queue pair, so an STag of another stream is simply unknown here: that is the
check "STag associated with the stream" of RFC 5042 section 6.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from iserblk.errors import LocalProtocolError
from iserblk.octets import is_flat
from iserblk.rcap.seam import REMOTE_WRITE

KEY_BITS: Final = 8
KEY_MASK: Final = 0xFF
MAX_INDEX: Final = (1 << 24) - 1
# Each takes 100 bytes of every connection; with more in use at once, there are more.
FIRST_ENTRIES: Final = 128
# Free entries, at least, of which a freed one is the last to be used again: an STag comes again
# after 256 times as many, however many are in use.
LEAST_FREE: Final = 64

NOTHING: Final = memoryview(b"")

FREE: Final = 0
ADVERTISED: Final = 1

_is_flat: Final[Callable[[memoryview, bool], bool]] = is_flat  # bound once


class Region:
    """One entry of the table. The object lives as long as the table and is reused.

    ``stag``: the present STag. ``valid``: the peer may use it. ``state``: FREE, or ADVERTISED
    until ``StagTable.release`` (an STag that the peer invalidated stays ADVERTISED).
    """

    __slots__ = ("length", "rights", "stag", "state", "valid", "view")

    def __init__(self, stag: int) -> None:
        self.stag = stag
        self.view = NOTHING
        self.length = 0
        self.rights = 0
        self.valid = False
        self.state = FREE


def _flattened(buffer: memoryview, rights: int) -> memoryview:
    """Raises LocalProtocolError, as ``advertise``."""
    if not buffer.c_contiguous:
        raise LocalProtocolError("memory that is advertised must be contiguous")
    if rights & REMOTE_WRITE and buffer.readonly:
        raise LocalProtocolError("read-only memory cannot be advertised for RDMA Writes")
    return buffer.cast("B")


class StagTable:
    """All STags of one queue pair."""

    __slots__ = ("_free", "_give_back", "_take", "regions")

    def __init__(self) -> None:
        # regions[0] is never valid, so that index 0 needs no test of its own.
        self.regions: list[Region] = [
            Region(index << KEY_BITS) for index in range(FIRST_ENTRIES + 1)
        ]
        self._free: deque[Region] = deque(self.regions[1:])
        # Bound once: compiled code looks a method of a deque up at each call.
        self._take: Final[Callable[[], Region]] = self._free.popleft
        self._give_back: Final[Callable[[Region], None]] = self._free.append

    def advertise(self, buffer: memoryview, rights: int) -> int:
        """Open ``buffer`` with ``rights``; returns the new STag. The Base Offset is 0.

        Raises LocalProtocolError when the buffer is not contiguous, when it is read-only and
        ``rights`` has REMOTE_WRITE, or when all 2**24 - 1 STags are in use; then nothing has
        changed.
        """
        if not _is_flat(buffer, rights & REMOTE_WRITE != 0):
            buffer = _flattened(buffer, rights)
        try:
            region = self._take() if len(self._free) > LEAST_FREE else self._grow()
        except IndexError:
            raise LocalProtocolError("all STags of this queue pair are in use") from None
        stag = (region.stag & ~KEY_MASK) | ((region.stag + 1) & KEY_MASK)
        region.view = buffer
        region.length = len(buffer)
        region.rights = rights
        region.stag = stag
        region.state = ADVERTISED
        region.valid = True  # last: from here on the peer may use it
        return stag

    def _grow(self) -> Region:
        """A new region, as long as there may be more; else one that is free. Raises IndexError when
        none is."""
        index = len(self.regions)
        if index > MAX_INDEX:
            return self._take()
        region = Region(index << KEY_BITS)
        self.regions.append(region)
        return region

    def find(self, stag: int) -> Region | None:
        """The valid region of ``stag``, or None."""
        index = stag >> KEY_BITS
        if index < len(self.regions):
            region = self.regions[index]
            if region.stag == stag and region.valid:
                return region
        return None

    def owned(self, stag: int) -> Region:
        """The region of an STag that was handed out and not yet retired, valid or not.

        Raises LocalProtocolError for any other number.
        """
        index = stag >> KEY_BITS
        if 0 < index < len(self.regions):
            region = self.regions[index]
            if region.stag == stag and region.state == ADVERTISED:
                return region
        raise LocalProtocolError(f"STag 0x{stag:08x} is not one of ours, or was retired before")

    def release(self, region: Region) -> memoryview:
        """Let go of the region's memory; its index may be used again. Before the call, the caller
        makes sure that nothing is placed into the memory or sent from it any more.

        Returns the view, for the caller to drop: it does not die while the region, in compiled
        code, still refers to it."""
        view = region.view
        region.valid = False
        region.state = FREE
        region.view = NOTHING
        region.length = 0
        self._give_back(region)
        return view

    def clear(self) -> list[memoryview]:
        """Let go of all memory, at the end of the connection. STags can still be retired.
        Returns the views, for the caller to drop, as ``release``."""
        views: list[memoryview] = []
        for region in self.regions:
            if region.view is not NOTHING:
                views.append(region.view)
                region.view = NOTHING
                region.length = 0
        return views

    def count(self) -> int:
        """The number of STags that were advertised and not retired."""
        return sum(1 for region in self.regions if region.state == ADVERTISED)
