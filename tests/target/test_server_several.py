"""Sessions with several connections, and lost connections, on a target that serves sockets."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import SESSION_DOES_NOT_EXIST
from iserblk.target import keeping
from iserblk.target import server as server_module
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.ports import TargetPort
from iserblk.url import Url, parse_url
from tests.iscsi import logins
from tests.support import logs
from tests.support.until import until
from tests.target.fake_store import FakeStore
from tests.target.test_server import WHO, asked, block_write, over_iser, over_tcp, pdus, serving

pytestmark = pytest.mark.logs(logs.IGNORED)

RECOVERY = [
    ("MaxConnections", "4"),
    ("ErrorRecoveryLevel", "2"),
    ("DefaultTime2Wait", "0"),
    ("DefaultTime2Retain", "60"),
]
NEW = logins.request(WHO + RECOVERY)


def joining(tsih: int, cid: int) -> tuple[bytes, bytes]:
    return logins.request(WHO, tsih=tsih, cid=cid)


async def status_of(url: Url, message: tuple[bytes, bytes]) -> tuple[trio.SocketStream, int, int]:
    stream, head = await over_tcp(url, message)
    response = pdu.LoginResponse.unpack_from(head)
    return stream, response.status, response.tsih


def command(cmd_sn: int, itt: int = 1, cdb: bytes = bytes(16), edtl: int = 0) -> bytes:
    """``edtl``: bytes that it reads."""
    return pdu.ScsiCommand(
        flags=bhs.FLAG_FINAL | (bhs.FLAG_READ if edtl else 0),
        lun=bytes(8),
        itt=itt,
        edtl=edtl,
        cmd_sn=cmd_sn,
        exp_stat_sn=0,
        cdb=cdb,
    ).pack()


async def test_two_connections_over_tcp() -> None:
    """A command that comes early on one waits for the one before it on the other."""
    async with serving() as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        second, status, again = await status_of(url, joining(tsih, 1))
        assert (status, again) == (0, tsih)
        await second.send_all(command(101, 2))
        await first.send_all(command(100, 1))
        (head,) = await pdus(first, 1)
        assert pdu.ScsiResponse.unpack_from(head).itt == 1
        (head,) = await pdus(second, 1)
        response = pdu.ScsiResponse.unpack_from(head)
        assert (response.itt, response.exp_cmd_sn) == (2, 102)
        await first.aclose()
        await second.aclose()


# shows: SYSTEM-30
async def test_two_connections_over_iwarp() -> None:
    """proves: ISER-5.1-10"""
    async with serving() as text:
        url = parse_url(text)
        message = logins.request([*WHO, ("RDMAExtensions", "Yes"), *RECOVERY])
        first, head = await over_iser(url, message)
        tsih = pdu.LoginResponse.unpack_from(head).tsih
        second, head = await over_iser(url, joining(tsih, 1))
        assert pdu.LoginResponse.unpack_from(head).status == 0
        ping = pdu.NopOut(lun=bytes(8), itt=1, cmd_sn=100, exp_stat_sn=0).pack()
        for pair in (first, second):
            head, _ = await asked(pair, b"\x10" + bytes(27) + ping)
            assert head[0] == bhs.NOP_IN
            pair.close()


async def test_a_lost_session_is_kept_for_time2retain(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its TSIH means nothing any more. Before, a connection may join it, and finds the
    sequence numbers as they were."""
    monkeypatch.setattr(server_module, "TIME2RETAIN_S", 3)
    async with serving() as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        await first.send_all(command(100))
        await pdus(first, 1)
        await first.aclose()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(2)
        second, head = await over_tcp(url, joining(tsih, 5))
        response = pdu.LoginResponse.unpack_from(head)
        assert (response.status, response.exp_cmd_sn) == (0, 101)
        await second.aclose()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(4)

        async def gone() -> bool:
            stream, status, _ = await status_of(url, joining(tsih, 6))
            await stream.aclose()
            return status == SESSION_DOES_NOT_EXIST

        for _ in range(100):
            if await gone():
                break
            await trio.testing.wait_all_tasks_blocked()
        else:
            raise AssertionError("the session is kept for ever")


async def test_a_session_that_is_kept_is_reinstated() -> None:
    """A login with its ISID and no TSIH ends it at once."""
    async with serving() as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        await first.aclose()
        second, status, new = await status_of(url, NEW)
        assert status == 0 and new != tsih
        third, status, _ = await status_of(url, joining(tsih, 1))
        assert status == SESSION_DOES_NOT_EXIST
        fourth, status, _ = await status_of(url, joining(new, 1))
        assert status == 0
        for stream in (second, third, fourth):
            await stream.aclose()


async def test_the_cid_of_a_connection_that_works_is_reinstated() -> None:
    """The target closes the old connection, and serves the new one."""
    async with serving() as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        second, status, _ = await status_of(url, joining(tsih, 0))
        assert status == 0
        assert not await first.receive_some()
        await second.send_all(command(100))
        await pdus(second, 1)
        await first.aclose()
        await second.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_connections_cut_anywhere(seed: int) -> None:
    """Connections of a session that end within a PDU, and others that name sessions and tasks at
    random: another initiator is served all the while, and the target ends in order."""
    chance = random.Random(seed)
    store = FakeStore(1 << 20)
    async with serving(store) as text:
        url = parse_url(text)
        stranger = [("InitiatorName", "iqn.2026-11.example:other"), *WHO[1:]]
        good, status, _ = await status_of(url, logins.request(stranger))
        assert status == 0
        tsihs = [0]
        served = 0
        for _ in range(30):
            tsih = chance.choice(tsihs)
            cid = chance.randrange(4)
            message = NEW if not tsih else joining(tsih, cid)
            whole = message[0] + message[1] + bytes(-len(message[1]) & 3)
            stream = await trio.open_tcp_stream(url.host, url.port)
            if chance.random() < 0.3:
                await stream.send_all(whole[: chance.randrange(len(whole))])
                await stream.aclose()
                continue
            await stream.send_all(whole)
            (head,) = await pdus(stream, 1)
            response = pdu.LoginResponse.unpack_from(head)
            if not response.status:
                tsihs.append(response.tsih)
                first = response.exp_cmd_sn
                units = b"".join(
                    chance.choice(
                        (
                            command(first + chance.randrange(4), chance.randrange(3)),
                            pdu.TaskManagementRequest(
                                function=chance.choice((1, 2, 5, 8)),
                                lun=bytes(8),
                                itt=9,
                                referenced_task_tag=chance.randrange(3),
                                cmd_sn=first + chance.randrange(4),
                                exp_stat_sn=chance.randrange(1 << 32),
                                ref_cmd_sn=first + chance.randrange(4),
                                exp_data_sn=chance.randrange(1 << 32),
                            ).pack(),
                            pdu.LogoutRequest(
                                reason=chance.randrange(4),
                                itt=8,
                                cid=chance.randrange(4),
                                cmd_sn=first,
                                exp_stat_sn=0,
                            ).pack(),
                        )
                    )
                    for _ in range(6)
                )
                await stream.send_all(units[: chance.randrange(len(units))])
            await stream.aclose()
            await good.send_all(command(100 + served, served))
            (head,) = await pdus(good, 1)
            assert pdu.ScsiResponse.unpack_from(head).itt == served
            served += 1
        await good.aclose()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One for each connection, until its ``serve_tcp`` has returned."""
    taken: list[object] = []
    serve_tcp = server_module.TargetServer.serve_tcp

    async def spy(
        self: server_module.TargetServer, sock: trio.socket.SocketType, port: TargetPort
    ) -> None:
        taken.append(sock)
        await serve_tcp(self, sock, port)
        taken.remove(sock)

    monkeypatch.setattr(server_module.TargetServer, "serve_tcp", spy)
    return taken


async def test_what_a_session_keeps_counts_as_connections(places: list[object]) -> None:
    """An initiator that never comes back takes one of the target's places for each connection that
    is kept for it, and no more than a few for a session."""
    async with serving() as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        for cid in range(1, 12):
            stream, status, _ = await status_of(url, joining(tsih, cid))
            assert status == 0
            await stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: len(places) == 1 + 5)
        await first.aclose()


async def test_sessions_that_are_kept_are_few(places: list[object]) -> None:
    """Sessions that are begun and left, one after the other, take a few of the places."""
    async with serving() as text:
        url = parse_url(text)
        tsihs = []
        for number in range(keeping.MOST + 20):
            isid = b"\x80\0\0\0" + number.to_bytes(2)
            stream, status, tsih = await status_of(url, logins.request(WHO + RECOVERY, isid=isid))
            assert status == 0
            tsihs.append((tsih, isid))
            await stream.aclose()
        await until(lambda: len(places) == keeping.MOST)
        for index, expected in ((0, SESSION_DOES_NOT_EXIST), (-1, 0)):
            tsih, isid = tsihs[index]
            message = logins.request(WHO, tsih=tsih, isid=isid)
            stream, status, _ = await status_of(url, message)
            assert status == expected
            await stream.aclose()


async def test_a_task_whose_initiator_has_left_blocks_no_lun_for_an_hour(
    mock_clock: MockClock,
) -> None:
    """However long its initiator wants it to be kept. (``serving`` is patient for 20 s.)"""
    async with serving() as text:
        url = parse_url(text)
        victim, _, _ = await status_of(url, logins.request(WHO, isid=b"\x80victi"))
        await victim.send_all(command(100))
        await pdus(victim, 1)
        wait = [(key, "3600" if key == "DefaultTime2Wait" else value) for key, value in RECOVERY]
        stream, status, _ = await status_of(url, logins.request(WHO + wait))
        assert status == 0
        await stream.send_all(command(100))
        await pdus(stream, 1)
        write = bytearray(block_write(101, b"", durable=False))
        write[1] = bhs.FLAG_FINAL | bhs.FLAG_WRITE | bhs.ATTR_HEAD_OF_QUEUE
        await stream.send_all(bytes(write[:5]) + bytes(3) + bytes(write[8:]))
        (head,) = await pdus(stream, 1)
        assert head[0] == bhs.R2T
        await victim.send_all(command(101))
        await trio.testing.wait_all_tasks_blocked()
        await stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.autojump_threshold = 0.2
        (head,) = await pdus(victim, 1)
        assert head[0] == bhs.SCSI_RESPONSE
        await victim.aclose()


async def test_a_connection_that_takes_nothing_is_logged_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits to be sent on it will never leave, and the answer does not wait for that. (The
    usual case: its path is cut, and the initiator asks on another one.)"""
    monkeypatch.setattr("iserblk.target.attending.LAST_WORDS_S", 3600)
    made: list[TargetConnection] = []

    def make(*arguments: Any, **more: Any) -> TargetConnection:
        made.append(TargetConnection(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(server_module, "TargetConnection", make)
    async with serving(FakeStore(1 << 20)) as text:
        url = parse_url(text)
        first, _, tsih = await status_of(url, NEW)
        second, status, _ = await status_of(url, joining(tsih, 1))
        assert status == 0
        read = bytes((0x28, 0, 0, 0, 0, 0, 0, 4, 0, 0)).ljust(16, b"\0")  # 1024 blocks
        for turn in range(64):
            await first.send_all(command(100 + turn, turn, read, 1 << 19))
        await until(made[0].wants_write)
        logout = pdu.LogoutRequest(
            reason=pdu.LOGOUT_CLOSE_CONNECTION, itt=200, cid=0, cmd_sn=164, exp_stat_sn=0
        )
        await second.send_all(logout.pack())
        with trio.fail_after(30):
            (head,) = await pdus(second, 1)
        assert head[0] == bhs.LOGOUT_RESPONSE
        await first.aclose()
        await second.aclose()
