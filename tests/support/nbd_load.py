"""An NBD client that keeps many requests open, and checks each answer: for servers that change
under it."""

from __future__ import annotations

import itertools
import queue
import random
import socket
import threading
from pathlib import Path
from typing import NamedTuple

from iserblk.nbd import messages as nbd
from iserblk.nbd.kernel.links import shake_hands
from tests.support.target import END_S

SLOT = 512 << 10  # bytes of the disk that belong to one request
_LENGTHS = (512, 4096, 4096, 4096, 60_000, 70_000, SLOT)


class _Open(NamedTuple):
    slot: int
    command: int
    data: bytes  # written, or to be read


class Load:
    """``depth`` requests at once on one connection, in slots ``first`` to ``first + depth`` of the
    disk: each slot is written and read in turns, and now and then everything is flushed.

    Two threads, until ``stop``."""

    def __init__(self, path: Path, first: int, depth: int) -> None:
        self._answered = 0
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(END_S)
        self._sock.connect(str(path))
        shake_hands(self._sock)
        self._open: dict[int, _Open] = {}
        self._free: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        for slot in range(first, first + depth):
            self._free.put((slot, b""))
        self._depth = depth
        self._problems: list[Exception] = []
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._hear)]
        for thread in self._threads:
            thread.start()

    @property
    def answered(self) -> int:
        """How many requests so far. Raises AssertionError where one has failed."""
        assert not self._problems, self._problems
        return self._answered

    def _send(self) -> None:
        chance = random.Random(self._depth)
        try:
            for cookie in itertools.count():
                free = self._free.get()
                if free is None:
                    break
                slot, data = free
                if data:
                    self._ask(cookie, _Open(slot, nbd.READ, data), b"")
                elif chance.random() < 0.02:
                    self._ask(cookie, _Open(slot, nbd.FLUSH, b""), b"")
                else:
                    data = chance.randbytes(chance.choice(_LENGTHS))
                    self._ask(cookie, _Open(slot, nbd.WRITE, data), data)
            self._sock.sendall(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.DISC, 0, 0, 0))
        except Exception as error:
            self._problems.append(error)

    def _ask(self, cookie: int, each: _Open, data: bytes) -> None:
        self._open[cookie] = each
        offset = 0 if each.command == nbd.FLUSH else each.slot * SLOT
        header = (nbd.REQUEST_MAGIC, 0, each.command, cookie, offset, len(each.data))
        self._sock.sendall(nbd.REQUEST.pack(*header) + data)

    def _hear(self) -> None:
        try:
            with self._sock.makefile("rb") as stream:
                while header := stream.read(nbd.SIMPLE_REPLY.size):
                    magic, error, cookie = nbd.SIMPLE_REPLY.unpack(header)
                    assert (magic, error) == (nbd.SIMPLE_REPLY_MAGIC, 0)
                    each = self._open.pop(cookie)  # KeyError: answered twice
                    if each.command == nbd.READ:
                        assert stream.read(len(each.data)) == each.data
                    self._answered += 1
                    self._free.put((each.slot, each.data if each.command == nbd.WRITE else b""))
        except Exception as error:
            self._problems.append(error)

    def stop(self) -> None:
        """End in order: every request has been answered, once, and as it should be."""
        self._free.put(None)
        for thread in self._threads:
            thread.join()
        self._sock.close()
        assert not self._problems, self._problems
        assert not self._open
