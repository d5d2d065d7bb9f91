"""Fixtures of the model tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from iserblk.initiator import reconnecting


@pytest.fixture
def recovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions connect again after short pauses."""
    for name, seconds in (("FIRST_PAUSE_S", 0.005), ("MOST_PAUSE_S", 0.1), ("ADOPTED_S", 0.002)):
        monkeypatch.setattr(reconnecting, name, seconds)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
