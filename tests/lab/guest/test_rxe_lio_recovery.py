"""LIO's target goes away and comes back under load."""

from __future__ import annotations

import functools
import os
import subprocess
import time

import pytest
import trio

from iserblk.rcap.verbs import connecting
from tests.cli.commands import bad, good
from tests.lab.guest import lio
from tests.lab.guest.attached import DEVICE, attached, nothing_left
from tests.support import logs
from tests.support.endurance import Clients, disk_and_session
from tests.support.interop import Record
from tests.support.programs import SLOW_S
from tests.support.until import all_ended

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.LOST_POWER, logs.RESERVATION)

TURNS = 5
CLIENTS = 8
OPTIONS = {"rcap": "verbs", "io-timeout": "120"}
in_thread = trio.to_thread.run_sync


def of_connections() -> dict[str, int]:
    """RDMA objects without memory regions: their number grows with commands in flight. A connection
    that was not freed would show by its protection domain."""
    found = lio.rdma_objects()
    del found["mr"]
    return found


@pytest.fixture
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which every connection advertises memory: region or window."""
    connector = functools.partial(connecting.VerbsConnector, mode=request.param)
    monkeypatch.setattr(connecting, "VerbsConnector", connector)
    made: str = request.param
    return made


# shows: SYSTEM-39
@pytest.mark.parametrize(
    ("mode", "face"), [("window", "async"), ("region", "blocking")], indirect=["mode"]
)
async def test_the_portal_group_is_disabled_and_enabled(
    mode: str, face: str, record: Record
) -> None:
    before = await in_thread(lio.rdma_objects)
    async with disk_and_session(face, os.environ["LAB_URL"], OPTIONS) as (disk, session):
        opened = await in_thread(of_connections)
        assert opened["cm_id"] == before["cm_id"] + 1
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            for turn in range(TURNS):
                await in_thread(lio.disable)
                if turn % 2:  # some attempts are refused
                    await in_thread(lio.remove_portal)
                    await trio.sleep(0.5)
                    await in_thread(lio.add_portal)
                await in_thread(lio.enable)
                await clients.progress(turn + 1)
        assert session.counts.reconnects == TURNS and session.counts.replayed > 0
        assert session.error is None
        await all_ended(session.queue)
        assert await in_thread(lio.settled, opened, of_connections) == opened
    assert await in_thread(lio.settled, before) == before
    record(
        ours=f"initiator, pyverbs, {mode} mode, {face} face",
        peer="LIO isert on rxe",
        transport="RoCE v2",
        ran=f"portal group disabled and enabled {TURNS} times under load: a pause each",
    )


def test_a_reservation_is_kept(record: Record) -> None:
    """The reservation is kept while the target is away, and until the device is detached."""
    url = f"{os.environ['LAB_URL']}?rcap=verbs"
    other = f"{url}&initiator-name=iqn.2026-11.lab:other"
    words = "another initiator has reserved"
    with attached(url, DEVICE, "-o", "reserve=exclusive,io-timeout=120"):
        held = lio.reservation()
        assert os.environ["LAB_INITIATOR"] in held
        assert words in bad(28, "trim", other, "--length", "1M")
        writing = subprocess.Popen(
            ["dd", "if=/dev/urandom", f"of={DEVICE}", "bs=256k", "count=64", "oflag=direct"]
        )
        for _ in range(3):
            lio.disable()
            lio.enable()
            time.sleep(1)
        assert writing.wait(SLOW_S) == 0
        assert lio.reservation() == held
        assert words in bad(28, "trim", other, "--length", "1M")
    nothing_left()
    assert "No SPC-3 Reservation holder" in lio.reservation()
    good("trim", other, "--length", "1M")
    record(
        ours="iserblk attach",
        peer="LIO isert on rxe",
        transport="RoCE v2",
        ran="reserve=exclusive: another initiator is refused; portal group disabled and enabled "
        "3 times under load: kept; given back by detach",
    )
