"""Connections to the server of a device, for the kernel: the client's side of NBD's handshake.

The kernel knows only the transmission, with simple replies. Nothing else is negotiated.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.nbd import messages as nbd

_ANSWER_S = 30.0  # the server may ask the target for the size
# Bytes from the kernel that wait in the socket, which counts each page twice. By default a tenth of
# a write of 1 MiB fits in, and the server is woken for each tenth. With this, and requests of
# ``client.LARGEST``, a server takes 40 % of the processor time for such writes.
_SEND_BYTES = 1 << 20
SO_SNDBUFFORCE = 32  # asm-generic/socket.h; without the limit net.core.wmem_max
_NO_NAME = bytes(4)  # length of the name of the default export
_NO_WISHES = bytes(2)
_MOST_REPLY = 1 << 16
_MOST_ERROR = 0x7FFF_FFFF  # of strerror's; a server may say any number of 32 bits
_UNIX_SOCKETS = Path("/proc/net/unix")


@dataclass(slots=True, frozen=True)
class Link:
    """A connection after its handshake. ``size``: of the export, in bytes. ``flags``: its
    transmission flags."""

    sock: socket.socket
    size: int
    flags: int

    @property
    def inode(self) -> int:
        """The number of the socket in this machine, by which ``kept`` finds it."""
        return os.fstat(self.sock.fileno()).st_ino


@contextlib.contextmanager
def open_links(path: Path, count: int) -> Iterator[list[Link]]:
    """Connect ``count`` times to the default export of the server at ``path``. This process's
    descriptors are closed at the end of the block. Raises IserblkError."""
    links: list[Link] = []
    try:
        try:
            while len(links) < count:
                links.append(_open(path))
        except OSError as error:
            raise IserblkError(f"{path}: {error.strerror or error}") from None
        yield links
    finally:
        for link in links:
            link.sock.close()


def kept(inodes: set[int]) -> set[int]:
    """Those of the sockets that are still open: by another process, or by the kernel."""
    lines = _UNIX_SOCKETS.read_text().splitlines()[1:]
    return inodes & {int(line.split()[6]) for line in lines}


def flush(path: Path, within_s: float) -> str:
    """Have the server at ``path`` flush, by a connection for that alone. Returns why it has not, or
    "". Each answer may take ``within_s``."""
    try:
        link = _open(path, within_s)
        with link.sock as sock:
            if not link.flags & nbd.SEND_FLUSH:
                return ""
            sock.settimeout(within_s)
            sock.sendall(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.FLUSH, 0, 0, 0))
            magic, error, _ = nbd.SIMPLE_REPLY.unpack(_receive(sock, nbd.SIMPLE_REPLY.size))
            if magic != nbd.SIMPLE_REPLY_MAGIC:
                raise RemoteProtocolError("NBD", "no answer to the flush")
            return os.strerror(min(error, _MOST_ERROR)) if error else ""
    except OSError as error:
        return error.strerror or str(error)
    except RemoteProtocolError as error:
        return str(error)


def _open(path: Path, answer_s: float = _ANSWER_S) -> Link:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(answer_s)
        with contextlib.suppress(PermissionError):  # then the buffer is of the usual size
            sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, _SEND_BYTES)
        sock.connect(str(path))
        size, flags = shake_hands(sock)
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return Link(sock, size, flags)


def shake_hands(sock: socket.socket) -> tuple[int, int]:
    """Make the handshake on a connected socket. Returns size and transmission flags of the default
    export. Raises OSError, RemoteProtocolError."""
    magic, options, flags = nbd.GREETING.unpack(_receive(sock, nbd.GREETING.size))
    if magic != nbd.MAGIC or options != nbd.OPTION_MAGIC or not flags & nbd.FIXED_NEWSTYLE:
        raise RemoteProtocolError("NBD", "the server does not speak fixed newstyle")
    sock.sendall(nbd.CLIENT_FLAGS.pack(flags & (nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)))
    data = _NO_NAME + _NO_WISHES
    sock.sendall(nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.Option.GO, len(data)) + data)
    found: tuple[int, int] | None = None
    while True:
        header = _receive(sock, nbd.OPTION_REPLY.size)
        magic, option, kind, length = nbd.OPTION_REPLY.unpack(header)
        if magic != nbd.OPTION_REPLY_MAGIC or option != nbd.Option.GO or length > _MOST_REPLY:
            raise RemoteProtocolError("NBD", "no answer to the option GO")
        told = _receive(sock, length)
        if kind == nbd.REP_ACK and found is not None:
            return found
        if kind == nbd.REP_INFO and told[:2] == nbd.INFO.pack(nbd.INFO_EXPORT):
            if len(told) != nbd.INFO_EXPORT_DATA.size:
                raise RemoteProtocolError("NBD", "INFO_EXPORT of a wrong length")
            _, size, transmission = nbd.INFO_EXPORT_DATA.unpack(told)
            found = size, transmission
        elif kind != nbd.REP_INFO:
            words = told.decode(errors="replace") or f"reply {kind:#x}"
            raise RemoteProtocolError("NBD", f"the server refuses the default export: {words}")


def _receive(sock: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = sock.recv(count - len(found))
        if not data:
            raise RemoteProtocolError("NBD", "the server has ended the connection")
        found += data
    return found
