"""docs/tour.md, compared with what its three journeys call.

A section (##) of the page is a journey; below it each part (###) has what one process does. A step
is ``function`` (``file.py``), in code; the steps of a process are called in the order of the page.
Between the first and the last of them, calls of other functions do not matter, but their files
have to be on the page: in a step, or by their name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from figureslib.path import JOURNEYS, Call, Journey

PACKAGE = "iserblk/"
_STEP_OR_FILE = re.compile(r"`([\w.<>]+)` \(`([\w/]+\.py)`\)|`([\w/]+\.py)`")
_PROCESSES = {"In the NBD server": "nbd", "In the target": "target"}


@dataclass(slots=True)
class Part:
    """What the page says of one process in one journey."""

    steps: list[Call] = field(default_factory=list)
    files: set[str] = field(default_factory=set)


def parse(text: str) -> dict[str, dict[str, Part]]:
    """Journey → process → part. Raises ValueError for a heading that names no process."""
    found: dict[str, dict[str, Part]] = {}
    parts: dict[str, Part] = {}
    part: Part | None = None
    for line in text.splitlines():
        if line.startswith("## "):
            name = next((name for name in JOURNEYS if name in line.split()), "")
            parts = found.setdefault(name, {})
            part = None
        elif line.startswith("### "):
            heading = line.removeprefix("### ").partition(":")[0]
            if heading not in _PROCESSES:
                raise ValueError(f"{line!r} begins with neither of {', '.join(_PROCESSES)}")
            part = parts.setdefault(_PROCESSES[heading], Part())
        elif part is not None:
            for function, of, alone in _STEP_OR_FILE.findall(line):
                if function:
                    part.steps.append((PACKAGE + of, function))
                part.files.add(PACKAGE + (of or alone))
    return found


def mistakes(
    page: dict[str, dict[str, Part]], journeys: Mapping[str, Sequence[Journey]]
) -> Iterator[str]:
    """A line for each thing that the page has wrong."""
    for name, taken in journeys.items():
        parts = page.get(name, {})
        for process in _PROCESSES.values():
            part = parts.get(process, Part())
            if not part.steps:
                yield f"{name}, {process}: the page has no steps"
                continue
            ways = [getattr(each, process) for each in taken]
            yield from (f"{name}, {process}: {line}" for line in _compared(part, ways))


def _compared(part: Part, ways: Sequence[Sequence[Call]]) -> Iterator[str]:
    spans = [_span(part.steps, way) for way in ways]
    whole = [way[span.start : span.stop] for way, span in zip(ways, spans, strict=True)
             if span.steps == len(part.steps)]  # fmt: skip
    if not whole:
        best = max(span.steps for span in spans)
        file, function = part.steps[best]
        before = f"after {part.steps[best - 1][1]}" if best else "at all"
        yield f"{function} of {file} is not called {before}"
        return
    # What passes with time, such as a ping, is in some of them only.
    passed = set.intersection(*({file for file, _ in way} for way in whole))
    yield from (f"passes through {file}, too" for file in sorted(passed - part.files))
    ever = {file for way in ways for file, _ in way}
    yield from (f"does not pass through {file}" for file in sorted(part.files - ever))


@dataclass(slots=True, frozen=True)
class _Span:
    steps: int  # that were called in their order
    start: int
    stop: int


def _span(steps: Sequence[Call], way: Sequence[Call]) -> _Span:
    done = start = at = 0
    for at, call in enumerate(way):
        if call == steps[done]:
            start = start if done else at
            done += 1
            if done == len(steps):
                break
    return _Span(done, start, at + 1)
