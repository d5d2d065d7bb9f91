"""The captured conversations, their targets' side played against our initiator.

Its requests are compared with the recorded ones (opcodes, flags, LUN, length, CDB, immediate
data, what it lets the target read), and what it makes of the answers: status, residual, sense,
placed data, and that every STag is closed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from iserblk.commands.running import command
from iserblk.datamover.iser import RSV, WSV
from iserblk.errors import CommandRejected, OutOfRange, RemoteProtocolError, ScsiError
from iserblk.initiator.connecting.reach import PRIVATE_DATA, READ_DEPTH, connect
from iserblk.initiator.drivers.tasks import TrioDriver, TrioWaiter
from iserblk.iscsi import bhs, pdu, text
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.options import Options
from iserblk.rcap.iwarp import mpa
from iserblk.scsi import status as sam
from iserblk.scsi.sense import Sense
from iserblk.url import parse_url
from tests.interop.recorded import Exchange, exchanges, phases, sense_triple
from tests.interop.target import RecordedTarget
from tests.rcap import streams
from tests.support import logs
from tests.support.census import census, open_regions, stag_tables

pytestmark = pytest.mark.logs(logs.REJECTED)

SCRIPTS = ("lo64k_crc", "lo64k_nocrc", "veth1500_crc", "veth1500_crc_noinv")
VARIANTS = ("mpa_p2p_write_rtr", "mpa_p2p_read_rtr", "mpa_rev1_crc")
KERNEL = "kernel_initiator_v2"
IQN = "iqn.2026-11.lab:t0"

# ib_iser sends a part of the data with the command; we send all of it, or none.
NOT_OUR_WAY = "conn1_072_cmd_2a_65536"


def mpa_stream(name: str, direction: str) -> str:
    return f"{name}/{'conn1_' if name == KERNEL else ''}01_mpa.{direction}.bin"


def conversation(name: str) -> tuple[Exchange, list[Exchange]]:
    """The login, and all that followed it."""
    first, *rest = (phase for phase in phases(name) if "rtr" not in phase)
    assert "login" in first
    (login,) = exchanges(name, first)
    return login, [
        each for phase in rest if phase != NOT_OUR_WAY for each in exchanges(name, phase)
    ]


@asynccontextmanager
async def logged_in(
    name: str, play: Callable[[RecordedTarget], None], options: Options
) -> AsyncIterator[TrioDriver]:
    """Our initiator, logged in to the recorded target of ``name``, which then does ``play``."""
    target = RecordedTarget()
    login, _ = conversation(name)

    def body() -> None:
        asked = target.accept(mpa_stream(name, "t2i"))
        assert asked.enhanced and not asked.markers
        # SendInv allowed, no ZBVA; with the zeroes behind that the Request is as long as a BHS.
        assert asked.private_data == b"\x80".ljust(PRIVATE_DATA, b"\0")
        assert asked.peer_ird == READ_DEPTH >= 1  # R2Ts may be used
        if "rtr" in name:
            target.ready_to_receive(name)
        target.login(login)
        play(target)

    url = parse_url(f"iser://127.0.0.1:{target.port}/{IQN}/0")
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, body, abandon_on_cancel=True))
            session = await connect(url, options)
            driver = TrioDriver(session)
            await nursery.start(driver.run)
            yield driver
    finally:
        target.close()


async def request(driver: TrioDriver, exchange: Exchange) -> None:
    """Send what the recorded initiator sent, and check what comes out."""
    recorded = exchange.request
    if recorded.opcode == bhs.SCSI_COMMAND:
        await scsi(driver, exchange)
    elif recorded.opcode == bhs.LOGOUT_REQUEST:
        await driver.log_out()
    else:
        control = driver.session.queue.take_control()
        assert control is not None
        if recorded.opcode == bhs.NOP_OUT:
            out = pdu.NopOut.unpack_from(recorded.bhs)
            pdu.NopOut(lun=out.lun, itt=0, ttt=out.ttt, cmd_sn=0, exp_stat_sn=0).pack_into(
                control.bhs
            )
        else:
            pdu.TaskManagementRequest.unpack_from(recorded.bhs).pack_into(control.bhs)
        waiter = TrioWaiter()
        waiter.pending = 1
        driver.session.queue.send_immediate(control, waiter)
        await waiter.wait()
        assert control.error is None
        assert control.response == exchange.answer.bhs[2]


async def scsi(driver: TrioDriver, exchange: Exchange) -> None:
    recorded, answer = exchange.request, exchange.answer
    data_in = memoryview(bytearray(recorded.edtl)) if recorded.iser.flags & RSV else None
    writes = recorded.iser.flags & WSV or recorded.data
    operation = command(
        driver.session,
        recorded.bhs[8:16],
        recorded.cdb,
        "lun0",
        data_in=data_in,
        data_out=memoryview(exchange.written) if writes else None,
        short_ok=True,
    )
    if answer.bhs[3] == sam.GOOD:
        moved = await driver.run_operation(operation)
        assert moved == recorded.edtl - answer.number(44)
        if data_in is not None:
            assert data_in[: len(exchange.read)] == exchange.read
            assert not any(data_in[len(exchange.read) :])
        return
    with pytest.raises(ScsiError) as caught:
        await driver.run_operation(operation)
    sense = caught.value.sense
    assert caught.value.status == answer.bhs[3] == sam.CHECK_CONDITION
    assert isinstance(sense, Sense)
    assert (sense.key, sense.asc, sense.ascq) == sense_triple(answer)
    assert isinstance(caught.value, OutOfRange) is (sense.asc == 0x21)
    assert data_in is None or not any(data_in)


# shows: SYSTEM-4
@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS, KERNEL])
async def test_a_conversation(name: str) -> None:
    # proves: ISER-7.3.1-9, ISER-7.3.1-14, ISER-7.3.2-13, ISER-9.5.1-2, ISER-9.5.1-3, ISER-9.5.2-3
    # proves: ISER-7145-1.5.1-1, ISER-7145-1.5.1-4, ISER-7145-1.6-1, ISER-7145-5.1-1
    # proves: ISER-7145-11-3, ISER-2.3-2, ISER-5.1-1, ISER-5.1.1-5, ISER-7.3.6-21, ISER-A.3-1
    # proves: ISER-A.5-1, ISER-A.7-1, ISER-GEN-5.3-1, ISER-RC-3
    _, rest = conversation(name)

    def play(target: RecordedTarget) -> None:
        for exchange in rest:
            target.play(exchange)
        target.end()

    crc = streams.has_crc(name)
    others = stag_tables()
    options = Options(mpa_crc=crc, immediate_data=name == KERNEL)
    async with logged_in(name, play, options) as driver:
        described = driver.session.describe()
        assert described["mpa_crc"] is crc
        assert described["mpa_revision"] == streams.read(mpa_stream(name, "t2i"))[17]
        assert driver.session.parameters.max_burst_length <= 1 << 20
        tables = stag_tables(others)
        assert tables
        for exchange in rest:
            await request(driver, exchange)
            assert not open_regions(tables)
        assert driver.session.error is not None  # logged out
    assert len(rest) >= 3


async def test_a_reject_ends_its_command_alone() -> None:
    """LIO's Reject PDU, for a command; the session goes on."""
    name = "sendtargets_normal"
    (rejected,) = exchanges(name, "03_sendtargets")
    (good,) = exchanges("lo64k_crc", "04b_tur")
    (logout,) = exchanges("lo64k_crc", "07_logout")

    def play(target: RecordedTarget) -> None:
        target.play_reject(rejected)
        target.play(good)
        target.play(logout)
        target.end()

    others = stag_tables()
    async with logged_in(name, play, Options(immediate_data=False)) as driver:
        tables = stag_tables(others)
        assert tables
        inquiry = command(
            driver.session,
            bytes(8),
            bytes((0x12, 0, 0, 0, 36, 0)),
            "lun0",
            data_in=memoryview(bytearray(36)),
        )
        with pytest.raises(CommandRejected):
            await driver.run_operation(inquiry)
        assert not open_regions(tables)
        await request(driver, good)
        await driver.log_out()


@pytest.mark.parametrize("name", ["mpa_reject_markers", "mpa_reject_markers_rev1"])
async def test_a_rejected_start_up(name: str) -> None:
    """siw's Rejects, of both revisions, in words."""
    target = RecordedTarget()
    before = census()["descriptors"]

    def body() -> None:
        target.accept(f"{name}/01_mpa.t2i.bin")
        target.end()

    url = parse_url(f"iser://127.0.0.1:{target.port}/{IQN}/0")
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, body)
            with pytest.raises(RemoteProtocolError, match="rejected"):
                await connect(url, Options())
        target.wire.sock.close()
        assert census()["descriptors"] == before
    finally:
        target.close()


# shows: SYSTEM-49
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("err_badcrc", "MPA: CRC mismatch"),
        ("err_badmsn", "DDP: message sequence number out of range"),
    ],
)
async def test_a_terminate_of_siw_ends_the_session(name: str, words: str) -> None:
    """siw swaps the Terminate's bits; the command in flight ends with the error that they mean."""
    # proves: ISER-10.1.2.2-1

    def play(target: RecordedTarget) -> None:
        assert target.wire.receive() is not None
        target.wire.sock.sendall(streams.read(f"{name}/terminate.t2i.bin"))
        target.end()

    others = stag_tables()
    async with logged_in("lo64k_crc", play, Options()) as driver:
        tables = stag_tables(others)
        buffer = bytearray(4096)
        reading = command(
            driver.session, bytes(8), bytes((0x28, *bytes(7), 8, 0)), "lun0", memoryview(buffer)
        )
        with pytest.raises(RemoteProtocolError, match=words):
            await driver.run_operation(reading)
    assert tables and not open_regions(tables)
    assert not any(buffer)


def test_the_discovery_login() -> None:
    """LIO's answer to a discovery login; it declares keys of a normal session, too."""
    (exchange,) = exchanges("discovery_crc", "02_login")
    login = LoginInitiator(
        LoginInitiatorConfig(
            initiator_name="iqn.2026-11.lab:spike",
            target_name="",
            isid=exchange.request.bhs[8:14],
            discovery=True,
        )
    )
    header, data = login.start()
    offered = dict(text.decode_untrusted(data))
    assert header[:4] == exchange.request.bhs[:4]
    assert offered["SessionType"] == "Discovery" and "TargetName" not in offered
    theirs = dict(text.decode_untrusted(exchange.request.data))
    pairs = [
        (key, value)
        for key, value in text.decode_untrusted(exchange.answer.data)
        if key in offered or key not in theirs
    ]
    answer = bytearray(exchange.answer.bhs)
    answer[5:8] = len(text.encode(pairs)).to_bytes(3, "big")
    answer[16:20] = header[16:20]
    assert login.receive(bytes(answer), text.encode(pairs)) == []
    assert login.done and login.tsih == int.from_bytes(answer[14:16], "big")


def test_the_kernels_start_up_is_understood() -> None:
    """The Request of ib_iser on siw: no CRC, IRD 128, SendInv allowed."""
    responder = mpa.MpaResponder(crc=False)
    asked = responder.receive_data(streams.read(mpa_stream(KERNEL, "i2t")))
    assert asked is not None
    assert (asked.crc, asked.enhanced, asked.peer_ird, asked.peer_ord) == (False, True, 128, 1)
    assert asked.private_data == bytes((0x80, 0, 0, 0))
