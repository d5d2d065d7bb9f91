"""The datamover contract over Traditional iSCSI alone: its Data-In and R2T, and a lying peer."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserblk.datamover.seam import INLINE
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import READ, WRITE
from iserblk.sockets.stream import SocketStream
from tests.contract.datamovers import INLINE_SIZE, PLAIN, Ends, drive


@pytest.fixture
def plain() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


def test_sense_and_residual(plain: Ends) -> None:
    """A status other than GOOD has a PDU of its own, behind what data there is."""
    buffer = bytearray(100)
    plain.command(0, READ, memoryview(buffer))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.put_data(plain.answers[0], memoryview(b"part"), 0)
    plain.respond(0, 2, b"\0\2ab", flags=bhs.FLAG_FINAL | bhs.RESIDUAL_UNDERFLOW, residual=96)
    plain.until(lambda: bool(plain.up.pdus))
    head, behind, _ = plain.up.pdus[0]
    response = pdu.ScsiResponse.unpack_from(head)
    assert (response.status, response.residual, behind) == (2, 96, b"\0\2ab")
    assert (response.exp_data_sn, buffer[:5]) == (1, b"part\0")  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("status", [0, 2])  # 2: its sense data may say that it went well
@pytest.mark.parametrize("said", [0, 3])
def test_missing_data_is_residual_whatever_the_target_says(
    plain: Ends, said: int, status: int
) -> None:
    buffer = bytearray(100)
    plain.command(0, READ, memoryview(buffer))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.put_data(plain.answers[0], memoryview(b"abc"), 40)
    flags = bhs.FLAG_FINAL | (bhs.RESIDUAL_UNDERFLOW if said else 0)
    plain.respond(0, status, flags=flags, residual=said)
    plain.until(lambda: bool(plain.up.pdus))
    response = pdu.ScsiResponse.unpack_from(plain.up.pdus[0][0])
    assert response.flags == bhs.FLAG_FINAL | bhs.RESIDUAL_UNDERFLOW
    assert response.residual == 97
    assert bytes(buffer) == bytes(40) + b"abc" + bytes(57)


# -- a peer that lies ------------------------------------------------------------------------------


class Liar:
    """Raw bytes to one end of ours, which has tasks of 20,000 bytes: 0 reads, 1 writes, 2 does
    both."""

    def __init__(self, plain: Ends) -> None:
        left, right = socket.socketpair()
        self.socket = right
        self.dm = TcpInitiator(SocketStream(left), INLINE_SIZE, 8192)
        plain.initiator.connection_terminate()
        plain.initiator = self.dm
        self.dm.user = plain.up
        self.dm.allocate_connection_resources(plain.slots, 8)
        self.dm.notice_key_values(PLAIN)
        self.dm.enable_datamover()
        self.read = bytearray(20000)
        plain.command(0, READ, memoryview(self.read))
        plain.command(1, WRITE, memoryview(bytes(20000)))
        self.both = bytearray(20000)
        plain.command_both(2, memoryview(bytes(20000)), memoryview(self.both))
        self.dm.flush()

    def say(self, unit: pdu.Pdu, data: bytes = b"") -> None:
        self.socket.sendall(unit.pack() + data)
        self.dm.progress(0.0)


@pytest.fixture
def liar(plain: Ends) -> Iterator[Liar]:
    lying = Liar(plain)
    yield lying
    lying.socket.close()


def data_in(**changes: int) -> tuple[pdu.DataIn, bytes]:
    fields = {"itt": 0, "data_length": 8, "data_sn": 0, "buffer_offset": 0, "flags": 0, **changes}
    unit = pdu.DataIn(lun=bytes(8), stat_sn=0, exp_cmd_sn=1, max_cmd_sn=9, **fields)
    return unit, bytes(unit.data_length)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 1},
        {"itt": 9},
        {"data_sn": 1},
        {"buffer_offset": 19993},
        {"buffer_offset": 0xFFFFFFFF},
        {"data_length": 8193},
        {"flags": 0x01},
        {"itt": 2, "data_sn": 1},
        {"itt": 2, "buffer_offset": 19993},
        {"itt": 2, "flags": 0x81},
    ],
    ids=str,
)
def test_a_lying_data_in(liar: Liar, changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        liar.say(*data_in(**changes))


def test_data_in_over_data_that_came_already(liar: Liar) -> None:
    liar.say(*data_in(buffer_offset=8))
    with pytest.raises(RemoteProtocolError, match="came before"):
        liar.say(*data_in(buffer_offset=8, data_sn=1))


def r2t(**changes: int) -> pdu.ReadyToTransfer:
    fields = {"itt": 1, "ttt": 3, "r2t_sn": 0, "buffer_offset": 8192, "desired_length": 8192}
    fields |= changes
    return pdu.ReadyToTransfer(lun=bytes(8), stat_sn=0, exp_cmd_sn=1, max_cmd_sn=9, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 0},
        {"itt": 9},
        {"r2t_sn": 1},
        {"buffer_offset": 0},
        {"buffer_offset": 19999},
        {"buffer_offset": 0xFFFFFFFF},
        {"desired_length": 0},
        {"desired_length": 65537},
        {"ttt": bhs.NO_TAG},
    ],
    ids=str,
)
def test_a_lying_r2t(liar: Liar, changes: dict[str, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        liar.say(r2t(**changes))


def test_r2ts_and_data_in_of_a_bidirectional_task_share_their_numbers(liar: Liar) -> None:
    liar.say(*data_in(itt=2))
    liar.say(r2t(itt=2, r2t_sn=1))
    liar.say(*data_in(itt=2, data_sn=2, buffer_offset=8))
    with pytest.raises(RemoteProtocolError, match="R2TSN 1, expected 3"):
        liar.say(r2t(itt=2, r2t_sn=1, buffer_offset=16384, desired_length=8))


def test_more_r2ts_than_were_agreed(liar: Liar) -> None:
    liar.socket.sendall(r2t().pack() + r2t(r2t_sn=1, buffer_offset=16384, desired_length=8).pack())
    with pytest.raises(RemoteProtocolError, match="MaxOutstandingR2T"):
        liar.dm.progress(0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"itt": 5},
        {"data_sn": 1},
        {"buffer_offset": 16000},
        {"data_length": 1001},
        {"flags": 0x80},
        {"data_length": 1000, "flags": 0},
        {"data_length": 0},
    ],
    ids=str,
)
def test_a_lying_data_out(plain: Ends, changes: dict[str, int]) -> None:
    plain.command(0, WRITE, memoryview(bytes(20000)))
    plain.until(lambda: bool(plain.down.pdus))
    plain.target.get_data(plain.answers[0], memoryview(bytearray(1000)), 8192)
    fields = {"itt": 0, "data_length": 8, "ttt": 1, "data_sn": 0, "flags": 0}
    fields |= {"buffer_offset": 8192, **changes}
    unit = pdu.DataOut(lun=bytes(8), exp_stat_sn=0, **fields)
    slot = plain.slots[1]
    slot.direction = INLINE
    slot.bhs[:] = unit.pack()
    slot.inline_length = unit.data_length
    plain.initiator.send_control(slot)
    plain.initiator.flush()
    with pytest.raises(RemoteProtocolError):
        drive(plain.target)


_WORDS = st.lists(
    st.sampled_from([0, 1, 2, 512, 8192, 16384, 19999, bhs.NO_TAG]) | st.integers(0, 0xFFFFFFFF),
    min_size=11,
    max_size=11,
)
_UNITS = st.lists(
    st.tuples(
        st.sampled_from([bhs.DATA_IN, bhs.R2T, bhs.SCSI_RESPONSE]) | st.integers(0, 255),
        st.integers(0, 255),
        _WORDS,
        st.binary(max_size=600),
        st.sampled_from([0, 1, 2, None]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(_UNITS, st.booleans())
def test_whatever_a_target_sends(
    units: list[tuple[int, int, list[int], bytes, int | None]], honest: bool
) -> None:
    """With a read, a write and a bidirectional command under way: the documented errors, and no
    byte outside of their buffers."""
    plain = Ends()
    lying = Liar(plain)
    try:
        for opcode, flags, words, data, itt in units:
            head = bytearray((opcode, flags, 0, 0))
            head += b"".join(word.to_bytes(4, "big") for word in words)
            if honest:
                head[4:8] = len(data).to_bytes(4, "big")
            if itt is not None:
                head[16:20] = itt.to_bytes(4, "big")
            lying.socket.sendall(bytes(head) + data + bytes(-len(data) & 3))
            lying.dm.progress(0.0)
    except RemoteProtocolError:
        pass
    finally:
        assert len(lying.read) == len(lying.both) == 20000
        lying.socket.close()
        plain.close()
