"""Numbers in few characters, and the tree of paths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserblk.cli.watch.words import (
    Branch,
    bound_words,
    bytes_words,
    count_words,
    duration_words,
    latency_words,
    paths_of,
)
from iserblk.metrics.reading import BOUNDS_US, ConnectionReading, PathReading
from tests.support.watched import lun


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(None, "-"), (0, "0"), (0.25, "0.2"), (7, "7"), (999, "999"), (1000, "1.0k"),
     (9949, "9.9k"), (9951, "10k"), (123_456, "123k"), (1.5e6, "1.5M"), (5e15, "5000T")],
)  # fmt: skip
def test_counts(value: float | None, wanted: str) -> None:
    assert count_words(value) == wanted


def test_bytes() -> None:
    assert [bytes_words(each) for each in (0, 1023, 1536, 1 << 20, 1000 << 30)] == [
        "0", "1023", "1.5K", "1.0M", "1000G",
    ]  # fmt: skip


def test_latencies() -> None:
    values = (None, 8, 999, 1500, 99_000, 1.5e6, 67e6)
    assert [latency_words(each) for each in values] == [
        "-", "8µs", "999µs", "1.5ms", "99ms", "1.5s", "67s",
    ]  # fmt: skip


def test_bounds_are_round() -> None:
    found = [bound_words(each) for each in (*BOUNDS_US, None)]
    assert found[0] == "8µs" and found[7:9] == ["1ms", "2ms"] and found[-2:] == ["64s", "more"]
    assert len(set(found)) == len(found)


def test_durations() -> None:
    assert [duration_words(each) for each in (0.9, 59, 90, 3700)] == ["0s", "59s", "1m30s", "1h01m"]


def test_a_tree_of_one_portal() -> None:
    assert paths_of(lun(), None) == [
        Branch(0, "session with iqn.2026-11.example:array", "connected", True),
        Branch(1, "10.0.0.1:3260 (iwarp)", "in use", True),
    ]
    away = paths_of(lun(connected=False, connections=0), 75.0)
    assert [(each.state, each.good) for each in away] == [
        ("not connected for 1m15s", False),
        ("lost", False),
    ]


def test_connections_are_below_their_portals() -> None:
    """Of a portal that failed for the session, and has a further connection now, too."""
    paths = (PathReading(0, "iser://a:3260", True), PathReading(1, "iser://b:3260", failures=9),
             PathReading(2, "iser://b:3260"))  # fmt: skip
    several = tuple(
        ConnectionReading(cid, portal, "tcp")
        for cid, portal in enumerate(("a:3260", "b:3260", "x"))
    )
    reading = replace(lun(connections=3, wanted=3), paths=paths, per_connection=several)
    found = paths_of(reading, None)
    assert [(each.depth, each.words.partition(":")[0], each.state) for each in found[1:]] == [
        (1, "iser", "in use"),
        (2, "connection 0", "0 in flight"),
        (2, "connection 2", "0 in flight"),
        (1, "iser", "in use"),
        (2, "connection 1", "0 in flight"),
        (1, "iser", "ready"),
    ]


def test_a_tree_of_a_dead_process() -> None:
    assert [(each.state, each.good) for each in paths_of(lun(), None, "killed")] == [
        ("its process: killed", False),
        ("not known", None),
    ]


def test_a_tree_of_several_portals_and_connections() -> None:
    paths = (
        PathReading(0, "iser://a:3260", failures=3),
        PathReading(1, "iser://b:3260", True, state=1),
        PathReading(2, "iser://c:3260", state=2),
        PathReading(3, "iser://d:3260"),
    )
    connection = ConnectionReading(7, "b:3260", "iwarp", 5)
    found = paths_of(
        replace(lun(connections=1, wanted=2), paths=paths, per_connection=(connection,)), None
    )
    assert [(each.depth, each.words, each.state, each.good) for each in found[1:]] == [
        (1, "iser://a:3260", "failed 3 times", False),
        (1, "iser://b:3260 (iwarp)", "in use, active/non-optimized", True),
        (2, "connection 7: b:3260 (iwarp)", "5 in flight", True),
        (1, "iser://c:3260", "standby", None),
        (1, "iser://d:3260", "ready", None),
    ]
    assert (found[0].state, found[0].good) == ("degraded, 1 of 2 connections", False)
