"""What two servers of one device talk over: packets, with sockets beside them.

Between processes that is a Unix socket that keeps packets apart (SOCK_SEQPACKET), and descriptors
in ancillary data (SCM_RIGHTS). In a simulated world both servers are in one process.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Protocol

import trio

from iserblk.errors import RemoteProtocolError
from iserblk.loop.tasks import until_readable
from iserblk.nbd.kernel.handover import MOST

_DESCRIPTORS = 4  # room for more than a message may have: the rest would be lost without a word
_PEER = struct.Struct("3i")  # struct ucred: process, user, group


class Channel(Protocol):
    """One end. A packet that was sent is there for the other end, also if its sender dies. Each
    method raises OSError, as a socket does."""

    async def receive(self) -> bytes:
        """The next packet; empty when the other end is gone. What comes beside it is dropped."""
        ...

    async def receive_with_sockets(self) -> tuple[bytes, list[socket.socket]]:
        """The next packet, and what has come beside it, which is the caller's to close. Raises
        RemoteProtocolError for more than there is room for; all that has come is closed then."""
        ...

    async def until_received(self) -> None:
        """Return when there is a packet, or the other end is gone."""
        ...

    def receive_at_once(self) -> bytes:
        """The packet that is there; empty when the other end is gone. Raises BlockingIOError when
        there is none."""
        ...

    def receive_last(self) -> bytes:
        """The packet that is there; nothing can come any more: what the other end sends from now
        on fails there. Raises BlockingIOError when there is none."""
        ...

    async def send(self, packet: bytes, sock: socket.socket | None = None) -> None:
        """Wait until there is room. The other end gets a socket of its own for ``sock``."""
        ...

    def send_at_once(self, packet: bytes) -> None:
        """Raises BlockingIOError where there is no room."""
        ...

    def close(self) -> None:
        """Also outside of trio: no task waits any more."""
        ...


class PacketSocket:
    """Implements Channel. ``sock``: connected, of SOCK_SEQPACKET; it belongs to this object."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._peer = trio.socket.from_stdlib_socket(sock)

    async def receive(self) -> bytes:
        return await self._peer.recv(MOST + 1)

    async def receive_with_sockets(self) -> tuple[bytes, list[socket.socket]]:
        await until_readable(self._sock)
        packet, descriptors, flags, _ = socket.recv_fds(
            self._sock, MOST + 1, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        sockets: list[socket.socket] = []
        try:
            if flags & socket.MSG_CTRUNC:
                raise RemoteProtocolError("hand-over", "more descriptors than belong to a message")
            while descriptors:
                sockets.append(socket.socket(fileno=descriptors[0]))
                del descriptors[0]
        except BaseException:
            for each in sockets:
                each.close()
            for number in descriptors:
                os.close(number)
            raise
        return packet, sockets

    async def until_received(self) -> None:
        await until_readable(self._sock)

    def receive_at_once(self) -> bytes:
        return self._sock.recv(MOST + 1, socket.MSG_DONTWAIT)

    def receive_last(self) -> bytes:
        self._sock.shutdown(socket.SHUT_RD)
        return self.receive_at_once()

    async def send(self, packet: bytes, sock: socket.socket | None = None) -> None:
        rights = struct.pack("i", sock.fileno()) if sock else b""
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if sock else []
        await self._peer.sendmsg([packet], beside)

    def send_at_once(self, packet: bytes) -> None:
        self._sock.send(packet, socket.MSG_DONTWAIT)

    def close(self) -> None:
        self._sock.close()


def connected(path: Path) -> PacketSocket:
    """A channel to the server that listens at ``path``. Raises OSError, and RemoteProtocolError for
    a server of another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(str(path))
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return PacketSocket(sock)


def check_peer(sock: socket.socket) -> None:
    """The other end belongs to our user. Raises RemoteProtocolError."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, user, _ = _PEER.unpack(credentials)
    if user != os.geteuid():
        raise RemoteProtocolError("hand-over", f"the other process is of user {user}")
