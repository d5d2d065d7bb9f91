"""tgtd dies with what it had not flushed, and tells each new nexus of a power on. Needs
``scripts/peers tgt``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from iserblk.scsi import luns
from tests.support import fenced, greeting, logs, lost_cache
from tests.support.failing_disk import LOST_ANSWER, FailingDisk, loses_the_answer_that_tells
from tests.support.faults.proxy import FaultProxy
from tests.support.interop import Record
from tests.support.ports import free_port
from tests.support.target import ROOT
from tests.support.tgtd import MortalTgtd

SIZE = 16 << 20
in_thread = trio.to_thread.run_sync

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, logs.LOST_WRITES)


@pytest.fixture(scope="module")
def programs() -> Path:
    found = subprocess.run(
        [ROOT / "scripts/peers", "tgt"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires tgtd: {found.stderr.strip().splitlines()[-1]}")
    return Path(found.stdout.strip()) / "usr/sbin"


@pytest.fixture
def tgtd(programs: Path, tmp_path: Path) -> Iterator[MortalTgtd]:
    made = MortalTgtd(programs, "127.0.0.1", free_port(), tmp_path, SIZE)
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def over_failing(
    programs: Path, tmp_path: Path, failing: FailingDisk
) -> Iterator[tuple[MortalTgtd, FaultProxy]]:
    port = free_port()
    made = MortalTgtd(programs, "127.0.0.1", port, tmp_path, SIZE, device=failing.device)
    try:
        with FaultProxy(made.address) as proxy:
            yield made, proxy
    finally:
        made.kill()


async def outage(tgtd: MortalTgtd, meanwhile: Callable[[], None]) -> None:
    await in_thread(tgtd.kill)
    meanwhile()
    await in_thread(tgtd.start)


async def test_what_a_new_nexus_hears(tgtd: MortalTgtd) -> None:
    names = [f"iqn.2026-11.example:{each}" for each in "aba"]
    heard = [await greeting.greeting(tgtd.url, name) for name in names]
    await outage(tgtd, lambda: None)
    heard += [await greeting.greeting(tgtd.url, name) for name in names]
    print(heard)
    assert heard == [["29/00"]] * 6


@pytest.mark.parametrize("name", lost_cache.CASES)
async def test_its_cache_is_lost(tgtd: MortalTgtd, record: Record, name: str) -> None:
    case, medium = lost_cache.CASES[name], lost_cache.Medium(tgtd.disk)

    async def dies() -> None:
        await outage(tgtd, medium.lose)

    await lost_cache.loses_its_cache(tgtd.url, medium, dies, case)
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport="TCP",
        ran=f"killed, and what was not flushed is lost: {case.ran}",
    )


@pytest.mark.parametrize("options", [{}, {"shared": "yes"}], ids=["journal", "shared=yes"])
async def test_a_restart_that_loses_nothing(tgtd: MortalTgtd, options: dict[str, str]) -> None:
    """It reports a power on all the same: with ``shared=yes`` what it has is read and compared."""

    async def dies() -> None:
        await outage(tgtd, lambda: None)

    medium = lost_cache.Medium(tgtd.disk)
    await lost_cache.loses_nothing(tgtd.url, medium, dies, options)


async def test_another_host_reserves_the_lun_while_the_journal_is_sent_again(
    tgtd: MortalTgtd, record: Record
) -> None:
    await fenced.reserves_while_the_journal_is_sent_again(
        tgtd.url, tgtd.address, tgtd.disk, 3, luns.encode(1)
    )
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport="TCP",
        ran="another host reserves the LUN while the journal is sent again: nothing older goes "
        "over something newer, and what was refused is told",
    )


@pytest.mark.parametrize("writes", [True, False])
async def test_another_host_reserves_the_lun_before_the_connection_is_lost(
    tgtd: MortalTgtd, record: Record, writes: bool
) -> None:
    await fenced.reserves_before_the_connection_is_lost(
        tgtd.url, tgtd.address, tgtd.disk, writes, luns.encode(1)
    )
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport="TCP",
        ran="another host has reserved the LUN, and written, before the connection is lost: what "
        "it has written stays",
    )


async def test_another_host_reserves_the_lun_again_while_it_is_compared(
    tgtd: MortalTgtd, record: Record
) -> None:
    await fenced.reserves_again_while_the_lun_is_compared(
        tgtd.url, tgtd.address, tgtd.disk, luns.encode(1)
    )
    record(
        ours="initiator",
        peer="tgtd",
        version=tgtd.version,
        transport="TCP",
        ran="another host reserves the LUN a second time, while it is compared after the first: "
        "what it has written stays",
    )


@pytest.mark.parametrize("fua", [False, True], ids=["flush", "FUA"])
async def test_the_answer_that_tells_of_a_loss_is_lost(
    over_failing: tuple[MortalTgtd, FaultProxy], failing: FailingDisk, record: Record, fua: bool
) -> None:
    """And the kernel goes on showing what it could not write: a comparison proves nothing."""
    target, proxy = over_failing
    await loses_the_answer_that_tells(proxy.through(target.url), proxy, failing, fua)
    record(
        ours="initiator",
        peer="tgtd",
        version=target.version,
        transport="TCP",
        ran=LOST_ANSWER,
    )
