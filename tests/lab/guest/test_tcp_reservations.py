"""A reservation of ours that survives LIO (APTPL): its LUN is removed, and made again from what it
has saved."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.cli.commands import bad, good
from tests.lab.guest import lio
from tests.support import logs
from tests.support.endurance import disk_and_session
from tests.support.faces import read, write
from tests.support.interop import Record

MIB = 1 << 20
OTHER_HOST = "?initiator-name=iqn.2026-11.lab:other"


@pytest.fixture
def persistent(tmp_path: Path) -> Iterator[lio.Persistent]:
    group = Path(os.environ["LAB_TPG"])
    (group / "attrib" / "authentication").write_text("0")
    (group / "param" / "AuthMethod").write_text("CHAP,None")
    made = lio.Persistent(tmp_path / "persistent", 16 * MIB)
    yield made
    made.remove()


@pytest.mark.logs(logs.RECONNECTED, logs.RESERVATION, logs.LOST_POWER)
async def test_our_reservation_survives_a_restart_of_lio(
    persistent: lio.Persistent, record: Record
) -> None:
    """reserve=exclusive: LIO's storage object is removed and made again with what it has saved."""
    options = {"reserve": "exclusive", "io-timeout": "240"}
    async with disk_and_session("async", persistent.url, options) as (disk, session):
        await write(disk, b"1" * 4096, 0)
        assert os.environ["LAB_INITIATOR"] in persistent.holder()
        saved = await trio.to_thread.run_sync(persistent.restart)
        assert os.environ["LAB_INITIATOR"] in saved
        assert os.environ["LAB_INITIATOR"] in persistent.holder()
        await write(disk, b"2" * 4096, 4096)
        assert await read(disk, 0, 8192) == b"1" * 4096 + b"2" * 4096
        assert session.error is None and session.counts.reconnects >= 1
        words = await trio.to_thread.run_sync(
            lambda: bad(28, "trim", persistent.url + OTHER_HOST, "--length", "1M")
        )
        assert "another initiator has reserved" in words
    assert "No SPC-3 Reservation holder" in persistent.holder()
    good("info", persistent.url + OTHER_HOST)
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP",
        ran="reserve=exclusive with APTPL: the target's LUN is removed and made again from what it "
        "has saved; the reservation holds, others are refused; given back",
    )
