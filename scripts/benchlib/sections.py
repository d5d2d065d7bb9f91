"""Which subjects run which jobs, and running them: round by round, side by side."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from benchlib import proc, subjects
from benchlib.goals import (
    CEILINGS,
    NET_MTUS,
    OURS,
    OURS_FLUSHED,
    OURS_ISCSI,
    OURS_NO_CRC,
    OURS_NO_JOURNAL,
    OURS_NO_POLL,
    OURS_ONE_SEGMENT,
    OURS_TCP,
    PEERS,
)
from benchlib.load import JOBS, MEMORY_JOBS, NET_JOBS, Job, JobFailed
from benchlib.results import Row, Sample
from benchlib.servers import Absent
from benchlib.subjects import Bench, Endpoint

Opener = Callable[[Bench], Endpoint]


@dataclass(slots=True, frozen=True, eq=False)
class Section:
    """Subjects that are compared with each other; in this order within each round."""

    name: str
    jobs: Sequence[Job]
    openers: dict[str, Opener]
    memory_subjects: Sequence[str] = ()  # those that run MEMORY_JOBS too
    large_writes_only: Sequence[str] = ()  # those that run nothing else
    reads_only: Sequence[str] = ()
    mtu: int = 0  # of the network between client and target; 0: the loopback device

    def rows(self, *patterns: str) -> list[Row]:
        """By job, then subject: those whose name one of the globs matches."""
        found = [
            Row(self.name, job, subject)
            for job in self.jobs
            for subject in self.openers
            if subject not in self.large_writes_only or (job.large and job.writes)
            if subject not in self.reads_only or not job.writes
        ]
        found += [
            Row(self.name, job, subject) for job in MEMORY_JOBS for subject in self.memory_subjects
        ]
        return [row for row in found if any(fnmatchcase(row.name, each) for each in patterns)]


SECTIONS = (
    Section(
        "nbd",
        JOBS,
        {
            OURS: partial(subjects.nbd_ours, mpa_crc="yes"),
            OURS_NO_CRC: partial(subjects.nbd_ours, mpa_crc="no"),
            OURS_NO_POLL: partial(subjects.nbd_ours, mpa_crc="yes", busy_poll=False),
            OURS_NO_JOURNAL: partial(subjects.nbd_ours, mpa_crc="yes", journal="off"),
            OURS_FLUSHED: subjects.nbd_flushed,
            OURS_TCP: subjects.nbd_tcp,
            PEERS["nbd"]: subjects.nbd_qemu,
            "memory": subjects.nbd_memory,
            "python-null": partial(subjects.nbd_null, sleep_us=0),
            CEILINGS["nbd"]: partial(subjects.nbd_null, sleep_us=150),
        },
        memory_subjects=(OURS, OURS_NO_CRC, PEERS["nbd"]),
        large_writes_only=(OURS_FLUSHED,),
    ),
    Section(
        "fuse",
        JOBS,
        {
            OURS: partial(subjects.fuse_ours, mpa_crc="yes"),
            OURS_NO_CRC: partial(subjects.fuse_ours, mpa_crc="no"),
            OURS_NO_POLL: partial(subjects.fuse_ours, mpa_crc="yes", busy_poll=False),
            OURS_TCP: subjects.fuse_tcp,
            PEERS["fuse"]: subjects.fuse_qemu,
            CEILINGS["fuse"]: subjects.fuse_null,
        },
    ),
    Section(
        "api",
        [job for job in JOBS if not job.writes],  # iscsi-perf only reads
        {
            OURS: partial(subjects.api_ours, mpa_crc="yes"),
            OURS_NO_CRC: partial(subjects.api_ours, mpa_crc="no"),
            OURS_NO_POLL: partial(subjects.api_ours, mpa_crc="yes", busy_poll=False),
            OURS_TCP: subjects.api_tcp,
            PEERS["api"]: subjects.api_iscsi_perf,
        },
    ),
    *(
        Section(
            f"net-{mtu}",
            NET_JOBS,
            {
                OURS: partial(subjects.api_ours, mpa_crc="yes"),
                OURS_NO_CRC: partial(subjects.api_ours, mpa_crc="no"),
                OURS_ONE_SEGMENT: partial(subjects.api_ours, mpa_crc="yes", frames="1"),
                OURS_ISCSI: subjects.api_iscsi,
                OURS_TCP: subjects.api_tcp,
                PEERS["api"]: subjects.api_iscsi_perf,
                "nbd-iserblk": partial(subjects.nbd_ours, mpa_crc="yes"),
                "nbd-iserblk-tcp": subjects.nbd_tcp,
                PEERS["nbd"]: subjects.nbd_qemu,
                "fuse-iserblk": partial(subjects.fuse_ours, mpa_crc="yes"),
                "fuse-iserblk-tcp": subjects.fuse_tcp,
                PEERS["fuse"]: subjects.fuse_qemu,
            },
            reads_only=(PEERS["api"],),
            mtu=mtu,
        )
        for mtu in NET_MTUS
    ),
)


@dataclass(slots=True, frozen=True)
class Plan:
    """``rounds`` of ``seconds`` each, after ``warm_up`` that do not count; ``keep_going`` past
    rows that fail.

    All of it ``starts`` times, each with servers of its own: two processes of one program differ
    for as long as they live, which no number of rounds evens out.
    """

    rounds: int
    seconds: float
    keep_going: bool
    warm_up: int = 0
    starts: int = 1


class Stopped(Exception):
    """A row failed, and the plan is not to keep going; the text says which and why."""


def run_section(
    section: Section,
    plan: Plan,
    files: tuple[Path, Path],
    rows: list[Row],
    progress: Callable[[str], None],
) -> None:
    """Fill ``rows`` (of ``section.rows``). Ends every server that it started, however it ends.

    ``files`` back our disk and the peer's; ``progress`` is told what goes on. Raises Stopped.
    A subject that cannot be had leaves its reason in its rows, and stops nothing.
    """
    for _ in range(plan.starts):
        with ExitStack() as stack:
            # Sockets have short names: not below a TMPDIR of any length.
            name = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="iserblk-bench-", dir="/tmp")
            )
            bench = Bench(stack, Path(name), *files, mtu=section.mtu)
            _run_once(section, plan, bench, [row for row in rows if not row.missing], progress)


def _run_once(
    section: Section,
    plan: Plan,
    bench: Bench,
    rows: list[Row],
    progress: Callable[[str], None],
) -> None:
    """All rounds of ``rows``, with servers of their own, which ``bench`` starts."""
    endpoints: dict[str, Endpoint] = {}
    for subject in dict.fromkeys(row.subject for row in rows):
        progress(f"starting {section.name}/{subject}")
        try:
            endpoints[subject] = section.openers[subject](bench)
        except Absent as reason:
            for row in rows:
                if row.subject == subject:
                    row.absent = str(reason)
    for number, row in in_rounds(rows, plan.warm_up + plan.rounds):
        if row.missing:
            continue
        warm = number >= plan.warm_up
        which = f"{len(row.samples) + 1} of {plan.starts * plan.rounds}" if warm else "to warm up"
        progress(f"round {which}: {row.name}")
        try:
            sample = measure(endpoints[row.subject], row.job, plan.seconds)
        except (JobFailed, proc.NoSuchProcess) as reason:
            row.failed = explain(endpoints[row.subject], reason)
            if not plan.keep_going:
                raise Stopped(f"{row.name} failed: {row.failed}") from None
        else:
            if warm:
                row.samples.append(sample)


def in_rounds(rows: Sequence[Row], rounds: int) -> Iterator[tuple[int, Row]]:
    """A B B A A B …, with the number of the round: the rows of one job stand side by side, all its
    rounds in a row. What slows the machine for a while then meets all that are compared, and
    nobody always comes after the same one, whose leavings the caches hold."""
    for job in dict.fromkeys(row.job for row in rows):
        side_by_side = [row for row in rows if row.job == job]
        for number in range(rounds):
            for row in reversed(side_by_side) if number % 2 else side_by_side:
                yield number, row


def measure(endpoint: Endpoint, job: Job, seconds: float) -> Sample:
    """One run, with what every process involved used for it. Raises JobFailed, NoSuchProcess."""
    pids: dict[str, list[int]] = {}
    for name, server in endpoint.servers.items():
        pids |= server.processes(name)
    for family in pids.values():
        proc.reset_peak_rss(family)
    before = {name: proc.cpu_seconds(family) for name, family in pids.items()}
    measured, client = endpoint.run(job, seconds)
    cpu = {name: proc.cpu_seconds(family) - before[name] for name, family in pids.items()}
    rss = {name: proc.peak_rss(family) for name, family in pids.items()}
    cpu[endpoint.client] = client.cpu_seconds
    rss[endpoint.client] = client.peak_rss
    return Sample(measured, cpu, rss)


def explain(endpoint: Endpoint, reason: Exception) -> str:
    """Why a run failed: a server that died says more than the client that missed it."""
    for name, server in endpoint.servers.items():
        if not server.running():
            return f"{name} died: {server.last_words()}"
    return str(reason) or "a process ended during the run"
