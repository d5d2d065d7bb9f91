"""A LUN that grows at the target while it is in use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from iserblk.errors import OutOfRange
from tests.integration.conftest import StartTarget
from tests.support.faces import FACES, one_disk, read, write

MIB = 1 << 20
PATIENCE_S = 30.0


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("cache", ["", ":volatile-cache=64M"])
async def test_lun_grows_in_use(
    face: str, cache: str, start_target: StartTarget, tmp_path: Path
) -> None:
    running = start_target(f"lun:size=1M{cache}")
    async with one_disk(face, f"{running.url}/0") as disk:
        await write(disk, b"a" * 4096, MIB - 4096)
        with pytest.raises(OutOfRange):
            await write(disk, b"b" * 4096, MIB)
        os.truncate(tmp_path / "lun", 2 * MIB)
        with trio.fail_after(PATIENCE_S):
            while disk.size == MIB:  # the target looks once a second
                await disk.refresh()
                await trio.sleep(0.1)
        assert disk.size == 2 * MIB
        await write(disk, b"b" * 4096, 2 * MIB - 4096)
        await disk.flush()
        assert await read(disk, 2 * MIB - 8192, 8192) == bytes(4096) + b"b" * 4096


@pytest.mark.parametrize("face", FACES)
async def test_a_flush_that_hears_of_growth_asks_for_the_size(
    face: str, start_target: StartTarget, tmp_path: Path
) -> None:
    running = start_target("lun:size=1M:volatile-cache=64M")
    async with one_disk(face, f"{running.url}/0") as disk:
        os.truncate(tmp_path / "lun", 2 * MIB)
        with trio.fail_after(PATIENCE_S):
            while disk.size == MIB:  # the target looks once a second
                await disk.flush()
                await trio.sleep(0.1)
        assert disk.size == 2 * MIB
