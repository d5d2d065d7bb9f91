"""scripts/simulate: options, and what is printed."""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mutationslib.table import BadTable, read_table

from simulatelib.planting import plant
from simulatelib.shrinking import Failure, Shrinking, kind_of
from simulatelib.tables import Tally
from tests.simulation.cases import Case, add_arguments, case_of, check

if TYPE_CHECKING:
    from tests.simulation.world import Result

TOP = Path(__file__).resolve().parents[2]
WORLD = 1000  # operations of one
LINES = 40  # of the trace, where something was wrong
OPERATIONS = 20_000
TRIES = 150  # smaller worlds, where something was wrong


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"simulate: {message} (scripts/simulate --help)", file=sys.stderr)
        sys.exit(7)


class Played(NamedTuple):
    """``seconds``: of processor time. ``failure``: None: nothing was wrong. ``lines``: that, in
    words, and the end of the trace."""

    case: Case
    seconds: float
    result: Result
    failure: Failure | None
    lines: list[str]


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """Those in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _reasons(each)
    else:
        yield error


def play_one(case: Case, trace: bool = False) -> Played:
    from tests.simulation.world import World, finish  # noqa: PLC0415 (a mutation may be planted before)

    logging.disable(logging.CRITICAL)
    began = time.process_time()
    world = World(case, print if trace else None)
    failure, lines = None, []
    try:
        finish(world)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason, result = next(_reasons(error)), world.result
        notes = "\n".join(getattr(error, "__notes__", ()))
        lines = [f"{type(reason).__name__}: {reason}"]
        lines += [f"  {line}" for line in notes.splitlines()[-LINES:]]
        happened = tuple(result.happened)
        failure = Failure(kind_of(reason), result.begun, happened, world.settings.as_words())
    return Played(case, time.process_time() - began, world.result, failure, lines)


def _worlds(options: argparse.Namespace, seed: int) -> Iterator[Case]:
    for number, first in enumerate(range(0, options.operations, WORLD)):
        yield case_of(options, seed + number, min(WORLD, options.operations - first))


def play_all(worlds: Iterator[Case], processes: int, trace: bool) -> Iterator[Played]:
    """In the order of ``worlds``, of which few are taken before they are played."""
    if processes == 1:
        yield from map(partial(play_one, trace=trace), worlds)
        return
    # Forked, so that what is planted is in all of them.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context) as pool:
        played: deque[Future[Played]] = deque()
        try:
            for case in worlds:
                played.append(pool.submit(play_one, case))
                if len(played) >= 2 * processes:
                    yield played.popleft().result()
            while played:
                yield played.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _smaller(played: Played, tries: int) -> Played:
    """The smallest world that was found to fail in the same way."""
    failed = played.failure
    assert failed is not None
    best = played

    def again(case: Case) -> Failure | None:
        nonlocal best
        other = play_one(case)
        if other.failure is not None and other.failure.kind == failed.kind:
            best = other
        return other.failure

    shrinking = Shrinking(played.case, failed, again, tries)
    shrinking.run()
    if best is not played:
        print(
            f"{shrinking.tried} smaller worlds were tried: of {played.case.operations} operations"
            f" and {len(failed.happened)} faults {best.case.operations} and"
            f" {len(shrinking.failure.happened)} are left"
        )
    return best


def _report(played: Played, done: int, options: argparse.Namespace) -> None:
    planted = f" --plant {options.plant}" if options.plant else ""
    print(f"seed {played.case.seed}: {played.lines[0]}", flush=True)
    print(
        f"after {done} operations; again: scripts/simulate {played.case.words()} --trace{planted}"
    )
    if options.tries and not options.trace:
        smaller = _smaller(played, options.tries)
        print("\n".join(smaller.lines))
        print(f"again: scripts/simulate {smaller.case.words()} --trace{planted}")
    else:
        print("\n".join(played.lines[1:]))


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _plant(parser: _Parser, name: str) -> None:
    found = [each for each in read_table() if each.name == name]
    if not found:
        parser.error(f"--plant {name}: scripts/mutations --list names those there are")
    path = TOP / found[0].file
    try:
        plant(path, TOP, found[0].changed(path.read_text()))
    except BadTable as error:
        parser.error(str(error))


def main(words: Sequence[str]) -> int:
    parser = _Parser(prog="scripts/simulate", add_help=False)
    add_arguments(parser)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--tries", type=int, default=TRIES)
    parser.add_argument("--plant")
    options = parser.parse_args(words)
    if options.operations is None:
        options.operations = OPERATIONS if options.seconds == math.inf else sys.maxsize
    if not options.seconds > 0:
        parser.error("--seconds takes a number above 0")
    if options.operations < 1 or options.processes < 1:
        parser.error("--operations and --processes take numbers from 1")
    if options.tries < 0:
        parser.error("--tries takes numbers from 0")
    if options.trace and options.operations > WORLD:
        parser.error(f"--trace is for one world: add --operations {WORLD}, or less")
    try:
        check(options.settings)
    except ValueError as error:
        parser.error(f"--with fault-kinds: {error}")
    if options.plant is not None:
        _plant(parser, options.plant)
    seed = options.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4))
    processes = 1 if options.trace else options.processes
    done, seconds, losses, made_up, trace = 0, 0.0, 0, 0.0, 0
    kinds: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    tally = Tally()
    for played in play_all(_worlds(options, seed), processes, options.trace):
        result = played.result
        done += played.case.operations
        seconds += played.seconds
        if played.failure is not None:
            _report(played, done, options)
            return 1
        kinds += result.operations
        faults += result.faults
        losses += result.losses
        made_up += result.seconds
        trace ^= result.trace
        tally.add(result)
        if seconds >= options.seconds:
            break
    print(
        f"seed {seed}: all was right, {done} operations, {faults.total()} faults, {losses} losses"
        f" told, in {made_up:.0f} seconds of made-up time; trace {trace:08x}"
    )
    print(f"operations: {_counted(kinds)}")
    print(f"faults: {_counted(faults)}")
    print(tally.text())
    print(f"{done / seconds:.0f} operations a second of processor time")
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end
        status = 128 + signal.SIGPIPE
    sys.exit(status)
