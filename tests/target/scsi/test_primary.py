"""What the target says about itself and its LUNs: INQUIRY, capacity, mode pages."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import capacity, cdb, inquiry, luns, mode, sense
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.statefile import MODES_SUFFIX, StateFile
from iserblk.target.store.store import FileStore
from tests.scsi.modes import as_sense6
from tests.target.fake_store import FakeStore
from tests.target.scsi.units import SIZE, TEST_UNIT_READY
from tests.target.scsi_client import (
    GOOD,
    INVALID_FIELD,
    IQN,
    LUN_RESET,
    Client,
    make_unit,
)


def test_report_luns(client: Client) -> None:
    assert luns.decode_report_luns(client.data(cdb.report_luns(1024))) == [0, 5]
    client.lun = 5
    assert luns.decode_report_luns(client.data(cdb.report_luns(16))) == [0]
    well_known, bad = bytearray(cdb.report_luns(64)), bytearray(cdb.report_luns(64))
    well_known[2], bad[2] = 1, 3
    assert luns.decode_report_luns(client.data(bytes(well_known))) == []
    assert client.code(bytes(bad)) == INVALID_FIELD


def test_standard_inquiry(client: Client) -> None:
    answer = client.data(cdb.inquiry(255))
    assert len(answer) == 96
    assert inquiry.decode_standard(answer) == (0, inquiry.DISK, 6, "ISERBLK", "FILE", "0001", 0)
    for allocation in (0, 1, 5, 36, 95):
        assert client.data(cdb.inquiry(allocation)) == answer[:allocation]


def test_vital_product_data(client: Client) -> None:
    pages = inquiry.decode_supported_pages(client.data(cdb.inquiry(255, 0)))
    assert pages == (0x00, 0x80, 0x83, 0x86, 0x87, 0x8F, 0xB0, 0xB1, 0xB2)
    for page in pages:
        answer = client.data(cdb.inquiry(255, page))
        assert answer[1] == page and len(answer) == 4 + int.from_bytes(answer[2:4], "big")
        assert client.data(cdb.inquiry(7, page)) == answer[:7]
    assert inquiry.decode_serial(client.data(cdb.inquiry(255, 0x80))) == "SN-1"
    names = inquiry.decode_identifiers(client.data(cdb.inquiry(255, 0x83)))
    assert [name.partition(".")[0] for name in names] == ["naa", "t10", "uuid"]
    assert names[1] == "t10.ISERBLK SN-1"
    designators = inquiry.decode_designators(client.data(cdb.inquiry(255, 0x83)))
    assert inquiry.name_string(IQN) in [each.data for each in designators]
    assert not inquiry.decode_characteristics(client.data(cdb.inquiry(255, 0xB1))).rotational
    assert all(inquiry.decode_provisioning(client.data(cdb.inquiry(255, 0xB2))))
    for absent in (0x88, 0xB9, 0xFF):
        assert client.code(cdb.inquiry(255, absent)) == INVALID_FIELD
    assert client.run(b"\x12\x00\x80\x00\xff\x00").sense.field == 2, "a page without EVPD"


def test_identity_follows_from_the_serial_alone(fd: int) -> None:
    def names(serial: str) -> tuple[str, ...]:
        unit = LogicalUnit(FileStore(fd, SIZE), serial=serial)
        return inquiry.decode_identifiers(unit.vpd_pages(IQN)[0x83])

    assert names("A") == names("A")
    assert not set(names("A")) & set(names("B"))


@pytest.mark.parametrize("serial", ["", "x" * 65, "ä", "a\nb"])
def test_serials_that_cannot_be(fd: int, serial: str) -> None:
    with pytest.raises(BadArgument, match="serial"):
        LogicalUnit(FileStore(fd, SIZE), serial=serial)


@pytest.mark.parametrize(("lun", "block"), [(0, 512), (5, 4096)])
def test_capacity_and_limits(client: Client, lun: int, block: int) -> None:
    client.lun = lun
    client.code(TEST_UNIT_READY)
    found = capacity.decode16(client.data(cdb.read_capacity16()))
    assert found == (SIZE // block, block, 4096, True, True)
    assert capacity.decode10(client.data(cdb.read_capacity10()))[:2] == (SIZE // block, block)
    assert len(client.data(cdb.read_capacity16(12))) == 12
    limits = inquiry.decode_block_limits(client.data(cdb.inquiry(255, 0xB0)))
    assert limits.unmap_granularity == 4096 // block
    assert limits.max_transfer_length * block == 16 << 20


def test_a_capacity_beyond_ten_byte_cdbs(tmp_path: os.PathLike[str]) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    size = (1 << 32) * 512
    os.ftruncate(fd, size)
    client = Client(DeviceServer({0: make_unit(fd, size)}, IQN))
    assert client.data(cdb.read_capacity10()) == b"\xff" * 4 + b"\0\0\x02\0"
    assert capacity.decode16(client.data(cdb.read_capacity16())).blocks == 1 << 32
    os.close(fd)


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("write_cache", [False, True])
def test_modes(fd: int, read_only: bool, write_cache: bool) -> None:
    unit = make_unit(fd, SIZE, read_only=read_only, write_cache=write_cache)
    client = Client(DeviceServer({0: unit}, IQN))
    expected = mode.Modes(read_only, write_cache, True)
    for page in (mode.CACHING, mode.ALL):
        for descriptors in (False, True):
            six = client.data(cdb.mode_sense6(page, 255, descriptors))
            ten = client.data(cdb.mode_sense10(page, 255, descriptors))
            assert mode.decode_sense6(six) == mode.decode_sense6(as_sense6(ten)) == expected
            assert six[3] == (8 if descriptors else 0)
            assert client.data(cdb.mode_sense6(page, 3, descriptors)) == six[:3]
    long = bytearray(cdb.mode_sense10(mode.CACHING, 255, True))
    long[1] = 0x10  # LLBAA
    assert client.data(bytes(long))[4:8] == b"\x01\0\0\x10"


def test_mode_pages_and_controls(client: Client) -> None:
    def ask(page: int, control: int = 0, subpage: int = 0) -> bytes:
        return bytes((0x1A, 0x08, control << 6 | page, subpage, 255, 0))

    current = client.data(ask(mode.CACHING))
    assert client.data(ask(mode.CACHING, mode.PC_DEFAULT)) == current
    changeable = client.data(ask(mode.CACHING, mode.PC_CHANGEABLE))
    assert changeable[4:] == b"\x08\x12\x04" + bytes(17), "WCE, and nothing else"
    saved = client.run(ask(mode.CACHING, mode.PC_SAVED))
    assert saved.code == (sense.ILLEGAL_REQUEST, sense.SAVING_NOT_SUPPORTED)
    assert len(client.data(ask(mode.CONTROL))) == 4 + 12
    assert client.code(ask(0x02)) == INVALID_FIELD
    assert client.run(ask(mode.CACHING, subpage=1)).sense.field == 3


def test_extended_inquiry_data_and_mode_page_policy(client: Client) -> None:
    """SPC-4, Extended INQUIRY Data VPD page: SIMPLE, ORDERED and HEAD OF QUEUE (byte 5), a volatile
    cache (V_SUP, byte 6), 18 bytes of sense data (byte 13). Mode Page Policy: all shared."""
    assert client.data(cdb.inquiry(255, 0x86)) == (
        bytes.fromhex("00 86 003c 00 07 01 000000000000 12") + bytes(50)
    )
    assert client.data(cdb.inquiry(255, 0x87)) == bytes.fromhex("00 87 0004 3f ff 00 00")


def test_pages_of_errors_and_exceptions(client: Client) -> None:
    """SBC-3, Read-Write Error Recovery (01h); SPC-4, Informational Exceptions Control (1Ch), with
    DEXCPT."""
    assert client.data(cdb.mode_sense6(0x01, 255))[4:] == b"\x01\x0a" + bytes(10)
    assert client.data(cdb.mode_sense6(0x1C, 255))[4:] == b"\x1c\x0a\x08" + bytes(9)
    pages = client.data(cdb.mode_sense10(0x3F, 255))[8:]
    assert [pages[at] for at in (0, 12, 32, 44)] == [0x01, 0x08, 0x0A, 0x1C] and len(pages) == 56


def test_subpages(client: Client) -> None:
    """The logical block provisioning page (1Ch/02h) comes only where subpages are asked for."""

    def ask(page: int, subpage: int) -> bytes:
        return client.data(bytes((0x1A, 0x08, page, subpage, 255, 0)))[4:]

    page = ask(0x1C, 0x02)
    assert page == bytes.fromhex("5c 02 0014") + bytes(12) + bytes.fromhex("01 02 0000 00000000")
    assert ask(0x1C, 0xFF) == ask(0x1C, 0) + page
    assert ask(0x3F, 0xFF) == ask(0x3F, 0) + page
    assert ask(0x08, 0xFF) == ask(0x08, 0)
    assert client.run(bytes((0x1A, 0x08, 0x1C, 0x01, 255, 0))).sense.field == 3


# -- MODE SELECT -----------------------------------------------------------------------------------

# The parameter list of MODE SELECT(6), as SPC-4 has it: header (mode data length, medium type,
# device-specific parameter, block descriptor length), then the caching page without WCE.
WCE_OFF = bytes.fromhex("00 00 00 00  08 12 00") + bytes(17)
WCE_ON = bytes.fromhex("00 00 00 00  08 12 04") + bytes(17)
MODES_CHANGED = (sense.UNIT_ATTENTION, sense.MODE_PARAMETERS_CHANGED)
WRONG_PARAMETER = (sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST)


def select6(parameters: bytes) -> bytes:
    return bytes((0x15, 0x10, 0, 0, len(parameters), 0))


def select10(parameters: bytes) -> bytes:
    return bytes((0x55, 0x10, 0, 0, 0, 0, 0, 0, len(parameters), 0))


def caches(client: Client) -> bool:
    return mode.decode_sense6(client.data(cdb.mode_sense6(mode.CACHING, 255))).write_cache


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(SIZE)


@pytest.fixture
def pair(store: FakeStore) -> tuple[Client, Client]:
    server = DeviceServer({0: LogicalUnit(store, serial="S")}, IQN)
    return Client(server), Client(server, name="iqn.2026-11.example:other")


@pytest.mark.parametrize("long", [False, True])
def test_the_write_cache_is_turned_off_and_on(
    store: FakeStore, pair: tuple[Client, Client], long: bool
) -> None:
    one, other = pair

    def select(page: bytes) -> bytes:
        return bytes(4) + page if long else page

    cdb_of = select10 if long else select6
    assert caches(one) and one.code(b"\x2a" + bytes(7) + b"\x01\0", bytes(512)) == GOOD
    assert one.code(cdb_of(select(WCE_OFF)), select(WCE_OFF)) == GOOD
    assert store.calls == [("write", 0, 512, False), ("flush",)], "what was cached is flushed"
    assert not caches(one)
    assert other.code(TEST_UNIT_READY) == MODES_CHANGED
    assert other.code(TEST_UNIT_READY) == one.code(TEST_UNIT_READY) == GOOD
    assert other.code(b"\x2a" + bytes(7) + b"\x01\0", bytes(512)) == GOOD
    assert store.calls[2:] == [("write", 0, 512, True)], "each write is durable"
    default = bytes((0x1A, 0x08, mode.PC_DEFAULT << 6 | mode.CACHING, 0, 255, 0))
    assert mode.decode_sense6(one.data(default)).write_cache
    assert one.code(cdb_of(select(WCE_ON)), select(WCE_ON)) == GOOD
    assert caches(one) and other.code(TEST_UNIT_READY) == MODES_CHANGED
    assert one.code(cdb_of(select(WCE_ON)), select(WCE_ON)) == GOOD, "no change"
    assert other.code(TEST_UNIT_READY) == GOOD
    assert len(store.calls) == 3


@pytest.mark.logs("bad block", "data may be lost")
def test_a_cache_that_cannot_be_flushed_stays_on(
    store: FakeStore, pair: tuple[Client, Client]
) -> None:
    """Every host that has written into it is told of the loss by its next flush: also this one, as
    a file system there does not see how MODE SELECT has ended."""
    one, other = pair
    for client in pair:
        assert client.code(b"\x2a" + bytes(7) + b"\x01\0", bytes(512)) == GOOD
    store.failure = OSError(errno.EIO, "bad block")
    assert one.code(select6(WCE_OFF), WCE_OFF) == (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
    store.failure = None
    assert caches(one) and caches(other), "and no unit attention"
    for client in pair:
        lost = client.code(cdb.synchronize_cache10(0, 0))
        assert lost == (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
        assert client.code(cdb.synchronize_cache10(0, 0)) == GOOD


def test_a_write_that_began_before_the_cache_was_turned_off_is_durable(
    store: FakeStore, pair: tuple[Client, Client]
) -> None:
    one, other = pair
    late = one.server.begin(one.nexus, 0, b"\x2a" + bytes(7) + b"\x01\0")
    assert other.code(select6(WCE_OFF), WCE_OFF) == GOOD
    data = memoryview(bytes(512))
    assert not one.server.run(late, data, True), "it has to wait for the disk now"
    assert one.server.run(late, data) and not late.status
    assert store.calls[-1] == ("write", 0, 512, True)


def test_while_the_cache_is_flushed_it_is_said_to_be_on(pair: tuple[Client, Client]) -> None:
    """A host that believed it to be off would not flush what may still be lost."""
    one, other = pair
    task = one.server.begin(one.nexus, 0, select6(WCE_OFF))
    assert not one.server.run(task, memoryview(WCE_OFF), True)
    assert caches(other) and other.code(TEST_UNIT_READY) == GOOD
    assert one.server.run(task, memoryview(WCE_OFF))
    assert other.code(TEST_UNIT_READY) == MODES_CHANGED and not caches(other)


def test_a_cache_that_is_turned_on_while_it_is_being_turned_off_stays_on(
    pair: tuple[Client, Client],
) -> None:
    one, other = pair
    task = one.server.begin(one.nexus, 0, select6(WCE_OFF))
    assert not one.server.run(task, memoryview(WCE_OFF), True)
    assert other.code(select6(WCE_ON), WCE_ON) == GOOD
    assert one.server.run(task, memoryview(WCE_OFF)) and not task.status
    assert caches(one) and caches(other)


def test_a_reset_leaves_the_write_cache_as_it_is(pair: tuple[Client, Client]) -> None:
    """A host that was told that the cache is off learns of a reset only that it was one."""
    one, _ = pair
    assert one.code(select6(WCE_OFF), WCE_OFF) == GOOD
    one.server.reset_lun(0)
    assert one.code(TEST_UNIT_READY) == LUN_RESET
    assert not caches(one)


def kept(store: FakeStore, state: StateFile, write_cache: bool | None = None) -> Client:
    """A client of a unit that can save its mode parameters, after a start of the target."""
    again = StateFile(state.path)
    unit = LogicalUnit(store, serial="S", write_cache=write_cache, modes=again)
    return Client(DeviceServer({0: unit}, IQN))


def wce(client: Client, control: int) -> bool:
    data = client.data(bytes((0x1A, 0x08, control << 6 | mode.CACHING, 0, 255, 0)))
    assert data[4] == 0x80 | mode.CACHING, "PS: the page can be saved"
    return bool(data[6] & 4)


def saving(command: bytes) -> bytes:
    return bytes((command[0], command[1] | 1)) + command[2:]


@pytest.fixture
def state(tmp_path: Path) -> StateFile:
    return StateFile.beside(str(tmp_path / "lun"), MODES_SUFFIX)


def test_mode_parameters_are_saved(store: FakeStore, state: StateFile) -> None:
    """With SP they outlive the target, and without it they do not. What the start of the target
    asks for comes before what was saved."""
    one = kept(store, state)
    assert wce(one, mode.PC_CURRENT) and wce(one, mode.PC_SAVED) and wce(one, mode.PC_DEFAULT)
    assert one.code(select6(WCE_OFF), WCE_OFF) == GOOD
    assert not wce(one, mode.PC_CURRENT) and wce(one, mode.PC_SAVED)
    assert not state.path.exists()
    assert caches(kept(store, state))
    assert one.code(saving(select6(WCE_OFF)), WCE_OFF) == GOOD, "no change, and saved"
    assert state.path.read_bytes() == b"wce=0\n"
    assert not wce(one, mode.PC_SAVED) and wce(one, mode.PC_DEFAULT)
    two = kept(store, state)
    assert not caches(two) and not wce(two, mode.PC_SAVED) and wce(two, mode.PC_DEFAULT)
    three = kept(store, state, write_cache=True)
    assert caches(three) and not wce(three, mode.PC_SAVED)
    assert two.code(saving(select10(bytes(4) + WCE_ON)), bytes(4) + WCE_ON) == GOOD
    assert caches(two) and caches(kept(store, state))
    assert not caches(kept(store, state, write_cache=False))


@pytest.mark.parametrize(("first", "last"), [(WCE_ON, WCE_OFF), (WCE_OFF, WCE_ON)])
def test_of_two_changes_the_later_one_is_saved(
    store: FakeStore, state: StateFile, first: bytes, last: bytes
) -> None:
    """Whichever has its thread first: the next start must not turn on a cache that a host has
    turned off."""
    one = kept(store, state)
    if first == WCE_ON:
        assert one.code(select6(WCE_OFF), WCE_OFF) == GOOD
    tasks = []
    for data in (first, last):
        task = one.server.begin(one.nexus, 0, saving(select6(data)))
        assert not one.server.run(task, memoryview(data), True)
        tasks.append((task, data))
    for task, data in reversed(tasks):
        assert one.server.run(task, memoryview(data)) and not task.status
    on = last == WCE_ON
    assert (wce(one, mode.PC_CURRENT), wce(one, mode.PC_SAVED)) == (on, on)
    assert caches(kept(store, state)) == on


@pytest.mark.logs("the state of a LUN cannot be saved", "bad block", "data may be lost")
def test_what_cannot_be_saved_is_an_error(store: FakeStore, state: StateFile) -> None:
    """A cache that could not be flushed stays on, and that it is off is not saved."""
    one = kept(store, state)
    assert one.code(b"\x2a" + bytes(7) + b"\x01\0", bytes(512)) == GOOD
    store.failure = OSError(errno.EIO, "bad block")
    assert one.code(saving(select6(WCE_OFF)), WCE_OFF)[0] == sense.MEDIUM_ERROR
    assert not state.path.exists()
    store.failure = None
    lost = one.code(cdb.synchronize_cache10(0, 0))
    assert lost == (sense.MEDIUM_ERROR, sense.WRITE_ERROR), "the host hears before the cache is off"
    state.path.with_name(state.path.name + ".new").mkdir()
    refused = one.code(saving(select6(WCE_OFF)), WCE_OFF)
    assert refused == (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
    assert not wce(one, mode.PC_CURRENT) and wce(one, mode.PC_SAVED)


@pytest.mark.parametrize("content", [b"", b"wce=2\n", b"wce=1", b"wce=1\n" + bytes(1 << 20)])
def test_a_damaged_file_with_mode_parameters_turns_the_cache_off(
    store: FakeStore, state: StateFile, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that has turned the cache off does not look again. Other LUNs are served, too."""
    state.path.write_bytes(content)
    one = kept(store, state)
    assert f"{state.path}: " in caplog.text and "lost" in caplog.text
    assert not caches(one) and not wce(one, mode.PC_SAVED)
    assert caches(kept(store, state, write_cache=True)), "the command line says so"
    assert one.code(saving(select6(WCE_ON)), WCE_ON) == GOOD
    assert caches(kept(store, state))


def test_a_unit_that_cannot_save(pair: tuple[Client, Client]) -> None:
    one, _ = pair
    assert one.run(saving(select6(WCE_OFF)), b"").sense.field == 1
    assert one.data(cdb.mode_sense6(mode.CACHING, 255))[4] == mode.CACHING


@pytest.mark.parametrize(
    ("list6", "field"),
    [
        ("00000000 0812 05" + "00" * 17, 6),  # RCD, which cannot be changed
        ("00000000 0812 04" + "00" * 16 + "01", 23),
        ("00000000 0811 04" + "00" * 16, 5),  # one byte less than the page has
        ("00000000 0a0a 04" + "00" * 9, 6),  # D_SENSE
        ("00000000 0200", 4),  # no such page
        ("00000000 4801 0000", 4),  # nor such a subpage
        ("00000008 00000000 00000400 0812 04" + "00" * 17, 4),  # blocks of 1024 bytes
        ("00000008 00000005 00000200 0812 04" + "00" * 17, 4),  # five blocks
    ],
)
def test_what_cannot_be_selected(pair: tuple[Client, Client], list6: str, field: int) -> None:
    parameters = bytes.fromhex(list6)
    answer = pair[0].run(select6(parameters), parameters)
    assert answer.code == WRONG_PARAMETER
    assert (answer.sense.field, answer.sense.field_in_cdb) == (field, False)
    assert caches(pair[0]) and pair[1].code(TEST_UNIT_READY) == GOOD


def test_nothing_is_changed_where_a_later_page_is_wrong(pair: tuple[Client, Client]) -> None:
    parameters = WCE_OFF + b"\x02\x00"
    assert pair[0].code(select6(parameters), parameters) == WRONG_PARAMETER
    assert caches(pair[0])


@pytest.mark.parametrize("length", [1, 3, 5, 23])
def test_lists_that_are_cut_short(pair: tuple[Client, Client], length: int) -> None:
    parameters = WCE_OFF[:length]
    assert pair[0].code(select6(parameters), parameters) == (
        sense.ILLEGAL_REQUEST,
        sense.PARAMETER_LIST_LENGTH_ERROR,
    )


def test_what_a_host_reads_can_be_selected(pair: tuple[Client, Client]) -> None:
    """The way of sdparm and of Linux: read pages, change a bit, write them back."""
    for descriptors in (False, True):
        pages = bytearray(pair[0].data(cdb.mode_sense10(mode.ALL, 255, descriptors)))
        pages[0:2] = b"\0\0"
        assert pair[0].code(select10(bytes(pages)), bytes(pages)) == GOOD
    assert pair[1].code(TEST_UNIT_READY) == GOOD


def test_fields_of_mode_select(client: Client) -> None:
    assert client.code(select6(b"")) == GOOD, "an empty list changes nothing"
    saving = client.run(b"\x15\x11\0\0\x18\0")
    assert saving.code == INVALID_FIELD and saving.sense.field == 1
    assert client.code(b"\x15\x00\0\0\x18\0") == INVALID_FIELD, "pages of no standard"


# -- SEND DIAGNOSTIC -------------------------------------------------------------------------------


@pytest.mark.logs("self-test: .*bad block")
def test_self_test(store: FakeStore, pair: tuple[Client, Client]) -> None:
    """SPC-4, SEND DIAGNOSTIC: SELFTEST is bit 2 of byte 1; codes and pages are refused."""
    assert pair[0].code(bytes.fromhex("1d 04 00 00 00 00")) == GOOD
    assert pair[0].code(bytes.fromhex("1d 07 00 00 00 00")) == GOOD, "DEVOFFL and UNITOFFL"
    assert pair[0].code(bytes.fromhex("1d 24 00 00 00 00")) == INVALID_FIELD
    assert pair[0].code(bytes.fromhex("1d 10 00 00 08 00")) == INVALID_FIELD
    store.failure = OSError(errno.EIO, "bad block")
    failed = (sense.HARDWARE_ERROR, sense.FAILED_SELF_TEST)
    assert pair[0].code(bytes.fromhex("1d 04 00 00 00 00")) == failed
    assert pair[0].code(bytes.fromhex("1d 10 00 00 00 00")) == GOOD, "there is nothing to do"
