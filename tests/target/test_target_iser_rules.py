"""What RFC 7145 asks of a target, seen by an initiator: each message that leaves, and in which
order."""

from __future__ import annotations

from contextlib import suppress

import pytest

from iserblk.datamover.iser import ControlHeader
from iserblk.errors import AuthenticationError, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Accounts, Credentials
from iserblk.iscsi.text import encode
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, Message
from iserblk.secret import Secret
from iserblk.target.iscsi.login import LOGIN_SLOTS, PINGS, UNEXPECTED
from iserblk.target.iscsi.tasks.slot import TargetTask
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from iserblk.target.ports import TargetPorts
from iserblk.target.seam import Nexus
from tests.iscsi import logins
from tests.support.golden import golden
from tests.target.iser_client import IQN, IserClient, rw10, tasks_of

TEST_UNIT_READY = bytes(6)
CHECK_CONDITION = 2
DATA = bytes((7 * j + (j >> 8)) & 255 for j in range(65536))


def nop(data: bytes = b"", itt: int = 77) -> bytes:
    out = pdu.NopOut(lun=bytes(8), itt=itt, ttt=bhs.NO_TAG, cmd_sn=0, exp_stat_sn=0)
    return out.pack()[:4] + len(data).to_bytes(4, "big") + out.pack()[8:]


def kinds(client: IserClient) -> list[int]:
    return [message.kind for message in client.sent]


# -- data and status -----------------------------------------------------------------------------


def test_a_read() -> None:
    """RDMA Write to the advertised buffer, then the status, alone, in a SCSI Response.

    proves: ISER-3.3-6, ISER-3.3-7, ISER-7.1-1, ISER-7.3.2-2, ISER-7.3.2-3, ISER-7.3.5-1
    proves: ISER-7.3.5-2, ISER-7.3.5-4, ISER-7.3.5-5, ISER-7.3.5-7, ISER-7.3.5-19, ISER-7.3.5-20
    proves: ISER-7.3.5-21, ISER-9.5.2-4, ISER-9.5.2-5, ISER-9.5.2-6
    """
    client = IserClient().logged_in()
    client.store.content[: len(DATA)] = DATA
    buffer = bytearray(len(DATA))
    stag, base = client.ours.advertise(memoryview(buffer), seam.REMOTE_WRITE)
    answer = client.read(buffer, stag)
    assert buffer == DATA
    *writes, last = client.sent
    assert [(each.kind, each.stag) for each in writes] == [(seam.RDMA_WRITE, stag)] * len(writes)
    assert sum(each.size for each in writes) == len(DATA) and writes[0].to == base
    assert last.kind == seam.SEND_SE_INVALIDATE
    assert (answer.opcode, answer.bhs[3], answer.data) == (bhs.SCSI_RESPONSE, 0, b"")


def test_a_write() -> None:
    """RDMA Read from the advertised buffer, no R2T as a PDU; the status when the data is there.

    proves: ISER-7.1-1, ISER-7.3.2-2, ISER-7.3.4-6, ISER-7.3.6-1, ISER-7.3.6-2, ISER-7.3.6-7
    proves: ISER-7.3.6-12, ISER-7.3.6-13, ISER-9.5.1-4, ISER-9.5.1-7, ISER-9.5.1-8
    """
    client = IserClient().logged_in()
    answer = client.write(DATA)
    assert client.store.content[: len(DATA)] == DATA
    *reads, last = client.sent
    assert {each.kind for each in reads} == {seam.RDMA_READ}
    assert [each.to for each in reads] == [0] and sum(each.size for each in reads) == len(DATA)
    assert {each.stag for each in reads} == {answer.invalidated}
    assert last.kind == seam.SEND_SE_INVALIDATE
    assert (answer.opcode, answer.bhs[3]) == (bhs.SCSI_RESPONSE, 0)


def test_nothing_asks_for_an_acknowledgement_of_data() -> None:
    """At ErrorRecoveryLevel 0, whatever the initiator offers, no RDMA Read follows the data.

    proves: ISER-7.3.5-18
    """
    client = IserClient()
    answer = client.login([("ErrorRecoveryLevel", "2")])
    assert b"\0ErrorRecoveryLevel=0\0" in b"\0" + answer.data
    client.command(TEST_UNIT_READY)  # a unit attention is pending
    client.sent.clear()
    for size in (512, len(DATA)):
        client.read(bytearray(size))
    assert kinds(client) == [seam.RDMA_WRITE, seam.SEND_SE_INVALIDATE] * 2


def test_each_completed_fetch_goes_on_with_its_own_task() -> None:
    """Two WRITEs of four bursts each, fetched at the same time. The completion of an RDMA Read
    belongs to one task and to one of its R2Ts: the next burst, or the status, follows from it.

    proves: ISER-7.3.6-15, ISER-7.3.6-16
    """
    client = IserClient().logged_in([("MaxBurstLength", "4096")])
    client.target_pair.hold = True
    sources = DATA[:16384], DATA[16384:32768]
    stags = []
    for number, source in enumerate(sources):
        stag, base = client.ours.advertise(memoryview(source), seam.REMOTE_READ)
        stags.append(stag)
        cdb = rw10(0x2A, len(source), number * 32)
        head = bytearray(28)
        ControlHeader(0x18, stag, base, 0, 0).pack_into(memoryview(head))
        client.send(bytes(head) + client.scsi(cdb, 0xA0, len(source), 30 + number))
    client.target_pair.hold = False
    client.run()
    reads = [(each.stag, each.to) for each in client.sent if each.kind == seam.RDMA_READ]
    for stag in stags:
        assert [to for of, to in reads if of == stag] == [0, 4096, 8192, 12288]
    assert [stag for stag, _ in reads[:4]] == [*stags, *stags]  # both at the same time
    assert [each.number(16) for each in client.heard[-2:]] == [30, 31]
    assert client.store.content[:32768] == DATA[:32768]


def test_data_of_an_aborted_task_comes_to_nothing() -> None:
    """A Read Response that is on its way when its task is aborted: the buffer stays until it has
    come, then it is dropped; only then is the abort answered, and the connection goes on.

    proves: ISER-7143-4.2.3.6-1, ISER-7143-10.7-1
    """
    client = IserClient().logged_in()
    stag, base = client.ours.advertise(memoryview(DATA), seam.REMOTE_READ)
    head = bytearray(28)
    ControlHeader(0x18, stag, base, 0, 0).pack_into(memoryview(head))
    client.send(bytes(head) + client.scsi(rw10(0x2A, len(DATA)), 0xA0, len(DATA), 30))
    client.connection.progress(0.0)
    assert kinds(client) == [seam.RDMA_READ]
    abort = pdu.TaskManagementRequest(
        opcode=bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE,
        function=pdu.TMF_ABORT_TASK,
        lun=bytes(8),
        itt=31,
        referenced_task_tag=30,
        cmd_sn=client.cmd_sn,
        exp_stat_sn=0,
    )
    client.send(b"\x10" + bytes(27) + abort.pack())
    client.connection.progress(0.0)
    assert kinds(client) == [seam.RDMA_READ] and client.budget.used
    heard = len(client.heard)
    client.ours.progress(0.0)  # answers the Read
    client.run()
    (answer,) = client.heard[heard:]
    assert (answer.opcode, answer.bhs[2]) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    assert not tasks_of(client.connection) and client.budget.used == 0
    assert not any(client.store.content)
    assert client.write(DATA[:512]).bhs[3] == 0


def test_data_and_status_leave_in_one_post(monkeypatch: pytest.MonkeyPatch) -> None:
    """proves: ISER-RC-16"""
    client = IserClient().logged_in()
    posts: list[list[int]] = []
    post = client.target_pair.post

    def watched(requests: list[seam.WorkRequest]) -> None:
        posts.append([request.opcode for request in requests])
        post(requests)

    monkeypatch.setattr(client.target_pair, "post", watched)
    client.read(bytearray(4096))
    assert posts == [[seam.RDMA_WRITE, seam.SEND_SE_INVALIDATE]]


@pytest.mark.parametrize(
    ("key", "running", "first"),
    [
        (None, True, 0),
        ("Yes", True, 0),
        ("No", True, 1024),
        (None, False, 1024),
        ("Yes", False, 0),
        ("No", False, 1024),
    ],
)
def test_where_the_write_base_offset_points(key: str | None, running: bool, first: int) -> None:
    """With TaggedBufferForSolicitedDataOnly=Yes it names the first byte that was not immediate
    data; with No the first of all. Without the key, running code means Yes, the specification No.

    proves: ISER-7145-6.9-1, ISER-7145-6.9-2, ISER-7145-6.9-3, ISER-RC-8
    """
    from_start = first > 0
    client = IserClient(solicited_only=running).logged_in(
        [("TaggedBufferForSolicitedDataOnly", key)] if key is not None else []
    )
    answer = client.write(DATA[:4096], 1024, from_start)
    assert answer.bhs[3] == 0
    assert client.store.content[:4096] == DATA[:4096]
    assert [(each.kind, each.to, each.size) for each in client.sent[:-1]] == [
        (seam.RDMA_READ, first, 3072)
    ]


@pytest.mark.parametrize(
    ("flags", "expected"), [(0x10, 0), (0x14, 0x100), (0x18, 0x200), (0x1C, 0x100)]
)
@pytest.mark.parametrize("allowed", [True, False])
def test_which_stag_the_response_invalidates(flags: int, expected: int, allowed: bool) -> None:
    """The Read STag, else the Write STag, else none; none where the initiator forbids it. What
    the header says beside its flags, and in reserved bits, does not count.

    proves: ISER-7.3.2-4, ISER-9.2-2, ISER-9.2-3, ISER-9.2-9, ISER-7145-9.2-1, ISER-7145-9.2-2
    proves: ISER-RC-5, ISER-RC-15
    """
    client = IserClient(send_invalidate=allowed).logged_in()
    head = bytearray(28)
    ControlHeader(flags | 3, 0x200, 1 << 40, 0x100, 1 << 41).pack_into(memoryview(head))
    head[1:4] = b"\xff\xff\xff"
    client.send(bytes(head) + client.scsi(TEST_UNIT_READY))
    client.connection.progress(0.0)
    (message,) = client.sent
    if allowed and expected:
        assert (message.kind, message.stag) == (seam.SEND_SE_INVALIDATE, expected)
    else:
        assert message.kind == seam.SEND_SE


def test_the_task_has_ended_when_its_response_leaves() -> None:
    """No RDMA can follow the response. proves: ISER-7.3.2-9"""
    client = IserClient().logged_in()
    left: list[set[int]] = []

    def look(message: Message) -> None:
        if message.kind == seam.SEND_SE_INVALIDATE:
            left.append(tasks_of(client.connection))

    client.on_send = look
    client.read(bytearray(512))
    client.write(DATA[:512])
    assert left == [set(), set()]


@pytest.mark.parametrize("edtl", [1024, 4096, 8192])
def test_residuals(edtl: int) -> None:
    """A READ of 4096 bytes: no byte beyond the length of the SCSI Command is written, whatever
    the STag would allow. proves: ISER-2.4.1-3"""
    client = IserClient().logged_in()
    client.store.content[:4096] = DATA[:4096]
    buffer = bytearray(16384)
    stag, base = client.ours.advertise(memoryview(buffer), seam.REMOTE_WRITE)
    header = ControlHeader(0x14, 0, 0, stag, base)
    answer = client.command(rw10(0x28, 4096), 0xC0, edtl, header)
    moved = min(edtl, 4096)
    assert buffer == DATA[:moved] + bytes(len(buffer) - moved)
    flags = {1024: bhs.RESIDUAL_OVERFLOW, 4096: 0, 8192: bhs.RESIDUAL_UNDERFLOW}[edtl]
    assert answer.bhs[1] == bhs.FLAG_FINAL | flags
    assert answer.number(44) == abs(edtl - 4096)


def test_sense_travels_in_the_response() -> None:
    """A command that fails gives back its STags and buffers, too.

    proves: ISER-7.3.2-1, ISER-3.1.9-2
    """
    client = IserClient().logged_in()
    buffer = bytearray(4096)
    answer = client.read(buffer, lba=1 << 30)
    assert kinds(client) == [seam.SEND_SE_INVALIDATE]
    assert answer.bhs[3] == CHECK_CONDITION and answer.data[4] & 15 == 5
    assert int.from_bytes(answer.data[:2], "big") == len(answer.data) - 2 == 18
    assert not any(buffer)
    client.run()
    assert client.budget.used == 0
    assert all(slot.read_stag == slot.write_stag == 0 for slot in client.connection.slots.free)


def test_no_reads_where_the_initiator_takes_none() -> None:
    """ORD 0, and a WRITE that needs an RDMA Read: an error by the initiator's fault, not by a rule
    of ours. What the server makes of it: test_server_endings.py."""
    client = IserClient(ord=0).logged_in()
    with pytest.raises(RemoteProtocolError, match="takes no RDMA Reads"):
        client.write(DATA[:512])
    assert seam.RDMA_READ not in kinds(client)


@pytest.mark.parametrize("read", [False, True], ids=["a WRITE", "a READ"])
def test_a_task_that_ends_without_a_response_gives_its_stags_back(read: bool) -> None:
    """ABORT TASK: Deallocate_Task_Resources is called for the task, which is found by its
    Initiator Task Tag; what its command advertised is forgotten, and used no more. The other task
    keeps what is its own.

    proves: ISER-8.3.2-6, ISER-8.3.2-7, ISER-8.3.2-8
    """
    client = IserClient().logged_in()
    client.connection.session.pause()  # tasks do not begin yet
    calls = client.datamover.calls
    del calls[:]
    buffers = [bytearray(DATA[:512]), bytearray(DATA[512:1024])]
    for number, buffer in enumerate(buffers):
        right = seam.REMOTE_WRITE if read else seam.REMOTE_READ
        stag, base = client.ours.advertise(memoryview(buffer), right)
        ControlHeader(
            0x14 if read else 0x18, *((0, 0, stag, base) if read else (stag, base, 0, 0))
        ).pack_into(memoryview(head := bytearray(28)))
        cdb = rw10(0x28 if read else 0x2A, 512, number)
        client.send(bytes(head) + client.scsi(cdb, 0xC0 if read else 0xA0, 512, 30 + number))
    client.run()
    slots = [given[0] for name, given in calls if name == "map_task"]
    assert all(isinstance(slot, TargetTask) for slot in slots) and not client.sent
    aborted, other = (slot for slot in slots if isinstance(slot, TargetTask))
    assert (aborted.itt, other.itt) == (30, 31)
    abort = pdu.TaskManagementRequest(
        opcode=bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE,
        function=pdu.TMF_ABORT_TASK,
        lun=bytes(8),
        itt=32,
        referenced_task_tag=30,
        cmd_sn=client.cmd_sn,
        exp_stat_sn=0,
    )
    answer = client.ask(abort.pack())
    assert (answer.opcode, answer.bhs[2]) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    ended = [given[0] for name, given in calls if name == "deallocate_task_resources"]
    assert ended[0] is aborted and other not in ended
    assert (aborted.read_stag, aborted.write_stag) == (0, 0)
    assert (other.read_stag if read else other.write_stag) != 0
    for call in (client.datamover.put_data, client.datamover.get_data):
        with pytest.raises(RemoteProtocolError, match=r"no (Read|Write) STag"):
            call(aborted, memoryview(bytearray(512)), 0)
    del client.sent[:]
    client.connection.session.go_on()
    client.run()
    assert [each.number(16) for each in client.heard[-1:]] == [31]
    moved = [each for each in client.sent if each.kind in (seam.RDMA_READ, seam.RDMA_WRITE)]
    assert len(moved) == 1 and client.sent[-1].kind == seam.SEND_SE_INVALIDATE


# -- other PDUs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", range(1, 9))
def test_a_discovery_session_manages_no_tasks(function: int) -> None:
    """A discovery session has no I_T nexus, and must not reset LUNs of other sessions."""
    client = IserClient()
    client.login([("SessionType", "Discovery")])
    other = Nexus("iqn.x:y", bytes(6))
    device = client.device
    device.attach(other)
    assert device.begin(other, 0, bytes(6)).status
    request = pdu.TaskManagementRequest(
        opcode=bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE,
        function=function,
        lun=bytes(8),
        itt=10,
        cmd_sn=1,
        exp_stat_sn=0,
    )
    assert client.ask(request.pack()).opcode == bhs.REJECT
    assert not device.begin(other, 0, bytes(6)).status, "no unit attention of a reset"


def test_the_command_window_is_open_to_pings_as_well() -> None:
    """As many pings at once as the window is wide; each is answered."""
    client = IserClient().logged_in()
    heard = len(client.heard)
    for n in range(128):
        ping = pdu.NopOut(
            opcode=bhs.NOP_OUT, itt=100 + n, lun=bytes(8), cmd_sn=client.cmd_sn + n, exp_stat_sn=1
        )
        client.send(b"\x10" + bytes(27) + ping.pack())
    client.run()
    assert [each.number(16) for each in client.heard[heard:]] == list(range(100, 228))


def test_other_answers_are_sends() -> None:
    """Each answer is a Send with Solicited Event.

    proves: ISER-5.2.2-1, ISER-5.2.2-2, ISER-7.3.3-1, ISER-7.3.8-1, ISER-7.3.8-2, ISER-7.3.10-1
    proves: ISER-7.3.12-1, ISER-7.3.12-2, ISER-7.3.13-1, ISER-7.3.13-2
    """
    client = IserClient().logged_in()
    reset = pdu.TaskManagementRequest(
        function=pdu.TMF_ABORT_TASK,
        lun=bytes(8),
        itt=20,
        referenced_task_tag=99,
        cmd_sn=0,
        exp_stat_sn=0,
        ref_cmd_sn=0,
    ).pack()
    text = encode([("X-nothing", "?")])
    question = pdu.TextRequest(
        flags=bhs.FLAG_FINAL, data_length=len(text), itt=21, cmd_sn=2, exp_stat_sn=0
    ).pack()
    snack = nop(itt=23)
    asked = [
        (nop(b"ping"), b"ping", bhs.NOP_IN),
        (question, text, bhs.TEXT_RESPONSE),
        (reset, b"", bhs.TASK_MANAGEMENT_RESPONSE),
        (bytes((bhs.SNACK_REQUEST | bhs.IMMEDIATE,)) + snack[1:], b"", bhs.REJECT),
        (
            pdu.LogoutRequest(reason=0, itt=22, cid=0, cmd_sn=0, exp_stat_sn=0).pack(),
            b"",
            bhs.LOGOUT_RESPONSE,
        ),
    ]
    for unit, data, opcode in asked:
        answer = client.ask(unit, data)
        assert (answer.kind, answer.opcode, answer.invalidated) == (seam.SEND_SE, opcode, 0)
        if opcode == bhs.NOP_IN:
            assert answer.data == data
        elif opcode == bhs.TEXT_RESPONSE:
            assert answer.data == encode([("X-nothing", "NotUnderstood")])
        elif opcode == bhs.REJECT:
            assert answer.data == unit
    assert client.connection.done


# shows: SYSTEM-38
@pytest.mark.parametrize("opcode", [bhs.SNACK_REQUEST, bhs.LOGIN_REQUEST])
def test_what_iser_has_no_use_for_is_rejected(opcode: int) -> None:
    """SNACK, and Login in full feature phase: Reject, protocol error; the connection lives on.

    proves: ISER-7.3.9-2, ISER-7.3.9-3, ISER-7.3.9-5, ISER-7.3.11-2, ISER-7.3.11-4
    proves: ISER-7143-11.17-1, ISER-10.1.4.4-1
    """
    client = IserClient().logged_in()
    unit = bytes((opcode | bhs.IMMEDIATE,)) + nop()[1:]
    answer = client.ask(unit)
    assert (answer.opcode, answer.bhs[2]) == (bhs.REJECT, 0x04)
    assert answer.data == unit
    assert client.command(TEST_UNIT_READY).bhs[3] == 0


def test_no_answer_is_longer_than_the_initiator_takes() -> None:
    """InitiatorRecvDataSegmentLength bounds what goes in a Send, whatever is requested, and
    MaxRecvDataSegmentLength says nothing; RDMA is not bounded.

    proves: ISER-6.2-2, ISER-6.2-4, ISER-6.2-5, ISER-6.5-2, ISER-7145-6.2-1
    """
    keys = [("InitiatorRecvDataSegmentLength", "512"), ("MaxRecvDataSegmentLength", "8192")]
    client = IserClient().logged_in(keys)
    assert client.ask(nop(DATA[:2000]), DATA[:2000]).data == DATA[:512]
    text = encode([("SendTargets", "All"), *((f"X-{i}", "?") for i in range(10))])
    request = pdu.TextRequest(
        flags=0x80, data_length=len(text), itt=3, cmd_sn=2, exp_stat_sn=0
    ).pack()
    assert client.ask(request, text).data.startswith(b"TargetName=")
    client.read(bytearray(len(DATA)))
    sends = [each for each in client.sent if each.kind <= seam.SEND_SE_INVALIDATE]
    assert max(each.size for each in sends) == 28 + 48 + 512
    assert max(each.size for each in client.sent) == len(DATA)
    text = encode([(f"X-{i}", "?") for i in range(40)])
    request = request[:4] + len(text).to_bytes(4, "big") + request[8:]
    first = client.ask(request, text)
    assert (first.bhs[1], len(first.data)) == (bhs.FLAG_CONTINUE, 512)
    more = pdu.TextRequest(
        data_length=0,
        itt=3,
        ttt=pdu.TextResponse.unpack_from(first.bhs).ttt,
        cmd_sn=2,
        exp_stat_sn=0,
    ).pack()
    last = client.ask(more)
    assert last.bhs[1] == bhs.FLAG_FINAL
    assert first.data + last.data == encode([(f"X-{i}", "NotUnderstood") for i in range(40)])


def test_portals_are_told_with_their_group() -> None:
    """SendTargets names each portal of each portal group, with the tag. A login that is refused
    names no address at all: the target redirects nobody, with a tag or without.

    proves: ISER-7143-13.8-2
    """
    ports = TargetPorts((1, 2, 4))
    for tag, address in ((1, "10.0.0.1:3260"), (2, "[::1]:3260"), (4, "10.0.0.4:860")):
        ports.by_tag[tag].addresses.append(address)
    client = IserClient(port=ports.by_tag[1])
    told = client.login([("SessionType", "Discovery")])
    text = encode([("SendTargets", "All")])
    question = pdu.TextRequest(
        flags=bhs.FLAG_FINAL, data_length=len(text), itt=21, cmd_sn=1, exp_stat_sn=0
    )
    answer = client.ask(question.pack(), text)
    addresses = ["10.0.0.1:3260,1", "[::1]:3260,2", "10.0.0.4:860,4"]
    assert answer.data == encode(
        [("TargetName", IQN), *(("TargetAddress", each) for each in addresses)]
    )
    refused = IserClient(port=ports.by_tag[1]).login([("TargetName", "iqn.2026-11.example:other")])
    assert refused.bhs[36] == 2 and b"TargetAddress" not in told.data + refused.data


# shows: SYSTEM-33
@pytest.mark.parametrize("opcode", [seam.SEND, seam.SEND_SE])
def test_any_kind_of_send_is_taken(opcode: int) -> None:
    """A solicited event means nothing here. proves: ISER-7145-1.5.2-6"""
    client = IserClient().logged_in()
    assert client.ask(nop(), opcode=opcode).opcode == bhs.NOP_IN


# -- login and its resources ---------------------------------------------------------------------


def test_resources_come_with_the_end_of_login() -> None:
    """Before its end a few receives, for any peer; all of them when the last response leaves.

    proves: ISER-5.1.2-1, ISER-RC-17
    """
    client = IserClient()
    receives: list[int] = []
    client.on_send = lambda _: receives.append(client.receives)
    assert client.receives == LOGIN_SLOTS
    client.login([("AuthMethod", "None")], stage=0, following=1)
    assert client.connection.parameters is None and client.receives == LOGIN_SLOTS
    client.login()
    assert client.connection.parameters is not None
    assert receives[0] <= LOGIN_SLOTS
    assert receives[1] >= QUEUE_DEPTH + UNEXPECTED


@pytest.mark.parametrize("secret", ["hush-hush-hush", "wrong-wrong-wrong"])
def test_resources_are_for_initiators_that_are_known(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a security stage nothing is allocated beyond what login needs, for as long as the peer
    has not shown by CHAP who it is: neither receives nor memory.

    proves: ISER-5.1.2-4
    """
    allocated: list[int] = []
    alloc = MemoryQueuePair.alloc_headers

    def watched(self: MemoryQueuePair, count: int, size: int) -> list[seam.HeaderSlot]:
        allocated.append(count)
        return alloc(self, count, size)

    monkeypatch.setattr(MemoryQueuePair, "alloc_headers", watched)
    client = IserClient(accounts=Accounts({"host": Secret("hush-hush-hush")}))
    assert allocated == [LOGIN_SLOTS]
    one = logins.initiator(credentials=Credentials("host", Secret(secret)))
    asked, stages = [one.start()], []
    with suppress(AuthenticationError):
        while asked:
            answer = client.ask(*asked.pop())
            stages.append(answer.bhs[1] >> pdu.CSG_SHIFT & 3)
            if answer.bhs[1] & 3 != pdu.FULL_FEATURE_PHASE:
                assert allocated == [LOGIN_SLOTS] and client.receives <= LOGIN_SLOTS
            asked += one.receive(answer.bhs, answer.data)
    if secret.startswith("hush"):
        assert stages == [0, 0, 0, 1] and one.done
        assert sum(allocated) > QUEUE_DEPTH and client.receives >= QUEUE_DEPTH + UNEXPECTED
    else:
        assert stages == [0, 0, 0] and client.connection.done
        assert allocated == [LOGIN_SLOTS] and client.receives <= LOGIN_SLOTS


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("stage", [None, 0])
def test_no_data_moves_before_the_end_of_login(stage: int | None, write: bool) -> None:
    """A command that comes too early moves nothing, whatever it advertises: it ends the connection.
    ``stage``: a stage that has ended before it.

    proves: ISER-3.1.2-1, ISER-3.1.3-1
    """
    client = IserClient()
    if stage is not None:
        client.login([("AuthMethod", "None")], stage=stage, following=1)
    del client.sent[:]
    buffer = bytearray(DATA)
    stag, base = client.ours.advertise(memoryview(buffer), seam.REMOTE_READ | seam.REMOTE_WRITE)
    header = ControlHeader(0x1C, stag, base, stag, base)
    cdb = rw10(0x2A if write else 0x28, len(DATA))
    with pytest.raises(RemoteProtocolError, match="before the end of login"):
        client.command(cdb, 0xA0 if write else 0xC0, len(DATA), header)
    assert not client.sent and buffer == DATA
    assert not client.store.calls


def test_a_refused_login_gets_no_resources() -> None:
    client = IserClient()
    answer = client.login([("AuthMethod", "CHAP")], stage=0, following=1)
    assert answer.bhs[36:38] == b"\x02\x01"
    assert client.connection.done and client.connection.parameters is None
    assert client.receives == LOGIN_SLOTS


def test_login_travels_in_sends() -> None:
    """Login PDUs follow an iSER header of 28 bytes; the last response, too.

    proves: ISER-9.1-1, ISER-7145-9.1-1, ISER-RC-2, ISER-GEN-8.1.6-1, ISER-GEN-8.1.6.1-1
    proves: ISER-IB00-3.1.6-2, ISER-IB00-3.1.6.1-1, ISER-IB00-3.1.6.3-2
    """
    client = IserClient()
    answer = client.login()
    (message,) = client.sent
    assert message.kind == seam.SEND_SE
    assert bytes(message.data[:29]) == b"\x10" + bytes(27) + bytes((bhs.LOGIN_RESPONSE,))
    assert answer.bhs[1] == 0x87


# -- what ends the connection --------------------------------------------------------------------


# shows: SYSTEM-32
@pytest.mark.parametrize("word", ["No", "Yes", None])
def test_initiators_with_and_without_a_hello_are_served(word: str | None) -> None:
    """A target may end the connection of an initiator that wants none; ours goes on.

    proves: ISER-7145-5.1.3-6, ISER-7145-5.1.3-5
    """
    client = IserClient()
    client.login([] if word is None else [("iSERHelloRequired", word)])
    if word == "Yes":
        client.send(golden("iser/hello-28"))
        client.connection.progress(0.0)
        (reply,) = client.ours.progress(0.0)
        assert reply.data is not None and reply.data[0] == 0x30
    assert client.command(bytes(6)).bhs[3] == 2  # a unit attention
    assert not client.connection.done


def test_a_hello_that_was_not_agreed_on() -> None:
    """proves: ISER-7145-5.1.2-1, ISER-7145-5.1.3-2, ISER-7145-10.1.3.4-1"""
    client = IserClient().logged_in([("iSERHelloRequired", "No")])
    client.send(bytes((0x20, 0xAA)) + bytes(26 + 48))
    with pytest.raises(RemoteProtocolError, match="Hello"):
        client.run()


def test_a_message_shorter_than_its_pdu() -> None:
    """proves: ISER-RC-13"""
    client = IserClient().logged_in()
    client.send(b"\x10" + bytes(27) + nop(b"123456") + b"12345")
    with pytest.raises(RemoteProtocolError, match="6 of data"):
        client.run()


def test_immediate_data_that_was_not_agreed_on() -> None:
    """proves: ISER-10.1.3.4-3"""
    client = IserClient().logged_in([("ImmediateData", "No")])
    with pytest.raises(RemoteProtocolError, match="immediate data"):
        client.write(DATA[:1024], 512)


def test_a_logout_for_recovery_is_refused_and_the_session_goes_on() -> None:
    """It would need ErrorRecoveryLevel 2; a Logout of the session is carried out."""
    client = IserClient().logged_in()

    def logout(reason: int) -> int:
        request = pdu.LogoutRequest(reason=reason, itt=22, cmd_sn=2, exp_stat_sn=0)
        answer = client.ask(request.pack())
        assert answer.opcode == bhs.LOGOUT_RESPONSE
        return answer.bhs[2]

    assert logout(2) == 2
    assert not client.connection.done
    assert client.command(bytes(6)).bhs[3] == 0
    assert logout(0) == 0
    assert client.connection.done


def test_answers_leave_before_the_last_command_is_carried_out() -> None:
    """Twenty reads at once: the last ones see what changed when the first answer had left."""
    client = IserClient().logged_in()
    client.store.content[:512] = bytes(512)

    def change(_: Message) -> None:
        client.store.content[:512] = DATA[:512]

    client.on_send = change
    buffers = [bytearray(512) for _ in range(20)]
    for number, buffer in enumerate(buffers):
        stag, base = client.ours.advertise(memoryview(buffer), seam.REMOTE_WRITE)
        head = bytearray(28)
        ControlHeader(0x14, 0, 0, stag, base).pack_into(memoryview(head))
        client.send(bytes(head) + client.scsi(rw10(0x28, 512), 0xC0, 512, 100 + number))
    client.connection.progress(0.0)
    client.run()
    assert buffers[0] == bytes(512)
    assert buffers[-1] == DATA[:512]


# -- unexpected PDUs (RFC 7145 section 8.1.2) ------------------------------------------------------


def unexpected(client: IserClient) -> list[int]:
    """The opcodes of the PDUs heard so far that answer nothing."""
    return [
        each.opcode
        for each in client.heard
        if each.opcode in (bhs.ASYNC_MESSAGE, bhs.REJECT)
        or (each.opcode == bhs.NOP_IN and each.number(16) == bhs.NO_TAG)
    ]


# shows: SYSTEM-34
@pytest.mark.parametrize(("declared", "most"), [("2", 2), ("5", 5), ("0", 12), (None, 12)])
def test_no_more_than_the_initiator_takes(declared: str | None, most: int) -> None:
    """Asynchronous Messages, Rejects and pings together; the last one is a ping. With ExpStatSN, or
    the answer to the ping, there may be more.

    proves: ISER-3.3-10, ISER-8.1.2-1, ISER-8.1.2-2, ISER-8.1.2-4, ISER-8.1.2-6, ISER-8.1.2-7
    proves: ISER-8.1.2-9
    """
    key = "MaxOutstandingUnexpectedPDUs"
    client = IserClient().logged_in([(key, declared)] if declared else [])
    limited = declared not in (None, "0")

    def provoke() -> None:
        snack = pdu.SnackRequest(
            kind=pdu.SNACK_DATA, itt=1, ttt=2, exp_stat_sn=0, beg_run=0, run_length=0
        )
        for _ in range(6):
            client.send(bytes((0x10,)) + bytes(27) + snack.pack())
            client.run()
            client.connection.tell(pdu.ASYNC_NEGOTIATE)
        client.run()

    provoke()
    found = unexpected(client)
    assert len(found) == most
    assert found.count(bhs.NOP_IN) == limited and (not limited or found[-1] == bhs.NOP_IN)
    assert client.command(TEST_UNIT_READY).bhs[3] == 0  # the session goes on
    if limited:
        (asked,) = [each for each in client.heard if each.opcode == bhs.NOP_IN]
        stat_sn = client.heard[-1].number(24) + 1
        answer = pdu.NopOut(
            itt=bhs.NO_TAG, ttt=asked.number(20), cmd_sn=client.cmd_sn, exp_stat_sn=stat_sn
        )
        client.send(bytes((0x10,)) + bytes(27) + answer.pack())
        client.run()
        provoke()
        assert len(unexpected(client)) == 2 * most


@pytest.mark.parametrize("solicits", [True, False])
def test_an_asynchronous_message_over_iser(solicits: bool) -> None:
    """One Send: with a solicited event where the RCaP has all receivers take it.

    proves: ISER-7.3.7-1, ISER-7.3.7-2
    """
    client = IserClient(solicits=solicits).logged_in()
    assert client.connection.tell(pdu.ASYNC_LOGOUT_REQUEST, parameter3=3)
    client.run()
    (message,) = client.sent
    assert message.kind == (seam.SEND_SE if solicits else seam.SEND)
    heard = pdu.AsyncMessage.unpack_from(client.heard[-1].bhs)
    assert (heard.opcode, heard.event, heard.parameter3) == (0x32, 1, 3)


def test_a_ping_asks_for_the_sequence_numbers() -> None:
    """A NOP-In with a Target Transfer Tag; its answer finds a receive whatever else has come.

    proves: ISER-7.3.6-20, ISER-8.1.2-5
    """
    client = IserClient().logged_in()
    before = client.receives
    client.connection.ping()
    client.run()
    asked = pdu.NopIn.unpack_from(client.heard[-1].bhs)
    assert asked.itt == bhs.NO_TAG and asked.ttt != bhs.NO_TAG
    message = bytes((0x10,)) + bytes(27)
    for _ in range(before - LOGIN_SLOTS - PINGS):  # as many PDUs as it may have outstanding
        client.send(message + nop(itt=bhs.NO_TAG))
    answer = pdu.NopOut(itt=bhs.NO_TAG, ttt=asked.ttt, cmd_sn=client.cmd_sn, exp_stat_sn=0)
    client.send(message + answer.pack())
    client.run()
    assert client.command(TEST_UNIT_READY).bhs[3] == 0


# shows: SYSTEM-34
def test_a_peer_that_sends_more_than_it_may_is_cut_off() -> None:
    """MaxOutstandingUnexpectedPDUs says how many receives there are for them; when all receives are
    used up, the connection ends (RFC 7145 section 8.1). proves: ISER-3.3-10"""
    client = IserClient().logged_in()
    for _ in range(client.receives):
        client.send(bytes((0x10,)) + bytes(27) + nop())
    with pytest.raises(TransportError):
        client.send(bytes((0x10,)) + bytes(27) + nop())
        client.run()


@pytest.mark.parametrize(("isid", "most"), [("00023d000002", 128), ("80abcdef0123", 4096)])
def test_how_much_data_open_iscsi_takes(isid: str, most: int) -> None:
    """Its kernel has room for 128 bytes of data in a control-type PDU of full feature phase.
    Answers to pings, text and sense data keep to that. proves: ISER-RC-21"""
    client = IserClient(isid=bytes.fromhex(isid)).logged_in(
        [("InitiatorRecvDataSegmentLength", "4096")]
    )
    assert len(client.ask(nop(bytes(5000)), bytes(5000)).data) == most
    text = encode([("SendTargets", "All")])
    request = pdu.TextRequest(data_length=len(text), itt=3, cmd_sn=client.cmd_sn, exp_stat_sn=0)
    assert 0 < len(client.ask(request.pack(), text).data) <= most
    heard = client.command(bytes((0x28, 0xFF)) + bytes(8))  # ILLEGAL REQUEST, with its field
    assert heard.bhs[3] == CHECK_CONDITION and 0 < len(heard.data) <= 128


def test_the_login_declares_the_receives_for_unexpected_pdus() -> None:
    """proves: ISER-3.3-10"""
    client = IserClient()
    answer = client.login([("MaxOutstandingUnexpectedPDUs", "8")])
    assert f"MaxOutstandingUnexpectedPDUs={UNEXPECTED}".encode() in answer.data.split(b"\0")
