"""LUNs over the last minutes: rates, latencies by time, events, order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from iserblk.cli.watch.history import (
    MOST_EVENTS,
    SLOT_S,
    SLOTS,
    SORTS,
    History,
    Look,
    Seen,
    Silent,
    heat_map,
    in_order,
)
from iserblk.metrics.reading import BOUNDS_US, LunReading
from tests.support.watched import Load, example, lun, operation, then

LOAD = Load(reads=100, writes=50, each_bytes=1000)


def seen(at: float, reading: LunReading, where: str = "/dev/nbd0", pid: int = 7) -> Seen:
    return Seen(where, "0", pid, at, reading, "attach")


def look(at: float, *luns: Seen, silent: Sequence[Silent] = ()) -> Look:
    return Look(at, 1000.0 + at, luns, tuple(silent))


def words(history: History) -> list[str]:
    return [f"{each.where}: {each.words}" for each in history.events]


def test_one_look_has_no_rates() -> None:
    history = History()
    history.add(look(1.0, seen(1.0, then(lun(), LOAD))))
    (only,) = history.luns.values()
    assert only.rates.iops() is None and only.rates.bytes_s("read") is None
    assert only.recent(1.0).requests == 0
    assert not history.events


def test_rates_are_of_the_time_between_two_readings() -> None:
    """Which are not those of the looks."""
    history = History()
    reading = then(lun(), LOAD)
    history.add(look(1.0, seen(1.0, reading)))
    history.add(look(3.5, seen(3.0, then(reading, LOAD))))
    (only,) = history.luns.values()
    assert only.rates.iops() == 75
    assert (only.rates.iops("read"), only.rates.bytes_s("write")) == (50, 25_000)
    assert only.recent(3.5).requests == 150
    assert only.recent(3.5, "write").requests == 50
    assert only.recent_bytes_s(3.5) == 75_000


def test_slots_end_with_the_present() -> None:
    history = History()
    reading = lun()
    for at in (0.0, 1.0, 6.0, 21.0):
        reading = then(reading, LOAD)
        history.add(look(at, seen(at, reading)))
    (only,) = history.luns.values()
    counts = [each.every.requests for each in only.columns(6, 21.0)]
    assert counts == [0, 150, 150, 0, 0, 150]
    assert [each.every.requests for each in only.columns(3, 31.0)] == [150, 0, 0]
    assert only.recent(31.0).requests == 0


def test_what_is_kept_has_a_limit() -> None:
    history = History()
    reading = lun()
    for number in range(SLOTS * 2):
        reading = replace(reading, reconnects=number)
        at = number * SLOT_S
        history.add(look(at, seen(at, then(reading, LOAD))))
    (only,) = history.luns.values()
    assert len(only.slots) == SLOTS
    assert len(history.events) == min(MOST_EVENTS, SLOTS * 2 - 1)


def test_another_process_begins_anew() -> None:
    history = History()
    history.add(look(0.0, seen(0.0, then(lun(), LOAD))))
    history.add(look(1.0, seen(1.0, lun(), pid=8)))
    (only,) = history.luns.values()
    assert only.rates.iops() is None
    assert words(history) == ["/dev/nbd0: another process serves it now"]


def test_a_luns_life() -> None:
    history = History()
    history.add(look(0.0))
    history.add(look(1.0, seen(1.0, lun())))
    away = replace(lun(), connected=False, connections=0)
    history.add(look(2.0, seen(2.0, away)))
    history.add(look(8.0, seen(8.0, away)))
    (only,) = history.luns.values()
    assert only.bad and only.away_s(9.0) == 7.0
    history.add(look(9.0, seen(9.0, replace(lun(), reconnects=1, replayed=2))))
    assert only.away_s(9.0) is None
    assert [each.away for each in only.columns(3, 10.0)] == [True, True, False]
    history.add(look(10.0))
    assert words(history) == [
        "/dev/nbd0: in use",
        "/dev/nbd0: connection lost, requests wait",
        "/dev/nbd0: reconnected after 7 s, 2 commands replayed",
        "/dev/nbd0: not in use any more",
    ]
    assert not history.luns


def test_a_connection_that_was_lost_before_anybody_looked() -> None:
    history = History()
    away = replace(lun(), connected=False, connections=0, away_since=900)
    history.add(look(2.0, seen(2.0, away)))  # at 1002
    (only,) = history.luns.values()
    assert only.away_s(3.0) == 103.0
    history.add(look(4.0, seen(4.0, replace(lun(), reconnects=1))))
    assert words(history)[-1] == "/dev/nbd0: reconnected after 104 s"


def test_a_process_that_falls_silent() -> None:
    """Its LUNs stay, with what was known of them."""
    history = History()
    silent = Silent("0", "/dev/nbd0", "no answer")
    history.add(look(0.0, seen(0.0, lun())))
    history.add(look(1.0, silent=[silent, Silent("0", "/other", "killed")]))
    history.add(look(2.0, silent=[silent]))
    (only,) = history.luns.values()
    assert (only.state, only.bad, only.rates.iops()) == ("no answer", True, None)
    history.add(look(3.0, seen(3.0, lun())))
    assert words(history) == ["/dev/nbd0: its process: no answer", "/dev/nbd0: answers again"]
    assert only.state == "connected"


def test_a_process_of_which_nothing_is_known() -> None:
    history = History()
    history.add(look(0.0, silent=[Silent("0", "/dev/nbd0", "killed")]))
    assert [each.where for each in history.unknown] == ["/dev/nbd0"]
    assert not history.luns


def test_luns_of_one_process_are_told_apart() -> None:
    history = History()
    history.add(look(0.0, seen(0.0, lun(0)), seen(0.0, lun(1)), seen(0.0, lun(2), "/mnt")))
    assert [history.where(each) for each in history.luns.values()] == [
        "/dev/nbd0 lun0",
        "/dev/nbd0 lun1",
        "/mnt",
    ]
    lost = replace(lun(1), connected=False)
    history.add(look(1.0, seen(1.0, lun(0)), seen(1.0, lost), seen(1.0, lun(2), "/mnt")))
    of = [len(history.events_of(each)) for each in history.luns.values()]
    assert of == [0, 1, 0]


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sort", "first"),
    [
        ("where", "/a"),
        ("throughput", "/b"),
        ("iops", "/c"),
        ("latency", "/d"),
        ("flight", "/e"),
        ("unflushed", "/f"),
        ("state", "/g"),
    ],
)
def test_order(sort: str, first: str) -> None:
    loads = {
        "/a": Load(),
        "/b": Load(10, each_bytes=1 << 20),
        "/c": Load(1000),
        "/d": Load(1, middle_us=1e6),
        "/e": Load(),
        "/f": Load(),
        "/g": Load(),
    }
    fields: dict[str, dict[str, Any]] = {
        "/e": {"in_flight": 9},
        "/f": {"unflushed": 9},
        "/g": {"connected": False},
    }
    history = History()
    for at in (0.0, 1.0):
        history.add(
            look(
                at,
                *(
                    seen(at, then(lun(**fields.get(where, {})), load, at), where)
                    for where, load in loads.items()
                ),
            )
        )
    assert in_order(history, sort)[0].seen.where == first
    assert in_order(history, sort, reverse=True)[-1].seen.where == first


def test_every_order_has_a_key_of_its_own() -> None:
    assert len(set(SORTS.values())) == len(SORTS)


# --- the heat map --------------------------------------------------------------------------------


def test_a_heat_map_has_shares_of_each_time() -> None:
    history = History()
    reading = lun()
    history.add(look(0.0, seen(0.0, reading)))
    one, other = operation(995, 8), operation(5, 8)
    slow = [0] * (len(BOUNDS_US) + 1)
    slow[BOUNDS_US.index(1024)] = 5
    mixed = replace(
        reading,
        operations=reading.operations | {"read": one, "write": replace(other, buckets=tuple(slow))},
    )
    history.add(look(6.0, seen(6.0, mixed)))
    (only,) = history.luns.values()
    chart = heat_map(only, 6.0, 4, 100)
    assert chart.bounds[0] == 1024 and chart.bounds[-1] == 8
    assert chart.rows[0] == (0, 0, 0, 1)  # 5 of 1000
    assert chart.rows[-1] == (0, 0, 0, 4)
    assert len(chart.rows) == BOUNDS_US.index(1024) + 1
    small = heat_map(only, 6.0, 4, 3)
    assert len(small.rows) == 3 and small.rows[0][3] and small.rows[-1][3] == 4
    assert small.bounds[0] is not None and small.bounds[0] >= 1024


@pytest.mark.parametrize("height", range(1, 30))
def test_a_heat_map_leaves_no_request_out(height: int) -> None:
    history = example(60)
    now = history.look.at
    for each in history.luns.values():
        chart = heat_map(each, now, 12, height)
        assert len(chart.rows) == len(chart.bounds) <= height
        for at, slot in enumerate(each.columns(12, now)):
            assert any(row[at] for row in chart.rows) == bool(slot.every.requests)


def test_requests_longer_than_all_bounds_are_shown() -> None:
    history = History()
    reading = lun()
    history.add(look(0.0, seen(0.0, reading)))
    buckets = (*[0] * len(BOUNDS_US), 1)
    long = replace(operation(0, 8), buckets=buckets)
    history.add(
        look(1.0, seen(1.0, replace(reading, operations=reading.operations | {"read": long})))
    )
    (only,) = history.luns.values()
    chart = heat_map(only, 1.0, 1, 5)
    assert (chart.bounds, chart.rows) == ((None,), ((4,),))
