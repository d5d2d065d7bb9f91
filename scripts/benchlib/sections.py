"""Which subjects run which jobs, and running them: round by round, side by side."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from benchlib import proc, subjects
from benchlib.goals import (
    CEILINGS,
    FLOOR,
    FLOOR_TCP,
    GATEWAY_ISER_ISER,
    GATEWAY_ISER_TCP,
    GATEWAY_TCP_ISER,
    NBD_FLOOR_JOBS,
    NBD_FLOOR_TCP,
    NBD_FLOOR_TCP_JOBS,
    NET_MTUS,
    OURS,
    OURS_FLUSHED,
    OURS_ISCSI,
    OURS_ISCSI_TWO,
    OURS_NBDKIT,
    OURS_NBDKIT_TCP,
    OURS_NO_CRC,
    OURS_NO_JOURNAL,
    OURS_NO_POLL,
    OURS_ONE_SEGMENT,
    OURS_QUEUE,
    OURS_QUEUE_TCP,
    OURS_TCP,
    OURS_TWO,
    PEERS,
)
from benchlib.load import CONNECTION_JOBS, JOBS, MEMORY_JOBS, NET_JOBS, Job, JobFailed
from benchlib.results import Row, Sample
from benchlib.servers import Absent
from benchlib.subjects import Bench, Endpoint

DYING_S = 1.0
_POLL_S = 0.02

Opener = Callable[[Bench], Endpoint]


@dataclass(slots=True, frozen=True, eq=False)
class Section:
    """Subjects that are compared with each other. Each round runs them in this order, or in the
    opposite order."""

    name: str
    jobs: Sequence[Job]
    openers: dict[str, Opener]
    memory_subjects: Sequence[str] = ()  # subjects that also run MEMORY_JOBS
    large_writes_only: Sequence[str] = ()  # subjects that run only large writes
    reads_only: Sequence[str] = ()
    some_jobs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of these subjects
    mtu: int = 0  # of the network between client and target; 0: the loopback device

    def rows(self, *patterns: str) -> list[Row]:
        """The rows whose name matches one of the globs, by job, then by subject."""
        found = [
            Row(self.name, job, subject)
            for job in self.jobs
            for subject in self.openers
            if subject not in self.large_writes_only or (job.large and job.writes)
            if subject not in self.reads_only or not job.writes
            if job.name in self.some_jobs.get(subject, (job.name,))
        ]
        found += [
            Row(self.name, job, subject) for job in MEMORY_JOBS for subject in self.memory_subjects
        ]
        return [row for row in found if any(fnmatchcase(row.name, each) for each in patterns)]


SECTIONS = (
    Section(
        "nbd",
        (*JOBS, *CONNECTION_JOBS),
        {
            OURS: partial(subjects.nbd_ours, mpa_crc="yes"),
            OURS_NO_CRC: partial(subjects.nbd_ours, mpa_crc="no"),
            OURS_NO_POLL: partial(subjects.nbd_ours, mpa_crc="yes", busy_poll=False),
            OURS_NO_JOURNAL: partial(subjects.nbd_ours, mpa_crc="yes", journal="off"),
            OURS_FLUSHED: subjects.nbd_flushed,
            OURS_NBDKIT: partial(subjects.nbd_ours, mpa_crc="yes", nbdkit=True),
            OURS_TCP: subjects.nbd_tcp,
            OURS_NBDKIT_TCP: partial(subjects.nbd_tcp, nbdkit=True),
            PEERS["nbd"]: subjects.nbd_qemu,
            "memory": subjects.nbd_memory,
            "python-null": partial(subjects.nbd_null, sleep_us=0),
            CEILINGS["nbd"]: partial(subjects.nbd_null, sleep_us=150),
            FLOOR: subjects.nbd_floor,
            FLOOR_TCP: subjects.nbd_floor_tcp,
        },
        memory_subjects=(OURS, OURS_NO_CRC, OURS_NBDKIT, PEERS["nbd"]),
        large_writes_only=(OURS_FLUSHED,),
        some_jobs={FLOOR: NBD_FLOOR_JOBS, FLOOR_TCP: NBD_FLOOR_TCP_JOBS},
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
            OURS_QUEUE: partial(subjects.api_ours, mpa_crc="yes", face="queue"),
            OURS_TCP: subjects.api_tcp,
            OURS_QUEUE_TCP: partial(subjects.api_tcp, face="queue"),
            PEERS["api"]: subjects.api_iscsi_perf,
            FLOOR_TCP: subjects.api_floor_tcp,
        },
    ),
    Section(
        "connections",
        JOBS,
        {
            OURS: partial(subjects.api_ours, mpa_crc="yes"),
            OURS_TWO: partial(subjects.api_ours, mpa_crc="yes", connections=2),
            OURS_ISCSI: subjects.api_iscsi,
            OURS_ISCSI_TWO: partial(subjects.api_iscsi, connections=2),
        },
    ),
    Section(
        "gateway",
        JOBS,
        {
            OURS: partial(subjects.api_ours, mpa_crc="yes"),
            OURS_TCP: subjects.api_tcp,
            GATEWAY_ISER_TCP: partial(subjects.api_gateway, front="iser", behind="tcp"),
            GATEWAY_TCP_ISER: partial(subjects.api_gateway, front="tcp", behind="iser"),
            GATEWAY_ISER_ISER: partial(subjects.api_gateway, front="iser", behind="iser"),
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
                OURS_QUEUE: partial(subjects.api_ours, mpa_crc="yes", face="queue"),
                OURS_QUEUE_TCP: partial(subjects.api_tcp, face="queue"),
                PEERS["api"]: subjects.api_iscsi_perf,
                FLOOR_TCP: subjects.api_floor_tcp,
                "nbd-iserblk": partial(subjects.nbd_ours, mpa_crc="yes"),
                "nbd-iserblk-tcp": subjects.nbd_tcp,
                NBD_FLOOR_TCP: subjects.nbd_floor_tcp,
                PEERS["nbd"]: subjects.nbd_qemu,
                "fuse-iserblk": partial(subjects.fuse_ours, mpa_crc="yes"),
                "fuse-iserblk-tcp": subjects.fuse_tcp,
                PEERS["fuse"]: subjects.fuse_qemu,
            },
            reads_only=(PEERS["api"], FLOOR_TCP),
            some_jobs={NBD_FLOOR_TCP: NBD_FLOOR_TCP_JOBS},
            mtu=mtu,
        )
        for mtu in NET_MTUS
    ),
)


@dataclass(slots=True, frozen=True)
class Plan:
    """What to run: ``rounds`` of ``seconds`` each, after ``warm_up`` rounds that do not count.
    ``keep_going``: go on after a row that failed.

    All of it runs ``starts`` times, each time with new servers: two processes of one program differ
    for as long as they live, and no number of rounds evens that out.
    """

    rounds: int
    seconds: float
    keep_going: bool
    warm_up: int = 0
    starts: int = 1


class Stopped(Exception):
    """A row failed, and the plan has no ``keep_going``; the text names the row and the reason."""


def run_section(
    section: Section,
    plan: Plan,
    files: tuple[Path, Path],
    rows: list[Row],
    progress: Callable[[str], None],
) -> None:
    """Fill ``rows`` (of ``section.rows``). Always ends every server that it started.

    ``files`` back our disk and the peer's; ``progress`` is called with the current step. Raises
    Stopped. If a subject is not available, its rows get the reason, and the others go on.
    """
    for _ in range(plan.starts):
        with ExitStack() as stack:
            # Paths of sockets must be short, but TMPDIR may be long.
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
    """Run all rounds of ``rows``, with their own servers, which ``bench`` starts."""
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
    """The order of the runs, with the number of the round: A B B A A B …, one job after the other.
    So what slows the machine for a while slows all subjects that are compared, and no subject
    always finds the caches as the same other subject left them."""
    for job in dict.fromkeys(row.job for row in rows):
        side_by_side = [row for row in rows if row.job == job]
        for number in range(rounds):
            for row in reversed(side_by_side) if number % 2 else side_by_side:
                yield number, row


def measure(endpoint: Endpoint, job: Job, seconds: float) -> Sample:
    """One run, and the resources that each process used for it. Raises JobFailed, NoSuchProcess."""
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
    """Why a run failed: the words of a server that died, if there is one, else the client's.

    A server that dies may first close its connections, and then log out of its target: it is given
    a moment for that.
    """
    deadline = time.monotonic() + DYING_S
    while endpoint.servers:
        for name, server in endpoint.servers.items():
            if not server.running():
                return f"{name} died: {server.last_words()}"
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return str(reason) or "a process ended during the run"
