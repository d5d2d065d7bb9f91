"""A step of a state table."""

from __future__ import annotations

import logging
from enum import StrEnum

import pytest

from iserblk.errors import LocalProtocolError
from iserblk.state_tables import step


class _State(StrEnum):
    SHUT = "shut"
    OPEN = "open"


class _Event(StrEnum):
    PUSH = "push"


TABLE = {(_State.SHUT, _Event.PUSH): _State.OPEN}


def test_a_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "iserblk.state_tables"):
        assert step(TABLE, "the door", _State.SHUT, _Event.PUSH) is _State.OPEN
    assert caplog.messages == ["the door: push; it was shut, and is open"]


def test_what_the_table_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG, "iserblk.state_tables"),
        pytest.raises(LocalProtocolError, match="the door that is open cannot take: push"),
    ):
        step(TABLE, "the door", _State.OPEN, _Event.PUSH)
    assert not caplog.messages
