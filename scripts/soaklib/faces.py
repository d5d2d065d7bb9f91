"""How the clients of a soak get at their LUN: NBD, a file of the mount, the Python API."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

from iserblk.disk.seam import AsyncDisk, BlockingDisk
from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.kernel.links import shake_hands
from soaklib.work import DURABLE, FLUSH, READ, Step

_AGAIN_S = 0.1


class Face(Protocol):
    """Raises OSError, IserblkError."""

    @property
    def size(self) -> int: ...

    def do(self, step: Step) -> bytes:
        """What was read, if anything."""

    def close(self) -> None: ...


class Failed(IserblkError):
    """The server answered with an error."""


class Gone(IserblkError):
    """The server has ended the connection, or is about to."""


class NbdFace:
    """Several connections to one export: a request goes through any of them, so a flush has to
    cover what was written through the others. A server that ends has a successor at the same
    place, to which what was not answered is sent again, for ``patience_s``."""

    def __init__(self, path: Path, connections: int, patience_s: float) -> None:
        self._links = [_Link(path, patience_s) for _ in range(connections)]
        self._chance = random.Random(connections)

    @property
    def size(self) -> int:
        return max(link.size for link in self._links)

    def do(self, step: Step) -> bytes:
        return self._chance.choice(self._links).do(step)

    def close(self) -> None:
        for link in self._links:
            link.close()


class _Link:
    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._cookie = 0
        self._sock: socket.socket | None = None
        self.size = 0
        with self._lock:
            self._connect()

    def _connect(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(self._patience_s)
                sock.connect(str(self._path))
                self.size, _ = shake_hands(sock)
            except BaseException:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def do(self, step: Step) -> bytes:
        until = time.monotonic() + self._patience_s
        with self._lock:
            while True:
                try:
                    return self._ask(self._connect(), step)
                except (Gone, ConnectionError, FileNotFoundError, RemoteProtocolError):
                    if time.monotonic() > until:
                        raise
                self.close()
                time.sleep(_AGAIN_S)

    def _ask(self, sock: socket.socket, step: Step) -> bytes:
        self._cookie += 1
        kind = {READ: nbd.READ, FLUSH: nbd.FLUSH}.get(step.kind, nbd.WRITE)
        flags = nbd.FLAG_FUA if step.kind == DURABLE else 0
        length = step.length or len(step.data)
        header = (nbd.REQUEST_MAGIC, flags, kind, self._cookie, step.offset, length)
        sock.sendall(nbd.REQUEST.pack(*header) + step.data)
        magic, error, cookie = nbd.SIMPLE_REPLY.unpack(_receive(sock, nbd.SIMPLE_REPLY.size))
        if (magic, cookie) != (nbd.SIMPLE_REPLY_MAGIC, self._cookie):
            raise Failed(f"NBD: no reply to request {self._cookie}: {magic:#x}, {cookie}")
        if error == nbd.ESHUTDOWN:
            raise Gone("NBD: the server is about to end")
        if error:
            raise Failed(f"NBD: {os.strerror(error)}")
        return _receive(sock, step.length)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise Gone("NBD: the server has ended the connection")
        view = view[got:]
    return bytes(data)


class FileFace:
    """A file of the mount."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def do(self, step: Step) -> bytes:
        if step.kind == READ:
            return os.pread(self._fd, step.length, step.offset)
        if step.data:
            count = os.pwrite(self._fd, step.data, step.offset)
            if count != len(step.data):
                raise OSError(0, f"{count} bytes of {len(step.data)} were written")
        if step.kind in (FLUSH, DURABLE):
            os.fsync(self._fd)
        return b""

    def close(self) -> None:
        os.close(self._fd)


class BlockingFace:
    """The disk belongs to its caller."""

    def __init__(self, disk: BlockingDisk) -> None:
        self._disk = disk

    @property
    def size(self) -> int:
        return self._disk.size

    def do(self, step: Step) -> bytes:
        if step.kind == FLUSH:
            self._disk.flush()
        elif step.kind == READ:
            data = bytearray(step.length)
            self._disk.read_into(memoryview(data), step.offset)
            return bytes(data)
        else:
            self._disk.write(memoryview(step.data), step.offset, step.kind == DURABLE)
        return b""

    def close(self) -> None:
        pass


async def do_async(disk: AsyncDisk, step: Step) -> bytes:
    if step.kind == FLUSH:
        await disk.flush()
    elif step.kind == READ:
        data = bytearray(step.length)
        await disk.read_into(memoryview(data), step.offset)
        return bytes(data)
    else:
        await disk.write(memoryview(step.data), step.offset, step.kind == DURABLE)
    return b""
