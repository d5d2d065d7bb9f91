"""Text that no format shows."""

from __future__ import annotations

import json

import pytest

from iserblk.secret import Secret

PLAIN = "correct horse"


@pytest.mark.parametrize(
    "shown",
    [
        str(Secret(PLAIN)),
        repr(Secret(PLAIN)),
        f"{Secret(PLAIN)}",
        f"{Secret(PLAIN)!r}",
        f"{[Secret(PLAIN)]}",
        "%s" % Secret(PLAIN),  # noqa: UP031
        json.dumps({"secret": Secret(PLAIN)}, default=str),
    ],
)
def test_it_is_not_shown(shown: str) -> None:
    assert "***" in shown and "correct" not in shown


def test_it_is_revealed_where_it_is_asked_for() -> None:
    assert Secret(PLAIN).reveal() == PLAIN


def test_it_is_false_when_empty() -> None:
    assert Secret(PLAIN) and not Secret()


def test_equality_is_of_the_text() -> None:
    assert Secret(PLAIN) == Secret(PLAIN) != Secret("battery staple")
    assert Secret(PLAIN) != PLAIN


def test_bytes_that_are_no_text_can_be_compared() -> None:
    undecodable = b"\xff\xfe".decode(errors="surrogateescape")
    assert Secret(undecodable) == Secret(undecodable) != Secret(PLAIN)


def test_its_hash_tells_nothing() -> None:
    assert hash(Secret(PLAIN)) == hash(Secret("battery staple"))


def test_it_has_no_attribute_that_a_debugger_prints_by_itself() -> None:
    assert not hasattr(Secret(PLAIN), "__dict__")
