"""Commands for the clients, and what is read out of what they print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from benchlib import load, proc
from benchlib.load import Job, JobFailed

READ = Job("4k-randread-d32", "randread", 4096, 32)
WRITE = Job("1m-write-d8", "write", 1 << 20, 8)


def fio_side(ios: int, size: int, runtime_ms: int) -> dict[str, Any]:
    percentiles = {"50.000000": 36608, "99.000000": 68096}
    return {
        "io_bytes": ios * size,
        "total_ios": ios,
        "runtime": runtime_ms,
        "clat_ns": {"percentile": percentiles},
    }


def fio_output(**job: Any) -> str:
    idle: dict[str, Any] = {"io_bytes": 0, "total_ios": 0, "runtime": 0, "clat_ns": {}}
    content = {"jobs": [{"error": 0, "read": idle, "write": idle, **job}]}
    return json.dumps(content, indent=2)


def test_fio_counts_the_side_that_the_job_uses() -> None:
    output = fio_output(read=fio_side(9000, 4096, 1500), write=fio_side(10, 1 << 20, 2000))
    measured = load.parse_fio(output, READ)
    assert (measured.ios, measured.bytes, measured.seconds) == (9000, 9000 * 4096, 1.5)
    assert (measured.latency_p50_us, measured.latency_p99_us) == (36.608, 68.096)
    assert load.parse_fio(output, WRITE).bytes == 10 << 20


def test_fio_may_warn_before_its_json() -> None:
    output = "note: both iodepth >= 1 and {synchronous} engine\n"
    output += fio_output(read=fio_side(1, 4096, 1))
    assert load.parse_fio(output, READ).ios == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", "no JSON"),
        ("{\n", "not understood"),
        ('{\n"jobs": []}', "not understood"),
        (fio_output(read=fio_side(5, 4096, 1), error=5), "error 5"),
        (fio_output(read=fio_side(0, 4096, 1)), "0 requests"),
        (fio_output(), "not understood"),
    ],
)
def test_fio_that_measured_nothing_has_failed(output: str, words: str) -> None:
    with pytest.raises(JobFailed, match=words):
        load.parse_fio(output, READ)


def test_fio_command_names_the_load() -> None:
    command = load.fio_command(READ, load.fio_nbd("/tmp/nbd.sock"), 2.5)
    assert command[0] == "fio"
    assert {"--rw=randread", "--bs=4096", "--iodepth=32", "--runtime=2500ms"} <= set(command)
    assert "--uri=nbd+unix:///?socket=/tmp/nbd.sock" in command


def test_fio_has_a_connection_for_each_of_its_jobs() -> None:
    job = Job("4k-randread-d32-c4", "randread", 4096, 32, 4)
    command = load.fio_command(job, load.fio_nbd("/tmp/nbd.sock"), 2.5)
    assert {"--numjobs=4", "--iodepth=8", "--group_reporting"} <= set(command)
    assert not any("numjobs" in word for word in load.fio_command(READ, [], 2.5))


def test_fio_reports_its_jobs_as_one() -> None:
    job = Job("4k-randread-d8-c4", "randread", 4096, 8, 4)
    command = load.fio_command(job, ["--ioengine=null", "--size=1M"], 0.2)
    output = load.run_client(command, 0.2).output
    (whole,) = json.loads(output)["jobs"]
    assert load.parse_fio(output, job).ios == whole["read"]["total_ios"]
    assert whole["job options"]["numjobs"] == "4"


def test_fio_runs_for_parts_of_a_second() -> None:
    command = load.fio_command(READ, ["--ioengine=null", "--size=1M"], 0.3)
    measured = load.parse_fio(load.run_client(command, 0.3).output, READ)
    assert measured.seconds >= 0.3  # not once over the file


def test_fio_goes_elsewhere_each_time(tmp_path: Path) -> None:
    places = []
    for name in "ab":
        log = tmp_path / name
        engine = ["--ioengine=null", "--size=256M", f"--write_iolog={log}", "--rate_iops=200"]
        load.run_client(load.fio_command(READ, engine, 0.3), 0.3)
        places.append(re.findall(r" read (\d+) ", log.read_text())[:20])
    assert len(places[0]) == 20 and places[0] != places[1]


def test_fio_flushes_when_a_journal_would() -> None:
    assert load.fio_flushes(Job("w", "write", 1 << 20, 8), 64 << 20) == ["--fsync=56"]
    assert load.fio_flushes(Job("w", "write", 1 << 20, 8), 1 << 20) == ["--fsync=1"]


# As iscsi-perf 1.19 prints it: averages overwrite each other on one line.
ISCSI_PERF = (
    "connected to iscsi://127.0.0.1:3260/iqn.t/1\n"
    "performing RANDOM READ with 32 parallel requests\n\n"
    "\r00:00:02 - lba 126103, iops current 41753 (163 MB/s), iops average 41753 (163 MB/s),"
    " in_flight 32, busy 0     "
    "\r00:00:01 - lba 18792, iops current 43401 (169 MB/s), iops average 42577 (166 MB/s),"
    " in_flight 32, busy 0     "
    "\riops average 43601 (170 MB/s)                                \n\nfinished.\n"
)


def test_iscsi_perf_last_average_counts() -> None:
    measured = load.parse_iscsi_perf(ISCSI_PERF, READ, 3.0)
    assert measured.ios == 43601 * 3
    assert measured.bytes == 43601 * 3 * 4096
    assert measured.seconds == 3
    assert measured.latency_p50_us is None


@pytest.mark.parametrize("output", ["", "iops average 0 (0 MB/s)", "iscsi_connect failed"])
def test_iscsi_perf_that_measured_nothing_has_failed(output: str) -> None:
    with pytest.raises(JobFailed, match="iscsi-perf"):
        load.parse_iscsi_perf(output, READ, 3.0)


def test_iscsi_perf_counts_in_blocks_and_whole_seconds() -> None:
    assert load.iscsi_perf_command(READ, "iscsi://x", 0.2) == (
        ["iscsi-perf", "-b", "8", "-m", "32", "-r", "-t", "1", "iscsi://x"]
    )
    sequential = READ._replace(pattern="read", block=1 << 20)
    assert load.iscsi_perf_command(sequential, "iscsi://x", 3.0)[1:3] == ["-b", "2048"]


def test_iserblk_bench_prints_what_is_parsed() -> None:
    # As docs/json.md has it, without the fields that are not read.
    output = (
        '{"rw": "randread", "seconds": 0.5, "ios": 3, "bytes": 12288,'
        ' "latency_us": {"min": 9.0, "p50": 10.5, "p99": 20.5}}'
    )
    measured = load.parse_iserblk_bench(output)
    assert (measured.ios, measured.bytes, measured.seconds) == (3, 12288, 0.5)
    assert (measured.latency_p50_us, measured.latency_p99_us) == (10.5, 20.5)
    for wrong in ("", "[]", '{"ios": 3}', output.replace('"ios": 3', '"ios": 0')):
        with pytest.raises(JobFailed, match="iserblk bench"):
            load.parse_iserblk_bench(wrong)


def test_iserblk_bench_is_told_the_job() -> None:
    arguments = load.iserblk_bench_arguments(WRITE, "iser://x/iqn/0", 2.5, "queue")
    assert arguments[:2] == ["bench", "iser://x/iqn/0"]
    options = dict(zip(arguments[2:12:2], arguments[3:12:2], strict=True))
    shape = {"--rw": "write", "--bs": "1048576", "--depth": "8", "--face": "queue"}
    assert options == shape | {"--time": "2.5"}
    assert {"--destroy", "--json"} <= set(arguments)


def test_job_names_say_what_they_are() -> None:
    for job in (*load.JOBS, *load.CONNECTION_JOBS, *load.MEMORY_JOBS):
        size = {4096: "4k", 1 << 20: "1m"}[job.block]
        connections = f"-c{job.connections}" if job.connections > 1 else ""
        assert job.name == f"{size}-{job.pattern}-d{job.depth}{connections}"
        assert job.depth % job.connections == 0
        assert job.large == (size == "1m")
        assert job.writes == ("write" in job.name)


def test_client_is_watched_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs until it was looked at with all its memory."""
    seen, look = tmp_path / "seen", proc.peak_rss

    def looked(pids: Iterable[int]) -> int:
        found = look(pids)
        if found > 40 << 20:
            seen.touch()
        return found

    monkeypatch.setattr(proc, "peak_rss", looked)
    program = "import os, sys, time; b = bytearray(40 << 20); print('done')\n"
    program += "while not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    use = load.run_client([sys.executable, "-c", program, str(seen)], 60)
    assert use.output == "done\n"
    assert use.peak_rss > 40 << 20
    assert use.cpu_seconds > 0


def test_client_that_fails_is_quoted() -> None:
    with pytest.raises(JobFailed, match="status 3: no such disk"):
        load.run_client(["sh", "-c", "echo hello; echo no such disk >&2; exit 3"], 0.1)


def test_client_that_is_missing_is_named() -> None:
    with pytest.raises(JobFailed, match="no-such-client"):
        load.run_client(["no-such-client"], 0.1)
