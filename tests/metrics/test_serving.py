"""The answerer: what is asked, who asks, and what is left behind."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import BadArgument, Busy
from iserblk.metrics import serving
from iserblk.metrics.address import Address
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.serving import (
    CLIENTS,
    Listener,
    Page,
    host_untrusted,
    judge_untrusted,
    names_untrusted,
    path_untrusted,
    serve,
    serve_document,
    wants_sessions_untrusted,
)
from iserblk.metrics.target_reading import SessionReading, TargetReading
from tests.metrics.answerers import connected, said, scraped, served
from tests.metrics.test_exposition import EXAMPLE
from tests.support.until import until


async def test_a_scrape(address: Address) -> None:
    async with served(address):
        assert await scraped(address) == EXAMPLE
        assert await scraped(address) == EXAMPLE


async def test_many_scrapes_at_once(address: Address) -> None:
    async with served(address), trio.open_nursery() as nursery:
        for _ in range(CLIENTS):
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
        answer = await said(address, b"GET /met", b"rics HTTP/1.1\r\nHost: localhost\r", b"\n\r\n")
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


@pytest.mark.parametrize(
    ("request_line", "wanted"),
    [
        ("GET /metrics?sessions HTTP/1.0", True),
        ("GET /metrics?sessions=1 HTTP/1.0", False),
        ("GET /metrics HTTP/1.0\r\nA: ?sessions", False),
    ],
)
async def test_sessions_are_for_those_who_ask(
    request_line: str, wanted: bool, tmp_path: Path
) -> None:
    session = SessionReading("iqn.host", "192.0.2.1")
    target = TargetReading("iqn", "url", sessions=1, named_sessions=(session,))
    listener = Listener(tmp_path / "socket")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, listener, lambda: ProcessReading(1, "1", (), (target,)))
        answer = await said(tmp_path / "socket", f"{request_line}\r\n\r\n".encode())
        assert (b'initiator="iqn.host"' in answer) == wanted
        nursery.cancel_scope.cancel()


@given(st.binary())
def test_any_head_has_a_status(head: bytes) -> None:
    wants_sessions_untrusted(head)
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
    monkeypatch.setattr(serving, "REQUEST_S", 0.05)
    async with served(tmp_path / "socket"):
        assert await said(tmp_path / "socket", b"GET /metr") == b""


async def test_slow_clients_keep_no_other_away(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that ask nothing, or that do not take their answer, give way to a new one."""
    monkeypatch.setattr(serving, "REQUEST_S", 3600.0)
    monkeypatch.setattr(serving, "ANSWER_S", 3600.0)

    async def document() -> tuple[str, bytes]:
        return "text/plain", bytes(16 << 20)

    listener = Listener(address)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_document, listener.socket, document)
        held = [await connected(address) for _ in range(3 * CLIENTS)]
        for stream in [await connected(address) for _ in range(3 * CLIENTS)]:
            with suppress(trio.BrokenResourceError):  # it may have given way already
                await stream.send_all(b"GET /metrics HTTP/1.0\r\n\r\n")
            held.append(stream)
        answer = await said(address, b"HEAD /metrics HTTP/1.0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
        nursery.cancel_scope.cancel()
    for stream in held:
        await stream.aclose()
    listener.close()


async def test_a_flood_keeps_no_other_address_away() -> None:
    """A client that takes its time, while others come again and again from another address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        async def document() -> tuple[str, bytes]:
            return "text/plain", b"the metrics"

        async def come(address: str) -> trio.SocketStream:
            sock = trio.socket.socket()
            await sock.bind((address, 0))
            await sock.connect(("127.0.0.1", port))
            return trio.SocketStream(sock)

        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            nursery.start_soon(serve_document, listening, document)
            honest = await stack.enter_async_context(await come("127.0.0.2"))
            for piece in (b"GET /metrics HT", b"TP/1.0\r\n\r\n"):
                flood = [
                    await stack.enter_async_context(await come("127.0.0.1"))
                    for _ in range(3 * CLIENTS)
                ]
                for each in flood[:CLIENTS]:  # all of it has been accepted, but for the last ones
                    with suppress(trio.BrokenResourceError):
                        assert await each.receive_some(1) == b""
                await honest.send_all(piece)
            assert (await read_all(honest)).endswith(b"\r\n\r\nthe metrics")
            nursery.cancel_scope.cancel()


async def read_all(stream: trio.SocketStream) -> bytes:
    return b"".join([piece async for piece in stream])


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


@pytest.mark.parametrize("kind", [ModuleNotFoundError, ImportError, ZeroDivisionError])
async def test_what_cannot_be_loaded_does_not_end_the_disks(
    kind: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the middle of an upgrade, say: a line then. What is a bug has its traceback."""

    def load() -> NoReturn:
        raise kind("of another version")

    monkeypatch.setattr(serving, "START_S", 0.0)
    monkeypatch.setattr(serving, "load_exposition", load)
    path = tmp_path / "socket"
    async with served(path):
        await until(lambda: "of another version" in caplog.text)
        monkeypatch.undo()
        assert await scraped(path) == EXAMPLE
    assert ("Traceback" in caplog.text) == (kind is ZeroDivisionError)


# --- the client ----------------------------------------------------------------------------------


# --- who asks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        (None, True),  # no browser
        ("localhost", True),
        ("LOCALHOST:13260", True),
        ("127.0.0.1:13260", True),
        ("[::1]:13260", True),
        ("192.0.2.1", True),
        ("storage1:13260", True),
        ("Storage1.", True),
        ("evil.example", False),
        ("storage1.evil.example", False),
        ("localhost.evil.example:13260", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[evil.example]", False),
        ("localhost\r\nHost: evil.example", False),
    ],
)
async def test_a_loopback_port_answers_to_names_of_this_machine(
    host: str | None, ours: bool
) -> None:
    """So no page of another site can have a browser ask, by a name that it gives this address."""
    line = "" if host is None else f"Host: {host}\r\n"
    request = f"GET /metrics HTTP/1.1\r\n{line}\r\n".encode()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_document, listening, document, None, None, ("storage1",))
            answer = await said(listening.getsockname(), request)
            nursery.cancel_scope.cancel()
    assert answer.split()[1] == (b"200" if ours else b"421")
    assert answer.endswith(b"a document") == ours


async def test_a_unix_socket_is_asked_by_any_name(tmp_path: Path) -> None:
    async with served(tmp_path / "socket"):
        answer = await said(tmp_path / "socket", b"GET / HTTP/1.1\r\nHost: any.name\r\n\r\n")
    assert answer.split()[1] == b"200"


async def document() -> tuple[str, bytes]:
    return "text/plain", b"a document"


async def html(query: bytes) -> bytes:
    return b"<p>" + query


@pytest.mark.parametrize(
    ("path", "host", "status", "body"),
    [
        ("/", "localhost", 200, b"<p>"),
        ("/?lun=1", "localhost", 200, b"<p>lun=1"),
        ("/metrics", "localhost", 200, b"a document"),
        ("/metrics?sessions", "localhost", 200, b"a document"),
        ("/metrics", "collectors.know.it", 200, b"a document"),
        ("/", "evil.example", 421, b"421 Misdirected Request"),
        ("/page", "localhost", 404, b"404 Not Found"),
    ],
)
async def test_a_page(path: str, host: str, status: int, body: bytes) -> None:
    """Where others may ask, too: collectors by any name, browsers by an address."""
    with socket.create_server(("0.0.0.0", 0)) as listening:
        listening.setblocking(False)
        address = "127.0.0.1", listening.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                serve_document, listening, document, None, Page(html, "default-src 'none'")
            )
            request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"
            head, _, said_body = (await said(address, request.encode())).partition(b"\r\n\r\n")
            nursery.cancel_scope.cancel()
    assert head.split()[1] == str(status).encode()
    assert said_body.startswith(body)
    fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
    assert fields[b"X-Content-Type-Options"] == b"nosniff"
    assert fields[b"Referrer-Policy"] == b"no-referrer"
    assert fields[b"Cache-Control"] == b"no-store"
    assert not {b"Access-Control-Allow-Origin", b"Set-Cookie"} & set(fields)
    is_page = body.startswith(b"<")
    assert (fields.get(b"Content-Security-Policy") == b"default-src 'none'") == is_page
    assert (fields[b"Content-Type"] == b"text/html; charset=utf-8") == is_page


async def test_a_page_is_only_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_document, listening, document, None, Page(html, "x"))
            for method in ("POST", "PUT", "DELETE", "OPTIONS"):
                request = f"{method} / HTTP/1.1\r\nHost: localhost\r\n\r\n"
                answer = await said(listening.getsockname(), request.encode())
                assert answer.split()[1] == b"405"
            nursery.cancel_scope.cancel()


@given(st.binary())
def test_any_head_has_a_host_or_none(head: bytes) -> None:
    names_untrusted(host_untrusted(head), ())
    path_untrusted(head)
