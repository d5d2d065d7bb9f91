"""The seam between a disk and its journal: another way of keeping changes is another module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from iserblk.commands.command import Command


class Entry(NamedTuple):
    """One change that is to be sent again. ``command_block``: its CDB; b"": a WRITE of ``data``."""

    sequence: int
    first: int  # block
    last: int
    data: memoryview | None
    command_block: bytes = b""


class Waiting(NamedTuple):
    """A change that waits to be sent; it may have been carried out before. ``first``, ``last``: its
    blocks. ``data``: of a WRITE."""

    first: int
    last: int
    data: memoryview | None


class Journal(Protocol):
    """Keeps the changes of one LUN (WRITE, UNMAP, WRITE SAME) from before their submission until a
    flush covers them, or until they have failed; an acknowledged change is in it at every moment.

    It belongs to the thread of the session's loop. A change is known by its slot while its command
    runs, whose ``first`` and ``last`` are its blocks, and by a number that is higher than that of
    each change that was acknowledged before it was added. While the command runs the data is in the
    caller's buffer, which does not change; from ``keep``, ``ended`` or ``take_over`` on the journal
    has data of its own, but for what ``settle`` is to follow for.

    ``limit``: bytes that it keeps, what is in flight included, before a write must flush first."""

    limit: int

    @property
    def size(self) -> int:
        """Bytes that are kept."""
        ...

    @property
    def active(self) -> bool:
        """Whether something is kept, or in flight."""
        ...

    def has(self, slot: Command) -> bool:
        """Whether the change that the command of ``slot`` makes is in the journal."""
        ...

    def newest(self, block: int) -> memoryview | None:
        """What one block was changed to last, by a change that has ended. None: it is not known:
        no such change is kept, or the block was unmapped. Valid until the journal is called
        again."""
        ...

    # -- changes ----------------------------------------------------------------------------------

    def has_room(self, length: int) -> bool:
        """Whether a write of ``length`` bytes can be added, and kept, without a flush before."""
        ...

    def full(self, length: int) -> bool:
        """Whether a write of ``length`` bytes has to flush first. Never for one that is larger than
        ``limit``, which its caller flushes behind it."""
        ...

    def add(self, slot: Command, data: memoryview | None, command_block: bytes = b"") -> None:
        """Enter the change of ``slot``, which is about to be submitted and has ``first`` and
        ``last`` set: a WRITE of ``data``, or ``command_block``. With the latter ``data`` must not
        change any more."""
        ...

    def keep(self, slot: Command) -> None:
        """The WRITE of ``slot`` has succeeded: keep its data, if it was added. Call it before the
        slot, or the buffer, is given back. Raises MemoryError or OSError where there is no memory
        for that: then it is not kept, and must not be acknowledged."""
        ...

    def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
        """As ``keep``, without a copy: ``buffer``, in which the data is, belongs to the journal
        from now on. Returns another one of the same size for the caller, with some content. None,
        and nothing was done: the command has failed, or there is nothing to keep, or no memory."""
        ...

    def ended(self, slot: Command, *, copy: bool = True) -> int:
        """Keep or drop the change of ``slot``, whose command has ended, well or not. Call it before
        the slot is given back.

        ``copy`` False: nothing is copied yet, and the caller goes on owning the buffer until
        ``settle`` or ``forget`` of the number that is returned. 0: there is nothing to settle. Else
        raises MemoryError or OSError where there is no memory for a copy; then the change is
        dropped.
        """
        ...

    def settle(self, sequences: Iterable[int]) -> None:
        """Copy what is left of these changes: the caller is about to get back their buffer. Raises
        MemoryError or OSError where there is no memory for that; ``forget`` is to follow."""
        ...

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop these changes, because their operation has failed; in place of ``settle``, or where
        that has failed."""
        ...

    # -- flushes ----------------------------------------------------------------------------------

    def begin_flush(self) -> object:
        """A flush of all that has ended so far is about to begin. Returns what it covers, for
        ``flushed`` when it succeeds, else for ``not_flushed``."""
        ...

    def flushed(self, covered: object) -> None:
        """Drop this: it is on stable storage."""
        ...

    def not_flushed(self, covered: object) -> None:
        """Keep this: the flush has failed."""
        ...

    # -- replay -----------------------------------------------------------------------------------

    def mark(self) -> int:
        """A number that is higher than those of the changes that were added so far, and lower than
        those of later ones."""
        ...

    def begin_replay(self) -> list[Entry]:
        """All that has to be sent again, in order. Its data stays as it is until ``end_replay``.

        Left out are changes that are queued or in flight, which will be sent anyway, and changes
        that have failed. The connection that they were sent on must have ended.
        """
        ...

    def end_replay(self) -> None: ...

    def give_up(self, entries: Iterable[Entry], blocks: Sequence[tuple[int, int]]) -> None:
        """``blocks`` (first, last; in order) of ``entries``, which ``begin_replay`` has returned,
        are lost, and that is told: they are neither sent again nor known any more."""
        ...
