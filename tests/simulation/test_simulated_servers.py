"""NBD servers of a simulated world that succeed each other, and what their client is told."""

from __future__ import annotations

import pytest

from tests.simulation.cases import Case
from tests.simulation.network import PlainSocket
from tests.simulation.playing import played, played_twice
from tests.simulation.running import Simulation
from tests.simulation.servers import NOT_DRAINED, NOT_OPENED, STATES

pytestmark = pytest.mark.usefixtures("silent")
OPERATIONS = 150
SERVERS = (
    *(("succession", "yes"), ("between", "5")),
    *(("scheme", "iscsi"), ("connections", "1")),  # the quickest
)


def test_a_case_does_the_same_again() -> None:
    case = Case(2, OPERATIONS, settings=SERVERS)
    first = played_twice(case)
    assert first.settings.front == "nbd"


def test_hand_overs_alone_lose_nothing() -> None:
    settings = (("fault-kinds", "hand-over"), ("between", "5"), ("journal", "off"))
    result = played(Case(3, OPERATIONS, settings=settings))
    assert set(result.faults) == {"hand-over"}
    assert result.losses == 0 and result.states["hand-over: done"] > 0


def test_all_of_it_is_reached() -> None:
    """(That requests take too long, or that the LUN cannot be opened, is rare.)"""
    states = set(STATES) - {NOT_DRAINED, NOT_OPENED}
    settings = (*SERVERS, ("journal", "off"), ("mix", "hoards"), ("hearers", "4"))
    for seed in (22, 28, *range(2, 20)):  # the first ones are likely to do
        result = played(Case(seed, OPERATIONS, settings=settings))
        states -= {state for state, times in result.states.items() if times}
        if not states:
            return
    pytest.fail(f"never reached: {states}")


def test_a_connection_ends_with_its_last_descriptor() -> None:
    """As a socket that another process has, too."""

    async def body() -> None:
        here, there = simulation.network.pair()
        copy = there.copy()
        assert isinstance(copy, PlainSocket) and copy.fileno() != there.fileno()
        there.close()
        assert there.fileno() == -1
        here.sendall(b"to the copy")
        await simulation.loop.until_readable(copy)
        assert copy.recv(100) == b"to the copy"
        copy.close()
        await simulation.loop.until_readable(here)
        assert here.recv(100) == b""
        here.close()

    simulation = Simulation()
    simulation.run(body)
    assert not simulation.loop.open
