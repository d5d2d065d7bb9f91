"""Metrics of real disks: through both faces of the API, and through nbdkit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio

from iserblk.disk import aio, blocking
from iserblk.disk.multipath.paths import reset_lun
from iserblk.disk.seam import BlockingDisk
from iserblk.errors import Busy, CommandTimeout, IserblkError, WriteProtected
from iserblk.metrics.address import Address
from iserblk.metrics.reading import LunReading
from iserblk.metrics.scraping import scrape
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.census import census, nothing_new
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.nbdkit import need, run, running_nbdkit
from tests.support.ported import both, two_portals
from tests.support.ports import free_port
from tests.support.until import PAUSE_S, until

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.RECONNECTED)

KIB = 1024
MIB = 1 << 20
PATIENCE_S = 60.0

face = pytest.mark.parametrize("face", FACES)


async def scraped(address: Address) -> tuple[LunReading, ...]:
    return (await trio.to_thread.run_sync(scrape, address)).luns


@face
async def test_every_kind_of_request(start_target: StartTarget, tmp_path: Path, face: str) -> None:
    target = start_target("one:size=16M", "two:size=8M")
    place = tmp_path / "socket"
    async with opened(face, target.url, options={"metrics": str(place)}) as disks:
        disk = disks["lun0"]
        for number in range(5):
            await write(disk, bytes(64 * KIB), number * MIB)
            assert await read(disk, number * MIB + 1, 3) == bytes(3)
        await write(disk, bytes(512), 0, fua=True)
        await read(disk, 0, 4 * MIB)  # several commands
        await disk.flush()
        await disk.trim(0, MIB)
        await disk.zero(MIB, 2 * MIB, may_trim=True)
        await disk.extents(0, MIB)
        await disk.cache(0, MIB)
        with pytest.raises(IserblkError):
            await read(disk, 16 * MIB, 1)
        with pytest.raises(IserblkError):
            await write(disk, b"x", 16 * MIB)
        one, two = await scraped(place)
    kinds = {
        name: (each.requests, each.bytes, each.errors) for name, each in one.operations.items()
    }
    assert kinds == {
        "read": (7, 15 + 4 * MIB, 1),
        "write": (7, 5 * 64 * KIB + 512, 1),
        "flush": (1, 0, 0),
        "trim": (1, MIB, 0),
        "zero": (1, 2 * MIB, 0),
    }
    assert all(each.seconds > 0 for each in one.operations.values())
    assert not any(each.requests for each in two.operations.values())
    assert (one.target, one.lun, one.name, one.size) == (disk.info.target, 0, "lun0", 16 * MIB)
    assert (one.url, one.portal, one.provider) == (disk.info.url, target.listen, "iwarp")
    assert one.connected
    assert (one.in_flight, one.reconnects, one.aborted) == (0, 0, 0)
    assert one.unflushed < KIB  # a trim and a zero, without data
    assert not place.exists()


@face
async def test_the_path_in_use(start_target: StartTarget, tmp_path: Path, face: str) -> None:
    """The path that metrics name changes with the portal, iSER or TCP."""
    target = start_target("lun:size=1M")
    place = tmp_path / "socket"
    with two_portals((target.port, target.port)) as (one, two):
        urls = both(one.through(target.url), two.through(target.url.replace("iser", "iscsi", 1)))
        async with opened(face, *urls, options={"metrics": str(place)}) as disks:
            (disk,) = disks.values()
            (before,) = await scraped(place)
            one.refuse(by_reset=True)
            one.cut()
            await read(disk, 0, 512)
            (after,) = await scraped(place)
    assert (before.portal, before.provider) == (f"127.0.0.1:{one.port}", "iwarp")
    assert (after.portal, after.provider) == (f"127.0.0.1:{two.port}", "tcp")
    assert (before.reconnects, after.reconnects) == (0, 1)


def test_many_threads_lose_nothing(start_target: StartTarget, tmp_path: Path) -> None:
    place = tmp_path / "socket"
    target = start_target("lun:size=16M")

    def client(disk: BlockingDisk) -> None:
        buffer = memoryview(bytearray(4 * KIB))
        for number in range(100):
            disk.read_into(buffer, number * 4 * KIB)

    with blocking.open_disks([target.url], {"metrics": str(place)}) as disks:
        for _ in range(2):
            threads = [
                threading.Thread(target=client, args=(disks.disks["lun0"],)) for _ in range(16)
            ]
            for thread in threads:
                thread.start()
            scrape(place)
            for thread in threads:
                thread.join()
        (lun,) = scrape(place).luns
    assert (lun.operations["read"].requests, lun.operations["read"].bytes) == (3200, 3200 * 4 * KIB)


@face
async def test_commands_that_are_sent_again(
    start_target: StartTarget, tmp_path: Path, face: str
) -> None:
    """A command that meets a unit attention is sent again and counted. (Another session resets the
    LUN, which causes the unit attention.)"""
    target = start_target("lun:size=16M")
    place = tmp_path / "socket"
    async with one_disk(face, f"{target.url}/0", {"metrics": str(place)}) as disk:
        await read(disk, 0, 512)
        before = (await scraped(place))[0].retries
        await _reset(f"{target.url}/0")
        await read(disk, 0, 512)
        assert (await scraped(place))[0].retries == before + 1


async def _reset(url: str) -> None:
    async with aio.open_disks([url], {}) as disks:
        disk = disks.disks["lun0"]
        await disk.driver.run_operation(reset_lun(disk.core.session, 0))  # type: ignore[attr-defined]


@face
async def test_a_connection_that_is_lost(
    start_target: StartTarget, tmp_path: Path, face: str
) -> None:
    target = start_target("lun:size=16M")
    place = tmp_path / "socket"
    options = {"metrics": str(place), "io-timeout": "2"}
    async with one_disk(face, f"{target.url}/0", options) as disk:
        await write(disk, bytes(64 * KIB), 0)
        (lun,) = await scraped(place)
        assert (lun.connected, lun.reconnects) == (True, 0)
        assert lun.unflushed >= 64 * KIB
        await disk.flush()
        assert (await scraped(place))[0].unflushed == 0
        target.kill()
        with pytest.raises(CommandTimeout):
            await read(disk, 0, 512)
        (lun,) = await scraped(place)
        assert not lun.connected
        assert lun.operations["read"].errors == 1
        start_target("lun:size=16M", listen=target.listen)
        with trio.fail_after(PATIENCE_S):  # which may take longer than a request may
            while not (await scraped(place))[0].connected:  # noqa: ASYNC110 (no event)
                await trio.sleep(PAUSE_S)
        await read(disk, 0, 512)
        (lun,) = await scraped(place)
        assert (lun.connected, lun.reconnects) == (True, 1)


@face
async def test_each_url_has_its_place(start_target: StartTarget, tmp_path: Path, face: str) -> None:
    target = start_target("one:size=16M", "two:size=8M", "three:size=8M")
    one, other = tmp_path / "one place", tmp_path / "another"
    urls = [f"{target.url}/0?metrics={one}", f"{target.url}/1", f"{target.url}/2?metrics=off"]
    async with opened(face, *urls, options={"metrics": str(other)}) as disks:
        assert [lun.name for lun in await scraped(one)] == ["lun0"]
        assert [lun.name for lun in await scraped(other)] == ["lun1"]
        assert len(disks) == 3


@face
async def test_at_a_port(start_target: StartTarget, face: str) -> None:
    target = start_target("lun:size=16M")
    port = free_port()
    async with one_disk(face, f"{target.url}/0", {"metrics": f"127.0.0.1:{port}"}):
        assert len(await scraped(("127.0.0.1", port))) == 1


@face
async def test_a_place_that_is_taken(start_target: StartTarget, tmp_path: Path, face: str) -> None:
    """A metrics socket that another process uses: opening fails, and the other process goes on."""
    target = start_target("lun:size=16M")
    place = tmp_path / "socket"
    url = f"{target.url}/0"
    with blocking.open_disks([url], {"metrics": str(place)}):
        before = census()
        with pytest.raises(Busy, match="already"):
            async with (
                one_disk(face, f"{url}?metrics={tmp_path / 'more'}"),
                one_disk(face, url, {"metrics": str(place)}),
            ):
                raise AssertionError
        await until(lambda: nothing_new(census(), before))
        assert len(await scraped(place)) == 1
    assert not (tmp_path / "more").exists()


@face
async def test_without_metrics_nothing_counts(start_target: StartTarget, face: str) -> None:
    target = start_target("lun:size=16M")
    if face == "blocking":
        with blocking.open_disks([target.url], {}) as found:
            disk = found.disks["lun0"]
            assert isinstance(disk, blocking.ThreadDisk) and type(disk.disk) is aio.TrioDisk
    else:
        async with aio.open_disks([target.url], {}) as disks:
            assert type(disks.disks["lun0"]) is aio.TrioDisk


def test_through_nbdkit(start_target: StartTarget, tmp_path: Path) -> None:
    need("nbdkit", "nbdcopy")
    target = start_target("lun:size=8M")
    place = tmp_path / "metrics"
    (tmp_path / "source").write_bytes(b"x" * 8 * MIB)
    with running_nbdkit([target.url], tmp_path, parameters=(f"metrics={place}",)) as uri:
        run("nbdcopy", "--flush", tmp_path / "source", uri)
        run("nbdcopy", uri, tmp_path / "copy")
        (lun,) = scrape(place).luns
    assert lun.operations["write"].bytes == 8 * MIB
    assert lun.operations["read"].bytes == 8 * MIB
    assert lun.operations["flush"].requests >= 1
    assert lun.in_flight == 0
    assert not place.exists()


@face
async def test_what_is_refused_is_an_error(
    start_target: StartTarget, tmp_path: Path, face: str
) -> None:
    (tmp_path / "lun").write_bytes(bytes(MIB))
    target = start_target("lun:ro")
    place = tmp_path / "socket"
    async with one_disk(face, f"{target.url}/0", {"metrics": str(place)}) as disk:
        with pytest.raises(WriteProtected):
            await disk.trim(0, MIB)
        (lun,) = await scraped(place)
        assert (lun.operations["trim"].errors, lun.operations["trim"].bytes) == (1, 0)
