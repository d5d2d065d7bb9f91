"""Numbers in few characters, for `iserblk top` and the exporter's page."""

from __future__ import annotations

from dataclasses import dataclass, replace

from iserblk.cli.states import AWAY, CONNECTED, DEAD, lun_state
from iserblk.metrics.reading import ConnectionReading, LunReading, PathReading
from iserblk.scsi import alua


def count_words(value: float | None) -> str:
    """Four characters at most up to 999 T: 1500 is "1.5k"; None: not known, "-"."""
    return _short(value, 1000, ("", "k", "M", "G", "T"))


def bytes_words(value: float | None) -> str:
    """Bytes with a binary unit, five characters at most: 1536 is "1.5K"."""
    return _short(value, 1024, ("", "K", "M", "G", "T"))


def _short(value: float | None, step: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "-"
    for unit in units:
        if value < step or unit == units[-1]:
            break
        value /= step
    digits = 1 if unit and value < 9.95 else 0
    if not unit and 0 < value < 9.95 and value != int(value):
        digits = 1
    return f"{value:.{digits}f}{unit}"


def latency_words(microseconds: float | None) -> str:
    """Without a space, six characters at most: 1500 µs are "1.5ms"."""
    if microseconds is None:
        return "-"
    if microseconds < 1e3:
        return f"{microseconds:.0f}µs"
    value, unit = (microseconds / 1e3, "ms") if microseconds < 1e6 else (microseconds / 1e6, "s")
    return f"{value:.{1 if value < 9.95 else 0}f}{unit}"


def bound_words(microseconds: int | None) -> str:
    """The upper bound of a row of a heat map. Bounds are doubled: 1024 µs are "1ms"."""
    if microseconds is None:
        return "more"
    for limit, divisor, unit in ((1 << 10, 1, "µs"), (1 << 20, 1 << 10, "ms")):
        if microseconds < limit:
            return f"{microseconds // divisor}{unit}"
    return f"{microseconds >> 20}s"


def duration_words(seconds: float) -> str:
    """90 s are "1m30s"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


# --- paths ---------------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class Branch:
    """A line of the tree of a LUN's paths. ``depth``: 0: the session; 1: its portals. ``state``:
    the end of the line; ``good``: whether it is what it should be; None: neither."""

    depth: int
    words: str
    state: str
    good: bool | None


def paths_of(lun: LunReading, away_s: float | None, process: str = "") -> list[Branch]:
    """The paths of a LUN as a tree: its session, the portals to which this may go, and the
    connections that it has. ``away_s``: for how long there has been none. ``process``: its state;
    of one that does not answer only the portals are known."""
    if process in DEAD:
        ways = lun.paths or (PathReading(0, lun.portal),)
        found = [Branch(0, f"session with {lun.target}", f"its process: {process}", False)]
        return found + [Branch(1, each.portal, "not known", None) for each in ways]
    state = lun_state(lun)
    words = state
    if state == AWAY and away_s is not None:
        words = f"{state} for {duration_words(away_s)}"
    elif lun.wanted > 1:
        words = f"{state}, {lun.connections} of {lun.wanted} connections"
    found = [Branch(0, f"session with {lun.target}", words, state == CONNECTED)]
    ways = lun.paths or (PathReading(0, lun.portal, lun.connected),)
    # Further connections may go to portals other than that of the session.
    at = {each.portal.rpartition("/")[2]: each.index for each in reversed(ways)}
    first = next((each.index for each in ways if each.in_use), ways[0].index)
    for way in ways:
        here = [each for each in lun.per_connection if at.get(each.portal, first) == way.index]
        leads = way.in_use or len(ways) == 1
        provider = f" ({lun.provider})" if leads else ""
        carries = replace(way, in_use=True) if here else way
        found.append(Branch(1, f"{way.portal}{provider}", *_way_state(carries, len(ways) > 1)))
        found += map(_connection, here)
    return found


def _way_state(way: PathReading, several: bool) -> tuple[str, bool | None]:
    access = "" if way.state is None else f", {alua.state_words(way.state)}"
    usable = way.state is None or way.state in alua.USABLE
    if way.in_use:
        return f"in use{access}", usable
    if way.failures:
        times = "" if way.failures == 1 else f" {way.failures} times"
        return f"failed{times}{access}", False
    if not several:
        return "lost", False
    # A port that another host's, or the array's choice keeps in standby is as it should be.
    return (f"ready{access}" if usable else alua.state_words(way.state or 0)), None


def _connection(each: ConnectionReading) -> Branch:
    words = f"connection {each.cid}: {each.portal} ({each.provider})"
    return Branch(2, words, f"{each.in_flight} in flight", True)
