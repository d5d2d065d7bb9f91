"""scripts/bench scale: its rows, its client, what it prints, and short runs of all of it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from benchlib import scale
from benchlib.goals import OURS, OURS_ISCSI, OURS_TCP
from benchlib.load import JobFailed
from benchlib.scale import CLIENT, LOADS, SUBJECTS, TARGET, Load, Row, Run
from benchlib.servers import Absent, Server
from benchlib.subjects import Bench
from click.testing import CliRunner
from rich.console import Console

SIZE = 1 << 20
IDLE_BYTES = 256 << 10  # of an idle session, at most


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lun"
    path.write_bytes(os.urandom(SIZE))
    return path


def test_each_session_has_a_request_and_all_together_32() -> None:
    assert [load.sessions for load in LOADS] == [1, 8, 32, 128, 256]
    assert all(load.sessions * load.in_flight == max(32, load.sessions) for load in LOADS)
    assert list(SUBJECTS) == [OURS, OURS_ISCSI, OURS_TCP]


def told(**changes: object) -> str:
    return json.dumps(
        {"ios": 30, "seconds": 1.5, "cpu_seconds": 0.5, "opened_ms": [9.0, 2.0], **changes}
    )


def test_client_prints_what_is_parsed() -> None:
    run = scale.parse_client(told(), 0.25, {CLIENT: 100.0})
    assert run == Run(30, 1.5, {CLIENT: 0.5, TARGET: 0.25}, {CLIENT: 100.0}, [9.0, 2.0])


@pytest.mark.parametrize(
    "output", ["", "[]", '{"ios": 3}', told(ios=0), told(opened_ms=[]), told(opened_ms=3)]
)
def test_client_that_measured_nothing_has_failed(output: str) -> None:
    with pytest.raises(JobFailed, match="the client"):
        scale.parse_client(output, 0.0, {})


def measured(load: Load, client_us: float, idle: dict[str, float], opened: list[float]) -> Row:
    row = Row(load, OURS)
    for more in (0.0, 2.0, 1.0):
        cpu = {CLIENT: (client_us + more) / 100, TARGET: 0.3}
        row.runs.append(Run(10_000, 1.0, cpu, idle, opened))
    return row


def test_table_has_a_line_for_each_row() -> None:
    rows = [
        measured(Load(1, 32), 10.0, {}, [40.0]),
        measured(
            Load(20, 1),
            21.0,
            {CLIENT: 99.0 * 1024, TARGET: 1024.0},
            [90.0, *[2.0] * 9, *[9.0] * 2, *[3.0] * 8],
        ),
        Row(Load(20, 1), OURS_TCP),
    ]
    rows[-1].absent = "no tgtd"
    text = io.StringIO()
    scale.print_rows(Console(file=text, width=160), rows)
    printed = " ".join(text.getvalue().split())
    assert "│ 1 │ 32 │ iserblk │ 10.0 K/s (10.0–10.0) │ 11.0 │ 30.0 │ │ │ 40.0 – 40.0 │" in printed
    assert (
        "│ 20 │ 20 │ iserblk │ 10.0 K/s (10.0–10.0) │ 22.0 │ 30.0 │ 99 │ 1 │ 2.0 – 3.0 │" in printed
    )
    assert "with 20 sessions a request takes 2.00 times the client's CPU time, and 1.00 " in printed
    assert "iserblk-tcp: no tgtd" in printed


def ours(bench: Bench, iscsi: bool = False) -> tuple[Server, str]:
    return SUBJECTS[OURS_ISCSI if iscsi else OURS](bench)


@pytest.mark.parametrize("iscsi", [False, True])
def test_client_and_target_work_together(tmp_path: Path, file: Path, iscsi: bool) -> None:
    """And a session that is open holds little memory at its initiator."""
    rows = [Row(Load(1, 2), "x"), Row(Load(33, 1), "x")]
    shown: list[str] = []
    opener = {"x": lambda bench: ours(bench, iscsi)}
    scale.measure_all(rows, opener, (file, file), tmp_path, 1, 0.3, shown.append)
    assert shown == ["scale/1-sessions/x, round 1", "scale/33-sessions/x, round 1"]
    (one,), (many,) = (row.runs for row in rows)
    assert one.ios > 0 and many.ios >= 33
    assert one.idle == {} and set(many.idle) == {CLIENT, TARGET}
    assert [len(run.opened_ms) for run in (one, many)] == [1, 33]
    assert set(many.cpu_seconds) == {CLIENT, TARGET}
    assert many.idle[CLIENT] < IDLE_BYTES


def test_a_subject_that_is_not_there_is_left_out(tmp_path: Path, file: Path) -> None:
    def none(bench: Bench) -> tuple[Server, str]:
        raise Absent("it is not installed")

    row = Row(Load(1, 1), "x")
    scale.measure_all([row], {"x": none}, (file, file), tmp_path, 2, 0.1, lambda _: None)
    assert not row.runs and row.absent == "it is not installed"


def test_run_that_fails_names_its_row(tmp_path: Path, file: Path) -> None:
    def elsewhere(bench: Bench) -> tuple[Server, str]:
        server, url = ours(bench)
        return server, url + "1"  # a LUN that there is not

    row = Row(Load(2, 1), "x")
    with pytest.raises(JobFailed, match=r"scale/2-sessions/x failed: the client ended .*LUN"):
        scale.measure_all([row], {"x": elsewhere}, (file, file), tmp_path, 1, 0.1, lambda _: None)


def test_client_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text("import sys; sys.stdin.readline()")
    monkeypatch.setattr(scale, "PROGRAM", program)
    monkeypatch.setattr(scale, "GRACE_S", 0.0)
    with (
        scale.started_client("iser://x", Load(1, 1), 0.1) as client,
        pytest.raises(JobFailed, match="ended with status -9"),
    ):
        client.said()


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--seconds", "0"], ["more"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(scale.scale, arguments).exit_code == 2
