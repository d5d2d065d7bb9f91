"""Random operations with random faults, checked by a model that knows what may be read.

The target runs in a thread of this process, behind a proxy with faults, and has a volatile cache
that is smaller than the disk. A failure prints the seed; ISERBLK_MODEL=SEED runs that one alone.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.blocks import Wrong
from tests.model.machine import Machine
from tests.model.playing import (
    DIGESTS,
    FAULTS,
    QUICK,
    TRANSPORTS,
    play,
    replayable,
    scripts,
    seeds,
)
from tests.model.runner import Tally
from tests.model.script import (
    BROKEN,
    CHECKED,
    READ,
    SHORT,
    TOO_LONG,
    TROUBLED,
    WRITE,
    Fault,
    Flush,
    Group,
    Op,
    Reopen,
    Step,
    dense_script,
    random_script,
)
from tests.support.faces import FACES, QUEUE

# Each face, and each transport; the other pairs take the same ways.
WAYS = (("async", "iser"), ("blocking", "iscsi"), (QUEUE, "iser"))
ways = pytest.mark.parametrize(
    ("face", "transport"),
    [
        pytest.param(*way, marks=() if way in WAYS else pytest.mark.long)
        for way in product((*FACES, QUEUE), TRANSPORTS)
    ],
)


@ways
@QUICK
@given(scripts(st.none()), st.integers(0, 1 << 16))
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


@pytest.mark.plain("replaces a method")
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_without_faults(transport: str) -> None:
    for seed in seeds(1):
        replayable(seed, random_script(seed, 1000, 0.0), "async", transport)


# -- with faults, which recovery hides ----------------------------------------------------------

# Whether the disk has a write cache, which a crash loses.
CACHED = (False, True)


@pytest.mark.parametrize("cached", CACHED)
@ways
@settings(QUICK, max_examples=5)
@given(steps=scripts(FAULTS), seed=st.integers(0, 1 << 16))
def test_disasters(
    recovers: None, face: str, transport: str, cached: bool, steps: list[Step], seed: int
) -> None:
    """With an io-timeout far above every outage no operation fails, and nothing is lost."""
    play(steps, seed, face, transport, cached=cached)


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize(("face", "transport"), WAYS)
def test_disasters_by_seed(recovers: None, face: str, transport: str, cached: bool) -> None:
    for seed in seeds(1):
        steps = random_script(seed, 300, 0.2)
        tally = replayable(seed, steps, face, transport, cached=cached)
        assert not tally.errors


@pytest.mark.parametrize(
    ("level", "count", "face", "transport"),
    [
        # In turn; all with each other in a long run.
        pytest.param(*each, *way, marks=() if (at - turn) % len(WAYS) == 0 else pytest.mark.long)
        for at, each in enumerate(((0, 2), (0, 4), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)))
        for turn, way in enumerate(WAYS)
    ],
)
def test_disasters_with_several_connections(
    recovers: None, face: str, transport: str, level: int, count: int
) -> None:
    """One connection is cut, or all are, or the target crashes: nothing is lost, and nothing older
    lands over newer. The last one is reinstated at level 2."""
    options = f"?connections={count}&error-recovery-level={level}"
    for seed in seeds(1):
        steps = random_script(seed, 120, 0.2)
        tally = replayable(seed, steps, face, transport, options, cached=bool(seed & 1))
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
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.2, CHECKED)
        replayable(seed, steps, "async", "iscsi", f"?{DIGESTS}", cached=cached)


@pytest.mark.parametrize("cached", CACHED)
def test_disasters_with_unsolicited_data(recovers: None, cached: bool) -> None:
    """Data-Outs follow each write of up to 64 KiB, whatever else is in flight."""
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.2)
        options = "?unsolicited-data=yes&immediate-data=" + ("yes" if cached else "no")
        tally = replayable(seed, steps, "async", "iser", options, cached=cached)
        assert not tally.errors


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ("?style=stream", 28),
        ("?style=stream&connections=2&error-recovery-level=2", 28),
        ("?style=stream&hello=yes", 28),
        ("?hello=yes", 28),
        ("?style=stream&header=12", 12),
        ("?header=12", 12),
    ],
)
@pytest.mark.parametrize("cached", CACHED)
def test_disasters_with_the_drafts_connections(
    recovers: None, cached: bool, options: str, header: int
) -> None:
    """Each connection, those after an outage, too, begins as the options say."""
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.2)
        tally = replayable(seed, steps, "async", "iser", options, cached=cached, header=header)
        assert not tally.errors


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_target_with_troubles(recovers: None, transport: str, turns: bool) -> None:
    """Temporary errors, flushes that fail, a write cache that is switched on and off. A loss that
    the client could not prevent is reported."""
    for seed in seeds(1):
        steps = random_script(seed, 400, 0.25, TROUBLED, reopens=0.03)
        replayable(seed, steps, "async", transport, turns=turns)


@pytest.mark.parametrize(
    ("transport", "turns"),
    [
        *(("iser", True), ("iscsi", False)),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("iser", False), ("iscsi", True))
        ),
    ],
)
def test_a_cache_that_comes_and_goes(recovers: None, transport: str, turns: bool) -> None:
    for seed in seeds(1):
        replayable(seed, dense_script(seed, 150), "async", transport, turns=turns)


@pytest.mark.parametrize("cached", CACHED)
def test_a_process_that_is_killed(recovers: None, tmp_path: Path, cached: bool) -> None:
    for seed in seeds(1):
        steps = random_script(seed, 100, 0.1)
        replayable(seed, steps, "async", "iser", cached=cached, place=tmp_path)


def test_outages_beyond_io_timeout(recovers: None) -> None:
    """Outages beyond io-timeout: requests fail, and failed writes may be carried out or not."""
    for seed in seeds(1):
        steps = random_script(seed, 40, 0.15, TOO_LONG)
        replayable(seed, steps, "async", "iscsi", "?io-timeout=1", may_fail=True, cached=False)


OPERATIONS, STRIKES = 200_000, 2_000
PER_RUN = 2_000


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_two_hundred_thousand_operations(
    recovers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All faces, both transports, with cache and without; every tenth run has a target process."""
    total, number = Tally(), 0
    while total.operations < OPERATIONS or sum(total.faults.values()) < STRIKES:
        (seed,) = seeds(1)
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
                (*FACES, QUEUE)[number % 3],
                transport,
                f"?{option}" if option else "",
                may_fail=late,
                cached=CACHED[number // 4 % len(CACHED)],
                place=place,
            )
        )
    with capsys.disabled():
        print(f"\n{total.operations} operations, {total.errors} errors, faults: {total.faults}")
