"""An answerer of HTTP/1.0 for one document: the metrics of some LUNs, to all who can connect.

What clients send is looked at just enough to see what they ask for: bounded in bytes, in time, and
in how many at once.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

import trio

from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.metrics.address import Address, make_room, words
from iserblk.metrics.reading import ProcessReading

log = logging.getLogger(__name__)

Look = Callable[[], ProcessReading]

REQUEST_BYTES = 8192
REQUEST_S = 5.0  # until the whole request is there
ANSWER_S = 10.0  # until it has taken the answer
CLIENTS = 8  # at once; the others wait in the kernel
_BACKLOG = 32
_PLAIN = "text/plain; charset=utf-8"
_OK = "200 OK"


class Listener:
    """A socket that listens. A Unix one is its owner's alone, and is removed by ``close``."""

    def __init__(self, address: Address) -> None:
        """Raises Busy, PermissionDenied or BadArgument."""
        self.address = address
        self._made: tuple[int, int] | None = None
        if isinstance(address, Path):
            make_room(address)
            family = socket.AF_UNIX
        else:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._bind(sock)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            self._remove()
            raise _refusal(address, error) from None
        self.socket = sock

    def _bind(self, sock: socket.socket) -> None:
        if not isinstance(self.address, Path):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(self.address)
            return
        sock.bind(str(self.address))
        found = os.lstat(self.address)
        self._made = found.st_dev, found.st_ino
        os.chmod(self.address, 0o600)  # nobody could connect so far: it does not listen

    def _remove(self) -> None:
        """The file, if it is still the one that was made here."""
        if isinstance(self.address, Path) and self._made is not None:
            try:
                found = os.lstat(self.address)
                if (found.st_dev, found.st_ino) == self._made:
                    os.unlink(self.address)
            except OSError as error:
                log.debug("%s: %s", self.address, error)

    def close(self) -> None:
        """Idempotent."""
        self._remove()
        self._made = None
        self.socket.close()


def _refusal(address: Address, error: OSError) -> IserblkError:
    kinds: dict[int, type[IserblkError]] = {
        errno.EADDRINUSE: Busy,
        errno.EACCES: PermissionDenied,
        errno.EPERM: PermissionDenied,
    }
    kind = kinds.get(error.errno or 0, BadArgument)
    return kind(f"metrics: {words(address)}: {error.strerror}; give another path or port")


async def serve(listener: Listener, look: Look) -> None:
    """Answer until cancelled; then ``listener`` is closed."""
    try:
        sock = trio.socket.from_stdlib_socket(listener.socket)
        free = trio.Semaphore(CLIENTS)
        async with trio.open_nursery() as nursery:
            while True:
                await free.acquire()
                try:
                    client, _ = await sock.accept()
                except OSError as error:  # the process has no descriptors left, most likely
                    log.info("metrics: %s", error)
                    free.release()
                    await trio.sleep(1)
                    continue
                nursery.start_soon(_attend, client, look, free)
    finally:
        listener.close()


async def _attend(client: trio.socket.SocketType, look: Look, free: trio.Semaphore) -> None:
    try:
        with client:
            request = None
            with trio.move_on_after(REQUEST_S):
                request = await _receive(client)
            if request is None:
                return  # too slow, too long, or gone
            status, with_body = judge_untrusted(request)
            kind, body = _PLAIN, f"{status}; ask for GET /metrics\n".encode()
            if status == _OK:
                kind, body = await trio.to_thread.run_sync(_text, look)
            head = (
                f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n"
            )
            with trio.move_on_after(ANSWER_S):
                await _send(client, head.encode() + (body if with_body else b""))
    except OSError as error:
        log.debug("metrics: a client left: %s", error)
    except Exception:
        log.exception("metrics: no answer")  # a bug of ours: the LUNs go on without
    finally:
        free.release()


def _text(look: Look) -> tuple[str, bytes]:
    """In a thread: with many LUNs it takes a while, and the loop may have requests to see to. What
    makes the text is loaded with the first question, and start-up is spared it."""
    from iserblk.metrics.exposition import CONTENT_TYPE, expose  # noqa: PLC0415

    return CONTENT_TYPE, expose(look)


async def _receive(client: trio.socket.SocketType) -> bytes | None:
    """Head of a request, to the empty line. None when there is none within bounds."""
    head = b""
    while len(head) < REQUEST_BYTES:
        more = await client.recv(REQUEST_BYTES - len(head))
        if not more:
            return None
        head += more
        if b"\r\n\r\n" in head or b"\n\n" in head:
            return head
    return None


def judge_untrusted(head: bytes) -> tuple[str, bool]:
    """The status for a request, and whether it wants more than the head of the answer. Raises
    nothing."""
    parts = head.partition(b"\n")[0].rstrip(b"\r").split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        return "400 Bad Request", True
    method, path, _ = parts
    if method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", True
    wanted = path.partition(b"?")[0] in (b"/", b"/metrics")
    return _OK if wanted else "404 Not Found", method == b"GET"


async def _send(client: trio.socket.SocketType, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[await client.send(left) :]
