"""The target's iSCSI layer over Traditional iSCSI: tasks, aborts, and any bytes of a peer."""

from __future__ import annotations

import contextlib
import random
import socket
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.text import encode
from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.sockets.stream import SocketStream
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.tasks.slot import TargetTask
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.support import logs
from tests.target.fake_store import FakeStore
from tests.target.owner import Owner

pytestmark = pytest.mark.logs(logs.IGNORED)

INITIATOR, IQN = "iqn.2026-11.example:host", "iqn.2026-11.example:disk"
SIZE = 1 << 20
WRITE_10, READ_10 = 0x2A, 0x28
OF_A_LUN = (pdu.TMF_ABORT_TASK_SET, pdu.TMF_CLEAR_TASK_SET, pdu.TMF_LOGICAL_UNIT_RESET)


class Client:
    """An initiator of bare PDUs; ``heard``: what the target has said since login. ``beside``: a
    client of the same target."""

    def __init__(
        self,
        *extra: tuple[str, str],
        budget: DataBudget | None = None,
        beside: Client | None = None,
    ) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.number: int = beside.number + 1 if beside else 0
        if beside is None:
            self.store = FakeStore(SIZE)
            self.device = DeviceServer({0: LogicalUnit(self.store, serial="S", block=512)}, IQN)
        else:
            self.store, self.device = beside.store, beside.device
        self.owner = Owner(self._offload)
        self.owner.end_other_sessions = self._cold_reset
        self.connection = TargetConnection(
            TcpTarget(SocketStream(theirs), 65536),
            self.device,
            LoginTarget(LoginTargetConfig(IQN, 1, receive_data_segment_length=65536, rdma=False)),
            self.owner,
            portal="10.0.0.1:3260",
            budget=budget,
            at_once=False,
        )
        self.connection.driver = self.owner
        self.cold_resets = 0
        self.cmd_sn = 1
        self._received = b""
        self.heard: list[tuple[bytes, bytes]] = []
        text = encode([("InitiatorName", INITIATOR), ("TargetName", IQN), *extra])
        request = pdu.LoginRequest(
            flags=pdu.TRANSIT | pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT | pdu.FULL_FEATURE_PHASE,
            data_length=len(text),
            isid=self.number.to_bytes(6, "big"),
            tsih=0,
            itt=0,
            cmd_sn=1,
            exp_stat_sn=0,
        )
        self.send(request, text)
        assert self.connection.parameters is not None
        self.heard.clear()
        self.command(bytes(16))  # a unit attention is pending

        self.heard.clear()

    def _offload(self, slot: TargetTask) -> None:
        self.device.run(slot.task, slot.buffer)
        self.connection.finish(slot)

    def _cold_reset(self) -> None:
        assert not self.connection.done
        self.cold_resets += 1

    def close(self) -> None:
        self.connection.close()
        self.socket.close()

    def send(self, unit: pdu.Pdu, data: bytes = b"") -> None:
        self.say(unit.pack() + data + bytes(-len(data) & 3))

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)
        self.run()

    def run(self) -> None:
        for _ in range(4):
            self.connection.progress(0.0)
            with contextlib.suppress(BlockingIOError):
                self._received += self.socket.recv(1 << 20)
        while len(self._received) >= 48:
            size = int.from_bytes(self._received[5:8], "big")
            end = 48 + (size + 3 & ~3)
            self.heard.append((self._received[:48], self._received[48 : 48 + size]))
            self._received = self._received[end:]

    def command(
        self,
        cdb: bytes,
        flags: int = bhs.FLAG_FINAL,
        edtl: int = 0,
        data: bytes = b"",
        itt: int = 1,
    ) -> None:
        unit = pdu.ScsiCommand(
            flags=flags,
            data_length=len(data),
            lun=bytes(8),
            itt=itt,
            edtl=edtl,
            cmd_sn=self.cmd_sn,
            exp_stat_sn=1,
            cdb=cdb,
        )
        self.cmd_sn += 1
        self.send(unit, data)

    def write(self, blocks: int, data: bytes = b"", final: bool = True, itt: int = 1) -> None:
        flags = bhs.FLAG_WRITE | (bhs.FLAG_FINAL if final else 0)
        self.command(cdb10(WRITE_10, blocks), flags, blocks * 512, data, itt)

    def data_out(self, data: bytes, offset: int, ttt: int, sn: int = 0, final: bool = True) -> None:
        self.send(
            pdu.DataOut(
                flags=bhs.FLAG_FINAL if final else 0,
                data_length=len(data),
                lun=bytes(8),
                itt=1,
                ttt=ttt,
                exp_stat_sn=1,
                data_sn=sn,
                buffer_offset=offset,
            ),
            data,
        )

    def opcodes(self) -> list[int]:
        return [head[0] for head, _ in self.heard]


def cdb10(opcode: int, blocks: int) -> bytes:
    return bytes((opcode, 0, 0, 0, 0, 0, 0, blocks >> 8, blocks & 255)) + bytes(7)


@pytest.fixture
def client() -> Client:
    made = Client(("MaxBurstLength", "4096"), ("MaxRecvDataSegmentLength", "1024"))
    return made


def test_a_read_comes_in_segments_with_its_status(client: Client) -> None:
    """F ends each burst; S, with the StatSN, the last."""
    client.command(cdb10(READ_10, 13), bhs.FLAG_FINAL | bhs.FLAG_READ, 13 * 512)
    units = [pdu.DataIn.unpack_from(head) for head, _ in client.heard]
    assert client.opcodes() == [bhs.DATA_IN] * 7
    assert [unit.data_sn for unit in units] == list(range(7))
    assert [unit.buffer_offset for unit in units] == [1024 * i for i in range(7)]
    assert [unit.flags for unit in units] == [0, 0, 0, 0x80, 0, 0, 0x81]
    assert [unit.data_length for unit in units] == [1024] * 6 + [512]
    client.close()


def test_the_segments_of_a_session_under_way_become_shorter(client: Client) -> None:
    """MaxRecvDataSegmentLength may be declared at any time; what cannot be is told."""

    def declare(*pairs: tuple[str, str]) -> bytes:
        text = encode(pairs)
        client.heard.clear()
        client.send(
            pdu.TextRequest(
                opcode=bhs.TEXT_REQUEST,
                flags=bhs.FLAG_FINAL,
                data_length=len(text),
                lun=bytes(8),
                itt=2,
                ttt=bhs.NO_TAG,
                cmd_sn=client.cmd_sn,
                exp_stat_sn=1,
            ),
            text,
        )
        client.cmd_sn += 1
        ((head, answer),) = client.heard
        assert head[0] == bhs.TEXT_RESPONSE
        client.heard.clear()
        return answer

    assert declare(("MaxRecvDataSegmentLength", "512"), ("InitiatorAlias", "me")) == b""
    client.command(cdb10(READ_10, 3), bhs.FLAG_FINAL | bhs.FLAG_READ, 3 * 512)
    assert [len(data) for _, data in client.heard] == [512] * 3
    answer = declare(("MaxRecvDataSegmentLength", "5"), ("MaxBurstLength", "512"), ("X-a", "1"))
    assert answer == encode(
        [
            ("MaxRecvDataSegmentLength", "Reject"),
            ("MaxBurstLength", "NotUnderstood"),
            ("X-a", "NotUnderstood"),
        ]
    )
    client.send(
        pdu.NopOut(data_length=1024, lun=bytes(8), itt=3, cmd_sn=client.cmd_sn, exp_stat_sn=1),
        bytes(1024),
    )
    ((_, data),) = client.heard
    assert len(data) == 512
    client.close()


def test_a_write_is_asked_for_burst_by_burst(client: Client) -> None:
    data = bytes(i * 3 & 255 for i in range(12 * 512))
    client.write(12, data[:512])
    for sn, (at, end) in enumerate(((512, 4608), (4608, 6144))):
        (head, _) = client.heard.pop()
        r2t = pdu.ReadyToTransfer.unpack_from(head)
        assert r2t.opcode == bhs.R2T and not client.heard
        assert (r2t.buffer_offset, r2t.desired_length, r2t.r2t_sn) == (at, end - at, sn)
        client.data_out(data[at : at + 512], at, r2t.ttt, 0, False)
        client.data_out(data[at + 512 : end], at + 512, r2t.ttt, 1)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    response = pdu.ScsiResponse.unpack_from(client.heard[0][0])
    assert (response.status, response.exp_data_sn) == (0, 2)
    client.heard.clear()
    client.command(cdb10(READ_10, 12), bhs.FLAG_FINAL | bhs.FLAG_READ, 12 * 512)
    assert b"".join(got for _, got in client.heard) == data
    client.close()


@pytest.mark.parametrize(
    ("edtl", "code", "overflow", "underflow"),
    [
        (0, None, 1024, 0),
        (512, None, 512, 0),
        (200, 0x050E03, 824, 0),
        (1024, None, 0, 0),
        (1536, None, 0, 512),
    ],
)
def test_a_write_whose_edtl_is_another(
    client: Client, edtl: int, code: int | None, overflow: int, underflow: int
) -> None:
    """The target writes the data that comes, in whole blocks, and never more than the CDB says."""
    data = b"b" * min(edtl, 1024)
    client.store.content[:2048] = b"a" * 2048
    flags = bhs.FLAG_FINAL | bhs.FLAG_WRITE
    client.command(cdb10(WRITE_10, 2), flags, edtl, data)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    head, answer = client.heard[0]
    response = pdu.ScsiResponse.unpack_from(head)
    assert response.status == (sam.CHECK_CONDITION if code else 0)
    if code:
        assert (answer[4], answer[14], answer[15]) == tuple(code.to_bytes(3, "big"))
    wanted = bhs.RESIDUAL_OVERFLOW if overflow else bhs.RESIDUAL_UNDERFLOW if underflow else 0
    assert response.flags & bhs.RESIDUAL_FLAGS == wanted
    assert response.residual == overflow + underflow
    written = b"" if code else data
    assert client.store.content[:2048] == written.ljust(2048, b"a")
    client.close()


@pytest.mark.parametrize("edtl", [256, 1024])
def test_a_write_same_whose_edtl_is_another(client: Client, edtl: int) -> None:
    """WRITE SAME needs exactly one block of data."""
    client.command(cdb10(0x41, 1), bhs.FLAG_FINAL | bhs.FLAG_WRITE, edtl, b"b" * edtl)
    head, answer = client.heard[0]
    assert pdu.ScsiResponse.unpack_from(head).status == sam.CHECK_CONDITION
    assert (answer[4], answer[14], answer[15]) == (0x05, 0x24, 0x00)
    assert not any(client.store.content)
    client.close()


_R, _W = bhs.FLAG_READ, bhs.FLAG_WRITE


@pytest.mark.parametrize(
    ("command", "flags", "refused"),
    [
        (cdb10(READ_10, 1), _W, False),
        (cdb10(READ_10, 1), 0, False),
        (bytes((0x12, 0, 0, 0, 255, 0)), _W, False),  # INQUIRY
        (bytes((0xA0, *bytes(8), 255, 0, 0)), 0, False),  # REPORT LUNS
        (cdb10(WRITE_10, 1), _R, True),
        (cdb10(WRITE_10, 1), 0, True),
        (bytes((0x15, 0x10, 0, 0, 24, 0)), _R, True),  # MODE SELECT(6)
    ],
)
def test_data_that_the_pdu_says_goes_the_other_way(
    client: Client, command: bytes, flags: int, refused: bool
) -> None:
    """None moves, and the residual count says so: a host would take its buffer for what was read.
    GOOD would say of a write that it has been written."""
    client.store.content[:512] = b"a" * 512
    data = b"b" * 512 if flags == _W else b""
    client.command(command, bhs.FLAG_FINAL | flags, 512, data)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    head, answer = client.heard[0]
    response = pdu.ScsiResponse.unpack_from(head)
    assert response.status == (sam.CHECK_CONDITION if refused else sam.GOOD)
    if refused:
        assert (answer[4], answer[14], answer[15]) == (0x05, 0x0E, 0x03)
    assert (response.flags, response.residual) == (0x82, 512)
    assert client.store.content[:512] == b"a" * 512
    client.heard.clear()
    client.command(cdb10(READ_10, 1), bhs.FLAG_FINAL | _R, 512, itt=2)
    assert client.heard[0][1] == b"a" * 512, "the session goes on"
    client.close()


@pytest.mark.parametrize("flags", [0, _W, _R])
@pytest.mark.parametrize("opcode", [READ_10, WRITE_10])
def test_no_data_is_expected_at_all(client: Client, opcode: int, flags: int) -> None:
    """With EDTL 0 the residual count tells what the CDB asks for, whatever the flags say."""
    client.command(cdb10(opcode, 1), bhs.FLAG_FINAL | flags, 0)
    ((head, _),) = client.heard
    response = pdu.ScsiResponse.unpack_from(head)
    assert (response.status, response.flags, response.residual) == (0, 0x84, 512)
    client.close()


def test_a_command_that_is_rejected_was_not_received(client: Client) -> None:
    """The target still expects its CmdSN, and its window stays as wide (RFC 7143 section 7.3):
    a tag in use, and a text under a Target Transfer Tag that there is not."""
    client.write(1)  # waits for its data
    client.heard.clear()
    text = pdu.TextRequest(
        opcode=bhs.TEXT_REQUEST,
        flags=bhs.FLAG_FINAL,
        data_length=0,
        lun=bytes(8),
        itt=2,
        ttt=77,
        cmd_sn=client.cmd_sn,
        exp_stat_sn=1,
    )
    for _ in range(3):
        client.write(1)
        client.cmd_sn -= 1
        client.send(text)
    for (head, _), reason in zip(client.heard, 3 * [7, 4], strict=True):
        reject = pdu.Reject.unpack_from(head)
        assert (reject.opcode, reject.reason) == (bhs.REJECT, reason)
        assert reject.exp_cmd_sn == client.cmd_sn
        assert reject.max_cmd_sn - reject.exp_cmd_sn == 126  # 128, and one is outstanding
    client.heard.clear()
    client.command(bytes(16), itt=3)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    client.close()


def test_the_command_window_is_open_to_pings_as_well(client: Client) -> None:
    """As many pings at once as the window is wide, none of them immediate: each is answered, and
    the window is as wide as before."""
    for _ in range(3):
        pings = b""
        for itt in range(100, 228):
            ping = pdu.NopOut(
                opcode=bhs.NOP_OUT, itt=itt, lun=bytes(8), cmd_sn=client.cmd_sn, exp_stat_sn=1
            )
            pings += ping.pack()
            client.cmd_sn += 1
        client.say(pings)
        answers = [pdu.NopIn.unpack_from(head) for head, _ in client.heard]
        assert [answer.itt for answer in answers] == list(range(100, 228))
        assert answers[-1].max_cmd_sn - answers[-1].exp_cmd_sn == 127
        client.heard.clear()
    client.close()


def test_an_abort_does_not_wait_for_data(client: Client) -> None:
    """An initiator that aborts a write sends no more of it; what is under way is dropped."""
    client.write(4)
    r2t = pdu.ReadyToTransfer.unpack_from(client.heard.pop()[0])
    client.send(
        pdu.TaskManagementRequest(
            function=pdu.TMF_ABORT_TASK,
            lun=bytes(8),
            itt=2,
            referenced_task_tag=1,
            cmd_sn=client.cmd_sn,
            exp_stat_sn=1,
        )
    )
    ((head, _),) = client.heard
    answer = pdu.TaskManagementResponse.unpack_from(head)
    assert (answer.opcode, answer.response) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    client.heard.clear()
    client.data_out(bytes(2048), 0, r2t.ttt)
    client.command(bytes(16))
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    client.close()


def test_nothing_that_was_received_already_begins_when_the_session_is_cut_off(
    client: Client,
) -> None:
    """A write may lie in the socket when another session takes the name: it must not overwrite
    what that session writes."""
    client.socket.sendall(
        pdu.ScsiCommand(
            flags=bhs.FLAG_FINAL | bhs.FLAG_WRITE,
            data_length=512,
            lun=bytes(8),
            itt=1,
            edtl=512,
            cmd_sn=client.cmd_sn,
            exp_stat_sn=1,
            cdb=cdb10(WRITE_10, 1),
        ).pack()
        + b"o" * 512
    )
    client.connection.abandon()
    with pytest.raises(ConnectionLost):
        while True:
            client.connection.progress(0.0)
    assert not any(client.store.content)
    client.close()


def manage(client: Client, function: int, lun: int = 0) -> None:
    client.send(
        pdu.TaskManagementRequest(
            function=function,
            lun=bytes((0, lun, *bytes(6))),
            itt=2,
            cmd_sn=client.cmd_sn,
            exp_stat_sn=1,
        )
    )


@pytest.mark.parametrize("function", OF_A_LUN)
def test_what_ends_a_set_of_tasks_waits_for_the_data_they_asked_for(
    client: Client, function: int
) -> None:
    """The initiator goes on answering R2Ts (RFC 7143 section 4.2.3.3); nothing is written."""
    client.store.content[:2048] = b"a" * 2048
    client.write(4)
    r2t = pdu.ReadyToTransfer.unpack_from(client.heard.pop()[0])
    manage(client, function)
    client.data_out(b"b" * 1024, 0, r2t.ttt, final=False)
    assert not client.heard
    client.data_out(b"b" * 1024, 1024, r2t.ttt, 1)
    ((head, _),) = client.heard
    answer = pdu.TaskManagementResponse.unpack_from(head)
    assert (answer.opcode, answer.response) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    assert client.store.content[:2048] == b"a" * 2048
    client.close()


@pytest.mark.parametrize("function", [pdu.TMF_TARGET_WARM_RESET, pdu.TMF_TARGET_COLD_RESET])
def test_a_reset_of_the_target(client: Client, function: int) -> None:
    """Every task of every session ends before the answer (RFC 7143 section 11.5.1); the initiators
    are told. A cold reset ends the sessions, too: this one behind its answer."""
    other = Client(beside=client)
    other.write(4)
    client.write(4)
    r2t = pdu.ReadyToTransfer.unpack_from(client.heard.pop()[0])
    manage(client, function, 7)  # the LUN field is reserved
    assert not client.heard
    client.data_out(b"b" * 2048, 0, r2t.ttt)
    ((head, _),) = client.heard
    answer = pdu.TaskManagementResponse.unpack_from(head)
    assert (answer.opcode, answer.response) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
    assert client.store.content[:2048] == bytes(2048)
    cold = function == pdu.TMF_TARGET_COLD_RESET
    assert client.connection.done is cold and client.cold_resets == int(cold)
    if not cold:
        client.heard.clear()
        client.command(bytes(16))
        told = client.heard.pop()[1]
        assert sense.decode(told[2:]).code == sense.LUN_RESET
    client.close()
    other.close()


def test_a_cold_reset_by_an_initiator_that_sees_less_than_others(client: Client) -> None:
    """Authorization fails at the target (RFC 7143 sections 11.5.1, 11.6.1): nothing is reset."""
    client.device.set_access(lambda name, lun: False)
    manage(client, pdu.TMF_TARGET_COLD_RESET, 0)
    ((head, _),) = client.heard
    answer = pdu.TaskManagementResponse.unpack_from(head)
    assert answer.response == pdu.TMF_NOT_AUTHORIZED
    assert not client.connection.done and not client.cold_resets
    client.close()


@pytest.mark.parametrize("function", OF_A_LUN)
def test_task_management_of_a_lun_that_does_not_exist(client: Client, function: int) -> None:
    manage(client, function, 7)
    ((head, _),) = client.heard
    answer = pdu.TaskManagementResponse.unpack_from(head)
    assert answer.response == pdu.TMF_LUN_DOES_NOT_EXIST
    client.close()


def test_many_reads_go_on_when_buffers_come_back(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that wait for memory start when answers have left and given back theirs."""
    monkeypatch.setattr("iserblk.target.iscsi.session.DATA_BUDGET", 8192)
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 0)
    for itt in range(1, 30):
        client.command(cdb10(READ_10, 8), bhs.FLAG_FINAL | bhs.FLAG_READ, 4096, itt=itt)
    whole = b"".join(got for _, got in client.heard)
    assert len(whole) == 29 * 4096
    client.close()


@pytest.mark.parametrize("how", ["data", "abort", "close"])
def test_memory_that_others_hold_is_waited_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections share a bound; a waiting connection goes on as soon as another frees memory,
    in any of these ways. Each may always have GUARANTEED bytes."""
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 4096)
    budget = DataBudget(32768)
    greedy, modest = Client(budget=budget), Client(budget=budget)
    greedy.write(64, itt=1)  # holds its buffer until its data has come
    assert budget.used == 32768
    modest.command(cdb10(READ_10, 8), bhs.FLAG_FINAL | bhs.FLAG_READ, 4096)
    assert modest.opcodes() == [bhs.DATA_IN]
    modest.heard.clear()
    modest.command(cdb10(READ_10, 16), bhs.FLAG_FINAL | bhs.FLAG_READ, 8192)
    modest.command(cdb10(READ_10, 1), bhs.FLAG_FINAL | bhs.FLAG_READ, 512, itt=2)
    assert not modest.heard
    woken: list[bool] = []
    modest.owner.output_waits = lambda: woken.append(True)
    if how == "data":
        r2t = pdu.ReadyToTransfer.unpack_from(greedy.heard.pop()[0])
        greedy.data_out(bytes(16384), 0, r2t.ttt, 0, False)
        assert not woken
        greedy.data_out(bytes(16384), 16384, r2t.ttt, 1)
    elif how == "abort":
        abort = pdu.TaskManagementRequest(
            function=pdu.TMF_ABORT_TASK,
            lun=bytes(8),
            itt=2,
            referenced_task_tag=1,
            cmd_sn=greedy.cmd_sn,
            exp_stat_sn=1,
        )
        greedy.send(abort)
    else:
        greedy.close()
    assert woken
    sent = modest.socket.recv(1 << 20)  # without a look at its connection
    assert len(sent) == 48 + 8192 + 48 + 512
    modest.close()
    greedy.close()
    assert budget.used == 0 and not budget.waiting


@pytest.mark.parametrize("room", [True, False])
def test_part_of_a_write_that_comes_with_its_command(
    room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lands in the buffer of the whole write; where there is no memory for that yet, in one of
    its own, and the write waits."""
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 0)
    budget = DataBudget(32768)
    client, other = Client(("FirstBurstLength", "4096"), budget=budget), Client(budget=budget)
    data = random.Random(5).randbytes(16384)
    if not room:
        other.write(64)
    client.write(32, data[:4096])
    if not room:
        assert budget.used == 32768 + 4096 and not client.heard
        r2t = pdu.ReadyToTransfer.unpack_from(other.heard.pop()[0])
        other.data_out(bytes(32768), 0, r2t.ttt)
        client.run()
    assert budget.used == 16384
    r2t = pdu.ReadyToTransfer.unpack_from(client.heard.pop()[0])
    assert (r2t.buffer_offset, r2t.desired_length) == (4096, 12288)
    client.data_out(data[4096:], 4096, r2t.ttt)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    assert client.store.content[:16384] == data
    assert budget.used == 0
    # A buffer of 4096 bytes was used, or none.
    free = client.connection.session.pool.take(4096)
    assert (bytes(free[:4096]) == data[:4096]) is not room
    client.close()
    other.close()


def test_any_number_of_pings_at_once_is_answered(client: Client) -> None:
    """With the I bit, so that no window limits them; the initiator takes the answers."""
    ping = pdu.NopOut(
        opcode=bhs.NOP_OUT | bhs.IMMEDIATE, lun=bytes(8), itt=5, cmd_sn=client.cmd_sn, exp_stat_sn=1
    )
    count = 65536 // bhs.BHS_LENGTH
    client.socket.sendall(ping.pack() * count)
    while len(client.heard) < count and not client.connection.done:
        client.run()
    assert client.opcodes() == [bhs.NOP_IN] * count
    client.close()


def test_a_connection_that_ends_waits_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iserblk.target.iscsi.session.GUARANTEED", 0)
    budget = DataBudget(4096)
    greedy, waiting, last = Client(budget=budget), Client(budget=budget), Client(budget=budget)
    greedy.write(8)
    for client in (waiting, last):
        client.command(cdb10(READ_10, 8), bhs.FLAG_FINAL | bhs.FLAG_READ, 4096)
        assert not client.heard
    waiting.close()
    greedy.close()
    assert len(last.socket.recv(1 << 20)) == 48 + 4096
    last.close()


def width(head: bytes) -> int:
    """Of the command window that a PDU of the target tells of."""
    exp_cmd_sn, max_cmd_sn = (int.from_bytes(head[at : at + 4], "big") for at in (28, 32))
    return (max_cmd_sn - exp_cmd_sn + 1) & 0xFFFFFFFF


@pytest.mark.parametrize("ahead", [0, 5, 200])
@pytest.mark.parametrize("immediate", [0, bhs.IMMEDIATE], ids=["", "immediate"])
@pytest.mark.parametrize(
    "opcode",
    [bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST, bhs.TEXT_REQUEST, bhs.LOGOUT_REQUEST],
    ids=["command", "tmf", "text", "logout"],
)
def test_the_reserved_tag_is_none(client: Client, opcode: int, immediate: int, ahead: int) -> None:
    """A PDU that is to be answered under it is rejected, and its number comes again; outside of the
    window it is ignored."""
    head = bytearray(48)
    head[0] = opcode | immediate
    head[1] = 0x81
    head[16:20] = b"\xff" * 4
    head[24:28] = (client.cmd_sn + ahead).to_bytes(4, "big")
    client.say(bytes(head))
    if ahead == 200 and not immediate:
        assert client.heard == []
    else:
        ((said, data),) = client.heard
        reject = pdu.Reject.unpack_from(said)
        assert (said[0], reject.reason) == (bhs.REJECT, pdu.REJECT_INVALID_FIELD)
        assert data == bytes(head) and width(said) == QUEUE_DEPTH
    client.heard.clear()
    client.command(bytes(16), itt=7)
    assert client.opcodes() == [bhs.SCSI_RESPONSE]
    client.close()


def test_rejects_that_answer_nothing_do_not_pile_up(client: Client) -> None:
    """Over TCP their number has no limit. The initiator acknowledges none of them."""
    head = bytes([bhs.SNACK_REQUEST | bhs.IMMEDIATE, 0x81]) + bytes(46)
    tracemalloc.start()
    try:
        for turn in range(3):
            for _ in range(30):
                client.say(head * 100)
                assert client.opcodes() == [bhs.REJECT] * 100
                client.heard.clear()
            now, _ = tracemalloc.get_traced_memory()
            if turn == 0:
                before = now
    finally:
        tracemalloc.stop()
    assert now - before < 6000 * 8  # not one pointer for each
    client.close()


def test_commands_that_are_ignored_are_logged_rarely(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The first, and then as often as their number has doubled."""
    head = bytearray(48)
    head[:2] = bhs.SCSI_COMMAND, 0x81
    head[24] = 0xF0
    for _ in range(100):
        client.say(bytes(head) * 10)
    assert len(caplog.messages) == 10
    assert caplog.messages[0] == "10.0.0.1:3260: command with CmdSN 4026531840 ignored"
    assert caplog.messages[-1].endswith(" ignored (512 so far)")
    client.close()


_SMALL = st.integers(0, 8) | st.just(bhs.NO_TAG) | st.integers(0, 0xFFFFFFFF)
_WORDS = st.lists(st.sampled_from([0, 1, 2, 3, 512, 1024, 4096, bhs.NO_TAG]) | _SMALL,
                  min_size=11, max_size=11)  # fmt: skip
_UNITS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 4, 5, 6, 16, 0x40, 0x41, 0x42, 0x44]) | st.integers(0, 255),
        st.integers(0, 255),
        _WORDS,
        st.binary(max_size=1100),
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(_UNITS, st.booleans())
def test_whatever_a_peer_sends(
    units: list[tuple[int, int, list[int], bytes]], honest: bool
) -> None:
    """After login, while a write waits for data: nothing but the documented errors, and the command
    window does not grow."""
    client = Client(("MaxBurstLength", "1024"))
    try:
        client.write(8)
        for opcode, flags, words, data in units:
            head = bytearray((opcode, flags, 0, 0)) + b"".join(
                word.to_bytes(4, "big") for word in words
            )
            head[4:8] = len(data).to_bytes(4, "big") if honest else head[4:8]
            if honest and opcode in (1, 5):
                head[8:16] = bytes(8)
            client.say(bytes(head) + data + bytes(-len(data) & 3))
            assert all(width(said) <= QUEUE_DEPTH for said, _ in client.heard)
    except (RemoteProtocolError, ConnectionLost, BrokenPipeError):
        pass
    finally:
        client.close()
