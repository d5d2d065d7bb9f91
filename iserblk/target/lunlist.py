"""The LUNs of a target, which come and go while it runs, and the file of ``--luns``:

    NUMBER FILE[:OPTION…]         7 /srv/disk7:size=1G:serial=seven

Everything behind the number is as ``--lun`` takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

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
from iserblk.url import MAXIMUM_LUN


def read_lun_list(path: Path) -> dict[int, LunSpec]:
    """Read a file and parse it with ``parse_lun_list``. Raises BadArgument, also when the file
    cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise BadArgument(f"--luns {path}: {words}") from None
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


class LunList:
    """The LUNs of a target. It owns their units. ``open_remote``: opens LUNs of other targets.
    Opening and closing wait for disks; one thread at a time may call the methods."""

    def __init__(self, iqn: str, open_remote: OpenRemote = no_remote) -> None:
        self._iqn = iqn
        self.open_remote = open_remote
        self._specs: dict[int, LunSpec] = {}
        self.units: dict[int, LogicalUnit] = {}

    def gone(self, specs: Mapping[int, LunSpec]) -> list[int]:
        """LUNs that are open, and are not in ``specs``, or not with these values."""
        return [lun for lun in self.units if specs.get(lun) != self._specs[lun]]

    def new(self, specs: Mapping[int, LunSpec]) -> list[int]:
        """LUNs in ``specs`` that are not open."""
        return [lun for lun in specs if lun not in self.units]

    def open(self, lun: int, spec: LunSpec) -> LogicalUnit:
        """Open the unit of a LUN. Raises as ``open_lun``; it is not open then."""
        unit = open_lun(spec, default_serial(self._iqn, spec.path), self.open_remote)
        self.units[lun], self._specs[lun] = unit, spec
        return unit

    def close(self, luns: Iterable[int]) -> dict[int, str]:
        """Flush and close units that are in no use any more, also if one of them fails. Returns
        words for each that failed, by LUN."""
        failed: dict[int, str] = {}
        for lun in list(luns):
            unit, spec = self.units.pop(lun), self._specs.pop(lun)
            try:
                unit.close()
            except OSError as error:
                failed[lun] = f"{spec.path}: {error.strerror}: what its cache held is lost"
        return failed
