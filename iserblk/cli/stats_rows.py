"""One LUN in ``iserblk stats``, and words that the report and the table share."""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.metrics.reading import LunReading


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
