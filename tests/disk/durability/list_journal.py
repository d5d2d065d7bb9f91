"""Another way of keeping changes, the plainest: a copy of each, in a list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from iserblk.commands.command import QUEUED, Command
from iserblk.disk.durability.seam import Entry
from iserblk.scsi import opcodes
from tests.disk.fake_target import BLOCK


class ListJournal:
    """Implements Journal. It keeps buffers that it is offered as copies, too."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._numbers = count(1)
        self._running: dict[Command, Entry] = {}
        self._kept: dict[int, Entry] = {}
        self._lost: set[tuple[int, int]] = set()  # sequence and block

    @property
    def size(self) -> int:
        return sum(len(each.data or b"") or 1 for each in self._kept.values())

    @property
    def active(self) -> bool:
        return bool(self._kept or self._running)

    def has(self, slot: Command) -> bool:
        return slot in self._running

    def newest(self, block: int) -> memoryview | None:
        over = [each for each in self._kept.values() if each.first <= block <= each.last]
        if not over:
            return None
        entry = max(over, key=lambda each: each.sequence)
        if (entry.sequence, block) in self._lost:
            return None
        if entry.command_block:
            unmapped = entry.command_block[0] == opcodes.UNMAP
            return None if unmapped else memoryview(bytes(BLOCK))
        assert entry.data is not None
        at = (block - entry.first) * BLOCK
        return entry.data[at : at + BLOCK]

    def has_room(self, length: int) -> bool:
        return length <= self.limit and not self.full(length)

    def full(self, length: int) -> bool:
        return self.size > 0 and length <= self.limit < self.size + length

    def add(self, slot: Command, data: memoryview | None, command_block: bytes = b"") -> None:
        self._running[slot] = Entry(next(self._numbers), slot.first, slot.last, data, command_block)

    def keep(self, slot: Command) -> None:
        self.ended(slot)

    def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
        return None

    def ended(self, slot: Command, *, copy: bool = True) -> int:
        entry = self._running.pop(slot, None)
        if entry is None or not _good(slot, entry):
            return 0
        self._kept[entry.sequence] = _copied(entry)
        return entry.sequence

    def settle(self, sequences: Iterable[int]) -> None:
        """They are copies already."""

    def forget(self, sequences: Iterable[int]) -> None:
        for each in sequences:
            self._kept.pop(each, None)

    def begin_flush(self) -> object:
        return [*self._kept]

    def flushed(self, covered: object) -> None:
        assert isinstance(covered, list)
        self.forget(covered)

    def not_flushed(self, covered: object) -> None:
        """They stay."""

    def mark(self) -> int:
        return next(self._numbers)

    def begin_replay(self) -> list[Entry]:
        ended = [
            _copied(entry)
            for slot, entry in self._running.items()
            if slot.state < QUEUED and _good(slot, entry)
        ]
        found = sorted([*self._kept.values(), *ended], key=lambda entry: entry.sequence)
        return [part for entry in found for part in self._left(entry)] if self._lost else found

    def end_replay(self) -> None:
        """Nothing was held for it."""

    def give_up(self, entries: Iterable[Entry], blocks: Sequence[tuple[int, int]]) -> None:
        for entry in entries:
            for first, last in blocks:
                self._lost |= {(entry.sequence, at) for at in range(first, last + 1)}

    def _left(self, entry: Entry) -> Iterator[Entry]:
        """Its blocks that are not given up, one by one."""
        for at in range(entry.first, entry.last + 1):
            if (entry.sequence, at) not in self._lost:
                data = entry.data
                if data is not None and not entry.command_block:
                    start = (at - entry.first) * BLOCK
                    data = data[start : start + BLOCK]
                yield entry._replace(first=at, last=at, data=data)


def _good(slot: Command, entry: Entry) -> bool:
    if slot.error or slot.status or slot.response:
        return False
    return not slot.residual or entry.command_block[:1] == bytes([opcodes.UNMAP])


def _copied(entry: Entry) -> Entry:
    return entry._replace(data=None if entry.data is None else memoryview(bytes(entry.data)))
