"""Logins whose connection breaks at any byte leave nothing open."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest
import trio

from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.target.scsi.device import LogicalUnit
from iserblk.url import split_url
from tests.simulation.running import Simulation
from tests.support.target_here import serve
from tests.support.until import until
from tests.target.fake_store import FakeStore

IQN = "iqn.2026-11.example:disk"
PLACE = "10.0.0.2:3260"
LONGEST = 900  # bytes that a login takes in either direction
TRIALS = 60
PATIENCE_S = 600.0  # of made-up time

pytestmark = pytest.mark.usefixtures("silent")


@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("style", ["cm", "stream", "iscsi"])
def test_nothing_stays_open(style: str, connections: int) -> None:
    simulation = Simulation(f"{style} {connections}")
    network, loop = simulation.network, simulation.loop
    chance = Random(style)
    scheme = "iscsi" if style == "iscsi" else "iser"
    url = split_url(f"{scheme}://{PLACE}/{IQN}/0")
    options = Options(initiator_name="iqn.2026-11.example:initiator", connections=connections)
    if style != "iscsi":
        options = replace(options, style=style)
    outcomes: list[bool] = []

    def cut_later() -> None:
        """The connection that has just been made breaks behind so many bytes."""
        line = network.lines[-1]
        network.limit(line[chance.randrange(2)], chance.randint(1, LONGEST))

    async def body() -> None:
        async with trio.open_nursery() as nursery:
            ready = trio.Event()
            unit = LogicalUnit(FakeStore(1 << 20), serial="LOGIN", block=512, write_cache=False)
            nursery.start_soon(serve, PLACE, IQN, {0: unit}, lambda _url: ready.set())
            await ready.wait()
            before = loop.open
            network.on_line = cut_later
            for _ in range(TRIALS):
                try:
                    session = await connect(url, options)
                except IserblkError:
                    outcomes.append(False)
                else:
                    outcomes.append(True)
                    session.fail(ConnectionLost("the test ends it"))
                    del session
                with trio.fail_after(PATIENCE_S):
                    await until(lambda: loop.open == before)
            nursery.cancel_scope.cancel()

    gc.disable()
    try:
        simulation.run(body)
    finally:
        gc.enable()
    assert set(outcomes) == {False, True}
    assert loop.open == loop.watched == 0
