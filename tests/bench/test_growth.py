"""scripts/bench growth: its rows, its client, what it prints, and one short run of all of it."""

from __future__ import annotations

import io
import json
import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchlib import growth
from benchlib.goals import SERVER
from benchlib.growth import LOADS, Growth, Load
from benchlib.load import JobFailed, Measurement
from benchlib.nbd_load import BLOCK
from benchlib.results import Sample
from benchlib.subjects import Bench, Endpoint
from click.testing import CliRunner
from rich.console import Console

SIZE = 1 << 20


def test_rows_vary_one_thing_at_a_time() -> None:
    small = [load for load in LOADS if load.block == BLOCK]
    assert [load.in_flight for load in small if load[1:3] == (1, 1)] == [1, 8, 32, 128, 256]
    at_32 = [load for load in small if load.in_flight == 32]
    assert {load.connections for load in at_32 if load.exports == 1} == {1, 4, 16}
    assert {load.exports for load in at_32} == {1, 16, 64}
    assert all(load.connections % load.exports == 0 for load in LOADS)
    lengths = [load for load in LOADS if load.block != BLOCK]
    assert {load[1:3] for load in lengths} == {(1, 1)}
    assert [growth.size_text(load.block) for load in lengths] == [
        "512", "16k", "64k", "256k", "1m", "8m"
    ]  # fmt: skip
    assert len({load.row.name for load in LOADS}) == len(LOADS)


def test_connections_take_the_exports_in_turn() -> None:
    command = growth.client_command(Path("/x/nbd.sock"), 2, Load(32, 4, 2).job, 2.5)
    assert command[-7:] == ["2.5", "4096", "32", "lun0", "lun1", "lun0", "lun1"]


def test_client_prints_what_is_parsed() -> None:
    job = Load(8, 1, 1).job
    measured = growth.parse_client('{"ios": 30, "seconds": 1.5}', job, 1.0)
    assert measured == Measurement(30, 30 * 4096, 1.5)


@pytest.mark.parametrize("output", ["", "[]", '{"ios": 3}', '{"ios": 0, "seconds": 1.0}'])
def test_client_that_measured_nothing_has_failed(output: str) -> None:
    with pytest.raises(JobFailed, match="the client"):
        growth.parse_client(output, Load(8, 1, 1).job, 1.0)


def measured(costs_us: dict[Load, list[float]]) -> Growth:
    rows = {}
    for load, costs in costs_us.items():
        rows[load] = load.row
        rows[load].samples += [
            Sample(Measurement(10_000, 10_000 * 4096, 1.0), {SERVER: us / 100, "client": 0.03}, {})
            for us in costs
        ]
    return Growth(rows)


def test_dearest_is_compared_with_cheapest_at_equal_depth() -> None:
    found = measured({
        Load(1, 1, 1): [90.0],
        Load(32, 1, 1): [10.0, 30.0, 20.0],
        Load(32, 4, 1): [40.0],
        Load(32, 16, 16): [25.0],
        Load(32, 1, 1, 1 << 20): [99.0],
    })  # fmt: skip
    cost = found.server_us(Load(32, 1, 1))
    assert (cost.median, cost.low, cost.high) == pytest.approx((20, 10, 30))
    assert found.stretch() == {32: pytest.approx(2.0)}


def test_table_has_a_line_for_each_row() -> None:
    text = io.StringIO()
    found = measured({Load(32, 1, 1): [10.0], Load(32, 16, 1): [15.0, 16.0, 17.0]})
    growth.print_growth(Console(file=text, width=140), found)
    printed = " ".join(text.getvalue().split())
    line = "│ 32 │ 16 │ 1 │ 4k │ 10.0 K/s (10.0–10.0) │ 39 │ 16.0 (15.0–17.0) │"
    assert line in printed
    assert "iserblk nbd 16 + client 3 µs" in printed
    assert "32 in flight: a request takes 1.60 times" in printed


def test_large_requests_are_counted_as_small_ones_are() -> None:
    text = io.StringIO()
    growth.print_growth(Console(file=text, width=140), measured({Load(8, 1, 1, SIZE): [99.0]}))
    assert "│ 8 │ 1 │ 1 │ 1m │ 10.0 K/s (10.0–10.0) │ 10,000 │" in " ".join(text.getvalue().split())


def test_rounds_run_to_and_fro_and_the_first_does_not_count() -> None:
    loads = [Load(1, 1, 1), Load(2, 1, 1), Load(2, 2, 2)]
    runs: list[str] = []

    def endpoint(exports: int) -> Endpoint:
        def command(job: object, _seconds: float) -> list[str]:
            return ["echo", json.dumps({"ios": len(runs), "seconds": 1.0})]

        return Endpoint("client", command, growth.parse_client)

    found = growth.measure_growth(loads, {1: endpoint(1), 2: endpoint(2)}, 2, 0.1, runs.append)
    one, two, three = (
        [sample.measured.ios for sample in found.rows[load].samples] for load in loads
    )
    assert (one, two, three) == ([6, 7], [5, 8], [4, 9])
    assert "d2-c2/2-exports" in runs[2]


def test_run_that_fails_names_its_row() -> None:
    endpoint = Endpoint("client", lambda *_: ["sh", "-c", "echo gone; exit 3"], growth.parse_client)
    with pytest.raises(JobFailed, match=r"growth/4k-randread-d2-c1/1-exports failed: .*gone"):
        growth.measure_growth([Load(2, 1, 1)], {1: endpoint}, 1, 0.1, lambda _: None)


def test_server_and_client_and_target_work_together(tmp_path: Path) -> None:
    file = tmp_path / "lun"
    file.write_bytes(os.urandom(SIZE))
    loads = [Load(4, 2, 1), Load(3, 4, 2), Load(4, 1, 1, 512), Load(2, 2, 1, SIZE // 2)]
    with ExitStack() as stack:
        bench = Bench(stack, tmp_path, file, file)
        endpoints = growth.open_servers(bench, file, [load.exports for load in loads])
        found = growth.measure_growth(loads, endpoints, 1, 0.2, lambda _: None)
        assert set(endpoints) == {1, 2}
        assert all(
            server.running() for each in endpoints.values() for server in each.servers.values()
        )
    for load in loads:
        (sample,) = found.rows[load].samples
        assert sample.measured.ios > 0
        assert set(sample.cpu_seconds) == {SERVER, "target", "client"}
    text = io.StringIO()
    growth.print_growth(Console(file=text, width=140), found)
    assert "│ 3 │ 4 │ 2 │ 4k │" in " ".join(text.getvalue().split())


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--seconds", "0"], ["more"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(growth.growth, arguments).exit_code == 2
