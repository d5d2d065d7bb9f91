"""A target dies with what it had acknowledged, and comes back: which client of a server hears of
it, with real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import iserblk.asyncio
from iserblk.errors import WritesLost
from iserblk.nbd import messages as nbd
from iserblk.nbd.kernel.orders import LISTEN, READY, TAKE, NoHandOver, error_of
from tests.integration.conftest import StartTarget
from tests.nbd.kernel.test_kernel_serving import ended, started, uses_an_export
from tests.support import logs
from tests.support.faces import FACES, one_disk, read
from tests.support.faces import write as write_all
from tests.support.fuse import need_fuse, running_mount
from tests.support.nbd_client import request, write
from tests.support.target import END_S, TargetProcess
from tests.support.until import until_blocking

SPEC = "lun:size=8M:volatile-cache=64M"


class Client:
    """A connection to a server."""

    def __init__(self, path: Path) -> None:
        self.sock = uses_an_export(path)

    def ask(self, message: bytes, length: int = 0) -> int:
        """The error that the client gets."""
        self.sock.sendall(message)
        reply = self.sock.recv(nbd.SIMPLE_REPLY.size, socket.MSG_WAITALL)
        _, error, _ = nbd.SIMPLE_REPLY.unpack(reply)
        if length and not error:
            self.sock.recv(length, socket.MSG_WAITALL)
        return int(error)

    def write(self) -> int:
        return self.ask(write(b"w" * 4096))

    def read(self) -> int:
        return self.ask(request(nbd.READ, 0, 512), 512)

    def flush(self) -> int:
        return self.ask(request(nbd.FLUSH))

    def close(self) -> None:
        self.sock.close()


Lose = Callable[[Client], TargetProcess]


@pytest.fixture
def lose(start_target: StartTarget) -> Iterator[Lose]:
    """A target; call it to lose what the client has written."""
    running = [start_target(SPEC)]

    def lost(client: Client) -> TargetProcess:
        assert not client.write()
        running[-1].kill()
        running.append(start_target(SPEC, listen=running[-1].listen))
        assert not client.read()
        return running[-1]

    lost.url = f"{running[0].url}/0"  # type: ignore[attr-defined]
    yield lost


def url_of(lose: Lose) -> str:
    return lose.url  # type: ignore[attr-defined,no-any-return]


@contextmanager
def nbd_server(path: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "iserblk.cli"),
            *("nbd", "--socket", str(path), "--journal", "off", url),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready")
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=END_S)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=END_S)
    return process.returncode, said


def test_clients_of_an_nbd_server(lose: Lose, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with nbd_server(path, url_of(lose)) as server:
        one, other = Client(path), Client(path)
        lose(one)
        zeroes = request(nbd.WRITE_ZEROES, 8192, 4096, flags=nbd.FLAG_FUA)
        assert not other.ask(zeroes)
        for each in (other, one):  # whichever wrote
            assert each.flush() == nbd.EIO and not each.flush()
        new = Client(path)
        assert not new.flush()
        for each in (one, other, new):
            each.close()
        status, said = end(server)
        assert "has not heard of it" not in said and status == 128 + signal.SIGTERM


def test_a_client_whose_connection_breaks(lose: Lose, tmp_path: Path) -> None:
    """It asks for a flush, is gone before the answer, and repeats the flush, as qemu does."""
    path = tmp_path / "socket"
    with nbd_server(path, url_of(lose)) as server:
        one = Client(path)
        lose(one)
        one.sock.sendall(request(nbd.FLUSH))
        one.close()
        assert server.stdout is not None
        while "writes since the last flush were lost" not in server.stdout.readline():
            pass
        again = Client(path)
        assert again.flush() == nbd.EIO and not again.flush()
        again.close()
        status, said = end(server)
        assert "has not heard of it" not in said and status == 128 + signal.SIGTERM


def test_a_loss_that_no_client_has_heard_of(lose: Lose, tmp_path: Path) -> None:
    """The end of the server tells."""
    path = tmp_path / "socket"
    with nbd_server(path, url_of(lose)) as server:
        one = Client(path)
        lose(one)
        one.close()
        status, said = end(server)
    assert status == 1 and "lun0: data is lost, and a client has not heard of it" in said


# -- files ----------------------------------------------------------------------------------------


def fails(file: int) -> bool:
    """fsync fails."""
    try:
        os.fsync(file)
    except OSError as error:
        assert error.errno == errno.EIO
        return True
    return False


def test_open_files(start_target: StartTarget, tmp_path: Path) -> None:
    need_fuse()
    running = start_target(SPEC)
    options = ("direct_io", "journal=off")
    with ExitStack() as stack:
        mounted = stack.enter_context(running_mount([running.url], tmp_path / "luns", *options))
        path = mounted / "lun0"

        def opened() -> int:
            file = os.open(path, os.O_RDWR)
            stack.callback(os.close, file)
            return file

        one, other, copy = opened(), opened(), os.open(path, os.O_RDWR)
        os.write(copy, b"w" * 4096)
        running.kill()
        start_target(SPEC, listen=running.listen)
        assert os.pread(one, 4, 0) == bytes(4)
        os.close(copy)  # as cp does: it says nothing
        assert fails(other) and not fails(other)
        assert fails(one) and not fails(one)
        later = opened()
        assert fails(later) and not fails(later)
        assert not fails(opened())


# -- disk objects ---------------------------------------------------------------------------------


@pytest.mark.logs(logs.LOST_WRITES, logs.RECONNECTED)
@pytest.mark.parametrize("face", FACES)
async def test_a_disk_object(start_target: StartTarget, face: str) -> None:
    running = start_target(SPEC)
    async with one_disk(face, f"{running.url}/0", {"journal": "off"}) as disk:
        await write_all(disk, b"w" * 4096, 0)
        running.kill()
        start_target(SPEC, listen=running.listen)
        assert await read(disk, 0, 4) == bytes(4)
        await write_all(disk, b"x" * 4096, 8192, fua=True)
        await disk.trim(0, 4096, True)
        with pytest.raises(WritesLost, match="writes since the last flush were lost"):
            await disk.flush()
        await disk.flush()


@pytest.mark.logs(logs.LOST_WRITES, logs.RECONNECTED)
def test_a_flush_that_its_asyncio_task_does_not_wait_for(start_target: StartTarget) -> None:
    running = start_target(SPEC)

    async def run() -> None:
        async with iserblk.asyncio.open_disks([f"{running.url}/0"], {"journal": "off"}) as disks:
            disk = disks.disks[disks.default]
            await disk.write(memoryview(b"w" * 4096), 0)
            running.kill()
            start_target(SPEC, listen=running.listen)
            await disk.read_into(memoryview(bytearray(512)), 0)
            for _ in range(3):
                task = asyncio.create_task(disk.flush())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert disk.dirty
            with pytest.raises(WritesLost):
                await disk.flush()
            assert not disk.dirty
            await disk.flush()

    asyncio.run(run())


# -- servers of one device that follow each other -------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    home = tmp_path / "nbd0"
    home.mkdir(mode=0o700)
    return home / "socket"


def server(path: Path, lose: Lose, how: str = LISTEN) -> subprocess.Popen[bytes]:
    process, said = started(path, f"uri={url_of(lose)}", "metrics=off", "journal=off", how=how)
    assert said == READY, error_of(said)
    return process


def test_a_loss_is_handed_over_also_the_second_time(lose: Lose, path: Path) -> None:
    old = server(path, lose)
    client = Client(path)
    lose(client)
    for _ in range(2):
        fresh = server(path, lose, TAKE)
        assert ended(old)[0] == 0
        old = fresh
    assert client.flush() == nbd.EIO and not client.flush()
    last = server(path, lose, TAKE)
    assert ended(old)[0] == 0
    assert not client.flush()
    client.close()
    assert ended(last)[0] == 0
    assert [*path.parent.iterdir()] == []


@pytest.mark.parametrize("killed", [False, True])
def test_a_server_that_ends_owing(lose: Lose, path: Path, killed: bool) -> None:
    """Its successor begins so, whatever ended it, and leaves it to the next one if it is killed."""
    old = server(path, lose)
    client = Client(path)
    lose(client)
    if killed:
        old.kill()
    client.close()
    assert ended(old)[0] == (-signal.SIGKILL if killed else 1)
    between = server(path, lose)
    between.kill()
    ended(between)
    last = server(path, lose)
    client = Client(path)
    assert client.flush() == nbd.EIO and not client.flush()
    client.close()
    assert ended(last)[0] == 0


def test_a_last_flush_that_fails(start_target: StartTarget, path: Path) -> None:
    """The target is away: whether something is lost is not known."""
    target = start_target(SPEC)
    words = (f"uri={target.url}/0?io-timeout=1", "metrics=off")
    old, said = started(path, *words)
    assert said == READY
    client = Client(path)
    assert not client.write()
    target.kill()
    client.close()
    assert ended(old)[0] == 1
    start_target(SPEC, listen=target.listen)
    fresh, said = started(path, *words)
    assert said == READY
    client = Client(path)
    assert client.flush() == nbd.EIO and not client.flush()
    client.close()
    assert ended(fresh)[0] == 0


def test_a_successor_that_takes_nothing(lose: Lose, path: Path) -> None:
    """The old server owes still."""
    old = server(path, lose)
    client = Client(path)
    lose(client)
    client.sock.sendall(write(b"x" * 200_000)[:1000])  # a request that does not end
    other, said = started(path, f"uri={url_of(lose)}", "metrics=off", how=TAKE)
    assert isinstance(error_of(said), NoHandOver)
    ended(other)
    client.sock.sendall(bytes(200_000 + nbd.REQUEST.size - 1000))
    client.sock.recv(nbd.SIMPLE_REPLY.size, socket.MSG_WAITALL)
    until_blocking((path.parent / "owed").exists)
    assert client.flush() == nbd.EIO and not client.flush()
    assert not (path.parent / "owed").exists()
    client.close()
    assert ended(old)[0] == 0
