"""How often simulated worlds have reached what, by profile and by configuration."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.simulation.world import Result

_ALL: Final = "all"
_OPERATIONS, _FAULTS = "operations", "faults"


class Tally:
    """Sums by column: each world belongs to several (``Settings.kinds``)."""

    def __init__(self) -> None:
        self._columns: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, result: Result) -> None:
        counts = result.states.copy()
        counts[_OPERATIONS] = result.operations.total()
        counts[_FAULTS] = result.faults.total()
        for column in (_ALL, *result.settings.kinds()):
            self._columns[column] += counts

    def text(self) -> str:
        """A row for each state, of which 0 are shown, too; a column for each profile and
        configuration."""
        from tests.simulation.world import STATES  # noqa: PLC0415 (see play_one)

        columns = sorted(self._columns, key=lambda each: (each != _ALL, each))
        rows = [_OPERATIONS, _FAULTS, *STATES]
        first = max(map(len, rows))
        lines = [" " * first + "".join(f"  {column}" for column in columns)]
        for row in rows:
            cells = (f"  {self._columns[each][row]:{len(each)}}" for each in columns)
            lines.append(f"{row:{first}}" + "".join(cells))
        return "\n".join(lines)
