"""LIO's write cache is lost, and LIO reports nothing: over Traditional iSCSI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.guest import lio
from tests.lab.guest.lio_cache import lossy
from tests.support import logs, lost_cache
from tests.support.interop import Record

pytestmark = pytest.mark.logs(
    logs.RECONNECTED, logs.LOST_POWER, logs.LOST_WRITES, logs.ONE_OF_SEVERAL, logs.DEADLINES
)


@pytest.fixture(autouse=True)
def without_chap() -> Iterator[None]:
    with lio.without_chap():
        yield


async def test_what_a_new_nexus_hears() -> None:
    """Nothing of a loss; 3F/0E (the list of LUNs has changed) may come."""
    with lossy() as peer:
        heard = await peer.heard()
    assert not [code for each in heard for code in each if code != "3F/0E"]


@pytest.mark.parametrize(
    ("name", "connections"),
    [("journal", 1), ("journal", 2), ("journal=off", 1), ("journal=off", 2), ("shared=yes", 1)],
)
async def test_its_cache_is_lost(record: Record, name: str, connections: int) -> None:
    case = lost_cache.CASES[name]
    with lossy(connections) as peer:
        await lost_cache.loses_its_cache(peer.url, peer.medium, peer.lose, case, connections)
    record(
        ours="initiator",
        peer="LIO",
        transport=f"TCP, connections={connections}",
        ran=f"what it had not flushed is lost, and it reports nothing: {case.ran}",
    )


async def test_a_pause_that_loses_nothing() -> None:
    """What ``shared=yes`` reads back is all there: no flush fails."""
    with lossy() as peer:
        await lost_cache.loses_nothing(peer.url, peer.medium, peer.lose_nothing, {"shared": "yes"})
