"""The order of the runs, what happens to rows that fail, and what is printed of all that."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchlib import goals, report, sections, storage
from benchlib.load import JOBS, MEMORY_JOBS, Job, JobFailed, Measurement
from benchlib.results import Row, Sample, Spread
from benchlib.sections import SECTIONS, Plan, Section, Stopped, in_rounds, run_section
from benchlib.servers import Absent, Server
from benchlib.subjects import Bench, Endpoint
from rich.console import Console

JOB, OTHER_JOB = JOBS[0], JOBS[1]


def endpoint(script: str) -> Callable[[Bench], Endpoint]:
    """Opens a subject whose client is a shell script, with the job's name as its $1."""

    def parse(output: str, job: Job, seconds: float) -> Measurement:
        return Measurement(int(output), int(output) * job.block, seconds)

    def command(job: Job, _seconds: float) -> list[str]:
        return ["sh", "-c", script, "client", job.name]

    return lambda _bench: Endpoint("client", command, parse)


def parse_nothing(_output: str, job: Job, seconds: float) -> Measurement:
    return Measurement(1, job.block, seconds)


def refused(_bench: Bench) -> Endpoint:
    raise Absent("peer: it is not installed")


def run(plan: Plan, tmp_path: Path, **openers: Callable[[Bench], Endpoint]) -> list[Row]:
    section = Section("nbd", [JOB, OTHER_JOB], openers)
    files = (tmp_path / "ours", tmp_path / "theirs")
    rows = section.rows("*")
    run_section(section, plan, files, rows, lambda _text: None)
    return rows


def test_rounds_are_interleaved() -> None:
    rows = [Row("nbd", job, subject) for job in (JOB, OTHER_JOB) for subject in "AB"]
    order = [(number, row.job.name, row.subject) for number, row in in_rounds(rows, 3)]
    assert [subject for _, _, subject in order] == list("ABBAABABBAAB")
    assert [number for number, _, _ in order] == [0, 0, 1, 1, 2, 2] * 2
    assert len({job for _, job, _ in order[:6]}) == 1


def test_subject_that_cannot_be_had_stops_nothing(tmp_path: Path) -> None:
    rows = run(Plan(2, 1.0, False), tmp_path, ours=endpoint("echo 10"), peer=refused)
    assert [len(row.samples) for row in rows] == [2, 0, 2, 0]
    assert rows[1].missing == "peer: it is not installed"
    assert not rows[1].failed
    assert rows[0].samples[0].measured.ios == 10
    assert set(rows[0].samples[0].cpu_seconds) == {"client"}


def test_row_that_fails_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped, match=f"nbd/{JOB.name}/bad failed: .*status 5: gone"):
        run(Plan(1, 1.0, False), tmp_path, bad=endpoint("echo gone; exit 5"))


def test_keep_going_fails_only_that_row(tmp_path: Path) -> None:
    script = f'[ "$1" != {JOB.name} ] || exit 5; echo 7'
    rows = run(Plan(2, 1.0, True), tmp_path, bad=endpoint(script), good=endpoint("echo 9"))
    assert [len(row.samples) for row in rows] == [0, 2, 2, 2]
    assert rows[0].failed


@dataclass(slots=True)
class Subject:
    """An opener that starts a server, as often as ``starts``; then it cannot be had."""

    script: str = "echo 5"
    starts: int = 99
    servers: list[Server] = field(default_factory=list)

    def __call__(self, bench: Bench) -> Endpoint:
        if len(self.servers) == self.starts:
            raise Absent("it is used up")
        assert not any(server.running() for server in self.servers)
        self.servers.append(bench.start("sleep", ["sleep", "100"]))
        return endpoint(self.script)(bench)


def test_every_start_has_servers_of_its_own(tmp_path: Path) -> None:
    one, other = Subject(), Subject()
    rows = run(Plan(2, 1.0, False, starts=3), tmp_path, one=one, other=other, peer=refused)
    assert [len(row.samples) for row in rows] == [6, 6, 0] * 2
    assert (len(one.servers), len(other.servers)) == (3, 3)
    assert not any(server.running() for server in one.servers + other.servers)


def test_server_that_is_about_to_die_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "DYING_S", 30)
    program = "sleep 0.2; echo it broke; exit 3"
    with Server("shell", ["sh", "-c", program], tmp_path) as server:
        failed = Endpoint("client", lambda *_: [], parse_nothing, {"server": server})
        reason = sections.explain(failed, JobFailed("the connection was closed"))
    assert reason == "server died: it broke"


def test_server_that_lives_on_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sections, "DYING_S", 0)
    with Server("shell", ["sleep", "60"], tmp_path) as server:
        failed = Endpoint("client", lambda *_: [], parse_nothing, {"server": server})
        assert sections.explain(failed, JobFailed("no such LUN")) == "no such LUN"


def test_rounds_to_warm_up_do_not_count(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    script = f'echo "$1" >> {runs}; wc -l < {runs}'
    rows = run(Plan(2, 1.0, False, warm_up=3, starts=2), tmp_path, subject=endpoint(script))
    first, second = ([sample.measured.ios for sample in row.samples] for row in rows)
    assert (first, second) == ([4, 5, 14, 15], [9, 10, 19, 20])


def test_what_failed_or_cannot_be_had_is_not_started_again(tmp_path: Path) -> None:
    good, bad, once = Subject(), Subject("exit 5"), Subject(starts=1)
    rows = run(Plan(1, 1.0, True, starts=3), tmp_path, good=good, bad=bad, once=once)
    assert [len(row.samples) for row in rows] == [3, 0, 1] * 2
    assert (len(good.servers), len(bad.servers)) == (3, 1)
    assert rows[2].missing == "it is used up"


def test_rows_are_chosen_by_glob() -> None:
    nbd, fuse, api, *_ = SECTIONS
    small = set(nbd.openers) - {goals.OURS_FLUSHED}
    assert {row.subject for row in nbd.rows("*/4k-randread-d1/*")} == small
    written = {row.subject for row in nbd.rows("*/4k-randwrite-d1/*")}
    assert written == small - {goals.FLOOR}
    assert [row.job.name for row in nbd.rows("nbd/*/iserblk-flushed")] == ["1m-write-d8"]
    assert not fuse.rows("nbd/*")
    several = {row.job.name for row in nbd.rows("*") if row.job.connections > 1}
    assert several == {"4k-randread-d32-c4", "4k-randwrite-d32-c4"}
    assert not [row for row in fuse.rows("*") if row.job.connections > 1]
    two = nbd.rows("nbd/4k-randread-d1/iserblk", "nbd/*-d1/memory", "*/4k-randread-d1/memory")
    assert [row.name for row in two] == [
        "nbd/4k-randread-d1/iserblk",
        "nbd/4k-randread-d1/memory",
        "nbd/4k-randwrite-d1/memory",
    ]
    assert [row.name for row in api.rows("api/1m-*/iscsi-perf")] == ["api/1m-read-d8/iscsi-perf"]


def test_every_goal_is_about_rows_that_exist() -> None:
    known = {row.name for section in SECTIONS for row in section.rows("*")}
    for goal in goals.goals():
        assert f"{goal.section}/{goal.job}/{goal.subject}" in known
        assert f"{goal.section}/{goal.job}/{goals.OURS_NO_CRC}" in known
        if goal.kind is goals.Kind.RATIO:
            assert f"{goal.section}/{goal.job}/{goal.other}" in known


def measured(section: str, subject: str, rate: float, job: Job = JOB) -> Row:
    sample = Sample(
        Measurement(int(rate), int(rate) * JOB.block, 1.0, 5.0, 6.0),
        {goals.SERVER: 0.5, "fio": 0.1},
        {goals.SERVER: 3 << 20, "fio": 1 << 20},
    )
    return Row(section, job, subject, [sample])


def test_report_shows_rows_reasons_and_verdicts() -> None:
    rows = [
        measured("nbd", goals.OURS, 8000),
        measured("nbd", "qemu-nbd", 5000),
        Row("nbd", JOB, "memory", absent="nbdkit: [plugin] is not there"),
    ]
    text = io.StringIO()
    report.print_report(Console(file=text, width=200), rows, goals.judge(rows))
    printed = text.getvalue()
    assert "8.0 K/s (8.0–8.0)" in printed
    assert "1.60" in printed
    assert "nbd/*/memory: nbdkit: [plugin] is not there" in printed
    assert " met " in printed
    assert "4k-randread-d32" not in printed  # the goal of a row that was not run
    rows[0].failed = "it died"
    report.print_report(Console(file=text, width=200), rows, goals.judge(rows))
    assert f"nbd/*/{goals.OURS}: failed: it died" in text.getvalue()
    assert "not measured" in text.getvalue()


@pytest.mark.parametrize(
    ("rate", "job", "words"),
    [
        (50000, "4k-randwrite-d32", "CPU time of iserblk nbd ≤ 10 µs │ 10.0 µs │ – │ met"),
        (10000, "4k-randwrite-d32", "CPU time of iserblk nbd ≤ 10 µs │ 50.0 µs │ – │ missed"),
        (10000, "1m-write-d32", "peak memory of iserblk nbd < 110 MiB │ 3 MiB │ – │ met"),
    ],
)
def test_goals_are_shown_in_their_units(rate: float, job: str, words: str) -> None:
    the_job = next(each for each in (*JOBS, *MEMORY_JOBS) if each.name == job)
    rows = [measured("nbd", goals.OURS, rate, the_job)]
    text = io.StringIO()
    Console(file=text, width=200).print(report.goals_table(goals.judge(rows)))
    assert words in " ".join(text.getvalue().split())


def test_front_ends_through_a_network_are_compared_with_their_peers() -> None:
    rates = {goals.OURS: 3000, goals.OURS_ISCSI: 4000, "nbd-iserblk": 1000, "qemu-nbd": 2000}
    rates |= {"fuse-iserblk": 500, "qemu-fuse": 5000}
    rows = [measured("net-1500", subject, rate) for subject, rate in rates.items()]
    table = report.section_table("net-1500", rows)
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    printed = text.getvalue()
    assert "ratios are to iserblk-iscsi, qemu-nbd, qemu-fuse" in printed
    assert list(table.columns[3].cells) == ["0.75", "1.00", "0.50", "1.00", "0.10", "1.00"]


def test_rates_of_large_jobs_are_mebibytes() -> None:
    assert report.rate_text(Spread(3 << 20, 2 << 20, 4 << 20), True) == "3 MiB/s (2–4)"


def test_json_holds_everything(tmp_path: Path) -> None:
    rows = [
        measured("nbd", goals.OURS, 8000),
        measured("nbd", "qemu-nbd", 5000),
        Row("nbd", JOB, "memory", absent="not there"),
    ]
    file = tmp_path / "out.json"
    report.write_json(file, report.as_json({"cpus": 2}, rows, goals.judge(rows)))
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["version"] == report.JSON_VERSION
    ours, _peer, memory = content["rows"]
    assert ours["ratios"] == {"qemu-nbd": 1.6}
    assert ours["rate"]["median"] == 8000
    assert ours["samples"][0]["peak_rss"][goals.SERVER] == 3 << 20
    assert memory["missing"] == "not there"
    assert content["goals"][0]["verdict"] == "met"
    kinds = {goal["kind"] for goal in content["goals"]}
    assert kinds == {"ratio", "cpu_us_per_io", "peak_rss_bytes"}


def test_backing_files_are_equal_and_allocated(tmp_path: Path) -> None:
    files = (tmp_path / "ours", tmp_path / "theirs")
    size = 16 << 20
    storage.fill(files, size)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert len(first) == size
    assert all(file.stat().st_blocks * 512 >= size for file in files)
