"""CHAP users at a target that serves sockets: none ends the session of another."""

from __future__ import annotations

import hashlib
import logging

import pytest
import trio
from trio.testing import MockClock

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_target import AUTHORIZATION_FAILURE
from iserblk.iscsi.text import decode_untrusted
from iserblk.secret import Secret
from iserblk.url import Url, parse_url
from tests.iscsi import logins
from tests.support.until import until
from tests.target.test_server import IQN, pdus, serving

SECRETS = {"alice": "the-one-of-alice", "bob": "the-one-of-bobby"}
ACCOUNTS = Accounts({user: Secret(secret) for user, secret in SECRETS.items()})
LEVEL_2 = [("ErrorRecoveryLevel", "2"), ("MaxConnections", "4"), ("DefaultTime2Retain", "20")]

pytestmark = pytest.mark.logs(r"login refused: .* of another user than|another user logs in by its")


async def answer(stream: trio.SocketStream, message: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Header and data of the next PDU, behind ``message``."""
    await stream.send_all(message[0] + message[1] + bytes(-len(message[1]) & 3))
    received = b""
    while len(received) < 48 or len(received) < 48 + (int.from_bytes(received[5:8]) + 3 & ~3):
        more = await stream.receive_some()
        assert more
        received += more
    return received[:48], received[48 : 48 + int.from_bytes(received[5:8])]


async def log_in_as(
    url: Url,
    user: str,
    name: str = "iqn.x:y",
    more: logins.Pairs | None = None,
    **fields: int,
) -> tuple[trio.SocketStream, pdu.LoginResponse]:
    """Over TCP, always with the same ISID; returns the last response."""
    stream = await trio.open_tcp_stream(url.host, url.port)
    who = [("InitiatorName", name), ("TargetName", IQN), ("AuthMethod", "CHAP")]
    await answer(stream, logins.request(who, pdu.SECURITY_STAGE, None, **fields))
    _, data = await answer(
        stream, logins.request([("CHAP_A", "5")], pdu.SECURITY_STAGE, None, **fields)
    )
    asked = dict(decode_untrusted(data))
    octets = bytes([int(asked["CHAP_I"])]) + SECRETS[user].encode()
    proof = hashlib.md5(octets + bytes.fromhex(asked["CHAP_C"][2:])).hexdigest()
    pairs = [("CHAP_N", user), ("CHAP_R", f"0x{proof}")]
    head, _ = await answer(
        stream, logins.request(pairs, pdu.SECURITY_STAGE, pdu.OPERATIONAL_STAGE, **fields)
    )
    assert pdu.LoginResponse.unpack_from(head).status == 0
    head, _ = await answer(stream, logins.request(more or [], **fields))
    return stream, pdu.LoginResponse.unpack_from(head)


async def pong(stream: trio.SocketStream) -> None:
    """Take the target's ping, and answer it."""
    (head,) = await pdus(stream, 1)
    assert head[0] == bhs.NOP_IN
    ping = pdu.NopIn.unpack_from(head)
    await stream.send_all(
        pdu.NopOut(
            itt=bhs.NO_TAG, ttt=ping.ttt, lun=ping.lun, cmd_sn=100, exp_stat_sn=ping.stat_sn
        ).pack()
    )


async def test_the_same_user_takes_the_place_of_its_session() -> None:
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        first, response = await log_in_as(url, "alice")
        assert response.status == 0
        second, response = await log_in_as(url, "alice", "iqn.X:Y")
        assert response.status == 0
        assert not await first.receive_some()
        await first.aclose()
        await second.aclose()


async def test_another_user_ends_no_session_whose_initiator_is_there(
    mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """However often that user tries, and whatever the case of the name."""
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        alice, _ = await log_in_as(url, "alice")
        for name in ("iqn.x:y", "iqn.X:y"):
            bob, response = await log_in_as(url, "bob", name)
            assert response.status == AUTHORIZATION_FAILURE
            await bob.aclose()
            await pong(alice)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(6)
            await trio.testing.wait_all_tasks_blocked()
        await alice.send_all(pdu.NopOut(lun=bytes(8), itt=1, cmd_sn=100, exp_stat_sn=0).pack())
        (head,) = await pdus(alice, 1)
        assert head[0] == bhs.NOP_IN
        assert "did not answer a ping" not in caplog.text
        await alice.aclose()


@pytest.mark.parametrize("more", [[], LEVEL_2], ids=["level 0", "level 2"])
@pytest.mark.parametrize("closes", [False, True])
async def test_a_session_that_answers_no_ping_gives_way(
    more: logins.Pairs, closes: bool, mock_clock: MockClock
) -> None:
    """Also one that would be kept for its tasks (``closes``: it is kept already). A ping that was
    answered before does not count."""
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        alice, _ = await log_in_as(url, "alice", more=more)
        if closes and more:
            await alice.aclose()
            await trio.testing.wait_all_tasks_blocked()
        elif closes:
            bob, _ = await log_in_as(url, "bob")
            await bob.aclose()
            await pong(alice)
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(6)
            await trio.testing.wait_all_tasks_blocked()
        bob, response = await log_in_as(url, "bob")
        assert response.status == AUTHORIZATION_FAILURE
        await bob.aclose()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(4)
        bob, response = await log_in_as(url, "bob")
        assert response.status == AUTHORIZATION_FAILURE
        await bob.aclose()
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1.5)
        await trio.testing.wait_all_tasks_blocked()
        bob, response = await log_in_as(url, "bob")
        assert response.status == 0
        if not closes:
            while await alice.receive_some():
                pass
        await alice.aclose()
        await bob.aclose()


async def test_one_connection_that_answers_keeps_the_session(mock_clock: MockClock) -> None:
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        first, response = await log_in_as(url, "alice", more=LEVEL_2)
        second, response = await log_in_as(url, "alice", tsih=response.tsih, cid=1)
        assert response.status == 0
        bob, response = await log_in_as(url, "bob")
        assert response.status == AUTHORIZATION_FAILURE
        await pong(second)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(6)
        await trio.testing.wait_all_tasks_blocked()
        again, response = await log_in_as(url, "bob")
        assert response.status == AUTHORIZATION_FAILURE
        for stream in (first, second, bob, again):
            await stream.aclose()


async def test_a_claim_ends_with_the_target(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(accounts=ACCOUNTS) as text:
        url = parse_url(text)
        alice, _ = await log_in_as(url, "alice")
        bob, _ = await log_in_as(url, "bob")
        await until(lambda: "login refused" in caplog.text)
        await alice.aclose()
        await bob.aclose()
