"""Connections of the target's server: what ends them, and what the peer sees of it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from iserblk.datamover.iser import HEADER_LENGTH, ControlHeader
from iserblk.disk.aio import TrioDisk
from iserblk.errors import ConnectionLost, NotSupported, TransportError
from iserblk.initiator.connecting.iwarp import connect_iwarp, resolve
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_initiator import LoginInitiator
from iserblk.iscsi.login_target import (
    CANNOT_INCLUDE,
    SESSION_DOES_NOT_EXIST,
    TOO_MANY_CONNECTIONS,
    LoginTarget,
    LoginTargetConfig,
)
from iserblk.loop import busy_polling
from iserblk.loop.busy_polling import HITS
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, memory_pair
from iserblk.rcap.iwarp.mpa import MpaInitiator
from iserblk.scsi import luns
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.server import TargetServer, Watch
from iserblk.url import Url, parse_url
from tests.initiator.fake import FakeDriver
from tests.initiator.peer import disk_of
from tests.iscsi import logins
from tests.support.target_here import serve
from tests.support.until import until
from tests.target.fake_store import FakeStore

IQN = "iqn.2026-11.example:disk"
HEAD = b"\x10" + bytes(HEADER_LENGTH - 1)
PATIENCE_S = 20.0  # only a test that fails ever waits that long


@asynccontextmanager
async def serving(
    *stores: FakeStore,
    busy_poll_us: int = 0,
    header: int = HEADER_LENGTH,
    logout_s: int = 0,
    accounts: Accounts | None = None,
    watch: Watch | None = None,
) -> AsyncIterator[str]:
    """The URL of LUN 0 of a target in this process; one LUN for each store."""
    send, receive = trio.open_memory_channel[str](1)
    units = {
        lun: LogicalUnit(store, serial=f"S{lun}", block=512)
        for lun, store in enumerate(stores or [FakeStore(1 << 20)])
    }
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            target = partial(
                serve,
                busy_poll_us=busy_poll_us,
                header=header,
                logout_s=logout_s,
                accounts=accounts,
                watch=watch,
            )
            nursery.start_soon(target, "127.0.0.1:0", IQN, units, send.send_nowait)
            yield f"{await receive.receive()}/0"
            nursery.cancel_scope.cancel()


async def ended(session: Session) -> None:
    while session.error is None:
        await trio.lowlevel.wait_readable(session.fileno())
        session.progress(monotonic())


# An Extended CDB AHS of 0 bytes: the iSER layer finds nothing wrong with the message.
BAD_AHS = bhs.SCSI_COMMAND_FIELDS.pack(1, 0x81, 1 << 24, bytes(8), 9, 0, 1, 0, bytes(16)) + bytes(4)


# shows: SYSTEM-44
@pytest.mark.parametrize(
    "message",
    [b"\x40" + bytes(75), b"\x20" + bytes(75), HEAD + bytes(47), HEAD + BAD_AHS],
    ids=["reserved opcode", "a Hello", "short", "a bad AHS"],
)
async def test_a_format_error_ends_the_connection(message: bytes) -> None:
    """The error may be iSER's or iSCSI's; the target closes, and serves others.

    proves: ISER-10.1.3.3-3, ISER-10.1.3.3-4, ISER-10.1.4.1-1
    """
    async with serving() as url:
        session = await connect(parse_url(url), Options())
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(message)
        session.queue.connection.datamover.qp.post([request])  # type: ignore[attr-defined]
        await ended(session)
        assert isinstance(session.error, TransportError)
        other = await connect(parse_url(url), Options())
        assert other.error is None
        other.fail(TransportError("end of test"))


async def test_a_format_error_while_the_loop_is_kept_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of the connection has not received it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(busy_polling, "CROWDED_S", 3600.0)  # however busy this machine is
    async with serving(busy_poll_us=60_000_000) as url:
        session = await connect(parse_url(url), Options(busy_poll_us=0))
        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            disk = TrioDisk(disk_of(session), driver)
            for _ in range(HITS + 2):
                await disk.read_into(memoryview(bytearray(512)), 0)
            request = seam.WorkRequest(seam.SEND_SE)
            request.data = memoryview(HEAD + bytes(47))
            session.queue.connection.datamover.qp.post([request])  # type: ignore[attr-defined]
            with pytest.raises(TransportError):
                await disk.read_into(memoryview(bytearray(512)), 0)
        other = await connect(parse_url(url), Options())
        assert other.error is None
        other.fail(TransportError("end of test"))


async def test_a_violation_found_when_a_thread_is_done_ends_the_connection(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A READ from the disk that advertised no STag for its data: told in words, and no bug."""
    caplog.set_level("INFO")
    # No unit attention is in the way.
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    store = FakeStore(1 << 20)
    store.cached = False
    async with serving(store) as url:
        session = await connect(parse_url(url), Options())
        cdb = bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0)).ljust(16, b"\0")
        cmd_sn = session.queue._cmd_sn
        read = bhs.SCSI_COMMAND_FIELDS.pack(1, 0xC1, 0, bytes(8), 99, 512, cmd_sn, 0, cdb)
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(HEAD + read)
        session.queue.connection.datamover.qp.post([request])  # type: ignore[attr-defined]
        await ended(session)
        other = await connect(parse_url(url), Options())
        assert other.error is None
        other.fail(TransportError("end of test"))
    assert "advertised no Read STag" in caplog.text
    assert "internal error" not in caplog.text


async def test_a_bug_that_a_thread_meets_ends_its_connection_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its traceback is in the log, and nothing waits for the command for ever."""

    class Broken(FakeStore):
        def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
            if nowait or not offset:
                return not nowait and super().read_into(buffer, offset, nowait)
            raise ZeroDivisionError

    async with serving(Broken(1 << 20)) as url:
        session = await connect(parse_url(url), Options())
        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            disk = TrioDisk(disk_of(session), driver)
            buffer = memoryview(bytearray(512))
            await disk.read_into(buffer, 0)
            with pytest.raises(TransportError):
                await disk.read_into(buffer, 512)
        other = await connect(parse_url(url), Options())
        assert other.error is None
        other.fail(TransportError("end of test"))
    assert "internal error, connection closed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_login_with_the_same_name_ends_the_session_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reinstatement: an end without Logout. proves: ISER-5.2.3.1-1, ISER-5.2.3.2-5"""
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with serving() as url:
        first = await connect(parse_url(url), Options())
        second = await connect(parse_url(url), Options())
        await ended(first)
        assert isinstance(first.error, TransportError)
        slot = second.queue.take_now()
        assert isinstance(slot, TaskSlot) and second.error is None
        second.fail(TransportError("end of test"))


class SlowStore(FakeStore):
    """A durable write begins, and ends when it is let go."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.begun = threading.Event()
        self.go = threading.Event()

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if durable:
            self.begun.set()
            assert self.go.wait(PATIENCE_S)
        return super().write(data, offset, durable, nowait)


async def pdus(stream: trio.SocketStream, count: int) -> list[bytes]:
    """The headers of the next PDUs."""
    received, heads = b"", []  # type: ignore[var-annotated]
    while len(heads) < count:
        while len(received) < 48 or len(received) < 48 + (int.from_bytes(received[5:8]) + 3 & ~3):
            received += await stream.receive_some()
        heads.append(received[:48])
        received = received[48 + (int.from_bytes(received[5:8]) + 3 & ~3) :]
    return heads


async def log_in(stream: trio.SocketStream, name: str = "iqn.x:y") -> int:
    """Over TCP, always with the same ISID; returns the CmdSN to go on with."""
    header, data = logins.request([("InitiatorName", name), ("TargetName", IQN)])
    await stream.send_all(header + data + bytes(-len(data) & 3))
    (head,) = await pdus(stream, 1)
    assert head[36:38] == bytes(2)
    return int.from_bytes(head[28:32])


def block_write(cmd_sn: int, data: bytes, durable: bool, lun: int = 0) -> bytes:
    """A WRITE of block 0 with its data."""
    cdb = bytes((0x2A, 8 if durable else 0, 0, 0, 0, 0, 0, 0, 1, 0)).ljust(16, b"\0")
    where = luns.encode(lun)
    return bhs.SCSI_COMMAND_FIELDS.pack(1, 0xA1, 512, where, cmd_sn, 512, cmd_sn, 0, cdb) + data


async def test_a_session_waits_for_the_one_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one between them took the name, never began, and ended by itself: the write that its
    elder has in a thread must still not land behind the third's."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    store = SlowStore()
    async with serving(store) as url:
        there = parse_url(url)
        first = await trio.open_tcp_stream(there.host, there.port)
        cmd_sn = await log_in(first)
        await first.send_all(block_write(cmd_sn, b"1" * 512, durable=True))
        await trio.to_thread.run_sync(store.begun.wait)
        second = await trio.open_tcp_stream(there.host, there.port)
        cmd_sn = await log_in(second)
        await second.send_all(
            pdu.LogoutRequest(reason=0, itt=1, cmd_sn=cmd_sn, exp_stat_sn=0).pack()
        )
        await pdus(second, 1)
        assert not await second.receive_some()
        third = await trio.open_tcp_stream(there.host, there.port)
        cmd_sn = await log_in(third)
        await third.send_all(block_write(cmd_sn, b"3" * 512, durable=False))
        for _ in range(10):
            await trio.testing.wait_all_tasks_blocked()
        store.go.set()
        (head,) = await pdus(third, 1)
        assert (head[0], head[3]) == (bhs.SCSI_RESPONSE, 0)
        assert bytes(store.content[:512]) == b"3" * 512
        assert [call[3] for call in store.calls if call[0] == "write"] == [True, False]
        for stream in (first, second, third):
            await stream.aclose()


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("where", ["respond", "flush"])
async def test_a_bug_in_the_answer_to_a_thread_ends_its_connection_alone(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has come back from threads is answered by the loop that all connections share."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    store = SlowStore()
    async with serving(store) as url:
        there = parse_url(url)
        stream = await trio.open_tcp_stream(there.host, there.port)
        other = await trio.open_tcp_stream(there.host, there.port)
        other_sn = await log_in(other, "iqn.x:other")
        cmd_sn = await log_in(stream)
        await stream.send_all(block_write(cmd_sn, b"1" * 512, durable=True))
        await trio.to_thread.run_sync(store.begun.wait)
        method = getattr(TargetConnection, where)

        def breaks(connection: TargetConnection, *arguments: object) -> None:
            if connection.login.initiator_name == "iqn.x:y" and not connection.done:
                raise ZeroDivisionError
            method(connection, *arguments)

        monkeypatch.setattr(TargetConnection, where, breaks)
        store.go.set()
        assert not await stream.receive_some()
        await other.send_all(block_write(other_sn, b"2" * 512, durable=True))
        (head,) = await pdus(other, 1)
        assert (head[0], head[3]) == (bhs.SCSI_RESPONSE, 0)
        for each in (stream, other):
            await each.aclose()
    assert "internal error, connection closed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.logs("internal error, connection closed")
async def test_behind_a_bug_that_a_thread_meets_the_initiator_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next session has to wait for the tasks of the one before: the task has ended, too."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))

    class Broken(FakeStore):
        def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
            if durable:
                raise ZeroDivisionError
            return super().write(data, offset, durable, nowait)

    async with serving(Broken(1 << 20)) as url:
        there = parse_url(url)
        async with await trio.open_tcp_stream(there.host, there.port) as first:
            cmd_sn = await log_in(first)
            await first.send_all(block_write(cmd_sn, b"1" * 512, durable=True))
            assert not await first.receive_some()
        async with await trio.open_tcp_stream(there.host, there.port) as second:
            cmd_sn = await log_in(second)
            await second.send_all(block_write(cmd_sn, b"2" * 512, durable=False))
            (head,) = await pdus(second, 1)
            assert (head[0], head[3]) == (bhs.SCSI_RESPONSE, 0)


async def test_the_target_ends_when_its_threads_have_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not before: then the file would be closed under the write."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    store = SlowStore()
    over: list[bool] = []
    streams: list[trio.SocketStream] = []

    async def target_that_ends() -> None:
        async with serving(store) as url:
            there = parse_url(url)
            stream = await trio.open_tcp_stream(there.host, there.port)
            streams.append(stream)
            cmd_sn = await log_in(stream)
            await stream.send_all(block_write(cmd_sn, b"1" * 512, durable=True))
            await trio.to_thread.run_sync(store.begun.wait)
        over.append(bytes(store.content[:512]) == b"1" * 512)
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(target_that_ends)
        await trio.to_thread.run_sync(store.begun.wait)
        assert not await streams[0].receive_some()  # the target has closed the connection
        for _ in range(10):
            await trio.testing.wait_all_tasks_blocked()
        assert not over
        store.go.set()
    assert over == [True]


async def test_a_disk_that_does_not_answer_is_in_the_way_of_its_own_lun_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole command window waits for LUN 0; LUN 1 is written durably all the same."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    hung, well = SlowStore(), FakeStore(1 << 20)
    async with serving(hung, well) as url:
        there = parse_url(url)
        try:
            async with await trio.open_tcp_stream(there.host, there.port) as stream:
                cmd_sn = await log_in(stream)
                for n in range(100):
                    await stream.send_all(block_write(cmd_sn + n, b"h" * 512, durable=True))
                last = cmd_sn + 100
                await stream.send_all(block_write(last, b"w" * 512, durable=True, lun=1))
                (head,) = await pdus(stream, 1)
                assert (head[0], head[3], int.from_bytes(head[16:20])) == (0x21, 0, last)
                assert bytes(well.content[:512]) == b"w" * 512
        finally:
            hung.go.set()


async def test_connections_without_login_make_room_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest closes first, whatever it has sent; connections that have logged in stay."""
    monkeypatch.setattr("iserblk.target.places.MAX_LOGINS", 3)
    beginnings = [b"", b"MPA", b"C", MpaInitiator().data_to_send()]
    async with serving() as url:
        there = parse_url(url)
        async with await trio.open_tcp_stream(there.host, there.port) as stream:
            cmd_sn = await log_in(stream)
            half = []
            for number in range(12):
                half.append(await trio.open_tcp_stream(there.host, there.port))
                await half[-1].send_all(beginnings[number % 4])
                await trio.testing.wait_all_tasks_blocked()
                if number % 4 == 3:
                    await half[-1].receive_some()  # the MPA Reply
            for each in half[:9]:
                with contextlib.suppress(trio.BrokenResourceError):  # reset: it was not read
                    assert not await each.receive_some()
            newest = await trio.open_tcp_stream(there.host, there.port)
            await log_in(newest, "iqn.x:newest")
            ping = pdu.NopOut(lun=bytes(8), itt=1, cmd_sn=cmd_sn, exp_stat_sn=0)
            for session in (stream, newest):
                await session.send_all(ping.pack())
                assert (await pdus(session, 1))[0][0] == bhs.NOP_IN
            for each in (*half, newest):
                await each.aclose()


async def test_names_that_differ_in_case_are_one() -> None:
    """For sessions as for I_T nexuses: the later login ends the earlier session."""
    async with serving() as url:
        there = parse_url(url)
        async with await trio.open_tcp_stream(there.host, there.port) as first:
            await log_in(first, "iqn.x:y")
            async with await trio.open_tcp_stream(there.host, there.port) as second:
                await log_in(second, "IQN.x:Y")
                assert not await first.receive_some()


async def test_a_logout_waits_for_what_a_thread_still_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP, to the end: the write lands before the answer, and then the connection ends."""
    monkeypatch.setattr(DeviceServer, "attach", lambda self, nexus: self._nexuses.add(nexus))
    store = SlowStore()
    async with serving(store) as url:
        there = parse_url(url)
        async with await trio.open_tcp_stream(there.host, there.port) as stream:
            cmd_sn = await log_in(stream)
            await stream.send_all(block_write(cmd_sn, b"w" * 512, durable=True))
            await trio.to_thread.run_sync(store.begun.wait)
            logout = pdu.LogoutRequest(reason=0, itt=10, cmd_sn=cmd_sn + 1, exp_stat_sn=0)
            await stream.send_all(logout.pack())
            for _ in range(10):
                await trio.testing.wait_all_tasks_blocked()
            assert not store.content[0]
            store.go.set()
            (head,) = await pdus(stream, 1)
            assert head[0] == bhs.LOGOUT_RESPONSE and store.content[0]
            assert not await stream.receive_some()


async def test_a_peer_that_is_gone_before_it_was_accepted() -> None:
    """The accepted socket has no peer; the target serves others."""
    async with serving() as url:
        there = parse_url(url)
        with socket.create_connection((there.host, there.port)) as sock:
            # A reset instead of an orderly end.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        session = await connect(there, Options())
        assert session.error is None
        session.fail(TransportError("end of test"))


Closed = trio.MemoryReceiveChannel[TargetConnection]


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Closed:
    """Connections that the target has closed. Pings come soon."""
    monkeypatch.setattr("iserblk.target.attending.PING_S", 1.0)
    send, receive = trio.open_memory_channel[TargetConnection](10)
    close = TargetConnection.close

    def spy(connection: TargetConnection) -> None:
        close(connection)
        send.send_nowait(connection)

    monkeypatch.setattr(TargetConnection, "close", spy)
    return receive


schemes = pytest.mark.parametrize("scheme", ["iser", "iscsi"])


@schemes
async def test_a_session_whose_initiator_has_vanished_is_ended(
    scheme: str,
    closed: Closed,
    mock_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It neither sends nor closes. The target frees all that it had, as after a lost connection."""
    mock_clock.autojump_threshold = 0.02
    async with serving() as url:
        session = await connect(parse_url(url.replace("iser:", f"{scheme}:")), Options())
        connection = await closed.receive()
        gone = connection.session
        assert not gone.attached and gone.nexus not in gone._device._nexuses  # type: ignore[attr-defined]
        assert "the initiator did not answer a ping" in caplog.text
        caplog.clear()
        await ended(session)
        assert isinstance(session.error, TransportError)


@pytest.mark.parametrize(("header", "asked"), [(28, True), (12, False)])
async def test_an_initiator_that_sends_no_hello_is_cut_off(
    header: int,
    asked: bool,
    closed: Closed,
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has said that it would, or its header demands it. No ping is sent to it.

    proves: ISER-10.1.3.4-1, ISER-5.1.3-2
    """
    receive = LoginInitiator.receive

    def forget(login: LoginInitiator, header: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        answers = receive(login, header, data)
        login.parameters.iser_hello_required = False
        return answers

    pings: list[ControlAnswers] = []
    monkeypatch.setattr(LoginInitiator, "receive", forget)
    monkeypatch.setattr(ControlAnswers, "ping", pings.append)
    mock_clock.autojump_threshold = 0.02
    async with serving(header=header) as url:
        session = await connect(parse_url(url), Options(hello=asked, header=header))
        await closed.receive()
        assert "the initiator sent no Hello" in caplog.text
        caplog.clear()
        await ended(session)
        assert not pings


@schemes
async def test_a_session_that_is_only_idle_answers_pings(
    scheme: str,
    closed: Closed,
    mock_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinged, pings = trio.open_memory_channel[None](10)
    ping = ControlAnswers.ping

    def spy(answers: ControlAnswers) -> None:
        pinged.send_nowait(None)
        ping(answers)

    monkeypatch.setattr(ControlAnswers, "ping", spy)
    mock_clock.autojump_threshold = 0.02
    async with serving() as url, trio.open_nursery() as nursery:
        session = await connect(parse_url(url.replace("iser:", f"{scheme}:")), Options())
        nursery.start_soon(ended, session)
        for _ in range(3):
            await pings.receive()
        assert session.error is None
        assert not closed.statistics().current_buffer_used
        nursery.cancel_scope.cancel()
        session.fail(TransportError("end of test"))


# -- the end of the target ----------------------------------------------------------------------


@schemes
async def test_initiators_are_asked_to_log_out(
    scheme: str, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """They do, with nothing left in flight, and the target ends without waiting any longer."""
    mock_clock.autojump_threshold = 0.05
    async with trio.open_nursery() as nursery:
        async with serving(logout_s=15) as url:
            session = await connect(parse_url(url.replace("iser:", f"{scheme}:")), Options())
            driver = FakeDriver(session)
            driver.reconnect = lambda: None
            session.drive(driver)

            async def run() -> None:
                while session.suspended is None:
                    await trio.lowlevel.wait_readable(session.fileno())
                    session.progress(monotonic())

            nursery.start_soon(run)
            before = trio.current_time()
        assert trio.current_time() - before < 15
    assert "asynchronous message: " in caplog.text and session.respite.left_nothing
    assert "logged out, as the target had asked" in str(session.suspended)
    caplog.clear()
    session.fail(TransportError("end of test"))


@schemes
async def test_an_initiator_that_does_not_log_out_is_dropped(
    scheme: str, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """After the time that it was given, with an announcement."""
    mock_clock.autojump_threshold = 0.05
    async with serving(logout_s=15) as url:
        session = await connect(parse_url(url.replace("iser:", f"{scheme}:")), Options())
        before = trio.current_time()
    assert trio.current_time() - before >= 15
    await ended(session)  # its driver cannot reconnect: it does not leave
    assert isinstance(session.error, ConnectionLost) and "announced" in str(session.error)
    assert caplog.text.count("asynchronous message: ") == 2
    caplog.clear()


@pytest.mark.parametrize("logout_s", [0, 15])
async def test_a_target_without_sessions_ends_at_once(logout_s: int, mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0.05
    async with serving(logout_s=logout_s) as url:
        with socket.create_connection((parse_url(url).host, parse_url(url).port)):
            before = trio.current_time()
    assert trio.current_time() - before < 1


# -- login ---------------------------------------------------------------------------------------


WHO = [("InitiatorName", "iqn.x:y"), ("TargetName", IQN)]
YES = [("RDMAExtensions", "Yes")]
LOGIN = logins.request(WHO + YES)


def scarce_pair(allocations: int) -> tuple[MemoryQueuePair, MemoryQueuePair]:
    """An initiator's end, with receives, and a target's, which has no memory for headers after so
    many times."""
    ours, theirs = memory_pair()
    ours.post_receive(8)
    given, left = theirs.alloc_headers, [None] * allocations

    def alloc_headers(count: int, size: int) -> list[seam.HeaderSlot]:
        if not left:
            raise NotSupported("no registered memory")
        left.pop()
        return given(count, size)

    theirs.alloc_headers = alloc_headers  # type: ignore[method-assign]
    return ours, theirs


def send(pair: MemoryQueuePair, message: tuple[bytes, bytes]) -> None:
    request = seam.WorkRequest(seam.SEND_SE)
    request.data = memoryview(HEAD + message[0] + message[1])
    pair.post([request])


async def answer(pair: MemoryQueuePair) -> pdu.LoginResponse | None:
    """The next Login Response; None: the target closes the connection without one."""
    with trio.fail_after(PATIENCE_S):
        while True:
            await trio.lowlevel.wait_readable(pair.fileno())
            try:
                for event in pair.progress(0.0):
                    assert event.data is not None
                    return pdu.LoginResponse.unpack_from(event.data, HEADER_LENGTH)
            except TransportError:
                return None


@pytest.mark.parametrize("allocations", [0, 1], ids=["for the login", "for the full feature phase"])
async def test_without_resources_there_is_no_session(allocations: int) -> None:
    """RDMAExtensions=Yes was agreed on, and Allocate_Connection_Resources fails: no response of
    success leaves, the connection ends, and nothing of it stays in use; its TSIH does not, either.

    proves: ISER-3.1.4-3, ISER-3.3-3, ISER-10.1.3.1-3, ISER-10.1.3.1-5
    """
    server = TargetServer(IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)})
    for _ in range(3):
        ours, theirs = scarce_pair(allocations)
        send(ours, LOGIN)
        with trio.fail_after(PATIENCE_S):
            await server.serve_queue_pair(theirs, "10.0.0.1:3260", "peer")
        came = await answer(ours)
        assert came is None or came.status
        assert theirs.fileno() == -1
        ours.close()
    assert not server.device._nexuses
    for message, expected in (
        (logins.request(WHO, tsih=1), SESSION_DOES_NOT_EXIST),
        (logins.request(WHO, tsih=3), SESSION_DOES_NOT_EXIST),
        (LOGIN, 0),
    ):
        ours, theirs = scarce_pair(100)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_queue_pair, theirs, "10.0.0.1:3260", "peer")
            send(ours, message)
            came = await answer(ours)
            assert came is not None and came.status == expected
            ours.close()


async def test_the_target_says_nothing_first(mock_clock: MockClock) -> None:
    """After login it waits for a PDU of the initiator, whose buffers may not be there yet; when
    none comes for much longer than a second, a ping asks whether the initiator is still there.

    proves: ISER-7145-5.1.3-7
    """
    server = TargetServer(IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)})
    ours, theirs = scarce_pair(100)
    mock_clock.autojump_threshold = 0.02
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_queue_pair, theirs, "10.0.0.1:3260", "peer")
        send(ours, LOGIN)
        came = await answer(ours)
        assert came is not None and came.status == 0
        server.device.reset_lun(0)  # a reset by another session is told with the first command
        begun = trio.current_time()
        await trio.lowlevel.wait_readable(ours.fileno())
        assert trio.current_time() - begun > 1
        (event,) = ours.progress(0.0)
        assert event.data is not None and event.data[HEADER_LENGTH] == bhs.NOP_IN
        ours.close()


async def over_iser(
    url: Url, message: tuple[bytes, bytes], private_data: bytes = b""
) -> tuple[seam.QueuePair, bytes]:
    """A new connection, and the header of the answer to this Login Request."""
    addresses = await resolve(url.host, url.port)
    pair: seam.QueuePair = await connect_iwarp(
        addresses, "portal", 10, 10, private_data=private_data, crc=True, segments=1, ird=1
    )
    pair.post_receive(4)
    head, _ = await asked(pair, HEAD + message[0] + message[1])
    return pair, head


async def asked(pair: seam.QueuePair, message: bytes) -> tuple[bytes, int]:
    """The header of the answer to a message, and the STag that it invalidates, or 0."""
    request = seam.WorkRequest(seam.SEND_SE)
    request.data = memoryview(message)
    pair.post([request])
    while True:
        await trio.lowlevel.wait_readable(pair.fileno())
        for event in pair.progress(0.0):
            if event.data is not None:
                unit = event.data[HEADER_LENGTH : HEADER_LENGTH + bhs.BHS_LENGTH]
                return bytes(unit), event.invalidated


async def over_tcp(url: Url, message: tuple[bytes, bytes]) -> tuple[trio.SocketStream, bytes]:
    """As ``over_iser``."""
    stream = await trio.open_tcp_stream(url.host, url.port)
    await stream.send_all(message[0] + message[1] + bytes(-len(message[1]) & 3))
    (head,) = await pdus(stream, 1)
    return stream, head


# shows: SYSTEM-6
@pytest.mark.parametrize("first", ["iser", "iscsi"])
async def test_a_session_has_one_mode(first: str) -> None:
    """Never is one connection of a session iSER's and another one not: a connection that is iSER's
    from its start cannot join a session that is not, and one that begins as a byte stream inherits
    the mode of the session. Nor are there more connections than agreed on. The session goes on.

    proves: ISER-2.3-1
    """
    plain, yes = logins.request(WHO), LOGIN
    async with serving() as text:
        url = parse_url(text)
        if first == "iser":
            pair, head = await over_iser(url, yes)
        else:
            stream, head = await over_tcp(url, plain)
        response = pdu.LoginResponse.unpack_from(head)
        assert response.status == 0 and response.tsih
        joining = {"tsih": response.tsih, "cid": 1}
        second, head = await over_iser(url, logins.request(WHO, **joining))
        status = TOO_MANY_CONNECTIONS if first == "iser" else CANNOT_INCLUDE
        assert pdu.LoginResponse.unpack_from(head).status == status
        third, head = await over_tcp(url, logins.request(WHO, **joining))
        assert pdu.LoginResponse.unpack_from(head).status == TOO_MANY_CONNECTIONS
        assert not await third.receive_some()
        ping = pdu.NopOut(lun=bytes(8), itt=1, cmd_sn=100, exp_stat_sn=0).pack()
        if first == "iser":
            head, _ = await asked(pair, HEAD + ping)
            assert head[0] == bhs.NOP_IN
            pair.close()
        else:
            await stream.send_all(ping)
            assert (await pdus(stream, 1))[0][0] == bhs.NOP_IN
            await stream.aclose()
        second.close()
        await third.aclose()


async def test_a_login_that_does_not_agree_to_iser_goes_on() -> None:
    """RDMAExtensions=No, on a byte stream: the connection goes on as Traditional iSCSI, with data.

    proves: ISER-5.1-4, ISER-2.2-1
    """
    store = FakeStore(1 << 20)
    async with serving(store) as text:
        message = logins.request([*WHO, ("RDMAExtensions", "No")])
        stream, head = await over_tcp(parse_url(text), message)
        response = pdu.LoginResponse.unpack_from(head)
        assert response.status == 0 and head[1] == 0x87  # T, operational stage, full feature phase
        cmd_sn = response.exp_cmd_sn
        statuses = []
        for turn in range(2):  # the first has the unit attention of every session
            await stream.send_all(block_write(cmd_sn + turn, b"x" * 512, durable=False))
            (head,) = await pdus(stream, 1)
            assert head[0] == bhs.SCSI_RESPONSE
            statuses.append(head[3])
        assert statuses == [2, 0] and store.content[:513] == b"x" * 512 + b"\0"
        await stream.aclose()


@pytest.mark.parametrize(
    ("private_data", "reply"),
    [
        (b"\x80\0\0\0", b"\x80\0\0\0"),
        (b"\xc0\0\0\0", b"\xc0\0\0\0"),
        (b"\0\0\0\0", b"\x80\0\0\0"),
        (b"", b"\xc0\0\0\0"),
    ],
    ids=["supported", "not supported", "with zero-based addresses", "unsaid"],
)
async def test_remote_invalidation_has_to_be_supported(private_data: bytes, reply: bytes) -> None:
    """Where an initiator does not say that it supports Send with Invalidate, the target says that
    it does not use it, and does not: the STags may be those of regions.

    proves: ISER-RC-4, ISER-RC-5
    """
    async with serving() as text:
        pair, head = await over_iser(parse_url(text), LOGIN, private_data)
        assert pair.peer_private_data == reply
        cmd_sn = pdu.LoginResponse.unpack_from(head).exp_cmd_sn
        stag, base = pair.advertise(memoryview(bytearray(512)), seam.REMOTE_WRITE)
        header = bytearray(HEADER_LENGTH)
        ControlHeader(0x14, 0, 0, stag, base).pack_into(memoryview(header))
        cdb = bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0)).ljust(16, b"\0")
        read = bhs.SCSI_COMMAND_FIELDS.pack(1, 0xC1, 0, bytes(8), 9, 512, cmd_sn, 0, cdb)
        head, invalidated = await asked(pair, bytes(header) + read)
        assert head[0] == bhs.SCSI_RESPONSE
        assert invalidated == (stag if reply[0] == 0x80 else 0)
        pair.close()


@pytest.mark.parametrize(
    ("transport", "header", "running"),
    [("iser", 28, True), ("iser", 12, False), ("stream", 28, False)],
)
async def test_how_an_initiator_is_understood(
    transport: str, header: int, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login that is a byte stream, and the header of RFC 5046, are the specification's: then a
    Write STag begins with the first byte of all, unless the initiator says otherwise.

    proves: ISER-7145-6.9-1
    """
    configs: list[LoginTargetConfig] = []

    def spy(config: LoginTargetConfig) -> LoginTarget:
        configs.append(config)
        return LoginTarget(config)

    monkeypatch.setattr("iserblk.target.server.LoginTarget", spy)
    units = {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)}
    server = TargetServer(IQN, units, header=header)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    url = parse_url(f"iser://127.0.0.1:{listener.socket.getsockname()[1]}/{IQN}/0")

    async def accept() -> None:
        await server.serve_tcp((await listener.accept()).socket)

    with trio.fail_after(PATIENCE_S):
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            if transport == "iser":
                pair = await connect_iwarp(
                    await resolve(url.host, url.port),
                    *("portal", 10, 10),
                    private_data=b"",
                    crc=True,
                    segments=1,
                    ird=1,
                )
                await until(lambda: configs)
                pair.close()
            else:
                stream, _ = await over_tcp(url, logins.request(WHO + YES, following=None))
                await stream.aclose()
    assert [config.solicited_only for config in configs] == [running]
