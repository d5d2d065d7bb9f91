"""A target that tells its initiators of other LUNs, while their sessions live."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import LunChanged
from tests.cli.commands import Server, serving
from tests.support import logs
from tests.support.faces import FACES, InThreads, one_disk, read, write
from tests.support.target import IQN
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER, "to see if it is the same LUN")

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
    assert (tmp_path / "other").read_bytes() == bytes(1 << 20)


@transport
@face
async def test_others_come_and_go(
    target: Target, tmp_path: Path, face: str, transport: str
) -> None:
    mine, other = f"0 {tmp_path}/mine:size=1M", f"1 {tmp_path}/other:size=1M"
    async with one_disk(face, target.url(transport)) as disk:
        inner = disk.disk if isinstance(disk, InThreads) else disk
        session = inner.core.session  # type: ignore[attr-defined]
        await write(disk, b"mine" * 128, 0)
        for turn, luns in enumerate([(mine, other), (mine,)]):
            await target.change(*luns)
            assert await read(disk, 0, 512) == b"mine" * 128
            assert session.reconnects == turn + 1
