"""The LUNs of a target, which come and go while it runs, and the file of ``--luns``:

    NUMBER FILE[:OPTION…]         7 /srv/disk7:size=1G:serial=seven

Everything behind the number is as ``--lun`` takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from iserblk import files
from iserblk.errors import BadArgument
from iserblk.target.lunspec import (
    LunSpec,
    OpenRemote,
    default_serial,
    no_remote,
    open_lun,
    parse_lun_spec,
)
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.url import MAXIMUM_LUN, parse_url


def read_lun_list(path: Path) -> dict[int, LunSpec]:
    """Read a file and parse it with ``parse_lun_list``. Raises BadArgument, also when the file
    cannot be read."""
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise BadArgument(f"--luns {path}: {words}") from None
    if "\0" in text:  # which no name of a file has
        raise BadArgument(f"--luns {path}: there is a NUL byte in the file")
    return parse_lun_list(text)


def parse_lun_list(text: str) -> dict[int, LunSpec]:
    """Parse the lines of a file. Empty lines, and lines that begin with #, are ignored. Raises
    BadArgument that names the line."""
    found: dict[int, LunSpec] = {}
    for number, line in enumerate(text.splitlines(), 1):
        word, *rest = line.split(maxsplit=1) or [""]
        if not word or word.startswith("#"):
            continue
        spec = rest[0].strip() if rest else ""
        what = f"luns, line {number}"
        known = word.isascii() and word.isdigit() and len(word) <= 5 and int(word) <= MAXIMUM_LUN
        if not (known and spec):
            raise BadArgument(f"{what}: write NUMBER FILE[:OPTION…], e.g. 7 /srv/disk:size=1G")
        if int(word) in found:
            raise BadArgument(f"{what}: LUN {int(word)} is in an earlier line")
        try:
            found[int(word)] = parse_lun_spec(spec)
        except BadArgument as error:
            raise BadArgument(f"{what}: {error}") from None
    return found


@dataclass(slots=True, frozen=True, eq=False)
class Served:
    """A LUN that is open."""

    lun: int
    spec: LunSpec
    unit: LogicalUnit

    @property
    def targets(self) -> frozenset[str]:
        """See ``targets_of``."""
        return targets_of(self.spec)


def targets_of(spec: LunSpec) -> frozenset[str]:
    """The names, in lower case, of the targets whose LUN this is. None: it is a file."""
    return frozenset(parse_url(url).iqn.lower() for url in spec.urls)


class LunList:
    """The LUNs of a target. It owns their units. ``open_remote``: opens LUNs of other targets.
    ``units``: those that are served. ``leaving``: those that are not any more, and not closed yet.

    ``open_unit`` and ``close`` wait for disks; they may be called in threads, several at once. One
    thread calls all others."""

    def __init__(self, iqn: str, open_remote: OpenRemote = no_remote) -> None:
        self._iqn = iqn
        self.open_remote = open_remote
        self._served: dict[int, Served] = {}
        self.leaving: list[Served] = []

    @property
    def units(self) -> dict[int, LogicalUnit]:
        return {lun: served.unit for lun, served in self._served.items()}

    def gone(self, specs: Mapping[int, LunSpec]) -> list[int]:
        """LUNs that are open, and are not in ``specs``, or not with these values."""
        return [lun for lun, served in self._served.items() if specs.get(lun) != served.spec]

    def new(self, specs: Mapping[int, LunSpec]) -> dict[int, LunSpec]:
        """What is in ``specs``, and not open."""
        return {lun: spec for lun, spec in specs.items() if lun not in self._served}

    def open_unit(self, spec: LunSpec) -> LogicalUnit:
        """Open a unit, which is the caller's until ``add``. Raises as ``open_lun``; it is not open
        then."""
        return open_lun(spec, default_serial(self._iqn, spec.path), self.open_remote)

    def add(self, lun: int, spec: LunSpec, unit: LogicalUnit) -> None:
        """Take over an open unit. Its number is not in use."""
        self._served[lun] = Served(lun, spec, unit)

    def open(self, lun: int, spec: LunSpec) -> LogicalUnit:
        """``open_unit`` and ``add``."""
        unit = self.open_unit(spec)
        self.add(lun, spec, unit)
        return unit

    def withdraw(self, luns: Iterable[int]) -> list[Served]:
        """Have these LUNs leave: their numbers are free, and ``close`` is to follow for each."""
        left = [self._served.pop(lun) for lun in luns]
        self.leaving += left
        return left

    def close(self, served: Served) -> str:
        """Flush and close a unit that is leaving, and in no use any more. Returns words where that
        failed; it is closed then, too."""
        try:
            served.unit.close()
        except OSError as error:
            return f"{served.spec.path}: {error.strerror}: what its cache held is lost"
        finally:
            self.leaving.remove(served)
        return ""

    def close_all(self) -> list[str]:
        """Close all units, also if one of them fails. Returns words for each that failed."""
        self.withdraw(list(self._served))
        return [words for served in list(self.leaving) if (words := self.close(served))]
