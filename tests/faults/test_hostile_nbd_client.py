"""NBD clients that send garbage, lie, stall, flood or die, a real server, and a bystander.

The server is a process of its own over a real target: what it leaks, it leaks there.
"""

from __future__ import annotations

import contextlib
import os
import random
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.nbd import messages as nbd
from iserblk.nbd.messages import Option
from tests.cli.commands import Server, serving
from tests.support.nbd_client import (
    RawClient,
    Reply,
    connect,
    connected,
    go,
    option,
    request,
    write,
)
from tests.support.target import running_target
from tests.support.until import until

KIB, MIB = 1 << 10, 1 << 20
SIZE = 16 * MIB
BLOCK = 64 * KIB
# Floods are ten thousand commands in the queue, and a busy machine may take minutes for them: the
# bystander's command and the server's end wait for those before them.
PATIENT = "io-timeout=900"
PATIENCE_S = 900.0
FLAGS = nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)


class Place:
    """A server: lun0 is the bystander's, lun1 is for hostile clients."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server = server
        self.path = path

    @property
    def memory(self) -> int:
        """Bytes that are resident."""
        words = Path(f"/proc/{self.server.process.pid}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("nbd")
    specs = [f"{root}/{name}:size=16M" for name in ("good", "bad")]
    with (
        running_target(specs, root / "target.log") as target,
        serving(
            "nbd", f"{target.url}?{PATIENT}", "--socket", root / "s", log=root / "log"
        ) as server,
    ):
        yield Place(server, root / "s")
        server.process.terminate()
        assert server.process.wait(PATIENCE_S) == 143
    assert "Traceback" not in (root / "log").read_text()
    assert "internal error" not in (root / "log").read_text()


class Bystander:
    """A client that writes and reads back again and again. ``turns``: how often it has."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self.turns = 0

    async def run(self) -> None:
        while True:
            await self.turn()

    async def turn(self) -> None:
        data = random.Random(self.turns).randbytes(BLOCK)
        at = self.turns % 8 * BLOCK
        await self._client.send(write(data, at, 1))
        assert await self._client.reply() == Reply(0, 1)
        await self._client.send(request(nbd.READ, at, BLOCK, 2))
        assert await self._client.reply(BLOCK) == Reply(0, 2, data)
        self.turns += 1


@asynccontextmanager
async def bystander(place: Place) -> AsyncIterator[Bystander]:
    """One at work, which makes progress while the block runs, and after it; and the server has as
    many descriptors as before then."""
    before = place.descriptors
    async with await connected(place.path, "lun0") as client:
        good = Bystander(client)
        await good.turn()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(good.run)
            yield good
            turns = good.turns
            await until(lambda: good.turns > turns + 2)
            nursery.cancel_scope.cancel()
    async with await connected(place.path, "lun0") as client:
        await Bystander(client).turn()
    await until(lambda: place.descriptors <= before)


def garbage(seed: int) -> bytes:
    return random.Random(seed).randbytes(200)


IN_HANDSHAKE: dict[str, bytes] = {
    "nothing": b"",
    "garbage for flags": garbage(1),
    "garbage for an option": FLAGS + garbage(2),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "half an option": FLAGS + go("lun1")[:20],
    "a name that is longer than the option": FLAGS
    + option(Option.GO, b"\xff\xff\xff\xff" + bytes(6)),
    "a list that is longer than the option": FLAGS
    + option(Option.GO, struct.pack(">I", 4) + b"lun1\xff\xff"),
    "an option of 4 GiB": FLAGS + option(Option.GO, b"x" * 100, (1 << 32) - 1),
    "EXPORT_NAME of 4 GiB": FLAGS + option(Option.EXPORT_NAME, b"", (1 << 32) - 1),
    "EXPORT_NAME of none that there is": FLAGS + option(Option.EXPORT_NAME, b"no such"),
    "names that are no UTF-8": FLAGS + option(Option.EXPORT_NAME, b"\xff\xfe\x80"),
    "a thousand unknown options": FLAGS + b"".join(option(99, b"x" * 50) for _ in range(1000)),
    "STARTTLS, and not encrypted bytes": FLAGS + option(Option.STARTTLS) + garbage(3),
    "LIST again and again": FLAGS + option(Option.LIST) * 1000,
    "contexts of billions": FLAGS
    + option(Option.STRUCTURED_REPLY)
    + option(Option.SET_META_CONTEXT, struct.pack(">I", 4) + b"lun1" + b"\xff\xff\xff\xff"),
}
IN_TRANSMISSION: dict[str, bytes] = {
    "garbage": garbage(4),
    "half a request": request(nbd.READ, 0, 512)[:20],
    "a write of 4 GiB": request(nbd.WRITE, 0, (1 << 32) - 1) + garbage(5),
    "a read of 4 GiB": request(nbd.READ, 0, (1 << 32) - 1),
    "a write behind the end": request(nbd.WRITE, 1 << 62, 4096) + bytes(4096),
    "offsets that overflow": request(nbd.TRIM, (1 << 64) - 1, (1 << 32) - 1),
    "unknown commands": b"".join(request(command, 0, 4096, command) for command in range(8, 5000)),
    "unknown flags": b"".join(request(nbd.READ, 0, 1, 0, 1 << bit) for bit in range(16)),
    "BLOCK_STATUS without a context": request(nbd.BLOCK_STATUS, 0, 4096),
    "one cookie for all": request(nbd.READ, 0, 4096, 7) * 200,
    "DISC in the middle": request(nbd.READ, 0, MIB) + request(nbd.DISC) + garbage(6),
    "half of a write": write(bytes(4 * MIB))[: 3 * MIB],
    "half of a small write": write(bytes(4 * KIB))[: 3 * KIB],
}


@pytest.mark.parametrize("half_close", [True, False], ids=["half-closed", "closed"])
@pytest.mark.parametrize("what", IN_HANDSHAKE)
async def test_in_the_handshake(place: Place, what: str, half_close: bool) -> None:
    """Sent by twenty clients, which then go."""
    async with bystander(place), trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(_attack, place, IN_HANDSHAKE[what], half_close, False)


@pytest.mark.parametrize("half_close", [True, False], ids=["half-closed", "closed"])
@pytest.mark.parametrize("what", IN_TRANSMISSION)
async def test_in_the_transmission(place: Place, what: str, half_close: bool) -> None:
    async with bystander(place), trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(_attack, place, IN_TRANSMISSION[what], half_close, True)


async def _attack(place: Place, said: bytes, half_close: bool, in_transmission: bool) -> None:
    client = await (connected(place.path, "lun1") if in_transmission else connect(place.path))
    async with client:
        with contextlib.suppress(trio.BrokenResourceError):
            await client.send(said)
            if half_close:
                await client.send_eof()
                await client.end()  # which comes, without another byte of ours


async def test_silent_clients_by_the_thousand(place: Place) -> None:
    """They cost little, and make room for those that say something."""
    memory = place.memory
    async with bystander(place) as good:
        silent = []
        for number in range(1000):
            silent.append(await connect(place.path))
            if number % 100 == 0:
                turns = good.turns
                await until(lambda: good.turns > turns)  # noqa: B023
        async with await connected(place.path, "lun1") as other:
            await other.send(request(nbd.READ, 0, 1, 7))
            assert (await other.reply(1)).error == 0
        assert place.memory - memory < 64 * MIB
        for each in silent:
            await trio.aclose_forcefully(each.stream)


async def test_a_thousand_clients_at_work(place: Place) -> None:
    """All at once, each with a read; none is let go, and each takes little."""
    memory = place.memory
    async with bystander(place), contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(1000):
            # (Each by itself: a thousand may take longer than the server waits for a handshake.)
            client = await connected(place.path, "lun1")
            clients.append(await stack.enter_async_context(client))
        for number, each in enumerate(clients):
            await each.send(request(nbd.READ, 0, 4096, number))
        for number, each in enumerate(clients):
            assert await each.reply(4096) == Reply(0, number, bytes(4096))
        assert place.memory - memory < 128 * MIB


async def test_many_clients_with_requests_that_are_refused(place: Place) -> None:
    """A thousand each, whose answers they do not read. Then they do, and have all of them."""
    memory = place.memory
    each_has = 1000
    said = b"".join(request(77, 0, 0, cookie) for cookie in range(each_has))
    async with bystander(place), contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(250):
            client = await connected(place.path, "lun1")
            clients.append(await stack.enter_async_context(client))
            await client.send(said)
        for each in clients:
            answers = await each.replies(dict.fromkeys(range(each_has), 0))
            assert {answer.error for answer in answers.values()} == {nbd.EINVAL}
        assert place.memory - memory < 128 * MIB


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    "length", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (4 * KIB, MIB)), 32 * MIB]
)
async def test_a_flood_that_reads_no_reply(place: Place, length: int) -> None:
    """Of ten clients. Memory stays bounded; the bystander goes on while they are there."""
    memory = place.memory
    async with bystander(place) as good, contextlib.AsyncExitStack() as ends:
        clients = [await connected(place.path, "lun1") for _ in range(10)]
        for each in clients:
            ends.push_async_callback(trio.aclose_forcefully, each.stream)
        async with trio.open_nursery() as nursery:
            for each in clients:
                nursery.start_soon(_flood, each, length)
            turns = good.turns
            await until(lambda: good.turns > turns + 20)
            nursery.cancel_scope.cancel()
        assert place.memory - memory < 160 * MIB


async def _flood(client: RawClient, length: int) -> None:
    """Until cancelled."""
    requests = request(nbd.READ, 0, min(length, SIZE)) * 100
    with contextlib.suppress(trio.BrokenResourceError):
        while True:
            await client.send(requests)


async def test_writes_that_stop_in_the_middle(place: Place) -> None:
    """Large buffers that wait for data are counted: others get theirs all the same."""
    memory = place.memory
    async with bystander(place) as good:
        clients = [await connected(place.path, "lun1") for _ in range(20)]
        for each in clients:
            await each.send(request(nbd.WRITE, 0, 32 * MIB) + bytes(100))
        turns = good.turns
        await until(lambda: good.turns > turns + 20)
        assert place.memory - memory < 160 * MIB
        for each in clients:
            await trio.aclose_forcefully(each.stream)


async def test_clients_that_die_at_any_byte(place: Place) -> None:
    """Of a conversation with everything in it."""
    whole = (
        FLAGS
        + option(Option.LIST)
        + go("lun1")
        + write(b"\xee" * 4096, 8 * MIB, 1)
        + request(nbd.READ, 8 * MIB, 4096, 2)
        + request(nbd.FLUSH, cookie=3)
        + write(b"\xee" * 100_000, 9 * MIB, 4)
        + request(nbd.TRIM, 9 * MIB, 4096, 5)
    )
    chance = random.Random(6)
    cuts = sorted({*range(0, 200, 7), *(chance.randrange(len(whole)) for _ in range(60))})
    async with bystander(place):
        for cut in cuts:
            async with await connect(place.path) as client:
                with contextlib.suppress(trio.BrokenResourceError):
                    await client.send(whole[:cut])
