"""scripts/mutations: options, and what is printed."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mutationslib.running import Copy, Outcome
from mutationslib.simulated import MOST, play
from mutationslib.table import PLACE, BadTable, Mutation, read_table

TOP = Path(__file__).resolve().parents[2]

Trial = Callable[[Mutation], Outcome]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"mutations: {message} (scripts/mutations --help)", file=sys.stderr)
        sys.exit(7)


def show(chosen: Sequence[Mutation]) -> None:
    def tell(words: str) -> None:
        print(textwrap.fill(words, 96, initial_indent="    ", subsequent_indent="    "))

    for each in chosen:
        print(f"{each.name}  {each.file}")
        tell(each.loses)
        if each.world is not None:
            tell(f"Found by the simulation: {each.world or 'any world'}.")
        elif each.no_world is not None:
            tell(f"Not found by the simulation: {each.no_world}.")


def run(chosen: Sequence[Mutation], jobs: int, top: Path = TOP) -> list[str]:
    """Try the mutations, print a line for each, and return the names of those that no test has
    noticed."""
    with ExitStack() as stack:

        def prepare() -> Trial:
            copy = Copy(top)
            stack.callback(copy.close)
            wrong = copy.check()
            return lambda mutation: (
                Outcome("", 0.0, wrong) if wrong else copy.try_mutation(mutation)
            )

        return _try_all(chosen, jobs, prepare)


def simulate(chosen: Sequence[Mutation], jobs: int, most: int, top: Path = TOP) -> list[str]:
    """As ``run``, of those that the simulation has not found within ``most`` operations."""
    return _try_all(chosen, jobs, lambda: partial(play, most=most, top=top))


def _try_all(chosen: Sequence[Mutation], jobs: int, prepare: Callable[[], Trial]) -> list[str]:
    """``prepare``: is called once in each of the threads, which share ``chosen``."""
    left = deque(chosen)
    survivors: list[str] = []
    lock = threading.Lock()
    wide = max(len(each.name) for each in chosen)

    def report(mutation: Mutation, outcome: Outcome) -> None:
        words = outcome.killer or "NOT NOTICED"
        if outcome.problem:
            words = f"SAYS NOTHING: {outcome.problem}"
        with lock:
            print(f"{mutation.name:{wide}}  {outcome.seconds:6.1f} s  {words}", flush=True)
            if outcome.problem or not outcome.killer:
                survivors.append(mutation.name)

    def work() -> None:
        trial = prepare()
        while True:
            with lock:
                if not left:
                    return
                mutation = left.popleft()
            try:
                outcome = trial(mutation)
            except (BadTable, OSError) as error:
                outcome = Outcome("", 0.0, str(error))
            report(mutation, outcome)

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(chosen)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return survivors


def main(words: Sequence[str], place: Path = PLACE, top: Path = TOP) -> int:
    parser = _Parser(prog="scripts/mutations", add_help=False)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))))
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--operations", type=int, default=MOST)
    parser.add_argument("patterns", nargs="*")
    options = parser.parse_args(words)
    if options.jobs < 1 or options.operations < 1:
        parser.error("--jobs and --operations: give 1 or more")
    try:
        table = read_table(place)
    except BadTable as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 1
    chosen = [each for each in table if each.fits(options.patterns)]
    if options.simulated:
        chosen = [each for each in chosen if each.world is not None]
    if not chosen:
        which = "that the simulation finds " if options.simulated else ""
        parser.error(f"no mutation {which}fits {' '.join(options.patterns)}")
    if options.list:
        show(chosen)
        return 0
    if options.simulated:
        survivors = simulate(chosen, options.jobs, options.operations, top)
    else:
        survivors = run(chosen, options.jobs, top)
    print(f"mutations: {len(chosen) - len(survivors)} of {len(chosen)} were noticed")
    if survivors:
        print(f"mutations: NOT noticed: {' '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
