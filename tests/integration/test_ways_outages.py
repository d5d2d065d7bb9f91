"""Front-ends with two portals in two portal groups, while one of them becomes a black hole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.test_outages import (
    FRONT_ENDS,
    NBD,
    REGION,
    front_end,
    report,
    verify_for,
)
from tests.support import fio
from tests.support.faults.behaviours import Gate
from tests.support.outages import Outages
from tests.support.ported import Ported, ported_target

SHORT_S, LONG_S = 10.0, 120.0
UP_S, DOWN_S = 1.5, 20.0  # seconds; a ping finds the black hole before it ends
SIZE = fio.JOBS * REGION


@contextmanager
def black_holes(ported: Ported) -> Iterator[Outages]:
    """Let each portal in turn swallow everything for a while, new connections too."""
    turn = 0

    def strike() -> None:
        proxy = (ported.one, ported.two)[turn]
        proxy.plan = lambda _number: ([_closed()], [])
        proxy.cut("black hole")

    def mend() -> None:
        nonlocal turn
        (ported.one, ported.two)[turn].plan = lambda _number: ([], [])
        turn = 1 - turn

    with Outages(strike, mend, UP_S, DOWN_S) as outages:
        yield outages


def _closed() -> Gate:
    gate = Gate()
    gate.closed = True
    return gate


def _swallowed(seconds: float, place: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        ported_target(place, size=SIZE) as ported,
        front_end(kind, ported.urls(), place, ("io-timeout=60",)) as engine,
        black_holes(ported) as outages,
    ):
        rounds, slowest = verify_for(seconds, engine)
        assert outages.count and ported.two.links
    report(capsys, f"{kind}: {outages.count} black holes, {rounds} rounds of fio,",
           f"longest pause {slowest:.2f} s")  # fmt: skip


@pytest.mark.parametrize("kind", NBD)
def test_black_hole(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    _swallowed(SHORT_S, tmp_path, kind, capsys)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", FRONT_ENDS)
def test_black_holes_for_two_minutes(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _swallowed(LONG_S, tmp_path, kind, capsys)
