"""What the doctor says about portals of every kind; none can keep it waiting."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial

import pytest
import trio

from iserblk.doctor import portal as doctor
from iserblk.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from iserblk.doctor.portal import Limits, PortalReport, check_portal
from iserblk.errors import HostNotFound, NotSupported
from iserblk.initiator.connecting import verbs
from iserblk.initiator.connecting.iwarp import Address
from iserblk.initiator.session.deadlines import STEP_S
from iserblk.iscsi import bhs
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.rcap.iwarp.mpa import MpaResponder
from iserblk.target.iscsi import listening
from iserblk.target.iscsi.accepting import accept
from iserblk.target.scsi.device import LogicalUnit
from iserblk.url import Url
from tests.support import logs
from tests.support.fabric import Fabric
from tests.support.portal import Portal, portals
from tests.support.target_here import serve
from tests.target.fake_store import FakeStore

pytestmark = pytest.mark.logs(logs.FALLBACK)

IQN = "iqn.2026-11.example:disk"
SHORT = Limits(resolve=0.2, tcp=0.2, mpa=0.2, route=0.2, verbs=0.2, login=0.4, logout=0.2)
PATIENCE_S = 20.0  # only a test that fails ever waits that long
HTTP = b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n"

Serve = Callable[[trio.SocketStream], object]


@pytest.fixture(autouse=True)
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """A machine without devices, unless a test says otherwise."""
    fabric = Fabric()
    fabric.missing = "no RDMA device"
    monkeypatch.setattr(verbs, "provider", fabric)
    monkeypatch.setattr(verbs, "GRACE_S", 0.0)
    monkeypatch.setattr(listening, "available", lambda: None)
    monkeypatch.setattr(listening, "make_listener", fabric.listener)
    return fabric


@asynccontextmanager
async def target(
    rdma: bool = False, transport: str = "", connections: int = 8, level: int = 2
) -> AsyncIterator[int]:
    """The port of a target of ours. ``connections``, ``level``: the most that it agrees to."""
    send, receive = trio.open_memory_channel[str](1)
    luns = {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)}
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    serve,
                    f"127.0.0.1:0{transport and f',transport={transport}'}",
                    IQN,
                    luns,
                    send.send_nowait,
                    rdma=rdma,
                    max_connections=connections,
                    error_recovery_level=level,
                )
            )
            ready = await receive.receive()
            yield int(ready.rpartition(":disk")[0].split("/")[2].rpartition(":")[2])
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def stranger(answer: bytes, close: bool) -> AsyncIterator[int]:
    """The port of a server that sends ``answer`` after the first bytes that it receives."""

    async def talk(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            await stream.receive_some()
            await stream.send_all(answer)
            while not close and await stream.receive_some():
                pass

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, talk, [listener])
            yield listener.socket.getsockname()[1]
            nursery.cancel_scope.cancel()


@contextmanager
def refusing() -> Iterator[int]:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


async def look(
    port: int,
    iqn: str = "",
    limits: Limits = SHORT,
    host: str = "127.0.0.1",
    scheme: str = "iser",
    lun: int | None = None,
    **options: object,
) -> PortalReport:
    url = Url(scheme, host, port, iqn, lun)
    return await check_portal(url, Options(**options), limits)  # type: ignore[arg-type]


def at(report: PortalReport, what: str) -> Finding:
    (found,) = [each for each in report.findings if each.name.split(" ")[0] == what]
    return found


@pytest.mark.parametrize("iqn", [IQN, ""], ids=["url", "portal"])
async def test_a_good_target(iqn: str) -> None:
    async with target() as port:
        report = await look(port, iqn, Limits())
    assert (report.error, report.choice) == (None, "iwarp")
    assert at(report, "TCP").text == "takes connections"
    assert at(report, "MPA").text == "speaks iWARP: MPA revision 2, enhanced, with CRC"
    assert at(report, "choice").text == "iwarp: no RDMA device"
    login = at(report, "login")
    assert f"accepted {f'to {IQN}' if iqn else 'for discovery'}, over iwarp, as iqn." in login.text
    assert {each.status for each in report.findings} == {OK, SKIPPED}
    assert at(report, "rdma_cm").status == SKIPPED


async def test_each_step_is_timed() -> None:
    """Those that were taken, and no others."""
    async with target() as port:
        report = await look(port, IQN, Limits())
    timed = {each.name.split(" ")[0] for each in report.findings if each.seconds is not None}
    assert timed == {"host", "TCP", "MPA", "login", "discovery", "REPORT", "INQUIRY"}
    assert all(each.seconds is None or each.seconds > 0 for each in report.findings)
    with refusing() as port:
        report = await look(port)
    timed = {each.name.split(" ")[0] for each in report.findings if each.seconds is not None}
    assert timed == {"host", "TCP"}


async def test_what_is_behind_the_login() -> None:
    """The portals that the target names, its LUNs, and what a LUN is."""
    async with target() as port:
        report = await look(port, IQN, Limits())
        assert at(report, "discovery").text == f"the target names 1 portal: 127.0.0.1:{port}"
        assert at(report, "REPORT").text == "the target has 1 LUN: 0 for this initiator"
        assert at(report, "INQUIRY").text == "LUN 0: a disk, ISERBLK FILE 0001"
        report = await look(port, IQN, Limits(), lun=5)
        asked = at(report, "INQUIRY")
        assert (report.error, asked.status) == (None, WARNING)
        assert asked.text == "the target has no LUN 5 for this initiator"
        assert asked.remedy.startswith("correct the LUN's number")
        report = await look(port, "", Limits())
        assert at(report, "discovery").text == f"the portal knows 1 target: {IQN}"
        assert {"REPORT LUNS", "INQUIRY"}.isdisjoint(each.name for each in report.findings)


async def test_a_target_that_answers_no_command() -> None:
    """A login works, so the verdict is good; what does not work is a warning."""
    with portals(1) as (portal,):
        report = await look(portal.port, IQN, Limits(), scheme="iscsi")
    assert (report.error, at(report, "login").status) == (None, OK)
    assert at(report, "REPORT").status == WARNING and at(report, "REPORT").remedy
    assert at(report, "INQUIRY").text == "not tried: no LUN is known"
    assert portal.asked == [IQN] and at(report, "discovery").status == OK


@pytest.mark.parametrize("io_timeout", [30.0, 1.0])
async def test_a_command_without_an_answer_resets_nothing(io_timeout: float) -> None:
    """No task management function follows it: a LOGICAL UNIT RESET would end the commands of all
    hosts. The connection ends, and with it what the target has of this session."""
    with portals(1) as (portal,):
        portal.silent = True
        limits = replace(SHORT, tcp=PATIENCE_S, login=PATIENCE_S, ask=0.2)
        report = await look(portal.port, IQN, limits, scheme="iscsi", lun=0, io_timeout=io_timeout)
    assert at(report, "login").status == OK
    assert "no answer within 0.2 s" in at(report, "REPORT").text
    assert at(report, "INQUIRY").text == "not tried: the connection is lost"
    assert portal.heard == [bhs.SCSI_COMMAND]


def test_a_command_is_given_up_before_a_lun_is_reset() -> None:
    """Whatever io-timeout is: ABORT TASK comes after a second at the earliest."""
    assert Limits().ask < 1 + STEP_S


@pytest.mark.parametrize("iqn", ["", IQN])
async def test_a_byte_stream_first(iqn: str, fabric: Fabric) -> None:
    """With style=stream only the login can tell; neither MPA nor a device is asked before it."""
    fabric.missing = None
    async with target() as port:
        report = await look(port, iqn, Limits(), style="stream")
    assert (report.error, report.choice) == (None, "iwarp" if iqn else "tcp")
    assert at(report, "MPA").text == "not looked at: with style=stream it follows the login"
    assert at(report, "rdma_cm").text == "not looked at: style=stream"
    agreed = "iwarp: style=stream, and the login agreed to iSER"
    none = "tcp: Traditional iSCSI, as only a login to a target can agree to iSER; give a URL with"
    assert at(report, "choice").text.startswith(agreed if iqn else none)
    assert f", over {'iwarp' if iqn else 'tcp'}, as iqn." in at(report, "login").text
    assert {each.status for each in report.findings} == {OK, SKIPPED}


@pytest.mark.logs("Traditional iSCSI is used")
async def test_a_byte_stream_that_stays_one() -> None:
    """With style=stream a target that does not agree to iSER is used without: not "iSER works"."""
    async with target(transport="tcp") as port:
        report = await look(port, IQN, Limits(), style="stream")
    assert (report.error, report.choice) == (None, "tcp")
    choice = at(report, "choice").text
    assert choice == "tcp: Traditional iSCSI, as the login does not agree to iSER"
    assert f"accepted to {IQN}, over tcp" in at(report, "login").text


async def test_a_kernel_without_sctp(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NotSupported("this kernel has no SCTP")

    monkeypatch.setattr("iserblk.initiator.connecting.sctp.check_available", missing)
    async with target() as port:
        report = await look(port, IQN, Limits(), rcap="iwarp-sctp")
    assert report.error is not None and report.error.exit_status == 27
    assert at(report, "SCTP").remedy.startswith("modprobe sctp")


async def test_what_the_target_does_not_agree_to() -> None:
    async with target(connections=2, level=1) as port:
        report = await look(port, IQN, Limits(), connections=2, error_recovery_level=1)
        assert at(report, "login").text.endswith(f"as {initiator_name('')}")
        report = await look(port, IQN, Limits(), connections=4, error_recovery_level=2)
    said = "; the target takes 2 connection(s) of a session; it agrees to error recovery level 1"
    assert at(report, "login").text.endswith(said)
    assert at(report, "login").status == OK


async def test_only_a_byte_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A portal that takes no MPA Request before the login: other commands find that out."""

    async def no_mpa(sock: trio.socket.SocketType, mpa: bool) -> object:
        first = await sock.recv(1, socket.MSG_PEEK)
        return None if first == b"M" else await accept(sock, mpa)

    monkeypatch.setattr("iserblk.target.server.accept", no_mpa)
    async with target() as port:
        report = await look(port, IQN, Limits())
        assert (report.error, report.choice) == (None, "iwarp")
        assert at(report, "MPA").status == WARNING
        assert at(report, "choice").text == "iwarp: style=stream, and the login agreed to iSER"
        assert f"accepted to {IQN}, over iwarp" in at(report, "login").text
        report = await look(port, "iqn.2026-11.example:other", Limits())
        assert report.error is not None and report.error.exit_status == 21
        assert "correct the target's name" in at(report, "login").remedy


@pytest.mark.logs("Traditional iSCSI is used")
async def test_no_iser_but_traditional_iscsi() -> None:
    """The findings say what works."""
    with portals(1, lambda: Portal(slam=True)) as (portal,):
        report = await look(portal.port, IQN, Limits())
    assert report.error is not None and report.error.exit_status == 4
    assert report.choice is None
    assert at(report, "MPA").status == ERROR
    assert at(report, "MPA").text.endswith("; it speaks Traditional iSCSI")
    assert at(report, "MPA").remedy.startswith("write iscsi:// in place of iser://")
    assert "fallback=iscsi" in at(report, "choice").remedy
    login = at(report, "login").text
    assert "over tcp" in login and login.endswith("the target does not agree to iSER")


async def test_a_device_leads_there(fabric: Fabric) -> None:
    fabric.missing = None
    async with target(rdma=True) as port:
        report = await look(port, IQN, Limits())
        assert (report.error, report.choice) == (None, "verbs")
        cm = at(report, "rdma_cm").text
        assert cm == "takes connections through fake0 (RoCE, STags are memory windows)"
        assert (
            at(report, "choice").text
            == "verbs: fake0 leads there, and the target takes connections"
        )
        assert ", over verbs, as " in at(report, "login").text
        report = await look(port, IQN, Limits(), rcap="iwarp")
        assert report.choice == "iwarp"
        assert at(report, "rdma_cm").text == "not looked at: rcap=iwarp"
        report = await look(port, IQN, Limits(), rcap="verbs")
        assert report.choice == "verbs"
        assert at(report, "TCP").status == at(report, "MPA").status == SKIPPED


async def test_nobody_listens_by_rdma_cm(fabric: Fabric) -> None:
    """A warning only: software iWARP reaches the target."""
    fabric.missing = None
    async with target() as port:
        report = await look(port, IQN, Limits())
        assert (report.error, report.choice) == (None, "iwarp")
        cm = at(report, "rdma_cm")
        assert (cm.status, cm.text) == (WARNING, "rejected: nobody listens there by rdma_cm")
        assert "enable iSER" in cm.remedy
        assert "nobody listens there by rdma_cm" in at(report, "choice").text
        report = await look(port, IQN, Limits(), rcap="verbs")
    assert report.error is not None and report.error.exit_status == 4
    assert at(report, "rdma_cm").status == ERROR


async def test_only_rdma_gets_there(fabric: Fabric) -> None:
    """Another program has the TCP port, or none has: a warning only."""
    fabric.missing = None
    async with target(rdma=True) as port:
        (listener,) = fabric.listeners.values()
        with refusing() as closed:
            fabric.listeners[closed] = listener
            report = await look(closed, IQN, Limits())
            del fabric.listeners[closed]
    assert port != closed
    assert (report.error, report.choice) == (None, "verbs")
    assert at(report, "TCP").status == WARNING
    assert at(report, "login").status == OK


async def test_no_devices_and_verbs_asked_for() -> None:
    async with target() as port:
        report = await look(port, IQN, rcap="verbs")
    assert isinstance(report.error, NotSupported)
    assert (report.choice, at(report, "rdma_cm").status) == (None, ERROR)
    assert at(report, "login").status == SKIPPED


async def test_no_such_target() -> None:
    async with target() as port:
        report = await look(port, "iqn.2026-11.example:other", Limits())
    assert report.error is not None and report.error.exit_status == 21
    login = at(report, "login")
    assert login.status == ERROR
    assert "correct the target's name" in login.remedy
    assert report.choice == "iwarp"


async def test_a_closed_port() -> None:
    with refusing() as port:
        report = await look(port)
    assert report.error is not None and report.error.exit_status == 4
    assert (at(report, "TCP").status, at(report, "MPA").status) == (ERROR, SKIPPED)
    assert "Connection refused" in at(report, "TCP").text
    assert "start the target" in at(report, "TCP").remedy
    assert at(report, "choice").text == "rcap=auto finds no way to the target"
    assert at(report, "login").text == "not tried: no address of the portal speaks iSER"


@pytest.mark.parametrize(
    ("answer", "close", "status", "words"),
    [
        (b"", False, 8, "no MPA Reply within 0.2 s"),
        (b"MPA", False, 8, "no MPA Reply within 0.2 s"),
        (b"", True, 4, "closed the connection during MPA start-up"),
        (HTTP, False, 4, "a web server answers there"),
        (HTTP, True, 4, "a web server answers there"),
    ],
    ids=["silent", "half an answer", "closes", "HTTP", "HTTP closes"],
)
async def test_a_port_of_something_else(
    answer: bytes, close: bool, status: int, words: str
) -> None:
    async with stranger(answer, close) as port:
        report = await look(port, IQN)
    assert report.error is not None and report.error.exit_status == status
    assert at(report, "TCP").status == OK
    mpa = at(report, "MPA")
    assert mpa.status == ERROR and words in mpa.text
    web = "correct the port: a web server answers there"
    assert mpa.remedy == web if answer == HTTP else "the port of an iSER target?" in mpa.remedy
    assert (report.choice, at(report, "login").status) == (None, ERROR)


async def test_a_target_that_never_answers_the_login() -> None:
    responder = MpaResponder()
    frame = bytearray(b"MPA ID Req Frame\x50\x02\0\4\0\x10\0\x10")  # enhanced, with CRC
    assert responder.receive_data(bytes(frame)) is not None
    responder.accept()
    async with stranger(responder.data_to_send(), close=False) as port:
        report = await look(port, IQN)
    assert report.error is not None and report.error.exit_status == 8
    assert report.choice == "iwarp"
    assert "no login within 0.4 s" in at(report, "login").text


async def test_a_silent_fabric(fabric: Fabric) -> None:
    fabric.missing = None
    fabric.silent = True
    with refusing() as port:
        report = await look(port)
    assert "no answer about the route within 0.2 s" in at(report, "rdma_cm").text
    assert report.error is not None


async def test_no_such_host() -> None:
    report = await look(3260, host="no.such.host.invalid", limits=Limits())
    assert isinstance(report.error, HostNotFound)
    (only,) = report.findings
    assert (only.name, only.status) == ("host name", ERROR)
    assert "no.such.host.invalid" in only.text and only.remedy


async def test_a_name_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[Address]:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(doctor, "resolve", resolve)
    report = await look(3260, host="slow.example")
    assert report.error is not None and report.error.exit_status == 8
    assert "no answer about slow.example within 0.2 s" in report.findings[0].text


async def test_many_addresses_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten silent addresses take as long as one."""
    async with stranger(b"", close=False) as port:

        async def resolve(host: str, _port: int) -> list[Address]:
            return [Address(socket.AF_INET, (f"127.0.0.{i}", port)) for i in range(1, 11)]

        monkeypatch.setattr(doctor, "resolve", resolve)
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.2")
        async with listener:
            began = trio.current_time()
            report = await look(port, host="many.example")
            assert trio.current_time() - began < 2
    names = [each.name for each in report.findings if each.name.startswith("TCP ")]
    assert names == [f"TCP 127.0.0.{i}:{port}" for i in range(1, 9)]
    assert "the first 8 are looked at" in report.findings[0].text
    assert report.error is not None and report.error.exit_status == 8


# -- Traditional iSCSI -----------------------------------------------------------------------------


@pytest.mark.parametrize("iqn", [IQN, ""], ids=["url", "portal"])
async def test_traditional(iqn: str) -> None:
    """MPA and rdma_cm are not tried then."""
    async with target() as port:
        report = await look(port, iqn, Limits(), scheme="iscsi")
    assert (report.error, report.choice) == (None, "tcp")
    assert at(report, "TCP").status == OK
    for what in ("MPA", "rdma_cm"):
        assert at(report, what).status == SKIPPED
        assert at(report, what).text == "not needed for Traditional iSCSI"
    assert ", over tcp, as " in at(report, "login").text


async def test_traditional_and_nobody_there() -> None:
    with refusing() as port:
        report = await look(port, scheme="iscsi")
    assert report.error is not None and report.error.exit_status == 4
    assert at(report, "TCP").status == ERROR
    assert at(report, "choice").text == "tcp finds no way to the target"
    assert at(report, "login").text == "not tried: no address of the portal takes connections"


async def test_traditional_and_something_else() -> None:
    async with stranger(HTTP, close=True) as port:
        # (It answers: nothing is waited for.)
        report = await look(port, IQN, Limits(), scheme="iscsi")
    assert report.error is not None and report.error.exit_status == 4
    assert at(report, "TCP").status == OK
    assert at(report, "login").status == ERROR


async def test_fallback() -> None:
    """No portal speaks iSER: a warning only."""
    with portals(1, lambda: Portal(slam=True, digests=True)) as (portal,):
        report = await look(portal.port, IQN, Limits(), fallback="iscsi")
    assert (report.error, report.choice) == (None, "tcp")
    assert at(report, "MPA").status == WARNING
    assert "by fallback=iscsi" in at(report, "choice").text
    assert ", over tcp, as " in at(report, "login").text
