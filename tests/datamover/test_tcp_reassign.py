"""TASK REASSIGN over TCP: a read goes on behind what has come with none missing before it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from iserblk.crc import crc32c
from iserblk.datamover.seam import PduSlot
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import READ
from iserblk.sockets.stream import SocketStream

ITT = 0x1234
PART = 512  # of each Data-In
COUNT = 4
DAMAGED, CUT = "damaged", "cut off"


def data_of(number: int, again: bool = False) -> bytes:
    return bytes([number * 2 + again + 1]) * PART


class Connection:
    """A datamover at ErrorRecoveryLevel 2, with data digests, and the target's end of its stream.
    Implements InitiatorUser: ``notified``: what came up."""

    def __init__(self) -> None:
        ours, self.wire = socket.socketpair()
        self.wire.setblocking(False)
        login = TcpInitiator(SocketStream(ours), 64, 4096)
        login.user = self
        self.slots = [PduSlot(index) for index in range(2)]
        login.allocate_connection_resources(self.slots, 4)
        login.notice_key_values(SessionParameters(error_recovery_level=2, data_digest="CRC32C"))
        self.datamover = login.enable_datamover()
        self.notified: list[bytes] = []

    def numbers(self) -> dict[str, int]:
        return {"stat_sn": 0, "exp_cmd_sn": 2, "max_cmd_sn": 32}

    def control_notify(self, message: memoryview, at: int, _invalidated: int) -> None:
        self.notified.append(bytes(message[at:]))

    def sent_notify(self, slot: PduSlot) -> None:
        raise AssertionError("there are no Data-Outs")

    def said(self) -> bytes:
        self.datamover.flush()
        return self.wire.recv(1 << 16)

    def hear(self, data: bytes) -> None:
        self.wire.sendall(data)
        self.datamover.progress(0.0)

    def data_in(
        self, number: int, how: str = "", again: bool = False, data_sn: int | None = None
    ) -> None:
        data = bytearray(data_of(number, again))
        head = pdu.DataIn(
            flags=bhs.FLAG_FINAL if number == COUNT - 1 else 0,
            data_length=PART,
            lun=bytes(8),
            itt=ITT,
            ttt=bhs.NO_TAG,
            **self.numbers(),
            data_sn=number if data_sn is None else data_sn,
            buffer_offset=number * PART,
        ).pack()
        digest = crc32c(data).to_bytes(4, "little")
        if how == DAMAGED:
            data[7] ^= 1
        unit = head + bytes(data) + digest
        self.hear(unit[: len(unit) // 2] if how == CUT else unit)

    def good(self, count: int = COUNT) -> None:
        self.hear(pdu.ScsiResponse(status=0, itt=ITT, **self.numbers(), exp_data_sn=count).pack())

    def close(self) -> None:
        self.datamover.connection_terminate()
        self.wire.close()


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    both = Connection(), Connection()
    yield both
    for each in both:
        each.close()


def reassign(
    ends: tuple[Connection, Connection], came: list[int | tuple[int, str]]
) -> tuple[bytearray, int]:
    """A read whose Data-In ``came`` on the first connection, and goes on on the second: its buffer,
    and the ExpDataSN of the TASK REASSIGN."""
    old, new = ends
    buffer = bytearray(COUNT * PART)
    slot = PduSlot(0)
    slot.take_memory(old.slots[0])
    slot.direction, slot.data = READ, memoryview(buffer)
    command = pdu.ScsiCommand(
        flags=0xC1, lun=bytes(8), itt=ITT, edtl=len(buffer), cmd_sn=1, exp_stat_sn=0, cdb=bytes(16)
    )
    command.pack_into(slot.bhs)
    old.datamover.send_control(slot)
    old.said()
    for each in came:
        old.data_in(*(each if isinstance(each, tuple) else (each,)))
    old.datamover.connection_terminate()
    slot.take_memory(new.slots[0])
    bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, ITT)
    pdu.TaskManagementRequest(
        function=pdu.TMF_TASK_REASSIGN,
        lun=bytes(8),
        itt=2,
        referenced_task_tag=ITT,
        cmd_sn=2,
        exp_stat_sn=0,
    ).pack_into(new.slots[1].bhs)
    new.datamover.reassign(slot, new.slots[1], old.datamover)
    return buffer, pdu.TaskManagementRequest.unpack_from(new.said()).exp_data_sn


CAME = pytest.mark.parametrize(
    ("came", "expected"),
    [
        ([], 0),
        ([0, 1], 2),
        ([0, 2, 3], 1),
        ([1], 0),
        ([0, 2, 1], 3),
        ([0, 3, 1], 1),
        ([0, 2, 1, (3, DAMAGED)], 3),
        ([0, (1, DAMAGED), 2], 1),
        ([0, (1, DAMAGED), 2, (1, DAMAGED)], 1),
        ([0, (1, CUT)], 1),
        ([0, 2, (1, CUT)], 1),
        ([0, 2, 1, (3, CUT)], 3),
    ],
    ids=str,
)


@CAME
@pytest.mark.parametrize("first", ["expected", "all"])
def test_a_read_goes_on_behind_its_contiguous_data(
    ends: tuple[Connection, Connection],
    came: list[int | tuple[int, str]],
    expected: int,
    first: str,
) -> None:
    """RFC 7143 sections 7.2.2, 11.5.6. Data behind a gap does not count, and comes again; a target
    may also send all of it."""
    buffer, exp_data_sn = reassign(ends, came)
    assert exp_data_sn == expected
    _, new = ends
    for number in range(expected if first == "expected" else 0, COUNT):
        new.data_in(number, again=True)
    assert not new.notified
    new.good()
    (message,) = new.notified
    response = pdu.ScsiResponse.unpack_from(message)
    assert (response.status, response.flags, response.residual) == (0, bhs.FLAG_FINAL, 0)
    assert buffer == b"".join(data_of(number, number >= expected) for number in range(COUNT))


def test_what_does_not_come_again_is_missing(ends: tuple[Connection, Connection]) -> None:
    """The target goes on behind what had come before the gap was seen."""
    reassign(ends, [0, 2])
    _, new = ends
    new.data_in(3, again=True)
    new.good()
    assert not new.notified
    snack = pdu.SnackRequest.unpack_from(new.said())
    assert (snack.kind, snack.beg_run, snack.run_length) == (pdu.SNACK_DATA, 1, 2)


@pytest.mark.parametrize("came", [[0], [0, (1, CUT)], [0, 2, (1, CUT)]], ids=str)
def test_what_was_cut_off_counts_for_nothing(
    ends: tuple[Connection, Connection], came: list[int | tuple[int, str]]
) -> None:
    """Where the target leaves it out and numbers on, the read lacks data, and says so."""
    _, exp_data_sn = reassign(ends, came)
    assert exp_data_sn == 1
    _, new = ends
    for data_sn in (1, 2):
        new.data_in(data_sn + 1, again=True, data_sn=data_sn)
    new.good(3)
    (message,) = new.notified
    response = pdu.ScsiResponse.unpack_from(message)
    assert response.flags == bhs.FLAG_FINAL | bhs.RESIDUAL_UNDERFLOW
    assert response.residual == PART
