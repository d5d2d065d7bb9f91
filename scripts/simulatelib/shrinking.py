"""Makes a simulated world that has failed smaller, as long as it fails in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.cases import Case

ORDERS: Final = 3  # that are tried of each smaller world: what fails is often a matter of order
# The simplest values of settings, each with what must be set with it.
SIMPLE: Final = (
    (("other", "none"),),
    (("front", "disk"),),
    (("succession", "no"),),
    (("clients", "1"),),
    (("hearers", "1"),),
    (("portals", "1"),),
    (("connections", "1"),),
    (("error-recovery-level", "0"),),
    (("hesitates", "0"),),
    (("first-number", "1"),),
    (("profile", "ours"),),
    (("block", "512"), ("granule", "512")),
    (("queue-depth", "128"),),
    (("max-transfer", "1M"),),
    (("immediate-data", "yes"),),
    (("header-digest", "None"), ("data-digest", "None")),
    (("mpa-crc", "no"),),
    (("scheme", "iscsi"),),
)


class Failure(NamedTuple):
    """``kind``: of which it is. ``done``: operations that had begun. ``happened``: the numbers of
    the faults that had."""

    kind: str
    done: int
    happened: tuple[int, ...]
    settings: dict[str, str]


Play = Callable[["Case"], Failure | None]


def kind_of(error: BaseException) -> str:
    """What failures of one cause have in common: their text without its numbers."""
    words = re.sub(r"\[.*?\]|\d[\d.e+-]*", "", str(error))
    return f"{type(error).__name__} {words[:60]}"


class Shrinking:
    """``tries``: worlds that may be played."""

    def __init__(self, case: Case, failure: Failure, play: Play, tries: int) -> None:
        self.case = case
        self.failure = failure
        self.tried = 0
        self._play = play
        self._tries = tries

    def run(self) -> Case:
        """Returns the smallest case that was found."""
        while self._pass() and self.tried < self._tries:
            pass
        return self.case

    def _pass(self) -> bool:
        before = self.case
        self._try(self.case._replace(operations=self.failure.done))
        self._fewer_faults()
        self._fewer_operations()
        for settings in SIMPLE:
            if any(self.failure.settings.get(key, value) != value for key, value in settings):
                smaller = self.case
                for key, value in settings:
                    smaller = smaller.having(key, value)
                self._try(smaller)
        return self.case != before

    def _fewer_faults(self) -> None:
        self._try(self.case._replace(faults=self.failure.happened))
        part = len(self.failure.happened)
        while part:
            for some in self._parts(part):
                rest = tuple(each for each in self.failure.happened if each not in some)
                if len(rest) < len(self.failure.happened):
                    self._try(self.case._replace(faults=rest))
            part //= 2

    def _parts(self, size: int) -> Iterator[frozenset[int]]:
        faults = self.failure.happened
        for at in range(0, len(faults), size):
            yield frozenset(faults[at : at + size])

    def _fewer_operations(self) -> None:
        for percent in (50, 75, 90):
            while self._try(
                self.case._replace(operations=max(1, self.case.operations * percent // 100))
            ):
                pass

    def _try(self, case: Case) -> bool:
        """Returns whether the case fails in the same way, in some order: it is taken then."""
        if case == self.case:
            return False
        for order in range(ORDERS):
            if self.tried >= self._tries:
                return False
            self.tried += 1
            other = case._replace(order=case.order + order)
            failure = self._play(other)
            if failure is not None and failure.kind == self.failure.kind:
                self.case, self.failure = other, failure
                return True
        return False
