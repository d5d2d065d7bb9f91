"""LIO's write cache is lost, and LIO reports nothing: iSER over RDMA (rxe)."""

from __future__ import annotations

import pytest

from tests.lab.guest.lio_cache import lossy
from tests.support import logs, lost_cache
from tests.support.interop import Record

pytestmark = pytest.mark.logs(
    logs.RECONNECTED, logs.LOST_POWER, logs.LOST_WRITES, logs.ONE_OF_SEVERAL, logs.DEADLINES
)


async def test_what_a_new_nexus_hears() -> None:
    """Nothing of a loss; 3F/0E (the list of LUNs has changed) may come."""
    with lossy() as peer:
        heard = await peer.heard(rcap="verbs")
    assert not [code for each in heard for code in each if code != "3F/0E"]


@pytest.mark.parametrize(
    ("name", "connections"),
    [("journal", 1), ("journal", 2), ("journal=off", 1), ("journal=off", 2), ("shared=yes", 1)],
)
async def test_its_cache_is_lost(record: Record, name: str, connections: int) -> None:
    case = lost_cache.CASES[name]
    case = case._replace(options={**case.options, "rcap": "verbs"})
    with lossy(connections) as peer:
        await lost_cache.loses_its_cache(peer.url, peer.medium, peer.lose, case, connections)
    record(
        ours="initiator, pyverbs",
        peer="LIO isert on rxe",
        transport=f"RoCE v2, connections={connections}",
        ran=f"what it had not flushed is lost, and it reports nothing: {case.ran}",
    )
