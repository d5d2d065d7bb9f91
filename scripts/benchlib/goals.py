"""The goals that iserblk has to reach, and whether a run met them.

Over iSER ``OURS`` decides (MPA CRC on, the default); the row without CRC is shown beside it. Over
TCP ``OURS_TCP`` decides, on the same target that the peers use. In section nbd both are the server
of ``iserblk nbd``; the plugin in nbdkit has rows and goals of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from benchlib.load import CONNECTION_JOBS, JOBS, MEMORY_JOBS, NET_JOBS, Job
from benchlib.results import Row, ratio

OURS = "iserblk"
OURS_NO_CRC = "iserblk-nocrc"
OURS_NO_POLL = "iserblk-nopoll"
OURS_NO_JOURNAL = "iserblk-nojournal"
OURS_FLUSHED = "iserblk-flushed"
OURS_TCP = "iserblk-tcp"
# A C program that does only what a 4 KiB read cannot do without (floor.c).
FLOOR = "floor"
FLOOR_TCP = "floor-tcp"
OURS_NBDKIT = "iserblk-nbdkit"
OURS_NBDKIT_TCP = "iserblk-nbdkit-tcp"
OURS_ISCSI = "iserblk-iscsi"
OURS_ONE_SEGMENT = "iserblk-1-segment"
# One session of several connections. tgtd takes only one, so both are on our target.
OURS_TWO = "iserblk-2-connections"
OURS_ISCSI_TWO = "iserblk-iscsi-2-connections"
# Through our target as a gateway: what is in front of it, then what is behind it.
GATEWAY_ISER_TCP = "gateway-iser-tcp"
GATEWAY_TCP_ISER = "gateway-tcp-iser"
GATEWAY_ISER_ISER = "gateway-iser-iser"
NET_MTUS = (1500, 9000)
# Processes of section nbd, as the tables call them.
SERVER = "iserblk nbd"
NBDKIT = "nbdkit"
SERVER_MEMORY = 110 << 20  # bytes, with the journal
NBDKIT_MEMORY = 150 << 20
SERVER_CPU_US = 20.0  # of a 4 KiB request at depth 32

# The peer of each section.
PEERS = {"nbd": "qemu-nbd", "fuse": "qemu-fuse", "api": "iscsi-perf"}
# Over a network iSER is compared with iSCSI on the same target.
PEERS |= {f"net-{mtu}": OURS_ISCSI for mtu in NET_MTUS}
# A gateway is compared with the way to the LUN behind it.
PEERS["gateway"] = OURS_TCP
# Two connections are compared with one.
PEERS["connections"] = OURS
_WITH_ONE = {OURS_TWO: OURS, OURS_ISCSI_TWO: OURS_ISCSI}
# Network sections also have front-ends. These are compared with the peers of their own sections.
_FRONT_ENDS = {"nbd-": PEERS["nbd"], "fuse-": PEERS["fuse"]}
CEILINGS = {"nbd": "python-150us", "fuse": "pyfuse3-null"}


def peer_of(section: str, subject: str) -> str:
    """The subject with which this row of the tables is compared."""
    for prefix, peer in _FRONT_ENDS.items():
        if section.startswith("net-") and (subject == peer or subject.startswith(prefix)):
            return peer
    return _WITH_ONE.get(subject) or PEERS[section]


class Verdict(Enum):
    MET = "met"
    MISSED = "missed"
    UNKNOWN = "not measured"


class Kind(Enum):
    """What a goal is about; the values are those of the JSON."""

    RATIO = "ratio"
    MEMORY = "peak_rss_bytes"
    CPU = "cpu_us_per_io"


@dataclass(slots=True, frozen=True)
class Goal:
    """One goal, for one job of ``subject``. RATIO: its rate is at least ``wanted`` times that of
    the subject ``other``. MEMORY: the peak memory of its process ``other`` stays below ``wanted``
    bytes. CPU: that process takes at most ``wanted`` µs of CPU time for a request."""

    section: str
    job: str
    other: str
    wanted: float
    kind: Kind = Kind.RATIO
    subject: str = OURS

    def met(self, value: float) -> bool:
        if self.kind is Kind.RATIO:
            return value >= self.wanted
        return value < self.wanted if self.kind is Kind.MEMORY else value <= self.wanted


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result for one goal. ``value`` has the unit of the goal; None if it was not measured."""

    goal: Goal
    value: float | None
    value_no_crc: float | None
    verdict: Verdict


def goals() -> list[Goal]:
    """All goals, in the order of the table."""
    found = [
        *_nbd(OURS, at_depth_1=1.2, at_depth_32=1.5, large=2.0),
        *_fuse(OURS, at_depth_1=0.7),
        Goal("api", "4k-randread-d32", PEERS["api"], 0.6),
        *_nbd(OURS_TCP, at_depth_1=1.0, at_depth_32=1.25, large=1.4),
        *_fuse(OURS_TCP, at_depth_1=0.8),
    ]
    found += [
        Goal("api", job.name, PEERS["api"], 1.0 if job.large else 0.8, subject=OURS_TCP)
        for job in JOBS
        if not job.writes
    ]
    # nbdkit's threads miss these (docs/benchmarking.md).
    found += [
        Goal("nbd", job.name, CEILINGS["nbd"], 0.6, subject=subject)
        for subject in (OURS_NBDKIT, OURS_NBDKIT_TCP)
        for job in _small_and_deep()
    ]
    # Cost of the journal. At 1 MiB writes are copied, and flushes are forced: no goal for these.
    found += [
        Goal("nbd", job.name, OURS_NO_JOURNAL, 0.95)
        for job in JOBS
        if not (job.large and job.writes)
    ]
    # On an ordinary Ethernet: about as fast as without RDMA's frames, although each has a CRC.
    found += [
        Goal("net-1500", job.name, OURS_ISCSI, 0.9)
        for job in NET_JOBS
        if job.large or job.depth > 1
    ]
    found += [Goal("nbd", job.name, SERVER, SERVER_CPU_US, Kind.CPU) for job in _small_and_deep()]
    for subject, process, limit in (
        (OURS, SERVER, SERVER_MEMORY),
        (OURS_NBDKIT, NBDKIT, NBDKIT_MEMORY),
    ):
        found += [
            Goal("nbd", job.name, process, limit, Kind.MEMORY, subject) for job in MEMORY_JOBS
        ]
    return found


def _small_and_deep() -> list[Job]:
    return [job for job in JOBS if not job.large and job.depth > 1]


def _nbd(subject: str, at_depth_1: float, at_depth_32: float, large: float) -> list[Goal]:
    def wanted(job: Job) -> float:
        if job.large:
            return large
        return at_depth_1 if job.depth == 1 else at_depth_32

    return [
        Goal("nbd", job.name, PEERS["nbd"], wanted(job), subject=subject)
        for job in (*JOBS, *CONNECTION_JOBS)
    ]


def _fuse(subject: str, at_depth_1: float) -> list[Goal]:
    found = []
    for job in JOBS:
        if job.large:
            other, wanted = PEERS["fuse"], 1.0
        elif job.depth == 1:
            other, wanted = PEERS["fuse"], at_depth_1
        else:
            other, wanted = CEILINGS["fuse"], 0.6
        found.append(Goal("fuse", job.name, other, wanted, subject=subject))
    return found


def judge(rows: Iterable[Row]) -> list[Outcome]:
    """One outcome for each goal."""
    table = {(row.section, row.job.name, row.subject): row for row in rows}
    outcomes = []
    for goal in goals():
        value = _value(table, goal, goal.subject)
        if value is None:
            verdict = Verdict.UNKNOWN
        else:
            verdict = Verdict.MET if goal.met(value) else Verdict.MISSED
        no_crc = _value(table, goal, OURS_NO_CRC) if goal.subject == OURS else None
        outcomes.append(Outcome(goal, value, no_crc, verdict))
    return outcomes


def _value(table: dict[tuple[str, str, str], Row], goal: Goal, subject: str) -> float | None:
    ours = table.get((goal.section, goal.job, subject))
    if ours is None or ours.missing or not ours.samples:
        return None
    if goal.kind is Kind.MEMORY:
        return ours.peak_rss().get(goal.other)
    if goal.kind is Kind.CPU:
        return ours.cpu_us_per_io().get(goal.other)
    other = table.get((goal.section, goal.job, goal.other))
    compared = ratio(ours, other) if other is not None else None
    return compared.median if compared is not None else None
