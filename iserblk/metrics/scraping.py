"""Asking a process for its metrics. The process that answers is not trusted."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from iserblk.errors import (
    BadArgument,
    ConnectFailed,
    ConnectTimeout,
    PermissionDenied,
    RemoteProtocolError,
)
from iserblk.metrics.address import Address, words
from iserblk.metrics.exposition import parse_untrusted
from iserblk.metrics.reading import ProcessReading

TIMEOUT_S = 10.0  # in all
ANSWER_BYTES = 64 << 20
_REQUEST = b"GET /metrics HTTP/1.0\r\n\r\n"


def scrape(address: Address) -> ProcessReading:
    """Raises BadArgument (no such socket), ConnectFailed (nobody serves there), ConnectTimeout,
    PermissionDenied, RemoteProtocolError (it answers something else)."""
    name = words(address)
    try:
        answer = _ask(address)
    except FileNotFoundError:
        raise BadArgument(
            f"{name}: no such socket; `iserblk stats` lists what runs, and metrics={name} makes "
            "a command serve there"
        ) from None
    except TimeoutError:
        raise ConnectTimeout(f"{name}: no answer within {TIMEOUT_S:g} s") from None
    except PermissionError:
        raise PermissionDenied(
            f"{name}: the socket is another user's; run this as that user, or as root"
        ) from None
    except OSError as error:
        raise ConnectFailed(
            f"{name}: nobody serves metrics there ({error.strerror or error}); "
            "`iserblk stats` lists what runs"
        ) from None
    head, blank, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].split(b" ")
    if not blank or not status[0].startswith(b"HTTP/1.") or status[1:2] != [b"200"]:
        raise RemoteProtocolError("HTTP", f"{name}: what answers there serves no metrics")
    try:
        return parse_untrusted(body.decode(errors="replace"))
    except RemoteProtocolError as error:
        raise RemoteProtocolError("HTTP", f"{name}: {error}") from None


def _ask(address: Address) -> bytes:
    end = time.monotonic() + TIMEOUT_S
    parts = []
    size = 0
    with _connected(address) as sock:
        sock.sendall(_REQUEST)
        while more := sock.recv(1 << 16):
            parts.append(more)
            size += len(more)
            if size > ANSWER_BYTES:
                raise RemoteProtocolError("HTTP", f"{words(address)}: an answer without an end")
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError
            sock.settimeout(left)
    return b"".join(parts)


def _connected(address: Address) -> socket.socket:
    if not isinstance(address, Path):
        return socket.create_connection(address, timeout=TIMEOUT_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(TIMEOUT_S)
        sock.connect(str(address))
    except BaseException:
        sock.close()
        raise
    return sock
