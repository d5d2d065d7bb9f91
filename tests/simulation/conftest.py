"""Fixtures of the simulation's tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def silent() -> Iterator[None]:
    """Nothing is logged: thousands of lines of lost connections."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
