"""Readings: the numbers of LUNs in use at one moment, as a scrape returns them, and values computed
from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from iserblk.metrics.counting import BYTES, ERRORS, HISTOGRAM, NANOSECONDS, OPERATIONS
from iserblk.metrics.target_reading import TargetReading

# The bounds of published buckets: 8, 16, … µs, up to 2^26 µs (67 s). Shorter times are noise.
FIRST_BOUND = 3
LAST_BOUND = 26
BOUNDS_US = tuple(1 << power for power in range(FIRST_BOUND, LAST_BOUND + 1))


@dataclass(slots=True, frozen=True)
class OperationReading:
    """The numbers of one operation since the LUN was opened. ``buckets``: numbers of requests by
    duration: up to each of BOUNDS_US, but longer than the bound before it; the last: longer than
    all bounds. ``seconds``: the durations of all requests together. ``bytes``: of successful
    requests, also of ranges that were trimmed or zeroed."""

    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_US) + 1)
    bytes: int = 0
    errors: int = 0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.buckets)

    @property
    def mean_us(self) -> float | None:
        """The mean duration in µs; None without requests."""
        return self.seconds * 1e6 / self.requests if self.requests else None

    def percentile_us(self, percent: float) -> float | None:
        """The duration in µs within which ``percent`` of the requests ended. It is interpolated
        between the bounds of a bucket. None without requests; the last bound if it was longer."""
        left = self.requests * percent / 100
        if not left:
            return None
        low = 0
        for high, count in zip(BOUNDS_US, self.buckets, strict=False):
            if count and left <= count:
                return low + (high - low) * left / count
            left -= count
            low = high
        return float(low)

    def histogram(self) -> list[tuple[int | None, int]]:
        """Pairs of an upper bound in µs (None: no bound), and the number of requests that took at
        most so long, but longer than the bound before."""
        return list(zip((*BOUNDS_US, None), self.buckets, strict=True))

    def since(self, before: OperationReading) -> OperationReading:
        """The difference to an earlier reading. If a bucket has decreased, the process has
        restarted, and the result is this reading."""
        buckets = tuple(b - a for a, b in zip(before.buckets, self.buckets, strict=True))
        if min(buckets) < 0:
            return self
        return OperationReading(
            buckets,
            max(0, self.bytes - before.bytes),
            max(0, self.errors - before.errors),
            max(0.0, self.seconds - before.seconds),
        )


def of_row(row: Sequence[int]) -> OperationReading:
    """Make a reading from a row of ``LunMetrics.total``."""
    buckets = (
        sum(row[: FIRST_BOUND + 1]),
        *row[FIRST_BOUND + 1 : LAST_BOUND + 1],
        sum(row[LAST_BOUND + 1 : HISTOGRAM]),
    )
    return OperationReading(buckets, row[BYTES], row[ERRORS], row[NANOSECONDS] / 1e9)


def together(parts: Sequence[OperationReading]) -> OperationReading:
    # The sum of several readings.
    return OperationReading(
        tuple(map(sum, zip(*(part.buckets for part in parts), strict=True))),
        sum(part.bytes for part in parts),
        sum(part.errors for part in parts),
        sum(part.seconds for part in parts),
    )


@dataclass(slots=True, frozen=True)
class ConnectionReading:
    """The numbers of one of several connections of a session. ``in_flight``: commands at the
    target. ``commands``, ``bytes``: that were sent on it since its login."""

    cid: int
    portal: str
    provider: str
    in_flight: int = 0
    commands: int = 0
    bytes: int = 0


@dataclass(slots=True, frozen=True)
class PathReading:
    """One of several ways to a LUN. ``index``: its place in the order of preference. ``state``: the
    ALUA state of its port (SPC-4 table 306) when it was last seen; None: not known. ``failures``:
    since it last carried the session."""

    index: int
    portal: str
    in_use: bool = False
    failures: int = 0
    state: int | None = None


@dataclass(slots=True, frozen=True)
class LunReading:
    """The numbers of one LUN. Counters count from when it was opened.

    ``size``: bytes. ``url``: without user info and options. ``portal``, ``provider``: the path in
    use, or used last. ``in_flight``: commands at the target, or waiting to be sent. ``aborted``,
    ``resets``, ``reconnects``, ``replayed`` (commands sent again on a new connection) and what
    follows it are those of the session, which LUNs of the same target share. ``unflushed``: bytes
    in the journal.

    ``away_since``: when the connection was lost, in seconds since 1970; 0: it is there.
    ``connections``: how many there are, of those ``wanted``. ``recovered``: how many were lost
    while others went on; ``reassigned``: tasks that another one took over then. ``snacks``: that
    asked for lost PDUs; ``damaged``: PDUs that were lost to their data digest.
    ``per_connection``: where the session may have several. ``paths``: where there are several
    portals.
    """

    target: str
    lun: int
    name: str
    url: str
    size: int
    portal: str
    provider: str
    connected: bool
    in_flight: int = 0
    retries: int = 0
    reconnects: int = 0
    replayed: int = 0
    aborted: int = 0
    resets: int = 0
    connections: int = 0
    wanted: int = 0
    away_since: int = 0
    recovered: int = 0
    reassigned: int = 0
    snacks: int = 0
    damaged: int = 0
    per_connection: tuple[ConnectionReading, ...] = ()
    paths: tuple[PathReading, ...] = ()
    unflushed: int = 0
    operations: dict[str, OperationReading] = field(
        default_factory=lambda: dict.fromkeys(OPERATIONS, OperationReading())
    )


@dataclass(slots=True, frozen=True)
class ProcessReading:
    """All that one process serves at one address. ``command``: of iserblk, as ``mount``; ``began``:
    when, in seconds since 1970. "" and 0: it does not tell."""

    pid: int
    version: str
    luns: tuple[LunReading, ...]
    targets: tuple[TargetReading, ...] = ()
    command: str = ""
    began: int = 0
