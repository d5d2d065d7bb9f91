"""What a simulated world is made from: a case, and how it is written.

A seed decides on everything. The rest of a case changes single decisions of its seed, so that a
world that has failed can be made smaller: fewer operations, some of its faults alone, other
settings, another order of what happens at the same time. Knows nothing of iserblk.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

NUMBERS: Final = ("portals", "block", "granule", "clients", "between", "hearers")
WORDS: Final = (
    "scheme",
    "profile",
    "hesitates",
    "first-number",
    "front",
    "other",
    "fault-kinds",
    "mix",
    "again",
    "medium",
    "tas",
    "lies",
    "succession",
)
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
    "shared",
    "style",
)
DISK, NBD, FUSE, QUEUE = "disk", "nbd", "fuse", "queue"
FRONTS: Final = (DISK, NBD, FUSE, QUEUE)
NONE, BESIDE, FENCES, INVADES = "none", "beside", "fences", "invades"
TAKES, REPLACES = "takes", "replaces"
OTHERS: Final = (NONE, BESIDE, FENCES, INVADES, TAKES, REPLACES)
FENCING: Final = (FENCES, INVADES)  # it reserves the LUN now and then
USUAL, HOARDS, DURABLE = "usual", "hoards", "durable"
MIXES: Final = (USUAL, HOARDS, DURABLE)  # few flushes; many with FUA
GOOD, BAD, LINGERS = "good", "bad", "lingers"
MEDIA: Final = (GOOD, BAD, LINGERS)  # the last is bad, and shows for a while what it has lost
# Where on the LUN the blocks are that the clients use: the LUN is that small; around the first LBA
# that takes more than 32 bits; the last of 16 TiB.
ALL_OF_IT, ACROSS, LAST = "all-of-it", "across", "last"
PARTS: Final = (ALL_OF_IT, ACROSS, LAST)
_CHOICES: Final = {
    "front": FRONTS,
    "other": OTHERS,
    "mix": MIXES,
    "medium": MEDIA,
    "tas": ("yes", "no"),
    "lies": PARTS,
    "succession": ("yes", "no"),
    "shared": ("yes", "no"),
}
KEYS: Final = (*NUMBERS, *WORDS, *OPTIONS)

# Faults, with how often each happens beside the others.
CUT, HALVE, HOLE, LIMIT, SLOW, DARK = "cut", "halve", "hole", "limit", "slow", "dark"
RESTART, STRIKE, DIE = "restart", "restart without its cache", "death of the client"
BLINK, PASSING = "cache lost in place", "temporary errors"
RECOVERED, FAIL, LESS = "recovered errors", "failed flush", "other refusals"
BUSY, LAZY, DAMAGE = "busy for seconds", "lazy threads", "damaged bytes"
FAULTS: Final = {
    CUT: 10, HALVE: 5, HOLE: 2, LIMIT: 10, SLOW: 3, DARK: 2, RESTART: 5, STRIKE: 8, DIE: 2,
    BLINK: 4, PASSING: 4, RECOVERED: 2, FAIL: 2, LESS: 2, BUSY: 1, LAZY: 2,
    DAMAGE: 5,
}  # fmt: skip
DISC, NBD_CLOSE, NBD_CUT, MIDWAY, VANISH, MUTE = (
    "NBD: DISC", "NBD: closed", "NBD: cut", "NBD: cut midway", "NBD: client vanishes",
    "NBD: no answer to a flush",
)  # fmt: skip
NBD_FAULTS: Final = {DISC: 4, NBD_CLOSE: 4, NBD_CUT: 6, MIDWAY: 6, VANISH: 6, MUTE: 20}
HAND_OVER = "hand-over"
SUCCESSION_FAULTS: Final = {HAND_OVER: 15}
QUEUE_CLOSE, QUEUE_WAIT = "queue: closed", "queue: wait cancelled"
QUEUE_FAULTS: Final = {QUEUE_CLOSE: 10, QUEUE_WAIT: 10}
TAKE, REPLACE = "taken over", "another LUN in its place"
DROP, DEFER = "flush that loses", "deferred error"
EVICT = "memory pressure"
BAD_FAULTS: Final = {DROP: 10, DEFER: 4}
LINGERING_FAULTS: Final = {EVICT: 6}
ALL: Final = "all"
OF_FRONTS: Final[dict[str, dict[str, int]]] = {NBD: NBD_FAULTS, QUEUE: QUEUE_FAULTS}


def faults_of(
    front: str, other: str, medium: str, kinds: str = ALL, succession: bool = False
) -> tuple[list[str], list[int]]:
    """The faults of a world, and the sums of their weights up to each. ``kinds``: names with +
    between them, of those that it is limited to. ``succession``: servers succeed each other.
    Raises ValueError for one that there is not."""
    weights = FAULTS | (SUCCESSION_FAULTS if succession else OF_FRONTS.get(front, {}))
    if other == TAKES:
        weights = weights | {TAKE: 6}
    if other == REPLACES:
        weights = weights | {REPLACE: 6}
    if medium != GOOD:
        weights = weights | BAD_FAULTS
    if medium == LINGERS:
        weights = weights | LINGERING_FAULTS
    if kinds != ALL:
        names = {_short(each): each for each in weights}
        unknown = [each for each in kinds.split("+") if each not in names]
        if unknown:
            raise ValueError(f"{unknown[0]}: there are {', '.join(names)}")
        weights = {names[each]: weights[names[each]] for each in kinds.split("+")}
    return list(weights), list(accumulate(weights.values()))


def are_of(kinds: str, faults: Iterable[str]) -> bool:
    """Whether ``kinds``, as ``faults_of`` has them, names some of ``faults``."""
    return not {_short(each) for each in faults}.isdisjoint(kinds.split("+"))


def front_of(kinds: str) -> str | None:
    """The front that has such faults; None: each one has."""
    return next((front for front, faults in OF_FRONTS.items() if are_of(kinds, faults)), None)


def _short(kind: str) -> str:
    return kind.replace(": ", "-").replace(" ", "-")


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


def check(settings: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError where they do not fit each other."""
    words = dict(settings)
    faults_of(
        words.get("front", front_of(words.get("fault-kinds", ALL)) or NBD),
        words.get("other", TAKES),
        words.get("medium", LINGERS),
        words.get("fault-kinds", ALL),
        words.get("succession") == "yes"
        or are_of(words.get("fault-kinds", ALL), SUCCESSION_FAULTS),
    )


def case_of(options: argparse.Namespace, seed: int, operations: int) -> Case:
    return Case(seed, operations, options.faults, tuple(options.settings), options.order)


def read_case(line: str) -> tuple[Case, str]:
    """A line of seeds.txt: options of scripts/simulate, and what was found with them."""
    words, _, what = line.partition("#")
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    options = parser.parse_args(shlex.split(words))
    return case_of(options, options.seed, options.operations), what.strip()
