"""An HTTP/1.0 server for one document: the metrics of LUNs, for every client that can connect.

It reads only as much of a request as it needs to see what is asked for. Limits: the bytes of a
request, the time for it and for the answer, and the number of clients at once. When there are too
many, the slowest gives way to a new one, of the address that has most: clients that hold
connections keep no other client away, and a flood of new ones none of another address.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.loop.tasks import sleep
from iserblk.metrics.address import Address, make_room, words
from iserblk.metrics.reading import ProcessReading
from iserblk.newcomers import origin_of

log = logging.getLogger(__name__)

Look = Callable[[], ProcessReading]
Document = Callable[[], Awaitable[tuple[str, bytes]]]  # its content type, and the body


@dataclass(slots=True, frozen=True)
class Page:
    """A page for browsers, at ``/``. ``made``: from the query of a request, which is not trusted,
    makes the document. ``policy``: what a browser may do with it (Content-Security-Policy)."""

    made: Callable[[bytes], Awaitable[bytes]]
    policy: str


REQUEST_BYTES = 8192
REQUEST_S = 5.0  # until the whole request has come
ANSWER_S = 10.0  # until the client has taken the answer
CLIENTS = 32  # at once: more than ask one process for its figures together
START_S = 2.0  # in which a process has better things to do
SESSIONS = b"sessions"  # the query that asks for those of targets, too
_BACKLOG = 256  # connections that wait to be accepted, in a flood, too
_PLAIN = "text/plain; charset=utf-8"
_OK = "200 OK"
_NOT_OURS = "421 Misdirected Request"
_REMEDIES = {
    _NOT_OURS: "ask by an IP address, or as localhost; `iserblk exporter --name NAME` takes "
    "further names"
}
# Of each answer: no browser takes it for something else, keeps it, or gives it to another site.
_HEADERS = (
    "X-Content-Type-Options: nosniff\r\nCache-Control: no-store\r\n"
    "Referrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n"
)


class Listener:
    """A listening socket. Only its owner may connect to a Unix socket; ``close`` removes it."""

    def __init__(self, address: Address) -> None:
        """Bind and listen. Raises Busy, PermissionDenied or BadArgument; nothing stays open."""
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
        os.chmod(self.address, 0o600)  # no client could connect before: it does not listen yet

    def _remove(self) -> None:
        """Remove the Unix socket, if it is still the file that ``_bind`` made."""
        if isinstance(self.address, Path) and self._made is not None:
            try:
                found = os.lstat(self.address)
                if (found.st_dev, found.st_ino) == self._made:
                    os.unlink(self.address)
            except OSError as error:
                log.debug("%s: %s", self.address, error)

    def close(self) -> None:
        """Close the socket, and remove a Unix socket. Idempotent."""
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
    """Answer requests until cancelled; then close ``listener``. ``look`` is called in a thread,
    once for each answer."""
    in_thread = trio.to_thread.run_sync
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_load)
            await serve_document(
                listener.socket,
                partial(in_thread, _text, look, False),
                partial(in_thread, _text, look, True),
            )
    finally:
        listener.close()


async def serve_document(
    listening: socket.socket,
    document: Document,
    with_sessions: Document | None = None,
    page: Page | None = None,
    names: Collection[str] = (),
) -> None:
    """Answer requests with ``document``, and those for ``/metrics?sessions`` with the other one,
    until cancelled. ``page``: what is at ``/``; None: ``document``. ``names``: of this machine, in
    lower case, by which clients may ask; see ``_Site``. ``listening`` stays the caller's."""
    site = _Site(listening, document, with_sessions or document, page, names)
    sock = trio.socket.from_stdlib_socket(listening)
    clients = _Clients()
    async with trio.open_nursery() as nursery:
        while True:
            try:
                client, address = await sock.accept()
            except OSError as error:  # probably the process has no descriptors left
                log.info("metrics: %s", error)
                await sleep(1)
                continue
            try:
                await clients.admit()
            except BaseException:
                client.close()
                raise
            nursery.start_soon(_attend, client, _origin(address), site, clients)


class _Site:
    """What is served, and to whom.

    A page of any site may have a browser on this machine ask at a loopback address, by a name of
    this site that its name server then gives that address (DNS rebinding), and read the answer. So
    a request there has to name this machine in its Host field: by an address, as localhost, or by
    one of ``names``. At another address who reaches the port may read the metrics, by whatever name
    a collector knows it; the page, which browsers alone ask for, is refused there, too. A Unix
    socket is asked by no browser. Clients that tell no Host are no browsers either.
    """

    def __init__(
        self,
        listening: socket.socket,
        document: Document,
        with_sessions: Document,
        page: Page | None,
        names: Collection[str],
    ) -> None:
        self._document = document
        self._with_sessions = with_sessions
        self._page = page
        self._names = names
        self._tcp = listening.family != socket.AF_UNIX
        self._loopback = (
            self._tcp
            and ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
        )

    def judge(self, head: bytes) -> tuple[str, bool]:
        """As ``judge_untrusted``, for these documents."""
        status, with_body = judge_untrusted(head)
        guarded = self._loopback or (self._tcp and self._is_page(head))
        if status == _OK and guarded and not names_untrusted(host_untrusted(head), self._names):
            status = _NOT_OURS
        return status, with_body

    def _is_page(self, head: bytes) -> bool:
        return self._page is not None and path_untrusted(head)[0] == b"/"

    async def answer(self, head: bytes) -> tuple[str, bytes]:
        """Header fields, each with its end of line, and the document."""
        if self._page is not None and self._is_page(head):
            body = await self._page.made(path_untrusted(head)[1])
            fields = (
                "Content-Type: text/html; charset=utf-8\r\n"
                f"Content-Security-Policy: {self._page.policy}\r\n"
                "X-Frame-Options: DENY\r\nCross-Origin-Opener-Policy: same-origin\r\n"
            )
            return fields, body
        sessions = wants_sessions_untrusted(head)
        kind, body = await (self._with_sessions if sessions else self._document)()
        return f"Content-Type: {kind}\r\n", body


class _Clients:
    """The clients that are attended to: at most CLIENTS."""

    def __init__(self) -> None:
        self._free = trio.Semaphore(CLIENTS)
        self._waited_for: dict[trio.CancelScope, str] = {}  # origins; the longest first

    async def admit(self) -> None:
        """Take a place, for which a client that is waited for gives way, if there is none."""
        if not self._free.value:
            await trio.lowlevel.checkpoint()  # those just admitted are waited for after that
            if self._waited_for:
                origins = Counter(self._waited_for.values())
                most = max(origins.values())
                next(
                    scope for scope, each in self._waited_for.items() if origins[each] == most
                ).cancel()
        await self._free.acquire()

    def leave(self) -> None:
        self._free.release()

    @contextmanager
    def waited_for(self, origin: str, seconds: float) -> Iterator[None]:
        """While the body waits for a client of ``origin``: it is cancelled after ``seconds``, or
        when another client needs the place."""
        with trio.move_on_after(seconds) as scope:
            self._waited_for[scope] = origin
            try:
                yield
            finally:
                del self._waited_for[scope]


def _origin(address: object) -> str:
    """Whose clients count together. Those of a Unix socket are all of its owner."""
    return origin_of(f"{address[0]}:{address[1]}") if isinstance(address, tuple) else ""


async def _attend(
    client: trio.socket.SocketType,
    origin: str,
    site: _Site,
    clients: _Clients,
) -> None:
    try:
        with client:
            request = None
            with clients.waited_for(origin, REQUEST_S):
                request = await _receive(client)
            if request is None:
                return  # too slow, too long, or gone
            status, with_body = site.judge(request)
            fields = f"Content-Type: {_PLAIN}\r\n"
            body = f"{status}; {_REMEDIES.get(status, 'ask for GET /metrics')}\n".encode()
            if status == _OK:
                fields, body = await site.answer(request)
            head = (
                f"HTTP/1.0 {status}\r\n{fields}Content-Length: {len(body)}\r\n{_HEADERS}"
                "Connection: close\r\n\r\n"
            )
            with clients.waited_for(origin, ANSWER_S):
                await _send(client, head.encode())
                if with_body:
                    await _send(client, body)
    except OSError as error:
        log.debug("metrics: a client left: %s", error)
    except Exception:
        log.exception("metrics: no answer")  # a bug of iserblk; the LUNs go on working
    finally:
        clients.leave()


async def _load() -> None:
    """Import what ``_text`` needs, when start-up is over. With the first answer it might be too
    late: iserblk may have been removed by then, or be another version."""
    await sleep(START_S)
    try:
        await trio.to_thread.run_sync(load_exposition)
    except ImportError as error:
        log.warning(
            "metrics: not to be had (%s): the program was removed or upgraded within seconds of its"
            " start; the LUNs go on working",
            error,
        )
    except Exception:  # a bug of iserblk; the LUNs go on working
        log.exception("metrics: not to be had")


def load_exposition() -> tuple[str, Callable[[Look, bool], bytes]]:
    """The import is here, so that start-up does not wait for it."""
    from iserblk.metrics.exposition import CONTENT_TYPE, expose  # noqa: PLC0415

    return CONTENT_TYPE, expose


def _text(look: Look, sessions: bool) -> tuple[str, bytes]:
    """Content type and body of the answer. Runs in a thread: with many LUNs it takes long, and the
    event loop may have requests of LUNs to process."""
    kind, expose = load_exposition()
    return kind, expose(look, sessions)


async def _receive(client: trio.socket.SocketType) -> bytes | None:
    """Read the head of a request, up to the empty line. None: the client went away, or the head is
    too long."""
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
    """The status for a request, and whether the answer needs a body. Never raises."""
    parts = head.partition(b"\n")[0].rstrip(b"\r").split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        return "400 Bad Request", True
    method, path, _ = parts
    if method not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", True
    wanted = path.partition(b"?")[0] in (b"/", b"/metrics")
    return _OK if wanted else "404 Not Found", method == b"GET"


def wants_sessions_untrusted(head: bytes) -> bool:
    """Whether a request asks for the sessions of targets, too. Never raises."""
    query = head.partition(b"\n")[0].partition(b"?")[2]
    return query.partition(b" ")[0] == SESSIONS


def path_untrusted(head: bytes) -> tuple[bytes, bytes]:
    """The path and the query that a request asks for. Never raises."""
    line = head.partition(b"\n")[0].rstrip(b"\r").split(b" ")
    path, _, query = (line[1] if len(line) > 1 else b"").partition(b"?")
    return path, query


def host_untrusted(head: bytes) -> str | None:
    """The host that a request asks for, in lower case and without a port; None: it tells none. Of
    several it is not said which counts: "". Never raises."""
    found = []
    for line in head.split(b"\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon and name.strip().lower() == b"host":
            found.append(value.strip().decode("latin-1").lower())
    if not found:
        return None
    host = found[0] if len(found) == 1 else ""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0]


def names_untrusted(host: str | None, names: Collection[str]) -> bool:
    """Whether ``host``, of a request, is a name of this machine; see ``_Site``. Never raises."""
    if host is None or host == "localhost" or host.removesuffix(".") in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _send(client: trio.socket.SocketType, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[await client.send(left) :]
