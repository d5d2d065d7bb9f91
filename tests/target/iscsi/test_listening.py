"""A target that takes connections of RDMA devices (fake ones) beside its TCP port."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import pytest
import trio

from iserblk.discovery.targets import find_targets
from iserblk.disk import aio
from iserblk.errors import (
    BadArgument,
    Busy,
    ConnectFailed,
    IserblkError,
    LoginError,
    NotSupported,
    PermissionDenied,
    TransportError,
)
from iserblk.initiator.connecting import verbs as connecting_verbs
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.rcap import seam, verbs
from iserblk.rcap.inprocess import Message
from iserblk.target import open_portals, places
from iserblk.target.iscsi import listening
from iserblk.target.scsi.device import LogicalUnit
from iserblk.url import parse_place, parse_url
from tests.support import logs
from tests.support.fabric import Fabric
from tests.support.target_here import serve
from tests.support.until import until
from tests.target.fake_store import FakeStore

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.RECONNECTED)

IQN = "iqn.2026-11.example:disk"
PATIENCE_S = 20.0  # only a test that fails ever waits that long
BLOCK = 512


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """Every listener that was begun is closed again at the end."""
    fabric = Fabric()
    monkeypatch.setattr(connecting_verbs, "provider", fabric)
    monkeypatch.setattr(listening, "make_listener", fabric.listener)
    monkeypatch.setattr(listening, "available", fabric.available)
    yield fabric
    assert not fabric.listeners


async def test_another_port_while_one_is_in_use() -> None:
    """Where that will do; else it is refused. (No other test has this address.)"""
    with socket.create_server(("127.0.99.7", 0)) as other:
        taken = other.getsockname()[1]
        (listener,) = await listening.listen_tcp(f"127.0.99.7:{taken}", or_another=True)
        host, port = listener.socket.getsockname()
        assert host == "127.0.99.7" and port not in (0, taken)
        await listener.aclose()
        with pytest.raises(Busy, match="the port is in use"):
            await listening.listen_tcp(f"127.0.99.7:{taken}")
    (listener,) = await listening.listen_tcp(f"127.0.99.7:{taken}", or_another=True)
    assert listener.socket.getsockname()[1] == taken
    await listener.aclose()


async def test_connections_within_the_machine_are_not_paced() -> None:
    (listener,) = await listening.listen_tcp("127.0.0.1:0")
    async with listener:
        algorithm = listener.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert algorithm.rstrip(b"\0") == b"reno"


@asynccontextmanager
async def serving(listen: str | Sequence[str] = "127.0.0.1:0") -> AsyncIterator[str]:
    """The URL of LUN 0. By exception: what ``serve`` raises."""
    send, receive = trio.open_memory_channel[str](1)
    luns = {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=BLOCK)}
    try:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(serve, listen, IQN, luns, send.send_nowait, rdma=True))
                yield f"{await receive.receive()}/0"
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("3260", "give HOST:PORT, e.g."),
        ("127.0.0.1:65536", "give HOST:PORT, e.g."),
        ("[::1:0", "an IPv6 address in brackets"),
        ("::1]:0", "an IPv6 address in brackets"),
        ("alice%hush-hush@127.0.0.1:0", "without a user or secret"),
    ],
)
async def test_what_is_no_address(listen: str, words: str) -> None:
    with pytest.raises(BadArgument, match=words) as caught:
        await listening.listen_tcp(listen)
    assert "hush" not in str(caught.value)


async def test_sessions_of_both_share_the_luns(fabric: Fabric) -> None:
    """Each session reads what the other wrote; each URL option leads to its own listener."""
    async with (
        serving() as url,
        aio.open_disks([url], {"rcap": "verbs"}) as by_verbs,
        aio.open_disks([url], {"rcap": "iwarp"}) as by_iwarp,
    ):
        one, other = by_verbs.disks["lun0"], by_iwarp.disks["lun0"]
        assert one.info.connection["provider"] == "verbs"
        assert other.info.connection["provider"] == "iwarp"
        buffer = bytearray(3 * 65536)
        await one.write(memoryview(b"v" * len(buffer)), BLOCK)
        await other.read_into(memoryview(buffer), BLOCK)
        assert buffer == b"v" * len(buffer)
        await other.write(memoryview(b"i" * len(buffer)), BLOCK)
        await one.read_into(memoryview(buffer), BLOCK)
        assert buffer == b"i" * len(buffer)


GROUPS = (
    "127.0.0.1:0,group=4,transport=tcp",
    "127.0.0.1:0,group=2,transport=iwarp+tcp",
    "127.0.0.1:0,group=1,transport=verbs",
)


@pytest.mark.logs(logs.FALLBACK, r": Traditional iSCSI is used: style=stream")
async def test_portal_groups_by_transport(fabric: Fabric) -> None:
    """One target with a group for RDMA devices, one for iWARP and TCP, one for TCP alone: each
    tells of all, what is written through each is read through the others, and each refuses what it
    is not for.

    proves: ISER-GEN-3.2-1, ISER-IB00-6.3-1, SYSTEM-24
    """
    async with serving(GROUPS) as url:
        assert url.startswith("iscsi://")
        found = (await find_targets(parse_place(url.removesuffix("/0")), Options(), False)).targets
        place = {way.portal.tag: f"127.0.0.1:{way.portal.port}/{IQN}/0" for way in found[0].ways}
        assert set(place) == {1, 2, 4}
        ways = {
            f"iser://{place[1]}?rcap=verbs": "verbs",
            f"iser://{place[2]}?rcap=iwarp": "iwarp",
            f"iser://{place[2]}?style=stream": "iwarp",
            f"iscsi://{place[2]}": "tcp",
            f"iscsi://{place[4]}": "tcp",
            # RDMAExtensions=No, and an MPA Request that is rejected
            f"iser://{place[4]}?style=stream": "tcp",
            f"iser://{place[4]}?rcap=iwarp&fallback=iscsi": "tcp",
        }
        async with AsyncExitStack() as stack:
            disks = [
                (await stack.enter_async_context(aio.open_disks([way], {}))).disks["lun0"]
                for way in ways
            ]
            assert [each.info.connection["provider"] for each in disks] == [*ways.values()]
            for number, writer in enumerate(disks, 1):
                await writer.write(memoryview(bytes([number]) * 65536), number * 65536)
                for reader in disks:
                    buffer = bytearray(65536)
                    await reader.read_into(memoryview(buffer), number * 65536)
                    assert buffer == bytes([number]) * 65536
        for way, words in (
            (f"iser://{place[4]}?rcap=verbs", "nobody listens there"),
            (f"iser://{place[4]}?rcap=iwarp", "the responder rejected the connection"),
            (f"iser://{place[1]}?rcap=iwarp", "refused"),
            (f"iscsi://{place[1]}", "refused"),
        ):
            with pytest.raises(IserblkError, match=words):
                async with aio.open_disks([way], {}):
                    pass


async def test_a_group_of_iser_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Discovery works on its byte stream, and Traditional iSCSI does not."""
    async with serving("127.0.0.1:0,transport=iwarp") as url:
        for style in ("cm", "stream"):
            async with aio.open_disks([url], {"style": style}) as disks:
                assert disks.disks["lun0"].info.connection["provider"] == "iwarp"
        plain = url.replace("iser", "iscsi", 1)
        (found,) = (
            await find_targets(parse_place(plain.removesuffix("/0")), Options(), False)
        ).targets
        assert found.name == IQN
        with pytest.raises(LoginError, match="error in the login"):
            await connect(parse_url(plain), Options())
        await until(lambda: "the portal group takes iSER only" in caplog.text)


@pytest.mark.parametrize(("windows", "reply"), [(True, 0x80), (False, 0xC0)])
async def test_send_with_invalidate_only_where_it_is_allowed(
    windows: bool, reply: int, fabric: Fabric
) -> None:
    fabric.windows = windows
    kinds: set[int] = set()

    def watch(message: Message) -> bool:
        kinds.add(message.kind)
        return True

    async with serving() as url:
        async with aio.open_disks([url], {"rcap": "verbs"}) as disks:
            ((ours, theirs),) = fabric.pairs
            theirs.intercept = watch
            await disks.disks["lun0"].read_into(memoryview(bytearray(BLOCK)), 0)
        assert ours.peer_private_data == bytes((reply, 0, 0, 0))
    assert (seam.SEND_INVALIDATE in kinds) is windows
    assert not kinds & {seam.SEND_SE, seam.SEND_SE_INVALIDATE}  # the device is of RoCE
    assert seam.RDMA_WRITE in kinds


async def test_reinstatement_reaches_across(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with serving() as url:
        first = await connect(parse_url(url), Options(rcap="verbs"))
        second = await connect(parse_url(url), Options(rcap="iwarp"))
        while first.error is None:
            await trio.lowlevel.wait_readable(first.fileno())
            first.progress(0.0)
        assert second.queue.take_now() is not None
        second.fail(TransportError("end of test"))


@pytest.mark.parametrize("windows", [True, False])
async def test_session_goes_from_device_to_device_and_back(windows: bool, fabric: Fabric) -> None:
    """Each connection gives the slots memory: here a device's, software iWARP's, a device's."""
    fabric.windows = windows
    async with serving() as url, aio.open_disks([url], {}) as disks:
        disk = disks.disks["lun0"]
        session = disk.core.session  # type: ignore[attr-defined]
        content = bytearray(65536)
        for turn, error in enumerate([None, ConnectFailed("the device is gone"), None]):
            fabric.error = error
            session.disconnect()
            for size in (BLOCK, 65536):  # with its command, and read by the target
                await disk.write(memoryview(bytes([turn + 1]) * size), turn * 65536)
            await disk.read_into(memoryview(content), turn * 65536)
            assert content == bytes([turn + 1]) * 65536
            provider = session.describe()["provider"]
            assert provider == ("iwarp" if error else "verbs")
            assert session.counts.reconnects == turn + 1
            if error:
                assert "the device is gone" in session.provider_reason
        assert len(fabric.pairs) == 3 and fabric.open == 0


async def test_a_peer_that_breaks_the_rules_ends_its_own_connection(fabric: Fabric) -> None:
    async with serving() as url:
        session = await connect(parse_url(url), Options(rcap="verbs"))
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(bytes(100))
        fabric.pairs[0][0].post([request])
        while session.error is None:
            await trio.lowlevel.wait_readable(session.fileno())
            session.progress(monotonic())
        async with aio.open_disks([url], {"rcap": "verbs"}):
            pass


async def test_too_many_connections(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The socket that listens takes one for the connection that it waits for.
    monkeypatch.setattr(places, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(places, "MAX_LOGINS", 1)
    monkeypatch.setattr(places, "SPARE", 0)
    async with serving() as url:
        async with aio.open_disks([url], {"rcap": "verbs"}):
            with pytest.raises(TransportError):
                await connect(parse_url(url), Options(rcap="verbs"))
        assert "refused, there are too many connections" in caplog.text
        async with aio.open_disks([url], {"rcap": "verbs"}):
            pass


async def test_a_device_that_is_taken_away(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target goes on to serve TCP."""
    monkeypatch.setattr(open_portals, "RDMA_TICK_S", 0.01)
    async with serving() as url:
        (listener,) = fabric.listeners.values()

        def broken(now: float) -> list[object]:
            raise TransportError("the device is gone")

        monkeypatch.setattr(listener, "progress", broken)
        await until(lambda: "the device is gone" in caplog.text)
        assert caplog.records[-1].levelno == logging.ERROR
        async with aio.open_disks([url], {"rcap": "iwarp"}):
            pass


@pytest.mark.parametrize("forbidden", [False, True])
async def test_no_devices(
    forbidden: bool, fabric: Fabric, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fabric.missing = "no luck"
    monkeypatch.setattr(verbs, "CM_DEVICE", str(tmp_path))
    monkeypatch.setattr(listening.os, "access", lambda path, mode: not forbidden)  # type: ignore[attr-defined]
    kind = PermissionDenied if forbidden else NotSupported
    with pytest.raises(kind, match="--rcap verbs: no luck; or leave out --rcap verbs"):
        async with serving():
            pass


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Busy("Errno 98"), "in use by rdma_cm, or belongs to an iWARP device"),
        (NotSupported("no device has this address"), "no device has this address"),
    ],
)
async def test_where_it_cannot_listen(error: IserblkError, words: str, fabric: Fabric) -> None:
    """A target that cannot listen leaves nothing behind: its port is free at once."""
    async with serving() as url:
        port = parse_url(url).port
    fabric.error = error
    for _ in range(2):
        with pytest.raises(type(error), match=words):
            async with serving(f"127.0.0.1:{port}"):
                pass
    with pytest.raises(ConnectFailed):
        await connect(parse_url(url), Options(rcap="iwarp"))
