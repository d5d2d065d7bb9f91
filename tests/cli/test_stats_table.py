"""The table of ``iserblk stats``: rates between two looks, and the loop that shows them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import pytest
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from iserblk.cli import stats_table
from iserblk.cli.stats_rows import Row, Rows, TargetRow
from iserblk.cli.stats_table import table, tables, watch
from iserblk.errors import ConnectFailed
from iserblk.metrics.reading import BOUNDS_US, LunReading, OperationReading
from iserblk.metrics.target_reading import AddressReading, TargetReading

MIB = 1 << 20
RATES = ("IOPS", "MiB/s", "mean", "p99")
Keyed = dict[tuple[object, ...], Row]


def operation(requests: int, mib: int = 0, each_us: float = 48.0) -> OperationReading:
    """Requests that took up to 64 µs."""
    buckets = [0] * (len(BOUNDS_US) + 1)
    buckets[BOUNDS_US.index(64)] = requests
    return OperationReading(tuple(buckets), mib * MIB, 0, requests * each_us / 1e6)


def row(at: float, name: str = "lun0", **operations: OperationReading) -> Row:
    lun = LunReading(
        "iqn", int(name[-1]), name, "url", MIB, "host:3260", "iwarp", True, in_flight=4, retries=5,
        reconnects=6, unflushed=2 * MIB,
    )  # fmt: skip
    lun.operations.update(operations)
    return Row("/dev/nbd0", "/run/socket", 7, "1", at, lun)


def only(made: RenderableType) -> RenderableType:
    """The one table of those that are shown."""
    assert isinstance(made, Group)
    (found,) = made.renderables
    return found


def cells(made: RenderableType, number: int = 0) -> dict[str, str]:
    """One row, by the names of the columns."""
    assert isinstance(made, Table)
    return {str(each.header): str(list(each.cells)[number]) for each in made.columns}


def rates(now: Row, before: Keyed) -> list[str]:
    found = cells(table([now], before))
    return [found[name] for name in RATES]


def test_what_does_not_depend_on_time() -> None:
    found = cells(table([row(1.0)], {}))
    assert (found["where"], found["LUN"], found["path"]) == (
        "/dev/nbd0",
        "lun0",
        "host:3260 (iwarp)",
    )
    assert (found["in flight"], found["retries"], found["reconnects"]) == ("4", "5", "6")
    assert found["unflushed"].startswith("2")


def test_rates_are_those_between_the_looks() -> None:
    """All operations count as requests; bytes are those that were read and written."""
    old = row(10.0, read=operation(100, 50), trim=operation(1, 999), flush=operation(7))
    new = row(
        12.0, read=operation(300, 150), write=operation(20, 30), trim=operation(1, 4999),
        flush=operation(7),
    )  # fmt: skip
    iops, mibs, mean, p99 = rates(new, {old.key: old})
    assert (iops, mibs, mean) == ("110", "65.0", "48 µs")
    assert p99 in ("63 µs", "64 µs")


def test_a_quiet_lun_has_no_times() -> None:
    old = row(10.0, read=operation(100))
    assert rates(replace(old, at=11.0), {old.key: old}) == ["0", "0.0", "-", "-"]


def test_no_rates_without_a_look_before() -> None:
    new = row(12.0, read=operation(100))
    stranger = row(10.0, "lun1")
    assert rates(new, {}) == ["", "", "", ""]
    assert rates(new, {stranger.key: stranger}) == ["", "", "", ""]
    assert rates(new, {new.key: new}) == ["", "", "", ""]  # no time has passed


def test_each_lun_has_its_own_rates() -> None:
    old = [row(10.0, "lun0", read=operation(0)), row(10.0, "lun1", read=operation(0))]
    new = [row(11.0, "lun0", read=operation(5)), row(11.0, "lun1", read=operation(9))]
    made = table(new, {each.key: each for each in old})
    assert [cells(made, number)["IOPS"] for number in (0, 1)] == ["5", "9"]


class Live:
    """Stands in for rich's: keeps what is shown."""

    shown: list[RenderableType]

    def __init__(self, **_options: object) -> None:
        Live.shown = []

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        assert refresh
        Live.shown.append(renderable)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between looks; ^C comes during the fourth."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(stats_table, "Live", Live)
    monkeypatch.setattr(stats_table, "sleep", sleep)
    return found


def looks(*rows: list[Row]) -> Callable[[], Rows]:
    return iter([Rows(each) for each in rows]).__next__


def test_watching_shows_rates_from_the_second_look_on(pauses: list[float]) -> None:
    watch(
        looks(
            [],
            [row(1.0, read=operation(0))],
            [row(2.0, read=operation(10))],
            [row(3.0, read=operation(15))],
        ),
        0.5,
        "no disks",
    )
    assert pauses == [0.5] * 4
    nothing, *tables = Live.shown
    assert isinstance(nothing, Text) and str(nothing) == "no disks"
    assert [cells(only(each))["IOPS"] for each in tables] == ["", "10", "5"]


def test_an_error_of_the_look_ends_watching(pauses: list[float]) -> None:
    def look() -> Rows:
        if pauses:
            raise ConnectFailed("the process has gone")
        return Rows([row(1.0)])

    with pytest.raises(ConnectFailed):
        watch(look, 0.5, "no disks")
    assert len(Live.shown) == 1


def test_targets_have_a_table_of_their_own() -> None:
    def seen(at: float, commands: int, address: str = "10.0.0.1") -> TargetRow:
        target = TargetReading(
            "iqn", "iser://host/iqn", memory=2 * MIB, sessions=3, connections=4,
            logins_unfinished=1, memory_waiting=2, commands=commands, in_flight=5,
            addresses=(AddressReading(address, MIB),),
        )  # fmt: skip
        return TargetRow("iqn", "/run/socket", 7, "1", at, target)

    first, later = Rows([], [seen(1.0, 100)]), Rows([row(1.5)], [seen(3.0, 140, "\x1b[2J")])
    found = cells(only(tables(first, Rows())))
    assert (found["commands/s"], found["sessions"], found["memory"]) == ("", "3", "2.0 MiB")
    assert found["largest address"] == "10.0.0.1 1.0 MiB"
    both = tables(later, first)
    assert isinstance(both, Group)
    of_targets, of_luns = both.renderables
    assert isinstance(of_targets, Table) and isinstance(of_luns, Table)
    assert cells(of_luns)["LUN"] == "lun0"
    found = cells(of_targets)
    assert found["commands/s"] == "20" and found["largest address"] == "?[2J 1.0 MiB"
    restarted = cells(only(tables(Rows([], [seen(4.0, 3)]), later)))
    assert restarted["commands/s"] == ""


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(width: int) -> None:
    """The figures are whole; names that are long have several lines."""
    console = Console(width=width, file=io.StringIO())
    big = 1023.9 * MIB
    lun = replace(
        row(2.0, read=operation(900_000, 9000, 999_000.0)).lun,
        unflushed=int(big), in_flight=127, portal="[2001:db8::123:4567]:3260",
    )  # fmt: skip
    now = replace(row(2.0), lun=lun, where="/var/lib/a/long/mount/point/of/a/lun")
    old = replace(now, at=1.0, lun=row(1.0, read=operation(0)).lun)
    target = TargetRow(
        "iqn.2026-11.example:storage.backup.weekly", "/run/s", 7, "1", 2.0,
        TargetReading("iqn", "url", commands=123456, in_flight=4095, memory=int(big), sessions=999),
    )  # fmt: skip
    console.print(tables(Rows([now], [target]), Rows([old], []), width))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for figure in ("900000", "9000.0", "1023.9 MiB", "127", "4095", "999"):
        assert figure in shown, shown
    assert "…" not in shown


def test_a_narrow_table_tells_the_state_in_place_of_the_path() -> None:
    away = replace(row(1.0).lun, connected=False)
    found = cells(table([replace(row(1.0), lun=away)], {}, 80))
    assert found["state"] == "not connected" and "path" not in found
