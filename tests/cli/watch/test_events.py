"""What has happened to a LUN between two readings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserblk.cli.watch.events import changes
from iserblk.metrics.reading import LunReading
from tests.support.watched import lun, operation

HERE = lun(connections=2, wanted=2)
GONE = replace(HERE, connected=False, connections=0)


@pytest.mark.parametrize(
    ("old", "new", "away_s", "wanted"),
    [
        (HERE, HERE, None, []),
        (HERE, replace(HERE, in_flight=9, unflushed=7, retries=5), None, []),
        (HERE, GONE, None, [("connection lost, requests wait", True)]),
        (GONE, GONE, 5.0, []),
        (GONE, replace(HERE, reconnects=1), 3.2, [("reconnected after 3 s", False)]),
        (
            GONE,
            replace(HERE, reconnects=1, replayed=1),
            3.0,
            [("reconnected after 3 s, 1 command replayed", False)],
        ),
        # Lost and made again between two readings, more than once.
        (
            HERE,
            replace(HERE, reconnects=3, replayed=12),
            None,
            [("reconnected 3 times, 12 commands replayed", False)],
        ),
        # The same, and lost again.
        (
            HERE,
            replace(GONE, reconnects=1),
            None,
            [("reconnected", False), ("connection lost, requests wait", True)],
        ),
        (
            GONE,
            replace(HERE, reconnects=1, replayed=4, portal="b:3260", provider="tcp"),
            20.0,
            [
                (
                    "failed over to b:3260 (tcp) after 20 s, 4 commands replayed; "
                    "was 10.0.0.1:3260 (iwarp)",
                    False,
                )
            ],
        ),
        # In order, without a loss.
        (
            HERE,
            replace(HERE, portal="b:3260"),
            None,
            [("went over to b:3260 (iwarp); was 10.0.0.1:3260 (iwarp)", False)],
        ),
        (HERE, replace(HERE, replayed=2), None, [("2 commands replayed", False)]),
        (
            HERE,
            replace(HERE, recovered=1, reassigned=3, connections=1),
            None,
            [
                ("1 connection lost while others went on, 3 tasks taken over", True),
                ("1 of 2 connections", True),
            ],
        ),
        (replace(HERE, connections=1), HERE, None, [("2 of 2 connections", False)]),
        (
            HERE,
            replace(HERE, aborted=1, resets=1, damaged=2),
            None,
            [
                ("1 command past the deadline", True),
                ("1 LUN reset", True),
                ("2 PDUs with a wrong data digest", True),
            ],
        ),
        (
            HERE,
            replace(HERE, operations=HERE.operations | {"read": operation(9, 50, errors=2)}),
            None,
            [("2 requests failed", True)],
        ),
    ],
)
def test_changes(
    old: LunReading, new: LunReading, away_s: float | None, wanted: list[tuple[str, bool]]
) -> None:
    assert changes(old, new, away_s) == wanted
