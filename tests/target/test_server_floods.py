"""Peers that flood a target that serves sockets, before they have logged in."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_target import AUTHENTICATION_FAILURE, OUT_OF_RESOURCES
from iserblk.iscsi.text import decode_untrusted
from iserblk.rcap.inprocess import memory_pair
from iserblk.rcap.iwarp.mpa import MpaInitiator
from iserblk.secret import Secret
from iserblk.target.attempts import FREE
from iserblk.target.attending import PING_S
from iserblk.target.iscsi.buffers import BufferPool, DataBudget
from iserblk.target.scsi.device import LogicalUnit
from iserblk.target.server import TargetServer
from iserblk.url import Url, parse_url
from tests.iscsi import logins
from tests.target.fake_store import FakeStore
from tests.target.test_server import IQN, block_write, log_in, pdus, serving
from tests.target.test_server_users import answer

SECRETS = {"alice": "the-one-of-alice", "bob": "the-one-of-bobby"}
ACCOUNTS = Accounts({user: Secret(secret) for user, secret in SECRETS.items()})
WHO = [("InitiatorName", "iqn.x:y"), ("TargetName", IQN), ("AuthMethod", "CHAP")]


@pytest.fixture(autouse=True)
def all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


refusals = pytest.mark.logs("authentication failed")


async def said(words: str, caplog: pytest.LogCaptureFixture) -> None:
    """Wait until it is in the log; the clock does not move."""
    while words not in caplog.text:
        await wait_all_tasks_blocked(0.01)


async def connect(url: Url, address: str = "127.0.0.1") -> trio.SocketStream:
    return await trio.open_tcp_stream(url.host, url.port, local_address=address)


async def challenged(stream: trio.SocketStream) -> dict[str, str]:
    await answer(stream, logins.request(WHO, pdu.SECURITY_STAGE, None))
    _, data = await answer(stream, logins.request([("CHAP_A", "5")], pdu.SECURITY_STAGE, None))
    return dict(decode_untrusted(data))


def proof(asked: dict[str, str], user: str, secret: str) -> tuple[bytes, bytes]:
    octets = bytes([int(asked["CHAP_I"])]) + secret.encode() + bytes.fromhex(asked["CHAP_C"][2:])
    pairs = [("CHAP_N", user), ("CHAP_R", f"0x{hashlib.md5(octets).hexdigest()}")]
    return logins.request(pairs, pdu.SECURITY_STAGE, pdu.OPERATIONAL_STAGE)


async def attempt(url: Url, user: str, secret: str, address: str = "127.0.0.1") -> int:
    """The status of the answer to a proof by CHAP."""
    async with await connect(url, address) as stream:
        head, _ = await answer(stream, proof(await challenged(stream), user, secret))
    return pdu.LoginResponse.unpack_from(head).status


@pytest.mark.parametrize("begins", [False, True])
async def test_a_flood_of_another_address_does_not_end_a_login(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the others begin a login, and the honest one has only connected."""
    monkeypatch.setattr("iserblk.target.places.MAX_LOGINS", 4)
    async with serving(accounts=ACCOUNTS) as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        honest = await open_.enter_async_context(await connect(url, "127.0.0.2"))
        await wait_all_tasks_blocked()
        for _ in range(12):
            flood = await open_.enter_async_context(await connect(url))
            if begins:
                await answer(flood, logins.request(WHO, pdu.SECURITY_STAGE, None))
            await wait_all_tasks_blocked()
        head, _ = await answer(honest, proof(await challenged(honest), "alice", SECRETS["alice"]))
        assert pdu.LoginResponse.unpack_from(head).status == 0


async def test_silent_peers_do_not_end_a_login_of_their_own_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("iserblk.target.places.MAX_LOGINS", 4)
    async with serving(accounts=ACCOUNTS) as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        honest = await open_.enter_async_context(await connect(url))
        asked = await challenged(honest)
        for _ in range(12):
            await open_.enter_async_context(await connect(url))
            await wait_all_tasks_blocked()
        head, _ = await answer(honest, proof(asked, "alice", SECRETS["alice"]))
        assert pdu.LoginResponse.unpack_from(head).status == 0


@pytest.mark.plain("replaces a class that compiled code makes")
async def test_addresses_of_one_network_have_one_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One machine may use all of its 2^64 addresses."""
    shares: list[str] = []

    class Pool(BufferPool):
        def __init__(self, budget: DataBudget, address: str = "") -> None:
            super().__init__(budget, address)
            shares.append(address)

    monkeypatch.setattr("iserblk.target.iscsi.session.BufferPool", Pool)
    server = TargetServer(IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)})
    peers = ["[2001:db8::1]:1000", "[2001:db8::2]:1000", "[2001:db8:0:1::1]:1000"]
    async with trio.open_nursery() as nursery:
        for peer in peers:
            ours, theirs = memory_pair()
            nursery.start_soon(server.serve_queue_pair, theirs, "10.0.0.1:3260", peer)
            await wait_all_tasks_blocked()
            ours.close()
    assert shares == ["2001:db8::/64", "2001:db8::/64", "2001:db8:0:1::/64"]


async def test_a_login_has_one_time_limit(mock_clock: MockClock) -> None:
    """MPA start-up, which takes its time, leaves less to the login behind it."""
    async with serving() as text:
        url = parse_url(text)
        async with await connect(url) as stream:
            await wait_all_tasks_blocked()
            mock_clock.jump(14)
            await stream.send_all(MpaInitiator().data_to_send())
            assert await stream.receive_some()
            await wait_all_tasks_blocked()
            mock_clock.jump(2)
            assert not await stream.receive_some()


@refusals
async def test_failed_attempts_delay_the_next_of_that_address_and_user(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """And no others. An attempt that waits is looked at in its turn, and its answer comes then."""
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        for _ in range(FREE):
            assert await attempt(url, "alice", "a-wrong-secret") == AUTHENTICATION_FAILURE
        statuses: list[int] = []

        async def later() -> None:
            statuses.append(await attempt(url, "alice", SECRETS["alice"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            await said("CHAP waits for 1 s", caplog)
            assert await attempt(url, "bob", SECRETS["bob"]) == 0
            assert await attempt(url, "alice", SECRETS["alice"], "127.0.0.2") == 0
            await wait_all_tasks_blocked()
            assert not statuses
            mock_clock.jump(1.5)
        assert statuses == [0]
        # That was the right secret: nothing is left.
        assert await attempt(url, "alice", SECRETS["alice"]) == 0


@contextlib.asynccontextmanager
async def waiting_attempt(
    url: Url, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[tuple[trio.SocketStream, bytes]]:
    """A connection whose wrong answer waits to be looked at, and the request with that answer."""
    for _ in range(FREE):
        await attempt(url, "alice", "a-wrong-secret")
    async with await connect(url) as stream:
        head, data = proof(await challenged(stream), "alice", "a-wrong-secret")
        message = head + data + bytes(-len(data) & 3)
        await stream.send_all(message)
        await said("CHAP waits for 1 s", caplog)
        yield stream, message


@refusals
async def test_an_attempt_whose_connection_ends_is_not_looked_at(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(accounts=ACCOUNTS) as text:
        async with waiting_attempt(parse_url(text), caplog):
            pass
        await wait_all_tasks_blocked()
        refused = caplog.text.count("authentication failed")
        mock_clock.jump(3)
        await wait_all_tasks_blocked()
        assert caplog.text.count("authentication failed") == refused


async def log_in_and_be_ready(stream: trio.SocketStream, name: str) -> int:
    """As ``log_in``, behind the unit attention of a new session."""
    cmd_sn = await log_in(stream, name)
    await stream.send_all(
        pdu.ScsiCommand(
            flags=bhs.FLAG_FINAL,
            lun=bytes(8),
            itt=1,
            edtl=0,
            cmd_sn=cmd_sn,
            exp_stat_sn=0,
            cdb=bytes(16),
        ).pack()
    )
    assert (await pdus(stream, 1))[0][0] == bhs.SCSI_RESPONSE
    return cmd_sn + 1


@pytest.mark.logs("session ended: the data of a command did not come")
async def test_a_live_initiator_that_owes_data_blocks_a_lun_for_a_while(
    mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers every ping."""
    monkeypatch.setattr("tests.target.test_server.PATIENCE_S", 1000)  # by the clock that jumps
    async with serving() as text:
        url = parse_url(text)
        async with await connect(url) as stalls, await connect(url, "127.0.0.2") as waits:
            cmd_sn = await log_in_and_be_ready(stalls, "iqn.x:stalls")
            write = bytes([0x2A, 0, 0, 0, 0, 0, 0, 0, 1]).ljust(16, b"\0")
            flags = bhs.FLAG_FINAL | bhs.FLAG_WRITE | bhs.ATTR_HEAD_OF_QUEUE
            command = pdu.ScsiCommand(
                flags=flags, lun=bytes(8), itt=7, edtl=512, cmd_sn=cmd_sn, exp_stat_sn=0, cdb=write
            )
            await stalls.send_all(command.pack())
            assert (await pdus(stalls, 1))[0][0] == bhs.R2T
            cmd_sn = await log_in_and_be_ready(waits, "iqn.x:waits")
            await waits.send_all(block_write(cmd_sn, b"w" * 512, durable=False))
            answered = trio.Event()

            async def wait() -> None:
                assert (await pdus(waits, 1))[0][3] == 0
                answered.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                alive = pdu.NopOut(itt=bhs.NO_TAG, cmd_sn=cmd_sn, exp_stat_sn=0).pack()
                for _ in range(16):
                    for stream in (stalls, waits):
                        with contextlib.suppress(trio.BrokenResourceError):
                            await stream.send_all(alive)
                    await wait_all_tasks_blocked(0.01)
                    if answered.is_set():
                        break
                    mock_clock.jump(PING_S / 2)
                assert answered.is_set()


@refusals
async def test_a_login_request_while_the_last_one_waits_ends_the_connection(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits is not looked at then: attempts are not to be had for less time."""
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        async with waiting_attempt(url, caplog) as (stream, message):
            refused = caplog.text.count("authentication failed")
            await stream.send_all(message)
            await said("a login request before the answer to the last one", caplog)
        mock_clock.jump(3)
        await wait_all_tasks_blocked()
        assert caplog.text.count("authentication failed") == refused
        assert await attempt(url, "bob", SECRETS["bob"]) == 0


async def test_who_has_not_logged_in_takes_no_place_of_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A login finds the last place behind it free, and one before it, however many are silent."""
    monkeypatch.setattr("iserblk.target.places.MAX_CONNECTIONS", 3)
    monkeypatch.setattr("iserblk.target.places.MAX_LOGINS", 2)
    monkeypatch.setattr("iserblk.target.places.OF_ONE", 1)
    async with serving() as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        for number in range(2):
            session = await open_.enter_async_context(await connect(url))
            await log_in(session, f"iqn.x:{number}")
        for _ in range(10):
            await open_.enter_async_context(await connect(url))
            await wait_all_tasks_blocked()
        last = await open_.enter_async_context(await connect(url, "127.0.0.2"))
        await log_in(last, "iqn.x:last")


async def status_of_login(url: Url, name: str, address: str = "127.0.0.1") -> int:
    async with await connect(url, address) as stream:
        who = [("InitiatorName", name), ("TargetName", IQN)]
        head, _ = await answer(stream, logins.request(who))
    return pdu.LoginResponse.unpack_from(head).status


full = pytest.mark.logs("login refused: no connection resources: there are")


@full
async def test_where_all_places_are_taken_a_login_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """But one that reinstates a session has its place."""
    monkeypatch.setattr("iserblk.target.places.MAX_CONNECTIONS", 2)
    monkeypatch.setattr("iserblk.target.places.OF_ONE", 1)
    async with serving() as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        for number in range(2):
            session = await open_.enter_async_context(await connect(url))
            await log_in(session, f"iqn.x:{number}")
        assert await status_of_login(url, "iqn.x:2") == OUT_OF_RESOURCES
        again = await open_.enter_async_context(await connect(url))
        await log_in(again, "iqn.x:1")
        assert not await session.receive_some()
        assert await status_of_login(url, "iqn.x:2") == OUT_OF_RESOURCES
        await again.aclose()
        while await status_of_login(url, "iqn.x:2"):
            await wait_all_tasks_blocked(0.01)


@full
async def test_one_address_leaves_places_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody has to prove who it is."""
    monkeypatch.setattr("iserblk.target.places.MAX_CONNECTIONS", 8)
    async with serving() as text, contextlib.AsyncExitStack() as open_:
        url = parse_url(text)
        for number in range(7):
            session = await open_.enter_async_context(await connect(url))
            await log_in(session, f"iqn.x:{number}")
        assert await status_of_login(url, "iqn.x:7") == OUT_OF_RESOURCES
        assert await status_of_login(url, "iqn.x:other", "127.0.0.2") == 0
