"""What the target says about itself and its LUNs: INQUIRY, capacity, mode pages."""

from __future__ import annotations

import os

import pytest

from iserblk.errors import BadArgument
from iserblk.scsi import capacity, cdb, inquiry, luns, mode, sense
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.store import FileStore
from tests.scsi.modes import as_sense6
from tests.target.scsi.units import SIZE, TEST_UNIT_READY
from tests.target.scsi_client import (
    INVALID_FIELD,
    IQN,
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
    assert pages == (0x00, 0x80, 0x83, 0xB0, 0xB1, 0xB2)
    for page in pages:
        answer = client.data(cdb.inquiry(255, page))
        assert answer[1] == page and len(answer) == 4 + int.from_bytes(answer[2:4], "big")
        assert client.data(cdb.inquiry(7, page)) == answer[:7]
    assert inquiry.decode_serial(client.data(cdb.inquiry(255, 0x80))) == "SN-1"
    names = inquiry.decode_identifiers(client.data(cdb.inquiry(255, 0x83)))
    assert [name.partition(".")[0] for name in names] == ["naa", "t10"]
    assert names[1] == "t10.ISERBLK SN-1"
    designators = inquiry.decode_designators(client.data(cdb.inquiry(255, 0x83)))
    assert inquiry.name_string(IQN) in [each.data for each in designators]
    assert not inquiry.decode_characteristics(client.data(cdb.inquiry(255, 0xB1))).rotational
    assert all(inquiry.decode_provisioning(client.data(cdb.inquiry(255, 0xB2))))
    for absent in (0x86, 0xB9, 0xFF):
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
    assert changeable[4:6] == b"\x08\x12" and not any(changeable[6:])
    saved = client.run(ask(mode.CACHING, mode.PC_SAVED))
    assert saved.code == (sense.ILLEGAL_REQUEST, sense.SAVING_NOT_SUPPORTED)
    assert client.data(ask(mode.ALL, subpage=0xFF)) == client.data(ask(mode.ALL))
    assert len(client.data(ask(mode.CONTROL))) == 4 + 12
    assert client.code(ask(0x01)) == INVALID_FIELD
    assert client.run(ask(mode.CACHING, subpage=1)).sense.field == 3
    assert client.code(ask(mode.CACHING, subpage=0xFF)) == INVALID_FIELD
