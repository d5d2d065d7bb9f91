"""A gateway with our initiator in front and tgtd behind: each of the three is cut off in turn,
while clients write and compare."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.support import logs
from tests.support.endurance import Clients, disk_and_session
from tests.support.faults.proxy import FaultProxy
from tests.support.gateway import GATE, MortalGateway
from tests.support.ports import free_port
from tests.support.target import ROOT
from tests.support.tgtd import MortalTgtd

MIB = 1 << 20
CLIENTS = 4
in_thread = trio.to_thread.run_sync


@pytest.fixture
def tgtd(tmp_path: Path) -> Iterator[MortalTgtd]:
    found = subprocess.run(
        [ROOT / "scripts/peers", "tgt"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires tgtd: {found.stderr.strip().splitlines()[-1]}")
    programs = Path(found.stdout.strip()) / "usr/sbin"
    made = MortalTgtd(programs, "127.0.0.1", free_port(), tmp_path, 8 * MIB)
    try:
        yield made
    finally:
        made.kill()


@contextmanager
def mortal_gateway(behind: str, log: Path) -> Iterator[MortalGateway]:
    made = MortalGateway(behind, log)
    try:
        yield made
    finally:
        made.kill()


# shows: SYSTEM-26
@pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.LOST_POWER)
@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_each_of_the_three_in_turn(tgtd: MortalTgtd, scheme: str, tmp_path: Path) -> None:
    with (
        mortal_gateway(f"{tgtd.url}?io-timeout=20", tmp_path / "gateway.log") as gateway,
        FaultProxy(("127.0.0.1", gateway.port)) as proxy,
    ):
        front = f"{scheme}://127.0.0.1:{proxy.port}/{GATE}/0"
        async with disk_and_session("async", front, {"io-timeout": "100"}) as (disk, session):
            clients = Clients(disk, session, CLIENTS)
            async with clients.at_work():
                proxy.cut()
                await clients.progress(1)
                await in_thread(gateway.kill)
                await in_thread(gateway.start)
                await clients.progress(2)
                await in_thread(tgtd.kill)
                await in_thread(tgtd.start)
                await clients.progress(2)
            assert session.counts.reconnects == 2 and session.error is None
        assert "connected again" in gateway.log.read_text()  # to tgtd
