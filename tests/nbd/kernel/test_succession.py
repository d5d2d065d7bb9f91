"""Connections go from one server to another, in one process: what can go wrong at each step."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import trio
import trio.testing

from iserblk.disk.seam import LossCount
from iserblk.errors import CommandTimeout, IserblkError, LocalProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.kernel.channel import PacketSocket
from iserblk.nbd.kernel.handover import (
    MOST,
    TABLE,
    VERSION,
    WITHOUT_LOSSES,
    Event,
    Given,
    Kind,
    State,
    encode,
    encode_all,
    encode_connection,
    encode_losses,
    encode_refused,
)
from iserblk.nbd.kernel.orders import NoHandOver
from iserblk.nbd.kernel.succession import Giver, Taker, listening_for_successors
from iserblk.nbd.server import NbdServer
from tests.nbd.serving import HeldDisk, fake, server_of
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.fake_disk import AsyncFake
from tests.support.nbd_client import RawClient, Reply, connected, request, write
from tests.support.until import until

KIB = 1 << 10


class Old:
    """A server that offers its connections, and clients of it."""

    def __init__(self, place: Path, disk: AsyncFake, server: NbdServer) -> None:
        self.path = place / "successors"
        self.disk = disk
        self.server = server
        self.losses = LossCount()
        self.giver = Giver(lambda: self.losses)
        self.clients: list[RawClient] = []
        self.flush_fails = False
        self.ended = trio.Event()
        self._stop = trio.Event()

    def end(self) -> None:
        """As a signal does."""
        self._stop.set()

    async def run(self, listening: socket.socket, successors: socket.socket) -> None:
        """As ``nbd.serving`` does."""
        async with self.server.serving([listening]), trio.open_nursery() as offering:
            offering.start_soon(self.giver.offer, successors, self.server, self.flush)
            await self._stop.wait()
            offering.cancel_scope.cancel()
        self.ended.set()

    def lose(self) -> bool:
        """It hears of a loss. Whether the successor knows."""
        losses, told = self.losses
        self.losses = LossCount(losses + 1, told)
        return self.giver.tell()

    async def flush(self) -> None:
        if self.flush_fails:
            raise CommandTimeout("no flush")
        await self.disk.flush()


@asynccontextmanager
async def old_server(place: Path, disk: AsyncFake, count: int = 1) -> AsyncIterator[Old]:
    """At the end the clients are closed. What the successor has is the caller's."""
    old = Old(place, disk, server_of(disk))
    with (
        socket.socket(socket.AF_UNIX) as listening,
        listening_for_successors(old.path) as successors,
    ):
        listening.bind(str(place / "nbd"))
        listening.listen(100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.run, listening, successors)
            for _ in range(count):
                old.clients.append(await connected(place / "nbd"))
            yield old
            for client in old.clients:
                await trio.aclose_forcefully(client.stream)
            old.end()
    old.giver.close()


async def take(old: Old) -> list[PausedConnection]:
    taker = Taker(old.path)
    try:
        return await taker.take()
    finally:
        taker.close()


def close(taken: list[PausedConnection]) -> None:
    for each in taken:
        each.sock.close()


async def answers(client: RawClient, cookie: int) -> None:
    await client.send(write(b"fine", 0, cookie))
    assert await client.reply() == Reply(0, cookie)


async def test_requests_before_within_and_after(tmp_path: Path) -> None:
    """What has begun is answered by the old server; what has come in part, or later, by the new."""
    disk = HeldDisk()
    async with old_server(tmp_path, disk, 2) as old, trio.open_nursery() as nursery:
        first, second = old.clients
        half = write(b"half" * 15 * KIB, 4 * KIB, 3)
        await first.send(write(b"begun", 0, 1) + half[:50_000])
        await until(lambda: disk.waiting == 1)
        found: list[PausedConnection] = []

        async def run() -> None:
            found.extend(await take(old))

        nursery.start_soon(run)
        await until(lambda: old.giver.state is State.DRAINING)
        await second.send(request(nbd.READ, 0, 5, 2))
        disk.go.set()
        assert await first.reply() == Reply(0, 1)
        await until(lambda: found)
        assert sorted(len(each.unparsed) for each in found) == [0, 50_000]
        assert disk.waiting == 0  # the request of the second client waits in its socket
        fresh = AsyncFake(disk.fake)
        async with server_of(fresh).serving([], found):
            assert await second.reply(5) == Reply(0, 2, b"begun")
            await first.send(half[50_000:])
            assert await first.reply() == Reply(0, 3)
            assert fresh.fake.data[4 * KIB : 64 * KIB] == b"half" * 15 * KIB
            for client in old.clients:
                await trio.aclose_forcefully(client.stream)


async def test_a_large_write_of_which_a_part_has_come(tmp_path: Path) -> None:
    """The old server receives the rest, and nothing behind it."""
    disk = fake()
    whole = write(os.urandom(300 * KIB), 0, 1)
    async with old_server(tmp_path, disk) as old, trio.open_nursery() as nursery:
        (client,) = old.clients
        await client.send(whole[: 200 * KIB])
        found: list[PausedConnection] = []

        async def run() -> None:
            found.extend(await take(old))

        nursery.start_soon(run)
        await until(lambda: old.giver.state is State.DRAINING)
        await client.send(whole[200 * KIB :] + request(nbd.READ, 0, 4, 2))
        assert await client.reply() == Reply(0, 1)
        await until(lambda: found)
        async with server_of(fake()).serving([], found):  # with other data than the old one's
            assert await client.reply(4) == Reply(0, 2, bytes(4))
            await trio.aclose_forcefully(client.stream)


async def test_everything_is_flushed(tmp_path: Path) -> None:
    disk = fake()
    async with old_server(tmp_path, disk) as old:
        await answers(old.clients[0], 1)
        assert disk.dirty
        close(await take(old))
        assert not disk.dirty


async def test_a_write_that_is_under_way_is_flushed_when_it_has_ended(tmp_path: Path) -> None:
    """No journal of the successor has it."""
    disk = HeldDisk()
    async with old_server(tmp_path, disk) as old, trio.open_nursery() as nursery:
        (client,) = old.clients
        await client.send(write(b"late", 0, 1))
        await until(lambda: disk.waiting == 1)
        found: list[PausedConnection] = []

        async def run() -> None:
            found.extend(await take(old))

        nursery.start_soon(run)
        await until(lambda: old.giver.state is State.DRAINING)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        disk.go.set()
        assert await client.reply() == Reply(0, 1)
        await until(lambda: found)
        assert not disk.dirty
        close(found)


@pytest.mark.logs("could not flush")
async def test_a_flush_that_fails(tmp_path: Path) -> None:
    """The old server goes on: told to end, it would lose writes without a word."""
    async with old_server(tmp_path, fake()) as old:
        old.flush_fails = True
        with pytest.raises(IserblkError, match="goes on: the target could not flush: no flush"):
            await take(old)
        await answers(old.clients[0], 1)
        old.flush_fails = False
        close(await take(old))


@pytest.mark.logs("the connections stay here: requests are under way")
async def test_requests_that_do_not_end(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    disk = HeldDisk()
    async with old_server(tmp_path, disk) as old:
        (client,) = old.clients
        await client.send(write(b"slow", 0, 1) + write(b"next", 8, 2))
        await until(lambda: disk.waiting == 2)
        with pytest.raises(NoHandOver, match="under way for more than"):
            await take(old)
        disk.go.set()
        await client.replies({1: 0, 2: 0})
        close(await take(old))


@pytest.mark.logs("it has no connections")
async def test_without_clients(tmp_path: Path) -> None:
    async with old_server(tmp_path, fake(), 0) as old:
        with pytest.raises(NoHandOver, match="it has no connections"):
            await take(old)


def ask(old: Old) -> socket.socket:
    """A successor of which the caller plays the part."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(old.path))
    sock.setblocking(False)
    return sock


async def hear(sock: socket.socket) -> tuple[int, list[int]]:
    """The kind of a message, and its descriptors."""
    await trio.lowlevel.wait_readable(sock)
    packet, numbers, _, _ = socket.recv_fds(sock, MOST, 4)
    return int.from_bytes(packet[10:12]), numbers


@pytest.mark.logs("the connections stay here")
@pytest.mark.parametrize("step", [Kind.HELLO, Kind.LOSSES, Kind.CONNECTION, Kind.BYTES, Kind.ALL])
async def test_a_successor_that_dies(step: Kind, tmp_path: Path) -> None:
    """After it has sent HELLO, or has received other messages: the old server goes on, and the next
    successor gets everything."""
    disk = fake()
    half = write(b"half" * KIB, 0, 1)
    async with old_server(tmp_path, disk) as old:
        (client,) = old.clients
        await client.send(half[:1000])
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO))
            kind = Kind.HELLO
            while kind != step:
                kind, numbers = await hear(sock)  # type: ignore[assignment]
                for number in numbers:
                    os.close(number)
        await client.send(half[1000:])
        assert await client.reply() == Reply(0, 1)
        taken = await take(old)
        async with server_of(AsyncFake(disk.fake)).serving([], taken):
            await answers(client, 2)
            await trio.aclose_forcefully(client.stream)


@pytest.mark.logs("the connections stay here")
@pytest.mark.parametrize(
    "words",
    [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n" * 3, encode(Kind.TAKEN), encode(Kind.HELLO, b"?")],
)
async def test_nonsense_in_place_of_hello(words: bytes, tmp_path: Path) -> None:
    async with old_server(tmp_path, fake()) as old:
        with ask(old) as sock:
            sock.send(words)
            await trio.lowlevel.wait_readable(sock)
            assert sock.recv(MOST) == b""
        await answers(old.clients[0], 1)


@pytest.mark.logs("did not take them")
async def test_nonsense_in_place_of_taken(tmp_path: Path) -> None:
    async with old_server(tmp_path, fake()) as old:
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO))
            kind = 0
            while kind != Kind.ALL:
                kind, numbers = await hear(sock)
                for number in numbers:
                    os.close(number)
            sock.send(encode(Kind.HELLO))
            await answers(old.clients[0], 1)


@pytest.mark.logs("the connections stay here")
async def test_a_successor_that_is_silent(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before HELLO, or before TAKEN, which cannot come any more when the old server goes on."""
    refused: list[OSError] = []

    async with old_server(tmp_path, fake()) as old:
        go_on = old.server.go_on

        def go_on_and_send_taken() -> None:
            with pytest.raises(BrokenPipeError) as raised:
                sock.send(encode(Kind.TAKEN))
            refused.append(raised.value)
            go_on()

        monkeypatch.setattr(old.server, "go_on", go_on_and_send_taken)
        with ask(old) as sock:
            await trio.lowlevel.wait_readable(sock)
            assert sock.recv(MOST) == b""
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO))
            await until(lambda: old.giver.state is State.OFFERED)
            await until(lambda: old.giver.state is State.SERVING)
        assert len(refused) == 1
        await answers(old.clients[0], 1)


@pytest.mark.logs("it hands over in version 3, and not 2")
async def test_a_successor_of_another_version(tmp_path: Path) -> None:
    async with old_server(tmp_path, fake()) as old:
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO, b"and more", version=VERSION + 1))
            await trio.lowlevel.wait_readable(sock)
            assert sock.recv(MOST)[10:13] == b"\0\2\1"  # REFUSED; it may have the server end
        await answers(old.clients[0], 1)


async def test_a_successor_that_dies_with_taken_on_its_way(tmp_path: Path) -> None:
    """The connections are its own by then: no other server touches them."""
    async with old_server(tmp_path, fake()) as old:
        (client,) = old.clients
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO))
            kind, mine = 0, []
            while kind != Kind.ALL:
                kind, numbers = await hear(sock)
                mine += numbers
            sock.send(encode(Kind.TAKEN))
        await until(lambda: old.giver.state is State.GIVEN)
        await client.send(write(b"lost", 0, 1))
        with socket.socket(fileno=mine[0]) as here:
            assert here.recv(100) == write(b"lost", 0, 1)


async def test_ended_with_taken_on_its_way(tmp_path: Path) -> None:
    """A signal ends the old server in that moment: the successor keeps what it has taken."""
    async with old_server(tmp_path, fake()) as old:
        (client,) = old.clients
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO))
            kind, mine = 0, []
            while kind != Kind.ALL:
                kind, numbers = await hear(sock)
                mine += numbers
            sock.send(encode(Kind.TAKEN))
            old.end()
        await old.ended.wait()
        assert old.giver.state is State.GIVEN
        with socket.socket(fileno=mine[0]) as here:
            await client.send(b"still there")
            assert here.recv(100) == b"still there"


async def test_nothing_acts_on_what_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may end in that moment, and would shut its sockets down."""
    async with old_server(tmp_path, fake(), 2) as old:
        hand_over = old.server.hand_over
        left: list[int] = []

        def hand_over_and_look() -> None:
            hand_over()
            left.append(old.server.clients)

        monkeypatch.setattr(old.server, "hand_over", hand_over_and_look)
        close(await take(old))
        await until(lambda: left)
        assert left == [0]


async def test_a_client_that_shakes_hands_in_the_pause_is_not_served(tmp_path: Path) -> None:
    """What it wrote would be flushed by no server."""
    disk = HeldDisk()
    async with old_server(tmp_path, disk) as old, trio.open_nursery() as nursery:
        (client,) = old.clients
        stream = await trio.open_unix_socket(str(tmp_path / "nbd"))
        await client.send(write(b"slow", 0, 1))
        await until(lambda: disk.waiting == 1)
        found: list[PausedConnection] = []

        async def run() -> None:
            found.extend(await take(old))

        late = RawClient(stream)
        await late.greet()
        nursery.start_soon(run)
        await until(lambda: old.giver.state is State.DRAINING)
        with pytest.raises((EOFError, trio.BrokenResourceError)):
            await late.choose()
            await late.send(write(b"late", 8, 2))
            await late.reply()
        disk.go.set()
        await until(lambda: found)
        assert disk.ended == 1 and not disk.dirty
        close(found)
        await stream.aclose()


async def deaf(path: Path, *packets: bytes) -> None:
    """Body of a task: an old server that says just this."""
    with listening_for_successors(path) as listening:
        listening.setblocking(False)
        await trio.lowlevel.wait_readable(listening)
        sock, _ = listening.accept()
        with sock:
            for packet in packets:
                sock.send(packet)
            await trio.sleep_forever()


@pytest.mark.parametrize(
    ("packets", "error"),
    [
        ([], "it has not answered for 15 s"),
        ([b"nonsense" * 4], "not a server of iserblk"),
        ([encode_refused("soon", True, version=9)], "soon"),
        ([encode(Kind.ALL, bytes(2), version=9)], "it hands over in version 9, and not 2"),
        ([encode_losses(LossCount()), encode(Kind.CONNECTION, bytes(8))], "with 0 descriptors"),
    ],
)
async def test_an_old_server_that_does_not_hand_over(
    packets: list[bytes], error: str, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    path = tmp_path / "successors"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(deaf, path, *packets)
        await until(path.exists)
        taker = Taker(path)
        with pytest.raises(NoHandOver, match=error):
            await taker.take()
        taker.close()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("count", "error"), [(1, "no stream"), (2, "with 2"), (5, "more desc")])
async def test_descriptors_that_are_no_connections(count: int, error: str, tmp_path: Path) -> None:
    """As many as have come are closed."""
    (first, *_) = encode_connection(Given(nbd.Negotiated("", False, False, False, 0), b""))
    losses = encode_losses(LossCount())
    path = tmp_path / "successors"
    with (
        listening_for_successors(path) as listening,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as odd,
    ):
        before = descriptors_to_begin_with()
        taker = Taker(path)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def _old_server() -> None:
                await trio.lowlevel.wait_readable(listening)
                sock, _ = listening.accept()
                with sock:
                    await trio.lowlevel.wait_readable(sock)
                    assert sock.recv(MOST) == encode(Kind.HELLO)
                    sock.send(losses)
                    socket.send_fds(sock, [first], [odd.fileno()] * count)
                    sock.send(encode_all(1))
                    await trio.lowlevel.wait_readable(sock)

            with pytest.raises(NoHandOver, match=error):
                await taker.take()
            taker.close()
        assert descriptors() == before


async def test_where_no_server_listens(tmp_path: Path) -> None:
    taker = Taker(tmp_path / "successors")
    with pytest.raises(NoHandOver, match=os.strerror(errno.ENOENT)):
        await taker.take()
    taker.close()


@pytest.mark.parametrize("losses", [LossCount(), LossCount(5, 5), LossCount(5, 3)])
async def test_losses_go_with_the_connections(tmp_path: Path, losses: LossCount) -> None:
    async with old_server(tmp_path, fake()) as old:
        old.losses = losses
        taker = Taker(old.path)
        close(await taker.take())
        taker.close()
        assert taker.losses == losses


async def hear_all(sock: socket.socket, version: int = VERSION) -> list[int]:
    """The kinds of what a successor hears up to ALL."""
    sock.send(encode(Kind.HELLO, version=version))
    kinds: list[int] = []
    while Kind.ALL not in kinds:
        kind, numbers = await hear(sock)
        kinds.append(kind)
        for number in numbers:
            os.close(number)
    await trio.testing.wait_all_tasks_blocked()
    return kinds


@pytest.mark.logs("does not hear of a loss: Broken pipe")
async def test_losses_that_it_hears_of_until_its_end(tmp_path: Path) -> None:
    """The successor is told at once; False says that there is none."""
    async with old_server(tmp_path, fake()) as old:
        old.losses = LossCount(1, 1)
        assert not old.lose()
        with ask(old) as sock:
            assert await hear_all(sock) == [Kind.LOSSES, Kind.CONNECTION, Kind.ALL]
            assert old.lose() and sock.recv(MOST) == encode_losses(LossCount(3, 1))
            sock.send(encode(Kind.TAKEN))
            await until(lambda: old.giver.state is State.GIVEN)
            assert old.lose() and sock.recv(MOST) == encode_losses(LossCount(4, 1))
            assert old.giver.tell()
            with pytest.raises(BlockingIOError):
                sock.recv(MOST)
        assert old.giver.tell() and not old.lose()


@pytest.mark.logs("the connections stay here: the successor did not take them")
async def test_losses_that_it_hears_of_when_it_goes_on(tmp_path: Path) -> None:
    """They are for the next successor."""
    async with old_server(tmp_path, fake()) as old:
        with ask(old) as sock:
            await hear_all(sock)
        await until(lambda: old.giver.state is State.SERVING)
        assert not old.lose()
        taker = Taker(old.path)
        close(await taker.take())
        taker.close()
        assert taker.losses == (1, 0)


async def test_a_successor_that_is_too_late(tmp_path: Path) -> None:
    """The old server goes on by the time that it has everything: it may not serve, too."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, theirs = socket.socketpair()
    taker = Taker(tmp_path, lambda _path: PacketSocket(here))
    before = descriptors_to_begin_with()
    with mine, theirs, there:
        there.send(encode_losses(LossCount()))
        (packet,) = encode_connection(Given(nbd.Negotiated("", False, False, False, 0), b""))
        socket.send_fds(there, [packet], [theirs.fileno()])
        there.send(encode_all(1))
        send = PacketSocket.send

        async def send_and_be_late(
            channel: PacketSocket, packet: bytes, sock: socket.socket | None = None
        ) -> None:
            await send(channel, packet, sock)
            there.shutdown(socket.SHUT_RD)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(PacketSocket, "send", send_and_be_late)
            with pytest.raises(NoHandOver, match=os.strerror(errno.EPIPE)):
                await taker.take()
        assert descriptors() == before
        assert taker.close() == 0


@pytest.mark.logs("message 6 behind ALL")
async def test_a_successor_looks_for_losses_when_it_has_taken(tmp_path: Path) -> None:
    """And later, until the old server has ended. What makes no sense is a loss."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine, theirs = socket.socketpair()
    taker = Taker(tmp_path, lambda _path: PacketSocket(here))
    with mine, theirs:
        there.send(encode_losses(LossCount(1, 1)))
        (packet,) = encode_connection(Given(nbd.Negotiated("", False, False, False, 0), b""))
        socket.send_fds(there, [packet], [theirs.fileno()])
        there.send(encode_all(1))
        there.send(encode_losses(LossCount(3, 1)))
        close(await taker.take())
        assert taker.losses == (3, 1)
    heard: list[int] = []
    there.send(encode_losses(LossCount(3, 1)))
    there.send(encode_losses(LossCount(7, 1)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(taker.old_server_ended, heard.append)
        await until(lambda: len(heard) == 2)
        nursery.cancel_scope.cancel()
    assert heard == [0, 4] and taker.losses == (7, 1)
    there.send(encode_losses(LossCount(8, 1)))
    there.send(encode(Kind.TAKEN))
    assert taker.close() == 2
    with pytest.raises(BrokenPipeError):
        there.send(encode_losses(LossCount(11, 1)))
    there.close()


@pytest.mark.logs("too old to tell")
async def test_a_successor_of_version_1(tmp_path: Path) -> None:
    """It gets the connections, but not while there is a loss to tell, which it would not tell. Nor
    may it have the server end: it would not know of its loss, either."""
    async with old_server(tmp_path, fake()) as old:
        old.losses = LossCount(1, 0)
        with ask(old) as sock:
            sock.send(encode(Kind.HELLO, version=WITHOUT_LOSSES))
            await trio.lowlevel.wait_readable(sock)
            refusal = sock.recv(MOST)
            assert refusal[8:13] == b"\0\1\0\2\0" and b"blockdev --flushbufs" in refusal
        await answers(old.clients[0], 1)
        old.losses = LossCount(1, 1)
        with ask(old) as sock:
            assert await hear_all(sock, WITHOUT_LOSSES) == [Kind.CONNECTION, Kind.ALL]
            assert old.giver.tell() and not old.lose()
            sock.send(encode(Kind.TAKEN, version=WITHOUT_LOSSES))
            await until(lambda: old.giver.state is State.GIVEN)
            assert not old.giver.tell()
            with pytest.raises(BlockingIOError):
                sock.recv(MOST)


async def test_an_old_server_of_version_1(tmp_path: Path) -> None:
    """It does not know our HELLO, and is asked again in its own version."""
    path = tmp_path / "successors"
    here, there = socket.socketpair()
    given = encode_connection(Given(nbd.Negotiated("", False, False, False, 0), b""), 1)
    heard: list[bytes] = []

    async def old_server() -> None:
        for answers in ([encode_refused("what?", True, 1)], [*given, encode_all(1, 1)]):
            await trio.lowlevel.wait_readable(listening)
            sock, _ = listening.accept()
            with sock:
                await trio.lowlevel.wait_readable(sock)
                heard.append(sock.recv(MOST))
                for packet in answers:
                    rights = [there.fileno()] if packet[11] == Kind.CONNECTION else []
                    socket.send_fds(sock, [packet], rights)
                await trio.lowlevel.wait_readable(sock)
                heard.append(sock.recv(MOST))

    with here, there, listening_for_successors(path) as listening:
        taker = Taker(path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old_server)
            (taken,) = await taker.take()
        taker.close()
        taken.sock.close()
    second = encode(Kind.HELLO, version=1), encode(Kind.TAKEN, version=1)
    assert heard == [encode(Kind.HELLO), b"", *second] and taker.losses == (0, 0)


async def test_a_server_without_descriptors_does_not_spin(tmp_path: Path) -> None:
    """A successor connects, and cannot be accepted: it is looked at again after a while."""

    class Full(socket.socket):
        tries = 0

        def accept(self) -> NoReturn:
            self.tries += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def flush() -> None:
        pass

    with Full(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, \
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as successor:  # fmt: skip
        listening.bind(str(tmp_path / "successors"))
        listening.listen()
        successor.connect(str(tmp_path / "successors"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Giver().offer, listening, server_of(fake()), flush)
            await trio.testing.wait_all_tasks_blocked()
            assert listening.tries == 1
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_the_table_does_not_have_changes_nothing(state: State, event: Event) -> None:
    giver = Giver()
    giver.state = state
    after = TABLE.get((state, event))
    if after is None:
        with pytest.raises(LocalProtocolError, match=f"that is {state} cannot take: {event}"):
            giver.enter(event)
        assert giver.state is state
    else:
        giver.enter(event)
        assert giver.state is after
