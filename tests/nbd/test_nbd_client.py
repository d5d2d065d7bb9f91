"""One NBD client of the server: its turns, its memory, and its ends."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing

from iserblk.commands.command import Command, Waiter
from iserblk.disk.seam import FlushClient, LossCount, Rest
from iserblk.errors import CommandTimeout, IserblkError, NotSupported
from iserblk.loop import guest, strands
from iserblk.loop.here import loop_here
from iserblk.loop.strands import elsewhere, open_strands
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import CLIENT_BYTES, HEADROOM, Memory
from iserblk.nbd.client import MANY, Client
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from iserblk.nbd.tls import TlsStream, by_certificates
from iserblk.nbd.transmission import MOST_REFUSALS
from tests.nbd.serving import Again, DirectFake, HeldDisk, arrived, fake
from tests.support.certificates import Authority
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info
from tests.support.nbd_client import Corked, RawClient, Reply, behind_tls, go, request, write
from tests.support.until import until

KIB, MIB = 1 << 10, 1 << 20


class Served:
    """A client of the server, ``client``, of ``export``; and what is at the other end of its
    socket."""

    def __init__(
        self,
        client: Client,
        raw: RawClient,
        export: Export,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.client = client
        self.raw = raw
        self.export = export
        self.over = trio.Event()  # ``serve`` has returned
        self._context = context  # of TLS, without which it is not served then

    async def run(self, sock: socket.socket) -> None:
        tls = Tls.REQUIRE if self._context else Tls.OFF
        with sock:
            agreed = await self.client.shake_hands(
                {"lun0": self.export}, "lun0", tls, self._context
            )
            if agreed is not None:
                await self.client.serve(*agreed)
        self.over.set()


@asynccontextmanager
async def served(
    disk: AsyncFake,
    memory: Memory | None = None,
    count: int = 1,
    handshakes: bool = True,
    patient: bool = True,
    context: ssl.SSLContext | None = None,
) -> AsyncIterator[list[Served]]:
    """Clients of one disk. At the end all must be over."""
    export = Export("lun0", disk, patient=patient)
    memory = memory or Memory()
    async with open_strands() as group, trio.open_nursery() as nursery:
        found = []
        for number in range(count):
            here, there = socket.socketpair()
            there.setblocking(False)
            raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(there)))
            client = Client(here, f"client {number}", group, memory, 0)
            found.append(Served(client, raw, export, context))
            nursery.start_soon(found[-1].run, here)
            if handshakes:
                await raw.shake_hands()
        yield found
        for each in found:
            await trio.aclose_forcefully(each.raw.stream)
    assert all(each.over.is_set() for each in found)
    assert memory.used == 0


async def test_requests_right_behind_the_handshake() -> None:
    """Clients need not wait for the answer to GO."""
    async with served(fake(), handshakes=False) as (one,):
        flags = nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)
        await one.raw.send(flags + go() + write(b"early", 7, 1) + request(nbd.READ, 7, 5, 2))
        await one.raw.receive(nbd.GREETING.size)
        while (await one.raw.option_reply())[0] != nbd.REP_ACK:
            pass
        found = await one.raw.replies({1: 0, 2: 5})
        assert not found[1].error and not found[2].error


@pytest.mark.logs("cannot be waited for")
async def test_a_socket_that_cannot_be_watched_ends_its_client_alone() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    memory = Memory()
    async with served(fake(), memory) as (other,), open_strands() as group:
        watch = loop_here().watch(here.fileno(), lambda: None)  # a second one is refused
        watch.want(readable=False, writable=False)
        raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(there)))
        client = Client(here, "client", group, memory, 0)
        one = Served(client, raw, other.export)
        async with raw, trio.open_nursery() as nursery:
            nursery.start_soon(one.run, socket.socket(fileno=os.dup(here.fileno())))
            await raw.shake_hands()
            await one.over.wait()
        watch.close()
        here.close()
        assert not await flush(other)


async def test_byte_by_byte() -> None:
    data = write(b"slowly", 100, 1) + write(os.urandom(70_000), 200, 2)
    async with served(fake()) as (one,):
        for at in range(60):
            await one.raw.send(data[at : at + 1])
            await trio.lowlevel.checkpoint()
        await one.raw.send(data[60:])
        assert await one.raw.replies({1: 0, 2: 0}) == {1: Reply(0, 1), 2: Reply(0, 2)}
        await one.raw.send(request(nbd.READ, 100, 6, 3))
        assert await one.raw.reply(6) == Reply(0, 3, b"slowly")


async def test_buffers_of_large_writes_that_the_disk_takes_over() -> None:
    """What it has is not written into any more, and the next write lands in what it gave."""

    class Keeping(DirectFake):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[bytearray] = []
            self.gave: list[bytearray] = []

        def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
            if len(self.kept) == 3:
                return None
            self.kept.append(buffer)
            self.gave.append(bytearray(len(buffer)))
            return self.gave[-1]

    disk = Keeping()
    async with served(disk) as (one,):
        written = [os.urandom(MIB) for _ in range(5)]
        for number, data in enumerate(written):
            await one.raw.send(write(data, 0, number) + write(b"small", MIB, 9))
            await until(lambda: len(disk.begun) == 2)
            disk.end()
            assert set(await one.raw.replies({number: 0, 9: 0})) == {number, 9}
        assert [bytes(each[HEADROOM:]) for each in disk.kept] == written[:3]
        assert [id(each) for each in disk.kept[1:]] == [id(each) for each in disk.gave[:2]]
        assert disk.gave[2][HEADROOM:] == written[4]


async def test_a_client_that_sends_no_more_gets_its_answers() -> None:
    """It has shut down its end for sending only."""
    disk = HeldDisk()
    async with served(disk) as (one,):
        await one.raw.send(write(b"x", 0, 1) + request(nbd.FLUSH, cookie=2))
        await until(lambda: disk.waiting == 1)
        await one.raw.send_eof()
        disk.go.set()
        await one.raw.replies({1: 0, 2: 0})
        assert await one.raw.end() == b""
        await one.over.wait()


async def test_disc_behind_requests_ends_when_they_are_answered() -> None:
    disk = HeldDisk()
    async with served(disk) as (one,):
        await one.raw.send(write(b"x", 0, 1) + request(nbd.DISC) + request(nbd.READ, 0, 1, 9))
        await until(lambda: disk.waiting == 1)
        disk.go.set()
        assert await one.raw.reply() == Reply(0, 1)
        assert await one.raw.end() == b""  # what is behind DISC is not looked at
        await one.over.wait()


async def test_disc_that_comes_in_a_pause() -> None:
    """It is not the loop that receives it then, and nothing more comes that the loop would see."""
    async with served(fake()) as (one,):
        assert isinstance(one.raw.stream, trio.SocketStream)
        with socket.socket(fileno=os.dup(one.raw.stream.socket.fileno())) as sock:
            await one.client.pause()
            sock.send(request(nbd.DISC))
            one.client.go_on()
        assert await one.raw.end() == b""
        await one.over.wait()


class Noting(DirectFake):
    """Notes what changes it, and whether with FUA."""

    def __init__(self) -> None:
        super().__init__()
        self.fuas: list[tuple[str, bool]] = []

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        self.fuas.append(("write", False))
        loop_here().call_soon(self.end)
        return super().begin_write(buffer, offset, waiter)

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        self.fuas.append(("write", fua))
        await super().write(buffer, offset, fua)

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        self.fuas.append(("trim", fua))
        await super().trim(offset, length, fua, patient=patient)

    async def zero(self, offset: int, length: int, **how: bool) -> None:
        self.fuas.append(("zero", how.get("fua", False)))
        await super().zero(offset, length, **how)


@pytest.mark.parametrize("fua", [False, True])
async def test_each_change_has_its_fua(fua: bool) -> None:
    """It is not on stable storage else when it is answered."""
    disk = Noting()
    flags = nbd.FLAG_FUA if fua else 0
    async with served(disk) as (client,):
        for cookie, command in enumerate((nbd.WRITE, nbd.TRIM, nbd.WRITE_ZEROES)):
            data = bytes(4096) if command == nbd.WRITE else b""
            await client.raw.send(request(command, 0, 4096, cookie, flags) + data)
            assert await client.raw.reply() == Reply(0, cookie)
    assert disk.fuas == [("write", fua), ("trim", fua), ("zero", fua)]


LOST = pytest.mark.logs("writes were lost")


async def flush(one: Served, cookie: int = 1) -> int:
    """The error that the client gets."""
    await one.raw.send(request(nbd.FLUSH, cookie=cookie))
    return (await one.raw.reply()).error


@LOST
async def test_each_connection_hears_of_a_loss_once() -> None:
    disk = fake()
    async with served(disk, count=2) as both:
        disk.fake.losses.add()
        for each in both:
            await each.raw.send(write(b"x", 0, 7) + request(nbd.TRIM, 0, 4096, 8, nbd.FLAG_FUA))
            await each.raw.replies({7: 0, 8: 0})
            assert await flush(each) == nbd.EIO and not await flush(each)
    assert not disk.fake.losses.untold


class Flushing(AsyncFake):
    """A disk whose flushes wait for ``go``. ``waiting``: how many do."""

    def __init__(self) -> None:
        super().__init__(fake().fake)
        self.go = trio.Event()
        self.waiting = 0

    async def flush(self, client: FlushClient | None = None) -> None:
        self.waiting += 1
        await elsewhere(self.go.wait)
        await super().flush(client)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        here, _ = listening.accept()
    return here, there


@LOST
@pytest.mark.parametrize("family", ["unix", "tcp"])
async def test_an_answer_that_does_not_reach_its_client(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The connection is gone before it: the next one owes the failure."""
    disk = Flushing()
    if family == "tcp":
        pair = tcp_pair()
        monkeypatch.setattr(socket, "socketpair", lambda: pair)
    async with served(disk) as (one,):
        disk.fake.losses.add()
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        await until(lambda: disk.waiting == 1)
        await trio.aclose_forcefully(one.raw.stream)
        await trio.testing.wait_all_tasks_blocked()
        disk.go.set()
        await one.over.wait()
        assert disk.fake.losses.untold
    monkeypatch.undo()
    async with served(disk) as (again,):
        assert await flush(again) == nbd.EIO and not await flush(again)
    assert not disk.fake.losses.untold


@asynccontextmanager
async def served_with_tls(
    disk: AsyncFake,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    memory: Memory | None = None,
) -> AsyncIterator[tuple[Served, RawClient, Corked]]:
    """As ``served``, one client behind TLS, whose socket takes little. ``place``: for
    certificates."""
    authority = Authority(place / "ca")
    context = by_certificates(str(authority.server(place / "server")), False)
    trust = ssl.create_default_context(cafile=str(authority.place / "ca-cert.pem"))
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(socket, "socketpair", lambda: (here, there))
    async with served(disk, memory, handshakes=False, context=context) as (one,):
        monkeypatch.undo()
        client, cork = await behind_tls(one.raw, trust)
        yield one, client, cork


@LOST
@pytest.mark.parametrize("reads", [True, False])
async def test_an_answer_of_which_tls_has_kept_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """The client was told of the loss when all of the answer has left, and not when the socket is
    empty before that."""
    disk = fake()
    async with served_with_tls(disk, tmp_path, monkeypatch) as (one, client, cork):
        disk.fake.losses.add()
        await client.send(request(nbd.READ, 0, 60 * KIB, 1) + request(nbd.FLUSH, cookie=2))
        await cork.pull()
        await until(lambda: one.client.has_begun and not one.client.open_requests)
        assert disk.fake.losses.untold
        if reads:
            found = await client.replies({1: 60 * KIB, 2: 0})
            assert found[2].error == nbd.EIO and not disk.fake.losses.untold
            await client.send(request(nbd.FLUSH, cookie=3))
            assert await client.reply() == Reply(0, 3)
            await client.send(request(nbd.DISC))
        else:
            assert isinstance(one.raw.stream, trio.SocketStream)
            with socket.socket(fileno=os.dup(one.raw.stream.socket.fileno())) as sock:
                sock.recv(60 * KIB)
            one.client.give_way(False)
            await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert disk.fake.losses.untold is not reads


async def test_the_end_waits_for_what_tls_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is open any more."""
    async with served_with_tls(fake(), tmp_path, monkeypatch) as (one, client, cork):
        await client.send(request(nbd.READ, 0, 60 * KIB, 1) + request(nbd.DISC))
        await cork.pull()
        await until(lambda: one.client.over and not one.client.open_requests)
        assert await client.reply(60 * KIB) == Reply(0, 1, bytes(60 * KIB))
        await one.over.wait()


@LOST
async def test_a_connection_that_breaks_behind_the_answer_to_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS finds that out when it is asked to send what it has kept. The memory of each request is
    given back once, and the client ends."""
    disk, memory = fake(), Memory()
    async with served_with_tls(disk, tmp_path, monkeypatch, memory) as (one, client, cork):
        flush = TlsStream.flush
        count = 0

        def broken(self: TlsStream) -> bool:
            nonlocal count
            count += 1
            if count > 2:  # before and behind what ``send`` takes
                raise BrokenPipeError(errno.EPIPE, "made to fail")
            return flush(self)

        disk.fake.losses.add()
        await client.send(request(nbd.READ, 0, 60 * KIB, 1) + request(nbd.FLUSH, cookie=2))
        monkeypatch.setattr(TlsStream, "flush", broken)
        await cork.pull()
        with trio.fail_after(20):
            await one.over.wait()
        assert (one.client.open_requests, memory.used, memory.open) == (0, 0, 0)
        assert disk.fake.losses.untold


async def test_data_of_which_one_turn_receives_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has come at once, in more TLS records than a turn takes: the socket does not show the
    rest."""
    disk = fake()
    data = os.urandom(30 * KIB)
    async with served_with_tls(disk, tmp_path, monkeypatch) as (one, client, cork):
        whole = write(data, 0, 1)
        for at in range(0, len(whole), 100):
            await client.send(whole[at : at + 100])
        await cork.pull()
        with trio.fail_after(20):
            assert await client.reply() == Reply(0, 1)
        await client.send(request(nbd.DISC))
        await one.over.wait()
    assert disk.fake.data[: len(data)] == data


@LOST
async def test_an_answer_that_its_client_does_not_read() -> None:
    """It was in the socket when the client died."""
    disk = Flushing()
    async with served(disk) as (one,):
        disk.fake.losses.add()
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        await until(lambda: disk.waiting == 1)
        disk.go.set()
        await until(lambda: not disk.fake.losses.untold)
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert disk.fake.losses.untold


@LOST
@pytest.mark.parametrize("family", ["unix", "tcp"])
async def test_an_answer_that_its_client_does_not_read_before_it_says_that_it_goes(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """DISC is in the socket still when the client is gone. Over TCP its machine has acknowledged
    the answer."""
    disk = fake()
    if family == "tcp":
        pair = tcp_pair()
        monkeypatch.setattr(socket, "socketpair", lambda: pair)
    async with served(disk) as (one,):
        assert isinstance(one.raw.stream, trio.SocketStream)
        disk.fake.losses.add()
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        await until(lambda: not disk.fake.losses.untold)
        with socket.socket(fileno=os.dup(one.raw.stream.socket.fileno())) as sock:
            sock.send(request(nbd.DISC))
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert disk.fake.losses.untold


@LOST
async def test_an_answer_that_is_not_read_is_looked_for_when_its_client_has_died() -> None:
    """What a Unix socket had for it is gone with the client. With many requests open nothing is
    received that would tell."""
    disk = DirectFake()
    async with served(disk) as (one,):
        disk.fake.losses.add()
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        await until(lambda: not disk.fake.losses.untold)
        await one.raw.send(b"".join(request(nbd.READ, 0, 512, number) for number in range(MANY)))
        await until(lambda: len(disk.begun) == MANY)
        await trio.aclose_forcefully(one.raw.stream)
        one.client.give_way(False)
        disk.end()
        await one.over.wait()
        assert disk.fake.losses.untold


@LOST
@pytest.mark.parametrize("answers", [1, 2])
async def test_a_client_that_comes_again_before_its_end_is_noticed(answers: int) -> None:
    """The path was gone before the answer: nothing tells the server of that."""
    disk = fake()
    async with served(disk, count=2, handshakes=False) as (one, again):
        await one.raw.shake_hands()
        for cookie in range(answers):
            disk.fake.losses.add()
            await one.raw.send(request(nbd.FLUSH, cookie=cookie))
            await until(lambda: not disk.fake.losses.untold)
        await again.raw.shake_hands()
        assert await flush(again) == nbd.EIO and not await flush(again)
        assert disk.fake.losses.count == answers


@LOST
@pytest.mark.parametrize("read", [0, 1])  # of the answers
async def test_a_second_answer_that_was_not_read_takes_the_first_back_if_that_was_not_either(
    read: int,
) -> None:
    disk = fake()
    async with served(disk) as (one,):
        known = disk.new_client().count.told
        for cookie in range(2):
            disk.fake.losses.add()
            await one.raw.send(request(nbd.FLUSH, cookie=cookie))
            await until(lambda: not disk.fake.losses.untold)
            if cookie < read:
                assert (await one.raw.reply()).error == nbd.EIO
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert disk.new_client().count == (2, known + read)


@LOST
async def test_an_answer_that_was_read_long_before_its_client_dies() -> None:
    """What the client leaves unread then is another one."""
    disk = fake()
    async with served(disk) as (one,):
        disk.fake.losses.add()
        assert await flush(one) == nbd.EIO
        one.client.give_way(False)
        await one.raw.send(request(nbd.READ, 0, 512, 2))
        assert isinstance(one.raw.stream, trio.SocketStream)
        with socket.socket(fileno=os.dup(one.raw.stream.socket.fileno())) as sock:
            await until(lambda: arrived(sock))
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert not disk.fake.losses.untold


@LOST
async def test_a_connection_that_has_ended_leaves_its_loss_once() -> None:
    """Its successor is told; those behind that have nothing to hear."""
    disk = fake()
    async with served(disk, count=3, handshakes=False) as (one, again, last):
        await one.raw.shake_hands()
        disk.fake.losses.add()
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        await until(lambda: not disk.fake.losses.untold)
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        await again.raw.shake_hands()
        assert await flush(again) == nbd.EIO
        await last.raw.shake_hands()
        assert not await flush(last)


@LOST
async def test_a_client_that_has_heard_when_another_comes() -> None:
    disk = fake()
    async with served(disk, count=2, handshakes=False) as (one, other):
        await one.raw.shake_hands()
        disk.fake.losses.add()
        assert await flush(one) == nbd.EIO
        await other.raw.shake_hands()
        assert not await flush(other) and not await flush(one)


@LOST
@pytest.mark.parametrize("says_so", [True, False])
async def test_a_client_that_has_heard_may_go(says_so: bool) -> None:
    disk = fake()
    async with served(disk) as (one,):
        disk.fake.losses.add()
        assert await flush(one) == nbd.EIO
        if says_so:
            await one.raw.send(request(nbd.DISC))
        else:
            await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
    assert not disk.fake.losses.untold


async def test_a_client_that_ends_before_it_has_flushed() -> None:
    disk = fake()
    async with served(disk):
        disk.fake.losses.add()
        disk.fake.client.told(1)  # another client has heard
        assert not disk.fake.losses.untold
    assert disk.fake.losses.untold


@LOST
async def test_connections_of_one_client() -> None:
    """As those of the kernel: whichever flushes hears, and the end of one is no end."""
    disk = fake()
    async with served(disk, count=3, handshakes=False) as all_of_them:
        client = all_of_them[0].export.only_client = disk.only_client(LossCount(1, 0), lambda: None)
        for each in all_of_them:
            await each.raw.shake_hands()
        one, other, last = all_of_them
        await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
        assert await flush(other) == nbd.EIO and not await flush(last)
        disk.fake.losses.add()
        assert await flush(last) == nbd.EIO and not await flush(other)
        assert client.count == (2, 2)


async def test_a_pause() -> None:
    """What has begun ends before it; what comes meanwhile is answered after it."""
    disk = HeldDisk()
    async with served(disk) as (one,), trio.open_nursery() as nursery:
        paused = trio.Event()

        async def pause() -> None:
            await one.client.pause()
            paused.set()

        await one.raw.send(request(nbd.READ, 0, 4, 1))
        await until(lambda: disk.waiting == 1)
        nursery.start_soon(pause)
        await trio.testing.wait_all_tasks_blocked()
        await one.raw.send(request(nbd.READ, 0, 5, 2))
        await trio.testing.wait_all_tasks_blocked()
        assert not paused.is_set()
        disk.go.set()
        await paused.wait()
        assert await one.raw.reply(4) == Reply(0, 1, bytes(4))
        await trio.testing.wait_all_tasks_blocked()
        assert disk.ended == 1
        one.client.go_on()
        assert await one.raw.reply(5) == Reply(0, 2, bytes(5))


async def test_a_pause_waits_until_refusals_are_taken() -> None:
    """No other process would send the rest of them."""
    count = 40_000  # whose answers are more than the socket takes
    async with served(fake()) as (one,), trio.open_nursery() as nursery:
        paused = trio.Event()

        async def pause() -> None:
            await one.client.pause()
            paused.set()

        said = b"".join(request(77, 0, 0, number) for number in range(count))
        nursery.start_soon(one.raw.send, said)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pause)
        await trio.testing.wait_all_tasks_blocked()
        assert not paused.is_set() and not one.client.open_requests
        nursery.start_soon(one.raw.replies, dict.fromkeys(range(count), 0))
        await paused.wait()
        one.client.go_on()


async def test_a_client_that_goes_in_the_middle_of_a_write_does_not_hold_up_a_pause() -> None:
    async with served(fake()) as (one,), trio.open_nursery() as nursery:
        await one.raw.send(write(b"x" * 8 * MIB)[:MIB])
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(one.client.pause)
        await trio.testing.wait_all_tasks_blocked()
        await trio.aclose_forcefully(one.raw.stream)
        with trio.fail_after(20):
            await one.over.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert not nursery.child_tasks  # the pause does not wait any more


async def test_a_client_that_goes_in_a_pause() -> None:
    async with served(fake()) as (one,):
        await one.client.pause()
        await trio.aclose_forcefully(one.raw.stream)
        await trio.testing.wait_all_tasks_blocked()
        assert not one.over.is_set()
        one.client.go_on()
        await one.over.wait()


async def test_a_client_that_is_given_up_while_it_takes_no_reply() -> None:
    """Its end frees the place that another client waits for: the socket need not show it."""
    async with served(fake()) as (one,):
        await one.raw.send(request(nbd.READ, 0, 8 * MIB, 1))
        await trio.testing.wait_all_tasks_blocked()
        one.client.give_up()
        with trio.fail_after(20):
            await one.over.wait()


async def test_what_comes_behind_the_end_takes_no_reply_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing a TCP socket in which something waits would throw away what has not left it."""
    disk = DirectFake()
    here, there = tcp_pair()
    length = 128 * KIB
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * length)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * KIB)
    monkeypatch.setattr(socket, "socketpair", lambda: (here, there))
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.READ, 0, length, 1) + request(nbd.DISC))
        await until(lambda: one.client.over)
        await one.raw.send(request(nbd.READ, 0, 1, 2))
        await until(lambda: arrived(here))
        disk.end()
        await one.over.wait()
        assert await one.raw.reply(length) == Reply(0, 1, bytes(length))
        assert await one.raw.end() == b""


@pytest.mark.logs("others need the memory")
@pytest.mark.parametrize("taking", [False, True])
async def test_a_client_that_is_let_go_in_a_pause(taking: bool) -> None:
    """It has not taken a reply, or has not sent all of a write (``taking``). The pause does not
    wait any longer, as nothing of it is under way."""
    async with served(fake()) as (one,), trio.open_nursery() as nursery:
        paused = trio.Event()

        async def pause() -> None:
            await one.client.pause()
            paused.set()

        whole = write(b"x" * 8 * MIB) if taking else request(nbd.READ, 0, 8 * MIB, 1)
        await one.raw.send(whole[: MIB if taking else len(whole)])
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(pause)
        await trio.testing.wait_all_tasks_blocked()
        assert not paused.is_set()
        if taking:
            for _ in range(3):  # the first time what it sent counts
                one.client.give_way(True)
        else:
            one.client.hurry()
        await paused.wait()
        assert one.client.over
        one.client.go_on()


@pytest.mark.parametrize("early", [True, False])
async def test_another_process_goes_on(early: bool) -> None:
    """With what was received and not begun, and with what has come in the pause (``early``); the
    client notices nothing."""
    memory = Memory()
    disk = fake()
    async with served(disk, memory) as (one,), open_strands() as group:
        whole = write(b"half" * 10 * KIB, 0, 1)
        await one.raw.send(whole[: 20 * KIB])
        await trio.testing.wait_all_tasks_blocked()
        await one.client.pause()
        found = one.client.connection()
        if early:
            await one.raw.send(whole[20 * KIB :])
        with socket.socket(fileno=os.dup(found.sock.fileno())) as sock:
            one.client.hand_over()
            await one.over.wait()
            assert memory.used == 0
            other = Client(sock, "other", group, memory, 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(other.serve, Export("lun0", disk), other.continued(found))
                if not early:
                    await one.raw.send(whole[20 * KIB :])
                with trio.fail_after(20):
                    assert await one.raw.reply() == Reply(0, 1)
                await one.raw.send(request(nbd.DISC))
                await one.raw.stream.aclose()
    assert disk.fake.data[: 40 * KIB] == b"half" * 10 * KIB


@LOST
@pytest.mark.parametrize("left", [True, False])
async def test_cancelled_it_leaves_another_process_the_connection(left: bool) -> None:
    """Also where the server does not know yet that the other process has taken it."""
    here, there = socket.socketpair()
    there.setblocking(False)
    raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(there)))
    other = socket.socket(fileno=os.dup(here.fileno()))
    with trio.CancelScope() as scope:
        async with open_strands() as group, trio.open_nursery() as nursery:
            client = Client(here, "client", group, Memory(), 0)
            nursery.start_soon(Served(client, raw, Export("lun0", fake())).run, here)
            await raw.shake_hands()
            await trio.testing.wait_all_tasks_blocked()
            await client.pause()
            scope.cancel()
            if left:
                client.hand_over()
    assert scope.cancelled_caught
    with other, there:
        there.send(b"for the other")
        assert other.recv(100) == b"for the other"


@pytest.mark.parametrize("length", [5, 60 * KIB, MIB, 32 * MIB])
@pytest.mark.parametrize("eof", [True, False])
async def test_a_client_that_dies_in_the_middle_of_a_write(length: int, eof: bool) -> None:
    """Nothing of the write is done, and its memory is free again."""
    disk = fake(size=64 * MIB)
    async with served(disk) as (one,):
        whole = write(b"x" * length, 0, 1)
        await one.raw.send(whole[: len(whole) // 2])
        if eof:
            await one.raw.send_eof()
            await one.raw.end()
        else:
            await trio.aclose_forcefully(one.raw.stream)
        await one.over.wait()
    assert not any(disk.fake.data[:length])


async def test_a_client_that_dies_while_its_requests_are_open() -> None:
    """They end as they would; the memory is free then and not before."""
    disk, memory = HeldDisk(), Memory()
    async with served(disk, memory) as (one,):
        await one.raw.send(write(b"y" * 70_000, 0, 1) + request(nbd.READ, 0, MIB, 2))
        await until(lambda: disk.waiting == 2)
        await trio.aclose_forcefully(one.raw.stream)
        assert not one.over.is_set()
        assert memory.used >= MIB
        disk.go.set()
        await one.over.wait()
    assert disk.fake.data[:70_000] == b"y" * 70_000


@pytest.mark.logs("client 0: NBD: a request begins with")
async def test_garbage_behind_requests() -> None:
    """The connection ends when what was begun before has ended."""
    disk = HeldDisk()
    async with served(disk) as (one,):
        await one.raw.send(write(b"x", 0, 1))
        await until(lambda: disk.waiting == 1)
        await one.raw.send(write(b"y", 1, 2) + b"garbage, and more of it than a request has")
        await one.raw.end()
        assert not one.over.is_set()
        disk.go.set()
        await one.over.wait()
    assert disk.fake.data[:1] == b"x"


async def test_a_client_that_reads_no_reply() -> None:
    """Its requests wait, and take no more memory than one client may have; another one goes on."""
    memory, disk = Memory(), fake(size=64 * MIB)
    async with served(disk, memory, 2) as (one, other):
        sent = 24  # MiB
        for number in range(sent):
            await one.raw.send(request(nbd.READ, number * MIB, MIB, number))
        await until(lambda: memory.used >= MIB)  # it is not received from while it is blocked
        for number in range(20):
            await other.raw.send(write(bytes([number]) * 4096, number * 4096, number))
            assert await other.raw.reply() == Reply(0, number)
            assert memory.used <= CLIENT_BYTES + 2 * MIB
        # When it does read, all of it comes.
        await one.raw.replies(dict.fromkeys(range(sent), MIB))


async def test_clients_share_the_memory() -> None:
    """With less than all ask for, but enough for one, each gets on in its turn."""
    memory, disk = Memory(total=9 * MIB), fake(size=64 * MIB)
    async with served(disk, memory, 4) as clients:

        async def ask(raw: RawClient) -> None:
            for number in range(8):
                await raw.send(request(nbd.READ, 0, 4 * MIB, number))
                await raw.send(write(bytes(2 * MIB), 0, 100 + number))

        async def work(each: Served) -> None:
            requests = {number: 4 * MIB for number in range(8)}
            requests |= dict.fromkeys(range(100, 108), 0)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, each.raw)
                found = await each.raw.replies(requests)
            assert not any(reply.error for reply in found.values())

        async with trio.open_nursery() as nursery:
            for each in clients:
                nursery.start_soon(work, each)


async def test_a_client_that_is_let_go_while_it_waits_for_memory() -> None:
    """What another client gives back wakes nothing of it."""
    memory, disk = Memory(total=2 * MIB), DirectFake()
    async with served(disk, memory, 2) as (one, other):
        await other.raw.send(request(nbd.READ, 0, 2 * MIB, 1))
        await until(lambda: disk.begun)
        await one.raw.send(request(nbd.READ, 0, 2 * MIB, 2))
        await until(lambda: memory.starved)
        one.client.give_up()
        await one.over.wait()
        await trio.testing.wait_all_tasks_blocked()
        disk.end()
        await other.raw.reply(2 * MIB)
        await other.raw.send(request(nbd.READ, 0, 512, 3))
        await until(lambda: disk.begun)
        disk.end()
        assert await other.raw.reply(512) == Reply(0, 3, bytes(512))


async def test_what_waits_for_memory_is_answered_when_the_server_ends() -> None:
    """It has been received: nothing else of its client is open."""
    memory, disk = Memory(total=2 * MIB), DirectFake()
    async with served(disk, memory, 2) as (one, other):
        await other.raw.send(request(nbd.READ, 0, 2 * MIB, 1))
        await until(lambda: disk.begun)
        await one.raw.send(request(nbd.READ, 0, 2 * MIB, 2))
        await until(lambda: memory.starved)
        one.client.stop()
        disk.end()
        await other.raw.reply(2 * MIB)
        await until(lambda: disk.begun)
        disk.end()
        assert await one.raw.reply(2 * MIB) == Reply(0, 2, bytes(2 * MIB))
        await one.over.wait()


async def test_what_waits_for_memory_in_a_pause_stays_as_it_is() -> None:
    """Memory that comes wakes the client; another process may have the connection by then, and
    what is received here would be lost."""
    memory, disk = Memory(total=2 * MIB), DirectFake()
    async with served(disk, memory, 2) as (one, other):
        await other.raw.send(request(nbd.READ, 0, 2 * MIB, 1))
        await until(lambda: disk.begun)
        await one.raw.send(request(nbd.READ, 0, 2 * MIB, 2))
        await until(lambda: memory.starved)
        await one.client.pause()
        found = one.client.connection().unparsed
        await one.raw.send(request(nbd.READ, 0, 512, 3))
        disk.end()
        await other.raw.reply(2 * MIB)
        await trio.testing.wait_all_tasks_blocked()
        assert found == one.client.connection().unparsed == request(nbd.READ, 0, 2 * MIB, 2)
        one.client.go_on()
        await until(lambda: disk.begun)
        disk.end()
        assert await one.raw.reply(2 * MIB) == Reply(0, 2, bytes(2 * MIB))
        await until(lambda: disk.begun)
        disk.end()
        assert await one.raw.reply(512) == Reply(0, 3, bytes(512))


async def test_more_replies_than_one_system_call_takes() -> None:
    async with served(fake()) as (one,):
        await one.raw.send(b"".join(request(nbd.READ, 0, 1, n) for n in range(3000)))
        await one.raw.replies(dict.fromkeys(range(3000), 1))


async def test_a_bug_is_an_error_for_the_client(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(AsyncFake):
        async def flush(self, client: FlushClient | None = None) -> None:
            raise ZeroDivisionError

    disk = Broken(fake().fake)
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.FLUSH, cookie=1))
        assert await one.raw.reply() == Reply(nbd.EIO, 1)
        await one.raw.send(request(nbd.READ, 0, 1, 2))
        assert await one.raw.reply(1) == Reply(0, 2, b"\0")
    assert caplog.messages == ["client 0: internal error"]


@pytest.mark.parametrize("begun", [0, 1, 5])
async def test_a_bug_while_requests_are_begun(caplog: pytest.LogCaptureFixture, begun: int) -> None:
    """The connection ends. What was begun ends as it would, the rest at once; memory is free."""

    class Broken(DirectFake):
        def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
            if len(self.begun) == begun:
                raise ZeroDivisionError
            return super().begin_write(buffer, offset, waiter)

    disk, memory = Broken(), Memory()
    async with served(disk, memory) as (one,):
        await one.raw.send(b"".join(write(b"x" * 9000, 0, number) for number in range(7)))
        assert await one.raw.end() == b""
        assert len(disk.begun) == begun
        disk.end()
        await one.over.wait()
    assert caplog.messages == ["client 0: internal error"]


async def test_a_bug_behind_the_beginning_of_a_command(caplog: pytest.LogCaptureFixture) -> None:
    """Its command is under way: until it has ended its memory is not free."""

    class Broken(DirectFake):
        def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
            super().begin_read(buffer, offset, waiter)
            raise ZeroDivisionError

    disk, memory = Broken(), Memory()
    async with served(disk, memory) as (one,):
        await one.raw.send(request(nbd.READ, 0, MIB, 1) + request(nbd.READ, 0, MIB, 2))
        assert await one.raw.end() == b""
        assert (len(disk.begun), memory.used, one.over.is_set()) == (1, MIB, False)
        disk.end()
        await one.over.wait()
    assert caplog.messages == ["client 0: internal error"] * 2


async def test_closed_between_an_answer_and_its_turn() -> None:
    """Its request ends once."""
    for _ in range(20):  # which strand is closed first is chance
        await _close_between_an_answer_and_its_turn()


async def _close_between_an_answer_and_its_turn() -> None:
    class Counting(DirectFake):
        ended = 0

        def end_read(self, slot: Command) -> Rest | None:
            self.ended += 1
            return None

    async def answer(_waiter: object) -> None:
        disk.end()

    async def parked() -> None:
        strand = strands.here().running
        assert strand is not None
        strand.abandon = answer
        waits.set()
        await strands.park()

    disk, memory, waits = Counting(), Memory(), trio.Event()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
    with trio.CancelScope() as scope:
        async with raw, open_strands() as group, trio.open_nursery() as nursery:
            client = Client(ours, "client", group, memory, 0)
            nursery.start_soon(Served(client, raw, Export("lun0", disk)).run, ours)
            await raw.shake_hands()
            await raw.send(request(nbd.READ, 0, 512, 1))
            await until(lambda: disk.begun)
            group.start_soon(parked, name="another strand")
            await waits.wait()
            scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert (disk.ended, memory.used) == (1, 0)


async def test_closed_right_before_an_answer_is_settled() -> None:
    """What is left of its request is not begun any more: its strand would never run, nor be
    closed."""
    for _ in range(20):  # whether the answer is settled before the strand is closed is chance
        await _close_right_before_an_answer_is_settled()


async def _close_right_before_an_answer_is_settled() -> None:
    disk, memory = Again(), Memory()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
    with trio.CancelScope() as scope:
        async with raw, open_strands() as group:
            try:
                async with trio.open_nursery() as nursery:
                    client = Client(ours, "client", group, memory, 0)
                    nursery.start_soon(Served(client, raw, Export("lun0", disk)).run, ours)
                    await raw.shake_hands()
                    await raw.send(request(nbd.READ, 0, 512, 1))
                    await until(lambda: disk.begun)
                    scope.cancel()
            finally:
                disk.end()
    await trio.testing.wait_all_tasks_blocked()
    assert not disk.rests and memory.used == 0


def test_a_client_that_ends_between_an_answer_and_its_turn() -> None:
    """Its last request is answered in another turn. Nothing of the client is left, or its server
    would never end. (With the loop of the command line, whose turns are trio's, too.)"""

    async def body() -> None:
        disk = DirectFake()

        def end() -> None:
            disk.end()
            one.client.go_on()

        with trio.fail_after(60):
            async with served(disk) as (one,):
                await one.raw.send(request(nbd.READ, 0, 512, 1))
                await until(lambda: disk.begun)
                await trio.aclose_forcefully(one.raw.stream)
                await trio.testing.wait_all_tasks_blocked()
                loop_here().call_soon(end)
                # trio's next turn is asked for now, so it comes before what ``end`` asks for.
                await trio.lowlevel.checkpoint()
                await one.over.wait()

    guest.run(body)


async def test_a_bug_at_the_end_of_a_command(caplog: pytest.LogCaptureFixture) -> None:
    """It is an error for its request, and for no other one."""

    class Broken(DirectFake):
        ended = 0

        def end_write(self, slot: Command) -> Rest | None:
            self.ended += 1
            if self.ended == 2:
                raise ZeroDivisionError
            return None

    disk = Broken()
    async with served(disk) as (one,):
        await one.raw.send(b"".join(write(b"x", 0, number) for number in range(4)))
        await until(lambda: len(disk.begun) == 4)
        disk.end()
        found = await one.raw.replies(dict.fromkeys(range(4), 0))
    assert [found[number].error for number in range(4)] == [0, nbd.EIO, 0, 0]
    assert caplog.messages == ["client 0: internal error"]


async def test_what_takes_more_than_one_command_goes_on_with_the_rest() -> None:
    """With its deadline: it has no other one."""
    disk = Again()
    async with served(disk) as (one,):
        await one.raw.send(write(b"x", 0, 1) + request(nbd.READ, 0, 1, 2))
        await until(lambda: len(disk.begun) == 2)
        disk.end()
        found = await one.raw.replies({1: 0, 2: 1})
    assert [found[number].error for number in (1, 2)] == [0, 0]
    assert disk.rests == [disk.LEFT] * 2


@pytest.mark.parametrize(
    "last", [request(nbd.READ, 0, MIB, 9), write(bytes(MIB), 0, 9)[:100]], ids=["read", "write"]
)
async def test_no_memory(caplog: pytest.LogCaptureFixture, last: bytes) -> None:
    """None for the buffer of a request: its client goes, and others stay."""

    class Poor(Memory):
        def buffer(self, size: int) -> bytearray:
            if size >= MIB:
                raise MemoryError
            return super().buffer(size)

    disk, memory = DirectFake(), Poor()
    async with served(disk, memory, 2) as (one, other):
        await one.raw.send(write(b"x", 0, 1) + request(nbd.READ, 0, 512, 2) + last)
        assert await one.raw.end() == b""
        await one.over.wait()
        await other.raw.send(request(nbd.READ, 0, 512, 3))
        await until(lambda: disk.begun)
        disk.end()
        assert await other.raw.reply(512) == Reply(0, 3, bytes(512))
    assert caplog.messages == ["client 0: internal error"]


async def test_an_error_of_the_target_is_logged_with_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(AsyncFake):
        async def read_into(
            self, buffer: memoryview, offset: int, rest: Rest | None = None
        ) -> None:
            raise CommandTimeout("no answer in 30 s")

    async with served(Failing(fake().fake)) as (one,):
        await one.raw.send(request(nbd.READ, 0, 4096, 1))
        assert await one.raw.reply(4096) == Reply(nbd.EIO, 1)
    assert caplog.messages == ["client 0: no answer in 30 s"]


async def test_a_disk_that_has_grown_is_used_to_its_end() -> None:
    """By a client that does not know: the range is looked at again before it is refused."""

    class Growing(AsyncFake):
        async def refresh(self) -> int:
            grown = fake(size=16 * MIB)
            self.fake, self.info = grown.fake, grown.info
            return self.size

    disk = Growing(fake().fake)
    async with served(disk) as (one,):
        disk.fake, disk.info = fake().fake, fake().info
        await one.raw.send(write(b"new", 12 * MIB, 1))
        assert await one.raw.reply() == Reply(0, 1)
    assert disk.fake.data[12 * MIB : 12 * MIB + 3] == b"new"


async def test_cancelled_all_is_aborted() -> None:
    disk = HeldDisk()
    with trio.CancelScope() as scope:
        async with served(disk) as (one,):
            await one.raw.send(write(b"x", 0, 1) + request(nbd.READ, 0, 1, 2))
            await until(lambda: disk.waiting == 2)
            scope.cancel()
    assert scope.cancelled_caught
    assert disk.ended == 2
    assert disk.fake.data[:1] == b"\0"


@pytest.mark.parametrize("answered", [0, 1])  # that are not settled yet
async def test_cancelled_it_waits_until_its_commands_are_aborted(answered: int) -> None:
    """Before that no buffer is free."""

    class Late(DirectFake):
        ended = 0

        def abandon(self, mine: Callable[[Waiter], bool]) -> int:
            loop_here().call_soon(self.end)
            return len(self.begun)

        def end_read(self, slot: Command) -> Rest | None:
            self.ended += 1
            return None

    disk, memory = Late(), Memory()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(theirs)))
    with trio.CancelScope() as scope:
        async with raw, open_strands() as group:
            try:
                async with trio.open_nursery() as nursery:
                    client = Client(ours, "client", group, memory, 0)
                    nursery.start_soon(Served(client, raw, Export("lun0", disk)).run, ours)
                    await raw.shake_hands()
                    await raw.send(request(nbd.READ, 0, 512, 1) + request(nbd.READ, 0, 512, 2))
                    await until(lambda: len(disk.begun) == 2)
                    scope.cancel()
            finally:
                for _ in range(answered):
                    disk.begun.pop().task_done()
    assert (disk.ended, memory.used) == (2, 0)


async def test_cancelled_it_does_not_say_that_the_target_is_slow() -> None:
    """Commands that the server itself aborts are no news."""

    class Slow(DirectFake):
        def end_read(self, slot: Command) -> Rest | None:
            raise CommandTimeout("no answer in 30 s")

    disk = Slow()
    with trio.CancelScope() as scope:
        async with served(disk) as (one,):
            await one.raw.send(request(nbd.READ, 0, 1, 2))
            await until(lambda: disk.begun)
            scope.cancel()
    assert scope.cancelled_caught


@pytest.mark.parametrize("pauses", [True, False])
async def test_cancelled_it_leaves_the_socket_alone(pauses: bool) -> None:
    """Its caller closes the socket; an answer that comes after that must not use the descriptor,
    which is another connection's by then."""
    disk, memory = DirectFake(), Memory()
    here, there = socket.socketpair()
    mine, other = socket.socketpair()
    there.setblocking(False)
    mine.setblocking(False)
    other.setblocking(False)
    with mine, other, trio.CancelScope() as scope:
        async with open_strands() as group:
            raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(there)))
            client = Client(here, "client", group, memory, 0)
            one = Served(client, raw, Export("lun0", disk))
            async with raw, trio.open_nursery() as nursery:
                nursery.start_soon(one.run, here)
                await raw.shake_hands()
                await raw.send(request(nbd.READ, 0, 512, 1))
                await until(lambda: disk.begun)
                number = here.fileno()
                if pauses:
                    nursery.start_soon(client.pause)
                    await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
            os.dup2(mine.fileno(), number)
            other.send(b"not for the client")
            disk.end()
            await trio.testing.wait_all_tasks_blocked()
            os.close(number)
            assert mine.recv(100) == b"not for the client"
            with pytest.raises(BlockingIOError):
                other.recv(100)
            scope.cancel()
    assert scope.cancelled_caught


@LOST
async def test_cancelled_a_flush_that_has_yet_to_begin_leaves_the_socket_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its caller has closed the socket, in which the client was told of a loss."""
    for _ in range(20):  # whether the flush begins before that is chance
        await _cancel_before_a_flush_begins()
    assert not [each for each in caplog.messages if "internal error" in each]


async def _cancel_before_a_flush_begins() -> None:
    disk, memory = fake(), Memory()
    here, there = socket.socketpair()
    there.setblocking(False)
    with trio.CancelScope() as scope:
        async with open_strands() as group:
            raw = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(there)))
            client = Client(here, "client", group, memory, 0)
            one = Served(client, raw, Export("lun0", disk))
            async with raw, trio.open_nursery() as nursery:
                nursery.start_soon(one.run, here)
                await raw.shake_hands()
                disk.fake.losses.add()
                await raw.send(request(nbd.FLUSH, cookie=1))
                await until(lambda: not disk.fake.losses.untold)  # the answer is not read
                with socket.socket(fileno=os.dup(there.fileno())) as sock:
                    sock.send(request(nbd.FLUSH, cookie=2))
                client.go_on()
                nursery.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


class NoTrims(AsyncFake):
    """A disk whose LUN turns out to know no UNMAP."""

    def __init__(self) -> None:
        super().__init__(FakeDisk(lun_info(0)))

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        self.info = lun_info(0, can_trim=False)
        raise NotSupported("lun0: the LUN refuses UNMAP")

    async def zero(self, offset: int, length: int, **how: bool) -> None:
        raise NotSupported("lun0: no WRITE SAME")


async def test_a_trim_that_the_lun_refuses_is_not_supported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """qemu goes on without trims then; with any other error it fails. One line is logged."""
    disk = NoTrims()
    async with served(disk, count=2) as (one, other):
        for cookie in (1, 2):
            for each in (one, other):
                await each.raw.send(request(nbd.TRIM, 0, 4096, cookie))
                assert (await each.raw.reply()).error == nbd.ENOTSUP
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, 4096, 3))
        assert (await one.raw.reply()).error == nbd.EINVAL
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, 4096, 4, nbd.FLAG_FAST_ZERO))
        assert (await one.raw.reply()).error == nbd.ENOTSUP
    (record,) = caplog.records
    assert record.message == (
        "lun0: the LUN refuses UNMAP; clients are told that trims are not supported"
    )


# --- large trims and zeroes ----------------------------------------------------------------------


class Slow(AsyncFake):
    """A disk that is large, and whose trims and zeroes end one by one, as ``steps`` says: first
    byte, bytes, patient."""

    def __init__(self, can_zero: bool = False) -> None:
        super().__init__(FakeDisk(lun_info(0, size=4096, can_zero=can_zero)))
        self.info = lun_info(0, size=8 << 30, can_zero=can_zero)
        self.steps: list[tuple[int, int, bool]] = []
        self.written: list[int] = []
        self.refused: IserblkError | None = None
        self._go: list[trio.Event] = []

    async def write(
        self, _buffer: memoryview, offset: int, _fua: bool = False, _rest: Rest | None = None
    ) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.written.append(offset)

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        await self._step(offset, length, patient)

    async def zero(self, offset: int, length: int, *, patient: bool = False, **_how: bool) -> None:
        await self._step(offset, length, patient)

    async def _step(self, offset: int, length: int, patient: bool) -> None:
        self.steps.append((offset, length, patient))
        if self.refused is not None:
            raise self.refused
        self._go.append(trio.Event())
        await elsewhere(self._go[-1].wait)

    async def end(self, count: int) -> None:
        """The next ``count`` steps end."""
        for _ in range(count):
            await until(lambda: self._go)
            self._go.pop(0).set()


GIB = 1 << 30


@pytest.mark.parametrize(
    ("command", "can_zero", "step"),
    [
        (nbd.WRITE_ZEROES, False, 32 * MIB),
        (nbd.WRITE_ZEROES, True, 256 * MIB),
        (nbd.TRIM, False, 256 * MIB),
    ],
)
async def test_what_is_large_takes_as_long_as_it_makes_progress(
    command: int, can_zero: bool, step: int
) -> None:
    """In steps that are whole, but for the ends."""
    disk = Slow(can_zero)
    async with served(disk) as (one,):
        await one.raw.send(request(command, 5, GIB, 1))
        await disk.end(GIB // step + 1)
        assert await one.raw.reply() == Reply(0, 1)
    assert disk.steps[0] == (5, step - 5, True)
    assert disk.steps[1] == (step, step, True)
    assert disk.steps[-1] == (GIB, 5, True)
    assert sum(length for _, length, _ in disk.steps) == GIB


async def test_what_is_not_large_has_the_time_of_one_request() -> None:
    disk = Slow()
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.WRITE_ZEROES, 5, 32 * MIB, 1))
        await disk.end(1)
        assert await one.raw.reply() == Reply(0, 1)
    assert disk.steps == [(5, 32 * MIB, False)]


async def test_the_kernel_does_not_wait_for_as_long() -> None:
    disk = Slow(can_zero=True)
    async with served(disk, patient=False) as (one,):
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, GIB, 1))
        await disk.end(1)
        assert await one.raw.reply() == Reply(0, 1)
    assert disk.steps == [(0, GIB, False)]


@pytest.mark.logs("made to fail")
async def test_a_step_that_fails_ends_it() -> None:
    disk = Slow()
    disk.refused = CommandTimeout("made to fail")
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, GIB, 1))
        assert await one.raw.reply() == Reply(nbd.EIO, 1)
    assert len(disk.steps) == 1


async def test_nothing_overtakes_what_is_large() -> None:
    """A client that has waited for too long asks again, over another connection, and then writes:
    what is left of the first request would zero what it has written. Other ranges, and reads, do
    not wait."""
    disk = Slow()
    count = 64 * MIB // (32 * MIB)
    async with served(disk, count=2) as (one, other):
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, 64 * MIB, 1))
        await until(lambda: len(disk.steps) == 1)
        again = request(nbd.WRITE_ZEROES, 0, 64 * MIB, 2)
        await other.raw.send(again + write(b"x", 64 * MIB - 1, 3) + write(b"y", 64 * MIB, 4))
        await other.raw.send(request(nbd.READ, 0, 1, 5))
        found = await other.raw.replies({4: 0, 5: 1})
        assert set(found) == {4, 5} and disk.written == [64 * MIB]
        await disk.end(count)
        assert await one.raw.reply() == Reply(0, 1)
        await until(lambda: len(disk.steps) == count + 1)
        await disk.end(count)
        assert set(await other.raw.replies({2: 0, 3: 0})) == {2, 3}
    assert disk.steps == [(0, 32 * MIB, True), (32 * MIB, 32 * MIB, True)] * 2


async def test_a_write_of_one_command_does_not_overtake_either() -> None:
    """It would be begun where it arrives, by no strand that could wait."""

    class Direct(Slow):
        def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> None:
            begun.append(offset)

    begun: list[int] = []
    disk = Direct()
    async with served(disk, count=2) as (one, other):
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, 64 * MIB, 1))
        await until(lambda: len(disk.steps) == 1)
        await other.raw.send(write(b"x", 0, 2) + request(nbd.READ, 0, 1, 3))
        assert await other.raw.reply(1) == Reply(0, 3, b"\0")
        assert begun == disk.written == []
        await disk.end(2)
        assert await other.raw.reply() == Reply(0, 2)
        await other.raw.send(write(b"x", 0, 4))
        assert await other.raw.reply() == Reply(0, 4)
    assert begun == [0] and disk.written == [0, 0]


@pytest.mark.parametrize("gone", [True, False])
async def test_what_is_large_ends_early(gone: bool) -> None:
    """Behind the step that has begun: where its client is gone, and nobody waits for it; and where
    the server ends."""
    disk = Slow()
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.WRITE_ZEROES, 0, GIB, 1))
        await until(lambda: len(disk.steps) == 1)
        if gone:
            await trio.aclose_forcefully(one.raw.stream)
            await trio.testing.wait_all_tasks_blocked()
        else:
            one.client.stop()
        await disk.end(1)
        if not gone:
            assert await one.raw.reply() == Reply(nbd.ESHUTDOWN, 1)
        await one.over.wait()
    assert disk.steps == [(0, 32 * MIB, True)]


async def test_many_requests_that_are_refused_are_all_answered() -> None:
    """More at once than answers may wait; and what comes behind them."""
    count = 5 * MOST_REFUSALS
    said = b"".join(request(77, 0, 0, number) for number in range(count))
    async with served(fake()) as (one,):
        await one.raw.send(said + request(nbd.READ, 0, 512, count))
        with trio.fail_after(20):
            found = await one.raw.replies({**dict.fromkeys(range(count), 0), count: 512})
        assert {each.error for each in found.values()} == {0, nbd.EINVAL}
        await one.raw.send(request(nbd.DISC))


async def test_refusals_that_are_not_read_stop_what_comes_behind_them() -> None:
    """Until they are read: then all are answered."""
    count = 40_000  # whose answers are more than the socket takes
    async with served(fake()) as (one,), trio.open_nursery() as nursery:

        async def send() -> None:
            said = b"".join(request(77, 0, 0, number) for number in range(count))
            await one.raw.send(said + request(nbd.DISC))

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert len(await one.raw.replies(dict.fromkeys(range(count), 0))) == count


async def test_a_client_that_sends_while_the_server_ends() -> None:
    """It learns at once that nothing more is received, and is answered what was."""
    disk = HeldDisk()
    async with served(disk) as (one,):
        await one.raw.send(request(nbd.READ, 0, 512, 1))
        await until(lambda: disk.waiting == 1)
        one.client.stop()
        with pytest.raises(trio.BrokenResourceError):
            await one.raw.send(request(nbd.READ, 0, 512, 2))
        disk.go.set()
        assert await one.raw.reply(512) == Reply(0, 1, bytes(512))
        assert await one.raw.end() == b""


@pytest.mark.logs("requests that it has not received")
async def test_refusals_that_are_read_when_the_server_ends() -> None:
    """What has been received is answered, and then it ends."""
    said = b"".join(request(77, 0, 0, number) for number in range(40_000))
    async with served(fake()) as (one,), trio.open_nursery() as nursery:

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await one.raw.send(said)

        nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        one.client.stop()
        with trio.fail_after(20):
            await one.raw.end()
            await one.over.wait()
