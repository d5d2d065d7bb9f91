"""A server in this process, from its first login to its last flush."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.disk.ending import NotFlushed
from iserblk.disk.seam import FlushClient, LossCount
from iserblk.errors import CommandTimeout, ConnectFailed, IserblkError
from iserblk.initiator.session import ending
from iserblk.loop import stopping
from iserblk.nbd import messages as nbd
from iserblk.nbd import serving
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.listening import listen_unix
from iserblk.nbd.server import NbdServer
from iserblk.nbd.serving import Terms, serve
from tests.nbd.serving import fake
from tests.support import logs
from tests.support.fake_disk import AsyncFake, AsyncSet, open_async
from tests.support.nbd_client import connected, request, write
from tests.support.target import END_S, TargetProcess, running_target

SIZE = 4 << 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size={SIZE}"], files / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """``serve`` leaves its own when a signal has come: the process is to end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Watcher:
    """The callbacks of a server."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def ready(self) -> None:
        self.told.append("ready")

    def stopping(self) -> None:
        self.told.append("stopping")


def use(path: Path) -> None:
    """Look at the size of the default export, and go."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(END_S)
        sock.connect(str(path))
        sock.recv(nbd.GREETING.size, socket.MSG_WAITALL)
        flags = nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)
        sock.sendall(flags + nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.Option.EXPORT_NAME, 0))
        told = sock.recv(nbd.EXPORT_NAME_REPLY.size, socket.MSG_WAITALL)
        assert nbd.EXPORT_NAME_REPLY.unpack(told)[0] == SIZE


def test_until_the_last_client_has_gone(target: TargetProcess, tmp_path: Path) -> None:
    watcher = Watcher()
    client = threading.Thread(target=use, args=[tmp_path / "socket"])

    def ready() -> None:
        watcher.ready()
        client.start()

    with listen_unix(str(tmp_path / "socket")) as (sockets, _):
        number = serve(
            [f"{target.url}/0"], {}, sockets, ready, watcher.stopping, Terms(until_unused=True)
        )
    client.join()
    assert (number, watcher.told) == (0, ["ready"])


def test_until_a_signal(target: TargetProcess, tmp_path: Path) -> None:
    """A client that has come and gone does not end it."""
    watcher = Watcher()

    def use_and_end() -> None:
        use(tmp_path / "socket")
        os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=use_and_end)

    def ready() -> None:
        watcher.ready()
        client.start()

    with listen_unix(str(tmp_path / "socket")) as (sockets, _):
        number = serve([f"{target.url}/0"], {}, sockets, ready, watcher.stopping)
    client.join()
    assert (number, watcher.told) == (signal.SIGTERM, ["ready", "stopping"])


@pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.GIVEN_UP, "given up, as the end was asked")
def test_a_target_that_is_away_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long requests may wait; and it names what is lost. What waits has an answer."""
    monkeypatch.setattr(ending, "AWAY_S", 0.5)
    path = tmp_path / "socket"
    replies: list[int] = []

    async def write_twice(target: TargetProcess) -> None:
        async with await connected(path) as client:
            await client.send(write(b"x", 0, 1))
            replies.append((await client.reply()).error)
            target.kill()
            await client.send(write(b"x", 0, 2))
            os.kill(os.getpid(), signal.SIGTERM)
            replies.append((await client.reply()).error)

    watcher = Watcher()
    with (
        running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "log") as target,
        listen_unix(str(path)) as (sockets, _),
    ):
        client = threading.Thread(target=trio.run, args=[write_twice, target])

        def ready() -> None:
            watcher.ready()
            client.start()

        with pytest.raises(IserblkError) as caught:
            url = f"{target.url}/0?io-timeout=86400"
            serve([url], {}, sockets, ready, watcher.stopping)
        client.join()
    assert replies == [0, nbd.EIO]
    assert caught.value.exit_status == 1
    said = str(caught.value)
    assert said.startswith("lun0: the last flush failed, data may be lost: 512 unflushed bytes: ")
    assert "the end was asked for: not connected" in said


@pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.GIVEN_UP, "given up, as the end was asked")
def test_while_the_end_is_wished_for_requests_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a shutdown, where an unmount waits for them. The server goes on, and by force it ends
    without a flush."""
    monkeypatch.setattr(ending, "AWAY_S", 0.5)
    monkeypatch.setattr(stopping, "LOOK_S", 0.05)
    path = tmp_path / "socket"
    replies: list[int] = []
    wishes: list[str] = []

    async def write_twice(target: TargetProcess) -> None:
        async with await connected(path) as client:
            await client.send(write(b"x", 0, 1))
            replies.append((await client.reply()).error)
            target.kill()
            for cookie in range(2):
                await client.send(write(b"x", 0, cookie))
                replies.append((await client.reply()).error)
            os.kill(os.getpid(), signal.SIGTERM)

    def wished() -> bool:
        wishes.append(threading.current_thread().name)
        return True

    with (
        running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "log") as target,
        listen_unix(str(path)) as (sockets, _),
    ):
        client = threading.Thread(target=trio.run, args=[write_twice, target])
        with pytest.raises(NotFlushed) as caught:
            serve(
                [f"{target.url}/0?io-timeout=86400"],
                {},
                sockets,
                client.start,
                lambda: None,
                Terms(wished=wished, forced=lambda: True),
            )
        client.join()
    assert replies == [0, nbd.EIO, nbd.EIO] and wishes
    assert caught.value.unflushed == 512
    assert "512 unflushed bytes" in str(caught.value) and "by force" in str(caught.value)


@pytest.mark.logs("not done within 0.1 s: not waiting for the target")
def test_a_target_that_answers_is_waited_for_longer_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(AsyncFake):
        async def flush(self, client: FlushClient | None = None) -> None:
            await trio.sleep_forever()

    @asynccontextmanager
    async def open_disks(*_: object, metrics_later: bool) -> AsyncIterator[AsyncSet]:
        lun = fake(0).fake
        lun.dirty, lun.unflushed = True, 4096
        found = AsyncSet([lun])
        found.disks = {lun.info.name: Slow(lun)}
        yield found

    monkeypatch.setattr(serving, "open_disks", open_disks)
    monkeypatch.setattr(serving, "LONGEST_S", 0.1)
    watcher = Watcher()

    def ready() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with (
        listen_unix(str(tmp_path / "socket")) as (sockets, _),
        pytest.raises(IserblkError, match="lun0: not flushed: 4096 bytes written since the last"),
    ):
        url = "iser://127.0.0.1/iqn.2026-11.example:a"
        serve([url], {}, sockets, ready, watcher.stopping)


@pytest.mark.logs("not done within 0.1 s: not waiting for the target")
def test_a_certain_loss_is_told_though_another_flush_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is none of what may be lost."""

    class Slow(AsyncFake):
        async def flush(self, client: FlushClient | None = None) -> None:
            await trio.sleep_forever()

    @asynccontextmanager
    async def open_disks(*_: object, metrics_later: bool) -> AsyncIterator[AsyncSet]:
        lost, slow = (fake(number).fake for number in range(2))
        lost.losses.add()
        slow.dirty, slow.unflushed = True, 4096
        found = AsyncSet([lost, slow])
        found.disks[slow.info.name] = Slow(slow)
        yield found

    monkeypatch.setattr(serving, "open_disks", open_disks)
    monkeypatch.setattr(serving, "LONGEST_S", 0.1)
    watcher = Watcher()

    def ready() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    url = "iser://127.0.0.1/iqn.2026-11.example:a"
    with (
        listen_unix(str(tmp_path / "socket")) as (sockets, _),
        pytest.raises(NotFlushed) as caught,
    ):
        serve([url], {}, sockets, ready, watcher.stopping)
    first, second = str(caught.value).split("; ")
    assert first.startswith("lun0: data is lost, and a client has not heard of it")
    assert second.startswith("lun1: not flushed: 4096 bytes")


def test_the_last_flushes_begin_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is away does not hold up the flush of another."""
    begun: list[trio.Event] = []

    class Away(AsyncFake):
        async def flush(self, client: FlushClient | None = None) -> None:
            begun.append(trio.Event())
            if len(begun) == 2:
                for each in begun:
                    each.set()
            await begun[-1].wait()

    @asynccontextmanager
    async def open_disks(*_: object, metrics_later: bool) -> AsyncIterator[AsyncSet]:
        luns = [fake(number).fake for number in range(2)]
        for each in luns:
            each.dirty = True
        found = AsyncSet(luns)
        found.disks = {each.info.name: Away(each) for each in luns}
        yield found

    monkeypatch.setattr(serving, "open_disks", open_disks)
    watcher = Watcher()

    def ready() -> None:
        watcher.ready()
        os.kill(os.getpid(), signal.SIGTERM)

    url = "iser://127.0.0.1/iqn.2026-11.example:a"
    with listen_unix(str(tmp_path / "socket")) as (sockets, _):
        assert serve([url], {}, sockets, ready, watcher.stopping) == signal.SIGTERM
    assert watcher.told == ["ready", "stopping"]
    assert len(begun) == 2


def test_errors_are_raised_singly(tmp_path: Path) -> None:
    watcher = Watcher()
    with (
        listen_unix(str(tmp_path / "socket")) as (sockets, _),
        pytest.raises(ConnectFailed, match="Connection refused"),
    ):
        serve(
            ["iser://127.0.0.1:1/iqn.2026-11.example:a/0"],
            {},
            sockets,
            watcher.ready,
            watcher.stopping,
        )
    assert watcher.told == []


class Heir:
    """Implements Succession: asks for a flush, and takes nothing. ``told``: errors that a client
    got for its flushes before and after that. ``before``: losses of predecessors; ``counts``: what
    was counted."""

    inherits = opens_last = given = False

    def __init__(self, path: Path, after: Callable[[], None]) -> None:
        self.told: list[int] = []
        self.before = LossCount()
        self.counts: list[LossCount] = []
        self.error = ""  # that ``serve`` has raised
        self._path = path
        self._after = after

    async def take(self) -> list[PausedConnection]:
        raise AssertionError("there is no predecessor")

    def losses_before(self) -> LossCount:
        return self.before

    def counted(self, count: LossCount) -> None:
        self.counts.append(count)

    async def predecessor_ended(self, lost: Callable[[int], object]) -> None:
        raise AssertionError("there is no predecessor")

    async def offer(self, server: NbdServer, flush: Callable[[], Awaitable[None]]) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(self._path))
            listening.listen()
            async with (
                server.listening([listening]),
                await connected(self._path) as client,
            ):
                await flush()  # of a disk that is not dirty: nothing is done
                await client.send(write(b"x"))
                await client.reply()
                with pytest.raises(CommandTimeout, match="flush: made to fail"):
                    await flush()
                self._after()
                for cookie in range(2):
                    await client.send(request(nbd.FLUSH, cookie=cookie))
                    self.told.append((await client.reply()).error)


def serve_heir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: LossCount, after: str = "{}"
) -> Heir:
    monkeypatch.setattr("iserblk.nbd.serving.open_disks", open_async)
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"flush": "CommandTimeout"}))
    heir = Heir(tmp_path / "socket", lambda: monkeypatch.setenv("FAKE_FAULTS", after))
    heir.before = before
    watcher = Watcher()
    urls = ["iser://127.0.0.1/iqn.2026-11.example:a/0"]
    try:
        terms = Terms(until_unused=True, succession=heir)
        serve(urls, {}, [], watcher.ready, watcher.stopping, terms)
    except IserblkError as error:
        heir.error = str(error)
    return heir


def test_a_flush_for_a_successor_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was no client's: nothing is lost, and the client's flush is carried out."""
    heir = serve_heir(tmp_path, monkeypatch, LossCount())
    assert heir.told == [0, 0] and heir.error == ""
    assert set(heir.counts) == {(0, 0)}


@pytest.mark.logs("writes were lost")
def test_losses_of_a_predecessor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of all connections is told, once; a flush for a successor tells nothing."""
    heir = serve_heir(tmp_path, monkeypatch, LossCount(4, 3))
    assert heir.told == [nbd.EIO, 0] and heir.error == ""
    assert (heir.counts[0], heir.counts[-1]) == ((4, 3), (4, 4))


def test_losses_of_a_predecessor_where_the_lun_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the predecessor has ended: they are counted as soon as they are known, for the server
    that comes next."""

    class Last(Heir):
        inherits = opens_last = True

        async def take(self) -> list[PausedConnection]:
            return []

        async def predecessor_ended(self, lost: Callable[[int], object]) -> None:
            assert self.counts == [(4, 3)]
            self.before = LossCount(5, 3)
            lost(1)

    monkeypatch.setattr("iserblk.nbd.serving.open_disks", open_async)
    monkeypatch.setenv("FAKE_FAULTS", json.dumps({"open": "ConnectFailed"}))
    heir = Last(Path(), lambda: None)
    heir.before = LossCount(4, 3)
    urls = ["iser://127.0.0.1/iqn.2026-11.example:a/0"]
    watcher = Watcher()
    with pytest.raises(ConnectFailed):
        serve(urls, {}, [], watcher.ready, watcher.stopping, Terms(succession=heir))
    assert heir.counts == [(4, 3), (5, 3)]


@pytest.mark.logs("flush: made to fail")
def test_a_last_flush_that_fails_is_left_to_the_next_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heir = serve_heir(tmp_path, monkeypatch, LossCount(), '{"flush": "CommandTimeout"}')
    assert heir.told == [nbd.EIO] * 2 and "the last flush failed" in heir.error
    assert heir.counts[-1] == (1, 0)


def test_the_last_flush_tells_what_no_client_was_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has gone without a flush."""

    @asynccontextmanager
    async def open_disks(*_: object, metrics_later: bool) -> AsyncIterator[AsyncSet]:
        disk = fake().fake
        disk.losses.add()
        yield AsyncSet([disk])

    monkeypatch.setattr(serving, "open_disks", open_disks)
    watcher = Watcher()

    def ready() -> None:
        watcher.ready()
        os.kill(os.getpid(), signal.SIGTERM)

    url = "iser://127.0.0.1/iqn.2026-11.example:a"
    with (
        listen_unix(str(tmp_path / "socket")) as (sockets, _),
        pytest.raises(IserblkError, match="lun0: data is lost, and a client has not heard of it"),
    ):
        serve([url], {}, sockets, ready, watcher.stopping)
