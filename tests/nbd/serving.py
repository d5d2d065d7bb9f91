"""Our NBD server in the test's own loop, over fake disks."""

from __future__ import annotations

import fcntl
import socket
import ssl
import termios
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from iserblk.commands.command import Command, PlainCommand, Waiter
from iserblk.disk.seam import Rest
from iserblk.loop.strands import elsewhere
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from iserblk.nbd.server import NbdServer
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info


class HeldDisk(AsyncFake):
    """A disk whose reads, writes and questions for the size wait for ``go``. ``waiting``: how many
    do; ``ended``: how many do not any more, whatever their end was."""

    def __init__(self, number: int = 0, **changes: object) -> None:
        super().__init__(FakeDisk(lun_info(number, **changes)))
        self.go = trio.Event()
        self.waiting = 0
        self.ended = 0
        self.hold_size = False

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            await elsewhere(self.go.wait)
        finally:
            self.waiting -= 1
            self.ended += 1

    async def refresh(self) -> int:
        if self.hold_size:
            await self._wait()
        return await super().refresh()

    async def read_into(self, buffer: memoryview, offset: int, rest: Rest | None = None) -> None:
        await self._wait()
        await super().read_into(buffer, offset)

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        await self._wait()
        await super().write(buffer, offset, fua)


class DirectFake(AsyncFake):
    """A disk that begins a command for each read and write. They end at ``end``, or are aborted."""

    def __init__(self, number: int = 0, **changes: object) -> None:
        super().__init__(FakeDisk(lun_info(number, **changes)))
        self.begun: list[Waiter] = []

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        self.fake.read_into(buffer, offset)
        return self._begin(waiter)

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        self.fake.write(buffer, offset)
        return self._begin(waiter)

    def _begin(self, waiter: Waiter) -> Command:
        waiter.pending = 1
        self.begun.append(waiter)
        return PlainCommand(len(self.begun))

    def end(self) -> None:
        """All commands have ended."""
        ended, self.begun = self.begun, []
        for waiter in ended:
            waiter.task_done()

    def end_read(self, slot: Command) -> Rest | None:
        return None

    def end_write(self, slot: Command) -> Rest | None:
        return None

    def abandon(self, mine: Callable[[Waiter], bool]) -> int:
        count = len(self.begun)
        self.end()
        return count


class Again(DirectFake):
    """Its commands are not enough: each request goes on, with what was ``LEFT`` of it. ``rests``:
    with what they have gone on."""

    LEFT = Rest(1, 2.5)

    def __init__(self) -> None:
        super().__init__()
        self.rests: list[Rest | None] = []

    def end_read(self, slot: Command) -> Rest | None:
        return self.LEFT

    def end_write(self, slot: Command) -> Rest | None:
        return self.LEFT

    async def read_into(self, buffer: memoryview, offset: int, rest: Rest | None = None) -> None:
        self.rests.append(rest)
        await super().read_into(buffer, offset)

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        self.rests.append(rest)
        await super().write(buffer, offset, fua)


def fake(number: int = 0, **changes: object) -> AsyncFake:
    return AsyncFake(FakeDisk(lun_info(number, **changes)))


def arrived(sock: socket.socket) -> int:
    """Bytes that have not been received."""
    count = array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


def server_of(*disks: AsyncFake, context: ssl.SSLContext | None = None) -> NbdServer:
    """With ``context`` clients have to use TLS."""
    exports = {disk.info.name: Export(disk.info.name, disk) for disk in disks}
    mode = Tls.REQUIRE if context else Tls.OFF
    return NbdServer(exports, disks[0].info.name, 0, mode, context)


@asynccontextmanager
async def serving(
    place: Path, *disks: AsyncFake, context: ssl.SSLContext | None = None
) -> AsyncIterator[Path]:
    """Yields the Unix socket's path."""
    async with at(place, server_of(*disks, context=context)) as path:
        yield path


@asynccontextmanager
async def at(place: Path, server: NbdServer) -> AsyncIterator[Path]:
    """As ``serving``."""
    path = place / "nbd"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(100)
        async with server.serving([listening]):
            yield path
    path.unlink()
