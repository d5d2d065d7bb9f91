"""A portal of a target as clients see it: a port that leads to the target's, and can be cut."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_CHUNK = 256 << 10
_HOST = "127.0.0.1"


class Relay:
    """``port``: where clients connect; ``target``: the port that it leads to."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._cuts = 0
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server((_HOST, port), backlog=64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it was shut down
            while True:
                client, _ = listener.accept()
                threading.Thread(
                    target=self._connect, args=(client, self._cuts), daemon=True
                ).start()

    def _connect(self, client: socket.socket, cuts: int) -> None:
        with client:
            self._flows.wait()
            try:
                target = socket.create_connection((_HOST, self._target), 10)
            except OSError:
                return
            with target:
                for each in (client, target):
                    each.settimeout(None)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pair = (client, target)
                with self._lock:
                    if self._cuts != cuts:  # meanwhile
                        return
                    self._pairs.add(pair)
                back = threading.Thread(target=self._copy, args=(target, client), daemon=True)
                back.start()
                self._copy(client, target)
                back.join()
                with self._lock:
                    self._pairs.discard(pair)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        with suppress(OSError):
            while count := source.recv_into(buffer):
                self._flows.wait()  # what has come meanwhile goes nowhere, see ``go_on``
                sink.sendall(buffer[:count])
        _shut(source, sink)

    def cut(self) -> None:
        """End all connections."""
        with self._lock:
            self._cuts += 1
            pairs = [*self._pairs]
        for pair in pairs:
            _shut(*pair)

    def away(self) -> None:
        """End all connections, and refuse new ones until ``back``."""
        _shut(self._listener)
        self._listener.close()
        self.cut()

    def back(self) -> None:
        if self._listener.fileno() < 0:
            self._listener = self._listen(self.port)

    def stall(self) -> None:
        """Move nothing any more, until ``go_on``."""
        self._flows.clear()

    def go_on(self) -> None:
        """The connections that have stalled end, and nothing of them arrives late."""
        self.cut()
        self._flows.set()

    def close(self) -> None:
        self.away()
        self._flows.set()


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
