"""A LUN behind two portal groups of LIO's target: one speaks iSER, the other one TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import trio

from tests.lab.guest import lio
from tests.support import logs
from tests.support.endurance import Clients, disk_and_session, fail_back_soon, reaches
from tests.support.interop import Record
from tests.support.until import all_ended

pytestmark = pytest.mark.logs(
    logs.RECONNECTED, logs.ANOTHER_PORTAL, logs.RESERVATION, logs.LOST_POWER
)

CLIENTS = 4
in_thread = trio.to_thread.run_sync


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[lio.Groups]:
    """Two portal groups; a disk goes back to the better portal soon."""
    fail_back_soon(monkeypatch)
    made = lio.Groups()
    made.make()
    yield made
    made.enable(0)
    made.remove()


@pytest.mark.parametrize(("face", "reserve"), [("async", ""), ("blocking", "exclusive")])
async def test_tcp_takes_over(groups: lio.Groups, face: str, reserve: str, record: Record) -> None:
    """Under load the disk uses TCP while the iSER portal is away."""
    options = {"io-timeout": "120"} | ({"reserve": reserve} if reserve else {})
    ways = f"{groups.urls[0]}?rcap=verbs", groups.urls[1]
    async with disk_and_session(face, ways[0], options, ways[1]) as (disk, session):
        assert session.describe()["provider"] == "verbs"
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            await in_thread(groups.disable, 0)
            await reaches(session, groups.portals[1])
            assert session.describe()["provider"] == "tcp"
            await clients.progress()
            await in_thread(groups.enable, 0)
            await reaches(session, groups.portals[0])
            await clients.progress()
        assert session.describe()["provider"] == "verbs"
        assert session.counts.reconnects == 2 and session.error is None
        await all_ended(session.queue)
        assert bool(reserve) == (os.environ["LAB_INITIATOR"] in lio.reservation())
    assert "No SPC-3 Reservation holder" in lio.reservation()
    record(
        ours=f"initiator, pyverbs, {face} face",
        peer="LIO isert on rxe, LIO",
        transport="RoCE v2, TCP",
        ran="two portal groups: the iSER portal is disabled under load, the TCP portal takes over; "
        "and back" + (", with reserve=exclusive" if reserve else ""),
    )
