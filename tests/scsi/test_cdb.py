"""CDBs, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi import cdb, opcodes

LBA32 = st.integers(0, 0xFFFFFFFF)
LBA64 = st.integers(0, 2**64 - 1)


# shows: SYSTEM-51
@pytest.mark.parametrize(
    ("built", "expected", "name"),
    [
        (cdb.test_unit_ready(), "00 00 00 00 00 00", "TEST UNIT READY"),
        (cdb.request_sense(), "03 00 00 00 fc 00", "REQUEST SENSE"),
        (cdb.request_sense(18, descriptor=True), "03 01 00 00 12 00", "REQUEST SENSE"),
        (cdb.inquiry(0x1234), "12 00 00 12 34 00", "INQUIRY"),
        (cdb.inquiry(255, 0), "12 01 00 00 ff 00", "INQUIRY"),
        (cdb.inquiry(255, 0xB0), "12 01 b0 00 ff 00", "INQUIRY"),
        (cdb.report_luns(0x12345678), "a0 00 00 00 00 00 12 34 56 78 00 00", "REPORT LUNS"),
        (cdb.read_capacity10(), "25" + " 00" * 9, "READ CAPACITY(10)"),
        (
            cdb.read_capacity16(),
            "9e 10 00 00 00 00 00 00 00 00 00 00 00 20 00 00",
            "READ CAPACITY(16)",
        ),
        (
            cdb.get_lba_status16(0x0102030405060708, 0x1A2B3C4D),
            "9e 12 01 02 03 04 05 06 07 08 1a 2b 3c 4d 00 00",
            "GET LBA STATUS",
        ),
        (cdb.mode_sense6(8, 192), "1a 08 08 00 c0 00", "MODE SENSE(6)"),
        (cdb.mode_sense6(8, 192, block_descriptors=True), "1a 00 08 00 c0 00", "MODE SENSE(6)"),
        (cdb.mode_sense10(0x3F, 0x1234), "5a 08 3f 00 00 00 00 12 34 00", "MODE SENSE(10)"),
        (
            cdb.synchronize_cache10(0x01020304, 0x0506),
            "35 00 01 02 03 04 00 05 06 00",
            "SYNCHRONIZE CACHE(10)",
        ),
        (
            cdb.synchronize_cache16(1, 2, immed=True),
            "91 02 00 00 00 00 00 00 00 01 00 00 00 02 00 00",
            "SYNCHRONIZE CACHE(16)",
        ),
        (cdb.pre_fetch10(1, 2), "34 02 00 00 00 01 00 00 02 00", "PRE-FETCH(10)"),
        (
            cdb.pre_fetch16(1, 2),
            "90 02 00 00 00 00 00 00 00 01 00 00 00 02 00 00",
            "PRE-FETCH(16)",
        ),
        (cdb.unmap(24), "42 00 00 00 00 00 00 00 18 00", "UNMAP"),
        (cdb.write_same10(1, 2, True), "41 08 00 00 00 01 00 00 02 00", "WRITE SAME(10)"),
        (
            cdb.write_same16(1, 2, True, True),
            "93 09 00 00 00 00 00 00 00 01 00 00 00 02 00 00",
            "WRITE SAME(16)",
        ),
        (
            cdb.write_same16(1, 2),
            "93 00 00 00 00 00 00 00 00 01 00 00 00 02 00 00",
            "WRITE SAME(16)",
        ),
        (
            cdb.compare_and_write(0x0102030405060708, 9, cdb.FUA),
            "89 08 01 02 03 04 05 06 07 08 00 00 00 09 00 00",
            "COMPARE AND WRITE",
        ),
        (cdb.verify10(1, 2, cdb.BYTCHK), "2f 02 00 00 00 01 00 00 02 00", "VERIFY(10)"),
        (
            cdb.verify16(1, 2),
            "8f 00 00 00 00 00 00 00 00 01 00 00 00 02 00 00",
            "VERIFY(16)",
        ),
    ],
)
def test_golden(built: bytes, expected: str, name: str) -> None:
    assert built == bytes.fromhex(expected)
    assert opcodes.name(built) == name


@given(LBA32, st.integers(0, 0xFFFF), st.integers(0, 255), st.binary(min_size=16, max_size=16))
def test_ten_byte_forms_fill_the_whole_slot(lba: int, blocks: int, flags: int, old: bytes) -> None:
    """Nothing is left of the slot's earlier content."""
    for pack, opcode in ((cdb.pack_read10, 0x28), (cdb.pack_write10, 0x2A)):
        slot = bytearray(old)
        pack(slot, lba, blocks, flags)
        expected = bytes((opcode, flags)) + lba.to_bytes(4, "big") + b"\0"
        assert slot == expected + blocks.to_bytes(2, "big") + bytes(7)
        assert cdb.RW10.unpack_from(slot) == (opcode, flags, lba, 0, blocks, 0)


@given(LBA64, LBA32, st.integers(0, 255), st.binary(min_size=16, max_size=16))
def test_sixteen_byte_forms_fill_the_whole_slot(
    lba: int, blocks: int, flags: int, old: bytes
) -> None:
    for pack, opcode in ((cdb.pack_read16, 0x88), (cdb.pack_write16, 0x8A)):
        slot = bytearray(old)
        pack(memoryview(slot), lba, blocks, flags)
        expected = bytes((opcode, flags)) + lba.to_bytes(8, "big")
        assert slot == expected + blocks.to_bytes(4, "big") + bytes(2)


@given(st.binary(max_size=32))
def test_every_cdb_has_a_name(raw: bytes) -> None:
    assert opcodes.name(raw)


def test_names_of_unknown_commands() -> None:
    assert opcodes.name(b"\xc1\0") == "command 0xc1"
    assert opcodes.name(b"\x9e\x1f") == "command 0x9e/0x1f"
    assert opcodes.name(b"") == "an empty CDB"
