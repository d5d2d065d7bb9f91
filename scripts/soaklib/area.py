"""An area of a LUN that belongs to one worker: what it has written, and what has to be read back.

Each block says to whom it belongs, where it is, and which generation of its content it is. So a
block that is older than it may be, or that was written to another place, is found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

BLOCK = 4096
_RECORD = struct.Struct(">IIQ")  # owner, block of the area, generation
_ZEROES = bytes(BLOCK)
COMES = "comes"  # a line of a ledger


def content(owner: int, block: int, generation: int) -> bytes:
    """Generation 0 is a block that was never written."""
    if not generation:
        return _ZEROES
    return _RECORD.pack(owner, block, generation) * (BLOCK // _RECORD.size)


class Area:
    """``offset``: of its first block in the LUN, in bytes. For each block: ``newest``, the
    generation that was written last, or tried to be; ``floor``, the oldest that may be read;
    ``flushed``, the newest that a flush has covered."""

    def __init__(self, owner: int, offset: int, blocks: int) -> None:
        self.owner = owner
        self.offset = offset
        self.newest = [0] * blocks
        self.floor = [0] * blocks
        self.flushed = [0] * blocks

    @property
    def blocks(self) -> int:
        return len(self.newest)

    def at(self, block: int) -> int:
        return self.offset + block * BLOCK

    def begin(self, first: int, count: int) -> bytes:
        """What is to be written next to these blocks."""
        parts = []
        for block in range(first, first + count):
            self.newest[block] += 1
            parts.append(content(self.owner, block, self.newest[block]))
        return b"".join(parts)

    def written(self, first: int, count: int, *, durable: bool = False) -> None:
        """The write was acknowledged; ``durable``: with FUA."""
        end = first + count
        self.floor[first:end] = self.newest[first:end]
        if durable:
            self.flushed[first:end] = self.newest[first:end]

    def acknowledged(self) -> list[int]:
        """What a flush covers that begins now."""
        return [*self.floor]

    def was_flushed(self, covered: list[int]) -> None:
        self.flushed = [max(each) for each in zip(self.flushed, covered, strict=True)]

    def may_have_lost(self) -> None:
        """All that was not flushed may be gone: the client has ended, or was told of a loss."""
        self.floor = [*self.flushed]

    def wrong(self, first: int, data: bytes) -> Iterator[str]:
        """What is wrong with the blocks that were read, one line for each."""
        for index in range(len(data) // BLOCK):
            block = first + index
            text = self._wrong(block, data[index * BLOCK : (index + 1) * BLOCK])
            if text:
                yield f"the block at {self.at(block)}: {text}"

    def _wrong(self, block: int, data: bytes) -> str:
        floor, newest = self.floor[block], self.newest[block]
        owner, number, generation = _RECORD.unpack_from(data)
        if data != content(owner, number, generation):
            return f"no block as anyone writes it, it begins with {data[:16].hex()}"
        if generation and (owner, number) != (self.owner, block):
            return f"it is block {number} of worker {owner}, not {block} of {self.owner}"
        if not floor <= generation <= newest:
            wanted = f"{newest}" if floor == newest else f"{floor} to {newest}"
            return f"generation {generation}, and not {wanted}"
        return ""


class Ledger:
    """What workers, one after the other, have done to an area, in lines that outlive them: of one
    that is killed, each line before it is there, and perhaps a part of a last one. ``COMES`` begins
    each: what the one before it had not flushed when it was killed, a flush of its own does not
    cover, as the target may have lost it between the two."""

    def __init__(self, area: Area, lines: bytes) -> None:
        self.area = area
        for line in filter(None, lines.split(b"\n")[:-1]):
            what, *numbers = line.split()
            first, count = (int(number) for number in numbers) if numbers else (0, 0)
            if what == COMES.encode():
                area.may_have_lost()
            elif what == b"begin":
                area.begin(first, count)
            elif what == b"written":
                area.written(first, count)
            elif what == b"durable":
                area.written(first, count, durable=True)
            elif what == b"flushed":
                area.was_flushed(area.acknowledged())
        area.may_have_lost()
