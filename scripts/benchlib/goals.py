"""The goals that iserblk has to reach, and whether a run met them.

Over iSER ``OURS`` decides (MPA CRC on, the default); the row without CRC is shown beside it. Over
TCP ``OURS_TCP`` decides, on the same target that the peers use. That target is the limit there, by
how much differs from machine to machine: so these rows have to be as fast as the peer, and, where a
C program stands beside them (``FLOOR_TCP``), which does only what no initiator can do without, as
fast as that. In section nbd both are the server of ``iserblk nbd``; the plugin in nbdkit has rows
and goals of its own.
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
# A C program that does only what a request cannot do without (floor.c).
FLOOR = "floor"
FLOOR_TCP = "floor-tcp"
OURS_NBDKIT = "iserblk-nbdkit"
OURS_NBDKIT_TCP = "iserblk-nbdkit-tcp"
# The API with one task for all requests; the other rows of the API have a task for each.
OURS_QUEUE = "iserblk-queue"
OURS_QUEUE_TCP = "iserblk-tcp-queue"
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
TARGET = "target"
API_CLIENT = "iserblk bench"
# µs of a 4 KiB request at depth 32 over iSER: section, process, limit.
CPU_US = (("nbd", SERVER, 10.0), ("nbd", TARGET, 14.0), ("api", API_CLIENT, 12.0))

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


@dataclass(slots=True, frozen=True)
class _Wanted:
    """Least ratios to the peer of a section, by job."""

    at_depth_1: float
    reads: float  # 4 KiB at depth 32, as the next ones
    writes: float
    large: float
    connections: float = 0.0  # four of them; only NBD has such jobs

    def of(self, job: Job) -> float:
        if job.connections > 1:
            return self.connections
        if job.large:
            return self.large
        if job.depth == 1:
            return self.at_depth_1
        return self.writes if job.writes else self.reads


# Over TCP, in every row and on any machine.
_THE_PEER = _Wanted(1.0, reads=1.0, writes=1.0, large=1.0, connections=1.0)
_THE_FLOOR = 1.0
_NBD = {OURS: _Wanted(1.2, reads=2.0, writes=1.8, large=2.0, connections=1.5), OURS_TCP: _THE_PEER}
_FUSE = {OURS: _Wanted(1.2, reads=1.4, writes=1.4, large=2.0), OURS_TCP: _THE_PEER}
_API = {OURS: _Wanted(1.2, reads=1.8, writes=0.0, large=1.1), OURS_TCP: _THE_PEER}
_API |= {OURS_QUEUE: _API[OURS], OURS_QUEUE_TCP: _API[OURS_TCP]}
# At an MTU of 1500, so much of each of those over iSER. They are rows of one section there.
_THROUGH_NETWORK = 0.9
_NETWORK_ROWS = (
    ("nbd", _NBD, {OURS: "nbd-iserblk", OURS_TCP: "nbd-iserblk-tcp"}),
    ("fuse", _FUSE, {OURS: "fuse-iserblk", OURS_TCP: "fuse-iserblk-tcp"}),
    ("api", _API, {subject: subject for subject in _API}),
)
# Of the C programs through NBD; at the API there is one that reads.
NBD_FLOOR_JOBS = ("4k-randread-d1", "4k-randread-d32")
NBD_FLOOR_TCP_JOBS = (*NBD_FLOOR_JOBS, "4k-randwrite-d1", "4k-randwrite-d32")
NBD_FLOOR_TCP = f"nbd-{FLOOR_TCP}"  # as a network's section calls it
_READS = tuple(job.name for job in (*JOBS, *NET_JOBS) if not job.writes)
# The rows over TCP that have a C program beside them: section, subject, that program, jobs.
_FLOORS = (
    ("nbd", OURS_TCP, FLOOR_TCP, NBD_FLOOR_TCP_JOBS),
    ("api", OURS_TCP, FLOOR_TCP, _READS),
    ("api", OURS_QUEUE_TCP, FLOOR_TCP, _READS),
    ("net-1500", "nbd-iserblk-tcp", NBD_FLOOR_TCP, NBD_FLOOR_TCP_JOBS),
    ("net-1500", OURS_TCP, FLOOR_TCP, _READS),
    ("net-1500", OURS_QUEUE_TCP, FLOOR_TCP, _READS),
)


def goals() -> list[Goal]:
    """All goals, in the order of the table."""
    found = [
        Goal(section, job.name, PEERS[section], wanted[subject].of(job), subject=subject)
        for subject in (OURS, OURS_QUEUE, OURS_TCP, OURS_QUEUE_TCP)
        for section, wanted, jobs in (
            ("nbd", _NBD, (*JOBS, *CONNECTION_JOBS)),
            ("fuse", _FUSE, JOBS),
            ("api", _API, [job for job in JOBS if not job.writes]),
        )
        if subject in wanted
        for job in jobs
    ]
    found += [
        Goal("fuse", job.name, CEILINGS["fuse"], 0.6, subject=subject)
        for subject in (OURS, OURS_TCP)
        for job in _small_and_deep()
    ]
    # nbdkit's threads miss these (docs/running-benchmarks.md).
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
    found += [
        Goal(
            "net-1500",
            job.name,
            PEERS[section],
            wanted[key].of(job) * (1.0 if wanted[key] is _THE_PEER else _THROUGH_NETWORK),
            subject=row,
        )
        for section, wanted, names in _NETWORK_ROWS
        for key, row in names.items()
        for job in NET_JOBS
        if (job in JOBS or wanted[key] is _THE_PEER) and not (section == "api" and job.writes)
    ]
    found += [
        Goal(section, job.name, floor, _THE_FLOOR, subject=subject)
        for section, subject, floor, names in _FLOORS
        for job in (NET_JOBS if section == "net-1500" else JOBS)
        if job.name in names
    ]
    found += [
        Goal(section, job.name, process, limit, Kind.CPU)
        for section, process, limit in CPU_US
        for job in _small_and_deep()
        if section != "api" or not job.writes
    ]
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
