"""Disks that count: which request ends up in which counter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.commands.command import Command, PlainCommand
from iserblk.disk.metered import (
    MeteredAsync,
    count,
    metered_async,
)
from iserblk.disk.seam import NO_CLIENT, Rest
from iserblk.errors import OutOfRange
from iserblk.loop import clock
from iserblk.metrics.counting import (
    BYTES,
    ERRORS,
    FLUSH,
    HISTOGRAM,
    NANOSECONDS,
    OPERATIONS,
    READ,
    TRIM,
    WRITE,
    ZERO,
    LunMetrics,
)
from tests.disk.fake_lun import FakeLuns, known

TOOK_NS = 5000  # of each request: more than 4 µs, up to 8


class Plain:
    """A disk that keeps its calls. ``error``: what each raises."""

    info = SimpleNamespace(name="lun0")
    size = 4096
    dirty = True

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            self.calls.append((name, *arguments, *sorted(options.items())))
            if self.error is not None:
                raise self.error
            return {"refresh": 8192, "extents": [(0, 4096, 0)]}.get(name)

        return called


class Bench:
    """A disk that counts, over a plain one; ``call`` runs a request to its end."""

    def __init__(self) -> None:
        self.plain = Plain()
        self.metrics = LunMetrics()
        made: Any = SimpleNamespace(**{name: self._awaitable(name) for name in NAMES})
        made.info, made.size, made.dirty = self.plain.info, self.plain.size, self.plain.dirty
        for name in DIRECT:
            setattr(made, name, getattr(self.plain, name))
        self.disk: Any = MeteredAsync(made, self.metrics)

    def _awaitable(self, name: str) -> Callable[..., object]:
        async def called(*arguments: object, **options: object) -> object:
            await trio.lowlevel.checkpoint()
            return getattr(self.plain, name)(*arguments, **options)

        return called

    async def call(self, name: str, *arguments: Any, **options: Any) -> object:
        result: object = await getattr(self.disk, name)(*arguments, **options)
        return result

    def row(self, operation: int) -> dict[str, int]:
        row = self.metrics.total()[operation]
        buckets = {f"2^{power} µs": number for power, number in enumerate(row[:HISTOGRAM])}
        sums = {"bytes": row[BYTES], "errors": row[ERRORS], "ns": row[NANOSECONDS]}
        return {name: number for name, number in {**buckets, **sums}.items() if number}


SLOTS = 3
DIRECT = (
    *("begin_read", "begin_write", "end_read", "end_write", "take_over"),
    *("begin_batch", "end_batch", "abandon", "check_here"),
)
NAMES = ("refresh", "read_into", "write", "flush", "trim", "zero", "extents", "cache")
BUFFER = memoryview(bytearray(512))
REQUESTS: list[tuple[int, int, tuple[Any, ...], dict[str, Any]]] = [
    (READ, 512, ("read_into", BUFFER, 1024), {}),
    (WRITE, 512, ("write", BUFFER, 1024, True), {}),
    (FLUSH, 0, ("flush", NO_CLIENT), {}),
    (TRIM, 2048, ("trim", 1024, 2048, True), {"patient": True}),
    (ZERO, 2048, ("zero", 1024, 2048),
     {"may_trim": True, "fast": True, "fua": True, "patient": True}),
]  # fmt: skip


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is TOOK_NS later than the one before."""

    def ticks() -> Iterator[int]:
        now = 0
        while True:
            yield now
            now += TOOK_NS

    times = ticks()
    monkeypatch.setattr(clock.sources, "nanoseconds", times.__next__)
    monkeypatch.setattr(clock.sources, "monotonic", lambda: next(times) / 1e9)


@pytest.mark.parametrize(("operation", "size", "call", "options"), REQUESTS)
async def test_a_request_is_counted_and_handed_on(
    bench: Bench,
    operation: int,
    size: int,
    call: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    await bench.call(*call, **options)
    expected = {"2^3 µs": 1, "bytes": size, "ns": TOOK_NS}
    assert bench.row(operation) == {name: number for name, number in expected.items() if number}
    assert not any(bench.row(other) for other in range(len(OPERATIONS)) if other != operation)
    ((name, *rest),) = bench.plain.calls
    flags = {each[0]: each[1] for each in rest if isinstance(each, tuple)}
    handed_on = [name, *(each for each in rest if not isinstance(each, tuple))]
    if name in ("read_into", "write"):
        assert handed_on.pop() is None  # nothing of it had begun
    assert handed_on == list(call)
    assert flags == options or flags == {name: False for name in flags} | options


@pytest.mark.parametrize(("operation", "size", "call", "options"), REQUESTS)
async def test_a_request_that_fails_counts_as_an_error_without_bytes(
    bench: Bench,
    operation: int,
    size: int,
    call: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    bench.plain.error = OutOfRange("beyond the end")
    with pytest.raises(OutOfRange):
        await bench.call(*call, **options)
    assert bench.row(operation) == {"2^3 µs": 1, "errors": 1, "ns": TOOK_NS}


async def test_other_calls_are_handed_on_uncounted(bench: Bench) -> None:
    assert bench.disk.info is bench.plain.info
    assert (bench.disk.size, bench.disk.dirty) == (4096, True)
    assert await bench.call("refresh") == 8192
    assert await bench.call("extents", 0, 4096) == [(0, 4096, 0)]
    await bench.call("cache", 512, 1024)
    assert bench.plain.calls == [("refresh",), ("extents", 0, 4096), ("cache", 512, 1024)]
    assert not any(bench.row(operation) for operation in range(len(OPERATIONS)))


@pytest.mark.parametrize(
    ("took_ns", "bucket"), [(1, 0), (1000, 0), (1001, 1), (2000, 1), (2001, 2), (4000, 2)]
)
async def test_buckets_of_the_data_path_are_those_of_count(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, took_ns: int, bucket: int
) -> None:
    """READ and WRITE have the arithmetic in line."""
    for call, operation in ((REQUESTS[0], READ), (REQUESTS[1], WRITE)):
        monkeypatch.setattr(clock.sources, "nanoseconds", iter((0, took_ns)).__next__)
        await bench.call(*call[2])
        assert bench.row(operation)[f"2^{bucket} µs"] == 1
    count(bench.metrics, FLUSH, took_ns, 0, False)
    assert bench.row(FLUSH)[f"2^{bucket} µs"] == 1


@pytest.mark.parametrize("place", ["", "/run/disk"])
def test_only_disks_whose_metrics_are_served_count(place: str) -> None:
    core = known(FakeLuns())
    core.metrics.served_at = place
    disk: Any = Plain()
    wrapped = metered_async(disk, core)
    assert isinstance(wrapped, MeteredAsync) if place else wrapped is disk


# --- commands that a front-end begins itself -----------------------------------------------------


@pytest.mark.parametrize(("kind", "operation"), [("read", READ), ("write", WRITE)])
def test_a_command_counts_from_its_begin_to_its_end(kind: str, operation: int) -> None:
    bench = Bench()
    slots = [slot_of(index, 512 << index) for index in range(SLOTS)]
    free = iter(slots)
    bench.disk = MeteredAsync(direct(lambda: next(free, None), None), bench.metrics)
    begin, end = getattr(bench.disk, f"begin_{kind}"), getattr(bench.disk, f"end_{kind}")
    begun = [begin(BUFFER, 0, None) for _ in range(SLOTS + 1)]
    assert begun == [*slots, None]  # the last one was not begun, and does not count
    assert not bench.row(operation)
    assert [end(slot) for slot in slots] == [None] * SLOTS
    row = bench.row(operation)
    # Begun at 0, 1 and 2, and ended at 3, 4 and 5.
    assert row["ns"] == SLOTS * 3 * TOOK_NS and row["bytes"] == 512 + 1024 + 2048
    assert "errors" not in row


@pytest.mark.parametrize(("kind", "operation"), [("read", READ), ("write", WRITE)])
def test_a_command_that_fails(kind: str, operation: int) -> None:
    bench = Bench()
    slot = slot_of(1, 512)
    bench.disk = MeteredAsync(direct(lambda: slot, OutOfRange("past the end")), bench.metrics)
    getattr(bench.disk, f"begin_{kind}")(BUFFER, 0, None)
    with pytest.raises(OutOfRange):
        getattr(bench.disk, f"end_{kind}")(slot)
    assert bench.row(operation)["errors"] == 1


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("kind", "operation"), [("read", READ), ("write", WRITE)])
async def test_a_request_that_goes_on_counts_once_from_its_begin(
    kind: str, operation: int, fails: bool
) -> None:
    """Its command was not enough: the rest of it takes more."""
    bench = Bench()
    slot, rest = slot_of(1, 512), Rest(-2 * TOOK_NS, 7.5)
    plain = direct(lambda: slot, rest)
    bench.disk = disk = MeteredAsync(plain, bench.metrics)
    getattr(disk, f"begin_{kind}")(BUFFER, 0, None)
    assert getattr(disk, f"end_{kind}")(slot) is rest
    assert not bench.row(operation)
    plain.error = OutOfRange("past the end") if fails else None
    try:
        if kind == "read":
            await disk.read_into(BUFFER, 0, rest)
        else:
            await disk.write(BUFFER, 0, False, rest)
    except OutOfRange:
        assert fails
    assert plain.calls[-1][-1] is rest  # with its deadline
    row = bench.row(operation)
    assert row.pop("ns") == 3 * TOOK_NS
    assert row.pop("errors", 0) == fails and row.pop("bytes", 0) == (0 if fails else 512)
    assert list(row.values()) == [1]


def slot_of(index: int, length: int) -> Command:
    slot = PlainCommand(index)
    slot.length = length
    return slot


def direct(take: Callable[[], Command | None], outcome: object) -> Any:
    return Direct(take, outcome)


class Direct(Plain):
    """``take``: what begins a command. ``outcome``: what ending one returns or raises."""

    def __init__(self, take: Callable[[], Command | None], outcome: object) -> None:
        super().__init__()
        self._take = take
        self._outcome = outcome

    def _begin(self, *_: object) -> Command | None:
        slot = self._take()
        if slot is not None:
            slot.begun = int(clock.monotonic() * 1e9)  # as ``submit``
        return slot

    def _end(self, _slot: object) -> object:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    async def _go_on(self, *arguments: object) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error

    begin_read = begin_write = _begin
    end_read = end_write = _end
    read_into = write = _go_on
