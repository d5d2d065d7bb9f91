"""Commands that wait for the target's memory go on, over real connections."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from iserblk.disk.aio import open_disks
from iserblk.target.lunspec import open_lun, parse_lun_spec
from iserblk.target.server import serve

IQN = "iqn.2026-11.example:disk"
PIECE, PIECES = 64 << 10, 16
PATIENCE_S = 20.0


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_reads_of_more_than_the_target_holds(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers are sent at once, no event tells the target that their buffers are free again:
    it must notice by itself."""
    monkeypatch.setattr("iserblk.target.iscsi.connection.DATA_BUDGET", 2 * PIECE)
    monkeypatch.setattr("iserblk.target.iscsi.connection.GUARANTEED", 2 * PIECE)
    content = os.urandom(PIECES * PIECE)
    (tmp_path / "lun").write_bytes(content)
    unit = open_lun(parse_lun_spec(str(tmp_path / "lun")), "test")
    urls: list[str] = []
    ready = trio.Event()

    def is_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, "127.0.0.1:0", IQN, {0: unit}, is_ready)
            await ready.wait()
            url = f"{scheme}{urls[0].removeprefix('iser')}/0"
            async with open_disks([url], {}) as disks:
                disk = disks.disks[disks.default]

                async def read(index: int) -> None:
                    buffer = bytearray(PIECE)
                    await disk.read_into(memoryview(buffer), index * PIECE)
                    assert buffer == content[index * PIECE : (index + 1) * PIECE]

                for _ in range(4):
                    async with trio.open_nursery() as reads:
                        for index in range(PIECES):
                            reads.start_soon(read, index)
            nursery.cancel_scope.cancel()
    unit.close()
