"""Clients of one session take turns: one that floods does not keep out the others.

The disks are real ones; their session sends to a target that answers when the test says so."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.errors import ConnectionLost
from iserblk.nbd import messages as nbd
from iserblk.nbd.exports import Export
from iserblk.nbd.server import NbdServer
from iserblk.nbd.transmission import MOST_REQUESTS
from iserblk.scsi.opcodes import READ_16, WRITE_16
from tests.support.nbd_client import RawClient, connected, request
from tests.support.turns import BLOCK, DEPTH, Answering
from tests.support.until import until

AT_ONCE = 64 << 10  # bytes that one receive has, certainly
LBA = 77  # that only the single request reads

FLOODS = {
    "read": request(nbd.READ, 0, BLOCK),
    "unaligned read": request(nbd.READ, 1, 100),
    "write": request(nbd.WRITE, 0, BLOCK) + bytes(BLOCK),
    "FUA": request(nbd.WRITE, 0, BLOCK, flags=nbd.FLAG_FUA) + bytes(BLOCK),
    "flush": request(nbd.FLUSH),
}


class Served(Answering):
    """A server of ``exports`` disks, that share one session of DEPTH slots, at ``path``."""

    def __init__(self, path: Path, exports: int, window: int) -> None:
        super().__init__(window)
        self.path = path
        made = [self.disk(number) for number in range(exports)]
        disks = {each.info.name: Export(each.info.name, each) for each in made}
        self.server = NbdServer(disks, "lun0", 0)

    @property
    def open(self) -> int:
        """Requests of all clients."""
        return self.server.open_requests

    async def flood(self, what: str) -> RawClient:
        """A client that has as many requests open as it may, or as the server receives at once."""
        client = await connected(self.path)
        before = self.open
        count = min(MOST_REQUESTS, AT_ONCE // len(FLOODS[what]))
        await client.send(FLOODS[what] * count)
        await until(lambda: self.open == before + count)
        await self.settle()
        return client


@asynccontextmanager
async def served(place: Path, exports: int = 1, window: int = DEPTH) -> AsyncIterator[Served]:
    """At the end everything must be answered."""
    path = place / "nbd"
    found = Served(path, exports, window)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(100)
        async with found.server.serving([listening]):
            try:
                yield found
            except Exception:
                found.session.fail(ConnectionLost("the test has failed"))
                raise
            while await found.answer():
                pass
    queue = found.session.queue
    assert queue.busy == 0 and not queue.waiting.entries
    assert found.server.memory.used == 0


@pytest.mark.parametrize("window", [DEPTH, 4])
@pytest.mark.parametrize("what", FLOODS)
async def test_a_single_request_beside_a_flood(tmp_path: Path, what: str, window: int) -> None:
    """It waits for no more than two commands of the other client for a slot, and no more than two
    for the command window."""
    async with (
        served(tmp_path, window=window) as found,
        await found.flood(what),
        await connected(found.path) as single,
    ):
        for number in range(5):
            lba = LBA + number
            await single.send(request(nbd.READ, lba * BLOCK, BLOCK, cookie=number))
            await found.settle()
            assert await found.answers_until_sent(lba) <= 4
            await found.answer_all_sent()
            assert await single.reply(BLOCK) == (0, number, bytes(BLOCK))


async def test_a_single_request_beside_several_floods(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as found,
        await found.flood("read"),
        await found.flood("write"),
        await found.flood("FUA"),
        await connected(found.path) as single,
    ):
        await single.send(request(nbd.READ, LBA * BLOCK, BLOCK, cookie=1))
        await found.settle()
        assert await found.answers_until_sent(LBA) <= 2 * 3


async def test_exports_of_one_session(tmp_path: Path) -> None:
    """Their clients wait for the same slots."""
    async with (
        served(tmp_path, exports=2) as found,
        await found.flood("read"),
        await connected(found.path, "lun1") as single,
    ):
        await single.send(request(nbd.READ, LBA * BLOCK, BLOCK, cookie=1))
        await found.settle()
        assert await found.answer() and await found.answer()
        assert found.was_sent(LBA)


async def test_two_floods_share_the_slots(tmp_path: Path) -> None:
    """None of them has more than its half for long."""
    async with served(tmp_path) as found, await found.flood("read"), await found.flood("write"):
        for _ in range(4 * DEPTH):
            assert await found.answer()
        operations = [message[32] for _, message in found.datamover.sent[-2 * DEPTH :]]
        assert operations.count(READ_16) == operations.count(WRITE_16) == DEPTH


async def test_a_flood_whose_client_goes(tmp_path: Path) -> None:
    """What it has open ends in its turns; the other client does not notice."""
    async with served(tmp_path) as found, await connected(found.path) as single:
        async with await found.flood("unaligned read"):
            pass
        for number in range(5):
            await single.send(request(nbd.READ, (LBA + number) * BLOCK, BLOCK, cookie=number))
            await found.settle()
            await found.answer_all_sent()
            await found.answer_all_sent()
            assert await single.reply(BLOCK) == (0, number, bytes(BLOCK))
        assert found.open > 500


async def test_cancelled_while_clients_wait(tmp_path: Path) -> None:
    """Some of them were woken for a slot, and do not come."""
    with trio.CancelScope() as scope:
        async with served(tmp_path) as found, await found.flood("FUA"), await found.flood("read"):
            await found.answer(settle=False)
            assert found.session.queue.take_now() is None
            async with trio.open_nursery() as nursery:
                nursery.start_soon(found.answer_while_it_ends)
                scope.cancel()
    assert scope.cancelled_caught
    queue = found.session.queue
    assert queue.busy == 0
    slots = [queue.take_now() for _ in range(DEPTH)]
    assert None not in slots
