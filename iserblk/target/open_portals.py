"""Where a target takes connections: TCP and SCTP sockets, and addresses of RDMA devices."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from iserblk.errors import IserblkError
from iserblk.iscsi.send_targets import Portal
from iserblk.loop.clock import monotonic
from iserblk.loop.tasks import sleep, until_readable
from iserblk.rcap.seam import QueuePair
from iserblk.target.iscsi.listening import (
    RdmaListener,
    is_any_address,
    listen_rdma,
    listen_sctp,
    listen_tcp,
    name_of,
)
from iserblk.target.ports import ON_TCP, SCTP, VERBS, Listen, TargetPort, TargetPorts

log = logging.getLogger(__name__)

RDMA_TICK_S = 1.0  # after which half-open connections are looked at
_PAUSE_S = 0.1  # when the process has no descriptor left


class ServeStream(Protocol):
    """Serves one connection, to its end. Raises nothing but Cancelled."""

    async def __call__(self, sock: trio.socket.SocketType, port: TargetPort) -> None: ...


class ServeQueuePair(Protocol):
    """The same. ``portal`` and ``peer``: for the log."""

    async def __call__(self, qp: QueuePair, portal: str, peer: str, port: TargetPort) -> None: ...


class OpenPortals:
    """``most``: connections at a time. What comes beyond waits to be accepted; by rdma_cm it is
    refused."""

    def __init__(
        self,
        ports: TargetPorts,
        most: int,
        serve_stream: ServeStream,
        serve_queue_pair: ServeQueuePair,
    ) -> None:
        self._ports = ports
        self._limiter = trio.Semaphore(most)
        self._serve_stream = serve_stream
        self._serve_queue_pair = serve_queue_pair
        self._streams: list[tuple[trio.SocketListener, TargetPort]] = []
        self._rdma: list[tuple[RdmaListener, str, TargetPort]] = []

    async def open(self, places: Sequence[Listen]) -> list[Portal]:
        """Listen. Returns a portal for each address, with the port that was bound. Raises
        BadArgument, NotSupported, PermissionDenied or Busy; ``close`` is to follow then, too."""
        portals: list[Portal] = []
        rdma: list[tuple[object, TargetPort]] = []
        for place in places:
            port = self._ports.by_tag[place.group]
            for each in await listen_tcp(place.place, place.or_another):
                address = each.socket.getsockname()
                portals.append(Portal(address[0], address[1], place.group))
                if not is_any_address(address):
                    port.addresses.append(name_of(address))
                if VERBS in port.transports:
                    rdma.append((address, port))
                if SCTP in port.transports:
                    self._streams.append((listen_sctp(address), port))
                if port.transports & ON_TCP:
                    self._streams.append((each, port))
                else:
                    await each.aclose()  # it has told the address, and perhaps chosen the port
        if rdma:
            made = listen_rdma([address for address, _ in rdma])
            self._rdma = [
                (listener, name_of(address), port)
                for listener, (address, port) in zip(made, rdma, strict=True)
            ]
        return portals

    def start(self, nursery: trio.Nursery, sessions: trio.Nursery) -> None:
        """Accept connections in tasks of ``nursery``, and serve each in a task of ``sessions``."""
        for listener, port in self._streams:
            nursery.start_soon(self._accept, listener, port, sessions)
        for rdma_listener, portal, port in self._rdma:
            nursery.start_soon(self._accept_rdma, rdma_listener, portal, port, sessions)

    def close(self) -> None:
        """No task may accept connections any more. May be called twice."""
        for rdma_listener, _, _ in self._rdma:
            rdma_listener.close()
        self._rdma.clear()
        for listener, _ in self._streams:
            listener.socket.close()

    async def _accept(
        self, listener: trio.SocketListener, port: TargetPort, sessions: trio.Nursery
    ) -> None:
        while True:
            await self._limiter.acquire()
            try:
                stream = await listener.accept()
            except OSError as error:  # out of descriptors: a connection that ends frees some
                log.error("cannot accept: %s", error.strerror)
                self._limiter.release()
                await sleep(_PAUSE_S)
                continue
            sessions.start_soon(self._limited, self._serve_stream, stream.socket, port)

    async def _accept_rdma(
        self, listener: RdmaListener, portal: str, port: TargetPort, sessions: trio.Nursery
    ) -> None:
        while True:
            # No event comes for a half-open connection that has to be given up.
            with trio.move_on_after(RDMA_TICK_S):
                await until_readable(listener.fileno())
            try:
                established = listener.progress(monotonic())
            except IserblkError as error:
                log.error("%s: no more connections by rdma_cm: %s", portal, error)
                return
            for qp in established:
                peer = str(qp.describe().get("peer", "an RDMA peer"))
                try:
                    self._limiter.acquire_nowait()
                except trio.WouldBlock:
                    log.warning("%s: refused, there are too many connections already", peer)
                    qp.close()
                    continue
                sessions.start_soon(self._limited, self._serve_queue_pair, qp, portal, peer, port)

    async def _limited(self, serve_one: Callable[..., Awaitable[None]], *arguments: object) -> None:
        try:
            await serve_one(*arguments)
        finally:
            self._limiter.release()
