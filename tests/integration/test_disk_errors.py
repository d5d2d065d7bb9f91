"""Errors of ranges, media and addresses: each is the documented one, and leaves nothing behind."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import subprocess
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from iserblk.datamover.iser import ZBVA_NOT_SUPPORTED, ConnectionFlags
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    LoginError,
    NoMpaReply,
    NoSuchLun,
    OtherProtocol,
    OutOfRange,
    OutOfSpace,
    RemoteProtocolError,
    ScsiError,
    TargetNotFound,
    WriteProtected,
)
from iserblk.initiator.connecting import reach
from iserblk.rcap.iwarp.mpa import MpaResponder
from tests.integration.conftest import StartTarget
from tests.support.census import census, nothing_new
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.target import IQN
from tests.support.until import until

MIB = 1 << 20
ALMOST_4_GIB = (1 << 32) - 1

face = pytest.mark.parametrize("face", FACES)

Call = Callable[[AsyncDisk, int, int], Awaitable[object]]


# --- ranges ------------------------------------------------------------------------------------


@face
async def test_ranges_that_leave_the_disk(start_target: StartTarget, face: str) -> None:
    """A range beyond the end is refused whole: no byte is moved, and the session goes on."""
    size = MIB
    marker = b"\xa5" * 4096
    calls: dict[str, Call] = {
        "read": read,
        "write": lambda disk, offset, length: write(disk, bytes(length), offset),
        "write fua": lambda disk, offset, length: write(disk, bytes(length), offset, fua=True),
        "trim": lambda disk, offset, length: disk.trim(offset, length),
        "zero": lambda disk, offset, length: disk.zero(offset, length),
        "extents": lambda disk, offset, length: disk.extents(offset, length),
        "cache": lambda disk, offset, length: disk.cache(offset, length),
    }
    ranges = [(size, 1), (size - 1, 2), (size - 512, 1024), (size + 512, 0), (-1, 1), (-512, 512)]
    ranges += [(1 << 63, 512), (1 << 64, 1), (size - 4096, 8192)]
    async with one_disk(face, f"{start_target(f'lun:size={size}').url}/0") as disk:
        await write(disk, marker, size - 4096)
        for name, call in calls.items():
            for offset, length in ranges:
                with pytest.raises(OutOfRange) as caught:
                    await call(disk, offset, length)
                assert caught.value.errno == errno.EINVAL, name
        assert await read(disk, size - 4096, 4096) == marker


@face
async def test_4_gib_less_1_is_refused_without_touching_memory(
    start_target: StartTarget, face: str
) -> None:
    """A request of 4 GiB - 1 to a small LUN; its buffer is address space that was never touched."""
    async with one_disk(face, f"{start_target('lun:size=1M').url}/0") as disk:
        await write(disk, b"\xa5" * 4096, 0)
        with mmap.mmap(-1, ALMOST_4_GIB) as memory, memoryview(memory) as buffer:
            tracemalloc.start()
            try:
                for offset in (0, 1, MIB - 1):
                    for call in (
                        lambda at: disk.read_into(buffer, at),
                        lambda at: disk.write(buffer, at),
                        lambda at: disk.write(buffer, at, True),
                        lambda at: disk.trim(at, ALMOST_4_GIB),
                        lambda at: disk.zero(at, ALMOST_4_GIB),
                        lambda at: disk.zero(at, ALMOST_4_GIB, may_trim=True, fast=True, fua=True),
                        lambda at: disk.extents(at, ALMOST_4_GIB),
                        lambda at: disk.cache(at, ALMOST_4_GIB),
                    ):
                        with pytest.raises(OutOfRange):
                            await call(offset)
                assert tracemalloc.get_traced_memory()[1] < MIB
            finally:
                tracemalloc.stop()
            assert buffer[0] == buffer[ALMOST_4_GIB - 1] == 0
        assert await read(disk, 0, 4096) == b"\xa5" * 4096


@face
async def test_a_read_only_lun(start_target: StartTarget, face: str) -> None:
    writable = start_target("lun:size=1M")
    async with one_disk(face, f"{writable.url}/0") as disk:
        await write(disk, b"kept" * 1024, 0)
    writable.stop()
    async with one_disk(face, f"{start_target('lun:ro').url}/0") as disk:
        assert disk.info.read_only
        calls: list[Callable[[], Awaitable[None]]] = [
            lambda: write(disk, b"x" * 512, 0),
            lambda: write(disk, b"x", 1),
            lambda: write(disk, b"x" * 512, 0, fua=True),
            lambda: disk.trim(0, 4096),
            lambda: disk.zero(0, 4096),
        ]
        for call in calls:
            with pytest.raises(WriteProtected) as caught:
                await call()
            assert caught.value.errno == errno.EROFS
        await disk.flush()
        assert await read(disk, 0, 4096) == b"kept" * 1024


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """A file system with room for 1 MiB: its name in ``tmp_path``."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1M", "none", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"cannot mount a small file system: {made.stderr.strip()}")
    try:
        yield place.name
    finally:
        # Its target may still be about to end.
        subprocess.run(["umount", "--lazy", place], check=True)


@face
async def test_a_thin_lun_whose_disk_is_full(
    small: str, start_target: StartTarget, face: str
) -> None:
    """A write without room fails with "no space", not "read-only"; writes with room succeed."""
    running = start_target(f"{small}/lun:size=4M")
    async with one_disk(face, f"{running.url}/0") as disk:
        await write(disk, b"kept" * 1024, 0)
        with pytest.raises(OutOfSpace, match="27/07") as caught:
            await write(disk, b"x" * (2 * MIB), MIB)
        assert caught.value.errno == errno.ENOSPC
        await disk.trim(MIB, 2 * MIB)
        await write(disk, b"more" * 1024, 4096)
        assert await read(disk, 0, 8192) == b"kept" * 1024 + b"more" * 1024


@face
async def test_a_lun_whose_file_was_made_smaller(
    start_target: StartTarget, tmp_path: Path, face: str
) -> None:
    """Reads and extents of the missing part are errors; the target's log names them."""
    running = start_target("lun:size=1M")
    async with one_disk(face, f"{running.url}/0") as disk:
        await write(disk, b"kept" * (MIB // 4), 0)
        os.truncate(tmp_path / "lun", 65536)
        assert await read(disk, 0, 65536) == b"kept" * 16384
        told = await disk.extents(0, MIB)
        assert told[-1][0] + told[-1][1] == 65536
        for call in (
            lambda: read(disk, 65536, 4096),
            lambda: read(disk, 61440, 8192),
            lambda: disk.extents(MIB - 4096, 4096),
            lambda: write(disk, b"x" * 4096, MIB - 4096),
        ):
            with pytest.raises(ScsiError, match="medium error") as caught:
                await call()
            assert caught.value.errno == errno.EIO
    assert "made smaller: it ends at byte 65536" in running.log.read_text()


# --- addresses ---------------------------------------------------------------------------------


async def refused(face: str, url: str, kind: type[IserblkError], status: int) -> str:
    """Check that opening ``url`` raises exactly ``kind`` and leaves nothing behind; the message."""
    before = census()
    text = await _refused(face, url, kind, status)
    # The exception and the frames that it kept are gone; and so, soon, is a stranger's connection.
    await until(lambda: nothing_new(census(), before))
    return text


async def _refused(face: str, url: str, kind: type[IserblkError], status: int) -> str:
    with pytest.raises(kind) as caught:
        async with opened(face, url):
            pytest.fail("it opened")
    text = str(caught.value)
    assert type(caught.value) is kind
    assert caught.value.exit_status == status
    assert text and "\n" not in text
    return text


@face
async def test_a_lun_that_does_not_exist(start_target: StartTarget, face: str) -> None:
    running = start_target("lun:size=1M")
    for lun in (1, 7, 255, 16383):
        assert f"LUN {lun}" in await refused(face, f"{running.url}/{lun}", NoSuchLun, 21)


@face
async def test_a_target_that_does_not_exist(start_target: StartTarget, face: str) -> None:
    # proves: ISER-10.1.4.6-5, ISER-10.1.4.6-6
    other = "iqn.2026-11.example:other"
    running = start_target("lun:size=1M")
    assert other in await refused(face, f"iser://{running.listen}/{other}/0", TargetNotFound, 21)


@face
async def test_a_host_that_does_not_exist(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("trio.socket.getaddrinfo", getaddrinfo)
    text = await refused(face, f"iser://nowhere.invalid/{IQN}/0", HostNotFound, 23)
    assert "nowhere.invalid" in text


@face
async def test_a_portal_nobody_listens_on(face: str) -> None:
    with socket.socket() as bound:  # but not listening: no other process can take the port
        bound.bind(("127.0.0.1", 0))
        portal = f"127.0.0.1:{bound.getsockname()[1]}"
        assert portal in await refused(face, f"iser://{portal}/{IQN}/0", ConnectFailed, 4)


Serve = Callable[[socket.socket], None]


@contextmanager
def stranger(serve: Serve) -> Iterator[str]:
    """A port where ``serve`` is called with every connection, which is closed afterwards. Yields a
    URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, suppress(OSError):
                        serve(sock)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"iser://127.0.0.1:{listener.getsockname()[1]}/{IQN}/0"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def until_closed(sock: socket.socket) -> None:
    while sock.recv(4096):
        pass


def http(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def chatty(sock: socket.socket) -> None:
    """A server that speaks first and keeps the connection, as SSH and SMTP servers do."""
    sock.sendall(b"220 mail.example ESMTP ready\r\n")
    until_closed(sock)


def iscsi_login_response(sock: socket.socket) -> None:
    """A Traditional iSCSI portal that takes the MPA Request for a bad PDU and says so."""
    sock.recv(4096)
    sock.sendall(bytes([0x3F, 0x80, 0x04]) + bytes(45))
    until_closed(sock)


@face
@pytest.mark.parametrize(("serve", "who"), [(http, "a web server"), (chatty, "a mail or FTP")])
async def test_a_port_that_speaks_something_else(face: str, serve: Serve, who: str) -> None:
    with stranger(serve) as url:
        text = await refused(face, url, OtherProtocol, 4)
    assert text.startswith("127.0.0.1:") and f": {who}" in text and "answers there" in text


@face
async def test_a_portal_that_rejects_every_pdu(face: str) -> None:
    with stranger(iscsi_login_response) as url:
        text = await refused(face, url, LoginError, 5)
    assert "then write iscsi:// for iser://" in text


def at_once(sock: socket.socket) -> None:
    """A server that closes the connection without reading."""


def after_the_request(sock: socket.socket) -> None:
    sock.recv(4096)


def in_the_middle(sock: socket.socket) -> None:
    sock.recv(4096)
    sock.sendall(b"MPA ID Rep")


@face
@pytest.mark.parametrize("serve", [at_once, after_the_request, in_the_middle])
async def test_a_port_that_closes(face: str, serve: Serve) -> None:
    with stranger(serve) as url:
        await refused(face, url, ConnectionLost, 4)


@face
@pytest.mark.parametrize("said", [b"", b"M", b"MPA ID Rep Frame"])
async def test_a_port_that_says_nothing_more(
    face: str, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that falls silent is given up after the connect timeout."""

    def serve(sock: socket.socket) -> None:
        sock.sendall(said)
        until_closed(sock)

    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.05)  # of the attempt on the byte stream
    with stranger(serve) as url:
        await refused(face, url, NoMpaReply, 8)


def mpa_then(last_words: bytes) -> Serve:
    """A server: an iSER portal up to the login, then it sends ``last_words`` and closes. Without
    last words it stays silent and keeps the connection."""

    def serve(sock: socket.socket) -> None:
        responder = MpaResponder()
        while responder.receive_data(sock.recv(4096)) is None:
            pass
        responder.accept(ConnectionFlags(ZBVA_NOT_SUPPORTED).pack())
        sock.sendall(responder.data_to_send())
        if last_words:
            sock.sendall(last_words)
            sock.shutdown(socket.SHUT_WR)
        until_closed(sock)

    return serve


@face
async def test_a_target_that_does_not_answer_the_login(
    face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.05)
    with stranger(mpa_then(b"")) as url:
        await refused(face, url, ConnectTimeout, 8)


@face
async def test_rubbish_instead_of_a_login_response(face: str) -> None:
    # proves: ISER-10.1.4.6-1, ISER-10.1.4.6-2
    with stranger(mpa_then(b"\0\x20" + bytes(range(200)))) as url:
        await refused(face, url, RemoteProtocolError, 4)


@face
async def test_a_target_that_closes_instead_of_a_login_response(face: str) -> None:
    with stranger(mpa_then(b"\0")) as url:  # less than one FPDU
        await refused(face, url, ConnectionLost, 4)
