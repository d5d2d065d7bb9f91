"""Connections that begin with a Hello, with headers of 28 and of 12 bytes, between our two ends."""

from __future__ import annotations

import random

import pytest

from iserblk.datamover import hello
from iserblk.errors import CommandTimeout, NotSupported, RemoteProtocolError, TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.url import parse_url
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.cores import session_of
from tests.support.faces import WAYS, one_disk, read, write

MIB = 1 << 20
STYLES = pytest.mark.parametrize("style", ["cm", "stream"])
WANTED = pytest.mark.parametrize(
    ("header", "options"),
    [(28, {"hello": "yes"}), (12, {"header": "12"}), (12, {"header": "12", "hello": "yes"})],
    ids=["28", "12", "12-asked-for"],
)


# shows: SYSTEM-31
@pytest.mark.parametrize("face", WAYS)
@STYLES
@WANTED
async def test_data(
    start_target: StartTarget, header: int, options: dict[str, str], style: str, face: str
) -> None:
    """Data that travels with its command, by one Read or Write, and by many.

    proves: ISER-7145-6.10-2, ISER-7145-A-1, ISER-2.4.1-1
    """
    query = "&".join(f"{key}={value}" for key, value in {**options, "style": style}.items())
    url = f"{start_target('lun:size=16M', header=header).url}/0?{query}"
    async with one_disk(face, url) as disk:
        for seed, size in enumerate((512, 8192, 8704, 65536, 66048, MIB, 4 * MIB)):
            data = random.Random(seed).randbytes(size)
            await write(disk, data, 1024)
            assert await read(disk, 1024, size) == data
        await disk.flush()


@STYLES
@WANTED
async def test_it_is_said(
    start_target: StartTarget, header: int, options: dict[str, str], style: str
) -> None:
    url = f"{start_target('lun:size=1M', header=header).url}/0"
    async with one_disk("async", url, {**options, "style": style}) as disk:
        about = disk.info.connection
        assert (about["header"], about["hello"], about["provider"]) == (header, True, "iwarp")
        assert (about["style"], about["ird"]) == (style, 64)


async def test_without_a_wish_there_is_none(start_target: StartTarget) -> None:
    """proves: ISER-7145-5.1.3-1, ISER-7145-6.10-3"""
    async with one_disk("async", f"{start_target('lun:size=1M').url}/0") as disk:
        about = disk.info.connection
        assert (about["header"], about["hello"]) == (28, False)


@pytest.mark.logs(logs.RECONNECTED)
@STYLES
@WANTED
async def test_each_new_connection_begins_with_one(
    start_target: StartTarget, header: int, options: dict[str, str], style: str
) -> None:
    target = start_target("lun:size=1M:wce=0", header=header)
    async with one_disk("async", f"{target.url}/0", {**options, "style": style}) as disk:
        await write(disk, b"x" * 4096, 0)
        target.kill()
        start_target("lun:wce=0", header=header, listen=target.listen)
        assert await read(disk, 0, 4096) == b"x" * 4096
        assert session_of(disk).describe()["hello"]
        assert session_of(disk).counts.reconnects == 1


@pytest.mark.logs(logs.RECONNECTED)
@STYLES
@pytest.mark.parametrize(("header", "wanted"), [(28, "12"), (12, "28")])
async def test_ends_that_were_told_different_headers(
    start_target: StartTarget, header: int, wanted: str, style: str
) -> None:
    """Nothing works: login fails where it travels in messages, else the first command.

    proves: ISER-7145-A-1
    """
    options = {"header": wanted, "style": style, "io-timeout": "1"}
    url = f"{start_target('lun:size=1M', header=header).url}/0"
    with pytest.raises((TransportError, CommandTimeout)):
        async with one_disk("async", url, options):
            pytest.fail("opened")


@STYLES
@pytest.mark.parametrize(("header", "versions"), [(28, (15, 11)), (28, (9, 2)), (12, (10, 10))])
async def test_a_version_that_the_target_does_not_know(
    start_target: StartTarget,
    monkeypatch: pytest.MonkeyPatch,
    header: int,
    versions: tuple[int, int],
    style: str,
) -> None:
    """Its HelloReply with REJ reaches the initiator before the connection ends; the target goes on.

    proves: ISER-5.1.3-9, ISER-10.1.3.2-1, ISER-10.1.3.2-3
    """
    url = parse_url(f"{start_target('lun:size=1M', header=header).url}/0")
    options = Options(hello=True, header=header, style=style)
    with monkeypatch.context() as patch:
        patch.setattr(hello, "greeting", lambda _form, ird: hello.Hello(*versions, ird))
        with pytest.raises(RemoteProtocolError, match=f"{url.host}.*rejects this connection"):
            await connect(url, options)
    session = await connect(url, options)
    session.fail(TransportError("end of test"))


async def test_an_rdma_device_has_no_zero_based_stags() -> None:
    url = parse_url("iser://127.0.0.1:1/iqn.2026-11.example:disk/0")
    with pytest.raises(NotSupported, match="rcap=iwarp"):
        await connect(url, Options(header=12, rcap="verbs"))
