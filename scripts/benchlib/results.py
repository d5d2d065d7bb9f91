"""Samples, and their medians, spreads and ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchlib.load import Job, Measurement


@dataclass(slots=True, frozen=True)
class Sample:
    """One run of one job on one subject.

    ``cpu_seconds`` and ``peak_rss`` (bytes) are by process, the client's among them.
    """

    measured: Measurement
    cpu_seconds: dict[str, float]
    peak_rss: dict[str, int]


@dataclass(slots=True, frozen=True)
class Spread:
    """Median, lowest and highest value of one number in several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(median(values), min(values), max(values))

    @property
    def noise(self) -> float:
        """Width relative to the median; 0.1 means a quiet machine."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(slots=True)
class Row:
    """All rounds of one job on one subject, or the reason why there are none."""

    section: str
    job: Job
    subject: str
    samples: list[Sample] = field(default_factory=list)
    absent: str = ""  # why the subject is not available here
    failed: str = ""  # why a run of it failed

    @property
    def name(self) -> str:
        """The name that --rows matches."""
        return f"{self.section}/{self.job.name}/{self.subject}"

    @property
    def missing(self) -> str:
        """Why there are no results; "" if there are some, or may still be."""
        return self.absent or (self.failed and f"failed: {self.failed}")

    def rate(self) -> Spread:
        """Bytes per second of a large job, else requests per second. Needs a sample."""
        return Spread.of([rate(sample, self.job) for sample in self.samples])

    def latency_us(self, percentile: int) -> float | None:
        """Median over the rounds of the 50th or 99th percentile; None where not measured."""
        name = f"latency_p{percentile}_us"
        values = [getattr(sample.measured, name) for sample in self.samples]
        known = [value for value in values if value is not None]
        return median(known) if known else None

    def cpu_us_per_io(self) -> dict[str, float]:
        """Microseconds of CPU time for one request, by process; median over the rounds."""
        return {
            name: median(s.cpu_seconds[name] / s.measured.ios * 1e6 for s in self.samples)
            for name in self.samples[0].cpu_seconds
        }

    def peak_rss(self) -> dict[str, int]:
        """Peak memory in bytes, by process; the highest of the rounds."""
        return {
            name: max(s.peak_rss[name] for s in self.samples) for name in self.samples[0].peak_rss
        }


def rate(sample: Sample, job: Job) -> float:
    measured = sample.measured
    return (measured.bytes if job.large else measured.ios) / measured.seconds


def ratio(ours: Row, other: Row) -> Spread | None:
    """The ratios of ``ours`` to ``other`` within the rounds: what slows the whole machine for a
    while slows both. None if one of them has no samples."""
    pairs = list(zip(ours.samples, other.samples, strict=False))
    if not pairs or ours.missing or other.missing:
        return None
    return Spread.of([rate(a, ours.job) / rate(b, other.job) for a, b in pairs])
