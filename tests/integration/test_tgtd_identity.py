"""tgtd gives the LUNs of every host the same identifiers, and tells nobody that a number has
another volume behind it. Needs ``scripts/peers tgt``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from iserblk.errors import BadArgument, LunChanged, NoSuchLun
from tests.support import logs
from tests.support.cores import core_of
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.ports import free_port
from tests.support.target import ROOT
from tests.support.tgtd import IQN, MortalTgtd
from tests.support.until import until

SIZE = 1 << 20
Start = Callable[..., MortalTgtd]
in_thread = trio.to_thread.run_sync
face = pytest.mark.parametrize("face", FACES)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start one at an address, all at the same port."""
    found = subprocess.run(
        [ROOT / "scripts/peers", "tgt"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires tgtd: {found.stderr.strip().splitlines()[-1]}")
    port = free_port()
    running: list[MortalTgtd] = []

    def started(address: str, iqn: str = IQN, also: tuple[str, ...] = ()) -> MortalTgtd:
        place = tmp_path / address
        place.mkdir()
        programs = Path(found.stdout.strip()) / "usr/sbin"
        running.append(MortalTgtd(programs, address, port, place, SIZE, iqn, also))
        return running[-1]

    yield started
    for each in running:
        each.kill()


async def test_two_hosts_with_names_of_their_own(start: Start) -> None:
    """The LUNs say the same, and are two disks."""
    one, two = start("127.0.0.1"), start("127.0.0.2", f"{IQN}-2")
    async with opened("async", one.url, two.url) as disks:
        first, second = disks.values()
        assert first.info.identifiers == second.info.identifiers
        assert first.info.serial == second.info.serial
        await write(second, b"two!" * 128, 0)
        assert await read(first, 0, 512) == bytes(512)


@face
async def test_two_hosts_with_one_name(start: Start, face: str) -> None:
    """The configuration was copied: no portal lists the other."""
    one, two = start("127.0.0.1"), start("127.0.0.2")
    with pytest.raises(BadArgument, match="nothing proves that the LUN there is the same"):
        async with opened(face, one.url, two.url):
            pass


async def test_the_other_host_is_away(start: Start) -> None:
    """It would be taken for the first one when that goes. The portal in use does not list it."""
    one = start("127.0.0.1")
    with pytest.raises(BadArgument, match="nothing proves that the LUN there is the same"):
        async with opened("async", one.url, one.url.replace("127.0.0.1", "127.0.0.2")):
            pass


async def test_two_portals_of_one_host(start: Start) -> None:
    """tgtd lists no portal but the one that is asked: there is no proof, and one URL is enough."""
    one = start("127.0.0.1", also=("127.0.0.2",))
    two = one.url.replace("127.0.0.1", "127.0.0.2")
    with pytest.raises(BadArgument, match="give the URL of one portal only"):
        async with opened("async", one.url, two):
            pass
    async with opened("async", two) as disks:
        (disk,) = disks.values()
        assert await read(disk, 0, 512) == bytes(512)


@pytest.mark.logs("another LUN is there now", logs.LOST_POWER, logs.RECONNECTED)
@pytest.mark.parametrize("way", ["seen", "silent", "the same"])
@face
async def test_the_number_is_given_away(start: Start, tmp_path: Path, face: str, way: str) -> None:
    """``seen``: a request comes while there is no LUN. ``silent``: nothing tells but a look, which
    comes within ten seconds."""
    tgtd = start("127.0.0.1")
    await in_thread(tgtd.remove_lun)
    await in_thread(tgtd.add_lun, tgtd.disk, "ONE")
    other = tmp_path / "other"
    other.write_bytes(bytes(SIZE))
    async with one_disk(face, tgtd.url) as disk:
        await write(disk, b"one!" * 128, 0)
        await disk.flush()
        await in_thread(tgtd.remove_lun)
        if way != "silent":
            for _ in range(2):
                with pytest.raises(NoSuchLun):
                    await write(disk, b"lost" * 128, 0)
        if way == "the same":
            await in_thread(tgtd.add_lun, tgtd.disk, "ONE")
            assert await read(disk, 0, 512) == b"one!" * 128
            await write(disk, b"more" * 128, 512)
            await disk.flush()
            return
        await in_thread(tgtd.add_lun, other, "TWO")
        if way == "silent":
            await until(lambda: core_of(disk).identity.in_doubt)
        for _ in range(2):
            with pytest.raises(LunChanged, match="another LUN is there now"):
                await write(disk, b"more" * 128, 0)
    assert other.read_bytes() == bytes(SIZE)
