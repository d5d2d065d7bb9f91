"""Logging in over RDMA devices, which are fake: what travels, and the ways to TCP and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.datamover.iser import HEADER_LENGTH
from iserblk.errors import AuthenticationError, ConnectFailed, IserRefused, TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.iscsi import bhs
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.text import encode
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message
from iserblk.secret import Secret
from iserblk.url import parse_place, parse_url
from tests.initiator.connecting.test_verbs import IQN, VERBS, fabric, port, target, url, use
from tests.support import logs
from tests.support.fabric import Fabric
from tests.support.portal import portals

__all__ = ["fabric", "port"]

FALL_BACK = Options(rcap="verbs", queue_depth=4, fallback="iscsi")
SECRET = "hush-hush-hush"


async def test_login_pdus_are_messages(fabric: Fabric, port: int) -> None:
    """There is no byte stream: from the first Login Request on, PDUs travel in Sends.

    proves: ISER-GEN-2.3-1
    """
    left: list[Message] = []

    def watch(message: Message) -> bool:
        left.append(message)
        return True

    fabric.intercept = watch
    async with target(fabric, port):
        await use(await connect(parse_url(url(port)), VERBS))
    sends = [each for each in left if each.kind <= seam.SEND_SE_INVALIDATE]
    assert {bytes(each.data[:HEADER_LENGTH]) for each in sends} == {b"\x10" + bytes(27)}
    assert [each.data[HEADER_LENGTH] & bhs.OPCODE_MASK for each in sends] == [
        bhs.LOGIN_REQUEST,
        bhs.LOGIN_RESPONSE,
        bhs.LOGOUT_REQUEST,
        bhs.LOGOUT_RESPONSE,
    ]


@pytest.mark.parametrize("secret", [SECRET, "loud-loud-loud"], ids=["right", "wrong"])
async def test_chap(fabric: Fabric, port: int, secret: str, tmp_path: Path) -> None:
    """It is above the queue pair, and works on any. proves: ISER-GEN-8.1.6.4-3"""
    own = tmp_path / "own"
    own.write_text(secret)
    own.chmod(0o600)
    options = Options(rcap="verbs", queue_depth=4, chap_secret_file=str(own))
    there = parse_url(url(port).replace("//", "//host@"))
    async with target(fabric, port, accounts=Accounts({"host": Secret(SECRET)})):
        if secret == SECRET:
            assert (await use(await connect(there, options)))["provider"] == "verbs"
        else:
            with pytest.raises(AuthenticationError):
                await connect(there, options)
        with pytest.raises(AuthenticationError, match="none were given"):
            await connect(parse_url(url(port)), VERBS)


@pytest.mark.logs(logs.FALLBACK)
async def test_a_target_that_no_device_finds(fabric: Fabric) -> None:
    """It does not take connections by rdma_cm. With fallback=iscsi it is reached by TCP; without,
    the rejection is the error.

    proves: ISER-GEN-3.4-1
    """
    with portals(1) as (portal,):
        there = parse_url(url(portal.port))
        with pytest.raises(ConnectFailed, match=r"nobody listens there by rdma_cm.*: write iscsi"):
            await connect(there, VERBS)
        assert portal.logins == 1  # the question what it speaks
        session = await connect(there, FALL_BACK)
        assert session.describe()["provider"] == "tcp"
        assert "nobody listens there by rdma_cm" in session.provider_reason
        assert not session.parameters.rdma_extensions
        assert (portal.logins, portal.mpa) == (2, 0)
        session.fail(TransportError("the end"))


@pytest.mark.logs(logs.FALLBACK)
async def test_a_target_that_does_not_agree_to_iser(fabric: Fabric) -> None:
    """It answers RDMAExtensions with No, on a connection that can do nothing else: that connection
    ends, and a new one is made by TCP, where the user allows it.

    proves: ISER-IB00-3.1.6.1-2, ISER-5.1-4
    """
    with portals(1) as (portal,):
        there = parse_url(url(portal.port))
        async with target(fabric, portal.port, rdma=False):
            with pytest.raises(IserRefused, match="RDMAExtensions is not Yes"):
                await connect(there, VERBS)
            session = await connect(there, FALL_BACK)
        assert session.describe()["provider"] == "tcp"
        assert "RDMAExtensions is not Yes" in session.provider_reason
        assert portal.logins == 1
        assert [ours.fileno() for ours, _ in fabric.pairs] == [-1, -1]
        session.fail(TransportError("the end"))


# shows: SYSTEM-11
async def test_portals_that_tcp_finds_are_reached_by_rdma_cm(fabric: Fabric) -> None:
    """SendTargets over TCP; the device is found by the address that it names.

    proves: ISER-B.3-1
    """
    with portals(1) as (portal,):
        portal.answer = [encode([("TargetName", IQN), ("TargetAddress", f"{portal.name},1")])]
        answer = await send_targets(parse_place(f"iscsi://{portal.name}"), Options())
        assert answer.scheme == "iscsi" and portal.asked == ["All"]
        ((found,),) = [record.portals for record in answer.targets]
        async with target(fabric, found.port):
            about = await use(await connect(parse_url(url(found.port, found.host)), VERBS))
        assert about["provider"] == "verbs"
        assert ("connect", "127.0.0.1") in fabric.log and portal.logins == 1
