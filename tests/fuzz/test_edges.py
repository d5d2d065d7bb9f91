"""Numbers that a peer chooses, at the edges of what a field, a C integer or an integer of the
compiled form (62 bits and a sign) holds.

Everywhere in the samples of the census; and by name where a number becomes a place in memory or on
a LUN: Tagged Offsets, Buffer Offsets, offsets of NBD, LBAs, Base Offsets, StatSNs. Both forms must
refuse what they refuse for the same reason, and touch no byte elsewhere.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Iterator

import pytest

from iserblk.datamover.arrivals import MOST_PDUS, Arrivals
from iserblk.datamover.iser import CONTROL, RSV, WSV, ControlHeader
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, keys
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import Memory
from iserblk.nbd.messages import Negotiated
from iserblk.nbd.transmission import Transmission
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, rdmap
from iserblk.scsi import opcodes, sense
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import MAX_TRANSFER
from tests.contract.datamovers import Ends
from tests.contract.test_datamover_tcp import Liar, data_in, r2t
from tests.fuzz import engine
from tests.fuzz.rows_nbd import EVERY_FLAG, Owner
from tests.fuzz.test_decoders import ROWS
from tests.nbd import conversation as said
from tests.rcap.iwarp import test_receive as frames
from tests.rcap.iwarp.test_receive import Receiver
from tests.target.fake_store import FakeStore
from tests.target.iser_client import IserClient, rw10
from tests.target.scsi_client import IQN, Client

TOP32, TOP64 = (1 << 32) - 1, (1 << 64) - 1
EDGES = {
    1: (0, 1, 0x7F, 0x80, 0xFF),
    2: (0, 1, 0x7FFF, 0x8000, 0xFFFF),
    3: (0, 1, 0x7FFFFF, 0x800000, 0xFFFFFF),
    4: (0, 1, (1 << 24) - 1, (1 << 31) - 1, 1 << 31, TOP32 - 1, TOP32),
    8: (0, 1, TOP32, 1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, TOP64 - 1, TOP64),
}
NUMBERS = sorted({number for edges in EDGES.values() for number in edges})
MOST = 96  # bytes of a sample: there are no binary numbers behind its headers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.samples])
def test_every_place_in_every_sample(name: str) -> None:
    """Rows that keep state take a hundred times longer: there only words, at their places."""
    row = ROWS[name]
    stateful = row.each > 1
    for sample in row.samples:
        case = engine.EdgeCase((sample,))
        for width, values in EDGES.items():
            if stateful and width < 4:
                continue
            step = 4 if stateful else 1
            for at in range(0, min(MOST, len(sample) - width + 1), step):
                for value in values[-2:] if stateful else values:
                    case.at, case.width, case.value = at, width, value
                    case.chance.seed(value)
                    try:
                        row.run(case)
                    except row.allowed:
                        pass
                    except Exception as error:
                        raise AssertionError(
                            f"{name}: {value:#x} in {width} bytes at {at} of {sample.hex()}: "
                            f"{type(error).__name__}: {error}"
                        ) from error


# -- text ------------------------------------------------------------------------------------------

NUMERICAL = sorted(
    name
    for name, key in keys.TABLE.items()
    if key.value not in (keys.BOOLEAN, keys.TEXT) and key.kind != keys.OBSOLETE
)


@pytest.mark.parametrize("name", NUMERICAL)
def test_numbers_in_text(name: str) -> None:
    """A key's number is within its range afterwards, or it is refused. Python's limit for digits
    (4300) is not reached: a number has 20 at most."""
    key = keys.TABLE[name]
    for number in (*NUMBERS, 1 << 64, 10**19, 10**20, 10**5000):
        for text in (f"{number}" if number < 10**4000 else "1" * 5000, f"{number:#x}"):
            parameters = keys.SessionParameters()
            for by_target in (False, True):
                try:
                    keys.answer(parameters, name, text, discovery=False, by_target=by_target)
                except RemoteProtocolError:
                    continue
                value = getattr(parameters, key.field)
                if isinstance(value, int):
                    assert value == getattr(keys.SessionParameters(), key.field) or (
                        key.low <= value <= key.high
                    )


# -- RDMA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("size", [1, 4000, 40_000])  # the last is received straight into its place
@pytest.mark.parametrize("to", EDGES[8])
def test_tagged_offsets(crc: bool, size: int, to: int) -> None:
    receiver = Receiver(crc=crc)
    before = bytes(receiver.memory)
    frame = frames.tagged(frames.WRITE, receiver.stag, to, b"\xff" * size)
    if to + size <= len(before):
        receiver.feed(frame, 4096)
        assert receiver.memory[to : to + size] == b"\xff" * size
        return
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.feed(frame, 4096)
    wraps = to + size - 1 > TOP64
    assert caught.value.terminate == (ddp.TO_WRAP if wraps else ddp.BASE_OR_BOUNDS)
    assert receiver.memory == before


@pytest.mark.parametrize("size", EDGES[4])
@pytest.mark.parametrize("to", EDGES[8])
def test_sources_of_reads(size: int, to: int) -> None:
    receiver = Receiver()
    request = frames.read_request(1, (1, 0), size, (receiver.stag_read, to))
    if not size or to + size <= len(receiver.read_only):
        receiver.feed(request)
        assert bytes(receiver.core.responses[0].view) == receiver.read_only[to : to + size]
        return
    with pytest.raises(RemoteProtocolError) as caught:
        receiver.feed(request)
    wraps = to + size - 1 > TOP64
    assert caught.value.terminate == (rdmap.TO_WRAP if wraps else rdmap.BASE_OR_BOUNDS)
    assert not receiver.core.responses


@pytest.mark.parametrize("to", EDGES[8])
def test_sinks_of_reads(to: int) -> None:
    receiver = Receiver()
    request = frames.read_request(1, (1, to), 2, (receiver.stag_read, 0))
    if to + 1 <= TOP64:
        receiver.feed(request)
        assert receiver.core.responses[0].sink_to == to
    else:
        with pytest.raises(RemoteProtocolError, match="wraps"):
            receiver.feed(request)


@pytest.mark.parametrize("field", ["msn", "mo", "qn"])
@pytest.mark.parametrize("number", EDGES[4])
def test_queue_numbers(field: str, number: int) -> None:
    receiver = Receiver()
    fields = {"msn": 1, "mo": 0, "qn": 0} | {field: number}
    frame = frames.untagged(frames.SEND, payload=b"x", **fields)
    if fields == {"msn": 1, "mo": 0, "qn": 0}:
        receiver.feed(frame)
        assert len(receiver.events) == 1
    else:
        with pytest.raises(RemoteProtocolError):
            receiver.feed(frame)
        assert not receiver.events


@pytest.mark.parametrize("base", EDGES[8])
@pytest.mark.parametrize("opcode", [0x28, 0x2A])
def test_base_offsets(opcode: int, base: int) -> None:
    """Of an initiator: the target's RDMA begins there, and wraps only behind the last byte that it
    moves. What is at that place is the initiator's business: here it has nothing there."""
    client = IserClient()
    try:
        client.logged_in([])
        memory = memoryview(bytearray(512))
        stag, own = client.ours.advertise(
            memory, seam.REMOTE_WRITE if opcode == 0x28 else seam.REMOTE_READ
        )
        reads = opcode == 0x28
        header = ControlHeader(
            CONTROL | (RSV if reads else WSV),
            0 if reads else stag,
            0 if reads else base,
            stag if reads else 0,
            base if reads else 0,
        )
        head = bytearray(28)
        header.pack_into(memoryview(head))
        unit = client.scsi(rw10(opcode, 512), 0xC0 if reads else 0xA0, 512)
        client.send(bytes(head) + unit)
        try:
            client.run()
        except RemoteProtocolError:
            assert base != own
        moved = [each for each in client.sent if each.kind in (seam.RDMA_WRITE, seam.RDMA_READ)]
        assert [each.to for each in moved] == [base]
    finally:
        client.ours.close()
        client.target_pair.close()


@pytest.mark.parametrize("edtl", EDGES[4])
def test_expected_data_transfer_lengths(edtl: int) -> None:
    """What is moved and what is missing make up the length, whatever the initiator says of it."""
    client = IserClient().logged_in([])
    try:
        memory = memoryview(bytearray(512))
        stag, base = client.ours.advertise(memory, seam.REMOTE_WRITE)
        client.store.content[:512] = b"\xee" * 512
        header = ControlHeader(CONTROL | RSV, 0, 0, stag, base)
        answer = client.command(rw10(0x28, 512), 0xC0, edtl, header)
        assert answer.opcode == bhs.SCSI_RESPONSE and not answer.bhs[3]
        moved = min(edtl, 512)
        assert memory == b"\xee" * moved + bytes(512 - moved)
        flags = bhs.RESIDUAL_OVERFLOW if edtl < 512 else bhs.RESIDUAL_UNDERFLOW
        assert answer.bhs[1] & bhs.RESIDUAL_FLAGS == flags
        assert answer.number(44) == abs(edtl - 512)
    finally:
        client.ours.close()
        client.target_pair.close()


# -- Traditional iSCSI -----------------------------------------------------------------------------


@pytest.fixture
def liar() -> Iterator[Liar]:
    plain = Ends()
    lying = Liar(plain)
    yield lying
    lying.socket.close()
    plain.close()


@pytest.mark.parametrize(
    ("field", "number"),
    [
        *itertools.product(("data_sn", "buffer_offset", "itt", "ttt", "stat_sn"), EDGES[4]),
        *(("residual", number) for number in EDGES[4]),
    ],
)
def test_numbers_in_data_in(liar: Liar, field: str, number: int) -> None:
    unit, data = data_in()
    setattr(unit, field, number)
    harmless = field in ("ttt", "stat_sn", "residual") or number == 0
    placed = field == "buffer_offset" and number + 8 <= len(liar.read)
    other = field == "itt" and number in (0, 2)
    if harmless or placed or other:
        liar.say(unit, b"\xff" * len(data))
        at = number if placed else 0
        buffer = liar.both if field == "itt" and number == 2 else liar.read
        assert buffer == bytes(at) + b"\xff" * 8 + bytes(len(buffer) - at - 8)
    else:
        with pytest.raises(RemoteProtocolError):
            liar.say(unit, b"\xff" * len(data))
        assert liar.read == liar.both == bytes(20000)


@pytest.mark.parametrize(
    ("field", "number"),
    [*itertools.product(("r2t_sn", "buffer_offset", "desired_length", "itt"), EDGES[4])],
)
def test_numbers_in_r2t(liar: Liar, field: str, number: int) -> None:
    """What is asked for is within the task's data, behind what was sent with the command."""
    unit = r2t()
    setattr(unit, field, number)
    try:
        liar.say(unit)
    except RemoteProtocolError:
        return
    assert unit.itt in (1, 2) and not unit.r2t_sn
    assert unit.buffer_offset >= 8192 or unit.itt == 2
    assert unit.desired_length > 0 and unit.buffer_offset + unit.desired_length <= 20000


@pytest.mark.parametrize("expected", EDGES[4])
@pytest.mark.parametrize("ahead", [0, 1, MOST_PDUS, MOST_PDUS + 1, *EDGES[4][2:]])
def test_statuses_that_are_ahead(expected: int, ahead: int) -> None:
    """No number makes an initiator look for statuses by the million."""
    arrivals = Arrivals(expected)
    stat_sn = (expected + ahead) & TOP32
    if MOST_PDUS < ahead < 1 << 31:
        with pytest.raises(RemoteProtocolError):
            arrivals.ahead(stat_sn)
        return
    distance = arrivals.ahead(stat_sn)
    assert distance == (ahead if ahead < 1 << 31 else ahead - (1 << 32))
    missing = arrivals.exists(stat_sn)
    assert missing == ([(expected, ahead)] if 0 < ahead <= MOST_PDUS else [])


# -- NBD -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", said.MODES)
@pytest.mark.parametrize("command", range(8))
def test_requests_of_nbd(mode: str, command: int) -> None:
    """They come through with just these numbers, or are refused, or end the connection; and what a
    client says takes no more memory than the protocol allows."""
    extended = mode == said.EXTENDED
    structured = mode != said.SIMPLE
    agreed = Negotiated("lun0", structured, extended, structured, EVERY_FLAG)
    for offset, length in itertools.product(EDGES[8], EDGES[8] if extended else EDGES[4]):
        memory = Memory()
        transmission = Transmission(agreed, Owner(), memory)
        data = said.request(command, 7, offset, length, extended=extended)
        transmission.get_buffers()[0][: len(data)] = data
        try:
            found = transmission.received(len(data))
        except RemoteProtocolError:
            assert command == nbd.WRITE and length > nbd.MOST_PAYLOAD
            continue
        assert memory.used <= nbd.MOST_PAYLOAD
        if command == nbd.READ and length > nbd.MOST_PAYLOAD:
            assert not found and transmission.out_size  # refused
        for each in found:
            assert (each.command, each.offset, each.length) == (command, offset, length)
            if command == nbd.BLOCK_STATUS:
                transmission.reply_status(each, [(offset, length or 1, 0)])
            else:
                transmission.reply(each)
        transmission.sent(transmission.out_size)
        assert not transmission.open
        transmission.discard()
        transmission.close()


# -- SCSI ------------------------------------------------------------------------------------------


class VastStore(FakeStore):
    """One byte less than 2**63 bytes, which no command of the tests reads or writes."""

    def __init__(self) -> None:
        super().__init__(0)
        self.size = (1 << 63) - 1


_WITH_RANGE = {
    opcodes.READ_10: ">BBIBHBxxxxxx",
    opcodes.WRITE_10: ">BBIBHBxxxxxx",
    opcodes.VERIFY_10: ">BBIBHBxxxxxx",
    opcodes.WRITE_SAME_10: ">BBIBHBxxxxxx",
    opcodes.READ_12: ">BBI{}BBxxxx",
    opcodes.WRITE_12: ">BBI{}BBxxxx",
    opcodes.READ_16: ">BBQ{}BB",
    opcodes.WRITE_16: ">BBQ{}BB",
    opcodes.VERIFY_16: ">BBQ{}BB",
    opcodes.WRITE_SAME_16: ">BBQ{}BB",
    opcodes.SYNCHRONIZE_CACHE_16: ">BBQ{}BB",
    opcodes.PRE_FETCH_16: ">BBQ{}BB",
}


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize("opcode", _WITH_RANGE)
def test_addresses(opcode: int, block: int) -> None:
    """The place and the length in bytes are those of the CDB, or it is refused; on a LUN whose last
    byte is at 2**63 - block - 1."""
    unit = LogicalUnit(VastStore(), serial="V", block=block)
    client = Client(DeviceServer({0: unit}, IQN))
    ten = "H" in _WITH_RANGE[opcode]
    layout = struct.Struct(_WITH_RANGE[opcode].format("I"))
    last = unit.blocks - 1
    bits = 64 if "Q" in _WITH_RANGE[opcode] else 32
    addresses = {each for each in (*NUMBERS, last - 1, last, last + 1) if not each >> bits}
    for address, blocks in itertools.product(sorted(addresses), EDGES[2] if ten else EDGES[4]):
        fields = (opcode, 0, address, *((0, blocks) if ten else (blocks, 0)), 0)
        task = client.server.begin(client.nexus, 0, layout.pack(*fields))
        assert isinstance(task, DeviceTask)
        if address + (blocks or 1) > unit.blocks:
            assert sense.decode(task.sense).code == sense.LBA_OUT_OF_RANGE
        elif task.status:
            assert blocks * block > MAX_TRANSFER or not blocks  # WRITE SAME: to the end
            assert sense.decode(task.sense).code == sense.INVALID_FIELD_IN_CDB
        elif (task.may_block or task.length) and opcode != opcodes.SYNCHRONIZE_CACHE_16:
            assert task.offset == address * block
            if task.length and opcode not in (opcodes.WRITE_SAME_10, opcodes.WRITE_SAME_16):
                assert task.length == blocks * block <= MAX_TRANSFER
