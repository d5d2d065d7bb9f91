"""LUNs and targets in ``iserblk stats``, and words that the report and the table share."""

from __future__ import annotations

from dataclasses import dataclass, field

from iserblk.metrics.reading import LunReading
from iserblk.metrics.target_reading import TargetReading


@dataclass(slots=True, frozen=True)
class Row:
    """One LUN of one process. ``where``: the place that stats shows for the process (a device,
    mount point, …). ``at``: monotonic time of the reading."""

    where: str
    address: str
    pid: int
    version: str
    at: float
    lun: LunReading

    @property
    def key(self) -> tuple[object, ...]:
        return self.address, self.pid, self.lun.target, self.lun.lun


@dataclass(slots=True, frozen=True)
class TargetRow:
    """One target, of one process. The fields are those of Row."""

    where: str
    address: str
    pid: int
    version: str
    at: float
    target: TargetReading

    @property
    def key(self) -> tuple[object, ...]:
        return self.address, self.pid, self.target.target


@dataclass(slots=True)
class Rows:
    """All that was found."""

    luns: list[Row] = field(default_factory=list)
    targets: list[TargetRow] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.luns or self.targets)

    def add(self, more: Rows) -> None:
        self.luns += more.luns
        self.targets += more.targets


def plain(text: str) -> str:
    """``text`` without control characters, which a terminal would act on."""
    return "".join(each if each.isprintable() else "?" for each in text)


def time_words(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    for limit, divisor, unit in ((1e3, 1, "µs"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if microseconds < limit:
            value = microseconds / divisor
            return f"{value:.0f} {unit}" if value >= 100 or divisor == 1 else f"{value:.1f} {unit}"
    raise AssertionError


def path_words(lun: LunReading) -> str:
    several = f", {lun.connections} of {lun.wanted} connections" if lun.wanted > 1 else ""
    state = several if lun.connected else ", not connected"
    return plain(f"{lun.portal} ({lun.provider}){state}")
