"""The target's memory and receives, over real connections: commands that wait for them go on."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.disk.aio import TrioDisk, open_disks
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.target.lunspec import open_lun, parse_lun_spec
from tests.support.target_here import serve

IQN = "iqn.2026-11.example:disk"
PIECE, PIECES = 64 << 10, 16
PATIENCE_S = 200.0  # only a test that fails ever waits that long


@asynccontextmanager
async def opened(scheme: str, lun: Path, options: Mapping[str, str]) -> AsyncIterator[TrioDisk]:
    """The disk in the file ``lun``, of a target in this process."""
    unit = open_lun(parse_lun_spec(str(lun)), "test")
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
            async with open_disks([url], options) as disks:
                disk = disks.disks[disks.default]
                assert isinstance(disk, TrioDisk)
                yield disk
            nursery.cancel_scope.cancel()
    unit.close()


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_reads_of_more_than_the_target_holds(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where answers are sent at once, no event tells the target that their buffers are free again:
    it must notice by itself."""
    monkeypatch.setattr("iserblk.target.iscsi.session.DATA_BUDGET", 2 * PIECE)
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 2 * PIECE)
    content = os.urandom(PIECES * PIECE)
    (tmp_path / "lun").write_bytes(content)
    async with opened(scheme, tmp_path / "lun", {}) as disk:

        async def read(index: int) -> None:
            buffer = bytearray(PIECE)
            await disk.read_into(memoryview(buffer), index * PIECE)
            assert buffer == content[index * PIECE : (index + 1) * PIECE]

        for _ in range(4):
            async with trio.open_nursery() as reads:
                for index in range(PIECES):
                    reads.start_soon(read, index)


async def test_no_command_needs_to_be_recovered(tmp_path: Path) -> None:
    """A soak: more tasks than there are commands in flight read and write, small and large. Both
    ends have receives and memory for all of it, so no command is aborted, no LUN is reset, and the
    connection stays.

    proves: ISER-8.1.2-8
    """
    (tmp_path / "lun").write_bytes(bytes(PIECES * PIECE))
    async with opened("iser", tmp_path / "lun", {"queue-depth": "64", "io-timeout": "200"}) as disk:

        async def work(number: int) -> None:
            size = 4096 if number % 8 else PIECE
            buffer = bytearray(size)
            for turn in range(20):
                at = (number * 31 + turn * 7) % (PIECES * PIECE // size) * size
                if (number + turn) % 2:
                    await disk.read_into(memoryview(buffer), at)
                else:
                    await disk.write(memoryview(buffer), at)

        async with trio.open_nursery() as workers:
            for number in range(100):
                workers.start_soon(work, number)
        assert isinstance(disk.driver, TrioDriver)
        ladder = disk.driver.ladder
        assert (ladder.aborted, ladder.resets) == (0, 0)
        assert disk.driver.session.counts.reconnects == 0 and disk.driver.session.error is None


async def test_aborts_under_load_cost_no_connection(tmp_path: Path) -> None:
    """Tasks are given up at any moment, while their data is on its way: RDMA that comes after an
    abort would be fatal, so buffers and STags stay until the abort has been answered. What was not
    given up is right, and so is what comes after.

    proves: ISER-7143-4.2.3.6-1
    """
    chance = random.Random(17)
    (tmp_path / "lun").write_bytes(bytes(PIECES * PIECE))
    aborts = 0
    async with opened("iser", tmp_path / "lun", {"queue-depth": "32", "io-timeout": "200"}) as disk:
        assert isinstance(disk.driver, TrioDriver)
        control = disk.driver.session.queue

        async def work(number: int) -> None:
            nonlocal aborts
            data = bytes((number + 1,)) * PIECE
            for turn in range(30):
                with trio.move_on_after(
                    chance.random() * 0.004 if turn % 3 else PATIENCE_S
                ) as scope:
                    await disk.write(memoryview(data), number * PIECE)
                    buffer = bytearray(PIECE)
                    await disk.read_into(memoryview(buffer), number * PIECE)
                    assert buffer == data
                aborts += scope.cancelled_caught

        async with trio.open_nursery() as workers:
            for number in range(PIECES):
                workers.start_soon(work, number)
        assert aborts > PIECES and control.in_flight == 0
        assert disk.driver.session.counts.reconnects == 0 and disk.driver.session.error is None
    assert (tmp_path / "lun").read_bytes() == b"".join(
        bytes((number + 1,)) * PIECE for number in range(PIECES)
    )
