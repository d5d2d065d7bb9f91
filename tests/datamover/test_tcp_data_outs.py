"""Data-Outs over TCP: how many are made at once, and what becomes of them when their task ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from iserblk.datamover.seam import PduSlot
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_stream import PduReceiver
from iserblk.errors import ConnectionLost
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import WRITE
from iserblk.sockets.stream import SocketStream

SEGMENT = 512
SIZE = 512 * SEGMENT
ITT = 7
_NUMBERS = {"stat_sn": 0, "exp_cmd_sn": 1, "max_cmd_sn": 99}


class Connection:
    """A datamover whose target takes Data-Outs of 512 bytes, and the target's end of the stream.
    ``came``: (header, data) of what was received there. ``told``: PDUs that went up. Implements
    InitiatorUser."""

    def __init__(self, **keys: object) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel takes little at once
        theirs.setblocking(False)
        self.wire = theirs
        login = TcpInitiator(SocketStream(ours), 64, 4096)
        login.user = self
        self.slot = PduSlot(0)
        login.allocate_connection_resources([self.slot], 4)
        values = {
            "max_recv_data_segment_length": SEGMENT,
            "max_burst_length": SIZE,
            "first_burst_length": SIZE,
            "immediate_data": False,
            **keys,
        }
        self.parameters = SessionParameters(**values)  # type: ignore[arg-type]
        login.notice_key_values(self.parameters)
        self.datamover = login.enable_datamover()
        self.came: list[tuple[bytes, bytes]] = []
        self.told: list[bytes] = []
        self._stream = SocketStream(theirs)
        self._rx = PduReceiver(lambda _message, _at: None, self._deliver)
        digests = self.parameters.data_digest != "None"
        self._rx.full_feature_phase(1 << 20, False, digests)

    def control_notify(self, message: memoryview, at: int, _invalidated: int) -> None:
        self.told.append(bytes(message))

    def sent_notify(self, slot: PduSlot) -> None:
        raise AssertionError("no slot for a Data-Out")

    def _deliver(self, message: memoryview, _placed: bool) -> None:
        data = bytes(bhs.data_segment_untrusted(message))
        self.came.append((bytes(message[: bhs.BHS_LENGTH]), data))

    def write(self, data: bytearray) -> None:
        self.slot.direction = WRITE
        self.slot.data = memoryview(data)
        bhs.pack_scsi_command(
            self.slot.bhs, 0, bhs.SCSI_COMMAND, 0xA0, 0, bytes(8), ITT, len(data), 1, 0, bytes(16)
        )
        self.datamover.send_control(self.slot)
        self.datamover.flush()

    def ask(self, offset: int, length: int, number: int) -> None:
        """An R2T."""
        request = pdu.ReadyToTransfer(
            lun=bytes(8), itt=ITT, ttt=number, r2t_sn=number,
            buffer_offset=offset, desired_length=length, **_NUMBERS,
        )  # fmt: skip
        self.wire.sendall(request.pack())
        self.datamover.progress(0.0)

    def drain(self) -> None:
        """Receive what has left, when the initiator has gone."""
        with suppress(ConnectionLost):
            while True:
                self._rx.receive_from(self._stream, "the initiator")

    def take(self) -> None:
        """Receive all that the initiator has to send."""
        seen = -1
        while seen < len(self.came) or self.datamover.wants_write():
            seen = len(self.came)
            self._rx.receive_from(self._stream, "the initiator")
            self.datamover.progress(0.0)

    def data_outs(self) -> list[pdu.DataOut]:
        return [
            pdu.DataOut.unpack_from(header)
            for header, _ in self.came
            if header[0] & bhs.OPCODE_MASK == bhs.DATA_OUT
        ]

    def close(self) -> None:
        self.datamover.connection_terminate()
        self._stream.close()


@pytest.fixture(params=[{}, {"data_digest": "CRC32C"}, {"error_recovery_level": 1}])
def connection(request: pytest.FixtureRequest) -> Iterator[Connection]:
    made = Connection(**request.param)
    yield made
    made.close()


def pattern() -> bytearray:
    return bytearray((7 * at + (at >> 8)) & 0xFF for at in range(SIZE))


@pytest.mark.parametrize("unsolicited", [False, True])
def test_a_long_sequence_is_whole(unsolicited: bool) -> None:
    """Whatever leaves at once, each Data-Out is there, in its order, with its data."""
    made = Connection(initial_r2t=not unsolicited)
    data = pattern()
    made.write(data)
    if not unsolicited:
        made.take()
        made.ask(0, SIZE, 0)
    made.take()
    outs = made.data_outs()
    assert [out.data_sn for out in outs] == list(range(SIZE // SEGMENT))
    assert [out.buffer_offset for out in outs] == list(range(0, SIZE, SEGMENT))
    assert [bool(out.flags & bhs.FLAG_FINAL) for out in outs] == [False] * (len(outs) - 1) + [True]
    assert b"".join(piece for _, piece in made.came) == data
    made.close()


def test_few_pdus_are_made_of_what_a_target_asks_for(connection: Connection) -> None:
    """A target that takes small PDUs, and takes none of these, costs little memory and time."""
    connection.write(pattern())
    connection.take()
    connection.ask(0, SIZE, 0)
    assert connection.datamover.wants_write()
    connection.datamover.connection_terminate()
    connection.drain()
    assert 0 < len(connection.data_outs()) < 100


def test_next_sequence_waits_for_the_whole_one_before(connection: Connection) -> None:
    """MaxOutstandingR2T counts sequences whose last Data-Out has not left."""
    connection.write(pattern())
    connection.take()
    for number in range(4):
        connection.ask(number * SIZE // 4, SIZE // 4, number)
        connection.take()
    assert len(connection.data_outs()) == SIZE // SEGMENT
    assert b"".join(piece for _, piece in connection.came) == pattern()


def test_data_outs_that_are_made_late_acknowledge_nothing_new() -> None:
    """They leave in front of a SNACK that was queued before they were made: the target must not
    count as acknowledged what that asks for."""
    made = Connection(error_recovery_level=1)
    made.write(pattern())
    made.take()
    made.ask(0, SIZE, 0)
    assert made.datamover.wants_write()
    for stat_sn in (1, 0):  # the second shows that the first was missing, which then comes
        made.wire.sendall(pdu.NopIn(itt=5, stat_sn=stat_sn, exp_cmd_sn=1, max_cmd_sn=99).pack())
        made.datamover.progress(0.0)
    made.take()
    heads = [head for head, _ in made.came]
    opcodes = [head[0] & bhs.OPCODE_MASK for head in heads]
    assert opcodes == [bhs.SCSI_COMMAND, *[bhs.DATA_OUT] * (SIZE // SEGMENT), bhs.SNACK_REQUEST]
    assert {head[28:32] for head in heads} == {bytes(4)}  # ExpStatSN
    assert [message[0] for message in made.told] == [bhs.NOP_IN] * 2
    made.close()


def test_a_task_that_ends_sends_no_more_data(connection: Connection) -> None:
    """But for the PDU that has begun to leave, which is copied: the buffer is the caller's."""
    data = pattern()
    connection.write(data)
    connection.take()
    connection.ask(0, SIZE, 0)
    connection.datamover.deallocate_task_resources(connection.slot, 0)
    original = bytes(data)
    data[:] = bytes(SIZE)
    data.clear()  # BufferError while a view of it exists
    connection.take()
    came = b"".join(piece for _, piece in connection.came)
    assert 0 < len(came) < SIZE // 2 and came == original[: len(came)]
