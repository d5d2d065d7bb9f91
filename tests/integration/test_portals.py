"""Redirects, and the fallback from iSER to Traditional iSCSI, on real sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from iserblk.errors import IserRefused, LoginError, TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.redirects import MOVES
from iserblk.initiator.session.session import Session
from iserblk.iscsi import keys
from iserblk.options import Options
from iserblk.url import parse_url
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.portal import Portal, portals
from tests.support.target import IQN

pytestmark = pytest.mark.logs(logs.FALLBACK)

SIZE = 1 << 20
FALLBACK = "fallback=iscsi"


@pytest.fixture
def portal() -> Iterator[Portal]:
    with portals(1) as (one,):
        yield one


async def opened(url: str) -> Session:
    parsed = parse_url(url)
    return await connect(parsed, Options.from_pairs(parsed.options.items()))


@pytest.mark.parametrize("face", FACES)
async def test_a_disk_behind_redirects(start_target: StartTarget, face: str) -> None:
    """Two portals redirect the login for the time being; then I/O on the disk."""
    target = start_target(f"lun:size={SIZE}")
    with portals(2) as (one, two):
        one.redirect = (0x0101, two.name)
        two.redirect = (0x0102, target.listen)
        for count in (1, 2):
            async with one_disk(face, f"iscsi://{one.name}/{IQN}/0") as disk:
                await write(disk, bytes([count]) * 4096, 0)
                assert await read(disk, 0, 4096) == bytes([count]) * 4096
            assert (one.logins, two.logins) == (count, count)


async def test_moved_for_good(start_target: StartTarget, portal: Portal) -> None:
    target = start_target(f"lun:size={SIZE}")
    portal.redirect = (0x0102, target.listen)
    url = f"iscsi://{portal.name}/{IQN}/0"
    for _ in range(3):
        async with one_disk("async", url):
            pass
    assert portal.logins == 1
    MOVES.forget(parse_url(url))


async def test_a_circle(portal: Portal) -> None:
    portal.redirect = (0x0101, portal.name)
    with pytest.raises(LoginError, match=f"circle: {portal.name} → {portal.name}"):
        await opened(f"iscsi://{portal.name}/{IQN}/0")


# shows: SYSTEM-5
@pytest.mark.parametrize("slam", [False, True], ids=["silent", "closes"])
async def test_fallback(slam: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The portal does not speak iSER: with fallback=iscsi there is one warning, and Traditional
    iSCSI on a new connection, where the first one began in style cm. Digests take the
    place of the CRC in iSER's frames.

    proves: ISER-5.1-5
    """
    with portals(1, lambda: Portal(slam=slam, digests=True)) as (portal,):
        session = await opened(f"iser://{portal.name}/{IQN}/0?{FALLBACK}&style=cm")
        assert session.describe()["provider"] == "tcp"
        assert session.parameters.header_digest == session.parameters.data_digest == "CRC32C"
        assert not session.parameters.rdma_extensions
        session.disconnect()
        session.fail(TransportError("the end"))
        reason = session.provider_reason
        assert reason.startswith("fallback=iscsi, and iSER cannot be had: ")
        warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
        assert [each.getMessage() for each in warnings] == [
            f"{portal.name}: Traditional iSCSI is used: {reason}"
        ]
        assert (portal.mpa, portal.logins) == (1, 1)


async def test_without_crc_there_are_no_digests() -> None:
    with portals(1, lambda: Portal(slam=True, digests=True)) as (portal,):
        session = await opened(f"iser://{portal.name}/{IQN}/0?{FALLBACK}&mpa_crc=no")
        assert session.parameters.header_digest == session.parameters.data_digest == "None"
        session.fail(TransportError("the end"))


@pytest.mark.parametrize("style", ["cm", "auto"])
async def test_no_fallback_unless_asked_for(style: str) -> None:
    """With style=auto a login as a byte stream has asked whether the target agrees to iSER; else
    the portal is asked what it speaks."""
    with portals(1, lambda: Portal(slam=True)) as (portal,):
        with pytest.raises(TransportError, match=f"write iscsi://{portal.name}/{IQN}/0 in place"):
            await opened(f"iser://{portal.name}/{IQN}/0?style={style}")
        assert (portal.mpa, portal.logins) == (1, 1)


async def test_fallback_is_not_needed(
    start_target: StartTarget, caplog: pytest.LogCaptureFixture
) -> None:
    target = start_target(f"lun:size={SIZE}")
    session = await opened(f"{target.url}/0?{FALLBACK}")
    assert session.describe()["provider"] == "iwarp"
    session.fail(TransportError("the end"))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


# shows: SYSTEM-20
async def test_iser_that_is_refused_in_login(
    start_target: StartTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RDMAExtensions is not answered with Yes on an RDMA connection: the connection ends, and the
    login begins anew over TCP. proves: ISER-RC-11"""
    accept = keys.accept

    def refused(parameters: keys.SessionParameters, name: str, value: str) -> None:
        accept(parameters, name, "No" if name == "RDMAExtensions" else value)

    monkeypatch.setattr(keys, "accept", refused)
    target = start_target(f"lun:size={SIZE}")
    with pytest.raises(IserRefused, match="fallback=iscsi"):
        await opened(f"{target.url}/0")
    session = await opened(f"{target.url}/0?{FALLBACK}")
    assert session.describe()["provider"] == "tcp"
    assert "RDMAExtensions is not Yes" in session.provider_reason
    session.fail(TransportError("the end"))


# shows: SYSTEM-23
async def test_neither_way() -> None:
    """Both attempts fail alike: one error says so once."""
    with pytest.raises(TransportError, match=r"^cannot connect to 127\.0\.0\.1:1: Conn[^:]*$"):
        await opened(f"iser://127.0.0.1:1/{IQN}/0?{FALLBACK}")
