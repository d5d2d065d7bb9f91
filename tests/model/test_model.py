"""Random work with random disasters, beside a model that knows what may be read.

The target runs in a thread of this process, behind a proxy with faults, and has a volatile cache
that is smaller than the disk. A failure prints the seed; ISERBLK_MODEL=SEED runs that one alone.
"""

from __future__ import annotations

import os

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.model.blocks import GRANULE, Wrong
from tests.model.machine import Machine, machine
from tests.model.runner import Runner, Tally
from tests.model.script import (
    GRANULES,
    READ,
    TRIM,
    WRITE,
    ZERO,
    Fault,
    Flush,
    Group,
    Op,
    Reopen,
    Step,
    random_script,
)
from tests.support.faces import FACES

REPLAY = "ISERBLK_MODEL"
TRANSPORTS = ("iser", "iscsi")
SIZE = GRANULES * GRANULE


def play(
    steps: list[Step],
    seed: object,
    face: str,
    transport: str,
    options: str = "",
    may_fail: bool = False,
    block: int = 4096,
) -> Tally:
    async def main(made: Machine) -> Tally:
        return await Runner(made, face, options, may_fail).run(steps)

    with machine(SIZE, block, transport, seed) as made:
        return trio.run(main, made)


# -- hypothesis: short scripts, which shrink ----------------------------------------------------

_OPS = st.builds(
    Op,
    st.sampled_from([READ, WRITE, WRITE, ZERO, TRIM]),
    st.integers(0, 100),
    st.sampled_from([1, 3, 8, 16, 40]),
    st.booleans(),
)


def _scripts(faults: st.SearchStrategy[Fault | None]) -> st.SearchStrategy[list[Step]]:
    groups = st.builds(
        Group, st.lists(_OPS, min_size=1, max_size=6).map(tuple), faults, st.integers(0, 4)
    )
    return st.lists(groups | groups | st.builds(Flush, faults) | st.just(Reopen()), max_size=12)


QUICK = settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("face", FACES)
@QUICK
@given(_scripts(st.none()), st.integers(0, 1 << 16))
def test_without_faults_but_for_power(
    face: str, transport: str, steps: list[Step], seed: int
) -> None:
    play(steps, seed, face, transport)


# -- the model catches a target that lies ---------------------------------------------------------


def _lying(monkeypatch: pytest.MonkeyPatch, name: str, lie: object) -> None:
    monkeypatch.setattr(f"iserblk.target.volatile.VolatileStore.{name}", lie)


OVERWRITES: list[Step] = [
    Group((Op(WRITE, 0, 64),)),
    Flush(),
    Group((Op(WRITE, 0, 64),)),
    Group((Op(READ, 0, 64),)),
    Flush(),
    Reopen(),
    Group((Op(READ, 0, 64),)),
]


def test_a_flush_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _lying(monkeypatch, "flush", lambda self: None)
    with pytest.raises(ExceptionGroup) as caught:
        play(OVERWRITES, 6, "async", "iser")
    assert caught.group_contains(Wrong)


def test_a_write_that_is_dropped_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Machine.start

    def start(self: Machine) -> None:
        write, count = self._cache.write, iter(range(1000))
        self._cache.write = (  # type: ignore[method-assign]
            lambda *words: True if next(count) == 1 else write(*words)
        )
        real(self)

    monkeypatch.setattr(Machine, "start", start)
    with pytest.raises(ExceptionGroup) as caught:
        play(OVERWRITES, 0, "async", "iser")
    assert caught.group_contains(Wrong)


def _seeds(count: int) -> list[int]:
    given_seed = os.environ.get(REPLAY)
    if given_seed:
        return [int(given_seed, 0)]
    return [int.from_bytes(os.urandom(4), "big") for _ in range(count)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_without_faults(transport: str) -> None:
    for seed in _seeds(1):
        try:
            play(random_script(seed, 1000, 0.0), seed, "async", transport)
        except Exception as error:
            raise AssertionError(f"again with {REPLAY}={seed}") from error
