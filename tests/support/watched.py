"""Readings of LUNs that were in use for some minutes: what `iserblk top` and the exporter's page
show in tests and documents. No process is asked, and no chance is in it: each call makes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from iserblk.cli.watch.history import History, Look, Seen, Silent
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.reading import (
    BOUNDS_US,
    ConnectionReading,
    LunReading,
    OperationReading,
    PathReading,
    together,
)

IQN = "iqn.2026-11.example:array"
WHEN = 1_795_000_000.0  # of the first look, seconds since 1970
EVERY_S = 1.0  # from look to look
MIB = 1 << 20


def operation(
    requests: int, middle_us: float, each_bytes: int = 0, errors: int = 0
) -> OperationReading:
    """Requests whose durations spread around ``middle_us``: most near it, a few far above."""
    buckets = [0] * (len(BOUNDS_US) + 1)
    at = max(0, min(len(BOUNDS_US) - 4, round(math.log2(max(middle_us, 8)) - 3)))
    left = requests
    for offset, share in ((3, 0.002), (2, 0.01), (1, 0.15), (-1, 0.2)):
        count = int(requests * share)
        buckets[max(0, at + offset)] += count
        left -= count
    buckets[at] += left
    return OperationReading(
        tuple(buckets), requests * each_bytes, errors, requests * middle_us / 1e6
    )


@dataclass(slots=True, frozen=True)
class Load:
    """What a LUN does in a second: requests of each kind, and how long they take."""

    reads: int = 0
    writes: int = 0
    flushes: int = 0
    each_bytes: int = 4096
    middle_us: float = 100.0

    def of(self, part: float) -> dict[str, OperationReading]:
        nothing = OperationReading()
        return {
            "read": operation(int(self.reads * part), self.middle_us, self.each_bytes),
            "write": operation(int(self.writes * part), self.middle_us * 2, self.each_bytes),
            "flush": operation(int(self.flushes * part), self.middle_us * 20),
            "trim": nothing,
            "zero": nothing,
        }


def lun(number: int = 0, name: str = "array", **fields: object) -> LunReading:
    """A LUN of IQN with one connection."""
    values: dict[str, object] = {
        "target": f"iqn.2026-11.example:{name}",
        "lun": number,
        "name": f"lun{number}",
        "url": f"iser://10.0.0.1:3260/iqn.2026-11.example:{name}/{number}",
        "size": 1 << 40,
        "portal": "10.0.0.1:3260",
        "provider": "iwarp",
        "connected": True,
        "connections": 1,
        "wanted": 1,
    }
    return LunReading(**values | fields)  # type: ignore[arg-type]


def then(before: LunReading, load: Load, part: float = 1.0) -> LunReading:
    """``before`` after another second of ``load``."""
    added = load.of(part)
    return replace(
        before,
        operations={name: together([before.operations[name], added[name]]) for name in OPERATIONS},
    )


_TWO = (
    PathReading(0, "iser://10.0.0.1:3260", True, 0, 0),
    PathReading(1, "iser://10.0.1.1:3260", False, 0, 1),
)
_OVER = (
    PathReading(0, "iser://10.0.0.1:3260", False, 2, None),
    PathReading(1, "iser://10.0.1.1:3260", True, 0, 1),
)
_OF_FOUR = tuple(
    ConnectionReading(cid, f"10.0.0.{cid % 2 + 1}:3260", "iwarp", 8, 1000, MIB) for cid in range(4)
)
_SQUARE = '/srv/images of <machines> & "others"'


def example(seconds: int = 330) -> History:
    """``seconds`` of a machine with six LUNs: one fails over in the middle, one has lost its
    connection for the last 25 seconds, one has three of four connections, one does nothing, the
    process of one is killed at the end; and one mount point needs escaping."""
    history = History()
    luns = [
        ("/dev/nbd0", "attach", lun(0, paths=_TWO), Load(9000, 3000, 20, 8192, 90)),
        ("/dev/nbd1", "attach", lun(1), Load(400, 1200, 60, 65536, 700)),
        ("/mnt/backup", "mount", lun(0, "vault", provider="tcp"), Load(0, 90, 1, MIB, 9000)),
        (_SQUARE, "mount", lun(2, "vault", connections=3, wanted=4, per_connection=_OF_FOUR[:3]),
         Load(2500, 10, 1, 16384, 250)),
        ("/dev/nbd2", "attach", lun(3, "cold"), Load()),
        ("10.0.0.9:10809", "nbd", lun(4, "cold"), Load(40, 40, 4, 4096, 2000)),
    ]  # fmt: skip
    readings = [each for _, _, each, _ in luns]
    for second in range(seconds):
        at = second * EVERY_S
        left = seconds - second
        seen = []
        for index, (where, command, _, load) in enumerate(luns):
            part = 0.6 + 0.4 * math.sin(second / 17 + index)
            reading = readings[index]
            if index == 0 and 150 <= left < 165:
                reading = replace(reading, connected=False, connections=0, in_flight=32)
            elif index == 0 and left == 149:
                reading = replace(
                    reading, connected=True, connections=1, portal="10.0.1.1:3260", paths=_OVER,
                    reconnects=1, replayed=32,
                )  # fmt: skip
            elif index == 1 and left < 25:
                reading = replace(reading, connected=False, connections=0, in_flight=17)
            else:
                slow = 30.0 if index == 0 and left in range(145, 150) else 1.0
                spread = replace(load, middle_us=load.middle_us * slow * (1 + 0.5 * part))
                reading = then(replace(reading, in_flight=int(32 * part)), spread, part)
                reading = replace(reading, unflushed=int(load.writes * part) * 2048)
            readings[index] = reading
            seen.append(Seen(where, "0", 700 + index, at, reading, command))
        silent = []
        if left <= 3:
            dead = seen.pop()
            silent.append(Silent(dead.uid, dead.where, "killed"))
        history.add(Look(at, WHEN + at, tuple(seen), tuple(silent), targets=1, sessions=3))
    return history
