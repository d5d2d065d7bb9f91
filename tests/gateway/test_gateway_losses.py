"""Which initiators behind a gateway hear that the other target has lost writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from iserblk import aio
from iserblk.disk.seam import AsyncLun
from iserblk.errors import IserblkError
from iserblk.loop.strands import elsewhere
from iserblk.target.scsi.unit import LogicalUnit
from tests.support import logs
from tests.support.gateway import running_gateway, store_of
from tests.support.target import TargetProcess, running_target
from tests.support.until import until

pytestmark = pytest.mark.logs(
    logs.LOST_WRITES, r"writes since the last flush were lost", r"a flush of another session"
)

BLOCK = memoryview(bytes(4096))


def lose(unit: LogicalUnit) -> None:
    """The other target has lost what was written, and the gateway has no copy."""
    disk = store_of(unit).disk
    disk.core.durability.gave_up("has lost it")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size=8M:volatile-cache=64M"], files / "log") as process:
        yield process


@asynccontextmanager
async def initiator(url: str) -> AsyncIterator[AsyncLun]:
    async with aio.open_disks([url], {"journal": "off"}) as disks:
        yield disks.disks[disks.default]


async def hears(disk: AsyncLun) -> bool:
    """Its flush fails."""
    try:
        await disk.flush()
    except IserblkError as error:
        assert "medium error: write error" in str(error)
        return True
    return False


async def test_those_that_have_written_hear_once(target: TargetProcess) -> None:
    async with (
        running_gateway(f"{target.url}/0?journal=1M") as (url, unit),
        initiator(url) as one,
        initiator(url) as other,
        initiator(url) as reader,
    ):
        await one.write(BLOCK, 0)
        await other.write(BLOCK, 8192)
        lose(unit)
        # The gateway's own flush pays for no initiator: its journal is full.
        for number in range(40):
            await other.write(memoryview(bytes(65536)), number << 16)
        assert not await hears(reader)
        for disk in (other, one):
            assert await hears(disk) and not await hears(disk)
        assert not await hears(reader)


async def test_an_initiator_that_is_gone_before_the_answer(target: TargetProcess) -> None:
    """It hears when it flushes again, as another session."""
    async with running_gateway(f"{target.url}/0") as (url, unit):
        async with initiator(url) as one:
            await one.write(BLOCK, 0)
            lose(unit)
        async with initiator(url) as again:
            assert await hears(again) and not await hears(again)
        async with initiator(url) as later:
            assert not await hears(later)
        await trio.to_thread.run_sync(unit.close)


@pytest.mark.logs(logs.RECONNECTED, "sent again", "connection lost", "went away")
async def test_a_connection_that_breaks_while_it_flushes(
    target: TargetProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initiator sends the flush again, when it has a connection again."""
    async with (
        running_gateway(f"{target.url}/0") as (url, unit),
        aio.open_disks([url]) as disks,
        trio.open_nursery() as nursery,
    ):
        one = disks.disks[disks.default]
        behind = store_of(unit).disk
        real, go, waiting = behind.flush, trio.Event(), trio.Event()

        async def flush() -> None:
            waiting.set()
            await elsewhere(go.wait)
            await real()

        monkeypatch.setattr(behind, "flush", flush)
        await one.write(BLOCK, 0)
        lose(unit)
        heard: list[bool] = []

        @nursery.start_soon
        async def _flush() -> None:
            heard.append(await hears(one))

        await waiting.wait()
        one.core.session.disconnect()  # type: ignore[attr-defined]
        await wait_all_tasks_blocked()  # the gateway has noticed: no answer goes out any more
        go.set()
        await until(lambda: heard)
        assert heard == [True] and not await hears(one)


async def test_a_loss_that_no_initiator_heard_of(target: TargetProcess) -> None:
    async with running_gateway(f"{target.url}/0") as (url, unit):
        async with initiator(url) as one, initiator(url) as other:
            await one.write(BLOCK, 0)
            await other.write(BLOCK, 8192)
            lose(unit)
            assert await hears(one)
        with pytest.raises(OSError, match="an initiator was not told"):
            await trio.to_thread.run_sync(unit.close)
