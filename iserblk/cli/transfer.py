"""Copies and compares two Ends, several requests at a time; skips holes on both sides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from iserblk.cli.endpoints import End
from iserblk.disk.seam import EXTENT_ZERO, Extent
from iserblk.errors import IserblkError

REQUEST = 1 << 20  # bytes of one read or write
DEPTH = 16  # requests in flight
ZERO_REQUEST = 64 << 20  # bytes of one request that makes zeroes
_LOOK_AHEAD = 1 << 30  # bytes for which the source is asked for extents at once

_ZEROES = bytes(REQUEST)

Advance = Callable[[int], None]  # called with the number of bytes just done
Buffers = tuple[bytearray, bytearray]  # REQUEST bytes each, owned by one worker
Work = Callable[[Buffers, int, int, bool], Awaitable[None]]


@dataclass(slots=True)
class Totals:
    """Bytes written as data, and bytes made zero."""

    data: int = 0
    zero: int = 0


class _Plan:
    """Hands out the source in ascending pieces: each is either known to be zero, or has to be read.

    Pieces end on multiples of ``zero_request`` or REQUEST, so that requests stay aligned.
    """

    def __init__(self, source: End, zero_request: int) -> None:
        self._source = source
        self._size = source.size
        self._zero_request = zero_request
        self._offset = 0
        self._known: list[Extent] = []  # extents from _offset on, last first
        self._lock = trio.Lock()

    async def next(self) -> tuple[int, int, bool] | None:
        """(offset, length, reads as zeroes); None at the end."""
        async with self._lock:
            offset = self._offset
            if offset == self._size:
                return None
            if not self._known:
                look_at = min(self._size - offset, _LOOK_AHEAD)
                self._known = (await self._source.extents(offset, look_at))[::-1]
            start, length, flags = self._known[-1]
            zero = bool(flags & EXTENT_ZERO)
            request = self._zero_request if zero else REQUEST
            end = min(start + length, self._size, offset - offset % request + request)
            if end == start + length:
                self._known.pop()
            self._offset = end
            return offset, end - offset, zero


async def _for_all(plan: _Plan, work: Work, advance: Advance) -> None:
    """Do ``work`` for every piece, DEPTH pieces at a time. The first error ends all work."""

    async def worker() -> None:
        mine = bytearray(REQUEST), bytearray(REQUEST)
        while piece := await plan.next():
            await work(mine, *piece)
            advance(piece[1])

    async with trio.open_nursery() as nursery:
        for _ in range(DEPTH):
            nursery.start_soon(worker)


async def copy(source: End, destination: End, advance: Advance) -> Totals:
    """Write all of ``source`` to the beginning of ``destination``, and flush.

    Holes of the source, and pieces that are all zeroes, are made zero without sending data, if the
    destination can do that. Raises what the Ends raise; the destination then holds parts.
    """
    totals = Totals()

    async def work(buffers: Buffers, offset: int, length: int, zero: bool) -> None:
        if not zero:
            data = memoryview(buffers[0])[:length]
            await source.read_into(data, offset)
            zero = buffers[0].startswith(_ZEROES[:length])
            if not zero:
                await destination.write(data, offset)
                totals.data += length
        if zero:
            await destination.zero(offset, length, may_trim=True, patient=True)
            totals.zero += length

    await _for_all(_Plan(source, ZERO_REQUEST), work, advance)
    await destination.flush()
    return totals


async def compare(source: End, destination: End, advance: Advance) -> None:
    """Read both Ends and compare. Raises IserblkError that names the first byte that differs."""

    async def work(buffers: Buffers, offset: int, length: int, zero: bool) -> None:
        ours, theirs = (memoryview(buffer)[:length] for buffer in buffers)
        if zero:
            ours[:] = _ZEROES[:length]
        else:
            await source.read_into(ours, offset)
        await destination.read_into(theirs, offset)
        # For bytes this is one memcmp; memoryviews would be compared element by element.
        if ours.tobytes() != theirs.tobytes():
            first = next(index for index in range(length) if ours[index] != theirs[index])
            raise IserblkError(f"verify: source and destination differ at byte {offset + first}")

    await _for_all(_Plan(source, REQUEST), work, advance)
