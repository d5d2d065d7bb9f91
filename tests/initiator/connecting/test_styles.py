"""How a connection becomes iSER: cm, stream, and what style=auto makes of a portal."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import trio

from iserblk.errors import (
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    IserRefused,
    LoginError,
    NoMpaReply,
    OtherProtocol,
)
from iserblk.initiator.connecting import login as logging_in
from iserblk.initiator.connecting import reach, speakers, styles
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.initiator.connecting.styles import CM, STREAM, Styles
from iserblk.initiator.session.session import Session
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.options import Options
from iserblk.rcap.iwarp.mpa import MpaResponder
from iserblk.url import parse_place, parse_url
from tests.support.listening import end_threads
from tests.support.logs import FALLBACK
from tests.support.portal import Portal, receive
from tests.support.target import IQN
from tests.target.test_server import serving
from tests.vectors import streaming_login as golden

MPA = b"MPA ID Req Frame"
TRADITIONAL = r": Traditional iSCSI is used: (style=stream|fallback=iscsi)"


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch: pytest.MonkeyPatch) -> Styles:
    memory = Styles()
    monkeypatch.setattr(reach, "STYLES", memory)
    return memory


def end(session: Session) -> dict[str, object]:
    """What the session says about its connection, which is then closed."""
    about = session.describe()
    session.fail(ConnectionLost("end of the test"))
    return about


@contextmanager
def portal(**options: bool) -> Iterator[Portal]:
    made = Portal(**options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


@contextmanager
def in_front(
    port: int, answer: Callable[[bytes], bool | None]
) -> Iterator[tuple[int, list[bytes]]]:
    """A port that hands connections on to ``port`` if ``answer`` says so for their first 16 bytes;
    False: it closes them; None: it says nothing. Yields it, and the first bytes that came."""
    seen: list[bytes] = []
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        threads.append(thread)

    def pump(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            first = connection.recv(16, socket.MSG_PEEK)
            seen.append(first)
            verdict = answer(first)
            if verdict is None:
                return
            if not verdict:
                connection.recv(65536)
                connection.shutdown(socket.SHUT_RDWR)
                return
            behind = socket.create_connection(("127.0.0.1", port))
            ends.append(behind)
            start(pump, connection, behind)
            pump(behind, connection)

    def accept(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                ends.append(connection)
                start(serve, connection)

    ends.append(socket.create_server(("127.0.0.1", 0)))
    start(accept, ends[0])
    try:
        yield ends[0].getsockname()[1], seen
    finally:
        end_threads(threads, ends)


def at(port: int) -> str:
    return f"iser://127.0.0.1:{port}/{IQN}/0"


@pytest.mark.parametrize("style", ["cm", "stream"])
async def test_as_asked(style: str) -> None:
    """One port of the target serves both, and Traditional iSCSI."""
    async with serving() as url:
        about = end(await connect(parse_url(url), Options(style=style)))
        assert (about["datamover"], about["style"]) == ("iser", style)
        assert ("style=stream" in str(about["provider_reason"])) is (style == "stream")
        plain = url.replace("iser://", "iscsi://")
        assert end(await connect(parse_url(plain), Options()))["datamover"] == "tcp"


@pytest.mark.parametrize("options", [{"hello": True}, {"mpa_crc": False}, {"mpa_frames": 1}])
async def test_options_of_iser_hold_for_a_byte_stream(options: dict[str, Any]) -> None:
    async with serving() as url:
        about = end(await connect(parse_url(url), Options(style="stream", **options)))
    assert about["hello"] == options.get("hello", False)
    assert about["mpa_crc"] == options.get("mpa_crc", True)
    assert about["mpa_enhanced"] and about["ord"] == 64


# shows: SYSTEM-5
@pytest.mark.logs(TRADITIONAL)
async def test_the_same_connection_goes_on() -> None:
    """A target without iSER: Traditional iSCSI, and no second connection.

    proves: ISER-2.2-1
    """
    with portal() as there:
        session = await connect(parse_url(at(there.port)), Options(style="stream"))
        about = end(session)
        assert (there.logins, there.mpa) == (1, 0)
    assert about["datamover"] == "tcp"
    assert about["provider_reason"] == (
        "style=stream, and the target does not agree to iSER (RDMAExtensions is not Yes)"
    )


async def test_auto_finds_cm_first(fresh_memory: Styles) -> None:
    async with serving() as url:
        port = parse_url(url).port
        with in_front(port, lambda _: True) as (front, seen):
            for _ in range(2):
                end(await connect(parse_url(at(front)), Options()))
    assert seen == [MPA] * 2
    assert fresh_memory.order("127.0.0.1", front) == (CM, STREAM)


async def test_auto_finds_stream_and_remembers_it(fresh_memory: Styles) -> None:
    """A portal that knows only the specification's style: the next connection begins with it."""
    async with serving() as url:
        port = parse_url(url).port
        with in_front(port, lambda first: first != MPA) as (front, seen):
            there = parse_url(at(front))
            for _ in range(2):
                about = end(await connect(there, Options()))
                assert about["style"] == "stream"
            assert [first[:1] for first in seen] == [b"M", b"C", b"C"]
            # What another user says holds for that user.
            with pytest.raises(ConnectionLost, match="during MPA start-up"):
                await connect(there, Options(style="cm"))
            # Discovery uses what is known to work there.
            answer = await send_targets(parse_place(f"iser://127.0.0.1:{front}"), Options())
            assert [record.name for record in answer.targets] == [IQN]
            assert seen[-1][:1] == b"C" and answer.scheme == "iser"


async def test_what_worked_is_no_longer_so(fresh_memory: Styles) -> None:
    """The other style is tried then, and remembered."""
    async with serving() as url:
        port = parse_url(url).port
        with in_front(port, lambda first: first == MPA) as (front, seen):
            fresh_memory.learn("127.0.0.1", front, STREAM)
            about = end(await connect(parse_url(at(front)), Options()))
    assert about["style"] == "cm" and [first[:1] for first in seen] == [b"C", b"M"]
    assert fresh_memory.order("127.0.0.1", front) == (CM, STREAM)


async def test_auto_does_not_leave_iser_unasked() -> None:
    """Without fallback=iscsi a target of Traditional iSCSI stays refused, and one line says why."""
    with portal(slam=True) as there, pytest.raises(OtherProtocol) as error:
        await connect(parse_url(at(there.port)), Options())
    assert "write iscsi://" in str(error.value) and "style" not in str(error.value)
    assert there.logins == 1


@pytest.mark.logs(FALLBACK)
async def test_auto_with_fallback_needs_no_further_connection() -> None:
    with portal(slam=True, digests=True) as there:
        about = end(await connect(parse_url(at(there.port)), Options(fallback="iscsi")))
        assert (there.mpa, there.logins) == (1, 1)
    assert about["datamover"] == "tcp"
    # Digests take the place of the CRC of iSER's frames.
    assert (about["header_digest"], about["data_digest"]) == ("CRC32C", "CRC32C")


async def test_a_portal_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(speakers, "ANSWER_S", 0.2)
    with in_front(0, lambda _: None) as (front, seen):
        with pytest.raises(NoMpaReply, match=r"no MPA Reply.*with style=stream: no login within"):
            await connect(parse_url(at(front)), Options())
        with pytest.raises(ConnectTimeout, match="no login within"):
            await connect(parse_url(at(front)), Options(style="stream"))
    assert [first[:1] for first in seen[:2]] == [b"M", b"C"]  # the others ask who is there


@pytest.mark.parametrize("style", [CM, STREAM])
async def test_a_known_portal_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, fresh_memory: Styles, style: str
) -> None:
    """It is in trouble, and knows no other style for that: a reconnection does not wait twice."""
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.2)
    with in_front(0, lambda _: None) as (front, seen):
        fresh_memory.learn("127.0.0.1", front, style)
        fresh_memory.note_right("iser", "127.0.0.1", front)
        with pytest.raises(ConnectTimeout) as error:
            await connect(parse_url(at(front)), Options())
    assert "with style=" not in str(error.value) and len(seen) == 1


async def test_a_refusal_is_no_reason_for_another_style() -> None:
    """Whoever answers the login has spoken."""
    with portal() as there:
        there.redirect = (0x0202, "")
        with pytest.raises(LoginError) as error:
            await connect(parse_url(at(there.port)), Options(style="stream"))
    assert error.value.status == 0x0202 and not isinstance(error.value, IserRefused)
    assert there.logins == 1


@pytest.mark.parametrize(
    ("behind", "error", "words"),
    [
        (b"MPA ID Rep Frame\x20\x01\0\0", IserblkError, "rejected the connection, behind a login"),
        (b"no", IserblkError, "no MPA frame.*behind a login that agreed to iSER"),
        (
            None,
            ConnectionLost,
            "behind the login: .*(the peer closed the connection|reset by peer)",
        ),
        (b"", ConnectTimeout, "agreed to iSER, but sent no MPA Reply within 0.2 s"),
    ],
)
async def test_start_up_that_fails_behind_the_login(
    behind: bytes | None,
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging_in, "MPA_TIMEOUT_S", 0.2)
    with iser_portal(behind) as port, pytest.raises(error, match=words):
        await connect(parse_url(at(port)), Options(style="stream"))


@contextmanager
def iser_portal(behind: bytes | None, iser: bool = True) -> Iterator[int]:
    """A portal that agrees to iSER on a byte stream, and answers the MPA Request with ``behind``;
    None: closes. Not ``iser``: one of Traditional iSCSI, with ``behind`` in the last segment of the
    login. Either waits for the answer to a ping, if it has sent one."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError, EOFError):
                connection, _ = server.accept()
                with connection:
                    login = LoginTarget(
                        LoginTargetConfig(IQN, 1, rdma=iser, max_recv_data_segment_length=8192)
                    )
                    while not login.done:
                        for header, data in login.receive(*receive(connection)):
                            rest = behind or b"" if login.done and not iser else b""
                            pad = bytes(-len(data) & 3)
                            connection.sendall(header + data + pad + rest)
                    if iser:
                        if behind is None:
                            return
                        connection.recv(1000)
                        connection.sendall(behind)
                    heard.append(connection.recv(1000))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(20)
    assert not thread.is_alive()
    if behind is not None and golden.UNASKED[48:-4] in behind:
        (answer,) = heard
        assert answer[48 if iser else 0] & 0x3F == 0, "a NOP-Out"


@pytest.mark.logs(TRADITIONAL)
@pytest.mark.parametrize("iser", [True, False])
async def test_a_pdu_in_the_last_segment(iser: bool) -> None:
    """A target that does not wait: its ping comes in one segment with the MPA Reply, or with the
    final Login Response of Traditional iSCSI. It is answered, though nothing else comes."""
    ping = golden.UNASKED if iser else golden.UNASKED[48:-4]
    with iser_portal(golden.MPA_REPLY + ping if iser else ping, iser) as port:
        session = await connect(
            parse_url(at(port)), Options(style="stream", mpa_crc=False, io_timeout=2.0)
        )
        end(session)


async def test_several_clients_on_one_port() -> None:
    """Each in its style, at the same time."""
    async with serving() as url:
        sessions: list[Session] = []

        async def one(text: str, style: str) -> None:
            sessions.append(await connect(parse_url(text), Options(style=style)))

        async with trio.open_nursery() as nursery:
            for style in ("cm", "stream"):
                nursery.start_soon(one, url, style)
            nursery.start_soon(one, url.replace("iser://", "iscsi://"), "auto")
        abouts = [end(session) for session in sessions]
    assert sorted((str(about["datamover"]), about.get("style", "")) for about in abouts) == [
        ("iser", "cm"),
        ("iser", "stream"),
        ("tcp", ""),
    ]


def test_the_memory_is_bounded() -> None:
    memory = Styles()
    for port in range(styles.MAXIMUM + 2):
        memory.learn("host", port, STREAM)
    assert memory.order("host", 0) == memory.order("host", 1) == (CM, STREAM)
    assert memory.order("host", 2) == memory.order("host", styles.MAXIMUM + 1) == (STREAM, CM)
    memory.learn("host", 2, CM)  # known again, and the youngest
    assert memory.order("host", 2) == (CM, STREAM) and memory.order("host", 3) == (STREAM, CM)


@pytest.mark.parametrize("style", ["auto", CM, STREAM])
async def test_a_header_that_the_target_does_not_use(style: str) -> None:
    """It takes iSER, and is not said to take none."""
    async with serving() as url:
        with pytest.raises(ConnectionLost, match=r"\(iserblk target --header 12\)"):
            await connect(parse_url(url), Options(header=12, style=style))
        end(await connect(parse_url(url), Options(style=style)))


async def test_a_header_that_the_target_alone_uses() -> None:
    async with serving(header=12) as url:
        with pytest.raises(ConnectionLost, match="add header=12 to the URL"):
            await connect(parse_url(url), Options())


async def test_a_silent_target_and_another_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of another kind may wait for the rest of a message."""
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.2)
    reply = MpaResponder()
    assert reply.receive_data(MPA + b"\x50\x02\0\4\0\x10\0\x10") is not None
    reply.accept()
    answer = reply.data_to_send()

    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1000)
                connection.sendall(answer)
                while connection.recv(1000):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ConnectTimeout, match=r"\(iserblk target --header 12\)"):
            await connect(parse_url(at(server.getsockname()[1])), Options(header=12))
        thread.join(20)
