"""Unsolicited data: in the command, and in Data-Out PDUs that follow it unasked."""

from __future__ import annotations

import random

import pytest

from iserblk.datamover.iser import CONTROL, WSV, ControlHeader
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import window_size
from iserblk.rcap import seam
from iserblk.scsi import status as sam
from iserblk.target.iscsi.buffers import SET_ASIDE, UNASKED, BufferPool, DataBudget
from iserblk.target.iscsi.login import LOGIN_SLOTS, PINGS, UNEXPECTED
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from tests.target.iscsi.several import (
    SIZE,
    WRITE_10,
    WRITES,
    Host,
    IserPeer,
    Kind,
    TcpPeer,
    cdb10,
)
from tests.target.iser_client import PLAIN, IserClient, rw10, tasks_of
from tests.vectors import unsolicited as golden

DATA = random.Random(3).randbytes(128 << 10)
SEGMENT = 8192
NOT_FINAL = bhs.FLAG_WRITE
WRITE = bhs.FLAG_FINAL | bhs.FLAG_WRITE
CHECK_CONDITION = 2
AGREED = [("InitialR2T", "No"), ("ImmediateData", "Yes"), ("FirstBurstLength", "65536")]


def unsolicited(more: list[tuple[str, str]] | None = None) -> IserClient:
    client = IserClient().logged_in(AGREED if more is None else more)
    client.sent.clear()
    return client


def data_out(at: int, length: int, number: int, last: bool, itt: int = 9) -> bytes:
    return pdu.DataOut(
        flags=bhs.FLAG_FINAL if last else 0,
        data_length=length,
        lun=bytes(8),
        itt=itt,
        exp_stat_sn=0,
        data_sn=number,
        buffer_offset=at,
    ).pack()


def post(client: IserClient, unit: bytes, data: bytes = b"", header: ControlHeader = PLAIN) -> None:
    head = bytearray(28)
    header.pack_into(memoryview(head))
    client.send(bytes(head) + unit + data)


def advertised(client: IserClient, rest: bytes) -> ControlHeader:
    """A header as running code makes it: its base is the first byte that was not sent unasked."""
    stag, base = client.ours.advertise(memoryview(bytearray(rest)), seam.REMOTE_READ)
    return ControlHeader(CONTROL | WSV, stag, base, 0, 0)


def write(client: IserClient, size: int, immediate: int, burst: int) -> None:
    """A WRITE (10) of ``size`` bytes: ``burst`` of them unsolicited, ``immediate`` at once."""
    header = advertised(client, DATA[burst:size]) if burst < size else PLAIN
    final = bhs.FLAG_FINAL if immediate == burst else 0
    unit = client.scsi(rw10(0x2A, size), final | NOT_FINAL, size, n=immediate)
    post(client, unit, DATA[:immediate], header)
    at, number = immediate, 0
    while at < burst:
        length = min(SEGMENT, burst - at)
        post(client, data_out(at, length, number, at + length == burst), DATA[at : at + length])
        at, number = at + length, number + 1


@pytest.mark.parametrize(
    ("size", "immediate", "burst"),
    [
        (4096, 4096, 4096),
        (4096, 0, 4096),
        (65536, 8192, 65536),
        (65536, 0, 65536),
        (65536, 512, 8704),
        (131072, 8192, 65536),  # the rest is fetched
        (131072, 0, 512),
        (131072, 8192, 8192),
    ],
)
def test_what_was_not_asked_for_and_the_rest(size: int, immediate: int, burst: int) -> None:
    """Data-Out PDUs are control-type: they come in Sends, and iSCSI puts the data together.

    proves: ISER-7.2-1, ISER-7.3.4-3
    """
    client = unsolicited()
    write(client, size, immediate, burst)
    client.run()
    assert client.heard[-1].opcode == bhs.SCSI_RESPONSE
    assert client.heard[-1].bhs[3] == 0
    assert client.store.content[:size] == DATA[:size]
    reads = [each.kind for each in client.sent].count(seam.RDMA_READ)
    assert (reads > 0) == (burst < size)
    assert not tasks_of(client.connection)


def test_nothing_is_written_before_the_last_of_it() -> None:
    client = unsolicited()
    post(client, client.scsi(rw10(0x2A, 16384), NOT_FINAL, 16384))
    post(client, data_out(0, SEGMENT, 0, False), DATA[:SEGMENT])
    client.run()
    assert client.store.content[:512] == bytes(512)
    assert tasks_of(client.connection) == {9}
    post(client, data_out(SEGMENT, SEGMENT, 1, True), DATA[SEGMENT : 2 * SEGMENT])
    client.run()
    assert client.store.content[:16384] == DATA[:16384]


def test_a_command_that_fails_is_answered_when_its_data_has_come() -> None:
    client = unsolicited()
    beyond = len(client.store.content) // 512
    heard = len(client.heard)
    post(client, client.scsi(rw10(0x2A, 8192, beyond), NOT_FINAL, 8192))
    client.run()
    assert len(client.heard) == heard
    post(client, data_out(0, SEGMENT, 0, True), DATA[:SEGMENT])
    client.run()
    assert (client.heard[-1].opcode, client.heard[-1].bhs[3]) == (
        bhs.SCSI_RESPONSE,
        CHECK_CONDITION,
    )


def test_an_aborted_task_takes_no_data_any_more() -> None:
    client = unsolicited()
    post(client, client.scsi(rw10(0x2A, 16384), NOT_FINAL, 16384))
    post(client, data_out(0, SEGMENT, 0, False), DATA[:SEGMENT])
    abort = pdu.TaskManagementRequest(
        opcode=bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE,
        function=pdu.TMF_ABORT_TASK,
        lun=bytes(8),
        itt=10,
        referenced_task_tag=9,
        cmd_sn=0,
        exp_stat_sn=0,
        ref_cmd_sn=0,
        exp_data_sn=0,
    )
    answer = client.ask(abort.pack())
    assert (answer.opcode, answer.bhs[2]) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    post(client, data_out(SEGMENT, SEGMENT, 1, True), DATA[:SEGMENT])
    client.run()
    assert client.store.content[:512] == bytes(512)
    assert not tasks_of(client.connection)
    write(client, 4096, 0, 4096)  # the tag is free again
    client.run()
    assert client.store.content[:4096] == DATA[:4096]


@pytest.mark.parametrize(
    "wrong",
    [
        data_out(512, 512, 0, True),  # a gap
        data_out(0, 512, 1, True),  # a Data-Out is missing
        pdu.DataOut(
            flags=bhs.FLAG_FINAL,
            data_length=512,
            lun=bytes(8),
            itt=9,
            ttt=7,
            exp_stat_sn=0,
            data_sn=0,
            buffer_offset=0,
        ).pack(),  # an R2T's, of which there was none
    ],
)
def test_data_out_of_order_ends_the_session(wrong: bytes) -> None:
    client = unsolicited()
    post(client, client.scsi(rw10(0x2A, 16384), NOT_FINAL, 16384))
    post(client, wrong, DATA[:512])
    with pytest.raises(RemoteProtocolError, match="Data-Out"):
        client.run()


def test_more_than_the_first_burst_ends_the_session() -> None:
    client = unsolicited([("InitialR2T", "No"), ("FirstBurstLength", "4096")])
    post(client, client.scsi(rw10(0x2A, 16384), NOT_FINAL, 16384))
    post(client, data_out(0, SEGMENT, 0, True), DATA[:SEGMENT])
    with pytest.raises(RemoteProtocolError, match="8192 bytes of unsolicited data, of 4096"):
        client.run()


def test_more_than_the_command_is_long_ends_the_session() -> None:
    client = unsolicited()
    post(client, client.scsi(rw10(0x2A, 512), NOT_FINAL, 512))
    post(client, data_out(0, 1024, 0, True), DATA[:1024])
    with pytest.raises(RemoteProtocolError, match="unsolicited data"):
        client.run()


def test_unasked_data_beyond_what_the_cdb_takes_is_dropped() -> None:
    """An EDTL larger than the CDB's length: the rest is residual, wherever a Data-Out begins."""
    client = unsolicited()
    post(client, client.scsi(rw10(0x2A, 512), NOT_FINAL, 4 * SEGMENT))
    for number in range(4):
        at = number * SEGMENT
        post(client, data_out(at, SEGMENT, number, number == 3), DATA[at : at + SEGMENT])
    client.run()
    response = pdu.ScsiResponse.unpack_from(client.heard[-1].bhs)
    assert (response.opcode, response.status) == (bhs.SCSI_RESPONSE, 0)
    assert response.flags & bhs.RESIDUAL_FLAGS == bhs.RESIDUAL_UNDERFLOW
    assert response.residual == 4 * SEGMENT - 512
    assert client.store.content[:1024] == DATA[:512] + bytes(512)


def test_data_behind_a_final_command_ends_the_session() -> None:
    client = unsolicited()
    stag = advertised(client, DATA[:16384])
    client.store.content[:] = bytes(len(client.store.content))
    post(client, client.scsi(rw10(0x2A, 16384), WRITE, 16384), header=stag)
    post(client, data_out(0, SEGMENT, 0, True), DATA[:SEGMENT])
    with pytest.raises(RemoteProtocolError, match="did not ask for"):
        client.run()


@pytest.mark.parametrize(
    ("segment", "burst", "depth"),
    [(8192, 65536, 128), (2048, 65536, 32), (512, 65536, 8), (512, 4096, 128), (600, 65536, 9)],
)
def test_whatever_may_come_unasked_finds_a_receive(segment: int, burst: int, depth: int) -> None:
    """As many writes as MaxCmdSN allows, with all their Data-Outs, while the target is busy
    elsewhere; and the same again. proves: ISER-8.1.1.2-1"""
    client = IserClient()
    pairs = [
        ("TargetRecvDataSegmentLength", str(segment)),
        ("InitialR2T", "No"),
        ("ImmediateData", "No"),
        ("FirstBurstLength", str(burst)),
    ]
    client.logged_in(pairs)
    client.ours.post_receive(1000)
    for _ in range(2):
        last = client.heard[-1]
        exp_cmd_sn, max_cmd_sn = last.number(28), last.number(32)
        assert window_size(exp_cmd_sn, max_cmd_sn) == depth
        heard = len(client.heard)
        for itt in range(100, 100 + depth):
            post(client, client.scsi(rw10(0x2A, burst), NOT_FINAL, burst, itt))
            for number, at in enumerate(range(0, burst, segment)):
                length = min(segment, burst - at)
                unit = data_out(at, length, number, at + length == burst, itt)
                post(client, unit, DATA[at : at + length])
        client.run()
        answers = client.heard[heard:]
        assert [(each.opcode, each.bhs[3]) for each in answers] == [(bhs.SCSI_RESPONSE, 0)] * depth
        assert client.store.content[:burst] == DATA[:burst]


@pytest.mark.parametrize("initial_r2t", ["Yes", "No"])
def test_receives_for_data_come_after_login_only_where_it_comes_unasked(initial_r2t: str) -> None:
    """Beside them are one for each command, for each unexpected PDU that the login declares, and
    for the answer to a ping of ours. proves: ISER-8.1.2-5"""
    client = IserClient()
    assert client.receives == LOGIN_SLOTS
    client.logged_in([("InitialR2T", initial_r2t), ("TargetRecvDataSegmentLength", "512")])
    data = 1024 if initial_r2t == "No" else 0
    assert client.receives == LOGIN_SLOTS + QUEUE_DEPTH + UNEXPECTED + PINGS + data


def test_memory_waits_for_its_turn() -> None:
    """Unsolicited data takes one first burst of memory, for a command of any length."""
    client = unsolicited()
    for itt in range(20, 40):
        unit = client.scsi(rw10(0x2A, 512 << 10), NOT_FINAL, 512 << 10, itt=itt)
        post(client, unit)
        post(client, data_out(0, SEGMENT, 0, False, itt), DATA[:SEGMENT])
    client.run()
    assert client.budget.used <= 20 * 65536


def test_a_command_that_announces_it_where_it_was_not_agreed_on() -> None:
    """No unsolicited data may come, so the target does not wait for any, and asks for all data."""
    client = unsolicited([("InitialR2T", "Yes")])
    post(client, client.scsi(rw10(0x2A, 16384), NOT_FINAL, 16384), header=advertised(client, DATA))
    client.run()
    assert (client.heard[-1].opcode, client.heard[-1].bhs[3]) == (bhs.SCSI_RESPONSE, 0)
    assert client.store.content[:16384] == DATA[:16384]


def test_it_is_refused_where_it_was_not_agreed_on() -> None:
    client = unsolicited([("InitialR2T", "Yes")])
    answer = client.ask(data_out(0, 512, 0, True), DATA[:512])
    assert answer.opcode == bhs.REJECT


# shows: SYSTEM-37
def test_golden_bytes() -> None:
    """The three Sends of a write, as the specifications have them, byte for byte.

    proves: ISER-7.2-1, ISER-7.3.4-3, ISER-9.5.1-6
    """
    client = IserClient(lun=1).logged_in(AGREED)
    for vector in golden.WRITE:
        client.send(vector.head + vector.data)
    client.run()
    answer = client.heard[-1]
    assert (answer.opcode, answer.bhs[3]) == (bhs.SCSI_RESPONSE, 0)
    assert answer.bhs[16:20] == golden.WRITE[0].head[28 + 16 : 28 + 20]
    assert client.store.content[: golden.LENGTH] == golden.DATA
    assert seam.RDMA_READ not in [each.kind for each in client.sent]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", [TcpPeer, IserPeer])
def test_without_memory_a_command_is_to_be_repeated(kind: Kind, early: bool) -> None:
    """A session may have 512 KiB whatever the others have. Beyond that, unsolicited data finds
    memory, or its command ends with TASK SET FULL, also one that came before its turn."""
    most = 2 * SET_ASIDE * UNASKED  # of which 512 KiB are guaranteed to each of two sessions
    host = Host(budget=DataBudget(most))
    other = BufferPool(host.budget)
    other.take(most)
    peer = kind(host, 0)
    assert peer.log_in(("InitialR2T", "No"), ("ImmediateData", "Yes")) == 0
    peer.ready()
    flags = WRITES & ~bhs.FLAG_FINAL
    begun = UNASKED // 65536
    first = host.cmd_sn + early
    for itt in range(begun + 3):
        peer.command(cdb10(WRITE_10, 128), flags, 65536, DATA[:512], itt=itt, cmd_sn=first + itt)
    assert host.budget.used == most + UNASKED and not peer.heard
    if early:
        peer.command(bytes(16), cmd_sn=first - 1, itt=99)
        assert peer.heard.pop()[0][3] == 0 and not peer.heard
    for itt in range(begun + 3):
        for at in range(512, 65536, 7224):
            end = at + 7224 >= 65536
            data = DATA[at : min(at + 7224, 65536)]
            peer.say_data_out(data, at, bhs.NO_TAG, at // 7224, end, itt)
    answers = {int.from_bytes(head[16:20]): head[3] for head, _ in peer.heard}
    full = {itt: sam.TASK_SET_FULL for itt in range(begun, begun + 3)}
    assert answers == dict.fromkeys(range(begun), 0) | full
    assert peer.error is None and host.budget.used == most
    peer.heard.clear()
    host.cmd_sn = first + begun + 3
    peer.command(cdb10(WRITE_10, 1), WRITES, 512, b"n" * 512, itt=1)
    assert peer.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert bytes(host.store.content[:65536]) == b"n" * 512 + DATA[512:65536]
    other.close()


def test_commands_that_hold_unsolicited_data_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may have no more memory than leaves some to those that need more than they have."""
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 0)
    monkeypatch.setattr("iserblk.target.iscsi.session.UNASKED", 0)
    host = Host(level=0, budget=DataBudget(SIZE))
    peer = TcpPeer(host)
    assert peer.log_in(("InitialR2T", "No"), ("ImmediateData", "Yes")) == 0
    peer.ready()
    commands = range(16)  # of 128 KiB each, of which 64 KiB come unasked: they fill the budget
    first = host.cmd_sn
    for itt in commands:
        flags = WRITES & ~bhs.FLAG_FINAL
        peer.command(cdb10(WRITE_10, 256), flags, 131072, DATA[:512], itt=itt, cmd_sn=first + itt)
    for itt in commands:
        for at in range(512, 65536, 7224):
            end = at + 7224 >= 65536
            data = DATA[at : min(at + 7224, 65536)]
            peer.say_data_out(data, at, bhs.NO_TAG, at // 7224, end, itt)
    statuses: dict[int, int] = {}
    while peer.heard:
        head, _ = peer.heard.pop(0)
        if head[0] == bhs.SCSI_RESPONSE:
            statuses[int.from_bytes(head[16:20])] = head[3]
            continue
        r2t = pdu.ReadyToTransfer.unpack_from(head)
        for sn in range(8):
            at = 65536 + sn * 8192
            peer.say_data_out(DATA[at : at + 8192], at, r2t.ttt, sn, sn == 7, r2t.itt)
    assert set(statuses) == set(commands)
    assert set(statuses.values()) == {0, sam.TASK_SET_FULL}
    assert not host.budget.used
