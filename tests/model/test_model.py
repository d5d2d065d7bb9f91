"""Random operations with random faults, checked by a model that knows what may be read.

The target runs in a thread of this process, behind a proxy with faults, and has a volatile cache
that is smaller than the disk. A failure prints the seed; ISERBLK_MODEL=SEED runs that one alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iserblk.initiator import reconnecting
from tests.model.blocks import GRANULE, Wrong
from tests.model.machine import AnyMachine, Machine, machine
from tests.model.runner import Runner, Tally
from tests.model.script import (
    BROKEN,
    CHECKED,
    EXTENTS,
    GRANULES,
    READ,
    SHORT,
    TOO_LONG,
    TRIM,
    TROUBLED,
    WRITE,
    ZERO,
    Fault,
    Flush,
    Group,
    Op,
    Reopen,
    Step,
    dense_script,
    random_script,
)
from tests.support.faces import FACES

REPLAY = "ISERBLK_MODEL"
TRANSPORTS = ("iser", "iscsi")
SIZE = GRANULES * GRANULE
DIGESTS = "header_digest=crc32c&data_digest=crc32c"


def play(
    steps: list[Step],
    seed: object,
    face: str,
    transport: str,
    options: str = "",
    may_fail: bool = False,
    block: int = 4096,
    cached: bool = True,
    place: Path | None = None,
    turns: bool = False,
) -> Tally:
    async def main(made: AnyMachine) -> Tally:
        return await Runner(made, face, options, may_fail).run(steps)

    with machine(SIZE, block, transport, seed, cached, place, turns) as made:
        return trio.run(main, made)


# -- hypothesis: short scripts, which shrink ----------------------------------------------------

_OPS = st.builds(
    Op,
    st.sampled_from([READ, WRITE, WRITE, ZERO, TRIM, EXTENTS]),
    st.integers(0, 100),
    st.sampled_from([1, 3, 8, 16, 40]),
    st.booleans(),
)


def _scripts(faults: st.SearchStrategy[Fault | None]) -> st.SearchStrategy[list[Step]]:
    groups = st.builds(
        Group,
        st.lists(_OPS, min_size=1, max_size=6).map(tuple),
        faults,
        st.integers(0, 4),
        st.sampled_from([0, 0, 3]),
    )
    return st.lists(groups | groups | st.builds(Flush, faults) | st.just(Reopen()), max_size=12)


QUICK = settings(
    max_examples=6,
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
    monkeypatch.setattr(f"iserblk.target.store.volatile.VolatileStore.{name}", lie)


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
        assert self._cache is not None
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


def replayable(seed: int, steps: list[Step], *words: Any, **more: Any) -> Tally:
    try:
        return play(steps, seed, *words, **more)
    except Exception as error:
        raise AssertionError(f"again with {REPLAY}={seed}") from error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_without_faults(transport: str) -> None:
    for seed in _seeds(1):
        replayable(seed, random_script(seed, 1000, 0.0), "async", transport)


# -- with faults, which recovery hides ----------------------------------------------------------


@pytest.fixture
def recovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sessions connect again after short pauses."""
    for name, seconds in (("FIRST_PAUSE_S", 0.005), ("MOST_PAUSE_S", 0.1), ("ADOPTED_S", 0.002)):
        monkeypatch.setattr(reconnecting, name, seconds)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


_FAULTS = st.none() | st.builds(
    Fault,
    st.sampled_from(["rst", "fin", "after up", "after down", "crash", "power"]),
    st.integers(0, 30_000),
)
# Whether the disk has a write cache, which a crash loses.
CACHED = (False, True)


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("face", FACES)
@settings(QUICK, max_examples=5)
@given(steps=_scripts(_FAULTS), seed=st.integers(0, 1 << 16))
def test_disasters(
    recovers: None, face: str, transport: str, cached: bool, steps: list[Step], seed: int
) -> None:
    """With an io-timeout far above every outage no operation fails, and nothing is lost."""
    play(steps, seed, face, transport, cached=cached)


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize(("face", "transport"), [("async", "iser"), ("blocking", "iscsi")])
def test_disasters_by_seed(recovers: None, face: str, transport: str, cached: bool) -> None:
    for seed in _seeds(1):
        steps = random_script(seed, 300, 0.2)
        tally = replayable(seed, steps, face, transport, cached=cached)
        assert not tally.errors


def test_without_the_journal_a_loss_is_noticed(recovers: None) -> None:
    """Without a journal a power failure loses data: the model sees it, or the flush fails."""
    lost: list[Step] = [
        Group((Op(WRITE, 0, 64),)),
        Group((Op(READ, 100, 1),), Fault("power")),
        Group((Op(READ, 0, 64),)),
        Flush(),
    ]
    play(lost, 6, "async", "iser")
    with pytest.raises((AssertionError, ExceptionGroup)):
        play(lost, 6, "async", "iser", "?journal=off")


@pytest.mark.parametrize("cached", CACHED)
def test_disasters_with_digests(recovers: None, cached: bool) -> None:
    for seed in _seeds(1):
        steps = random_script(seed, 200, 0.2, CHECKED)
        replayable(seed, steps, "async", "iscsi", f"?{DIGESTS}", cached=cached)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_target_with_troubles(recovers: None, transport: str, turns: bool) -> None:
    """Temporary errors, flushes that fail, a write cache that is switched on and off. A loss that
    the client could not prevent is reported."""
    for seed in _seeds(1):
        steps = random_script(seed, 400, 0.25, TROUBLED, reopens=0.03)
        replayable(seed, steps, "async", transport, turns=turns)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cache_that_comes_and_goes(recovers: None, transport: str, turns: bool) -> None:
    for seed in _seeds(1):
        replayable(seed, dense_script(seed, 150), "async", transport, turns=turns)


@pytest.mark.parametrize("cached", CACHED)
def test_a_process_that_is_killed(recovers: None, tmp_path: Path, cached: bool) -> None:
    for seed in _seeds(1):
        steps = random_script(seed, 100, 0.1)
        replayable(seed, steps, "async", "iser", cached=cached, place=tmp_path)


def test_outages_beyond_io_timeout(recovers: None) -> None:
    """Outages beyond io-timeout: requests fail, and failed writes may be carried out or not."""
    for seed in _seeds(1):
        steps = random_script(seed, 40, 0.15, TOO_LONG)
        replayable(seed, steps, "async", "iscsi", "?io-timeout=1", may_fail=True, cached=False)


OPERATIONS, FAULTS = 200_000, 2_000
PER_RUN = 2_000


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_thousand_operations(
    recovers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both faces, both transports, with cache and without; every tenth run has a target process."""
    total, number = Tally(), 0
    while total.operations < OPERATIONS or sum(total.faults.values()) < FAULTS:
        (seed,) = _seeds(1)
        number += 1
        place = None
        if number % 10 == 0:
            place = tmp_path / str(number)
            place.mkdir()
        transport = TRANSPORTS[number // 2 % 2]
        kinds = [(SHORT, ""), (CHECKED, DIGESTS if transport == "iscsi" else "")]
        late = number % 8 == 1
        if late:
            worst = BROKEN if transport == "iscsi" else TOO_LONG
            kinds = [(worst, "io-timeout=1"), (TOO_LONG, "io-timeout=1")]
        chosen, option = kinds[number // 8 % 2]
        total.add(
            replayable(
                seed,
                random_script(seed, PER_RUN if not late else PER_RUN // 8, 0.13, chosen),
                FACES[number % 2],
                transport,
                f"?{option}" if option else "",
                may_fail=late,
                cached=CACHED[number // 4 % len(CACHED)],
                place=place,
            )
        )
    with capsys.disabled():
        print(f"\n{total.operations} operations, {total.errors} errors, faults: {total.faults}")
