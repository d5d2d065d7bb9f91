"""NBD clients that read and write at random places, at a gentle pace, until they are ended.

    python -m screenshotlib.load SOCKET READS WRITES BLOCK

READS and WRITES: in a second, about. Replies are simple ones.
"""

from __future__ import annotations

import math
import random
import socket
import struct
import sys
import time

from iserblk.nbd import messages as nbd

_FLUSH_EVERY = 64  # writes
_WAVE_S = 45.0  # the load comes and goes


def connect(path: str) -> tuple[socket.socket, int]:
    """A connection to the default export, and its size."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    _exactly(sock, 18)
    flags = nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES
    sock.sendall(struct.pack(">I", flags) + nbd.OPTION.pack(nbd.OPTION_MAGIC, 1, 0))
    size, _ = struct.unpack(">QH", _exactly(sock, 10))
    return sock, size


def _exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = sock.recv(length - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def call(sock: socket.socket, command: int, offset: int, length: int, data: bytes = b"") -> None:
    sock.sendall(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, command, 1, offset, length) + data)
    _, error, _ = struct.unpack(">IIQ", _exactly(sock, 16))
    if command == nbd.READ and not error:
        _exactly(sock, length)


def main() -> None:
    path, *numbers = sys.argv[1:]
    reads, writes, block = map(int, numbers)
    sock, size = connect(path)
    chosen = random.Random(path)  # the same places in every run
    done = 0
    while True:
        wave = 0.6 + 0.4 * math.sin(time.monotonic() * 2 * math.pi / _WAVE_S)
        offset = chosen.randrange(size // block) * block
        if chosen.random() * (reads + writes) < reads:
            call(sock, nbd.READ, offset, block)
        else:
            call(sock, nbd.WRITE, offset, block, bytes(block))
            done += 1
            if done % _FLUSH_EVERY == 0:
                call(sock, nbd.FLUSH, 0, 0)
        time.sleep(1 / ((reads + writes) * wave))


if __name__ == "__main__":
    main()
