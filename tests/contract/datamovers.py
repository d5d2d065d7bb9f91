"""Both roles of every datamover, as the layers above use them: by their seams."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from iserblk.datamover.iser import BHS_LENGTH
from iserblk.datamover.iser_initiator import IserInitiator, ZeroBasedInitiator
from iserblk.datamover.iser_target import IserTarget, ZeroBasedTarget
from iserblk.datamover.seam import InitiatorDatamover, PduSlot, TargetDatamover, TargetSlot
from iserblk.datamover.stream_initiator import StreamInitiator
from iserblk.datamover.stream_target import StreamTarget
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.inprocess import memory_pair
from iserblk.rcap.iwarp.mpa import MpaInitiator, MpaResponder
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.rcap.seam import QueuePair
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ
from iserblk.sockets.stream import SocketStream

INLINE_SIZE = 8192
RECEIVE_SIZE = 28 + 48 + INLINE_SIZE
UNEXPECTED = 8
RECEIVES = 16  # at the target

ISER = SessionParameters(rdma_extensions=True, immediate_data=False)
HELLO = replace(ISER, iser_hello_required=True)
PLAIN = SessionParameters(
    max_burst_length=65536, first_burst_length=16384, max_recv_data_segment_length=8192
)
TCP_WAYS = {
    "plain": PLAIN,
    "no-immediate-data": replace(PLAIN, immediate_data=False),
    "unsolicited": replace(PLAIN, initial_r2t=False),
    "unsolicited-only": replace(PLAIN, initial_r2t=False, immediate_data=False),
    "digests": replace(PLAIN, header_digest="CRC32C", data_digest="CRC32C"),
    "header-digest": replace(PLAIN, header_digest="CRC32C"),
    "data-digest": replace(PLAIN, data_digest="CRC32C"),
    "large-segments": replace(
        PLAIN,
        max_burst_length=1 << 20,
        max_recv_data_segment_length=262144,
        initiator_recv_data_segment_length=262144,
    ),
}

Roles = tuple[InitiatorDatamover, TargetDatamover]


def iwarp_pair(
    crc: bool, sockets: tuple[socket.socket, socket.socket] | None = None
) -> tuple[QueuePair, QueuePair]:
    left, right = sockets or socket.socketpair()
    initiator, responder = MpaInitiator(crc=crc), MpaResponder(crc=crc)
    theirs = responder.receive_data(initiator.data_to_send())
    assert theirs is not None
    responder.accept()
    ours = initiator.receive_data(responder.data_to_send())
    assert ours is not None
    return (
        IwarpQueuePair(left, ours, initiator=True, receive_size=RECEIVE_SIZE),
        IwarpQueuePair(right, theirs, initiator=False, receive_size=RECEIVE_SIZE),
    )


def over_rdma(pair: tuple[QueuePair, QueuePair], send_invalidate: bool = True) -> Roles:
    return IserInitiator(pair[0], INLINE_SIZE), IserTarget(pair[1], send_invalidate)


def zero_based(pair: tuple[QueuePair, QueuePair]) -> Roles:
    """With the 12-byte header, and the Hello that always begins with it."""
    return ZeroBasedInitiator(pair[0], INLINE_SIZE), ZeroBasedTarget(pair[1], True)


def over_tcp() -> Roles:
    left, right = socket.socketpair()
    return (
        TcpInitiator(SocketStream(left), INLINE_SIZE, 262144),
        TcpTarget(SocketStream(right), 262144),
    )


def over_stream(crc: bool, zero_based: bool = False) -> Roles:
    """A connection that is still in streaming mode, as login leaves it."""
    kinds = (ZeroBasedInitiator, ZeroBasedTarget) if zero_based else (IserInitiator, IserTarget)
    ends = [SocketStream(sock) for sock in socket.socketpair()]
    left, right = (
        StreamingQueuePair(end, initiator=end is ends[0], crc=crc, receive_size=RECEIVE_SIZE)
        for end in ends
    )
    return (
        StreamInitiator(ends[0], left, kinds[0](left, INLINE_SIZE), 262144),
        StreamTarget(ends[1], right, kinds[1](right, True), 262144),
    )


class Way(NamedTuple):
    """``parameters``: what the login of such a connection has agreed on."""

    make: Callable[[], Roles]
    parameters: SessionParameters


def _tcp(parameters: SessionParameters) -> Way:
    return Way(over_tcp, parameters)


ISER_WAYS = {
    "iser-memory": Way(lambda: over_rdma(memory_pair(receive_size=RECEIVE_SIZE)), ISER),
    "iser-iwarp-crc": Way(lambda: over_rdma(iwarp_pair(True)), ISER),
    "iser-iwarp-nocrc": Way(lambda: over_rdma(iwarp_pair(False)), ISER),
    "iser-memory-hello": Way(lambda: over_rdma(memory_pair(receive_size=RECEIVE_SIZE)), HELLO),
    "iser-iwarp-hello": Way(lambda: over_rdma(iwarp_pair(True)), HELLO),
    "iser-memory-12": Way(lambda: zero_based(memory_pair(receive_size=RECEIVE_SIZE)), ISER),
    "iser-iwarp-12": Way(lambda: zero_based(iwarp_pair(True)), ISER),
    "iser-stream-crc": Way(lambda: over_stream(True), ISER),
    "iser-stream-nocrc": Way(lambda: over_stream(False), ISER),
    "iser-stream-hello": Way(lambda: over_stream(True), HELLO),
    "iser-stream-12": Way(lambda: over_stream(True, zero_based=True), ISER),
}
WAYS = {
    **ISER_WAYS,
    **{f"tcp-{name}": _tcp(each) for name, each in TCP_WAYS.items()},
    # RDMAExtensions is not Yes: the stream goes on in Traditional iSCSI.
    "tcp-stream": Way(lambda: over_stream(True), PLAIN),
    "tcp-stream-digests": Way(lambda: over_stream(True), TCP_WAYS["digests"]),
}
TCP = WAYS["tcp-plain"]
# ErrorRecoveryLevel 1 or more: the target keeps what it sends until it is acknowledged.
RECOVERING_WAYS = {
    f"tcp-{name}-level-{level}": _tcp(replace(TCP_WAYS[name], error_recovery_level=level))
    for name, level in (("digests", 1), ("unsolicited", 1), ("large-segments", 2))
}
EVERY_WAY = {**WAYS, **RECOVERING_WAYS}


@dataclass
class Numbers:
    stat_sn: int = 100
    exp_cmd_sn: int = 5
    max_cmd_sn: int = 50


class Recorder:
    """The iSCSI layer above: writes down what came up."""

    def __init__(self) -> None:
        self.pdus: list[tuple[bytes, bytes, int]] = []
        self.on_pdu: Callable[[bytes], None] | None = None
        self.filled: list[PduSlot] = []
        self.completed: list[tuple[PduSlot, int]] = []  # Data_Completion_Notify: with its SN
        self.acknowledged: list[tuple[PduSlot, int]] = []
        self.sent: list[PduSlot] = []
        self.discarded: list[bytes] = []

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        unit = bytes(message[at : at + BHS_LENGTH])
        self.pdus.append((unit, bytes(message[at + BHS_LENGTH :]), invalidated))
        if self.on_pdu is not None:
            self.on_pdu(unit)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        self.filled.append(slot)
        self.completed.append((slot, sn))

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        self.acknowledged.append((slot, data_sn))

    def sent_notify(self, slot: PduSlot) -> None:
        self.sent.append(slot)

    def discarded_notify(self, head: memoryview) -> None:
        self.discarded.append(bytes(head))


def final_response(target: TargetDatamover) -> TargetSlot:
    """A slot with the final Login Response, for ``enable_datamover``."""
    final = TargetSlot(8)
    target.add_resources([final], INLINE_SIZE, 0)
    final.bhs[:] = pdu.LoginResponse(
        flags=pdu.TRANSIT | pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT | pdu.FULL_FEATURE_PHASE,
        data_length=0,
        isid=bytes(6),
        tsih=1,
        itt=0,
        stat_sn=99,
        exp_cmd_sn=5,
        max_cmd_sn=50,
    ).pack()
    return final


class Ends:
    """Both ends of one connection in full feature phase, with 8 slots each. ``next``: of
    ``answers``, for the next command."""

    def __init__(self, way: Way = TCP) -> None:
        self.way = way.parameters
        self.up, self.down = Recorder(), Recorder()
        self.initiator, self.target = way.make()
        self.initiator.user, self.target.user = self.up, self.down
        self.numbers = Numbers()
        self.target.notice_numbers(self.numbers)
        self.slots = [PduSlot(index) for index in range(8)]
        self.answers = [TargetSlot(index) for index in range(8)]
        self.initiator.allocate_connection_resources(self.slots, UNEXPECTED)
        self.target.allocate_connection_resources(self.answers, INLINE_SIZE, RECEIVES)
        self.initiator.notice_key_values(self.way)
        self.target.notice_key_values(self.way)
        self.next = 0
        self.keeps = way in RECOVERING_WAYS.values()
        self._enable()
        self.down.on_pdu = self._map

    def _enable(self) -> None:
        """Send the final Login Response, and enter full feature phase."""
        final = final_response(self.target)
        self.target = self.target.enable_datamover(final)
        self.until(lambda: bool(self.up.pdus))
        self.initiator = self.initiator.enable_datamover()
        self.until(lambda: not final.busy and self._established())
        self.until(lambda: self.initiator.greeted and self.target.greeted)
        assert [unit[0] for unit, _, _ in self.up.pdus] == [bhs.LOGIN_RESPONSE]
        self.up.pdus.clear()
        self.down.sent.clear()

    def _established(self) -> bool:
        """Whether the connection has the mode that login has agreed on."""
        pairs = [getattr(end, "qp", None) for end in (self.initiator, self.target)]
        return not any(isinstance(pair, StreamingQueuePair) for pair in pairs)

    def _map(self, unit: bytes) -> None:
        if unit[0] == bhs.SCSI_COMMAND:
            self.target.map_task(self.answers[self.next])
            self.next += 1

    def until(self, condition: Callable[[], bool]) -> None:
        """Drive both ends until ``condition`` holds."""
        for _ in range(10000):
            self.initiator.flush()
            self.target.flush()
            if condition():
                return
            both = (self.initiator, self.target)
            full = [end.fileno() for end in both if end.wants_write()]
            ready = select.select([end.fileno() for end in both], full, [], 5)
            assert ready[0] or ready[1], "nothing happens any more"
            self.target.progress(0.0)
            self.initiator.progress(0.0)
        raise AssertionError("no end")

    def command(self, index: int, direction: int, data: memoryview) -> None:
        slot = self.slots[index]
        slot.direction, slot.data = direction, data
        slot.bhs[:] = pdu.ScsiCommand(
            flags=bhs.FLAG_FINAL | (bhs.FLAG_READ if direction == READ else bhs.FLAG_WRITE),
            lun=bytes((0, 3, 0, 0, 0, 0, 0, 0)),
            itt=index,
            edtl=len(data),
            cmd_sn=index,
            exp_stat_sn=1,
            cdb=bytes(16),
        ).pack()
        self.initiator.send_control(slot)

    def command_both(self, index: int, data: memoryview, data_in: memoryview) -> None:
        """A bidirectional command."""
        slot = self.slots[index]
        slot.direction, slot.data, slot.data_in = BIDIRECTIONAL, data, data_in
        slot.inline_length = bhs.pack_bidirectional_read_length(slot.inline, len(data_in))
        slot.bhs[:] = pdu.ScsiCommand(
            flags=bhs.FLAG_FINAL | bhs.FLAGS_BIDIRECTIONAL,
            data_length=slot.inline_length // 4 << 24,
            lun=bytes((0, 3, 0, 0, 0, 0, 0, 0)),
            itt=index,
            edtl=len(data),
            cmd_sn=index,
            exp_stat_sn=1,
            cdb=bytes(16),
        ).pack()
        self.initiator.send_control(slot)

    def commanded(
        self, index: int, direction: int, data: memoryview, data_in: memoryview | None = None
    ) -> TargetSlot:
        """The command, with what may go with it unasked, has come."""
        at = self.next
        came = len(self.down.pdus)
        if data_in is None:
            self.command(index, direction, data)
        else:
            self.command_both(index, data, data_in)
        self.until(
            lambda: (
                self.next > at
                and len(self.down.pdus) > came
                and bool(self.down.pdus[-1][0][1] & bhs.FLAG_FINAL)
            )
        )
        return self.answers[at]

    def respond(self, index: int, status: int = 0, sense: bytes = b"", **more: int) -> None:
        answer = self.answers[index]
        answer.inline[: len(sense)] = sense
        answer.inline_length = len(sense)
        answer.bhs[:] = pdu.ScsiResponse(
            status=status,
            data_length=len(sense),
            itt=index,
            stat_sn=self.numbers.stat_sn,
            exp_cmd_sn=5,
            max_cmd_sn=50,
            **more,
        ).pack()
        self.numbers.stat_sn += 1
        self.target.send_control(answer, True)

    def acknowledge(self, index: int = 7) -> None:
        """Send a PDU with the present ExpStatSN, in a slot that is not in use."""
        slot = self.slots[index]
        slot.direction, slot.data = NO_DATA, None
        slot.bhs[:] = pdu.NopOut(itt=bhs.NO_TAG, cmd_sn=0, exp_stat_sn=self.numbers.stat_sn).pack()
        self.initiator.send_control(slot)

    def close(self) -> None:
        self.initiator.connection_terminate()
        self.target.connection_terminate()


def drive(end: InitiatorDatamover | TargetDatamover) -> None:
    """``progress`` until it raises."""
    for _ in range(1000):
        full = [end.fileno()] if end.wants_write() else []
        assert any(select.select([end.fileno()], full, [], 5)), "nothing happens any more"
        end.progress(0.0)
    raise AssertionError("no end")


def unsolicited(got: list[tuple[bytes, bytes, int]]) -> bytes:
    """The data that came up with a command, and behind it."""
    whole = b""
    for head, behind, _ in got:
        size = int.from_bytes(head[5:8], "big")
        if head[0] == bhs.DATA_OUT:
            fields = pdu.DataOut.unpack_from(head)
            assert fields.buffer_offset == len(whole)
            assert (fields.ttt, fields.lun) == (bhs.NO_TAG, bytes(8))  # RFC 7143 section 11.7.4
        whole += behind[:size]
    return whole
