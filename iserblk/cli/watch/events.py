"""What has happened to a LUN between two readings, in words.

Counters tell: a connection that was lost and made again between two readings shows as well. Of
several that belong together (a new connection, another portal, commands that were sent again) comes
one line.
"""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.metrics.reading import LunReading


@dataclass(slots=True, frozen=True)
class Event:
    """``when``: seconds since 1970. ``where``: the device, mount point, … of the LUN. ``name``: of
    the LUN; "" for all of the process. ``bad``: a loss or an error, and not its end."""

    when: float
    where: str
    name: str
    words: str
    bad: bool = False


def changes(old: LunReading, new: LunReading, away_s: float | None) -> list[tuple[str, bool]]:
    """Words, and whether they are bad. ``away_s``: for how long there has been no connection, as
    far as earlier readings tell; None: they tell of none."""
    found: list[tuple[str, bool]] = []
    again = new.reconnects > old.reconnects or (new.connected and not old.connected)
    if again:
        found.append((_connected_words(old, new, away_s), False))
    elif new.connected and _way(new) != _way(old):
        found.append((f"went over to {_way(new)}; was {_way(old)}", False))
    if not new.connected and (old.connected or again):
        found.append(("connection lost, requests wait", True))
    replayed = new.replayed - old.replayed
    if replayed > 0 and not again:
        found.append((_replayed_words(replayed), False))
    if (count := new.recovered - old.recovered) > 0:
        moved = new.reassigned - old.reassigned
        more = f", {_count(moved, 'task')} taken over" if moved > 0 else ""
        found.append((f"{_count(count, 'connection')} lost while others went on{more}", True))
    if new.connected and old.connected and new.connections != old.connections:
        bad = new.connections < new.wanted
        found.append((f"{new.connections} of {new.wanted} connections", bad))
    if (count := new.aborted - old.aborted) > 0:
        found.append((f"{_count(count, 'command')} past the deadline", True))
    if (count := new.resets - old.resets) > 0:
        found.append((f"{_count(count, 'LUN reset')}", True))
    if (count := new.damaged - old.damaged) > 0:
        found.append((f"{_count(count, 'PDU')} with a wrong data digest", True))
    if (count := _errors(new) - _errors(old)) > 0:
        found.append((f"{_count(count, 'request')} failed", True))
    return found


def _connected_words(old: LunReading, new: LunReading, away_s: float | None) -> str:
    if _way(old) != _way(new):
        words = f"failed over to {_way(new)}"
    else:
        words = "reconnected"
        if (times := new.reconnects - old.reconnects) > 1:
            words += f" {times} times"
    if away_s is not None:
        words += f" after {away_s:.0f} s"
    replayed = new.replayed - old.replayed
    if replayed > 0:
        words += f", {_replayed_words(replayed)}"
    return f"{words}; was {_way(old)}" if _way(old) != _way(new) else words


def _replayed_words(count: int) -> str:
    return f"{_count(count, 'command')} replayed"


def _way(lun: LunReading) -> str:
    return f"{lun.portal} ({lun.provider})"


def _errors(lun: LunReading) -> int:
    return sum(each.errors for each in lun.operations.values())


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
