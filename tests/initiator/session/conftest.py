"""Benches of sessions with several connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.initiator.several import Bench


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()
