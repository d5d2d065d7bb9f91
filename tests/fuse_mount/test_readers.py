"""Reading several requests in one turn of the loop, without missing a request or the end."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from fuse_mount.readers import Readers
from iserblk.loop.here import loop_here
from iserblk.loop.strands import elsewhere

WORKERS = 8


class Turns(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


class Session:
    """Reads as pyfuse3's session loop does: waits, reads one request, handles it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.readers = Readers()
        self.trio: Any = self.readers.namespace()
        self.lock = self.trio.Lock()  # type: ignore[attr-defined]
        self.read: list[bytes] = []
        self.ended = 0
        self.handling = trio.Event()
        self.handling.set()

    async def worker(self) -> None:
        while True:
            try:
                async with self.lock:
                    await self.trio.lowlevel.wait_readable(self.sock.fileno())
            except trio.ClosedResourceError:
                break
            message = self.sock.recv(100)  # BlockingIOError, were it not readable
            if not message:
                break
            self.read.append(message)
            if not self.handling.is_set():
                await elsewhere(self.handling.wait)
        self.ended += 1


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, kernel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, kernel:
        yield ours, kernel


def number(count: int) -> bytes:
    return b"%d" % count


async def test_every_request_is_read_once(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, kernel = sockets
    session = Session(ours)
    dice = random.Random(5)
    sent = 0
    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with session.trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(session.worker, name="worker")
                for _ in range(300):
                    for _ in range(dice.choice((0, 1, 1, 2, 5, 20))):
                        kernel.send(number(sent))
                        sent += 1
                    for _ in range(dice.choice((0, 1, 3))):
                        await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
                assert session.read == [number(n) for n in range(sent)]
                scope.cancel()


async def test_many_requests_in_few_turns(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, kernel = sockets
    session = Session(ours)
    turns = Turns()
    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with session.trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(session.worker, name="worker")
                await trio.testing.wait_all_tasks_blocked()
                trio.lowlevel.add_instrument(turns)
                for n in range(40):
                    kernel.send(number(n))
                await trio.testing.wait_all_tasks_blocked()
                trio.lowlevel.remove_instrument(turns)
                scope.cancel()
    assert len(session.read) == 40
    assert turns.count < 20


async def test_a_request_that_is_handled_for_long_holds_up_no_other(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, kernel = sockets
    session = Session(ours)
    session.handling = trio.Event()
    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with session.trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(session.worker, name="worker")
                for n in range(WORKERS):  # one after the other: each wakes the next worker
                    kernel.send(number(n))
                    await trio.testing.wait_all_tasks_blocked()
                    assert len(session.read) == n + 1
                kernel.send(b"waits")  # for a worker; the loop sleeps meanwhile
                await trio.testing.wait_all_tasks_blocked()
                assert len(session.read) == WORKERS
                session.handling.set()
                await trio.testing.wait_all_tasks_blocked()
                assert session.read[-1] == b"waits"
                kernel.send(b"last")
                await trio.testing.wait_all_tasks_blocked()
                assert session.read[-1] == b"last"
                scope.cancel()


@pytest.mark.parametrize("busy", [False, True])
async def test_all_workers_end_when_the_descriptor_is_at_its_end(
    sockets: tuple[socket.socket, socket.socket], busy: bool
) -> None:
    ours, kernel = sockets
    session = Session(ours)
    with trio.fail_after(30):
        with trio.CancelScope():
            async with session.trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(session.worker, name="worker")
                await trio.testing.wait_all_tasks_blocked()
                if busy:
                    for n in range(5):
                        kernel.send(number(n))
                kernel.close()
    assert session.ended == WORKERS
    assert len(session.read) == (5 if busy else 0)


async def test_all_workers_end_when_told(sockets: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = sockets
    session = Session(ours)
    with trio.fail_after(30):
        with trio.CancelScope():
            async with session.trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(session.worker, name="worker")
                await trio.testing.wait_all_tasks_blocked()
                session.trio.lowlevel.notify_closing(ours.fileno())
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(session.worker)  # a worker that starts later
    assert session.ended == WORKERS + 1


async def test_nothing_watches_the_descriptor_behind_the_end(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, _ = sockets
    session = Session(ours)
    with trio.CancelScope() as scope:
        async with session.trio.open_nursery() as nursery:
            nursery.start_soon(session.worker, name="worker")
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(FileExistsError):
                loop_here().watch(ours.fileno(), lambda: None)
            scope.cancel()
    loop_here().watch(ours.fileno(), lambda: None).close()


async def test_others_get_their_turn_while_requests_never_end(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    ours, kernel = sockets
    session = Session(ours)

    async def answer_at_once() -> None:
        while True:
            await session.trio.lowlevel.wait_readable(ours.fileno())
            kernel.send(ours.recv(100))  # the next request is there before this one is done

    with trio.fail_after(30):
        with trio.CancelScope() as scope:
            async with session.trio.open_nursery() as nursery:
                nursery.start_soon(answer_at_once)
                kernel.send(b"for ever")
                for _ in range(20):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
