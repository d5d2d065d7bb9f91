"""The target in SLP: it answers requests, and registers with directory agents. Runs in trio.

Directory agents are those that the user names, and those that are heard of: they answer a request
that is sent by multicast at the start, and advertise themselves from time to time (RFC 2608 section
12). The target registers with each by TCP, repeats that before the registration expires, and
deregisters at the end.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import trio

from iserblk.discovery import multicast, slp
from iserblk.discovery.slp_connection import ask_by_stream
from iserblk.errors import (
    Busy,
    ConnectFailed,
    ConnectTimeout,
    IserblkError,
    PermissionDenied,
    RemoteProtocolError,
)
from iserblk.loop.tasks import sleep, task_time
from iserblk.newcomers import Newcomers, origin_of
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.slp_agent import LIFETIME_S, ServiceAgent

log = logging.getLogger(__name__)

MAXIMUM_AGENTS = 16  # directory agents that are heard of: any host can say that it is one
MAXIMUM_CONNECTIONS = 32
MAXIMUM_REQUEST = 65536  # bytes by TCP
CONNECTION_S = 30.0
ANSWER_S = 15.0
RETRY_S = 30.0
DEREGISTER_S = 2.0
LOOK_FOR_AGENTS_S = (0.0, 2.0, 4.0)  # pauses before the requests at the start


@dataclass(slots=True)
class _Directory:
    """A directory agent. ``boot``: when it began, as it says; another value means that it has
    forgotten all. ``changed``: register now."""

    host: str
    port: int
    boot: int = 0
    registered: bool = False
    changed: trio.Event = field(default_factory=trio.Event)

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class SlpAnnouncer:
    """``directories``: host and port of those that are named. ``listens``: requests are answered,
    on ``port``. ``interfaces``: indexes of those whose multicast is heard; None: all."""

    def __init__(
        self,
        scopes: Sequence[str],
        directories: Sequence[tuple[str, int]],
        listens: bool = True,
        port: int = slp.PORT,
        interfaces: Sequence[int] | None = None,
    ) -> None:
        self._scopes = [slp.escape(each) for each in scopes]
        self._directories = {host: _Directory(host, port) for host, port in directories}
        self._listens = listens
        self.port = port
        self._interfaces = interfaces
        self._datagrams: socket.socket | None = None
        self._connections: socket.socket | None = None

    def open(self) -> None:
        """Open the sockets, if any; to be called before ``run``. Raises PermissionDenied, Busy;
        nothing is open then. ``port`` is the port that was bound."""
        if not self._listens:
            return
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        connections = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connections.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            connections.bind(("", self.port))
            self.port = connections.getsockname()[1]
            datagrams.bind(("", self.port))
            connections.listen()
        except OSError as error:
            datagrams.close()
            connections.close()
            if error.errno == errno.EADDRINUSE:
                raise Busy(
                    f"--slp: port {self.port} is in use, perhaps by a directory agent; choose"
                    " another with --slp-port, or register there with --slp-da 127.0.0.1"
                ) from None
            if error.errno in (errno.EACCES, errno.EPERM):
                raise PermissionDenied(
                    f"--slp: port {self.port} is not permitted; choose another with --slp-port"
                ) from None
            raise IserblkError(f"--slp: port {self.port}: {error.strerror}") from None
        indexes = multicast.interfaces() if self._interfaces is None else self._interfaces
        self._interfaces = indexes
        if not multicast.join(datagrams, indexes):
            log.warning("SLP: no interface takes multicast; only unicast requests are answered")
        multicast.tell_destinations(datagrams)
        self._datagrams, self._connections = datagrams, connections

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        for each in (self._datagrams, self._connections):
            if each is not None:
                each.close()
        self._datagrams = self._connections = None

    async def run(self, announced: Announced) -> None:
        """Answer, and stay registered, until cancelled; then deregister."""
        agent = ServiceAgent(announced, self._scopes)
        try:
            async with trio.open_nursery() as nursery:
                for each in self._directories.values():
                    nursery.start_soon(self._stay_registered, agent, each)
                if self._datagrams is not None and self._connections is not None:
                    datagrams = trio.socket.from_stdlib_socket(self._datagrams)
                    connections = trio.socket.from_stdlib_socket(self._connections)
                    nursery.start_soon(self._serve_datagrams, datagrams, agent, nursery)
                    nursery.start_soon(self._serve_connections, connections, agent)
                    nursery.start_soon(self._look_for_directories, datagrams)
                await trio.sleep_forever()
        finally:
            self.close()

    # -- answering --------------------------------------------------------------------------------

    async def _serve_datagrams(
        self, sock: trio.socket.SocketType, agent: ServiceAgent, nursery: trio.Nursery
    ) -> None:
        while True:
            try:
                data, ancillary, _, address = await sock.recvmsg(65536, 256)
            except OSError as error:  # the last answer could not be delivered
                log.info("SLP: %s", error.strerror)
                continue
            came = multicast.destination(ancillary)
            if came is None:
                continue
            here, to_many = came
            sender, _ = cast("tuple[str, int]", address)
            try:
                answer = agent.answer(data, here, multicast=to_many)
                if answer is None:
                    self._hear(data, sender, agent, nursery)
                    continue
            except RemoteProtocolError as error:
                log.info("%s: %s", sender, error)
                continue
            with suppress(OSError):
                await sock.sendmsg([answer], multicast.from_address(here), 0, address)

    async def _serve_connections(self, sock: trio.socket.SocketType, agent: ServiceAgent) -> None:
        """Where there are too many connections, one of the address that has most is given up."""
        newcomers = Newcomers()

        async def serve(stream: trio.SocketStream, origin: str) -> None:
            async with stream:
                with (
                    trio.move_on_after(CONNECTION_S) as scope,
                    suppress(RemoteProtocolError, trio.BrokenResourceError),
                ):
                    newcomers.add(stream, origin, scope.cancel, MAXIMUM_CONNECTIONS)
                    try:
                        await _converse(stream, agent, partial(newcomers.begins, stream))
                    finally:
                        newcomers.remove(stream)

        async with trio.open_nursery() as nursery:
            while True:
                try:
                    accepted, peer = await sock.accept()
                except OSError as error:
                    log.info("SLP: %s", error.strerror)
                    await sleep(0.1)
                    continue
                origin = origin_of(f"{peer[0]}:{peer[1]}")
                nursery.start_soon(serve, trio.SocketStream(accepted), origin)

    # -- directory agents -------------------------------------------------------------------------

    async def _look_for_directories(self, sock: trio.socket.SocketType) -> None:
        body = slp.service_request((), slp.DIRECTORY_AGENT, self._scopes)
        request = slp.encode(slp.SERVICE_REQUEST, 1, body, slp.MULTICAST)
        for pause in LOOK_FOR_AGENTS_S:
            await sleep(pause)
            for index in self._interfaces or ():
                with suppress(OSError):
                    multicast.choose_interface(sock, index)
                    await sock.sendto(request, (slp.GROUP, self.port))

    def _hear(self, data: bytes, sender: str, agent: ServiceAgent, nursery: trio.Nursery) -> None:
        """Take a DAAdvert of the host ``sender``. Raises RemoteProtocolError."""
        message = slp.message_untrusted(data)
        if message.function != slp.DA_ADVERTISEMENT:
            return
        said = slp.advertisement_untrusted(message)
        host = slp.agent_host_untrusted(said.url)
        if said.error or not agent.serves(said.scopes) or host != sender:
            return
        known = self._directories.get(host)
        if known is None and said.boot and len(self._directories) < MAXIMUM_AGENTS:
            known = self._directories[host] = _Directory(host, self.port, said.boot)
            nursery.start_soon(self._stay_registered, agent, known)
        elif known is not None and said.boot and known.boot != said.boot:
            known.boot = said.boot
            known.changed.set()

    async def _stay_registered(self, agent: ServiceAgent, directory: _Directory) -> None:
        """Register with a directory agent, again and again; deregister when cancelled."""
        told = ""
        try:
            while True:
                directory.changed = trio.Event()
                pause = LIFETIME_S / 2
                try:
                    await _register(agent, directory)
                except trio.Cancelled:
                    directory.registered = True  # perhaps, or in part
                    raise
                except IserblkError as error:
                    if str(error) != told:
                        log.warning("not registered with SLP: %s", error)
                    told, pause = str(error), RETRY_S
                else:
                    if not directory.registered or told:
                        log.info("%s: registered with this directory agent", directory.name)
                    directory.registered, told = True, ""
                with trio.move_on_after(pause):
                    await directory.changed.wait()
        finally:
            if directory.registered:
                with (
                    trio.CancelScope(deadline=task_time() + DEREGISTER_S, shield=True),
                    suppress(IserblkError),
                ):
                    await _register(agent, directory, leaving=True)


async def _converse(
    stream: trio.SocketStream, agent: ServiceAgent, begun: Callable[[], None]
) -> None:
    """Answer the requests of one TCP connection. ``begun`` is called when something has come.
    Raises RemoteProtocolError."""
    here = stream.socket.getsockname()[0]
    data = b""
    while True:
        length = slp.length_untrusted(data)
        if length is not None and length <= len(data):
            answer = agent.answer(data[:length], here, datagram=False)
            data = data[length:]
            if answer is not None:
                await stream.send_all(answer)
            continue
        more = await stream.receive_some(4096)
        if not more or len(data) + len(more) > MAXIMUM_REQUEST:
            return
        begun()
        data += more


async def _register(agent: ServiceAgent, directory: _Directory, leaving: bool = False) -> None:
    """Register every portal, or deregister it. Raises IserblkError."""
    name = directory.name
    try:
        with trio.fail_after(ANSWER_S):
            stream = await connect(directory.host, directory.port)
            async with stream:
                here = stream.socket.getsockname()[0]
                for xid, (entry, registration) in enumerate(agent.registrations(here), 1):
                    request = slp.encode(slp.SERVICE_REGISTRATION, xid, registration, slp.FRESH)
                    if leaving:
                        body = slp.deregistration(entry, agent.scopes)
                        request = slp.encode(slp.SERVICE_DEREGISTRATION, xid, body)
                    reply = await ask_by_stream(stream, name, request, slp.SERVICE_ACKNOWLEDGE)
                    if error := slp.acknowledge_untrusted(reply):
                        raise IserblkError(
                            f"{name}: the SLP agent refuses: {slp.error_words(error)}"
                        )
    except trio.TooSlowError:
        raise ConnectTimeout(f"{name}: no answer within {ANSWER_S:g} s") from None
    except OSError as problem:
        words = problem.strerror or str(problem)
        raise ConnectFailed(f"{name}: cannot connect: {words}; is there an SLP agent?") from None


async def _connect(host: str, port: int) -> trio.SocketStream:
    return await trio.open_tcp_stream(host, port)


connect = _connect
