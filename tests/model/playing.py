"""How model tests play a script, and strategies that make scripts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from iserblk.datamover.iser import HEADER_LENGTH
from tests.model.blocks import GRANULE
from tests.model.machine import AnyMachine, machine
from tests.model.runner import Runner, Tally
from tests.model.script import (
    EXTENTS,
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
)

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
    header: int = HEADER_LENGTH,
) -> Tally:
    async def main(made: AnyMachine) -> Tally:
        return await Runner(made, face, options, seed, may_fail).run(steps)

    with machine(SIZE, block, transport, seed, cached, place, turns, header) as made:
        return trio.run(main, made)


def seeds(count: int) -> list[int]:
    given_seed = os.environ.get(REPLAY)
    if given_seed:
        return [int(given_seed, 0)]
    return [int.from_bytes(os.urandom(4), "big") for _ in range(count)]


def replayable(seed: int, steps: list[Step], *words: Any, **more: Any) -> Tally:
    try:
        return play(steps, seed, *words, **more)
    except Exception as error:
        raise AssertionError(f"again with {REPLAY}={seed}") from error


# -- hypothesis: short scripts, which shrink ----------------------------------------------------

_OPS = st.builds(
    Op,
    st.sampled_from([READ, WRITE, WRITE, ZERO, TRIM, EXTENTS]),
    st.integers(0, 100),
    st.sampled_from([1, 3, 8, 16, 40]),
    st.booleans(),
)


def scripts(faults: st.SearchStrategy[Fault | None]) -> st.SearchStrategy[list[Step]]:
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

FAULTS = st.none() | st.builds(
    Fault,
    st.sampled_from(["rst", "fin", "after up", "after down", "crash", "power"]),
    st.integers(0, 30_000),
)
