"""What a session counts, for statistics."""

from __future__ import annotations

from iserblk.datamover.seam import Losses


class Counts:
    """Belongs to one session, from its first connection to its last.

    ``reconnects``: how often the connection of a fresh session took the place of a lost one.
    ``replayed``: commands that were sent once more. ``recovered``: connections that were lost while
    others went on, and were recovered from; ``reassigned``: tasks that went over to another
    connection then. ``losses``: of all connections.
    """

    __slots__ = ("losses", "reassigned", "reconnects", "recovered", "replayed")

    def __init__(self) -> None:
        self.reconnects = 0
        self.replayed = 0
        self.recovered = 0
        self.reassigned = 0
        self.losses = Losses()

    def adopted(self, fresh: Counts, again: int) -> None:
        """The connection of a fresh session, which has counted as well, has taken the place of the
        lost one; ``again``: commands that were sent once more."""
        self.losses.add(fresh.losses)
        self.reconnects += 1
        self.replayed += again
