"""What is told of a target that does not answer: one line when that begins, one when it ends.

Commands reach their deadlines together, and each climbs the ladder of ``deadlines``: what is said
of the later ones, and of the attempts to connect meanwhile, is logged at INFO (``iserblk -v``).
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

SILENT_S = 5.0  # without any PDU: the target is silent, not slow with some commands
DEADLINE = "deadline"  # the kind of text about a command that is given up
UNANSWERED = "unanswered"  # the same of a command that is aborted, to be sent again


class Silence:
    """Belongs to the session that it is about; only the runner of ``progress`` uses it, and the
    reconnector looks at ``complete``. ``since``: when it began, as told; 0: the target answers."""

    def __init__(self) -> None:
        self.since = 0.0
        self.complete = False  # nothing at all was heard when it began
        self._late = 0  # commands that were given up
        self._again = 0  # commands that were aborted, to be sent again
        self._told: set[str] = set()

    def tell(self, portal: str, text: str, kind: str, now: float, heard: float) -> None:
        """The target owes an answer. ``kind``: of the text; each is a warning once, and only the
        first if nothing was heard. ``heard``: when the target was heard last."""
        first = not self.since
        if first:
            self.since = now
            self.complete = now - heard >= SILENT_S
            self._late = self._again = 0
            if self.complete:
                text = f"{text}; nothing was heard for {now - heard:.0f} s"
        self._late += kind == DEADLINE
        self._again += kind == UNANSWERED
        warns = first or (kind not in self._told and not self.complete)
        self._told.add(kind)
        log.log(logging.WARNING if warns else logging.INFO, "%s: %s", portal, text)

    @property
    def level(self) -> int:
        """Of what ``end`` will return, for the log: a warning, unless one command was late, of
        which there is a line already."""
        more = self._late + self._again > 1
        return logging.WARNING if self.complete or more else logging.INFO

    def end(self, now: float) -> str:
        """The target answers. Returns what is to be told of the silence; "": there was none."""
        if not self.since:
            return ""
        text = f"the target answers again, after {max(0.0, now - self.since):.0f} s"
        late = self._late
        if late:
            text += f"; {late} command{'s were' if late > 1 else ' was'} given up"
        if self._again:
            text += f"; {self._again} command{'s were' if self._again > 1 else ' was'} aborted"
        self.since = 0.0
        self.complete = False
        self._told.clear()
        return text
