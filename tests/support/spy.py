"""A relay between an initiator and a target that keeps what is said at the start: the login."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.listening import end_threads

_KEPT = 8192  # bytes of each direction of each connection
_RECEIVED = 1 << 16


class Spy:
    """``port``: where initiators connect. ``asked``, ``answered``: the first bytes that all
    initiators, and the target, have sent."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.asked = bytearray()
        self.answered = bytearray()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += (one, other)
                for ends in ((one, other, self.asked), (other, one, self.answered)):
                    thread = threading.Thread(target=self._relay, args=ends)
                    self._threads.append(thread)
                    thread.start()

    def _relay(self, source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        left = _KEPT
        with contextlib.suppress(OSError):
            while data := source.recv(_RECEIVED):
                kept += data[:left]
                left -= len(data[:left])
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait for the relaying threads. The initiators must have closed before."""
        end_threads(self._threads[:1], [self._listener])
        for thread in self._threads:
            thread.join(10)
        for ended in self._sockets:
            ended.close()


@contextmanager
def spying(target_port: int) -> Iterator[Spy]:
    spy = Spy(target_port)
    try:
        yield spy
    finally:
        spy.close()
