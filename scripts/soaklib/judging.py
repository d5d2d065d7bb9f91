"""Whether memory, descriptors and threads of processes are flat."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from soaklib.sampling import Sample

WARM_S = 600.0  # of a process: what it takes then is not judged
LONG_S = 1200.0  # a process that has lived shorter is not judged
GROWTH = 0.05  # of the memory, and
GROWTH_BYTES = 2 << 20
MORE = 2  # descriptors or threads

RULE = (
    f"flat: of a process that has lived {LONG_S / 60:.0f} minutes, what comes after its first"
    f" {WARM_S / 60:.0f} minutes is divided into quarters. In the last quarter the median of its"
    f" memory is at most {GROWTH:.0%} and {GROWTH_BYTES >> 20} MiB above that of the first, and its"
    f" descriptors and threads, where they are lowest (a tenth of the samples is lower still), are"
    f" at most {MORE} more."
)


class Life(NamedTuple):
    """A process, from its first to its last sample. ``begin`` and ``end``: memory in bytes,
    descriptors and threads in the first and in the last quarter; None: it was too short to be
    judged."""

    name: str
    samples: Sequence[Sample]
    begin: tuple[int, int, int] | None
    end: tuple[int, int, int] | None

    @property
    def seconds(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s

    def findings(self) -> Iterator[str]:
        if self.begin is None or self.end is None:
            return
        head = f"{self.name} (process {self.samples[0].pid})"
        memory, descriptors, threads = self.begin
        if self.end[0] > memory * (1 + GROWTH) + GROWTH_BYTES:
            grown = f"from {memory / 2**20:.1f} to {self.end[0] / 2**20:.1f} MiB"
            yield f"{head}: its memory grew {grown} in {self.seconds / 60:.0f} minutes"
        for what, before, after in (
            ("descriptors", descriptors, self.end[1]),
            ("threads", threads, self.end[2]),
        ):
            if after > before + MORE:
                yield f"{head}: {what} grew from {before} to {after}"


def _low(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 10]


def _middle(samples: Sequence[Sample]) -> tuple[int, int, int]:
    return (
        int(statistics.median(each.memory for each in samples)),
        _low([each.descriptors for each in samples]),
        _low([each.threads for each in samples]),
    )


def lives(name: str, samples: Sequence[Sample]) -> Iterator[Life]:
    """Of the processes that had the same name, one after the other."""
    for _, group in itertools.groupby(samples, lambda each: each.pid):
        of_one = [*group]
        begun, ended = of_one[0].at_s, of_one[-1].at_s
        if ended - begun < LONG_S:
            yield Life(name, of_one, None, None)
            continue
        quarter = (ended - begun - WARM_S) / 4
        first = [each for each in of_one if WARM_S <= each.at_s - begun <= WARM_S + quarter]
        last = [each for each in of_one if each.at_s >= ended - quarter]
        yield Life(name, of_one, _middle(first), _middle(last))


def judged(samples: Mapping[str, Sequence[Sample]]) -> list[Life]:
    return [life for name, each in samples.items() for life in lives(name, each)]
