"""What a target tells of itself, while peers make it hold memory, connections and logins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import AUTHENTICATION_FAILURE
from iserblk.metrics.target_reading import (
    MOST_ADDRESSES,
    MOST_SESSIONS,
    OTHER,
    AddressReading,
    SessionReading,
    TargetReading,
)
from iserblk.newcomers import Newcomers
from iserblk.rcap.inprocess import memory_pair
from iserblk.scsi import luns
from iserblk.target import figures
from iserblk.target import server as server_module
from iserblk.target.attempts import FREE, Attempts
from iserblk.target.figures import Limits, Logins, Parts, read_figures
from iserblk.target.iscsi.buffers import TOTAL, BufferPool, DataBudget
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.keeping import KeptConnections
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.url import Url, parse_url
from tests.iscsi import logins
from tests.support.until import until
from tests.target.fake_store import FakeStore
from tests.target.test_server import (
    IQN,
    PATIENCE_S,
    WHO,
    YES,
    SlowStore,
    block_write,
    log_in,
    pdus,
    serving,
)
from tests.target.test_server_floods import ACCOUNTS, SECRETS, attempt, connect, said
from tests.target.test_server_many import answered
from tests.target.test_server_several import RECOVERY, command, over_tcp

KIB = 1 << 10
UNASKED = [("InitialR2T", "No"), ("ImmediateData", "Yes"), ("FirstBurstLength", "65536")]


class Look:
    """``figures``: what a target counts, now."""

    def __init__(self) -> None:
        self._figures: Callable[[], TargetReading] | None = None

    async def watch(self, figures: Callable[[], TargetReading]) -> None:
        self._figures = figures

    @property
    def now(self) -> TargetReading:
        assert self._figures is not None
        return self._figures()

    async def until(self, condition: Callable[[TargetReading], object]) -> TargetReading:
        await until(lambda: self._figures is not None and condition(self.now))
        return self.now


def with_data(header: bytes, data: bytes) -> bytes:
    whole = bytearray(header + data)
    bhs.LENGTHS.pack_into(whole, bhs.LENGTHS_OFFSET, len(data))
    return bytes(whole)


def long_write(cmd_sn: int) -> bytes:
    """A WRITE of 64 KiB, all of which is to come unasked, and of which 512 bytes come."""
    cdb = (b"\x2a" + bytes(7) + b"\x80").ljust(16, b"\0")  # 128 blocks
    command = pdu.ScsiCommand(
        flags=bhs.FLAG_WRITE, lun=luns.encode(0), itt=cmd_sn, edtl=64 * KIB, cmd_sn=cmd_sn,
        exp_stat_sn=0, cdb=cdb,
    )  # fmt: skip
    return with_data(command.pack(), bytes(512))


async def session(url: Url, pairs: logins.Pairs) -> trio.SocketStream:
    """Logged in over TCP, and past its unit attention; the next CmdSN is 101."""
    stream, head = await over_tcp(url, logins.request(pairs))
    assert pdu.LoginResponse.unpack_from(head).status == 0
    await stream.send_all(command(100))
    await pdus(stream, 1)
    return stream


async def test_every_field_of_a_reading_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field has a default, for those that read: one without a value here would always be 0."""
    given: set[str] = set()

    def reading(**values: Any) -> TargetReading:
        given.update(values)
        return TargetReading(**values)

    monkeypatch.setattr(figures, "TargetReading", reading)
    look = Look()
    async with serving(watch=look.watch):
        await look.until(lambda now: now.target)
    missing = {field.name for field in fields(TargetReading)} - given
    assert not missing, f"iserblk/target/figures.py gives no value of {missing}"


async def test_unsolicited_data_that_is_outstanding() -> None:
    """It is in the account of all, of its address and of its session; and in none, when the peer
    has gone. What has been counted stays."""
    look = Look()
    async with serving(watch=look.watch) as text:
        url = parse_url(text)
        streams = []
        for number in range(2):
            who = [("InitiatorName", f"iqn.x:{number}"), WHO[1]]
            streams.append(await session(url, who + UNASKED))
        before = look.now
        assert (before.sessions, before.connections, before.logins) == (2, 2, 2)
        assert (before.memory, before.addresses, before.largest_session) == (0, (), 0)
        for stream, commands in zip(streams, (1, 3), strict=True):
            for number in range(commands):
                await stream.send_all(long_write(101 + number))
        held = await look.until(lambda now: now.in_flight == 4)
        assert held.memory == 4 * 64 * KIB
        assert held.addresses == (AddressReading("127.0.0.1", held.memory),)
        assert (held.address_count, held.largest_session) == (1, 3 * 64 * KIB)
        assert held.commands == 2 + 4
        for stream in streams:
            await stream.aclose()
        after = await look.until(lambda now: not now.connections)
        assert (after.memory, after.addresses, after.sessions, after.in_flight) == (0, (), 0, 0)
        assert (after.commands, after.logins) == (6, 2)


async def test_what_comes_before_its_turn_is_its_address_s() -> None:
    look = Look()
    async with serving(watch=look.watch) as text:
        url = parse_url(text)
        stream = await session(url, [*WHO, ("MaxConnections", "4")])
        ping = pdu.NopOut(opcode=bhs.NOP_OUT, itt=1, cmd_sn=102, exp_stat_sn=0).pack()
        await stream.send_all(with_data(ping, bytes(512)))
        held = await look.until(lambda now: now.memory)
        assert held.memory == held.memory_beside == 512 + bhs.BHS_LENGTH
        assert held.addresses == (AddressReading("127.0.0.1", held.memory),)
        assert held.largest_session == held.memory
        await stream.send_all(block_write(101, bytes(512), False))
        await pdus(stream, 2)
        assert look.now.memory_beside == 0 and look.now.commands == 3
        await stream.aclose()


async def test_a_lost_session_that_is_kept() -> None:
    look = Look()
    async with serving(watch=look.watch) as text:
        url = parse_url(text)
        stream = await session(url, WHO + RECOVERY + UNASKED)
        await stream.send_all(long_write(101))
        await look.until(lambda now: now.in_flight)
        assert look.now.kept == 0
        await stream.aclose()
        kept = await look.until(lambda now: now.kept)
        assert (kept.sessions, kept.connections, kept.in_flight) == (1, 1, 1)
        assert kept.kept_memory == 512 and kept.memory == 4 * KIB  # the smallest buffer
        assert kept.addresses == (AddressReading("127.0.0.1", 4 * KIB),)
        again = await session(url, WHO)  # reinstates it
        gone = await look.until(lambda now: not now.kept)
        assert (gone.kept_memory, gone.memory, gone.commands) == (0, 0, 3)
        await again.aclose()


async def test_a_half_open_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iserblk.target.places.MAX_LOGINS", 4)
    look = Look()
    async with serving(watch=look.watch) as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        session = await open_.enter_async_context(await connect(url))
        await log_in(session)
        for _ in range(12):
            await open_.enter_async_context(await connect(url))
            await wait_all_tasks_blocked()
        flooded = await look.until(lambda now: now.logins_given_up == 8 and now.connections == 1)
        assert (flooded.logins_unfinished, flooded.login_limit) == (4, 4)
        assert (flooded.sessions, flooded.logins, flooded.memory) == (1, 1, 0)
        assert not flooded.addresses  # nobody who has not logged in is named


@pytest.mark.logs("authentication failed")
async def test_secrets_that_are_guessed(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    look = Look()
    async with serving(accounts=ACCOUNTS, watch=look.watch) as text:
        url = parse_url(text)
        for _ in range(FREE):
            assert await attempt(url, "alice", "a-wrong-secret") == AUTHENTICATION_FAILURE
        failed = await look.until(lambda now: now.logins_refused == FREE)
        assert (failed.attempts_failed, failed.attempts_delayed) == (FREE, 0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, url, "alice", SECRETS["alice"])
            await said("CHAP waits for 1 s", caplog)
            assert (look.now.attempts_failed, look.now.attempts_delayed) == (FREE, 1)
            nursery.cancel_scope.cancel()


async def test_a_disk_that_does_not_answer() -> None:
    store = SlowStore()
    look = Look()
    async with serving(store, FakeStore(1 << 20), watch=look.watch) as text:
        stream = await session(parse_url(text), WHO)
        assert [(each.lun, each.threads, each.waiting) for each in look.now.luns] == [
            (0, 0, 0),
            (1, 0, 0),
        ]
        await stream.send_all(block_write(101, bytes(512), True))
        try:
            await look.until(lambda now: now.luns[0].threads == 1 and not now.luns[1].threads)
        finally:
            store.go.set()
        await pdus(stream, 1)
        await look.until(lambda now: not now.luns[0].threads)
        await stream.aclose()


def parts(budget: DataBudget) -> Parts:
    return Parts(budget, Newcomers(), Attempts(), KeptConnections(), Logins())


def test_of_1000_addresses_few_are_named() -> None:
    budget = DataBudget()
    pools = [BufferPool(budget, f"10.0.{n // 250}.{n % 250}") for n in range(1000)]
    for pool in pools:
        pool.take(4 * KIB)
    pools[777].take(64 * KIB)
    pools[778].account(100)
    found = read_figures(IQN, "", parts(budget), Limits(1, 1), [], 0, [])
    assert len(found.addresses) == MOST_ADDRESSES + 1 and found.address_count == 1000
    assert found.addresses[0] == AddressReading("10.0.3.27", 68 * KIB)
    assert found.addresses[1] == AddressReading("10.0.3.28", 4 * KIB + 100)
    assert found.addresses[-1].address == OTHER
    assert sum(each.memory for each in found.addresses) == found.memory
    assert found.largest_session == 68 * KIB
    assert (found.memory_limit, found.address_limit) == (TOTAL, TOTAL // 2)
    for pool in pools:
        pool.close()


def test_of_100_sessions_64_are_named() -> None:
    budget = DataBudget()
    device = DeviceServer({}, IQN)
    sessions = [TargetSession(device, budget, f"10.0.0.{number}") for number in range(100)]
    for number, each in enumerate(sessions):
        each.initiator_name = f"iqn.x:{number}"
    sessions[1].done = True
    found = read_figures(IQN, "", parts(budget), Limits(1, 1), sessions, 0, [])
    assert (found.sessions, len(found.named_sessions)) == (99, MOST_SESSIONS)
    assert found.named_sessions[:2] == (
        SessionReading("iqn.x:0", "10.0.0.0"),
        SessionReading("iqn.x:2", "10.0.0.2"),
    )


async def test_the_addresses_of_an_ipv6_network_count_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One machine may use all of them: they have one share of the memory together."""
    made: list[TargetConnection] = []

    def make(*arguments: Any, **more: Any) -> TargetConnection:
        made.append(TargetConnection(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(server_module, "TargetConnection", make)
    server = server_module.TargetServer(
        IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)}
    )
    ends = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for number in (1, 2):
                ours, theirs = memory_pair()
                ends.append(ours)
                ours.post_receive(8)
                peer = f"[2001:db8::{number}]:9"
                nursery.start_soon(server.serve_queue_pair, theirs, "portal", peer)
                message = logins.request(WHO + YES, isid=b"\x80abcd" + bytes([number]))
                await answered(ours, bhs.LOGIN_RESPONSE, message)
                made[-1].session.pool.take(4 * KIB)
            assert server.figures("").addresses == (AddressReading("2001:db8::/64", 8 * KIB),)
            nursery.cancel_scope.cancel()
    for ours in ends:
        ours.close()
    assert not server.figures("").addresses
