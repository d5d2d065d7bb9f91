"""The same through a gateway: our target between the model and the disk.

The faults are on the way from the gateway to the remote target, and at the remote target.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserblk.disk.aio import TrioDisk
from tests.model.blocks import Wrong
from tests.model.playing import FAULTS, QUICK, TRANSPORTS, play, replayable, scripts, seeds
from tests.model.script import WRITE, Flush, Group, Op, Reopen, Step, random_script
from tests.support.faces import GATEWAY

# In, and out: each way of the gateway.
WAYS = [(f"{GATEWAY} {here}", there) for here in TRANSPORTS for there in TRANSPORTS]
CACHED = (False, True)


@pytest.mark.parametrize(("face", "transport"), WAYS)
@settings(QUICK, max_examples=3)
@given(scripts(st.none()), st.integers(0, 1 << 16))
def test_without_faults_but_for_power(
    face: str, transport: str, steps: list[Step], seed: int
) -> None:
    play(steps, seed, face, transport)


@pytest.mark.parametrize(("face", "transport"), WAYS)
def test_many_operations_without_faults(face: str, transport: str) -> None:
    for seed in seeds(1):
        replayable(seed, random_script(seed, 300, 0.0), face, transport)


LIES: list[Step] = [Group((Op(WRITE, 0, 64), Op(WRITE, 64, 64))), Flush(), Reopen()]


def test_a_flush_that_does_not_come_through_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flush(self: TrioDisk, client: object = None) -> None:
        pass

    play(LIES, 6, GATEWAY, "iser")
    monkeypatch.setattr(TrioDisk, "flush", flush)
    with pytest.raises(ExceptionGroup) as caught:
        play(LIES, 6, GATEWAY, "iser")
    assert caught.group_contains(Wrong)


@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize(("face", "transport"), WAYS)
def test_disasters(recovers: None, face: str, transport: str, cached: bool) -> None:
    """With an io-timeout far above every outage no request fails, and nothing is lost."""
    for seed in seeds(1):
        steps = random_script(seed, 200, 0.2)
        tally = replayable(seed, steps, face, transport, cached=cached)
        assert not tally.errors


@settings(QUICK, max_examples=4)
@given(steps=scripts(FAULTS), seed=st.integers(0, 1 << 16))
def test_short_disasters(recovers: None, steps: list[Step], seed: int) -> None:
    face, transport = WAYS[seed % 4]
    play(steps, seed, face, transport)
