"""Which provider a connection gets, and how it is reported; on fake devices."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
import trio

from iserblk.datamover.iser import ConnectionFlags
from iserblk.datamover.iser_target import IserTarget
from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    NotSupported,
    PermissionDenied,
    TargetNotFound,
    TransportError,
)
from iserblk.initiator.connecting import reach as connecting
from iserblk.initiator.connecting import verbs as connecting_verbs
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.options import Options
from iserblk.rcap import seam, verbs
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.login import LOGIN_SLOTS
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.url import parse_url
from tests.support.fabric import Device, Fabric, FakeListener
from tests.support.until import until
from tests.target.fake_store import FakeStore
from tests.target.owner import Owner
from tests.target.test_server import serving

IQN = "iqn.2026-11.example:disk"
AUTO, VERBS, IWARP = (Options(rcap=name, queue_depth=4) for name in ("auto", "verbs", "iwarp"))
PATIENCE_S = 20.0  # only a test that fails ever waits that long


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fabric]:
    """A fake fabric; checks that every connecting step is closed at the end."""
    fabric = Fabric()
    monkeypatch.setattr(connecting_verbs, "provider", fabric)
    yield fabric
    assert fabric.open == 0


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which TCP connections are refused."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def url(port: int, host: str = "127.0.0.1") -> str:
    return f"iser://{host}:{port}/{IQN}/0"


@asynccontextmanager
async def target(fabric: Fabric, port: int, **login: Any) -> AsyncIterator[FakeListener]:
    """A target that only the fabric reaches: no socket listens. ``login``: of its config."""
    listener = fabric.listener(
        "127.0.0.1",
        port,
        receive_size=8268,
        receives=LOGIN_SLOTS,
        ird=16,
        reply=lambda request: request[:4],
    )
    device = DeviceServer({0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)}, IQN)
    tsihs = count(1)

    async def serve(pair: Device) -> None:
        allowed = ConnectionFlags.unpack(pair.peer_private_data).send_invalidate
        connection = TargetConnection(
            IserTarget(pair, allowed),
            device,
            LoginTarget(LoginTargetConfig(IQN, next(tsihs), **login)),
            Owner(),
            portal=f"127.0.0.1:{port}",
        )
        with suppress(TransportError):
            while not connection.done:
                await trio.lowlevel.wait_readable(pair.fileno())
                connection.progress(0.0)

    async def listen() -> None:
        while True:
            await trio.lowlevel.wait_readable(listener.fileno())
            for pair in listener.progress(0.0):
                nursery.start_soon(serve, pair)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            yield listener
            nursery.cancel_scope.cancel()
    listener.close()


async def use(session: Session) -> dict[str, object]:
    """What the session says of itself; it is logged out afterwards."""
    about = session.describe()
    driver = TrioDriver(session)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        await driver.log_out()
        nursery.cancel_scope.cancel()
    assert isinstance(session.error, ConnectionLost)
    return about


@pytest.mark.parametrize(
    ("options", "reason"),
    [(AUTO, "rcap=auto, and RDMA device fake0 leads there"), (VERBS, "asked for with rcap")],
    ids=["auto", "verbs"],
)
async def test_verbs_where_a_device_leads_there(
    options: Options, reason: str, fabric: Fabric, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing listens there for TCP: the queue pair is all there is. proves: ISER-7145-2.1-2"""
    caplog.set_level(logging.INFO)
    async with target(fabric, port):
        about = await use(await connect(parse_url(url(port)), options))
    assert (about["provider"], about["provider_reason"]) == ("verbs", reason)
    assert f"127.0.0.1:{port}: connected by verbs: {reason}" in caplog.text


@pytest.mark.parametrize(("windows", "flags"), [(True, 0x80), (False, 0xC0)])
async def test_flags_tell_whether_there_are_windows(
    windows: bool, flags: int, fabric: Fabric, port: int
) -> None:
    """The target may use Send with Invalidate only if the initiator has memory windows: it would
    end a memory region."""
    fabric.windows = windows
    async with target(fabric, port):
        about = await use(await connect(parse_url(url(port)), VERBS))
    ((_, theirs),) = fabric.pairs
    assert theirs.peer_private_data[:4] == bytes((flags, 0, 0, 0))
    assert about["mode"] == ("window" if windows else "region")


async def test_without_a_device_nothing_is_tried(fabric: Fabric, port: int) -> None:
    fabric.missing = "there is no RDMA device"
    with pytest.raises(ConnectFailed, match="refused; is the target listening there") as error:
        await connect(parse_url(url(port)), AUTO)
    assert fabric.log == []
    assert "RDMA device" not in str(error.value)


async def test_iwarp_never_looks_at_devices(fabric: Fabric, port: int) -> None:
    with pytest.raises(ConnectFailed):
        await connect(parse_url(url(port)), IWARP)
    assert fabric.log == []


# shows: SYSTEM-20
@pytest.mark.parametrize(
    ("routes", "error", "words"),
    [
        (False, None, "rcap=auto, and no such device"),
        (True, None, "RDMA device fake0 leads there, but: rejected: nobody listens there"),
        (True, NotSupported("memlock is too small"), "fake0 leads there, but: memlock is too"),
    ],
    ids=["no route", "rejected", "memlock"],
)
async def test_auto_falls_back_to_software_iwarp(
    routes: bool,
    error: IserblkError | None,
    words: str,
    fabric: Fabric,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fabric.routes, fabric.error = routes, error
    caplog.set_level(logging.INFO)
    async with serving() as there:
        about = await use(await connect(parse_url(there), AUTO))
    assert about["provider"] == "iwarp"
    reason = str(about["provider_reason"])
    assert reason.startswith("rcap=auto, and ") and words in reason
    assert reason in caplog.text


async def test_both_ways_fail(fabric: Fabric, port: int) -> None:
    """One error names both failures; its class is that of the software iWARP failure."""
    fabric.error = NotSupported("memlock is too small")
    with pytest.raises(ConnectFailed, match=r"Connection refused.*fake0.*memlock is too small"):
        await connect(parse_url(url(port)), AUTO)


async def test_no_fallback_when_verbs_were_asked_for(fabric: Fabric, port: int) -> None:
    with pytest.raises(ConnectFailed, match="nobody listens there by rdma_cm"):
        await connect(parse_url(url(port)), VERBS)


@pytest.mark.parametrize(("forbidden", "kind"), [(False, NotSupported), (True, PermissionDenied)])
async def test_verbs_where_there_are_none(
    forbidden: bool,
    kind: type[IserblkError],
    fabric: Fabric,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric.missing = "no luck with /dev/infiniband"
    monkeypatch.setattr(verbs, "CM_DEVICE", "/dev/null")
    monkeypatch.setattr(os, "access", lambda path, mode: not forbidden)
    with pytest.raises(kind, match="rcap=verbs: no luck with /dev/infiniband; or say rcap=iwarp"):
        await connect(parse_url(url(port)), VERBS)


async def test_a_portal_that_never_answers(
    fabric: Fabric, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric.silent = True
    monkeypatch.setattr(connecting_verbs, "GRACE_S", 0.0)
    monkeypatch.setattr(connecting, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(connecting, "ROUTE_TIMEOUT_S", 0.05)
    with pytest.raises(ConnectTimeout, match="did not answer by rdma_cm within"):
        await connect(parse_url(url(port)), VERBS)
    with pytest.raises(ConnectFailed, match="Connection refused"):
        await connect(parse_url(url(port)), AUTO)


async def test_every_address_is_tried(
    fabric: Fabric, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(host: str, port: int) -> list[connecting.Address]:  # type: ignore[name-defined]
        dead = connecting.Address(socket.AF_INET, ("127.0.0.9", port + 1))  # type: ignore[attr-defined]
        return [dead, connecting.Address(socket.AF_INET, ("127.0.0.1", port))]  # type: ignore[attr-defined]

    monkeypatch.setattr(connecting, "resolve", resolve)
    for options in (AUTO, VERBS):
        async with target(fabric, port):
            about = await use(await connect(parse_url(url(port)), options))
        assert about["provider"] == "verbs"
    hosts = [host for what, host, *_ in fabric.log if what == "connect"]
    assert hosts == ["127.0.0.9", "127.0.0.1"] * 2


async def test_cancelled_while_connecting(fabric: Fabric, port: int) -> None:
    fabric.silent = True
    with trio.move_on_after(0.05) as scope:
        await connect(parse_url(url(port)), AUTO)
    assert scope.cancelled_caught


async def test_no_such_host(fabric: Fabric) -> None:
    with pytest.raises(HostNotFound):
        await connect(parse_url(url(3260, "no.such.host.invalid")), VERBS)
    assert fabric.log == []


def test_link_local_addresses_name_their_interface() -> None:
    address = connecting_verbs.Address(socket.AF_INET6, ("fe80::1", 3260, 0, 2))  # type: ignore[attr-defined]
    assert connecting_verbs.numeric(address) == ("fe80::1%2", 3260)
    address = connecting_verbs.Address(socket.AF_INET6, ("fd00::1", 3260, 0, 0))  # type: ignore[attr-defined]
    assert connecting_verbs.numeric(address) == ("fd00::1", 3260)


# -- connections that come to nothing --------------------------------------------------------------


def check_closed(fabric: Fabric) -> None:
    """Our end of the only connection is closed, and the peer has heard of it."""
    ((ours, theirs),) = fabric.pairs
    assert ours.fileno() == -1
    if theirs.fileno() >= 0:
        with pytest.raises(ConnectionLost):
            while theirs.progress(0.0):
                pass


async def test_a_connection_that_gets_no_resources_is_closed(fabric: Fabric, port: int) -> None:
    """Allocate_Connection_Resources fails at the initiator: the call says so, no Login Request
    leaves, and the connection ends at both ends. With memory it succeeds.

    proves: ISER-3.1.4-3, ISER-3.3-3, ISER-5.1.1-10, ISER-10.1.3.1-1, ISER-10.1.3.1-2
    proves: ISER-10.1.3.1-5
    """
    async with target(fabric, port) as listener:
        fabric.has_memory = False
        listener.deaf = True
        with pytest.raises(NotSupported, match="no registered memory"):
            await connect(parse_url(url(port)), VERBS)
        ((_, theirs),) = fabric.pairs
        assert all(each.kind > seam.SEND_SE_INVALIDATE for each in theirs.inbox)
        check_closed(fabric)
        fabric.has_memory, listener.deaf = True, False
        await use(await connect(parse_url(url(port)), VERBS))


async def test_a_connection_that_is_lost_in_its_login_is_closed(fabric: Fabric, port: int) -> None:
    """The target goes away when it has the Login Request: what was allocated before is given back.

    proves: ISER-10.1.1.1-2
    """
    async with target(fabric, port) as listener:
        listener.deaf = True
        async with trio.open_nursery() as nursery:

            async def leave() -> None:
                await until(lambda: fabric.pairs and fabric.pairs[0][1].inbox)
                ours, theirs = fabric.pairs[0]
                assert ours.posted and theirs.inbox[0].data[28] == bhs.LOGIN_REQUEST | bhs.IMMEDIATE
                theirs.close()

            nursery.start_soon(leave)
            with pytest.raises(ConnectionLost, match="during login"):
                await connect(parse_url(url(port)), VERBS)
        check_closed(fabric)


async def test_a_refused_login_closes_the_connection(fabric: Fabric, port: int) -> None:
    """A status class other than success: the initiator ends the connection.

    proves: ISER-10.1.4.6-4
    """
    async with target(fabric, port):
        with pytest.raises(TargetNotFound):
            await connect(parse_url(url(port).replace("disk", "another")), VERBS)
        check_closed(fabric)
