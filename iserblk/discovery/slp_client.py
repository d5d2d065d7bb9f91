"""Asks SLP agents for targets and their portals, as a user agent (RFC 2608). Runs in trio.

One agent is asked by unicast. Without a name of one, all service agents and directory agents of the
network are asked by multicast; directory agents that answer are then asked for what others have
registered with them. Requests are repeated, with a list of the agents that have answered, until no
more agents do (section 6.3).
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence

import trio

from iserblk.discovery import multicast, slp
from iserblk.discovery.slp_connection import answers, ask_by_stream, named
from iserblk.errors import (
    BadArgument,
    ConnectFailed,
    ConnectTimeout,
    IserblkError,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.iwarp import Address, connect_tcp, resolve
from iserblk.iscsi.send_targets import MAXIMUM_RECORDS, LeftOut, Portal, TargetRecord, Told
from iserblk.url import DEFAULT_PORT, Url, name_portal

log = logging.getLogger(__name__)

RETRY_S = 2.0  # before the first repetition; doubled after each
UNICAST_S = 15.0
MULTICAST_S = 15.0
AGENTS_S = 60.0  # for all that agents of the network are asked by unicast
GROUPS_S = 30.0  # for the portal groups of all portals
MAXIMUM_AGENTS = 256
AT_A_TIME = 16
_DATAGRAM = 65536

_Body = Callable[[Iterable[str]], bytes]


async def ask_slp(url: Url, interfaces: Sequence[int] | None = None) -> Told:
    """The targets that the agent of ``url`` knows, or, without a host, those of all agents of the
    network; only the target that ``url`` names. ``url.options`` may have ``scope``, a list.
    ``interfaces``: indexes of those to ask by multicast; None: all. What an agent says that cannot
    be read is left out, and so is an agent of the network that refuses. Raises TransportError and
    its subclasses, RemoteProtocolError or another IserblkError where one agent is asked, and
    ConnectFailed where there is no network to ask."""
    scopes = _scopes(url.options.get("scope", slp.DEFAULT_SCOPE))
    predicate = f"(iscsi-name={slp.escape(url.iqn)})" if url.iqn else ""
    known: list[tuple[_Agent, slp.UrlEntry]] = []
    left_out: list[str] = LeftOut()
    if url.host:
        agent = _Agent(await resolve(url.host, url.port), name_portal(url.host, url.port))
        known += [(agent, entry) for entry in await agent.services(scopes, predicate)]
    else:
        indexes = multicast.interfaces() if interfaces is None else interfaces
        known += await _ask_all(indexes, url.port, scopes, predicate, left_out)
    targets = await _records(known, scopes, url.iqn, left_out)
    return Told(targets, left_out)


def _scopes(text: str) -> list[str]:
    scopes = [each.strip() for each in text.split(",") if each.strip()]
    if not scopes:
        raise BadArgument("scope: name at least one, e.g. scope=DEFAULT")
    return [slp.escape(each) for each in scopes]


async def _records(
    known: Iterable[tuple[_Agent, slp.UrlEntry]],
    scopes: Sequence[str],
    wanted: str,
    left_out: list[str],
) -> list[TargetRecord]:
    """The targets behind service URLs, each with the portal group that its agent tells. URLs that
    cannot be read are added to ``left_out``."""
    places: dict[tuple[str, Portal], tuple[str, _Agent, str]] = {}
    for agent, entry in known:
        try:
            name, portal = slp.target_untrusted(entry.url, DEFAULT_PORT)
        except RemoteProtocolError as error:
            left_out.append(f"{agent.name}: {error}")
            continue
        if entry.lifetime and (not wanted or name.lower() == wanted.lower()):
            if len(places) == MAXIMUM_RECORDS:
                left_out.append(f"portals beyond {MAXIMUM_RECORDS}")
                break
            places.setdefault((name.lower(), portal), (name, agent, entry.url))
    tags: dict[tuple[str, Portal], int | None] = {}
    limit = trio.CapacityLimiter(AT_A_TIME)

    async def ask(key: tuple[str, Portal], agent: _Agent, service: str) -> None:
        async with limit:
            try:
                tags[key] = slp.group_untrusted(await agent.attributes(service, scopes))
            except IserblkError as error:  # the portal can be used without
                log.info("no portal group of %s: %s", service, error)

    with trio.move_on_after(GROUPS_S):
        async with trio.open_nursery() as nursery:
            for key, (_, agent, service) in places.items():
                nursery.start_soon(ask, key, agent, service)
    found: dict[str, tuple[str, list[Portal]]] = {}
    for key, (name, _, _) in places.items():
        portal = key[1]._replace(tag=tags.get(key))
        found.setdefault(key[0], (name, []))[1].append(portal)
    return [TargetRecord(name, tuple(portals)) for name, portals in found.values()]


# -- one agent -------------------------------------------------------------------------------------


class _Agent:
    """One agent that is asked by unicast. ``name``: for errors."""

    def __init__(self, addresses: Sequence[Address], name: str) -> None:
        self._addresses = addresses
        self.name = name

    async def services(self, scopes: Sequence[str], predicate: str) -> list[slp.UrlEntry]:
        """The URLs of targets."""
        body = slp.service_request((), slp.TARGET, scopes, predicate)
        reply = await self._ask(slp.SERVICE_REQUEST, body, slp.SERVICE_REPLY)
        with named(self.name):
            error, entries = slp.service_reply_untrusted(reply)
        self._check(error)
        return entries

    async def attributes(self, service: str, scopes: Sequence[str]) -> dict[str, list[str]]:
        """The attributes of the service with this URL."""
        body = slp.attribute_request((), service, scopes)
        reply = await self._ask(slp.ATTRIBUTE_REQUEST, body, slp.ATTRIBUTE_REPLY)
        with named(self.name):
            error, attributes = slp.attribute_reply_untrusted(reply)
        self._check(error)
        return attributes

    def _check(self, error: int) -> None:
        if error:
            raise IserblkError(f"{self.name}: the SLP agent refuses: {slp.error_words(error)}")

    async def _ask(self, function: int, body: bytes, expected: int) -> slp.Message:
        """One request and its answer: by UDP, and by TCP where a datagram is too small."""
        request = slp.encode(function, _new_xid(), body)
        if len(request) <= slp.MTU:
            reply = await self._by_udp(request, expected)
            if not reply.flags & slp.OVERFLOW:
                return reply
        sock = await connect_tcp(self._addresses, self.name, UNICAST_S)
        with sock:
            with trio.move_on_after(UNICAST_S):
                return await ask_by_stream(trio.SocketStream(sock), self.name, request, expected)
            raise self._silent()

    async def _by_udp(self, request: bytes, expected: int) -> slp.Message:
        address = self._addresses[0]
        with trio.socket.socket(address.family, socket.SOCK_DGRAM) as sock:
            try:
                await sock.connect(address.sockaddr)
                with trio.move_on_after(UNICAST_S):
                    pause = RETRY_S
                    while True:
                        await sock.send(request)
                        with trio.move_on_after(pause):
                            return await self._answer(sock, request, expected)
                        pause *= 2
            except OSError as error:
                raise ConnectFailed(
                    f"{self.name}: {error.strerror}; is there an SLP agent?"
                ) from None
        raise self._silent()

    async def _answer(
        self, sock: trio.socket.SocketType, request: bytes, expected: int
    ) -> slp.Message:
        while True:
            data = await sock.recv(_DATAGRAM)
            with named(self.name):
                message = slp.message_untrusted(data)
            if answers(message, request, expected):
                return message

    def _silent(self) -> ConnectTimeout:
        return ConnectTimeout(
            f"{self.name}: no answer within {UNICAST_S:g} s; is there an SLP agent?"
        )


def _new_xid() -> int:
    return secrets.randbelow(0xFFFF) + 1


# -- all agents ------------------------------------------------------------------------------------


async def _ask_all(
    interfaces: Sequence[int],
    port: int,
    scopes: Sequence[str],
    predicate: str,
    left_out: list[str],
) -> list[tuple[_Agent, slp.UrlEntry]]:
    """The URLs of targets that agents of the network tell, each with an agent that knows it. What
    cannot be used of their answers is added to ``left_out``."""
    known: list[tuple[_Agent, slp.UrlEntry]] = []
    limit = trio.CapacityLimiter(AT_A_TIME)

    def learn(agent: _Agent, entries: Iterable[slp.UrlEntry]) -> None:
        for entry in entries:
            if len(known) == MAXIMUM_RECORDS:
                left_out.append(f"{agent.name}: URLs beyond {MAXIMUM_RECORDS} of all agents")
                return
            known.append((agent, entry))

    async def ask_services() -> None:
        def body(previous: Iterable[str]) -> bytes:
            return slp.service_request(previous, slp.TARGET, scopes, predicate)

        asking = _Multicast(interfaces, port, slp.SERVICE_REQUEST, slp.SERVICE_REPLY)
        overflown = []
        for agent, message in await asking.run(body):
            try:
                _, entries = slp.service_reply_untrusted(message)
            except RemoteProtocolError as error:
                left_out.append(f"{agent.name}: {error}")
                continue
            if message.flags & slp.OVERFLOW:
                overflown.append(agent)
            else:
                learn(agent, entries)
        await ask_each(overflown)

    async def ask_directories() -> None:
        def body(previous: Iterable[str]) -> bytes:
            return slp.service_request(previous, slp.DIRECTORY_AGENT, scopes)

        asking = _Multicast(interfaces, port, slp.SERVICE_REQUEST, slp.DA_ADVERTISEMENT)
        directories = []
        for agent, message in await asking.run(body):
            try:
                said = slp.advertisement_untrusted(message)
            except RemoteProtocolError as error:
                left_out.append(f"{agent.name}: {error}")
                continue
            if not said.error and said.scopes & slp.items(",".join(scopes)):
                directories.append(agent)
        await ask_each(directories)

    async def ask_each(agents: Iterable[_Agent]) -> None:
        """By unicast. Those that are slow do not make it last without end."""
        waiting = dict.fromkeys(agents)
        with trio.move_on_after(AGENTS_S):
            async with trio.open_nursery() as nursery:
                for agent in list(waiting):
                    nursery.start_soon(ask_one, agent, waiting)
        for agent in waiting:
            left_out.append(f"{agent.name}: no answer within {AGENTS_S:g} s, with the other agents")

    async def ask_one(agent: _Agent, waiting: dict[_Agent, None]) -> None:
        async with limit:
            try:
                learn(agent, await agent.services(scopes, predicate))
            except IserblkError as error:
                left_out.append(str(error))
            del waiting[agent]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_services)
        nursery.start_soon(ask_directories)
    return known


class _Multicast:
    """One request to all agents. ``function``: of the request; ``expected``: of the answers."""

    def __init__(self, interfaces: Sequence[int], port: int, function: int, expected: int) -> None:
        self._interfaces = interfaces
        self._port = port
        self._function = function
        self._expected = expected
        self._heard: dict[str, tuple[_Agent, slp.Message]] = {}

    async def run(self, body: _Body) -> list[tuple[_Agent, slp.Message]]:
        """The agents that have answered, and their answers. ``body``: of the request, with the
        addresses of the agents that have answered already. Raises ConnectFailed where the request
        cannot be sent by any interface."""
        xid = _new_xid()
        pause = RETRY_S
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.bind(("", 0))
            with trio.move_on_after(MULTICAST_S):
                while True:
                    request = slp.encode(self._function, xid, body(self._heard), slp.MULTICAST)
                    if len(request) > slp.MTU:  # the list of those who have answered is too long
                        break
                    before = len(self._heard)
                    await self._send(sock, request)
                    with trio.move_on_after(pause):
                        await self._listen(sock, request)
                    if pause > RETRY_S and len(self._heard) == before:
                        break
                    pause *= 2
        return list(self._heard.values())

    async def _send(self, sock: trio.socket.SocketType, request: bytes) -> None:
        problem: OSError | None = None
        sent = False
        for index in self._interfaces:
            try:
                multicast.choose_interface(sock, index)
                await sock.sendto(request, (slp.GROUP, self._port))
                sent = True
            except OSError as error:
                problem = error
        if not sent:
            words = problem.strerror if problem is not None else "there is no interface"
            raise ConnectFailed(f"SLP: no interface takes multicast: {words}; name an agent's host")

    async def _listen(self, sock: trio.socket.SocketType, request: bytes) -> None:
        while len(self._heard) < MAXIMUM_AGENTS:
            data, sender = await sock.recvfrom(_DATAGRAM)
            try:
                message = slp.message_untrusted(data)
            except RemoteProtocolError as error:  # any host may send something
                log.info("%s: %s", sender[0], error)
                continue
            if answers(message, request, self._expected):
                agent = _Agent(
                    [Address(socket.AF_INET, (sender[0], self._port))],
                    name_portal(sender[0], self._port),
                )
                self._heard.setdefault(sender[0], (agent, message))
