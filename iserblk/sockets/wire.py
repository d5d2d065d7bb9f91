"""System calls on a non-blocking stream socket: send and receive lists of buffers.

Two forms with one behaviour. ``socket``'s methods give up the GIL around each call; where other
threads wait for it, that costs a switch there and back, which at 4 KiB per request is more than the
call itself. ``_syscalls``, compiled by scripts/setup, keeps it for calls that move little. Without
it everything works, more slowly (docs/benchmarking.md has the ratio).
"""

from __future__ import annotations

import socket
import struct
from typing import Protocol

WOULD_BLOCK = -1
# SO_LINGER: a close resets the connection, and what was not acknowledged is not sent again.
NO_LINGER = struct.pack("ii", 1, 0)
SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class Wire(Protocol):
    """One socket. Raises OSError as the system calls do, but for what means "not now".

    ``end_of_record``: TCP does not put a later send into the same segment."""

    end_of_record: bool

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        """Send the ``buffers``, ``size`` bytes in all; returns how many of these left, or
        WOULD_BLOCK. At most IOV_MAX (1024) buffers."""
        ...

    def receive(self, buffers: list[memoryview]) -> int:
        """Fill one or two writable buffers in order; returns the bytes, 0 at the end of the
        stream, or WOULD_BLOCK."""
        ...


class SocketWire:
    """Implements Wire with ``socket``'s own methods."""

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
    """The quickest form that there is for ``sock``, which stays the caller's to close."""
    try:
        from iserblk.sockets._syscalls import SyscallWire  # noqa: PLC0415 (may be missing)
    except ImportError:
        return SocketWire(sock, end_of_record)
    made: Wire = SyscallWire(sock.fileno(), end_of_record)
    return made
