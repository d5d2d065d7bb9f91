"""The answerer: what is asked, who asks, and what is left behind."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, Busy, ConnectFailed, ConnectTimeout, RemoteProtocolError
from iserblk.metrics import scraping, serving
from iserblk.metrics.address import Address
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.scraping import scrape
from iserblk.metrics.serving import CLIENTS, Listener, judge_untrusted, serve
from tests.metrics.test_exposition import EXAMPLE


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return tmp_path / "socket" if request.param == "unix" else ("127.0.0.1", free_port())


@asynccontextmanager
async def served(address: Address) -> AsyncIterator[None]:
    listener = Listener(address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, lambda: EXAMPLE)
        yield
        nursery.cancel_scope.cancel()


async def scraped(address: Address) -> ProcessReading:
    return await trio.to_thread.run_sync(scrape, address)


async def connected(address: Address) -> trio.SocketStream:
    if isinstance(address, Path):
        return await trio.open_unix_socket(address)
    return await trio.open_tcp_stream(*address)


async def said(address: Address, *parts: bytes, to_end: bool = False) -> bytes:
    """What is answered, until the other side closes."""
    async with await connected(address) as stream:
        for part in parts:
            await stream.send_all(part)
            await trio.testing.wait_all_tasks_blocked()
        if to_end:
            await stream.send_eof()
        return b"".join([part async for part in stream])


async def test_a_scrape(address: Address) -> None:
    async with served(address):
        assert await scraped(address) == EXAMPLE
        assert await scraped(address) == EXAMPLE


async def test_many_scrapes_at_once(address: Address) -> None:
    async with served(address), trio.open_nursery() as nursery:
        for _ in range(3 * CLIENTS):
            nursery.start_soon(scraped, address)


async def test_a_socket_is_its_owners_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    async with served(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with served(path):
        assert await scraped(path) == EXAMPLE


async def test_a_place_that_is_taken(address: Address) -> None:
    async with served(address):
        with pytest.raises(Busy, match="give another"):
            Listener(address)
        assert await scraped(address) == EXAMPLE


async def test_another_ones_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        async with served(path):
            path.unlink()
            other.bind(str(path))
    assert path.exists()


def test_where_nothing_can_be(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="No such file"):
        Listener(tmp_path / "missing" / "socket")
    (tmp_path / "file").touch()
    with pytest.raises(BadArgument, match="no socket"):
        Listener(tmp_path / "file")


def test_closed_before_it_served(tmp_path: Path) -> None:
    listener = Listener(tmp_path / "socket")
    listener.close()
    listener.close()
    assert os.listdir(tmp_path) == []


# --- what is asked -------------------------------------------------------------------------------


async def test_a_request_in_pieces(address: Address) -> None:
    async with served(address):
        answer = await said(address, b"GET /met", b"rics HTTP/1.1\r\nHost: x\r", b"\n\r\n")
    assert answer.startswith(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4;")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head


@pytest.mark.parametrize(
    ("request_line", "status", "with_body"),
    [
        ("GET / HTTP/1.0", "200", True),
        ("GET /metrics?x=y HTTP/1.1", "200", True),
        ("HEAD /metrics HTTP/1.1", "200", False),
        ("GET /other HTTP/1.1", "404", True),
        ("HEAD /other HTTP/1.1", "404", False),
        ("POST /metrics HTTP/1.1", "405", True),
        ("GET /metrics", "400", True),
        ("GET /metrics HTTP/2", "400", True),
        ("", "400", True),
    ],
)
async def test_requests(request_line: str, status: str, with_body: bool, tmp_path: Path) -> None:
    async with served(tmp_path / "socket"):
        answer = await said(tmp_path / "socket", f"{request_line}\r\nA: b\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == status.encode()
    assert bool(body) == with_body


@given(st.binary())
def test_any_head_has_a_status(head: bytes) -> None:
    status, _ = judge_untrusted(head)
    assert status[:3] in ("200", "400", "404", "405")


async def test_a_request_without_an_end(address: Address) -> None:
    async with served(address):
        with pytest.raises(trio.BrokenResourceError):
            await said(address, *[b"GET /metrics HTTP/1.1\r\n" + b"x" * 1000] * 100)
        assert await said(address, b"GET /", to_end=True) == b""
        assert await scraped(address) == EXAMPLE


async def test_who_asks_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as long as they are there, nobody else waits for more than that."""
    monkeypatch.setattr(serving, "REQUEST_S", 0.05)
    path = tmp_path / "socket"
    async with served(path):
        idle = [await trio.open_unix_socket(path) for _ in range(2 * CLIENTS)]
        assert await scraped(path) == EXAMPLE
        for stream in idle:
            await stream.aclose()


async def test_a_bug_does_not_end_the_disks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def look() -> ProcessReading:
        raise ZeroDivisionError

    listener = Listener(tmp_path / "socket")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, look)
        assert await said(tmp_path / "socket", b"GET / HTTP/1.0\r\n\r\n") == b""
        assert await said(tmp_path / "socket", b"GET /x HTTP/1.0\r\n\r\n") != b""
        nursery.cancel_scope.cancel()
    assert "ZeroDivisionError" in caplog.text


# --- the one who asks ----------------------------------------------------------------------------


@asynccontextmanager
async def answering(path: Path, answer: bytes) -> AsyncIterator[None]:
    async def attend(stream: trio.SocketStream) -> None:
        await stream.receive_some(100)
        await stream.send_all(answer)
        await stream.aclose()

    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(path))
        sock.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, attend, [trio.SocketListener(sock)])
            yield
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-something\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n\xff\xfe",
        b"HTTP/1.0 200 OK\r\n\r\nup 1\n",
    ],
)
async def test_somebody_else_answers(answer: bytes, tmp_path: Path) -> None:
    async with answering(tmp_path / "socket", answer):
        with pytest.raises(RemoteProtocolError, match="socket: "):
            await scraped(tmp_path / "socket")


async def test_an_answer_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "ANSWER_BYTES", 10_000)
    async with answering(tmp_path / "socket", b"x" * 20_000):
        with pytest.raises(RemoteProtocolError, match="without an end"):
            await scraped(tmp_path / "socket")


async def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "TIMEOUT_S", 0.05)
    path = tmp_path / "socket"
    with pytest.raises(BadArgument, match="no such socket"):
        await scraped(path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        with pytest.raises(ConnectFailed, match="nobody serves"):
            await scraped(path)
        other.listen()
        with pytest.raises(ConnectTimeout, match="no answer"):
            await scraped(path)
    with pytest.raises(ConnectFailed, match="nobody serves"):
        await scraped(("127.0.0.1", free_port()))
