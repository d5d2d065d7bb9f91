"""The byte stream of Traditional iSCSI on a connected TCP socket. Non-blocking, without trio."""

from __future__ import annotations

import contextlib
import os
import socket

from iserblk.errors import ConnectionLost
from iserblk.sockets.wire import NO_LINGER, wire


class SocketStream:
    """Implements ``datamover.tcp_stream.ByteStream``. Owns the socket from construction on."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._wire = wire(sock, end_of_record=False)
        self._closed = False
        self._names = _names(sock)

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        try:
            return self._wire.send(buffers, size)
        except OSError as error:
            raise _lost(error) from None

    def receive(self, buffers: list[memoryview]) -> int:
        if self._closed:
            raise ConnectionLost("the connection is closed")
        try:
            return self._wire.receive(buffers)
        except OSError as error:
            raise _lost(error) from None

    def fileno(self) -> int:
        return self._sock.fileno()

    def disconnect(self, discard: bool = False) -> None:
        """See ByteStream. Takes no lock and does not wait."""
        if not self._closed:
            with contextlib.suppress(OSError):  # the connection has ended already
                if discard:
                    self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> socket.socket:
        """Give the socket away, which the caller closes; the stream counts as closed."""
        self._closed = True
        return self._sock

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sock.close()

    def describe(self) -> dict[str, object]:
        return {"provider": "tcp", **self._names}


def _lost(error: OSError) -> ConnectionLost:
    words = os.strerror(error.errno) if error.errno else str(error)
    return ConnectionLost(f"connection lost: {words}")


def _names(sock: socket.socket) -> dict[str, object]:
    names: dict[str, object] = {}
    for key, ask in (("local", sock.getsockname), ("peer", sock.getpeername)):
        try:
            name = ask()
        except OSError:
            continue
        if isinstance(name, tuple):
            host, port = name[:2]
            names[key] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return names
