"""scripts/fuzz: options, and what is printed."""

from __future__ import annotations

import argparse
import fnmatch
import logging
import re
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fuzzlib.running import PLACE, Ended, Guests, fuzz, have_atheris, reached
from tests.fuzz import guided
from tests.fuzz.table import PLANTED, ROWS

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"fuzz: {message} (scripts/fuzz --help)", file=sys.stderr)
        sys.exit(7)


def _seconds(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,6})([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: give seconds, or a number with s, m or h")
    return int(match[1]) * _UNITS[match[2]]


def _chosen(parser: _Parser, patterns: Sequence[str]) -> list[str]:
    names: dict[str, None] = {}
    for pattern in patterns:
        if pattern in ROWS or pattern == PLANTED.name:
            found = [pattern]
        else:
            found = fnmatch.filter(ROWS, "*" if pattern == "all" else pattern)
        if not found:
            parser.error(f"there is no target {pattern}: --list prints the names")
        names |= dict.fromkeys(found)
    return list(names)


def replay(name: str, file: Path) -> int:
    logging.disable(logging.CRITICAL)
    try:
        guided.run_input(ROWS.get(name, PLANTED), file.read_bytes())
    except OSError as error:
        print(f"fuzz: {file}: {error.strerror}", file=sys.stderr)
        return 7
    except Exception:
        traceback.print_exc()
        return 1
    print(f"{name}: nothing is wrong with this input")
    return 0


def _say(name: str, ended: Ended) -> None:
    print(
        f"{name}: {ended.inputs} inputs in {ended.seconds} s, {ended.edges} edges,"
        f" {ended.kept} inputs kept: {'FOUND' if ended.wrong else 'nothing found'}",
        flush=True,
    )
    if ended.wrong:
        print(ended.wrong)
        if ended.file is not None:
            print(f'again: scripts/fuzz "{name}" --replay {ended.file}', flush=True)


def main(words: Sequence[str]) -> int:
    parser = _Parser(prog="scripts/fuzz", add_help=False)
    parser.add_argument("target", nargs="*")
    parser.add_argument("--time", type=_seconds, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=PLACE)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(words)
    if options.list:
        print("\n".join(ROWS))
        return 0
    if not options.target:
        parser.error("name a target")
    if options.jobs < 1:
        parser.error("--jobs takes a number from 1")
    names = _chosen(parser, options.target)
    if options.replay is not None:
        if len(names) != 1:
            parser.error("--replay takes one target")
        return replay(names[0], options.replay)
    if why := have_atheris():
        print(f"fuzz: {why}", file=sys.stderr)
        return 7
    inputs, found = 0, []
    with ThreadPoolExecutor(options.jobs) as threads, Guests() as guests:
        run = partial(fuzz, guests=guests, corpus=options.corpus, seconds=options.time)
        for name, ended in zip(names, threads.map(run, names), strict=True):
            _say(name, ended)
            inputs += ended.inputs
            if ended.wrong:
                found.append(name)
    print("lines of functions that the inputs reach, by module:")
    for module, (there, lines) in sorted(reached(names, options.corpus).items()):
        print(f"  {module} {there} of {lines}")
    print(f"{inputs} inputs in all; found: {', '.join(found) or 'nothing'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
