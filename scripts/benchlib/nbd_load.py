"""An NBD client that reads at random places, over one or many connections.

    python nbd_load.py SOCKET SECONDS BLOCK IN_FLIGHT EXPORT…

Opens a connection for each EXPORT that is named (one may be named several times) and keeps
IN_FLIGHT requests open, counted over all of them, each of BLOCK bytes. fio cannot do that: each of
its connections has a depth of its own. Each answer makes room for one request, which goes to the
next connection in turn.
Prints the requests that were answered, and the seconds, as JSON. Exit status 1: a read failed.

Replies are simple ones (not structured), as those of the kernel's client.
"""

from __future__ import annotations

import itertools
import json
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

BLOCK = 4096
_BUFFER = 256 << 10  # bytes, at least; twice as long as a reply

_GREETING = struct.Struct(">8s8sH")  # NBDMAGIC, IHAVEOPT, flags
_FLAGS_AND_OPTION = struct.Struct(">I8sII")  # the client's flags; IHAVEOPT, option, length
_FIXED_NEWSTYLE_NO_ZEROES = 3
_EXPORT_NAME = 1
_EXPORT = struct.Struct(">QH")  # size, flags
_REQUEST = struct.Struct(">IHHQQI")  # magic, flags, command, cookie, offset, length
_REQUEST_MAGIC = 0x25609513
_READ, _DISCONNECT = 0, 2
_REPLY = struct.Struct(">IIQ")  # magic, error, cookie
_REPLY_MAGIC = 0x67446698


class LoadFailed(Exception):
    """The server refused or ended something; the text says what."""


class Connection:
    """One connection to one export."""

    def __init__(self, sock: socket.socket, export: str, block: int = BLOCK) -> None:
        """Shakes hands over ``sock``, which the caller closes. ``block``: bytes of each read.
        Raises OSError, LoadFailed."""
        self._name = export
        self._sock = sock
        self._have = 0  # bytes of replies that are in the buffer
        self._block = block
        self._reply = _REPLY.size + block
        self._buffer = bytearray(max(_BUFFER, 2 * self._reply))
        self._view = memoryview(self._buffer)
        self._requests: list[bytes] = []
        _GREETING.unpack(self._receive(_GREETING.size))
        name = export.encode()
        self._sock.sendall(
            _FLAGS_AND_OPTION.pack(_FIXED_NEWSTYLE_NO_ZEROES, b"IHAVEOPT", _EXPORT_NAME, len(name))
            + name
        )
        size, _flags = _EXPORT.unpack(self._receive(_EXPORT.size))
        self._blocks = size // block

    def fileno(self) -> int:
        return self._sock.fileno()

    def _receive(self, length: int) -> bytes:
        data = self._sock.recv(length, socket.MSG_WAITALL)
        if len(data) < length:
            raise LoadFailed(f"{self._name}: the server does not serve it")
        return data

    def request(self) -> None:
        """A read of a random place; ``send`` sends it."""
        # Several times cheaper than randrange.
        offset = int(random.random() * self._blocks) * self._block
        self._requests.append(_REQUEST.pack(_REQUEST_MAGIC, 0, _READ, 0, offset, self._block))

    def send(self) -> None:
        # Not more than a few KiB at any time, which a socket always takes.
        self._sock.sendall(b"".join(self._requests))
        self._requests.clear()

    def answered(self) -> int:
        """Receive what is there; returns the number of requests that are answered by it. Raises
        LoadFailed."""
        count = self._sock.recv_into(self._view[self._have :])
        if not count:
            raise LoadFailed(f"{self._name}: the server closed the connection")
        end = self._have + count
        replies, rest = divmod(end, self._reply)
        # Also the header of a reply whose data is still to come: an error has no data.
        for at in range(0, end - _REPLY.size + 1, self._reply):
            magic, error, _cookie = _REPLY.unpack_from(self._buffer, at)
            if magic != _REPLY_MAGIC or error:
                raise LoadFailed(f"{self._name}: a read failed: magic {magic:#x}, error {error}")
        if replies:
            self._buffer[:rest] = self._view[end - rest : end].tobytes()
        self._have = rest
        return replies

    def disconnect(self) -> None:
        self._sock.sendall(_REQUEST.pack(_REQUEST_MAGIC, 0, _DISCONNECT, 0, 0, 0))


def run(
    path: str, seconds: float, block: int, in_flight: int, exports: Sequence[str]
) -> tuple[int, float]:
    """The answered requests, and the seconds that they took. Raises OSError, LoadFailed."""
    with ExitStack() as stack:
        connections = []
        for export in exports:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(path)
            connections.append(Connection(sock, export, block))
        counted = _keep_busy(connections, seconds, in_flight)
        for connection in connections:
            connection.disconnect()
    return counted


def _keep_busy(
    connections: Sequence[Connection], seconds: float, in_flight: int
) -> tuple[int, float]:
    by_fd = {each.fileno(): each for each in connections}
    turns = itertools.cycle(connections)
    unanswered = ios = 0
    with select.epoll() as ready:
        for fd in by_fd:
            ready.register(fd, select.EPOLLIN)
        started = time.monotonic()
        while (now := time.monotonic()) < started + seconds or unanswered:
            if now < started + seconds:
                chosen = list(itertools.islice(turns, in_flight - unanswered))
                for connection in chosen:
                    connection.request()
                for connection in dict.fromkeys(chosen):
                    connection.send()
                unanswered = in_flight
            for fd, _events in ready.poll():
                answered = by_fd[fd].answered()
                unanswered -= answered
                ios += answered
    return ios, now - started


def main() -> int:
    path, seconds, block, in_flight, *exports = sys.argv[1:]
    try:
        ios, took = run(path, float(seconds), int(block), int(in_flight), exports)
    except (OSError, LoadFailed) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"ios": ios, "seconds": took}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
