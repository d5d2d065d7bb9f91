"""Bidirectional commands at the target: XDWRITEREAD(10), over iSER and over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.scsi import cdb
from iserblk.scsi import status as sam
from tests.support import logs
from tests.target.iscsi.test_connection import Client
from tests.target.iser_client import IserClient
from tests.vectors import bidirectional as golden

pytestmark = pytest.mark.logs(logs.IGNORED)

AT, SIZE = 5 * 512, 1024
OLD = bytes(i * 3 & 255 for i in range(SIZE))
NEW = bytes(i * 7 + 1 & 255 for i in range(SIZE))
XOR = bytes(one ^ two for one, two in zip(OLD, NEW, strict=True))


@pytest.fixture
def tcp() -> Iterator[Client]:
    client = Client(("ImmediateData", "No"))
    client.store.content[AT : AT + SIZE] = OLD
    yield client
    client.close()


def next_stat_sn(client: Client) -> int:
    """That of the next response: the NOP-In that answers a ping has it, and one more follows."""
    client.send(pdu.NopOut(lun=bytes(8), itt=99, cmd_sn=client.cmd_sn, exp_stat_sn=1))
    ((head, _),) = client.heard
    client.heard.clear()
    return pdu.NopIn.unpack_from(head).stat_sn + 1


def test_over_tcp_byte_by_byte(tcp: Client) -> None:
    """R2T and Data-In are numbered together, and the status comes in a SCSI Response."""
    stat_sn = next_stat_sn(tcp)
    tcp.say(golden.command())
    ((head, _),) = tcp.heard
    tcp.heard.clear()
    ttt = int.from_bytes(head[20:24], "big")
    assert head == golden.r2t(ttt, stat_sn)
    assert tcp.store.content[AT : AT + SIZE] == OLD
    tcp.send(
        pdu.DataOut(
            flags=bhs.FLAG_FINAL,
            data_length=SIZE,
            lun=bytes(8),
            itt=10,
            ttt=ttt,
            exp_stat_sn=1,
            data_sn=0,
            buffer_offset=0,
        ),
        NEW,
    )
    assert tcp.heard == [(golden.data_in(), XOR), (golden.response(stat_sn), b"")]
    assert tcp.store.content[AT : AT + SIZE] == NEW


@pytest.mark.parametrize(
    ("read_length", "edtl", "flags", "bidi_residual", "residual"),
    [
        (1024, 1024, 0x80, 0, 0),
        (2048, 1024, 0x88, 1024, 0),
        (512, 1024, 0x90, 512, 0),
        (0, 1024, 0x90, 1024, 0),
        (1024, 1536, 0x82, 0, 512),
        (2000, 1536, 0x8A, 976, 512),
        (1000, 1536, 0x92, 24, 512),
    ],
)
def test_both_residuals(
    read_length: int, edtl: int, flags: int, bidi_residual: int, residual: int
) -> None:
    """Each transfer has a residual count of its own. The initiator gets no more than it expects."""
    client = Client()
    client.store.content[AT : AT + SIZE] = OLD
    stat_sn = next_stat_sn(client)
    command = bytearray(golden.command(read_length=read_length, edtl=edtl))
    command[5:8] = edtl.to_bytes(3, "big")
    client.say(bytes(command) + NEW.ljust(edtl, b"?"))
    given = min(read_length, SIZE)
    data = []
    if given:
        head = bytearray(golden.data_in(given))
        head[39] = 0  # DataSN: there is no R2T
        data = [(bytes(head), XOR[:given])]
    response = golden.response(stat_sn, len(data), flags, bidi_residual, residual)
    assert client.heard == [*data, (response, b"")]
    assert client.store.content[AT : AT + SIZE] == NEW
    client.close()


def sense_of(client: Client) -> tuple[int, int, int]:
    ((head, data),) = client.heard
    assert head[3] == sam.CHECK_CONDITION
    return data[4], data[14], data[15]


def test_less_data_than_the_cdb_says(tcp: Client) -> None:
    """A part of an exclusive or would be taken for the whole."""
    tcp.say(golden.command(edtl=512))
    assert sense_of(tcp) == (5, 0x24, 0)
    assert pdu.ScsiResponse.unpack_from(tcp.heard[0][0]).bidi_residual == 1024
    assert tcp.store.content[AT : AT + SIZE] == OLD


def test_a_command_that_is_said_to_write_only(tcp: Client) -> None:
    """Without R its Data-In could not be sent: INVALID FIELD IN COMMAND INFORMATION UNIT."""
    tcp.command(cdb.xdwriteread10(5, 2).ljust(16, b"\0"), 0xA1, 1024)
    assert sense_of(tcp) == (5, 0x0E, 3)
    assert tcp.store.content[AT : AT + SIZE] == OLD


def test_a_command_that_is_said_to_read_only(tcp: Client) -> None:
    tcp.command(cdb.xdwriteread10(5, 2).ljust(16, b"\0"), 0xC1, 1024)
    assert sense_of(tcp) == (5, 0x24, 0)
    assert tcp.store.content[AT : AT + SIZE] == OLD


def test_an_error_tells_of_both_transfers(tcp: Client) -> None:
    """Neither has moved any data."""
    beyond = bytearray(golden.command())
    beyond[34:38] = b"\xff" * 4
    tcp.say(bytes(beyond))
    assert sense_of(tcp) == (5, 0x21, 0)
    response = pdu.ScsiResponse.unpack_from(tcp.heard[0][0])
    assert response.flags == 0x80 | bhs.BIDI_UNDERFLOW | bhs.RESIDUAL_UNDERFLOW
    assert (response.bidi_residual, response.residual) == (1024, 1024)


def test_a_read_in_a_bidirectional_pdu(tcp: Client) -> None:
    """The PDU may offer to write as well: nothing is asked for, and the residual tells it."""
    command = bytearray(golden.command(read_length=1024, edtl=4096))
    command[32] = 0x28
    tcp.say(bytes(command))
    (data, response) = tcp.heard
    assert data[0][0] == bhs.DATA_IN and data[1] == OLD
    answer = pdu.ScsiResponse.unpack_from(response[0])
    assert (answer.flags, answer.residual, answer.bidi_residual) == (0x82, 4096, 0)


def test_a_write_in_a_bidirectional_pdu() -> None:
    client = Client()
    command = bytearray(golden.command(read_length=100))
    command[32] = 0x2A
    command[5:8] = SIZE.to_bytes(3, "big")
    client.say(bytes(command) + NEW)
    ((head, _),) = client.heard
    answer = pdu.ScsiResponse.unpack_from(head)
    assert (answer.status, answer.flags, answer.residual) == (0, 0x88, 0)
    assert answer.bidi_residual == 100
    assert client.store.content[AT : AT + SIZE] == NEW
    client.close()


@pytest.mark.parametrize("send_invalidate", [True, False])
def test_over_iser_byte_by_byte(send_invalidate: bool) -> None:
    """The data comes by RDMA Read of the Write STag, and goes by RDMA Write to the Read STag; the
    response invalidates the Read STag.

    proves: ISER-9.5.3-1, ISER-7.3.2-5"""
    client = IserClient(send_invalidate).logged_in()
    client.store.content[AT : AT + SIZE] = OLD
    back = bytearray(2048)
    write_stag, write_base = client.ours.advertise(memoryview(NEW), seam.REMOTE_READ)
    read_stag, read_base = client.ours.advertise(memoryview(back), seam.REMOTE_WRITE)
    header = golden.iser_header(write_stag, write_base, read_stag, read_base)
    before = len(client.heard)
    client.send(header + golden.command())
    client.run()
    kinds = [message.kind for message in client.sent]
    last = seam.SEND_SE_INVALIDATE if send_invalidate else seam.SEND_SE
    assert kinds == [seam.RDMA_READ, seam.RDMA_WRITE, last]
    (answer,) = client.heard[before:]
    assert answer.invalidated == (read_stag if send_invalidate else 0)
    stat_sn = answer.number(24)
    assert answer.bhs == golden.response(stat_sn, exp_data_sn=0)
    assert bytes(back) == XOR + bytes(1024)
    assert client.store.content[AT : AT + SIZE] == NEW


def test_an_ordered_command_that_is_bidirectional(tcp: Client) -> None:
    """It is begun anew when its turn comes, as any other."""
    running: list[object] = []
    offload, tcp.owner.offload = tcp.owner.offload, running.append
    tcp.command(cdb.synchronize_cache10(0, 0).ljust(16, b"\0"), 0x81, itt=1)
    ordered = bytearray(golden.command(flags=0xE2))
    ordered[27] = tcp.cmd_sn
    tcp.say(bytes(ordered))
    assert not tcp.heard
    tcp.owner.offload = offload
    (flush,) = running
    offload(flush)  # type: ignore[arg-type]
    tcp.connection.flush()
    tcp.run()
    assert tcp.opcodes() == [bhs.SCSI_RESPONSE, bhs.R2T]
