"""Clients that verify what they wrote while something is done to their connection."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from iserblk.disk import aio, blocking
from iserblk.disk.multipath import failback, policy
from iserblk.disk.seam import AsyncDisk
from iserblk.initiator.session.session import Session
from tests.support.cores import session_of
from tests.support.faces import InThreads, read, write
from tests.support.until import until

MIB = 1 << 20
PATIENCE_S = 120.0
LENGTHS = (512, 4096, 8192, 65_536, 300_032)


@asynccontextmanager
async def disk_and_session(
    face: str, url: str, options: dict[str, str], *others: str
) -> AsyncIterator[tuple[AsyncDisk, Session]]:
    """``others``: more ways to the same LUN."""
    if face == "async":
        async with aio.open_disks([url, *others], options) as disks:
            disk = disks.disks[disks.default]
            yield disk, session_of(disk)
    else:
        with blocking.open_disks([url, *others], options) as found:
            inner = found.disks[found.default]
            yield InThreads(inner), session_of(inner)  # type: ignore[misc]


class Clients:
    """Tasks with a MiB each, which read back what they write, and compare all of it at the end."""

    def __init__(self, disk: AsyncDisk, session: Session, count: int) -> None:
        self._disk = disk
        self._session = session
        self._count = count
        self._stop = False
        self.operations = 0

    async def _client(self, number: int) -> None:
        disk, base = self._disk, number * MIB
        chance = random.Random(number)
        model = bytearray(MIB)
        await write(disk, model, base)  # type: ignore[arg-type]
        while not self._stop:
            length = chance.choice(LENGTHS)
            offset = chance.randrange((MIB - length) // 512) * 512
            model[offset : offset + length] = data = chance.randbytes(length)
            await write(disk, data, base + offset)
            assert await read(disk, base + offset, length) == data
            self.operations += 2
        await disk.flush()
        assert await read(disk, base, MIB) == model

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            for number in range(self._count):
                nursery.start_soon(self._client, number)
            await self.progress()
            yield
            self._stop = True

    async def progress(self, reconnects: int = 0) -> None:
        """Wait until the session has reconnected so often, and all clients go on."""
        with trio.fail_after(PATIENCE_S):
            await until(lambda: self._session.counts.reconnects >= reconnects)
            enough = self.operations + 2 * self._count
            await until(lambda: self.operations >= enough)


def fail_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits before a session returns to a better portal that works again."""
    monkeypatch.setattr(policy, "FIRST_FAIL_BACK_S", 1.0)
    monkeypatch.setattr(failback, "LOOK_S", 0.1)
    monkeypatch.setattr(failback, "PROVEN_S", 0.5)


async def reaches(session: Session, portal: str) -> None:
    """Wait until the session is connected to ``portal``."""
    with trio.fail_after(PATIENCE_S):
        await until(lambda: session.portal == portal and not session.suspended)
