"""A target that tells its initiators of other LUNs, while their sessions live."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import LunChanged, NoSuchLun
from tests.cli.commands import Server, serving
from tests.support import logs
from tests.support.cores import session_of
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.target import IQN
from tests.support.until import until

face = pytest.mark.parametrize("face", FACES)
transport = pytest.mark.parametrize("transport", ["iser", "iscsi"])


class Target:
    def __init__(self, server: Server, luns: Path) -> None:
        self._server = server
        self._luns = luns
        self._changes = 0

    def url(self, transport: str) -> str:
        return self._server.url.replace("iser:", f"{transport}:") + "/0"

    async def change(self, *luns: str) -> None:
        """Serve these LUNs from now on, beside those that it has by its command line."""
        self._luns.write_text("".join(f"{lun}\n" for lun in luns))
        os.kill(self._server.process.pid, signal.SIGHUP)
        self._changes += 1
        await until(lambda: self._server.log.read_text().count("was read again") == self._changes)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    luns = tmp_path / "luns"
    luns.write_text(f"0 {tmp_path}/mine:size=1M\n")
    arguments = ["-v", "target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--luns", str(luns)]
    with serving(*arguments, log=tmp_path / "log") as server:
        yield Target(server, luns)


@pytest.mark.logs("another LUN is there now")
@transport
@face
async def test_another_takes_the_number(
    target: Target, tmp_path: Path, face: str, transport: str
) -> None:
    """Nothing was left to flush. What comes next is not written to the other LUN."""
    async with one_disk(face, target.url(transport)) as disk:
        await write(disk, b"mine" * 128, 0)
        await disk.flush()
        await target.change(f"0 {tmp_path}/other:size=1M")
        with pytest.raises(LunChanged, match="another LUN is there now"):
            await write(disk, b"more" * 128, 512)
        with pytest.raises(LunChanged, match="another LUN is there now"):
            await read(disk, 0, 512)
    assert (tmp_path / "other").read_bytes() == bytes(1 << 20)


@transport
@face
async def test_others_come_and_go(
    target: Target, tmp_path: Path, face: str, transport: str
) -> None:
    """The connection stays, and so does what was not flushed: nothing is lost, and nothing sent
    again."""
    mine, other = f"0 {tmp_path}/mine:size=1M", f"1 {tmp_path}/other:size=1M"
    async with one_disk(face, target.url(transport)) as disk:
        session = session_of(disk)
        await write(disk, b"mine" * 128, 0)
        for luns in [(mine, other), (mine,)]:
            await target.change(*luns)
            assert await read(disk, 0, 512) == b"mine" * 128
        assert session.counts.reconnects == 0


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER)  # a LUN that comes back reports 29/00
@transport
@face
async def test_it_is_gone_and_comes_back(
    target: Target, tmp_path: Path, face: str, transport: str
) -> None:
    async with one_disk(face, target.url(transport)) as disk:
        await write(disk, b"mine" * 128, 0)
        await disk.flush()
        await target.change()
        for _ in range(2):
            with pytest.raises(NoSuchLun):
                await write(disk, b"lost" * 128, 0)
            with pytest.raises(NoSuchLun):
                await read(disk, 0, 512)
        await target.change(f"0 {tmp_path}/mine:size=1M")
        assert await read(disk, 0, 512) == b"mine" * 128
        await write(disk, b"more" * 128, 512)
        await disk.flush()
    assert (tmp_path / "mine").read_bytes()[:1024] == b"mine" * 128 + b"more" * 128


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, "another LUN is there now")
@transport
@face
async def test_it_is_gone_and_another_comes(
    target: Target, tmp_path: Path, face: str, transport: str
) -> None:
    """What was written while there was no LUN has failed, and is not repeated on the other."""
    async with one_disk(face, target.url(transport)) as disk:
        await write(disk, b"mine" * 128, 0)
        await target.change()
        with pytest.raises(NoSuchLun):
            await write(disk, b"lost" * 128, 0)
        await target.change(f"0 {tmp_path}/other:size=1M")
        for again in (write(disk, b"more" * 128, 0), read(disk, 0, 512), disk.flush()):
            with pytest.raises(LunChanged, match="another LUN is there now"):
                await again
    assert (tmp_path / "other").read_bytes() == bytes(1 << 20)


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, "another LUN is there now")
@face
async def test_the_others_of_a_session_go_on(target: Target, tmp_path: Path, face: str) -> None:
    """A session with several LUNs: one that another has replaced ends alone, also where the
    connection is lost later."""
    one, two = f"0 {tmp_path}/mine:size=1M", f"1 {tmp_path}/two:size=1M"
    await target.change(one, two)
    async with opened(face, target.url("iscsi").removesuffix("/0")) as disks:
        await target.change(f"0 {tmp_path}/other:size=1M", two)
        with pytest.raises(LunChanged):
            await write(disks["lun0"], b"mine" * 128, 0)
        await write(disks["lun1"], b"two!" * 128, 0)
        session_of(disks["lun1"]).disconnect()
        assert await read(disks["lun1"], 0, 512) == b"two!" * 128
        with pytest.raises(LunChanged):
            await read(disks["lun0"], 0, 512)
    assert (tmp_path / "other").read_bytes() == bytes(1 << 20)
