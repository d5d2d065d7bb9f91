"""The numbers of a LUN at one moment; what scrapes hand over, and what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from iserblk.metrics.counting import BYTES, ERRORS, HISTOGRAM, NANOSECONDS, OPERATIONS

# What is told: requests of up to 8, 16, … µs, and 2^26 (67 s) the last. Below is noise.
FIRST_BOUND = 3
LAST_BOUND = 26
BOUNDS_US = tuple(1 << power for power in range(FIRST_BOUND, LAST_BOUND + 1))


@dataclass(slots=True, frozen=True)
class OperationReading:
    """Since the LUN was opened. ``buckets``: how many requests took up to each of BOUNDS_US and
    longer than the one before; the last: longer than all. ``seconds``: of all of them together.
    ``bytes``: of those that went well, also of ranges that were trimmed or zeroed."""

    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_US) + 1)
    bytes: int = 0
    errors: int = 0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.buckets)

    @property
    def mean_us(self) -> float | None:
        """None without requests."""
        return self.seconds * 1e6 / self.requests if self.requests else None

    def percentile_us(self, percent: float) -> float | None:
        """So many percent took that long at most; between the bounds of a bucket this is a guess.
        None without requests; the last bound for what took longer than it."""
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
        """Upper bounds in µs (None: no bound), and how many requests took that long at most and
        longer than the bound before."""
        return list(zip((*BOUNDS_US, None), self.buckets, strict=True))

    def since(self, before: OperationReading) -> OperationReading:
        """What was added since ``before``; all of it where a counter has gone back."""
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
    """From the row of ``LunMetrics.total``."""
    buckets = (
        sum(row[: FIRST_BOUND + 1]),
        *row[FIRST_BOUND + 1 : LAST_BOUND + 1],
        sum(row[LAST_BOUND + 1 : HISTOGRAM]),
    )
    return OperationReading(buckets, row[BYTES], row[ERRORS], row[NANOSECONDS] / 1e9)


def together(parts: Sequence[OperationReading]) -> OperationReading:
    return OperationReading(
        tuple(map(sum, zip(*(part.buckets for part in parts), strict=True))),
        sum(part.bytes for part in parts),
        sum(part.errors for part in parts),
        sum(part.seconds for part in parts),
    )


@dataclass(slots=True, frozen=True)
class LunReading:
    """One LUN. Counters are since it was opened.

    ``url``: without user info and options. ``portal``, ``provider``: the path in use, or the last.
    ``in_flight``: its commands at the target or waiting for their turn. ``aborted``, ``resets``,
    ``reconnects``, ``replayed`` (commands sent again on a new connection) are of the session,
    which several LUNs of a target share. ``unflushed``: bytes in the journal.
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
    unflushed: int = 0
    operations: dict[str, OperationReading] = field(
        default_factory=lambda: dict.fromkeys(OPERATIONS, OperationReading())
    )


@dataclass(slots=True, frozen=True)
class ProcessReading:
    """Everything that one process serves at one address."""

    pid: int
    version: str
    luns: tuple[LunReading, ...]
