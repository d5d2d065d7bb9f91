"""A session that is not attacked: it must go on unharmed, whatever other sessions do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from iserblk.disk.seam import AsyncDisk
from tests.support.faces import one_disk, read, write
from tests.support.until import until

SIZE = 65536
TURN_S = 0.002
PROGRESS_S = 60.0


class Bystander:
    """Writes and reads back again and again. ``turns``: how often it has."""

    def __init__(self, disk: AsyncDisk) -> None:
        self._disk = disk
        self.turns = 0

    async def run(self) -> None:
        while True:
            await self.turn()
            await trio.sleep(TURN_S)

    async def turn(self) -> None:
        data = random.Random(self.turns).randbytes(SIZE)
        at = self.turns % 8 * SIZE
        await write(self._disk, data, at)
        assert await read(self._disk, at, SIZE) == data
        self.turns += 1


@asynccontextmanager
async def bystander(url: str) -> AsyncIterator[Bystander]:
    """A Bystander at work on ``url``, a LUN of its own. Checks at the end that it makes progress.
    (How much it made meanwhile is for a busy machine to decide.)"""
    async with one_disk("async", url) as disk, trio.open_nursery() as nursery:
        made = Bystander(disk)
        await made.turn()
        nursery.start_soon(made.run)
        yield made
        before = made.turns
        with trio.fail_after(PROGRESS_S):
            await until(lambda: made.turns > before)
        nursery.cancel_scope.cancel()
    # The LUN still works after all that other sessions did.
    async with one_disk("async", url) as disk:
        await Bystander(disk).turn()
