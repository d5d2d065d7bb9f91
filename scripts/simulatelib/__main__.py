"""scripts/simulate: options, and what is printed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mutationslib.table import BadTable, read_table

from simulatelib.planting import plant

if TYPE_CHECKING:
    from tests.simulation.world import Result

TOP = Path(__file__).resolve().parents[2]
WORLD = 1000  # operations of one
LINES = 40  # of the trace, where something was wrong


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"simulate: {message} (scripts/simulate --help)", file=sys.stderr)
        sys.exit(7)


class Played(NamedTuple):
    """``wrong``: in words; "": nothing was. ``seconds``: of processor time."""

    seed: int
    operations: int
    seconds: float
    result: Result | None
    wrong: str


def _reasons(error: BaseException) -> Iterator[BaseException]:
    """Those in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _reasons(each)
    else:
        yield error


def play_one(world: tuple[int, int], trace: bool = False) -> Played:
    from tests.simulation.world import play  # noqa: PLC0415 (a mutation may be planted before)

    seed, operations = world
    logging.disable(logging.CRITICAL)
    began = time.process_time()
    try:
        result = play(seed, operations, print if trace else None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        reason = next(_reasons(error))
        notes = "\n".join(getattr(error, "__notes__", ()))
        last = "\n".join(f"  {line}" for line in notes.splitlines()[-LINES:])
        words = f"{type(reason).__name__}: {reason}\n{last}"
        return Played(seed, operations, time.process_time() - began, None, words)
    return Played(seed, operations, time.process_time() - began, result, "")


def _worlds(seed: int, operations: int) -> Iterator[tuple[int, int]]:
    for number, first in enumerate(range(0, operations, WORLD)):
        yield seed + number, min(WORLD, operations - first)


def play_all(seed: int, operations: int, processes: int, trace: bool) -> Iterator[Played]:
    if processes == 1:
        yield from map(partial(play_one, trace=trace), _worlds(seed, operations))
        return
    # Forked, so that what is planted is in all of them.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context) as pool:
        try:
            yield from pool.map(play_one, _worlds(seed, operations))
        finally:
            pool.shutdown(cancel_futures=True)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def main(words: Sequence[str]) -> int:
    parser = _Parser(prog="scripts/simulate", add_help=False)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--plant")
    options = parser.parse_args(words)
    if options.operations < 1 or options.processes < 1:
        parser.error("--operations and --processes take numbers from 1")
    if options.trace and options.operations > WORLD:
        parser.error(f"--trace is for one world: add --operations {WORLD}, or less")
    if options.plant is not None:
        found = [each for each in read_table() if each.name == options.plant]
        if not found:
            parser.error(f"--plant {options.plant}: scripts/mutations --list names those there are")
        path = TOP / found[0].file
        try:
            plant(path, TOP, found[0].changed(path.read_text()))
        except BadTable as error:
            parser.error(str(error))
    seed = options.seed
    if seed is None:
        seed = int.from_bytes(os.urandom(4))
    processes = 1 if options.trace else options.processes
    done, seconds, losses, made_up, trace = 0, 0.0, 0, 0.0, 0
    kinds: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for played in play_all(seed, options.operations, processes, options.trace):
        done += played.operations
        seconds += played.seconds
        if played.result is None:
            print(f"seed {played.seed}: {played.wrong}")
            again = f"scripts/simulate --seed {played.seed} --operations {played.operations}"
            planted = f" --plant {options.plant}" if options.plant else ""
            print(f"after {done} operations; again: {again} --trace{planted}")
            return 1
        kinds += played.result.operations
        faults += played.result.faults
        losses += played.result.losses
        made_up += played.result.seconds
        trace ^= played.result.trace
    print(
        f"seed {seed}: all was right, {done} operations, {faults.total()} faults, {losses} losses"
        f" told, in {made_up:.0f} seconds of made-up time; trace {trace:08x}"
    )
    print(f"operations: {_counted(kinds)}")
    print(f"faults: {_counted(faults)}")
    print(f"{done / seconds:.0f} operations a second of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
