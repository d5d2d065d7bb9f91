"""What clients of a simulated world ask for, and what the faces of the disk need of the world."""

from __future__ import annotations

from typing import Final, Protocol

from tests.simulation.history import History
from tests.simulation.loop import SimulatedLoop

READ, WRITE, FLUSH, FUA, ZERO, ZERO_FUA, TRIM, EXTENTS = (
    "read", "write", "flush", "write with FUA", "zero", "zero with FUA", "trim", "extents"
)  # fmt: skip
DURABLE_AT_ONCE: Final = (FUA, ZERO_FUA)

# What the face ``fuse_face`` reaches. (Here, as that needs pyfuse3.)
CLOSED_UNFLUSHED = "FUSE: closed with writes unflushed"
TOLD_BY_FSYNC = "FUSE: loss told by fsync"
TOLD_EACH = "FUSE: loss told to each of the open files"
LEFT_BEHIND = "FUSE: loss left by a file that was closed, and told to a later one"
TOLD_BY_FSYNCDIR = "FUSE: loss told by fsync of the directory"
TOLD_AT_THE_END = "FUSE: loss told by the last flush"
READS_AT_ONCE = "FUSE: reads at once"
FUSE_STATES: Final = (
    CLOSED_UNFLUSHED, TOLD_BY_FSYNC, TOLD_EACH, LEFT_BEHIND, TOLD_BY_FSYNCDIR, TOLD_AT_THE_END,
    READS_AT_ONCE,
)  # fmt: skip


class Around(Protocol):
    """What a face needs of its world."""

    loop: SimulatedLoop
    history: History

    def trace(self, words: str, *values: str | float) -> None: ...

    def place(self, at: int) -> int:
        """Where granule ``at`` lies on the LUN, in bytes."""
        ...

    def count(self, state: str) -> None: ...

    def look(self) -> None:
        """The disk may have been connected again."""
        ...

    def may_fail(self, kind: str) -> bool:
        """An error need not be a loss, or a loss be told by a flush."""
        ...

    def is_over(self) -> bool:
        """The machine of the server has died."""
        ...
