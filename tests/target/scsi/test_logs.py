"""LOG SENSE, and the soft threshold of thin provisioning."""

from __future__ import annotations

import pytest

from iserblk.scsi import cdb, inquiry, log, mode, sense
from iserblk.target.scsi import device
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, INVALID_FIELD, IQN, Client

SIZE = 16 << 20
MIB = 1 << 20
READY = cdb.test_unit_ready()
REACHED = (sense.UNIT_ATTENTION, sense.SOFT_THRESHOLD_REACHED)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(SIZE)


def make_server(store: FakeStore, threshold: int = 0, block: int = 512) -> DeviceServer:
    unit = LogicalUnit(store, serial="S", soft_threshold=threshold, block=block)
    return DeviceServer({0: unit}, IQN)


def test_what_a_lun_occupies(store: FakeStore) -> None:
    """In threshold sets of 1 MiB: what is occupied is rounded up, what is free is rounded down."""
    client = Client(make_server(store))
    store.occupied = (3 * MIB + 1, 8 * MIB - 1)
    both = bytes.fromhex("0001 03 08 00000007 02 000000 0002 03 08 00000004 01 000000")
    assert client.data(log.log_sense(0x0C)) == bytes.fromhex("0c 00 0018") + both
    assert client.data(log.log_sense(0x0C, pointer=1)) == bytes.fromhex("0c 00 0018") + both
    assert client.data(log.log_sense(0x0C, pointer=2)) == bytes.fromhex("0c 00 000c") + both[12:]
    assert client.data(log.log_sense(0x0C, allocation=7)) == bytes.fromhex("0c 00 0018 0001 03")
    assert client.data(log.log_sense(0x0C, allocation=0)) == b""
    store.occupied = None
    assert client.data(log.log_sense(0x0C)) == bytes.fromhex("0c 00 0000"), "a block device"


def test_which_pages_there_are(store: FakeStore) -> None:
    client = Client(make_server(store))
    assert client.data(log.log_sense(0)) == bytes.fromhex("00 00 0002 00 0c")
    assert client.data(log.log_sense(0, 0xFF)) == bytes.fromhex("40 ff 0006 0000 00ff 0c00")
    for command, field in (
        (log.log_sense(0x02), 2),
        (log.log_sense(0x0C, 1), 3),
        (log.log_sense(0x0C, pointer=3), 5),
        (log.log_sense(0x00, pointer=1), 5),
        (bytes((0x4D, 0, 0x0C, 0, 0, 0, 0, 0, 64, 0)), 2),  # PC 00b: thresholds
        (bytes((0x4D, 1, 0x4C, 0, 0, 0, 0, 0, 64, 0)), 1),  # SP
    ):
        answer = client.run(command)
        assert answer.code == INVALID_FIELD and answer.sense.field == field


@pytest.mark.logs("LUN 0 has reached its soft threshold")
def test_every_host_is_told_when_the_threshold_is_reached(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "LOOK_S", 0.0)
    server = make_server(store, 4 * MIB - 1)
    one, other = Client(server), Client(server)
    store.occupied = (4 * MIB - 1, MIB)
    assert one.code(READY) == GOOD
    for _ in range(2):
        store.occupied = (4 * MIB, MIB)
        assert one.code(READY) == REACHED
        assert one.code(READY) == GOOD, "once"
        assert other.code(READY) == REACHED
        store.occupied = (4 * MIB - 1, MIB)  # below it again: the next time counts
        assert one.code(READY) == other.code(READY) == GOOD


@pytest.mark.parametrize(("block", "exponent"), [(512, 11), (4096, 8)])
def test_what_hosts_read_of_the_threshold(store: FakeStore, block: int, exponent: int) -> None:
    """SBC-3: THRESHOLD EXPONENT (VPD page B2h), LBPERE (mode page 01h, byte 7 bit 7), and a
    descriptor of the logical block provisioning mode page: enabled, type 0, armed increasing, of
    the used resource (02h), THRESHOLD COUNT."""
    client = Client(make_server(store, 5 * MIB, block))
    page = client.data(cdb.inquiry(255, inquiry.LOGICAL_BLOCK_PROVISIONING))
    assert page == bytes((0, 0xB2, 0, 4, exponent, 0xE4, 2, 0))
    assert block << exponent == MIB
    pages = client.data(bytes((0x1A, 0x08, mode.ALL, 0xFF, 255, 0)))
    assert pages[4:12] == bytes.fromhex("01 0a 00 00 00 00 00 80")
    assert pages[-8:] == bytes.fromhex("81 02 0000 00000005")


def test_nothing_is_told_without_a_threshold(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "LOOK_S", 0.0)
    client = Client(make_server(store))
    store.occupied = (SIZE, 0)
    assert client.code(READY) == GOOD
