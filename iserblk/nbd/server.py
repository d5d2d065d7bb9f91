"""An NBD server on trio: listening sockets, and a client for each connection."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import trio

from iserblk.errors import RemoteProtocolError
from iserblk.limited_log import tell_left_out
from iserblk.nbd.buffers import Memory
from iserblk.nbd.client import Client, Connection
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from iserblk.nbd.limited_log import ClientLogs
from iserblk.nbd.transmission import Transmission
from iserblk.waiting.strands import Strands, open_strands

log = logging.getLogger(__name__)

MOST_CLIENTS = 256
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
        self._clients: set[Client] = set()
        self._handshakes: dict[Client, trio.CancelScope] = {}  # oldest first
        self._ending = False
        self._open = trio.Event()  # unset while the server is paused: no connection is taken
        self._open.set()
        self._left = trio.Event()

    @asynccontextmanager
    async def serving(
        self, sockets: Sequence[socket.socket], inherited: Sequence[Connection] = ()
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
                    for scope in list(self._handshakes.values()):
                        scope.cancel()
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

    async def _continue(self, inherited: Sequence[Connection]) -> None:
        found = []
        for each in inherited:
            client = Client(
                each.sock, _name(""), self._group, self.memory, self._busy_poll_us, self._logs
            )
            found.append((client, client.continued(each), each.sock))
        # All of them before the first can have gone: it is not the last one then.
        self._clients.update(client for client, _, _ in found)
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
            await self._transmit(client, self._exports[self._default], transmission)

    # -- a pause ----------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Begin no request any more, take no connection, and return when everything that has begun
        is answered. ``go_on`` or ``leave`` is to follow, also when this is cancelled. Not for
        clients with TLS."""
        self._open = trio.Event()
        for scope in list(self._handshakes.values()):
            scope.cancel()
        async with trio.open_nursery() as nursery:
            for client in self._clients:
                nursery.start_soon(client.pause)

    @property
    def open_requests(self) -> int:
        """Of all clients: those that were received, and not answered yet."""
        return sum(client.open_requests for client in self._clients)

    def connections(self) -> list[Connection]:
        """While it is paused: the clients that are left."""
        return [client.connection() for client in self._clients if not client.over]

    def go_on(self) -> None:
        """After ``pause``: everything is as it was before."""
        self._open.set()
        for client in list(self._clients):
            client.go_on()

    def leave(self) -> None:
        """After ``pause``: another process has the ``connections`` now. Their clients end here, and
        do not notice. The server stays paused."""
        leaving, self._clients = self._clients, set()  # nothing here acts on them any more
        for client in leaving:
            client.leave()

    async def _look_round(self) -> None:
        """Clients that stall with their memory full of requests do not stop the others."""
        while True:
            await trio.sleep(STALL_S)
            starved = self.memory.starved
            for client in list(self._clients):
                client.give_way(starved)
            self._logs.tell()
            tell_left_out()

    async def _hurry(self) -> None:
        """Clients that take no replies do not hold up the end."""
        while True:
            await trio.sleep(LAST_WORDS_S)
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
            await trio.lowlevel.wait_readable(listening)
            await self._open.wait()
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                self._logs.conduct.warning("a connection could not be accepted: %s", error.strerror)
                await trio.sleep(_ACCEPT_PAUSE_S)
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
            client = Client(sock, name, group, self.memory, self._busy_poll_us, self._logs)
            try:
                with trio.CancelScope() as scope:
                    self._make_room(client, scope)
                    try:
                        agreed = await client.shake_hands(
                            self._exports, self._default, self._tls, self._context
                        )
                    finally:
                        self._handshakes.pop(client, None)
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
            if scope.cancelled_caught or agreed is None or not self._open.is_set():
                return
            export, transmission = agreed
            log.info("%s: uses %s", name, export.name)
            self._clients.add(client)
            await self._transmit(client, export, transmission)

    async def _transmit(self, client: Client, export: Export, transmission: Transmission) -> None:
        try:
            await client.serve(export, transmission)
        finally:
            self._clients.discard(client)
            if not self._clients:
                self._left.set()

    def _make_room(self, client: Client, scope: trio.CancelScope) -> None:
        """With too many clients the oldest one that is no further than the handshake is let go; or
        the new one."""
        self._handshakes[client] = scope
        if len(self._clients) + len(self._handshakes) > MOST_CLIENTS:
            oldest = next(iter(self._handshakes))
            self._logs.conduct.warning(
                "%s: let go: there are %d clients", oldest.name, MOST_CLIENTS
            )
            self._handshakes.pop(oldest).cancel()


def _name(address: object) -> str:
    """Of a peer, for logs."""
    if isinstance(address, tuple):
        host, port = address[:2]
        return f"NBD client [{host}]:{port}" if ":" in host else f"NBD client {host}:{port}"
    return "NBD client"
