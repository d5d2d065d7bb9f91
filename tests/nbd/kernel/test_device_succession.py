"""Servers of one device in one process, with a disk of its own each: what the kernel is told, when
a server hears of a loss while its successor has the connections already, or is about to."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from iserblk.errors import ConnectFailed, IserblkError, first_error
from iserblk.loop.until_told import UntilTold
from iserblk.nbd import messages as nbd
from iserblk.nbd import serving
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.handover import encode_all
from iserblk.nbd.kernel.orders import LISTEN, TAKE, TAKE_FIRST
from iserblk.nbd.kernel.serving import DeviceSuccession, Report
from iserblk.nbd.kernel.state import Home
from iserblk.nbd.server import NbdServer
from iserblk.nbd.serving import Life, Terms
from tests.support.fake_disk import AsyncSet, FakeDisk, lun_info
from tests.support.nbd_client import RawClient, connected, request, write

URLS = ["iser://127.0.0.1/iqn.2026-11.example:a/0"]


class Disks(AsyncSet):
    """One disk. ``closing`` is called while the server logs out, which takes until
    ``may_close``."""

    def __init__(self) -> None:
        self.fake = FakeDisk(lun_info(0))
        self.closing: Callable[[], object] = lambda: None
        self.may_close = trio.Event()
        self.may_close.set()
        super().__init__([self.fake])

    def lose(self) -> None:
        """The LUN tells of a loss by a deferred error."""
        self.fake.losses.add()

    def serve_metrics(self) -> None:
        """It has none."""


class Server:
    """One server. ``error``: it has ended with that."""

    def __init__(self, home: Home, how: str, disks: Disks) -> None:
        self.ready = trio.Event()
        self.ended = trio.Event()
        self.error = ""
        self.disks = disks
        self.scope = trio.CancelScope()
        self._home = home
        self._how = how

    async def run(self) -> None:
        with ExitStack() as stack:
            report = Report(os.open(os.devnull, os.O_WRONLY))
            stack.callback(report.close)
            heir = DeviceSuccession(self._home, self._how, report)
            stack.callback(heir.close)
            sockets = [] if heir.inherits else heir.listen(stack)
            terms = Terms(until_unused=True, succession=heir)
            life = Life(URLS, {}, self.ready.set, lambda: None, terms, UntilTold(()))
            try:
                with self.scope:
                    await life.run(sockets)
            except BaseExceptionGroup as group:
                self.error = str(first_error(group))
            except IserblkError as error:
                self.error = str(error)
            self.error = self.error or "; ".join(life.failed.values())
        self.ready.set()
        self.ended.set()


class Servers:
    """The servers of a device, which open ``disks`` one after the other, and the only connection of
    its kernel."""

    def __init__(self, place: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = Home(Device("nbd0", Directories(run=place)))
        self.home.directory.mkdir()
        self.kernel: RawClient
        self.fails = False  # the next LUN cannot be opened
        self._disks: list[Disks] = []  # to be opened
        self._nursery = nursery
        monkeypatch.setattr(serving, "open_disks", self._open)

    @asynccontextmanager
    async def _open(self, *_: object, metrics_later: bool) -> AsyncIterator[Disks]:
        disks = self._disks.pop(0)
        if self.fails:
            self.fails = False
            raise ConnectFailed("no such LUN")
        yield disks
        disks.closing()
        await disks.may_close.wait()

    async def start(self, how: str = LISTEN) -> Server:
        """Returns the server when it serves, or has ended."""
        disks = Disks()
        self._disks.append(disks)
        server = Server(self.home, how, disks)
        self._nursery.start_soon(server.run)
        await server.ready.wait()
        return server

    async def write(self) -> None:
        await self.kernel.send(write(b"lost"))
        assert (await self.kernel.reply()).error == 0

    async def flush(self) -> int:
        """That of the kernel; its error."""
        await self.kernel.send(request(nbd.FLUSH))
        return (await self.kernel.reply()).error

    async def next_one_tells(self) -> None:
        """No server is left; the kernel is connected to another one, and told of one loss."""
        server = await self.start()
        async with await connected(self.home.socket) as self.kernel:
            assert [await self.flush(), await self.flush()] == [nbd.EIO, 0]
        await server.ended.wait()
        assert server.error == ""


@pytest.fixture
async def servers(
    tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Servers]:
    yield Servers(tmp_path, nursery, monkeypatch)


pytestmark = pytest.mark.logs("lun0: writes were lost")

Hook = Callable[[Disks, pytest.MonkeyPatch], None]


def _before_taken(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOSSES have been sent."""

    def lose(count: int, version: int) -> bytes:
        disks.lose()
        return encode_all(count, version)

    monkeypatch.setattr("iserblk.nbd.kernel.succession.encode_all", lose)


def _behind_taken(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = NbdServer.hand_over

    def lose(server: NbdServer) -> None:
        hand_over(server)
        disks.lose()

    monkeypatch.setattr(NbdServer, "hand_over", lose)


def _at_logout(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    disks.closing = disks.lose


WHEN = [_before_taken, _behind_taken, _at_logout]


@pytest.mark.parametrize("how", [TAKE, TAKE_FIRST])
@pytest.mark.parametrize("when", WHEN)
async def test_what_the_old_server_hears_until_its_end(
    when: Hook, how: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is told of it by the successor, once."""
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        when(old.disks, monkeypatch)
        new = await servers.start(how)
        assert new.error == ""
        await old.ended.wait()
        assert old.error == ""
        assert [await servers.flush(), await servers.flush()] == [nbd.EIO, 0]
    await new.ended.wait()
    assert new.error == "" and not servers.home.owed.exists()


async def test_what_it_has_heard_before_taken_is_told_to_the_first_flush(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to one that waits in the socket while the connection is handed over."""
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        stream = servers.kernel.stream
        assert isinstance(stream, trio.SocketStream)

        def lose(count: int, version: int) -> bytes:
            os.write(stream.socket.fileno(), request(nbd.FLUSH))
            old.disks.lose()
            return encode_all(count, version)

        monkeypatch.setattr("iserblk.nbd.kernel.succession.encode_all", lose)
        await servers.start(TAKE)
        assert (await servers.kernel.reply()).error == nbd.EIO
        assert await servers.flush() == 0


async def test_a_successor_that_serves_hears_while_the_old_server_logs_out(
    servers: Servers,
) -> None:
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        old.disks.may_close = trio.Event()
        await servers.start(TAKE)
        for _ in range(2):
            assert await servers.flush() == 0
            old.disks.lose()
            await trio.testing.wait_all_tasks_blocked()
            assert [await servers.flush(), await servers.flush()] == [nbd.EIO, 0]
        old.disks.may_close.set()
        await old.ended.wait()
        assert await servers.flush() == 0


async def test_a_successor_that_cannot_open_the_lun_leaves_it_to_the_next_server(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        servers.fails = True
        _behind_taken(old.disks, monkeypatch)
        new = await servers.start(TAKE_FIRST)
        assert new.error == "no such LUN"
    await servers.next_one_tells()


@pytest.mark.logs("the successor does not hear of a loss: Broken pipe")
@pytest.mark.parametrize("ended", [False, True])
async def test_a_successor_that_has_ended_leaves_it_to_the_next_server(
    ended: bool, servers: Servers
) -> None:
    """Or is about to, and does not listen any more: the old server still logs out then."""
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        old.disks.may_close = trio.Event()
        new = await servers.start(TAKE)
        if not ended:
            new.disks.closing = old.disks.lose
    await new.ended.wait()
    if ended:
        old.disks.lose()
    old.disks.may_close.set()
    await old.ended.wait()
    assert old.error == new.error == ""
    await servers.next_one_tells()


@pytest.mark.parametrize("how", [TAKE, TAKE_FIRST])
async def test_what_the_kernel_was_not_told_of_is_no_obstacle(how: str, servers: Servers) -> None:
    """The flush of the old server is not the kernel's, and takes no loss from it."""
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        old.disks.lose()
        new = await servers.start(how)
        assert new.error == "" and servers.home.owed.exists()
        await old.ended.wait()
        assert old.error == ""
        assert [await servers.flush(), await servers.flush()] == [nbd.EIO, 0]


async def test_nothing_is_owed_behind_a_hand_over_without_losses(servers: Servers) -> None:
    old = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        for how in (TAKE, TAKE_FIRST, TAKE):
            await servers.write()
            old.disks.lose()
            assert [await servers.flush(), await servers.flush()] == [nbd.EIO, 0]
            new = await servers.start(how)
            await old.ended.wait()
            assert await servers.flush() == 0 and not servers.home.owed.exists()
            old = new
    await old.ended.wait()
    assert old.error == "" and not servers.home.owed.exists()


@pytest.mark.parametrize("how", [TAKE, TAKE_FIRST])
async def test_an_answer_that_was_not_read_goes_with_its_connection(
    how: str, servers: Servers
) -> None:
    """The kernel gives one of its connections up, with the answer that tells of a loss unread in
    it, and repeats the flush on another one."""
    old = await servers.start()
    async with (
        await connected(servers.home.socket) as given_up,
        await connected(servers.home.socket) as servers.kernel,
    ):
        await servers.write()
        old.disks.lose()
        await given_up.send(request(nbd.FLUSH))
        await trio.testing.wait_all_tasks_blocked()
        await servers.start(how)
        await trio.aclose_forcefully(given_up.stream)
        assert [await servers.flush(), await servers.flush()] == [nbd.EIO, 0]


async def test_a_server_that_ends_without_its_last_flush_owes_it(servers: Servers) -> None:
    """As where it is told twice to end, and requests are not answered yet."""
    server = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        server.scope.cancel()
        await server.ended.wait()
    await servers.next_one_tells()


async def test_a_server_that_ends_at_once_owes_nothing_that_is_flushed(servers: Servers) -> None:
    server = await servers.start()
    async with await connected(servers.home.socket) as servers.kernel:
        await servers.write()
        assert await servers.flush() == 0
        server.scope.cancel()
        await server.ended.wait()
    assert not servers.home.owed.exists()
