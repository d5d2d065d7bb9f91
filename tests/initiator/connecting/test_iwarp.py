"""Connecting by software iWARP, beside a responder that is a plain socket."""

from __future__ import annotations

import socket

import pytest
import trio

from iserblk.errors import ConnectFailed, TransportError
from iserblk.initiator.connecting import iwarp, speakers
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.rcap.iwarp.mpa import MpaResponder
from iserblk.url import parse_url

GRACE_S = 0.2
NO_FAMILY = 250  # of addresses
WANTS_CRC = 0x40  # of the byte behind the key (RFC 5044 section 7.1)


@pytest.mark.parametrize(
    ("options", "asked"), [(Options(style="cm"), True), (Options(style="cm", mpa_crc=False), False)]
)
async def test_crcs_are_asked_for(
    options: Options, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user turns them off. proves: ISER-5.1-13"""
    monkeypatch.setattr(speakers, "ANSWER_S", 0.1)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    there = f"iser://127.0.0.1:{listener.socket.getsockname()[1]}/iqn.2026-11.example:disk/0"

    async def fail() -> None:
        with pytest.raises(TransportError):
            await connect(parse_url(there), options)

    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        async with await listener.accept() as stream:
            request = b""
            while len(request) < 17:
                request += await stream.receive_some()
        assert request[:16] == b"MPA ID Req Frame"
        assert bool(request[16] & WANTS_CRC) is asked


async def test_nothing_is_sent_before_the_peer_had_time_for_its_own_reply(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """Linux siw takes its socket over after it has sent the MPA Reply, and overlooks an FPDU that
    comes sooner."""
    monkeypatch.setattr(iwarp, "SETTLE_S", 3600)
    accepted = trio.Event()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def respond() -> None:
        async with listener, await listener.accept() as stream:
            responder = MpaResponder()
            while responder.receive_data(await stream.receive_some()) is None:
                pass
            responder.accept()
            await stream.send_all(responder.data_to_send())
            accepted.set()
            assert await stream.receive_some() == b""  # closed, and nothing was sent

    async def connect(port: int) -> None:
        addresses = await iwarp.resolve("127.0.0.1", port)
        await iwarp.connect_iwarp(
            addresses, "portal", 10, 10, private_data=b"", crc=True, segments=1, ird=1
        )
        raise AssertionError("connected before the pause was over")

    async with trio.open_nursery() as inner:
        nursery.start_soon(respond)
        inner.start_soon(connect, listener.socket.getsockname()[1])
        await accepted.wait()
        await trio.sleep(GRACE_S)
        inner.cancel_scope.cancel()


async def test_a_connection_within_the_machine_is_not_paced() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        addresses = await iwarp.resolve("127.0.0.1", listener.socket.getsockname()[1])
        with await iwarp.connect_tcp(addresses, "portal", 10) as sock:
            algorithm = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert algorithm.rstrip(b"\0") == b"reno"


async def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_over() -> None:
    """As ::1 where IPv6 is switched off: a name may have another address."""
    unknown = iwarp.Address(NO_FAMILY, ("::1", 1, 0, 0))
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        addresses = await iwarp.resolve("127.0.0.1", listener.socket.getsockname()[1])
        (await iwarp.connect_tcp([unknown, *addresses], "portal", 10)).close()
    with pytest.raises(ConnectFailed, match="cannot connect to portal: Address family not supp"):
        await iwarp.connect_tcp([unknown], "portal", 10)


async def test_a_process_that_is_stopped_while_the_target_answers(
    mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than MPA start-up may take: its silence is not the target's."""
    monkeypatch.setattr(iwarp, "SETTLE_S", 0)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    found = []

    async def connect(port: int) -> None:
        addresses = await iwarp.resolve("127.0.0.1", port)
        found.append(
            await iwarp.connect_iwarp(
                addresses, "portal", 10, 10, private_data=b"", crc=True, segments=1, ird=1
            )
        )

    async with listener, trio.open_nursery() as inner:
        inner.start_soon(connect, listener.socket.getsockname()[1])
        stream = await listener.accept()
        responder = MpaResponder()
        while responder.receive_data(await stream.receive_some()) is None:
            pass
        await trio.testing.wait_all_tasks_blocked()
        responder.accept()
        reply = responder.data_to_send()
        for part in (reply[:10], reply[10:]):
            mock_clock.jump(60)
            await stream.send_all(part)
            await trio.testing.wait_all_tasks_blocked()
    (pair,) = found
    pair.close()
    await stream.aclose()


async def test_a_result_is_not_lost_to_a_cancellation() -> None:
    """It has a connection: nobody else would close that."""

    async def running() -> str:
        scope.cancel()
        return "a connection"

    async def doubt() -> str:
        raise AssertionError("there is none")

    found = ""
    with trio.CancelScope() as scope:
        found = await iwarp.doubting(running(), doubt)
    assert found == "a connection"


async def test_a_cancellation_ends_what_is_doubted() -> None:
    async def running() -> str:
        scope.cancel()
        await trio.sleep_forever()
        return "never"

    async def doubt() -> str:
        return ""

    found = ""
    with trio.CancelScope() as scope:
        found = await iwarp.doubting(running(), doubt)
    assert not found and scope.cancelled_caught
