"""Medians, ratios and the goals that are judged by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchlib import goals, results
from benchlib.goals import (
    NBDKIT,
    OURS,
    OURS_NBDKIT,
    OURS_NBDKIT_TCP,
    OURS_QUEUE_TCP,
    OURS_TCP,
    SERVER,
    Verdict,
)
from benchlib.load import CONNECTION_JOBS, JOBS, MEMORY_JOBS, NET_JOBS, Job, Measurement
from benchlib.results import Row, Sample, Spread
from benchlib.sections import SECTIONS

SMALL, LARGE = JOBS[0], JOBS[-1]


def sample(per_second: float, job: Job = SMALL, rss: int = 1 << 20, cpu_s: float = 0.1) -> Sample:
    ios = round(per_second * 2)
    measured = Measurement(ios, ios * job.block, 2.0, 10.0, 20.0)
    return Sample(measured, {"nbdkit": cpu_s, "fio": 0.02}, {"nbdkit": rss, "fio": 7})


def row(section: str, job: Job, subject: str, *rates: float, rss: int = 1 << 20) -> Row:
    return Row(section, job, subject, [sample(rate, job, rss) for rate in rates])


def test_spread_is_median_and_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([3.0, 1.0, 2.0]).noise == 1.0
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)


def test_rate_is_requests_or_bytes() -> None:
    assert row("nbd", SMALL, OURS, 100.0, 300.0).rate().median == 200.0
    assert row("nbd", LARGE, OURS, 100.0).rate().median == 100.0 * (1 << 20)


def test_cpu_time_is_per_request_and_memory_is_the_highest() -> None:
    measured = Row("nbd", SMALL, OURS, [sample(1000, rss=5), sample(500, rss=9), sample(1000)])
    assert measured.cpu_us_per_io()["nbdkit"] == pytest.approx(50.0)
    measured.samples.pop()
    assert measured.peak_rss() == {"nbdkit": 9, "fio": 7}
    assert measured.latency_us(50) == 10.0
    assert measured.latency_us(99) == 20.0


def test_ratio_pairs_the_rounds() -> None:
    # The machine was half as fast in the second round: the ratio is not touched by it.
    ours = row("nbd", SMALL, OURS, 100.0, 50.0, 100.0)
    peer = row("nbd", SMALL, "qemu-nbd", 200.0, 100.0, 200.0)
    assert results.ratio(ours, peer) == Spread(0.5, 0.5, 0.5)


def test_ratio_needs_both() -> None:
    ours, peer = row("nbd", SMALL, OURS, 100.0), row("nbd", SMALL, "qemu-nbd")
    assert results.ratio(ours, peer) is None
    peer = row("nbd", SMALL, "qemu-nbd", 100.0)
    peer.failed = "qemu-nbd died"
    assert results.ratio(ours, peer) is None


def test_a_row_says_why_it_is_missing() -> None:
    measured = row("nbd", SMALL, OURS)
    assert measured.missing == ""
    measured.failed = "it died"
    assert measured.missing == "failed: it died"
    measured.absent = "not installed"
    assert measured.missing == "not installed"
    assert measured.name == f"nbd/{SMALL.name}/{OURS}"


def verdicts(*rows: Row) -> dict[tuple[str, str, str, str], Verdict]:
    return {
        (goal.section, goal.job, goal.subject, goal.other): outcome.verdict
        for outcome in goals.judge(rows)
        if (goal := outcome.goal)
    }


@pytest.mark.parametrize(
    ("section", "job", "subject", "other", "factor"),
    [
        ("nbd", "4k-randread-d1", OURS, "qemu-nbd", 1.2),
        ("nbd", "4k-randread-d32", OURS, "qemu-nbd", 2.0),
        ("nbd", "4k-randwrite-d32", OURS, "qemu-nbd", 1.8),
        ("nbd", "1m-write-d8", OURS, "qemu-nbd", 2.0),
        ("nbd", "4k-randread-d32-c4", OURS, "qemu-nbd", 1.5),
        ("nbd", "4k-randwrite-d32", OURS_NBDKIT, "python-150us", 0.6),
        ("nbd", "4k-randread-d32", OURS_NBDKIT_TCP, "python-150us", 0.6),
        ("fuse", "4k-randwrite-d1", OURS, "qemu-fuse", 1.2),
        ("fuse", "4k-randwrite-d32", OURS, "qemu-fuse", 1.4),
        ("fuse", "4k-randread-d32", OURS, "pyfuse3-null", 0.6),
        ("fuse", "1m-read-d8", OURS, "qemu-fuse", 2.0),
        ("api", "4k-randread-d1", OURS, "iscsi-perf", 1.2),
        ("api", "4k-randread-d32", OURS, "iscsi-perf", 1.8),
        ("api", "1m-read-d8", OURS, "iscsi-perf", 1.1),
        ("nbd", "4k-randwrite-d32", OURS, "iserblk-nojournal", 0.95),
        ("nbd", "1m-read-d8", OURS, "iserblk-nojournal", 0.95),
        ("nbd", "4k-randread-d1", OURS_TCP, "qemu-nbd", 1.0),
        ("nbd", "4k-randread-d32", OURS_TCP, "qemu-nbd", 1.0),
        ("nbd", "1m-read-d8", OURS_TCP, "qemu-nbd", 1.0),
        ("nbd", "4k-randwrite-d32-c4", OURS_TCP, "qemu-nbd", 1.0),
        ("fuse", "1m-write-d8", OURS_TCP, "qemu-fuse", 1.0),
        ("api", "4k-randread-d1", OURS_TCP, "iscsi-perf", 1.0),
        ("api", "4k-randread-d32", OURS_TCP, "iscsi-perf", 1.0),
        ("api", "1m-read-d8", OURS_TCP, "iscsi-perf", 1.0),
        ("net-1500", "4k-randread-d32", "nbd-iserblk", "qemu-nbd", 1.8),
        ("net-1500", "1m-read-d8", "fuse-iserblk-tcp", "qemu-fuse", 1.0),
        ("net-1500", "1m-read-d8", "fuse-iserblk", "qemu-fuse", 1.8),
        ("net-1500", "4k-randread-d1", OURS_TCP, "iscsi-perf", 1.0),
        ("net-1500", "16k-randread-d32", OURS_QUEUE_TCP, "iscsi-perf", 1.0),
        ("net-1500", "16k-randwrite-d32", "nbd-iserblk-tcp", "qemu-nbd", 1.0),
        ("nbd", "4k-randread-d1", OURS_TCP, "floor-tcp", 1.0),
        ("nbd", "4k-randwrite-d32", OURS_TCP, "floor-tcp", 1.0),
        ("api", "1m-read-d8", OURS_TCP, "floor-tcp", 1.0),
        ("api", "4k-randread-d32", OURS_QUEUE_TCP, "floor-tcp", 1.0),
        ("net-1500", "4k-randwrite-d32", "nbd-iserblk-tcp", "nbd-floor-tcp", 1.0),
        ("net-1500", "16k-randread-d32", OURS_TCP, "floor-tcp", 1.0),
    ],
)
def test_goals_compare_with_the_right_row(
    section: str, job: str, subject: str, other: str, factor: float
) -> None:
    the_job = next(found for found in (*JOBS, *CONNECTION_JOBS, *NET_JOBS) if found.name == job)
    theirs = row(section, the_job, other, 10000.0)
    key = (section, job, subject, other)
    assert verdicts(row(section, the_job, subject, factor * 10000), theirs)[key] is Verdict.MET
    assert verdicts(row(section, the_job, subject, factor * 9990), theirs)[key] is Verdict.MISSED
    assert verdicts(row(section, the_job, subject, 10000.0))[key] is Verdict.UNKNOWN
    assert verdicts(theirs)[key] is Verdict.UNKNOWN


@pytest.mark.parametrize("job", MEMORY_JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize(
    ("subject", "process", "limit"),
    [(OURS, SERVER, 110 << 20), (OURS_NBDKIT, NBDKIT, 150 << 20)],
)
def test_memory_stays_below_its_limit(job: Job, subject: str, process: str, limit: int) -> None:
    def verdict(*sizes: int) -> Verdict:
        row = Row("nbd", job, subject)
        row.samples += [replace(sample(10.0, job), peak_rss={process: size}) for size in sizes]
        return verdicts(row)["nbd", job.name, subject, process]

    assert verdict(5, limit - 1) is Verdict.MET
    assert verdict(limit, 5) is Verdict.MISSED
    assert verdict() is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("section", "job", "process", "limit_us"),
    [
        ("nbd", "4k-randread-d32", SERVER, 10),
        ("nbd", "4k-randwrite-d32", SERVER, 10),
        ("nbd", "4k-randwrite-d32", "target", 14),
        ("api", "4k-randread-d32", "iserblk bench", 12),
    ],
)
def test_processor_time_has_a_limit(section: str, job: str, process: str, limit_us: int) -> None:
    the_job = next(found for found in JOBS if found.name == job)

    def verdict(us: float) -> Verdict:
        used = {process: us / 50, "fio": 9.0}  # of 20,000 requests
        run = replace(sample(10_000.0, the_job), cpu_seconds=used)
        return verdicts(Row(section, the_job, OURS, [run]))[section, job, OURS, process]

    assert verdict(limit_us - 0.1) is Verdict.MET
    assert verdict(limit_us + 0.1) is Verdict.MISSED
    assert verdicts()[section, job, OURS, process] is Verdict.UNKNOWN


def test_crc_on_decides_and_off_stands_beside_it() -> None:
    job = JOBS[0]
    outcomes = goals.judge(
        [
            row("nbd", job, OURS, 60.0),
            row("nbd", job, goals.OURS_NO_CRC, 90.0),
            row("nbd", job, "qemu-nbd", 100.0),
        ]
    )
    outcome = next(found for found in outcomes if found.goal.job == job.name)
    assert outcome.verdict is Verdict.MISSED
    assert outcome.value == pytest.approx(0.6)
    assert outcome.value_no_crc == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("section", "subject", "others"),
    [
        ("nbd", OURS_TCP, {"qemu-nbd", "floor-tcp"}),
        ("fuse", OURS_TCP, {"qemu-fuse"}),
        ("api", OURS_TCP, {"iscsi-perf", "floor-tcp"}),
        ("api", OURS_QUEUE_TCP, {"iscsi-perf", "floor-tcp"}),
        ("net-1500", "nbd-iserblk-tcp", {"qemu-nbd", "nbd-floor-tcp"}),
        ("net-1500", "fuse-iserblk-tcp", {"qemu-fuse"}),
        ("net-1500", OURS_TCP, {"iscsi-perf", "floor-tcp"}),
        ("net-1500", OURS_QUEUE_TCP, {"iscsi-perf", "floor-tcp"}),
    ],
)
def test_every_row_over_tcp_is_judged_by_the_peer_and_by_the_program_beside_it(
    section: str, subject: str, others: set[str]
) -> None:
    """On any machine: the target is the limit there, and no ratio but 1 is the same everywhere."""
    rows = next(each for each in SECTIONS if each.name == section).rows("*")
    jobs = {row.job.name for row in rows if row.subject == subject}
    beside = {
        job: {row.subject for row in rows if row.job.name == job and row.subject in others}
        for job in jobs
    }
    wanted: dict[str, dict[str, float]] = {job: {} for job in jobs}
    for goal in goals.goals():
        if (goal.section, goal.subject) == (section, subject) and goal.other in others:
            wanted[goal.job][goal.other] = goal.wanted
    assert any(beside.values())
    assert wanted == {job: dict.fromkeys(found, 1.0) for job, found in beside.items()}
