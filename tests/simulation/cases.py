"""What a simulated world is made from: a case, and how it is written.

A seed decides on everything. The rest of a case changes single decisions of its seed, so that a
world that has failed can be made smaller: fewer operations, some of its faults alone, other
settings, another order of what happens at the same time. Knows nothing of iserblk.
"""

from __future__ import annotations

import argparse
import shlex
from typing import Final, NamedTuple

NUMBERS: Final = ("portals", "block", "granule", "clients", "between", "hearers")
WORDS: Final = ("scheme", "profile", "hesitates", "first-number", "front", "other")
OPTIONS: Final = (
    "connections",
    "data-digest",
    "error-recovery-level",
    "header-digest",
    "immediate-data",
    "io-timeout",
    "journal",
    "max-transfer",
    "mpa-crc",
    "queue-depth",
    "style",
)
DISK, NBD = "disk", "nbd"
FRONTS: Final = (DISK, NBD)
NONE, BESIDE, FENCES = "none", "beside", "fences"
OTHERS: Final = (NONE, BESIDE, FENCES)
_CHOICES: Final = {"front": FRONTS, "other": OTHERS}
KEYS: Final = (*NUMBERS, *WORDS, *OPTIONS)


class Case(NamedTuple):
    """``faults``: the numbers of those that happen, of the ones that the seed plans; None: all.
    ``settings``: instead of what the seed draws. ``order``: decides, with the seed, what comes
    first of what happens at the same time, and how long all takes."""

    seed: int
    operations: int
    faults: tuple[int, ...] | None = None
    settings: tuple[tuple[str, str], ...] = ()
    order: int = 0

    def words(self) -> str:
        """The options of scripts/simulate that play it."""
        words = ["--seed", str(self.seed), "--operations", str(self.operations)]
        if self.faults is not None:
            words += ["--faults", ",".join(map(str, self.faults)) or "none"]
        for key, value in self.settings:
            words += ["--with", f"{key}={value}"]
        if self.order:
            words += ["--order", str(self.order)]
        return shlex.join(words)

    def having(self, key: str, value: str) -> Case:
        others = tuple(each for each in self.settings if each[0] != key)
        return self._replace(settings=(*others, (key, value)))


def _faults(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(sorted({int(each) for each in text.split(",")}))


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if key not in KEYS or not equals:
        raise argparse.ArgumentTypeError(
            f"{text}: write KEY=VALUE, with a KEY of {', '.join(KEYS)}"
        )
    if key in NUMBERS and not (value.isdecimal() and int(value)):
        raise argparse.ArgumentTypeError(f"{text}: {key} takes a number from 1")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise argparse.ArgumentTypeError(f"{text}: {key} takes {' or '.join(_CHOICES[key])}")
    return key, value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int)
    parser.add_argument("--operations", type=int)
    parser.add_argument("--faults", type=_faults)
    parser.add_argument("--with", type=_setting, action="append", default=[], dest="settings")
    parser.add_argument("--order", type=int, default=0)


def case_of(options: argparse.Namespace, seed: int, operations: int) -> Case:
    return Case(seed, operations, options.faults, tuple(options.settings), options.order)


def read_case(line: str) -> tuple[Case, str]:
    """A line of seeds.txt: options of scripts/simulate, and what was found with them."""
    words, _, what = line.partition("#")
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = parser.parse_args(shlex.split(words))
    return case_of(options, options.seed, options.operations), what.strip()
