"""Log lines that clients can cause, limited in rate: so they cannot fill the disk of a log.

Some lines may come at once; after that one in a while. What is left out is counted, and the count
is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from iserblk.errors import CommandTimeout, IserblkError
from iserblk.limited_log import BURST, EVERY_S, Allowance
from iserblk.loop.clock import monotonic


class LimitedLog:
    """Warnings of one kind. ``what``: the kind, for the line with the count. ``clock``: seconds."""

    def __init__(
        self, log: logging.Logger, what: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._log = log
        self._what = what
        self._allowance = Allowance(BURST, EVERY_S, clock)
        self._left_out = 0

    def warning(self, text: str, *words: object) -> None:
        """As ``Logger.warning``; or nothing, which is counted."""
        if not self._allowance.take():
            self._left_out += 1
            return
        self.tell()
        self._log.warning(text, *words)

    def tell(self) -> None:
        """Log how many lines were left out since the last time. To be called now and then, as no
        other line may follow."""
        count, self._left_out = self._left_out, 0
        if count:
            self._log.warning("%s: %d more lines are left out", self._what, count)


class ClientLogs:
    """Of one server. ``conduct``: what clients do wrong; ``failures``: requests that failed at the
    target. They are limited apart, and have loggers apart (for LineLimit): hostile clients cannot
    hide a failing target."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = monotonic) -> None:
        self.conduct = LimitedLog(log.getChild("conduct"), "NBD clients", clock)
        self._told = failures = log.getChild("failures")
        self._failures = LimitedLog(failures, "failed requests of NBD clients", clock)

    def failed(self, name: str, error: IserblkError) -> None:
        """A request of the client ``name`` has failed with ``error``. Where the session has told
        that the target does not answer, the line is for ``-v``: it comes for each request."""
        if isinstance(error, CommandTimeout) and error.logged:
            self._told.info("%s: %s", name, error)
        else:
            self._failures.warning("%s: %s", name, error)

    def tell(self) -> None:
        self.conduct.tell()
        self._failures.tell()
