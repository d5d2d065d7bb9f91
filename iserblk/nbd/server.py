"""An NBD server on trio: listening sockets, and a client for each connection."""

from __future__ import annotations

import errno
import logging
import resource
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio

from iserblk.errors import RemoteProtocolError
from iserblk.limited_log import tell_left_out
from iserblk.loop.strands import Strands, open_strands
from iserblk.loop.tasks import sleep, until_readable
from iserblk.nbd.buffers import Memory
from iserblk.nbd.client import Client, PausedConnection
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from iserblk.nbd.limited_log import ClientLogs
from iserblk.nbd.transmission import Transmission
from iserblk.newcomers import Newcomers, origin_of

log = logging.getLogger(__name__)

_CLIENT = "NBD client"  # in front of its address, in logs
_CREDENTIALS = struct.Struct("iII")  # ucred, unix(7): pid, uid, gid
MOST_CLIENTS = 1024  # that have chosen an export, and
SPARE = 128  # more, of origins that have
SPARE_EACH = 8  # clients at most: so no origin takes all places
MOST_HANDSHAKES = 1024  # at once: as many clients may come together
# Descriptors of all that is no client: the targets' connections, and what Python opens by itself.
OTHER_DESCRIPTORS = 128
_DESCRIPTORS = MOST_CLIENTS + SPARE + MOST_HANDSHAKES + OTHER_DESCRIPTORS
LAST_WORDS_S = 5.0  # that a client has for taking replies, when the server ends
KEEPALIVE_S = 60  # of silence, after which a client's machine is asked for a sign of life
# Replies that the kernel takes of a client on a Unix socket, in bytes. It doubles the number, for
# what the bytes cost it, and caps it (net.core.wmem_max). Its default holds a fifth of a reply of
# 1 MiB: each further fifth would cost a turn of the loop. (1 MiB reads at depth 8: a tenth.)
SEND_BYTES = 512 << 10
STALL_S = 10.0  # in which a client has to move LEAST_MOVED, when others wait for its memory
_ACCEPT_PAUSE_S = 0.1  # when the process has no descriptor left


class NbdServer:
    """``exports`` by name; ``default``: what an empty name means. ``tls`` other than OFF needs a
    ``context``.

    ``memory``: what its clients share for their requests.
    """

    def __init__(
        self,
        exports: Mapping[str, Export],
        default: str,
        busy_poll_us: int,
        tls: Tls = Tls.OFF,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._exports = exports
        self._default = default
        self._tls = tls
        self._context = context
        self.memory = Memory()
        self._busy_poll_us = busy_poll_us
        self._logs = ClientLogs(log)
        self._clients: dict[Client, None] = {}
        self._origins: dict[str, dict[Client, None]] = {}  # of the clients, oldest first
        self._handshakes = Newcomers()
        self.most_clients, self.spare, self.most_handshakes = room(_limit())
        self._ending = False
        self._open = trio.Event()  # unset while the server is paused: no connection is taken
        self._open.set()
        self._left = trio.Event()

    @asynccontextmanager
    async def serving(
        self, sockets: Sequence[socket.socket], inherited: Sequence[PausedConnection] = ()
    ) -> AsyncIterator[None]:
        """Take connections of the listening ``sockets``, which stay the caller's to close, for as
        long as the block runs. At its end nothing more is received, and what was received is
        answered first. Cancelled, or left by an exception, it aborts what is open.

        ``inherited``: clients of the default export that another process has served until now.
        Their sockets are closed here."""
        try:
            async with open_strands() as group, trio.open_nursery() as nursery:
                nursery.start_soon(self._look_round)
                async with trio.open_nursery() as clients:
                    self._group, self._nursery = group, clients
                    await self._continue(inherited)
                    async with self.listening(sockets):
                        yield
                    self._ending = True
                    self._handshakes.give_up_all()
                    for client in self._clients:
                        client.stop()
                    nursery.start_soon(self._hurry)
                nursery.cancel_scope.cancel()
        finally:
            self._logs.tell()

    @asynccontextmanager
    async def listening(self, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
        """While the server is ``serving``: take connections of these sockets, too, for as long as
        the block runs."""
        async with trio.open_nursery() as listeners:
            for each in sockets:
                each.setblocking(False)
                listeners.start_soon(self._accept, each, self._nursery, self._group)
            yield
            listeners.cancel_scope.cancel()

    async def _continue(self, inherited: Sequence[PausedConnection]) -> None:
        found = []
        for each in inherited:
            client = Client(
                each.sock, _name(""), self._group, self.memory, self._busy_poll_us, self._logs
            )
            found.append((client, client.continued(each), each.sock))
        # All of them before the first can have gone: it is not the last one then.
        for client, _, sock in found:
            self._enter(client, _origin(sock, ""))
        for client, transmission, sock in found:
            await self._nursery.start(self._serve_on, client, transmission, sock)

    async def _serve_on(
        self,
        client: Client,
        transmission: Transmission,
        sock: socket.socket,
        task_status: trio.TaskStatus[None],
    ) -> None:
        task_status.started()
        with sock:
            origin = _origin(sock, client.name)
            await self._transmit(client, origin, self._exports[self._default], transmission)

    # -- a pause ----------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Begin no request any more, take no connection, and return when everything that has begun
        is answered. ``go_on`` or ``hand_over`` is to follow, also when this is cancelled. Not for
        clients with TLS."""
        self._open = trio.Event()
        self._handshakes.give_up_all()
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.pause)

    @property
    def clients(self) -> int:
        """How many there are that have chosen an export."""
        return len(self._clients)

    @property
    def open_requests(self) -> int:
        """Of all clients: those that were received, and not answered yet."""
        return sum(client.open_requests for client in self._clients)

    def connections(self) -> list[PausedConnection]:
        """While it is paused: the clients that are left. What any client was told of losses, and
        may not have received, is not told from now on."""
        for client in self._clients:  # those that have gone, too: their ends may come later
            client.hear_no_more()
        return [client.connection() for client in self._clients if not client.over]

    def go_on(self) -> None:
        """After ``pause``: everything is as it was before."""
        self._open.set()
        for client in list(self._clients):
            client.go_on()

    def hand_over(self) -> None:
        """After ``pause``: another process has the ``connections`` now. Their clients end here, and
        do not notice. The server stays paused."""
        leaving, self._clients = self._clients, {}  # nothing here acts on them any more
        self._origins.clear()
        for client in leaving:
            client.hand_over()

    async def _look_round(self) -> None:
        """Clients that stall with their memory full of requests do not stop the others."""
        while True:
            await sleep(STALL_S)
            starved = self.memory.starved
            for client in list(self._clients):
                client.give_way(starved)
            self._logs.tell()
            tell_left_out()

    async def _hurry(self) -> None:
        """Clients that take no replies do not hold up the end."""
        while True:
            await sleep(LAST_WORDS_S)
            for client in self._clients:
                client.hurry()

    async def wait_unused(self) -> None:
        """Return once clients have used exports, and the last of those clients has gone. Clients
        that do not get as far as an export do not count."""
        await self._left.wait()

    async def _accept(
        self, listening: socket.socket, nursery: trio.Nursery, group: Strands
    ) -> None:
        while True:
            await until_readable(listening)
            await self._open.wait()
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                self._logs.conduct.warning(
                    "a connection could not be accepted: %s%s", error.strerror, _remedy(error)
                )
                await sleep(_ACCEPT_PAUSE_S)
                continue
            nursery.start_soon(self._serve, sock, _name(address), group)

    async def _serve(self, sock: socket.socket, name: str, group: Strands) -> None:
        """One connection. Raises nothing but Cancelled."""
        with sock:
            if self._ending:
                return
            if sock.family == socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            else:  # TCP finds out by itself how much it should take
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # A client that vanished without a word does not stay for ever.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            origin = _origin(sock, name)
            if not self._has_room(origin) and self._idle() is None:
                self._refuse(name)
                return
            client = Client(sock, name, group, self.memory, self._busy_poll_us, self._logs)
            try:
                with trio.CancelScope() as scope:
                    self._handshakes.add(client, origin, scope.cancel, self.most_handshakes)
                    try:
                        agreed = await client.shake_hands(
                            self._exports,
                            self._default,
                            self._tls,
                            self._context,
                            partial(self._handshakes.begins, client),
                        )
                    finally:
                        self._handshakes.remove(client)
            except trio.TooSlowError:
                self._logs.conduct.warning("%s: no end of the handshake in time", name)
                return
            except RemoteProtocolError as error:
                self._logs.conduct.warning("%s: %s", name, error)
                return
            except ssl.SSLError as error:
                self._logs.conduct.warning("%s: TLS: %s", name, error.reason or error)
                return
            except OSError as error:
                log.info("%s: went away: %s", name, error.strerror)
                return
            except Exception:  # a bug; it ends this client only
                log.exception("%s: internal error", name)
                return
            if scope.cancelled_caught:
                if not self._ending and self._open.is_set():
                    self._logs.conduct.warning(
                        "%s: let go: too many handshakes at once (%d)", name, self.most_handshakes
                    )
                return
            if agreed is None or not self._open.is_set():
                return
            export, transmission = agreed
            if not self._make_room(origin):  # others were faster
                transmission.close()
                self._refuse(name)
                return
            log.info("%s: uses %s", name, export.name)
            self._enter(client, origin)
            await self._transmit(client, origin, export, transmission)

    async def _transmit(
        self, client: Client, origin: str, export: Export, transmission: Transmission
    ) -> None:
        try:
            await client.serve(export, transmission)
        finally:
            self._leave(client, origin)
            if not self._clients:
                self._left.set()

    # -- room -------------------------------------------------------------------------------------

    def _enter(self, client: Client, origin: str) -> None:
        """It has chosen an export."""
        self._clients[client] = None
        self._origins.setdefault(origin, {})[client] = None
        self.memory.guarantee(len(self._clients))

    def _leave(self, client: Client, origin: str) -> None:
        """Its place is free. Does nothing if it has left already."""
        self._clients.pop(client, None)
        clients = self._origins.get(origin, {})
        if client in clients:
            del clients[client]
            if not clients:
                del self._origins[origin]
        self.memory.guarantee(len(self._clients))

    def _has_room(self, origin: str) -> bool:
        count = len(self._clients)
        return count < self.most_clients or (
            count < self.most_clients + self.spare
            and len(self._origins.get(origin, ())) < SPARE_EACH
        )

    def _idle(self) -> tuple[Client, str] | None:
        """A client that has chosen an export, and sent no request since, and its origin: that which
        has most clients."""
        origin, clients = max(self._origins.items(), key=lambda each: len(each[1]))
        return next(((each, origin) for each in clients if not each.has_begun), None)

    def _make_room(self, origin: str) -> bool:
        """Whether there is a place for one more client of ``origin``. If there is none, an idle
        client is let go; one that is at work never is."""
        if self._has_room(origin):
            return True
        found = self._idle()
        if found is None:
            return False
        idle, its_origin = found
        self._logs.conduct.warning(
            "%s: let go without a request: there are %d clients", idle.name, len(self._clients)
        )
        self._leave(idle, its_origin)
        idle.give_up()
        return True

    def _refuse(self, name: str) -> None:
        self._logs.conduct.warning(
            "%s: refused: there are %d clients, all at work", name, len(self._clients)
        )


def room(limit: int) -> tuple[int, int, int]:
    """Places for clients, spare ones, and places for handshakes, where the process may have
    ``limit`` descriptors."""
    share = min(1.0, max(0, limit - OTHER_DESCRIPTORS) / (_DESCRIPTORS - OTHER_DESCRIPTORS))
    return (
        max(8, int(MOST_CLIENTS * share)),
        max(2, int(SPARE * share)),
        max(4, int(MOST_HANDSHAKES * share)),
    )


def allow_descriptors() -> None:
    """Let this process have the descriptors of as many clients as a server has room for. Where the
    system allows fewer, there is less room, and the log says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _DESCRIPTORS:
        most = _DESCRIPTORS if hard < 0 else min(_DESCRIPTORS, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    limit = _limit()
    if limit < _DESCRIPTORS:
        log.warning(
            "room for %d clients, not %d: the limit of descriptors is %d; raise it to %d"
            " (LimitNOFILE=, ulimit -n)",
            room(limit)[0],
            MOST_CLIENTS,
            limit,
            _DESCRIPTORS,
        )


def _limit() -> int:
    """Of descriptors of this process; _DESCRIPTORS is as good as more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if 0 <= soft < _DESCRIPTORS else _DESCRIPTORS  # below 0: there is no limit


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "; raise the limit of descriptors (ulimit -n, LimitNOFILE=)"
    return ""


def _origin(sock: socket.socket, name: str) -> str:
    """Whose connections count together: of TCP the address, of a Unix socket the user."""
    if sock.family == socket.AF_UNIX:
        _, uid, _ = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return f"user {uid}"
    return origin_of(name.removeprefix(_CLIENT).lstrip())


def _name(address: object) -> str:
    """Of a peer, for logs."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"{_CLIENT} [{host}]:{port}" if ":" in host else f"{_CLIENT} {host}:{port}"
    return _CLIENT
