"""What targets say of their LUNs, and do not say: profiles of it, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from iserblk.errors import BadArgument, LunChanged, NoSuchLun
from iserblk.target.lunspec import open_lun, parse_lun_spec
from iserblk.target.scsi.unit import LogicalUnit
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.cores import core_of, session_of
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.profiles import netapp, tgtd
from tests.support.renamed import Renamed
from tests.support.target import IQN
from tests.support.target_here import serve
from tests.support.until import until

SIZE = 1 << 20
WAYS = ("async", "queue", "nbd")  # the target is in the same loop: no threads


class Served:
    """A target in this process. ``url``: without a LUN."""

    def __init__(self, place: Path) -> None:
        self.url = ""
        self._place = place
        self.units: list[LogicalUnit] = []
        self.device: Any = None

    def unit(self, name: str) -> LogicalUnit:
        spec = parse_lun_spec(f"{self._place / name}:size={SIZE}:serial={name}")
        self.units.append(open_lun(spec, name))
        return self.units[-1]

    def data(self, name: str) -> bytes:
        return (self._place / name).read_bytes()


@asynccontextmanager
async def served(place: Path, make: type[Renamed], names: Sequence[str]) -> AsyncIterator[Served]:
    target = Served(place)
    listening = trio.Event()

    def make_device(*arguments: Any) -> Renamed:
        target.device = make(*arguments)
        return target.device  # type: ignore[no-any-return]

    def ready(url: str) -> None:
        target.url = url.replace("iser:", "iscsi:")
        listening.set()

    luns = {number: target.unit(name) for number, name in enumerate(names)}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: serve("127.0.0.1:0", IQN, luns, ready, make_device=make_device))
        await listening.wait()
        yield target
        nursery.cancel_scope.cancel()
    for unit in target.units:
        unit.close()


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, "another LUN is there now", "NBD client: ")
@pytest.mark.parametrize("face", WAYS)
async def test_a_number_is_given_away_with_a_request_in_between(tmp_path: Path, face: str) -> None:
    async with (
        served(tmp_path, netapp.Device, ["one"]) as target,
        one_disk(face, f"{target.url}/0") as disk,
    ):
        await write(disk, b"one!" * 128, 0)
        await disk.flush()
        gone = target.device.take_away(0)
        for _ in range(2):
            with pytest.raises(Exception):  # noqa: B017 (each face has its own)
                await write(disk, b"lost" * 128, 0)
        target.device.give(0, gone)
        assert await read(disk, 0, 512) == b"one!" * 128
        target.device.take_away(0)
        with pytest.raises(Exception):  # noqa: B017
            await write(disk, b"lost" * 128, 0)
        target.device.give(0, target.unit("two"))
        for _ in range(2):
            with pytest.raises(Exception):  # noqa: B017
                await write(disk, b"more" * 128, 0)
    assert target.data("two") == bytes(SIZE)


@pytest.mark.logs("another LUN is there now")
async def test_a_number_is_given_away_without_a_word(tmp_path: Path) -> None:
    async with (
        served(tmp_path, netapp.Device, ["one"]) as target,
        one_disk("async", f"{target.url}/0") as disk,
    ):
        await write(disk, b"one!" * 128, 0)
        await disk.flush()
        target.device.take_away(0)
        target.device.give(0, target.unit("two"))
        await until(lambda: core_of(disk).identity.in_doubt)
        with pytest.raises(LunChanged):
            await write(disk, b"more" * 128, 0)
    assert target.data("two") == bytes(SIZE)


@pytest.mark.logs("another LUN is there now")
async def test_the_mapping_changes(tmp_path: Path) -> None:
    """One name for all volumes: the session stays, each LUN is compared, and one has another."""
    names = ["one", "two", "three"]
    async with (
        served(tmp_path, netapp.Device, names) as target,
        opened("async", target.url) as disks,
    ):
        for disk in disks.values():
            await write(disk, b"data" * 128, 0)
        target.device.remap(1, target.unit("other"))
        for name in ("lun0", "lun2"):
            await write(disks[name], b"more" * 128, 512)
            await disks[name].flush()
        with pytest.raises(LunChanged):
            await write(disks["lun1"], b"more" * 128, 512)
        assert session_of(disks["lun0"]).counts.reconnects == 0
    assert target.data("other") == bytes(SIZE)
    assert target.data("three")[512:1024] == b"more" * 128


@pytest.mark.parametrize("face", FACES)
async def test_two_targets_whose_luns_say_the_same(start_target: StartTarget, face: str) -> None:
    one = start_target(f"one:size={SIZE}", profile="tgtd")
    two = start_target(f"two:size={SIZE}", profile="tgtd", iqn=f"{IQN}-2")
    async with opened(face, f"{one.url}/0", f"{two.url}/0") as disks:
        assert len(disks) == 2
    copied = start_target(f"three:size={SIZE}", profile="tgtd")
    with pytest.raises(BadArgument, match="nothing proves"):
        async with opened(face, f"{one.url}/0", f"{copied.url}/0"):
            pass


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, logs.ANOTHER_PORTAL)
@pytest.mark.parametrize("face", FACES)
async def test_portals_that_list_each_other_are_ways(start_target: StartTarget, face: str) -> None:
    """As long as nothing else says who the LUN is."""
    running = start_target(f"one:size={SIZE}", profile="tgtd", listen="127.0.0.1:0,1 127.0.0.2:0,2")
    async with opened("async", f"{running.url}/0?portals=discover") as disks:
        (disk,) = disks.values()
        urls = [f"{way['portal']}/{IQN}/0" for way in disk.info.paths]
    assert len(urls) == 2
    async with opened(face, *urls) as disks:
        (disk,) = disks.values()
        await write(disk, b"one!" * 128, 0)
        await disk.flush()
        session = core_of(disk).session
        before = session.portal
        session.disconnect()
        assert await read(disk, 0, 512) == b"one!" * 128
        assert session.portal != before


async def test_nothing_is_there(tmp_path: Path) -> None:
    async with (
        served(tmp_path, tgtd.Device, ["one"]) as target,
        one_disk("async", f"{target.url}/0") as disk,
    ):
        gone = target.device.take_away(0)
        with pytest.raises(NoSuchLun):
            await read(disk, 0, 512)
        with pytest.raises(NoSuchLun, match="the target has no LUN 0"):
            await read(disk, 0, 512)
        target.device.give(0, gone)
        assert await read(disk, 0, 512) == bytes(512)
