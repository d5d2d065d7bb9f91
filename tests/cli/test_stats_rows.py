"""The words of ``iserblk stats`` for one LUN."""

from __future__ import annotations

import pytest

from iserblk.cli.stats_rows import Row, path_words, plain, time_words
from iserblk.metrics.reading import LunReading


def reading(**changes: object) -> LunReading:
    values: dict[str, object] = {
        "target": "iqn.x",
        "lun": 0,
        "name": "lun0",
        "url": "iser://host/iqn.x/0",
        "size": 1 << 20,
        "portal": "host:3260",
        "provider": "iwarp",
        "connected": True,
    }
    return LunReading(**{**values, **changes})  # type: ignore[arg-type]


def row(address: str = "/run/a", pid: int = 7, **changes: object) -> Row:
    return Row("where", address, pid, "1", 0.0, reading(**changes))


@pytest.mark.parametrize(
    "other",
    [row(address="/run/b"), row(pid=8), row(lun=1), row(target="iqn.y")],
    ids=["address", "process", "LUN", "target"],
)
def test_rows_of_other_luns_have_other_keys(other: Row) -> None:
    assert other.key != row().key


def test_a_later_row_of_the_lun_has_the_same_key() -> None:
    """Its name, its process's name and its counters may change meanwhile."""
    later = Row("elsewhere", "/run/a", 7, "1", 9.0, reading(name="lun1", retries=5))
    assert later.key == row().key


@pytest.mark.parametrize(
    ("microseconds", "words"),
    [
        (None, "-"),
        (0.0, "0 µs"),
        (999.4, "999 µs"),
        (1000.0, "1.0 ms"),
        (99_900.0, "99.9 ms"),
        (100_000.0, "100 ms"),
        (999_999.0, "1000 ms"),
        (1e6, "1.0 s"),
        (123e6, "123 s"),
    ],
)
def test_times_have_three_digits_at_most(microseconds: float | None, words: str) -> None:
    assert time_words(microseconds) == words


def test_a_terminal_acts_on_nothing_of_it() -> None:
    assert plain("a\x1b]0;title\x07b\rc\u202ed é") == "a?]0;title?b?c?d é"


def test_the_path_of_a_lun() -> None:
    assert path_words(reading()) == "host:3260 (iwarp)"
    assert path_words(reading(connected=False)) == "host:3260 (iwarp), not connected"
    several = reading(connections=1, wanted=4)
    assert path_words(several) == "host:3260 (iwarp), 1 of 4 connections"
    assert path_words(reading(connected=False, wanted=4)) == "host:3260 (iwarp), not connected"
    assert path_words(reading(portal="h\x1b:1", provider="\n")) == "h?:1 (?)"
