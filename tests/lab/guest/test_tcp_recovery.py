"""LIO's target over TCP goes away and comes back under load; so does the wire."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.lab.guest import lio
from tests.support import logs
from tests.support.endurance import Clients, disk_and_session
from tests.support.interop import Record
from tests.support.programs import run
from tests.support.until import all_ended, until

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.LOST_POWER, logs.RESERVATION)

TURNS = 3
CLIENTS = 8
OPTIONS = {"header-digest": "crc32c", "data-digest": "crc32c", "io-timeout": "120"}
in_thread = trio.to_thread.run_sync


@pytest.fixture(scope="module", autouse=True)
def without_chap() -> None:
    group = Path(os.environ["LAB_TPG"])
    (group / "attrib" / "authentication").write_text("0")
    (group / "param" / "AuthMethod").write_text("CHAP,None")


# shows: SYSTEM-39
@pytest.mark.parametrize("face", ["async", "blocking"])
async def test_the_portal_group_is_disabled_and_enabled(face: str, record: Record) -> None:
    async with disk_and_session(face, os.environ["LAB_URL"], OPTIONS) as (disk, session):
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
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran=f"portal group disabled and enabled {TURNS} times under load: a pause each",
    )


@contextmanager
def nothing_arrives() -> Iterator[None]:
    """Lose every packet on lo, through which the guest reaches its own addresses."""
    run("modprobe", "sch_netem")
    run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "100%")
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", "lo", "root")


async def test_a_wire_that_swallows_everything(record: Record) -> None:
    """All packets are lost until the initiator gives up the connection: a NOP is not answered."""
    async with disk_and_session("async", os.environ["LAB_URL"], OPTIONS) as (disk, session):
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            with nothing_arrives(), trio.fail_after(120):
                await until(lambda: session.suspended is not None)
            await clients.progress(1)
        assert session.counts.reconnects == 1 and session.error is None
        await all_ended(session.queue)
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="a wire that loses everything, under load, until the connection is given up",
    )
