"""System calls on a non-blocking stream socket: send and receive lists of buffers.

There are two implementations with the same behaviour. The methods of Python's ``socket`` release
the GIL around each call. Where other threads wait for the GIL, that costs two switches of threads,
which at 4 KiB per request take longer than the call itself. ``_syscalls``, compiled by
scripts/setup, keeps the GIL for calls that move few bytes. Without it everything works, but more
slowly (docs/compiled.md has the ratio).
"""

from __future__ import annotations

import socket
import struct
from typing import Final, Protocol

WOULD_BLOCK: Final = -1
# SO_LINGER: close resets the connection, and unacknowledged bytes are not sent again.
NO_LINGER: Final = struct.pack("ii", 1, 0)
SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Wire(Protocol):
    """One socket. Raises OSError as the system calls do, except that EAGAIN and EINTR give
    WOULD_BLOCK.

    ``end_of_record``: TCP does not put bytes of a later send into the last segment of a send."""

    end_of_record: bool

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        """Send the ``buffers``, ``size`` bytes in all. Returns how many bytes left, or WOULD_BLOCK.
        At most IOV_MAX (1024) buffers."""
        ...

    def receive(self, buffers: list[memoryview]) -> int:
        """Fill one or two writable buffers in order. Returns the bytes received, 0 at the end of
        the stream, or WOULD_BLOCK."""
        ...


class SocketWire:
    """Implements Wire with the methods of ``socket``."""

    def __init__(self, sock: socket.socket, end_of_record: bool) -> None:
        self._sock = sock
        self.end_of_record = end_of_record

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        flags = SEND_FLAGS | socket.MSG_EOR if self.end_of_record else SEND_FLAGS
        try:
            if len(buffers) == 1:
                return self._sock.send(buffers[0], flags)
            return self._sock.sendmsg(buffers, (), flags)
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK

    def receive(self, buffers: list[memoryview]) -> int:
        try:
            if len(buffers) == 1:
                return self._sock.recv_into(buffers[0])
            return self._sock.recvmsg_into(buffers)[0]
        except (BlockingIOError, InterruptedError):
            return WOULD_BLOCK


def wire(sock: socket.socket, end_of_record: bool) -> Wire:
    """The faster implementation that is available, for ``sock``, which the caller keeps and
    closes. A class of its own, such as a simulated world has, need not have a descriptor."""
    if type(sock) is not socket.socket:
        return SocketWire(sock, end_of_record)
    try:
        from iserblk.sockets._syscalls import SyscallWire  # noqa: PLC0415 (may be missing)
    except ImportError:
        return SocketWire(sock, end_of_record)
    made: Wire = SyscallWire(sock.fileno(), end_of_record)
    return made
