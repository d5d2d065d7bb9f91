"""The same through NBD's wire: our NBD server between the model and the disk.

Clients of all forms share an export. See tests/support/nbd_disk.py for what they do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserblk.disk.aio import TrioDisk
from iserblk.nbd.transmission import Request, Transmission
from tests.model.blocks import Wrong
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
    Flush,
    Group,
    Op,
    Reopen,
    Step,
    dense_script,
    random_script,
)
from tests.nbd import conversation
from tests.support.faces import NBD, NBD_FORMS
from tests.support.nbd_disk import Breach

# Granules: writes of more than 64 KiB, too, whose data lands in a buffer of its own.
MOST = 320
CACHED = (False, True)


@pytest.mark.parametrize("face", [NBD, *NBD_FORMS])
@settings(QUICK, max_examples=4)
@given(scripts(st.none()), st.integers(0, 1 << 16))
def test_without_faults_but_for_power(face: str, steps: list[Step], seed: int) -> None:
    play(steps, seed, face, TRANSPORTS[seed % 2])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_without_faults(transport: str) -> None:
    for seed in seeds(1):
        replayable(seed, random_script(seed, 1000, 0.0, most=MOST), NBD, transport)


# -- the model catches a server that lies ---------------------------------------------------------

LIES: list[Step] = [Group((Op(WRITE, 0, 64), Op(WRITE, 64, 64))), Flush(), Reopen()]
READS: list[Step] = [Group(tuple(Op(WRITE, at, 8) for at in range(0, 128, 8)))]
READS += [Group(tuple(Op(READ, at, 8) for at in range(0, 128, 8)))]


def test_a_flush_that_does_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flush(self: TrioDisk, client: object = None) -> None:
        pass

    play(LIES, 6, NBD, "iser")
    monkeypatch.setattr(TrioDisk, "flush", flush)
    with pytest.raises(Wrong):
        play(LIES, 6, NBD, "iser")


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("face", NBD_FORMS)
def test_answers_that_are_exchanged_are_caught(monkeypatch: pytest.MonkeyPatch, face: str) -> None:
    """Two reads of one length on one connection."""
    real = Transmission.reply
    kept: dict[Transmission, Request] = {}
    exchanged = False

    def reply(self: Transmission, request: Request) -> None:
        nonlocal exchanged
        if exchanged or request.command != conversation.READ:
            real(self, request)
        elif self not in kept:
            kept[self] = request
        else:
            exchanged = True
            first = kept.pop(self)
            first.cookie, request.cookie = request.cookie, first.cookie
            for each in (first, request):
                real(self, each)
            for other, waiting in kept.items():
                real(other, waiting)

    play(READS, 6, face, "iser")
    monkeypatch.setattr(Transmission, "reply", reply)
    with pytest.raises(ExceptionGroup) as caught:
        play(READS, 6, face, "iser")
    assert exchanged
    assert caught.group_contains((Wrong, Breach))


# -- with faults, which recovery hides ------------------------------------------------------------


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(QUICK, max_examples=5)
@given(steps=scripts(FAULTS), seed=st.integers(0, 1 << 16))
def test_disasters(
    recovers: None, transport: str, cached: bool, steps: list[Step], seed: int
) -> None:
    """With an io-timeout far above every outage no request fails, and nothing is lost."""
    play(steps, seed, NBD, transport, cached=cached)


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_disasters_by_seed(recovers: None, transport: str, cached: bool) -> None:
    for seed in seeds(1):
        steps = random_script(seed, 300, 0.2, most=MOST)
        tally = replayable(seed, steps, NBD, transport, cached=cached)
        assert not tally.errors


def test_disasters_with_digests(recovers: None) -> None:
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.2, CHECKED, most=MOST)
        replayable(seed, steps, NBD, "iscsi", f"?{DIGESTS}")


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_target_with_troubles(recovers: None, transport: str, turns: bool) -> None:
    """Temporary errors, flushes that fail, a write cache that is switched on and off. A loss that
    the server could not prevent is an error for the client."""
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.25, TROUBLED, reopens=0.03)
        replayable(seed, steps, NBD, transport, turns=turns)


@pytest.mark.parametrize("turns", [False, True])
def test_a_cache_that_comes_and_goes(recovers: None, turns: bool) -> None:
    for seed in seeds(1):
        replayable(seed, dense_script(seed, 80), NBD, TRANSPORTS[seed % 2], turns=turns)


def test_a_process_that_is_killed(recovers: None, tmp_path: Path) -> None:
    for seed in seeds(1):
        steps = random_script(seed, 100, 0.1, most=MOST)
        replayable(seed, steps, NBD, "iser", place=tmp_path)


def test_outages_beyond_io_timeout(recovers: None) -> None:
    """Outages beyond io-timeout: requests fail with EIO, and failed writes may be carried out or
    not."""
    for seed in seeds(1):
        steps = random_script(seed, 40, 0.15, TOO_LONG)
        replayable(seed, steps, NBD, "iscsi", "?io-timeout=1", may_fail=True, cached=False)


OPERATIONS = 100_000
PER_RUN = 2_000


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_operations(
    recovers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every form and all of them together, both transports, with cache and without; every tenth run
    has a target process, every eighth outages that last too long, every fifth one's target reports
    errors."""
    total, number = Tally(), 0
    while total.operations < OPERATIONS:
        (seed,) = seeds(1)
        number += 1
        words = [
            (NBD, *NBD_FORMS)[number % 4],
            TRANSPORTS[number // 2 % 2],
        ]
        more: dict[str, object] = {"cached": CACHED[number // 4 % 2]}
        if number % 8 == 1:
            worst = BROKEN if words[1] == "iscsi" else TOO_LONG
            steps = random_script(seed, PER_RUN // 8, 0.13, (worst, TOO_LONG)[number // 8 % 2])
            words.append("?io-timeout=1")
            more["may_fail"] = True
        elif number % 5 == 0:
            steps = random_script(seed, PER_RUN, 0.25, TROUBLED, reopens=0.03)
            more = {"turns": number % 2 == 0}
        else:
            checked = words[1] == "iser" or number % 3 == 0
            steps = random_script(seed, PER_RUN, 0.13, CHECKED if checked else SHORT, most=MOST)
            words.append(f"?{DIGESTS}" if checked and words[1] == "iscsi" else "")
            if number % 10 == 3:
                more["place"] = tmp_path / str(number)
                (tmp_path / str(number)).mkdir()
        total.add(replayable(seed, steps, *words, **more))
    with capsys.disabled():
        print(f"\n{total.operations} operations, {total.errors} errors, faults: {total.faults}")
