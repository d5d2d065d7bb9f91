"""Agents that answer too much, too slowly, or not to the end, and a client that comes to its end.

The clock is not the real one: what would take hours takes none."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from iserblk.discovery import multicast, slp, slp_client
from iserblk.discovery.slp_client import AGENTS_S, GROUPS_S, MULTICAST_S, ask_slp
from iserblk.iscsi.send_targets import Portal
from iserblk.url import parse_place
from tests.vectors import slp as golden

LOOPBACK = [socket.if_nametoindex("lo")]
Answer = Callable[[slp.Message], tuple[int, bytes] | None]


@pytest.fixture
def autojump_clock() -> MockClock:
    """Datagrams on the loopback interface have time to come."""
    return MockClock(autojump_threshold=0.05)


def services(count: int) -> tuple[int, bytes]:
    entries = [
        slp.UrlEntry(f"service:iscsi:target://192.0.2.8:{port}/iqn.x:8", 9)
        for port in range(1, count + 1)
    ]
    return slp.SERVICE_REPLY, slp.service_reply(0, entries)


async def serve(sock: trio.socket.SocketType, answer: Answer) -> None:
    while True:
        data, peer = await sock.recvfrom(4096)
        message = slp.message_untrusted(data)
        found = answer(message)
        if found is not None:
            await sock.sendto(slp.encode(found[0], message.xid, found[1]), peer)


def tells_no_groups(message: slp.Message) -> tuple[int, bytes] | None:
    return services(300) if message.function == slp.SERVICE_REQUEST else None


async def test_portal_groups_that_are_never_told(autojump_clock: MockClock) -> None:
    """The portals can be used without."""
    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, sock, tells_no_groups)
            told = await ask_slp(parse_place(f"slp://127.0.0.1:{sock.getsockname()[1]}"))
            nursery.cancel_scope.cancel()
    ((name, portals),) = told.targets
    assert name == "iqn.x:8" and set(portals) == {
        Portal("192.0.2.8", port, None) for port in range(1, 301)
    }
    assert trio.current_time() <= GROUPS_S + 1


async def test_more_portals_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slp_client, "MAXIMUM_RECORDS", 3)

    def answer(message: slp.Message) -> tuple[int, bytes]:
        if message.function == slp.SERVICE_REQUEST:
            return services(5)
        return slp.ATTRIBUTE_REPLY, slp.attribute_reply(0, "(portal-group=4)")

    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("127.0.0.1", 0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, sock, answer)
            told = await ask_slp(parse_place(f"slp://127.0.0.1:{sock.getsockname()[1]}"))
            nursery.cancel_scope.cancel()
    ((_, portals),) = told.targets
    assert len(portals) == 3 and told.left_out == ["portals beyond 3"]


async def test_directory_agents_that_do_not_answer(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any host can claim to be some hundreds of them. Each is named."""
    count = 99
    advertisement = slp.DA_ADVERTISEMENT, slp.message_untrusted(golden.DA_ADVERT).body

    with trio.socket.socket(type=socket.SOCK_DGRAM) as sock:
        await sock.bind(("", 0))
        assert multicast.join(sock, LOOPBACK) == 1
        port = sock.getsockname()[1]
        monkeypatch.setattr("iserblk.url.SLP_PORT", port)  # slp:// alone has no port

        async def claim() -> None:
            said = False
            while True:
                data, peer = await sock.recvfrom(4096)
                message = slp.message_untrusted(data)
                if slp.request_untrusted(message).about != slp.DIRECTORY_AGENT or said:
                    continue
                said = True
                for number in range(1, count + 1):
                    with socket.socket(type=socket.SOCK_DGRAM) as other:
                        other.bind((f"127.0.1.{number}", 0))
                        other.sendto(slp.encode(advertisement[0], message.xid, advertisement[1]),
                                     peer)  # fmt: skip

        async with trio.open_nursery() as nursery:
            nursery.start_soon(claim)
            told = await ask_slp(parse_place("slp://"), LOOPBACK)
            nursery.cancel_scope.cancel()
    assert told.targets == [] and len(told.left_out) == count
    assert trio.current_time() <= MULTICAST_S + AGENTS_S + 1
