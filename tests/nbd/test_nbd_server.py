"""Clients come, are limited, and go; and the end of a server."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import ssl
import termios
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from iserblk.disk.seam import FlushClient
from iserblk.errors import CommandTimeout
from iserblk.limited_log import BURST
from iserblk.nbd import buffers, limited_log
from iserblk.nbd import client as client_module
from iserblk.nbd import messages as nbd
from iserblk.nbd import server as server_module
from iserblk.nbd.server import NbdServer
from iserblk.nbd.tls import TlsStream, by_certificates
from tests.nbd.serving import DirectFake, HeldDisk, arrived, at, fake, server_of, serving
from tests.support.certificates import Authority
from tests.support.fake_disk import AsyncFake
from tests.support.nbd_client import (
    WHOLE,
    RawClient,
    Reply,
    behind_tls,
    connect,
    connected,
    go,
    option,
    request,
    write,
)
from tests.support.nbdkit import need
from tests.support.until import until

MIB = 1 << 20


async def is_let_go(client: RawClient) -> bool:
    """The server has ended the connection. (The limit is that of the test.)"""
    await client.end()
    return True


async def test_clients_of_several_exports(tmp_path: Path) -> None:
    disks = fake(0), fake(1, size=MIB)
    async with (
        serving(tmp_path, *disks) as path,
        await connect(path) as first,
        await connect(path) as second,
    ):
        assert await first.shake_hands() == 8 * MIB
        assert await second.shake_hands("lun1") == MIB
        await first.send(write(b"first", 0, 1))
        await second.send(write(b"second", 0, 2))
        assert await first.reply() == Reply(0, 1)
        assert await second.reply() == Reply(0, 2)
        await first.send(request(nbd.READ, 0, 5, 3))
        assert await first.reply(5) == Reply(0, 3, b"first")
        await first.send(request(nbd.DISC))
        assert await is_let_go(first)


class CountingMemory(buffers.Memory):
    """``counts``: of clients, as the server tells them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def guarantee(self, clients: int) -> None:
        self.counts.append(clients)
        super().guarantee(clients)


@pytest.mark.logs("let go without a request")
@pytest.mark.parametrize("room", [2, 1])
async def test_clients_that_come_and_go_share_what_is_guaranteed(tmp_path: Path, room: int) -> None:
    """All that is guaranteed to them is bounded by their number. Where there is no room, an idle
    client makes it before another one takes it."""
    server = server_of(fake())
    server.most_clients, server.spare = room, 0
    server.memory = memory = CountingMemory()
    async with at(tmp_path, server) as path:
        async with await connected(path), await connected(path):
            pass
        await until(lambda: not server.clients)
    assert memory.counts[:2] == ([1, 2] if room == 2 else [1, 0])
    assert max(memory.counts) == room and memory.counts[-1] == 0


async def test_no_connection_is_taken_in_a_pause(tmp_path: Path) -> None:
    """Another process may take it. One that is in its handshake is let go: the process does not
    inherit it."""
    disk = HeldDisk()
    server = server_of(disk)
    async with (
        at(tmp_path, server) as path,
        await connected(path),
        await connect(path) as greeted,
        await connect(path) as late,
    ):
        await greeted.greet()
        disk.hold_size = True
        await late.greet()
        await late.send(go())
        await until(lambda: disk.waiting == 1)
        await server.pause()
        with trio.fail_after(20):
            assert await is_let_go(greeted) and await is_let_go(late)
        async with await connect(path) as new:
            await trio.testing.wait_all_tasks_blocked()
            assert isinstance(new.stream, trio.SocketStream)
            with socket.socket(fileno=os.dup(new.stream.socket.fileno())) as sock:
                assert not arrived(sock)
            disk.hold_size = False
            server.go_on()
            with trio.fail_after(20):
                assert await new.shake_hands() == 8 * MIB
            assert server.clients == 2


async def test_a_handshake_that_ends_as_a_pause_begins(tmp_path: Path) -> None:
    """It cannot be cancelled any more. Its client is none of those that are paused."""

    class Pausing(AsyncFake):
        async def refresh(self) -> int:
            with trio.CancelScope(shield=True):
                await server.pause()
            return self.size

    server = server_of(Pausing(fake().fake))
    async with at(tmp_path, server) as path, await connect(path) as one:
        await one.greet()
        await one.send(go())
        with trio.fail_after(20):
            assert await is_let_go(one) and not server.clients
        server.go_on()


async def test_what_was_received_is_answered_at_the_end(tmp_path: Path) -> None:
    disk = HeldDisk()
    async with trio.open_nursery() as nursery, serving(tmp_path, disk) as path:
        client = await connected(path)
        await client.send(write(b"in flight", 0, 1) + request(nbd.READ, 0, 100, 2))
        await until(lambda: disk.waiting == 2)
        half = await connect(path)
        await half.greet()

        async def let_go_on() -> None:
            assert await is_let_go(half)  # a handshake is not waited for
            disk.go.set()

        nursery.start_soon(let_go_on)
    async with client, half:
        await client.replies({1: 0, 2: 100})
        assert await client.end() == b""
    assert bytes(disk.fake.data[:9]) == b"in flight"


async def test_cancelled_it_aborts_what_is_open(tmp_path: Path) -> None:
    disk = HeldDisk()
    with trio.CancelScope() as scope:
        async with serving(tmp_path, disk) as path:
            client = await connected(path)
            await client.send(write(b"in flight", 0, 1))
            await until(lambda: disk.waiting == 1)
            scope.cancel()
    async with client:
        assert await client.end() == b""
    assert bytes(disk.fake.data[:9]) == bytes(9)


async def test_a_client_that_takes_no_replies_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LAST_WORDS_S", 0.05)
    disk = fake()
    async with serving(tmp_path, disk) as path:
        client = await connected(path)
        await client.send(request(nbd.READ, 0, 4 * MIB, 1))
        await client.receive(1)
    async with client:
        with pytest.raises(EOFError):
            await client.receive(4 * MIB + nbd.SIMPLE_REPLY.size - 1)


@pytest.mark.parametrize("said", [b"", b"\0", nbd.CLIENT_FLAGS.pack(3), None])
async def test_a_handshake_takes_no_longer_than_it_may(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: bytes | None,
) -> None:
    """None: a byte again and again, none of which ends an option."""
    monkeypatch.setattr(client_module, "HANDSHAKE_S", 0.2)
    async with serving(tmp_path, fake()) as path, await connect(path) as client:
        if said is not None:
            await client.send(said)
        else:
            await client.greet()
            with pytest.raises(trio.BrokenResourceError):
                for byte in nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.Option.GO, 30_000) + bytes(
                    30_000
                ):
                    await client.send(bytes([byte]))
                    await trio.sleep(0.02)
        assert await is_let_go(client)
    (text,) = [record.getMessage() for record in caplog.records]
    assert text == "NBD client: no end of the handshake in time"


async def test_a_client_that_asks_about_many_exports_may_take_longer(
    tmp_path: Path, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A second for each, once."""
    async with serving(tmp_path, fake(0), fake(1)) as path, await connect(path) as client:
        await client.greet()
        mock_clock.jump(client_module.HANDSHAKE_S - 0.1)
        for name, jump in (("lun0", 1.0), ("lun0", 0.0), ("lun1", 1.0)):
            assert await client.ask(name) == nbd.REP_ACK
            mock_clock.jump(jump)
        assert await client.ask("lun1") == nbd.REP_ACK
        assert caplog.records == []
        mock_clock.jump(0.2)
        assert await is_let_go(client)


@pytest.mark.parametrize("count", [128, 1000])
async def test_all_of_many_exports_are_listed(tmp_path: Path, count: int) -> None:
    need("nbdinfo")
    disks = [fake(number, size=4096) for number in range(count)]
    async with serving(tmp_path, *disks) as path:
        words = ["nbdinfo", "--list", "--json", f"nbd+unix:///?socket={path}"]
        done = await trio.run_process(words, capture_stdout=True)
    listed = json.loads(done.stdout)["exports"]
    assert [each["export-name"] for each in listed] == [f"lun{each}" for each in range(count)]


async def test_the_limit_of_a_handshake_is_not_for_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that is away delays what it is asked for: clients wait for it."""
    monkeypatch.setattr(client_module, "HANDSHAKE_S", 0.1)
    disk = HeldDisk()
    disk.hold_size = True
    async with serving(tmp_path, disk) as path, await connect(path) as client:
        await client.greet()
        await client.send(go())
        await until(lambda: disk.waiting == 1)
        await trio.sleep(0.2)
        disk.go.set()
        assert (await client.option_reply())[0] == nbd.REP_INFO


@asynccontextmanager
async def over_tcp(server: NbdServer) -> AsyncIterator[Callable[[str], Awaitable[RawClient]]]:
    """Yields what connects from an address of this machine."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:

        async def connect_from(address: str) -> RawClient:
            sock = trio.socket.socket()
            await sock.bind((address, 0))
            await sock.connect(listening.getsockname())
            return RawClient(trio.SocketStream(sock))

        async with server.serving([listening]):
            yield connect_from


async def test_a_flood_of_handshakes_ends_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Not that of another address, however long it takes; and not what is at work."""
    server = server_of(fake())
    server.most_handshakes = 4
    async with AsyncExitStack() as stack, over_tcp(server) as connect_from:

        async def come(address: str) -> RawClient:
            return await stack.enter_async_context(await connect_from(address))

        worker = await come("127.0.0.1")
        await worker.shake_hands()
        honest = await come("127.0.0.2")
        await honest.receive(nbd.GREETING.size)
        flood = [await come("127.0.0.1") for _ in range(20)]
        for each in flood[:17]:
            assert await is_let_go(each)
        await honest.send(nbd.CLIENT_FLAGS.pack(WHOLE))
        assert await honest.choose() == 8 * MIB
        same = await come("127.0.0.1")  # as the flood
        assert await same.shake_hands() == 8 * MIB
        for each in (worker, honest, same):
            await each.send(request(nbd.READ, 0, 1, 7))
            assert await each.reply(1) == Reply(0, 7, b"\0")
    assert {each.partition(": ")[2] for each in caplog.messages} == {
        "let go: too many handshakes at once (4)"
    }


async def test_too_many_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that have chosen an export and ask for nothing make room, the oldest first; those that
    are at work stay, and so does who comes to a place that is free."""
    server = server_of(fake())
    server.most_clients, server.spare = 3, 0
    async with at(tmp_path, server) as path, AsyncExitStack() as stack:

        async def come() -> RawClient:
            return await stack.enter_async_context(await connect(path))

        async def work(*clients: RawClient) -> None:
            for each in clients:
                await each.send(request(nbd.READ, 0, 1, 7))
                assert await each.reply(1) == Reply(0, 7, b"\0")

        first, idle, second, third = [await come() for _ in range(4)]
        for each in (first, idle, second):
            await each.shake_hands()
        await work(first, second)
        await third.greet()
        await work(first)  # a handshake ends no client: only its end does
        await third.choose()
        await work(first, second, third)
        assert await is_let_go(idle)
        assert await is_let_go(await come())
        await second.stream.aclose()
        await until(lambda: server.clients == 2)
        assert await (await come()).shake_hands() == 8 * MIB
    assert caplog.messages == [
        "NBD client: let go without a request: there are 3 clients",
        "NBD client: refused: there are 3 clients, all at work",
    ]


async def test_one_address_does_not_take_all_places(caplog: pytest.LogCaptureFixture) -> None:
    server = server_of(fake())
    server.most_clients, server.spare = 10, 2
    async with AsyncExitStack() as stack, over_tcp(server) as connect_from:

        async def work(address: str) -> bool:
            client = await stack.enter_async_context(await connect_from(address))
            try:
                await client.shake_hands()
                await client.send(request(nbd.READ, 0, 1, 7))
                return await client.reply(1) == Reply(0, 7, b"\0")
            except EOFError:
                return False

        assert [await work("127.0.0.1") for _ in range(12)] == [True] * 10 + [False] * 2
        assert [await work("127.0.0.2") for _ in range(3)] == [True] * 2 + [False]
    assert len(caplog.messages) == 3


@pytest.mark.parametrize(
    ("limit", "places"),
    [
        (2304, (1024, 128, 1024)),
        (20000, (1024, 128, 1024)),
        (1216, (512, 64, 512)),
        (64, (8, 2, 4)),
    ],
)
def test_room_goes_by_the_limit_of_descriptors(limit: int, places: tuple[int, ...]) -> None:
    assert server_module.room(limit) == places


def test_too_few_descriptors_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(256, 1216)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    server_module.allow_descriptors()
    assert limits[-1] == (1216, 1216)
    assert caplog.messages == [
        "room for 512 clients, not 1024: the limit of descriptors is 1216; raise it to 2304"
        " (LimitNOFILE=, ulimit -n)"
    ]


async def test_clients_that_stall_do_not_keep_memory_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two begin the largest writes and say no more: all memory is theirs. With nothing of its own
    in flight, a third could wait for ever. A read within what is guaranteed does not wait."""
    monkeypatch.setattr(server_module, "STALL_S", 0.05)
    begun = nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.WRITE, 1, 0, nbd.MOST_PAYLOAD)
    async with (
        serving(tmp_path, fake()) as path,
        await connected(path) as first,
        await connected(path) as second,
        await connected(path) as third,
    ):
        for stalled in (first, second):
            await stalled.send(begun)
        await third.send(request(nbd.READ, 0, 512, 1))
        assert await third.reply(512) == Reply(0, 1, bytes(512))
        await third.send(request(nbd.READ, 0, 2 * MIB, 2))
        assert await third.reply(2 * MIB) == Reply(0, 2, bytes(2 * MIB))
        assert await is_let_go(first)
    assert "others need the memory" in caplog.text


async def test_clients_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    def open_now() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with serving(tmp_path, fake()) as path:
        async with await connected(path):
            pass
        before = open_now()
        for number in range(200):
            client = await connect(path)
            if number % 2:
                await client.shake_hands()
            await client.stream.aclose()
        await until(lambda: open_now() <= before)


@pytest.mark.logs("NBD: an option does not begin with IHAVEOPT")
async def test_garbage_in_the_handshake_ends_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, fake()) as path:
        async with await connect(path) as client:
            await client.greet()
            await client.send(b"GET / HTTP/1.1\r\n\r\n")
            assert await is_let_go(client)
        async with await connected(path) as other:
            await other.send(request(nbd.READ, 0, 1, 7))
            assert await other.reply(1) == Reply(0, 7, b"\0")


async def test_a_bug_in_a_handshake_ends_that_client_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(AsyncFake):
        async def refresh(self) -> int:
            raise ZeroDivisionError

    async with serving(tmp_path, fake(), Broken(fake(1).fake)) as path:
        async with await connect(path) as client:
            await client.greet()
            await client.send(go("lun1"))
            assert await is_let_go(client)
        async with await connected(path) as other:
            await other.send(request(nbd.READ, 0, 1, 7))
            assert await other.reply(1) == Reply(0, 7, b"\0")
    assert caplog.messages == ["NBD client: internal error"]


async def test_what_many_hostile_clients_do_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the handshake and behind it. The rest of the log stays readable."""
    async with serving(tmp_path, fake()) as path:
        for number in range(40):
            async with await (connected(path) if number % 2 else connect(path)) as client:
                if not number % 2:
                    await client.greet()
                await client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await is_let_go(client)
    assert len(caplog.messages) == BURST + 1
    assert caplog.messages[-1] == f"NBD clients: {40 - BURST} more lines are left out"


async def test_requests_that_fail_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(AsyncFake):
        async def flush(self, client: FlushClient | None = None) -> None:
            raise CommandTimeout("no answer in 30 s")

    count = 3 * BURST
    async with serving(tmp_path, Failing(fake().fake)) as path, await connected(path) as client:
        await client.send(b"".join(request(nbd.FLUSH, cookie=n) for n in range(count)))
        await client.replies(dict.fromkeys(range(count), 0))
    assert caplog.messages == [
        *["NBD client: no answer in 30 s"] * BURST,
        f"failed requests of NBD clients: {count - BURST} more lines are left out",
    ]


async def test_what_is_left_out_is_told_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "STALL_S", 0.05)
    monkeypatch.setattr(limited_log, "BURST", 1)
    async with serving(tmp_path, fake()) as path:
        for _ in range(3):
            async with await connect(path) as client:
                await client.greet(flags=1 << 7)
                assert await is_let_go(client)
        await until(lambda: "left out" in caplog.text)


async def test_requests_that_stay_in_the_socket_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With many open, a client is not received from. What waits in its socket is not answered, not
    even with an error: the kernel repeats it at the next server."""
    disk = DirectFake()
    first = range(client_module.MANY)
    async with trio.open_nursery() as nursery, serving(tmp_path, disk) as path:
        client = await connected(path)
        await client.send(b"".join(write(b"x", number, number) for number in first))
        await until(lambda: len(disk.begun) == len(first))
        await client.send(write(b"y", 100, 99))

        async def let_go_on() -> None:
            await until(lambda: caplog.messages)
            disk.end()

        nursery.start_soon(let_go_on)
    async with client:
        await client.replies(dict.fromkeys(first, 0))
        assert await client.end() == b""
    assert bytes(disk.fake.data[100:101]) == b"\0"
    assert caplog.messages == [
        "NBD client: the server ends; requests that it has not received are not answered"
    ]


async def test_what_stays_in_a_tcp_socket_costs_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    """Of a client that is slow to take them."""
    disk, count, length = DirectFake(), client_module.MANY, 2048
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket() as sock,
    ):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the kernel takes its least
        sock.connect(listening.getsockname())
        sock.setblocking(False)
        client = RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))

        async def let_go_on() -> None:
            await until(lambda: caplog.messages)  # of what is not received
            disk.end()

        async with client:
            async with trio.open_nursery() as nursery, server_of(disk).serving([listening]):
                await client.shake_hands()
                await client.send(
                    b"".join(request(nbd.READ, 0, length, number) for number in range(count))
                )
                await until(lambda: len(disk.begun) == count)
                await client.send(request(nbd.READ, 0, length, 99))
                await until(lambda: sent(sock))
                nursery.start_soon(let_go_on)
            await client.replies(dict.fromkeys(range(count), length))
            assert await client.end() == b""


async def test_a_large_reply_leaves_though_its_client_is_busy(tmp_path: Path) -> None:
    """The default of the system takes 208 KiB."""
    length = 320 << 10
    async with serving(tmp_path, fake()) as path:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock.dup()))
            async with RawClient(stream) as client:
                await client.shake_hands()
                await client.send(request(nbd.READ, 0, length, 1))
                await until(lambda: arrived(sock) == nbd.SIMPLE_REPLY.size + length)
                await client.replies({1: length})


def sent(sock: socket.socket) -> bool:
    """All has arrived at the other end."""
    left = array("i", [1])
    fcntl.ioctl(sock, termios.TIOCOUTQ, left)
    return not left[0]


async def test_over_tcp_clients_have_names(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with server_of(fake()).serving([listening]):
            stream = await trio.open_tcp_stream(*listening.getsockname())
            name = f"NBD client 127.0.0.1:{stream.socket.getsockname()[1]}"
            async with RawClient(stream) as client:
                await client.greet(flags=1 << 7)
                assert await is_let_go(client)
    assert caplog.messages == [f"{name}: NBD: unknown client flags 0x80"]


@pytest.mark.logs("let go: too many handshakes at once", "connection has been closed")
async def test_a_client_that_is_silent_in_the_handshake_of_tls_is_in_its_handshake(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path / "ca")
    context = by_certificates(str(authority.server(tmp_path / "server")), False)
    server = server_of(fake(), context=context)
    server.most_handshakes = 2
    async with at(tmp_path, server) as path, AsyncExitStack() as stack:
        silent = []
        for _ in range(3):
            each = await stack.enter_async_context(await connect(path))
            silent.append(each)
            await each.greet()
            await each.send(option(nbd.Option.STARTTLS))
            assert await each.option_reply() == (nbd.REP_ACK, b"")
        assert await is_let_go(silent[0])


async def test_tls_records_that_wait_for_memory_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request has to wait for the first one's memory; the third has come with them, in
    a record of its own, which the socket does not show any more."""
    authority = Authority(tmp_path / "ca")
    context = by_certificates(str(authority.server(tmp_path / "server")), False)
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca-cert.pem"))
    monkeypatch.setattr(buffers, "CLIENT_BYTES", 16 << 10)
    disk = HeldDisk()
    length = 12 << 10
    async with serving(tmp_path, disk, context=context) as path, await connect(path) as plain:
        client, cork = await behind_tls(plain, trust)
        await client.send(request(nbd.READ, 0, length, 1) + request(nbd.READ, 0, length, 2))
        await client.send(request(nbd.READ, 0, 1, 3))
        await cork.pull()
        await until(lambda: disk.waiting == 1)
        disk.go.set()
        found = await client.replies({1: length, 2: length, 3: 1})
        assert not any(reply.error for reply in found.values())


class _Turns(trio.abc.Instrument):
    """``most``: the largest count between two times that trio has looked for what is ready."""

    def __init__(self) -> None:
        self.count = self.most = 0

    def before_io_wait(self, timeout: float) -> None:
        self.most = max(self.most, self.count)
        self.count = 0


async def test_tls_records_without_end_let_other_clients_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many have come at once. Each brings an answer, for which there is no limit of memory."""
    authority = Authority(tmp_path / "ca")
    context = by_certificates(str(authority.server(tmp_path / "server")), False)
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca-cert.pem"))
    turns = _Turns()
    receive = TlsStream.receive

    def counted(self: TlsStream, buffers: list[memoryview]) -> int:
        turns.count += 1
        return receive(self, buffers)

    monkeypatch.setattr(TlsStream, "receive", counted)
    async with serving(tmp_path, fake(), context=context) as path, await connect(path) as plain:
        client, cork = await behind_tls(plain, trust)
        count = 500
        for cookie in range(count):
            await client.send(request(nbd.READ, 0, nbd.MOST_PAYLOAD + 1, cookie))
        trio.lowlevel.add_instrument(turns)
        await cork.pull()
        found = await client.replies(dict.fromkeys(range(count), 0))
        trio.lowlevel.remove_instrument(turns)
    assert all(reply.error for reply in found.values()) and len(found) == count
    assert turns.most <= 100
