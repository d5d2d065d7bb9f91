"""Benches of sessions with several connections."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.initiator.several import Bench
from tests.support.clocks import Clock


@pytest.fixture(autouse=True)
def _made_up_time(clock: Clock) -> None:
    """These tests say what time it is."""


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


@pytest.fixture
def two(benches: list[Bench]) -> Bench:
    benches.append(Bench(2))
    return benches[0]


@pytest.fixture
def level2(benches: list[Bench]) -> Bench:
    benches.append(Bench(2, error_recovery_level=2, default_time2wait=0))
    benches[0].reconnectable()
    return benches[0]
