"""A portal that does not speak the protocol of the URL: the error names the URL that is right."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import trio

from iserblk.errors import ConnectFailed, ConnectTimeout, LoginError, NoMpaReply, OtherProtocol
from iserblk.initiator.connecting import iwarp, login, reach, speakers
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.initiator.connecting.speakers import login_question, mpa_question
from iserblk.initiator.connecting.styles import Styles
from iserblk.iscsi import pdu
from iserblk.options import Options
from iserblk.url import parse_place, parse_url
from tests.initiator.connecting.test_styles import end, in_front
from tests.support import logs
from tests.support.portal import Portal, portals
from tests.support.profiles.traditional import Lio, Tgtd
from tests.support.target import IQN
from tests.target.test_server import serving

MPA = b"MPA ID Req Frame"
SSH = b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"
HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
END_S = 60.0


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Styles:
    """No memory of other tests; doubt begins at once."""
    monkeypatch.setattr(iwarp, "DOUBT_S", 0.0)
    fresh = Styles()
    monkeypatch.setattr(reach, "STYLES", fresh)
    return fresh


def url(port: int, scheme: str = "iser") -> str:
    return f"{scheme}://127.0.0.1:{port}/{IQN}/0"


def right(port: int) -> str:
    return f"127.0.0.1:{port} speaks Traditional iSCSI, and no iSER: write {url(port, 'iscsi')} in"


@pytest.mark.parametrize("options", [{}, {"style": "cm"}, {"rcap": "iwarp"}])
async def test_silent_to_mpa(options: dict[str, str]) -> None:
    """istgt, and most others: the MPA Request is half a PDU to them."""
    with portals(1) as (portal,), trio.fail_after(END_S):
        with pytest.raises(OtherProtocol) as error:
            await connect(parse_url(url(portal.port)), Options(**options))  # type: ignore[arg-type]
        assert str(error.value).startswith(right(portal.port))
        assert "style" not in str(error.value)
        assert (error.value.exit_status, error.value.speaks) == (4, "Traditional iSCSI")


async def test_discovery() -> None:
    with portals(1) as (portal,), trio.fail_after(END_S):
        place = parse_place(f"iser://127.0.0.1:{portal.port}")
        with pytest.raises(OtherProtocol, match=f"write iscsi://127.0.0.1:{portal.port} in"):
            await send_targets(place, Options())


async def test_agrees_and_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """tgtd: RDMAExtensions=Yes from a portal that has shown what it speaks counts for little. The
    question before has begun no session."""
    monkeypatch.setattr(login, "DOUBTED_S", 0.05)
    monkeypatch.setattr(login, "DOUBTED_TIMES", 1)
    portal = Tgtd()
    try:
        with trio.fail_after(END_S), pytest.raises(OtherProtocol) as error:
            await connect(parse_url(url(portal.port)), Options())
    finally:
        portal.close()
    assert str(error.value).startswith(right(portal.port))
    question, attempt = portal.first_requests
    assert not question.flags & pdu.TRANSIT and not question.tsih
    assert attempt.flags & pdu.TRANSIT and attempt.isid != question.isid


@pytest.mark.logs(logs.FALLBACK)
async def test_agrees_and_is_silent_with_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question is asked there: the MPA Request of the first attempt was not answered either."""
    monkeypatch.setattr(reach, "MPA_TIMEOUT_S", 0.2)
    monkeypatch.setattr(login, "MPA_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(login, "DOUBTED_S", 0.05)
    monkeypatch.setattr(login, "DOUBTED_TIMES", 1)
    portal = Tgtd()
    try:
        with trio.fail_after(END_S):
            session = await connect(parse_url(url(portal.port)), Options(fallback="iscsi"))
            assert end(session)["datamover"] == "tcp"
    finally:
        portal.close()


async def test_one_connection_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """LIO: a second connection would wait for the first. The MPA Request is a whole BHS to it, so
    its answer comes on the first."""
    monkeypatch.setattr(iwarp, "DOUBT_S", 3600.0)
    portal = Lio()
    try:
        with trio.fail_after(END_S), pytest.raises(OtherProtocol) as error:
            await connect(parse_url(url(portal.port)), Options())
    finally:
        portal.close()
    assert str(error.value).startswith(right(portal.port))
    assert portal.logins == 1  # of style=stream


async def test_a_refused_login() -> None:
    """The target's reason comes first; the scheme may be wrong, too."""
    with portals(1) as (portal,), trio.fail_after(END_S):
        portal.redirect = (0x0202, "")
        with pytest.raises(LoginError, match="then write iscsi:// for iser://") as error:
            await connect(parse_url(url(portal.port)), Options())
        assert error.value.status == 0x0202


async def test_a_slow_portal_has_its_time() -> None:
    """MPA is answered only after the question, which nothing answers, has come: it is iSER."""
    asked = threading.Event()

    def answer(first: bytes) -> bool | None:
        if first != MPA:
            asked.set()
            return None
        return asked.wait(END_S)

    async with serving() as there:
        with in_front(parse_url(there).port, answer) as (front, seen):
            assert end(await connect(parse_url(url(front)), Options()))["datamover"] == "iser"
        assert sorted(first[:1] for first in seen) == [b"C", b"M"]  # in threads of their own


async def test_a_portal_that_was_right_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, memory: Styles
) -> None:
    """A reconnection: it is silent because it is in trouble."""
    monkeypatch.setattr(iwarp, "DOUBT_S", 3600.0)
    silent = False

    async with serving() as there:
        with in_front(parse_url(there).port, lambda _: None if silent else True) as (front, seen):
            here = parse_url(url(front))
            end(await connect(here, Options()))
            silent = True
            monkeypatch.setattr(iwarp, "DOUBT_S", 0.0)
            monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.2)
            monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.2)
            with pytest.raises(NoMpaReply):
                await connect(here, Options())
            with pytest.raises(NoMpaReply):
                await connect(here, Options(style="cm"))
            assert seen == [MPA] * 3
            assert memory.right("iser", "127.0.0.1", front)
    with in_front(0, lambda _: None) as (front, seen):
        with pytest.raises(ConnectTimeout):  # another portal of a session that goes on
            await connect(parse_url(url(front)), Options(style="cm"), b"\x80\0\0\0\0\1")
        assert seen == [MPA]


@pytest.mark.parametrize(
    ("scheme", "fallback"), [("iser", "none"), ("iser", "iscsi"), ("iscsi", "none")]
)
async def test_a_portal_that_says_nothing_at_all(
    scheme: str, fallback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The user is told so, once: all attempts together wait for half a minute."""
    monkeypatch.setattr(reach, "SILENT_S", 0.0)
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.5)
    monkeypatch.setattr(reach, "MPA_TIMEOUT_S", 0.5)
    monkeypatch.setattr(speakers, "ANSWER_S", 0.5)
    with in_front(0, lambda _: None) as (port, _), pytest.raises(ConnectTimeout):
        await connect(parse_url(url(port, scheme)), Options(fallback=fallback))
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert said.startswith(f"127.0.0.1:{port} takes connections, and has answered nothing")
    caplog.clear()


@contextmanager
def mpa_alone(silent: bool = False) -> Iterator[int]:
    """As Linux siw: closes on anything but an MPA Request, refuses those that ask for markers.
    ``silent``: says nothing to other bytes."""

    def answer(connection: socket.socket) -> None:
        first = connection.recv(1000)
        if first.startswith(MPA):
            assert first[16] & 0x80, "the target would hear of the connection"
            connection.sendall(b"MPA ID Rep Frame\x60\x01\0\0")
        elif silent:
            connection.recv(1000)

    with stranger(answer) as port:
        yield port


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where ``answer`` has each connection, in a thread of its own, before it is closed."""
    threads: list[threading.Thread] = []
    ends: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    ends.append(connection)
                    threads.append(threading.Thread(target=serve, args=(connection,)))
                    threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield server.getsockname()[1]
        finally:
            for each in (server, *ends):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in (accepting, *threads):
                thread.join(END_S)


@pytest.mark.parametrize("silent", [False, True], ids=["closes", "silent"])
async def test_iscsi_where_only_iser_is(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.5)
    with mpa_alone(silent) as port, pytest.raises(OtherProtocol) as error:
        await connect(parse_url(url(port, "iscsi")), Options())
    assert f"speaks iSER, and no Traditional iSCSI: write {url(port)} in" in str(error.value)


def greets(connection: socket.socket) -> None:
    connection.sendall(SSH)
    while connection.recv(1000):
        pass


def by_lines(connection: socket.socket) -> None:
    """As Python's http.server: waits for the end of a line."""
    text = b""
    while b"\n" not in text:
        if not (more := connection.recv(1000)):
            return
        text += more
    connection.sendall(HTTP)


def at_once(connection: socket.socket) -> None:
    connection.recv(1000)
    connection.sendall(HTTP)


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
@pytest.mark.parametrize(
    ("answer", "what"),
    [(greets, "an SSH server"), (by_lines, "a web server"), (at_once, "a web server")],
)
async def test_no_target_at_all(
    scheme: str, answer: Callable[[socket.socket], None], what: str
) -> None:
    with stranger(answer) as port, pytest.raises(OtherProtocol) as error:
        await connect(parse_url(url(port, scheme)), Options())
    expected = f"127.0.0.1:{port}: {what} answers there, no target: correct the port"
    assert str(error.value).startswith(expected)
    assert error.value.speaks == what


async def test_no_target_and_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``discover HOST``: a question beside the first login finds out who is there, and no login
    is waited for."""
    monkeypatch.setattr(reach, "MPA_TIMEOUT_S", 0.2)
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 3600.0)
    with (
        stranger(by_lines) as port,
        trio.fail_after(END_S),
        pytest.raises(OtherProtocol) as error,
    ):
        await connect(parse_url(url(port)), Options(fallback="iscsi"))
    assert str(error.value).startswith(f"127.0.0.1:{port}: a web server answers there")
    assert "before that" not in str(error.value)


@pytest.mark.parametrize("style", ["auto", "cm", "stream"])
async def test_nobody_and_a_fallback(style: str) -> None:
    """Both attempts fail alike: the error says it once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectFailed) as error:
            await connect(parse_url(url(port)), Options(fallback="iscsi", style=style))
    assert str(error.value) == (
        f"cannot connect to 127.0.0.1:{port}: Connection refused; is the target listening there?"
    )


async def test_a_slow_login_goes_on() -> None:
    """Traditional iSCSI: the question has been answered as it should be."""
    answered = threading.Event()

    class Slow(Portal):
        def iscsi(self, connection: socket.socket) -> None:
            first = connection.recv(200, socket.MSG_PEEK)
            if b"Discovery" in first:
                answered.set()
            else:
                assert answered.wait(END_S)
            super().iscsi(connection)

    with portals(1, Slow) as (portal,), trio.fail_after(END_S):
        session = await connect(parse_url(url(portal.port, "iscsi")), Options())
        assert end(session)["datamover"] == "tcp"
        assert portal.logins == 2


def test_questions() -> None:
    """The Login Request has an end of line for servers of text; the MPA Request asks for
    markers."""
    question = login_question(Options())
    request = pdu.LoginRequest.unpack_from(question)
    assert not request.flags & pdu.TRANSIT and b"SessionType=Discovery\0" in question
    assert b"\r\n\r\n" in question and len(question) % 4 == 0
    assert mpa_question()[:16] == MPA and mpa_question()[16] & 0x80
