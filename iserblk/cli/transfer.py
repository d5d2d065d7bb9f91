"""Copies and compares two Ends, several requests at a time; skips holes on both sides."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from iserblk.cli.endpoints import ZEROES, End
from iserblk.cli.streams import Stream
from iserblk.disk.seam import EXTENT_ZERO, Extent
from iserblk.errors import IserblkError

REQUEST = len(ZEROES)  # bytes of one read or write
DEPTH = 16  # requests in flight
ZERO_REQUEST = 64 << 20  # bytes of one request that makes zeroes
_LOOK_AHEAD = 1 << 30  # bytes for which the source is asked for extents at once

Advance = Callable[[int], None]  # called with the number of bytes just done
Buffers = tuple[bytearray, bytearray]  # REQUEST bytes each, owned by one worker


class Piece(NamedTuple):
    """``zeroes``: of each End of a plan, whether it is known to read as zeroes here."""

    offset: int
    length: int
    zeroes: list[bool]


Work = Callable[[Buffers, Piece], Awaitable[None]]


@dataclass(slots=True)
class Totals:
    """Bytes written as data, and bytes made zero."""

    data: int = 0
    zero: int = 0


class _Plan:
    """Hands out the bytes up to ``size`` in ascending pieces. Of each End a piece is either known
    to be zero, as all behind the End is, or has to be read.

    Pieces end on multiples of REQUEST, or of ``zero_request`` where all Ends are zero, so that
    requests stay aligned.
    """

    def __init__(self, ends: Sequence[End], size: int, zero_request: int) -> None:
        self._ends = ends
        self._size = size
        self._zero_request = zero_request
        self._offset = 0
        self._stopped = False
        # Of each End its extents from _offset on, last first.
        self._known: list[list[Extent]] = [[] for _ in ends]
        self._lock = trio.Lock()

    async def next(self) -> Piece | None:
        """None: there is no further piece."""
        async with self._lock:
            offset = self._offset
            if self._stopped or offset == self._size:
                return None
            for known, source in zip(self._known, self._ends, strict=True):
                if not known:
                    known.extend((await self._extents(source, offset))[::-1])
            if self._stopped:
                return None
            now = [known[-1] for known in self._known]
            zeroes = [bool(flags & EXTENT_ZERO) for _, _, flags in now]
            request = self._zero_request if all(zeroes) else REQUEST
            ends = [start + length for start, length, _ in now]
            end = min(*ends, self._size, offset - offset % request + request)
            for known, at in zip(self._known, ends, strict=True):
                if at == end:
                    known.pop()
            self._offset = end
            return Piece(offset, end - offset, zeroes)

    async def _extents(self, source: End, offset: int) -> list[Extent]:
        left = source.size - offset
        if left <= 0:
            return [(offset, self._size - offset, EXTENT_ZERO)]
        return await source.extents(offset, min(left, self._size - offset, _LOOK_AHEAD))

    def stop(self) -> None:
        """Hand out no further piece."""
        self._stopped = True


async def _for_all(plan: _Plan, work: Work, advance: Advance) -> None:
    """Do ``work`` for every piece, DEPTH pieces at a time. The first error ends all work."""

    async def worker() -> None:
        mine = bytearray(REQUEST), bytearray(REQUEST)
        while piece := await plan.next():
            await work(mine, piece)
            advance(piece.length)

    async with trio.open_nursery() as nursery:
        for _ in range(DEPTH):
            nursery.start_soon(worker)


async def copy(source: End, destination: End, advance: Advance) -> Totals:
    """Write all of ``source`` to the beginning of ``destination``, and flush.

    Holes of the source, and pieces that are all zeroes, are made zero without sending data, if the
    destination can do that. Raises what the Ends raise; the destination then holds parts.
    """
    totals = Totals()

    async def work(buffers: Buffers, piece: Piece) -> None:
        offset, length, (zero,) = piece
        if not zero:
            data = memoryview(buffers[0])[:length]
            await source.read_into(data, offset)
            zero = buffers[0].startswith(ZEROES[:length])
            if not zero:
                await destination.write(data, offset)
                totals.data += length
        if zero:
            await destination.zero(offset, length, may_trim=True, patient=True)
            totals.zero += length

    await _for_all(_Plan([source], source.size, ZERO_REQUEST), work, advance)
    await destination.flush()
    return totals


async def copy_in(
    source: Stream, destination: End, room: int | None, advance: Advance
) -> tuple[Totals, bool]:
    """Write all that comes from ``source`` to the beginning of ``destination``, and flush.
    ``room``: how many bytes there are for it; None: as many as come. Also returns whether more than
    that comes, of which nothing is written. Raises as ``copy``.

    Only reading is in order: several pieces are written at once."""
    totals = Totals()
    turn = trio.Lock()
    offset = 0
    ended = False

    async def next_piece(buffer: bytearray) -> tuple[int, int]:
        nonlocal offset, ended
        async with turn:
            length = REQUEST if room is None else min(REQUEST, room - offset)
            count = 0
            if length and not ended:
                count = await source.read_into(memoryview(buffer)[:length])
                ended = count < length
            began = offset
            offset += count
            return began, count

    async def worker() -> None:
        buffer = bytearray(REQUEST)
        while True:
            at, count = await next_piece(buffer)
            if not count:
                return
            data = memoryview(buffer)[:count]
            if buffer.startswith(ZEROES[:count]):
                await destination.zero(at, count, may_trim=True, patient=True)
                totals.zero += count
            else:
                await destination.write(data, at)
                totals.data += count
            advance(count)

    async with trio.open_nursery() as nursery:
        for _ in range(DEPTH):
            nursery.start_soon(worker)
    more = not ended and bool(await source.read_into(memoryview(bytearray(1))))
    await destination.flush()
    return totals, more


async def copy_out(source: End, destination: Stream, advance: Advance) -> Totals:
    """Write all of ``source`` to ``destination``, in order, holes as zeroes, and flush. Several
    pieces are read at once. Raises as ``copy``."""
    totals = Totals()
    turns: dict[int, trio.Event] = {0: trio.Event()}  # offset of a piece: when it may be written
    turns[0].set()

    async def work(buffers: Buffers, piece: Piece) -> None:
        offset, length, (zero,) = piece
        may_write = turns.setdefault(offset, trio.Event())
        data = ZEROES[:length]
        if zero:
            totals.zero += length
        else:
            data = memoryview(buffers[0])[:length]
            await source.read_into(data, offset)
            totals.data += length
        await may_write.wait()
        del turns[offset]
        await destination.write(data)
        turns.setdefault(offset + length, trio.Event()).set()

    await _for_all(_Plan([source], source.size, REQUEST), work, advance)
    await destination.flush()
    return totals


async def verify(source: End, destination: End, advance: Advance) -> None:
    """Read both Ends, up to the end of ``source``, and compare; what ``destination`` says of its
    holes is not believed. Raises IserblkError that names the first byte that differs."""
    first = await _difference(source, destination, _Plan([source], source.size, REQUEST), advance)
    if first is not None:
        raise IserblkError(f"verify: source and destination differ at byte {first}")


async def compare(one: End, other: End, advance: Advance) -> int | None:
    """The offset of the first byte that differs, or None. The shorter of both counts as if zeroes
    followed it. What both say to be zero is not read. Raises what the Ends raise."""
    plan = _Plan([one, other], max(one.size, other.size), ZERO_REQUEST)
    return await _difference(one, other, plan, advance)


async def _difference(one: End, other: End, plan: _Plan, advance: Advance) -> int | None:
    """``plan``: of both, or of ``one``; then all of ``other`` is read."""
    found: list[int] = []

    async def work(buffers: Buffers, piece: Piece) -> None:
        offset, length, zeroes = piece
        if len(zeroes) == 2 and all(zeroes):
            return
        views = []
        for end, buffer, zero in zip((one, other), buffers, [*zeroes, False], strict=False):
            view = memoryview(buffer)[:length]
            if zero:
                view[:] = ZEROES[:length]
            else:
                await end.read_into(view, offset)
            views.append(view)
        ours, theirs = views
        # For bytes this is one memcmp; memoryviews would be compared element by element.
        if ours.tobytes() != theirs.tobytes():
            first = next(index for index in range(length) if ours[index] != theirs[index])
            found.append(offset + first)
            plan.stop()  # all pieces before this one were handed out: they may have another

    await _for_all(plan, work, advance)
    return min(found, default=None)
