"""Any CDB, any LUN, any data: an answer, never an exception, never more than was allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import cdb, opcodes, sense
from iserblk.scsi import status as sam
from iserblk.target.scsi.commands import COMMANDS
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import DATA_IN, DATA_OUT, NO_DATA, Nexus
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import IQN

BLOCKS = 32
MOST_DATA = 1 << 16  # bytes that a test hands over; more than that is only begun

RANDOM_CDB = st.binary(max_size=260)


@st.composite
def likely_cdb(draw: st.DrawFn) -> bytes:
    """A known command with only meaningful bits set, small numbers more often than not."""
    usage = draw(st.sampled_from(sorted(COMMANDS.values()))).usage
    noise = draw(st.binary(min_size=len(usage), max_size=len(usage)))
    small = draw(st.integers(0, 2 ** len(usage) - 1))
    raw = bytearray(byte & mask for byte, mask in zip(noise, usage, strict=True))
    for at in range(2, len(raw)):
        if small >> at & 1:
            raw[at] = 0
    raw[0] = usage[0]
    if usage[0] in opcodes.WITH_ACTIONS:
        raw[1] = usage[1]
    return bytes(raw) + draw(st.binary(max_size=4))


def allocation_length(command: bytes) -> int | None:
    """What bounds the Data-In of a command, where its CDB says so."""
    fields = {
        0x03: (4, 5),
        0x12: (3, 5),
        0x1A: (4, 5),
        0x5A: (7, 9),
        0x5E: (7, 9),
        0x9E: (10, 14),
        0xA0: (6, 10),
        0xA3: (6, 10),
    }
    span = fields.get(command[0])
    return None if span is None else int.from_bytes(command[slice(*span)], "big")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 0, 0, 1, 7, -1]),
            RANDOM_CDB | likely_cdb(),
            st.binary(max_size=64),
            st.booleans(),
            st.booleans(),
        ),
        max_size=20,
    ),
    st.booleans(),
)
def test_whatever_comes(commands: list[tuple[int, bytes, bytes, bool, bool]], ready: bool) -> None:
    units = {
        0: LogicalUnit(FakeStore(BLOCKS * 512), serial="A"),
        1: LogicalUnit(FakeStore(BLOCKS * 4096), serial="B", block=4096, read_only=True),
    }
    server = DeviceServer(units, IQN)
    nexus = Nexus("iqn.2026-11.example:host", b"\x80abcde")
    other = Nexus("iqn.2026-11.example:other", b"\x80abcde")
    if not ready:
        server.attach(nexus)
    for lun, command, data, nowait, by_other in commands:
        task = server.begin(other if by_other else nexus, lun, command)
        assert task.length <= 16 << 20
        assert (task.length > 0) == (task.direction != NO_DATA)
        if task.status:
            assert task.direction == NO_DATA
            if task.status == sam.RESERVATION_CONFLICT:
                assert not task.sense
                continue
            assert task.status == sam.CHECK_CONDITION
            assert sense.decode(task.sense).key in (sense.ILLEGAL_REQUEST, 6, 7)
            continue
        if task.direction == DATA_IN:
            allowed = allocation_length(command)
            assert allowed is None or task.length <= allowed
        if task.length > MOST_DATA:
            continue
        buffer = memoryview(bytearray(task.length))
        if task.direction & DATA_OUT:
            buffer[: len(data)] = data[: task.length]
        if not server.run(task, buffer if task.length else None, nowait):
            assert nowait
            assert server.run(task, buffer)
        assert task.status in (sam.GOOD, sam.CHECK_CONDITION, sam.RESERVATION_CONFLICT)
        assert bool(task.sense) == (task.status == sam.CHECK_CONDITION)
        assert task.transferred <= (task.length if task.direction & DATA_IN else 0)


@given(st.binary(max_size=600))
def test_any_unmap_list(parameters: bytes) -> None:
    store = FakeStore(BLOCKS * 512)
    server = DeviceServer({0: LogicalUnit(store, serial="A")}, IQN)
    task = server.begin(Nexus("a", bytes(6)), 0, cdb.unmap(len(parameters)))
    if not task.status:
        assert server.run(task, memoryview(bytearray(parameters)))
    assert sense.decode(task.sense).key in (0, sense.ILLEGAL_REQUEST)
