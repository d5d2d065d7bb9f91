"""Asks a process for its metrics. The process that answers is not trusted."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from iserblk.errors import (
    BadArgument,
    ConnectFailed,
    ConnectTimeout,
    PermissionDenied,
    RemoteProtocolError,
)
from iserblk.loop.clock import monotonic
from iserblk.metrics.address import Address, words
from iserblk.metrics.exposition import parse_untrusted
from iserblk.metrics.reading import ProcessReading

TIMEOUT_S = 10.0  # for the whole scrape
ANSWER_BYTES = 64 << 20
REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"
# With the sessions of targets. An older server does not look at the query.
WITH_SESSIONS = b"GET /metrics?sessions HTTP/1.0\r\n\r\n"


def scrape(
    address: Address, *, sessions: bool = False, owner: int | None = None, timeout_s: float = 0.0
) -> ProcessReading:
    """Read the metrics at ``address``; blocks. ``sessions``: with those of targets. ``owner``: the
    user to whom a Unix socket must belong, which is no link then. ``timeout_s``: 0: TIMEOUT_S.

    Raises BadArgument (no such socket), ConnectFailed (no process serves there), ConnectTimeout,
    PermissionDenied, RemoteProtocolError (the answer is no metrics of iserblk)."""
    name = words(address)
    timeout_s = timeout_s or TIMEOUT_S
    try:
        answer = _ask(address, WITH_SESSIONS if sessions else REQUEST, owner, timeout_s)
    except FileNotFoundError:
        raise BadArgument(
            f"{name}: no such socket; `iserblk stats` lists the processes that serve metrics, and "
            f"the option metrics={name} makes a command serve there"
        ) from None
    except TimeoutError:
        raise ConnectTimeout(f"{name}: no answer within {timeout_s:g} s") from None
    except PermissionError:
        raise PermissionDenied(
            f"{name}: the socket belongs to another user; run this as that user, or as root"
        ) from None
    except OSError as error:
        raise ConnectFailed(
            f"{name}: no process serves metrics there ({error.strerror or error}); "
            "`iserblk status` says what was killed, and which command removes what is left"
        ) from None
    try:
        return parse_untrusted(body_untrusted(answer).decode(errors="replace"))
    except RemoteProtocolError as error:
        text = str(error).removeprefix("HTTP: ")
        raise RemoteProtocolError("HTTP", f"{name}: {text}") from None


def body_untrusted(answer: bytes) -> bytes:
    """The document in an answer that its sender has ended. Raises RemoteProtocolError: it is no
    answer with a document, or not the whole of one."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    status = first.split(b" ")
    if not blank or not status[0].startswith(b"HTTP/1.") or status[1:2] != [b"200"]:
        raise RemoteProtocolError("HTTP", "the process that answers there serves no metrics")
    for field in fields:
        name, _, value = field.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip() != b"%d" % len(body):
            raise RemoteProtocolError("HTTP", "the answer is not whole")
    return body


def _ask(address: Address, request: bytes, owner: int | None, timeout_s: float) -> bytes:
    end = monotonic() + timeout_s
    parts = []
    size = 0
    with _connected(address, owner, timeout_s) as sock:
        sock.sendall(request)
        while more := sock.recv(1 << 16):
            parts.append(more)
            size += len(more)
            if size > ANSWER_BYTES:
                raise RemoteProtocolError("HTTP", f"{words(address)}: the answer is too long")
            if (left := end - monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
    return b"".join(parts)


def _connected(address: Address, owner: int | None, timeout_s: float) -> socket.socket:
    if not isinstance(address, Path):
        return socket.create_connection(address, timeout=timeout_s)
    if owner is None:
        return _connect(str(address), timeout_s)
    # Between a look at the path and a connection to it another file could take its place: the file
    # that is looked at is kept open.
    fd = os.open(address, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != owner:
            raise RemoteProtocolError("HTTP", "this is not a socket of its owner")
        return _connect(f"/proc/self/fd/{fd}", timeout_s)
    finally:
        os.close(fd)


def _connect(path: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
