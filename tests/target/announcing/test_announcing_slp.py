"""The target in SLP, on sockets of the loopback interface: our own client, and directory agents
that are written here."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import pytest
import trio

from iserblk.discovery import multicast, slp, slp_client
from iserblk.discovery.slp_client import ask_slp
from iserblk.discovery.slp_connection import ask_by_stream
from iserblk.errors import Busy, ConnectFailed, IserblkError
from iserblk.iscsi.send_targets import Portal, TargetRecord
from iserblk.target.announcing import slp as announcing
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.slp import SlpAnnouncer
from iserblk.url import parse_place
from tests.support.until import until
from tests.vectors import slp as golden

LOOPBACK = [socket.if_nametoindex("lo")]
ANNOUNCED = Announced(
    golden.TARGET, [Portal("192.0.2.77", 3260, 4), Portal("0.0.0.0", 861, 7)], lambda: None
)


def record(here: str = "127.0.0.1") -> TargetRecord:
    portals = (Portal("192.0.2.77", 3260, 4), Portal(here, 861, 7))
    return TargetRecord(golden.TARGET, portals)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is waited for, but not for seconds."""
    monkeypatch.setattr(slp_client, "RETRY_S", 0.25)
    monkeypatch.setattr(announcing, "LOOK_FOR_AGENTS_S", (0.0,))


@asynccontextmanager
async def announced(
    *directories: tuple[str, int], listens: bool = True, what: Announced = ANNOUNCED
) -> AsyncIterator[SlpAnnouncer]:
    announcer = SlpAnnouncer(["DEFAULT", "lab"], directories, listens, 0, LOOPBACK)
    announcer.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(announcer.run, what)
        yield announcer
        nursery.cancel_scope.cancel()


async def asked(where: str) -> list[TargetRecord]:
    with trio.fail_after(20):
        told = await ask_slp(parse_place(where), LOOPBACK)
    assert told.left_out == []
    return told.targets


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
async def test_found_by_unicast_and_by_multicast(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its portals and groups. proves: ISER-GEN-3.3-1, ISER-B.2-2, SYSTEM-9"""
    async with announced() as announcer:
        monkeypatch.setattr("iserblk.url.SLP_PORT", announcer.port)  # slp:// alone has no port
        place = f"slp://{host}:{announcer.port}" if host else "slp://"
        (found,) = await asked(place)
        # By multicast the system chooses the address of ours that is told.
        assert found == record(host or found.portals[1].host)
        assert await asked(f"{place}/{golden.TARGET}?scope=LAB") == [found]
        assert await asked(f"{place}/iqn.2026-11.example:other") == []


async def test_a_scope_that_the_agent_does_not_have() -> None:
    async with announced() as announcer:
        with pytest.raises(IserblkError, match="the SLP agent refuses: scope not supported"):
            await asked(f"slp://127.0.0.1:{announcer.port}?scope=other")


async def test_no_agent() -> None:
    async with announced() as announcer:
        port = announcer.port
    with pytest.raises(ConnectFailed, match="is there an SLP agent"):
        await asked(f"slp://127.0.0.1:{port}")


async def test_a_long_answer_comes_by_tcp() -> None:
    many = [Portal("127.0.0.1", port, 1) for port in range(1, 60)]
    async with announced(what=Announced(golden.TARGET, many, lambda: None)) as announcer:
        (record,) = await asked(f"slp://127.0.0.1:{announcer.port}")
        assert sorted(record.portals) == many


async def test_several_requests_on_one_connection() -> None:
    async with announced() as announcer:
        stream = await trio.open_tcp_stream("127.0.0.1", announcer.port)
        async with stream:
            body = slp.service_request((), slp.TARGET, ["DEFAULT"])
            for xid in (1, 2):
                request = slp.encode(slp.SERVICE_REQUEST, xid, body)
                reply = await ask_by_stream(stream, "agent", request, slp.SERVICE_REPLY)
                assert len(slp.service_reply_untrusted(reply)[1]) == 2
            await stream.send_all(b"\x01 no SLP")
            with trio.fail_after(20):
                assert await stream.receive_some() == b""  # that ends the connection
        assert await asked(f"slp://127.0.0.1:{announcer.port}") == [record()]


async def test_a_flood_of_connections_keeps_no_other_address_away() -> None:
    """They are silent, and more than there may be."""
    async with announced() as announcer, AsyncExitStack() as stack:

        async def come(address: str) -> trio.SocketStream:
            sock = trio.socket.socket()
            await sock.bind((address, 0))
            await sock.connect(("127.0.0.1", announcer.port))
            return await stack.enter_async_context(trio.SocketStream(sock))

        honest = await come("127.0.0.2")
        flood = [await come("127.0.0.1") for _ in range(announcing.MAXIMUM_CONNECTIONS + 5)]
        with trio.fail_after(20):
            for each in flood[:5]:
                assert await each.receive_some(1) == b""
            body = slp.service_request((), slp.TARGET, ["DEFAULT"])
            for stream in (honest, await come("127.0.0.3")):
                request = slp.encode(slp.SERVICE_REQUEST, 1, body)
                reply = await ask_by_stream(stream, "agent", request, slp.SERVICE_REPLY)
                assert len(slp.service_reply_untrusted(reply)[1]) == 2


async def test_datagrams_that_are_no_requests() -> None:
    """The agent goes on."""
    async with announced() as announcer:
        with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
            for data in (b"", b"\x02", golden.SERVICE_REPLY, bytes(2000), golden.DA_ADVERT[:-9]):
                await sock.sendto(data, ("127.0.0.1", announcer.port))
        assert await asked(f"slp://127.0.0.1:{announcer.port}") == [record()]


async def test_the_port_is_in_use() -> None:
    async with announced() as announcer:
        with pytest.raises(Busy, match="register there with --slp-da"):
            SlpAnnouncer(["DEFAULT"], [], True, announcer.port, LOOPBACK).open()


# -- directory agents ------------------------------------------------------------------------------


def string(data: bytes) -> tuple[str, bytes]:
    """A string field and what follows it. Decoded here, as only directory agents read
    registrations."""
    end = 2 + int.from_bytes(data[:2], "big")
    return data[2:end].decode(), data[end:]


def url_entry(data: bytes) -> tuple[str, bytes]:
    """The URL of a URL entry without authentication (RFC 2608 section 4.3), and what follows."""
    url, rest = string(data[3:])
    assert (data[0], rest[0]) == (0, 0)
    return url, rest[1:]


class Directory:
    """A directory agent. ``error``: what it answers. ``heard``: function and flags of each message.
    ``known``: URLs, with attributes."""

    def __init__(self, listener: trio.SocketListener) -> None:
        self.listener = listener
        self.port: int = listener.socket.getsockname()[1]
        self.error = 0
        self.heard: list[tuple[int, int]] = []
        self.known: dict[str, str] = {}

    async def serve(self, stream: trio.SocketStream) -> None:
        data = b""
        # An announcer that is cancelled does not wait for the answer: its socket is reset.
        with suppress(trio.BrokenResourceError):
            async with stream:
                while more := await stream.receive_some():
                    data += more
                    while (length := slp.length_untrusted(data)) and length <= len(data):
                        self._take(slp.message_untrusted(data))
                        xid = slp.message_untrusted(data).xid
                        data = data[length:]
                        acknowledge = self.error.to_bytes(2, "big")
                        await stream.send_all(slp.encode(slp.SERVICE_ACKNOWLEDGE, xid, acknowledge))

    def _take(self, message: slp.Message) -> None:
        self.heard.append((message.function, message.flags))
        if message.function == slp.SERVICE_REGISTRATION:
            url, rest = url_entry(message.body)
            service, rest = string(rest)
            scopes, rest = string(rest)
            assert (service, scopes) == (slp.TARGET, "DEFAULT,lab")
            if not self.error:
                self.known[url] = string(rest)[0]
        elif message.function == slp.SERVICE_DEREGISTRATION:
            _, rest = string(message.body)
            del self.known[url_entry(rest)[0]]


@asynccontextmanager
async def directory() -> AsyncIterator[Directory]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    made = Directory(listener)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(trio.serve_listeners, made.serve, [listener]))
        yield made
        nursery.cancel_scope.cancel()


async def test_registered_with_a_directory_agent_that_is_named() -> None:
    async with directory() as agent:
        async with announced(("127.0.0.1", agent.port), listens=False):
            await until(lambda: len(agent.known) == 2)
            for url, attributes in agent.known.items():
                assert slp.target_untrusted(url, 1)[0] == golden.TARGET
                found = slp.attributes_untrusted(attributes)
                assert found["iscsi-name"] == [golden.TARGET] and found["transports"] == ["tcp"]
        assert agent.known == {}
        assert agent.heard == [(3, slp.FRESH)] * 2 + [(4, 0)] * 2


async def test_registrations_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "LIFETIME_S", 0.02)
    async with directory() as agent, announced(("127.0.0.1", agent.port), listens=False):
        await until(lambda: len(agent.heard) > 6)
        assert len(agent.known) == 2


async def test_a_directory_agent_that_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked again, and the same error is logged once."""
    monkeypatch.setattr(announcing, "RETRY_S", 0.01)
    async with directory() as agent:
        agent.error = 11
        async with announced(("127.0.0.1", agent.port), listens=False):
            await until(lambda: len(agent.heard) > 3)
            agent.error = 0
            await until(lambda: len(agent.known) == 2)
    assert caplog.text.count("the SLP agent refuses: busy") == 1


async def advertise(port: int, boot: int, host: str = "127.0.0.1", scopes: str = "lab,x") -> None:
    """A DAAdvert by multicast."""
    url = f"service:directory-agent://{host}".encode()
    body = bytes(2) + boot.to_bytes(4, "big")
    for each in (url, scopes.encode(), b"", b""):
        body += len(each).to_bytes(2, "big") + each
    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        multicast.choose_interface(sock, LOOPBACK[0])
        message = slp.encode(slp.DA_ADVERTISEMENT, 0, body + b"\0", slp.MULTICAST)
        await sock.sendto(message, (slp.GROUP, port))


async def test_a_directory_agent_that_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is registered with at once, and again when it has started anew; not if it has none of our
    scopes, or names another host than its own."""
    async with directory() as agent, announced() as announcer:

        async def connect(host: str, port: int) -> trio.SocketStream:
            assert (host, port) == ("127.0.0.1", announcer.port)
            return await trio.open_tcp_stream(host, agent.port)

        monkeypatch.setattr(announcing, "connect", connect)
        await advertise(announcer.port, 1, scopes="other")
        await advertise(announcer.port, 1, host="127.0.0.2")
        await advertise(announcer.port, 0)
        await advertise(announcer.port, 7)
        await until(lambda: len(agent.known) == 2)
        assert len(agent.heard) == 2
        agent.known.clear()
        await advertise(announcer.port, 8)
        await until(lambda: len(agent.known) == 2)
        await advertise(announcer.port, 8)
        assert len(agent.heard) == 4


async def test_a_directory_agent_knows_what_others_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that asks by multicast asks the directory agents that it hears of, too. Here is one
    on a host that has a service agent as well: of its own target that tells by multicast, of others
    the directory agent does when it is asked alone."""
    near, far = (f"service:iscsi:target://192.0.2.{host}/iqn.x:{host}" for host in (8, 9))
    asked_for: list[tuple[str, bool]] = []

    def answer(message: slp.Message) -> tuple[int, bytes]:
        request = slp.request_untrusted(message)
        by_multicast = bool(message.flags & slp.MULTICAST)
        asked_for.append((request.about, by_multicast))
        if message.function == slp.ATTRIBUTE_REQUEST:
            group = 4 if request.about == near else 5
            return slp.ATTRIBUTE_REPLY, slp.attribute_reply(0, f"(portal-group={group})")
        if request.about == slp.DIRECTORY_AGENT:
            return slp.DA_ADVERTISEMENT, slp.message_untrusted(golden.DA_ADVERT).body
        entries = [slp.UrlEntry(near if by_multicast else far, 9)]
        return slp.SERVICE_REPLY, slp.service_reply(0, entries)

    async with trio.open_nursery() as nursery:
        with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
            await sock.bind(("", 0))
            assert multicast.join(sock, LOOPBACK) == 1

            async def serve() -> None:
                while True:
                    data, peer = await sock.recvfrom(4096)
                    message = slp.message_untrusted(data)
                    function, body = answer(message)
                    await sock.sendto(slp.encode(function, message.xid, body), peer)

            nursery.start_soon(serve)
            # slp:// alone has no port
            monkeypatch.setattr("iserblk.url.SLP_PORT", sock.getsockname()[1])
            found = await asked("slp://")
            nursery.cancel_scope.cancel()
    assert sorted(found) == [
        TargetRecord("iqn.x:8", (Portal("192.0.2.8", 3260, 4),)),
        TargetRecord("iqn.x:9", (Portal("192.0.2.9", 3260, 5),)),
    ]
    assert set(asked_for) == {
        (slp.TARGET, True),
        (slp.DIRECTORY_AGENT, True),
        (slp.TARGET, False),
        (near, False),
        (far, False),
    }


@pytest.mark.parametrize(
    "odd",
    [
        "service:iscsi:target://192.0.2.8:70000/iqn.x:8",
        "service:printer://192.0.2.8/",
        "service:iscsi:target://192.0.2.8/iqn.x:\udcff",  # no UTF-8
    ],
)
async def test_a_url_that_cannot_be_read_does_not_hide_the_others(odd: str) -> None:
    """It is named."""
    good = "service:iscsi:target://192.0.2.9/iqn.x:9"

    async def serve(sock: trio.socket.SocketType) -> None:
        while True:
            data, peer = await sock.recvfrom(4096)
            message = slp.message_untrusted(data)
            function, body = slp.ATTRIBUTE_REPLY, slp.attribute_reply(0, "(portal-group=4)")
            if message.function == slp.SERVICE_REQUEST:
                function = slp.SERVICE_REPLY
                urls = [each.encode(errors="surrogateescape") for each in (odd, good)]
                entries = [bytes(1) + struct.pack(">HH", 9, len(url)) + url + bytes(1)
                           for url in urls]  # fmt: skip
                body = struct.pack(">HH", 0, len(entries)) + b"".join(entries)
            await sock.sendto(slp.encode(function, message.xid, body), peer)

    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, sock)
            with trio.fail_after(20):
                told = await ask_slp(parse_place(f"slp://127.0.0.1:{sock.getsockname()[1]}"))
            nursery.cancel_scope.cancel()
    assert told.targets == [TargetRecord("iqn.x:9", (Portal("192.0.2.9", 3260, 4),))]
    (words,) = told.left_out
    assert words.startswith("127.0.0.1:") and "service:" in words and words.isprintable()


async def test_no_interface_takes_multicast(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConnectFailed, match="name an agent's host"):
        try:
            await ask_slp(parse_place("slp://"), [])
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    announcer = SlpAnnouncer(["DEFAULT"], [], True, 0, [])
    announcer.open()
    announcer.close()
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "only unicast requests are answered" in caplog.text
