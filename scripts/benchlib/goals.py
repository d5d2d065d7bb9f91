"""The goals that iserblk has to reach, and whether a run met them.

Over iSER ``OURS`` decides (MPA CRC on, the default); the row without CRC is shown beside it. Over
TCP ``OURS_TCP`` decides, on the same target that the peers use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from benchlib.load import JOBS, MEMORY_JOBS, NET_JOBS
from benchlib.results import Row, ratio

OURS = "iserblk"
OURS_NO_CRC = "iserblk-nocrc"
OURS_NO_POLL = "iserblk-nopoll"
OURS_NO_JOURNAL = "iserblk-nojournal"
OURS_FLUSHED = "iserblk-flushed"
OURS_TCP = "iserblk-tcp"
OURS_ISCSI = "iserblk-iscsi"
OURS_ONE_SEGMENT = "iserblk-1-segment"
NET_MTUS = (1500, 9000)
MEMORY_LIMIT = 150 << 20
MEMORY_PROCESS = "nbdkit"

# The peer of each section.
PEERS = {"nbd": "qemu-nbd", "fuse": "qemu-fuse", "api": "iscsi-perf"}
# Over a network iSER is compared with iSCSI on the same target.
PEERS |= {f"net-{mtu}": OURS_ISCSI for mtu in NET_MTUS}
# Network sections also have front-ends. These are compared with the peers of their own sections.
_FRONT_ENDS = {"nbd-": PEERS["nbd"], "fuse-": PEERS["fuse"]}
CEILINGS = {"nbd": "python-150us", "fuse": "pyfuse3-null"}


def peer_of(section: str, subject: str) -> str:
    """The subject with which this row of the tables is compared."""
    for prefix, peer in _FRONT_ENDS.items():
        if section.startswith("net-") and (subject == peer or subject.startswith(prefix)):
            return peer
    return PEERS[section]


class Verdict(Enum):
    MET = "met"
    MISSED = "missed"
    UNKNOWN = "not measured"


@dataclass(slots=True, frozen=True)
class Goal:
    """One goal: ``subject`` must reach ``wanted`` times ``other`` in one job. With ``memory`` its
    process ``other`` must stay below ``wanted`` bytes."""

    section: str
    job: str
    other: str
    wanted: float
    memory: bool = False
    subject: str = OURS

    @property
    def text(self) -> str:
        if self.memory:
            return f"peak memory of {self.other}"
        return f"of {self.other}"


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
        *_through_front_ends(OURS, 0.7),
        Goal("api", "4k-randread-d32", PEERS["api"], 0.6),
        *_through_front_ends(OURS_TCP, 0.8),
    ]
    found += [
        Goal("api", job.name, PEERS["api"], 1.0 if job.large else 0.8, subject=OURS_TCP)
        for job in JOBS
        if not job.writes
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
    found += [Goal("nbd", job.name, MEMORY_PROCESS, MEMORY_LIMIT, True) for job in MEMORY_JOBS]
    return found


def _through_front_ends(subject: str, at_depth_1: float) -> list[Goal]:
    found = []
    for section in ("nbd", "fuse"):
        for job in JOBS:
            if job.large:
                other, wanted = PEERS[section], 1.0
            elif job.depth == 1:
                other, wanted = PEERS[section], at_depth_1
            else:  # nbdkit's threads miss it (docs/benchmarking.md): a goal for their successor
                other, wanted = CEILINGS[section], 0.6
            found.append(Goal(section, job.name, other, wanted, subject=subject))
    return found


def judge(rows: Iterable[Row]) -> list[Outcome]:
    """One outcome for each goal."""
    table = {(row.section, row.job.name, row.subject): row for row in rows}
    outcomes = []
    for goal in goals():
        value = _value(table, goal, goal.subject)
        if value is None:
            verdict = Verdict.UNKNOWN
        elif value < goal.wanted if goal.memory else value >= goal.wanted:
            verdict = Verdict.MET
        else:
            verdict = Verdict.MISSED
        no_crc = _value(table, goal, OURS_NO_CRC) if goal.subject == OURS else None
        outcomes.append(Outcome(goal, value, no_crc, verdict))
    return outcomes


def _value(table: dict[tuple[str, str, str], Row], goal: Goal, subject: str) -> float | None:
    ours = table.get((goal.section, goal.job, subject))
    if ours is None or ours.missing or not ours.samples:
        return None
    if goal.memory:
        return ours.peak_rss().get(goal.other)
    other = table.get((goal.section, goal.job, goal.other))
    compared = ratio(ours, other) if other is not None else None
    return compared.median if compared is not None else None
