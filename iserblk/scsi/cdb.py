"""Command descriptor blocks (SPC-4, SBC-4).

The ``pack_…`` functions are for the hot path: they write 16 bytes into a slot of 16 bytes (iSCSI
wants shorter CDBs padded with zeroes). The other functions return the bytes of the CDB. ``lba`` and
``blocks`` are logical blocks, ``allocation`` and ``length`` are bytes.

The parsers of the device server use the same layouts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from iserblk.octets import packer, unpacker
from iserblk.scsi import opcodes

# An UNMAP command needs a parameter list, so callers find both here.
from iserblk.scsi.lba import unmap_parameters as unmap_parameters  # noqa: PLC0414

# Flags in byte 1.
DPO: Final = 0x10  # READ, WRITE, VERIFY, COMPARE AND WRITE
FUA: Final = 0x08  # READ, WRITE, COMPARE AND WRITE
DISABLE_WRITE: Final = 0x04  # XDWRITEREAD: only the exclusive or is wanted
BYTCHK: Final = 0x02  # VERIFY: compare with Data-Out
UNMAP: Final = 0x08  # WRITE SAME: may deallocate
NDOB: Final = 0x01  # WRITE SAME(16): no Data-Out buffer, zeroes
SYNC_IMMED: Final = 0x02  # SYNCHRONIZE CACHE, PRE-FETCH: answer before it is done
EVPD: Final = 0x01  # INQUIRY
PF: Final = 0x10  # MODE SELECT: pages as SPC-4 has them
SP: Final = 0x01  # MODE SELECT: save the pages
DBD: Final = 0x08  # MODE SENSE: no block descriptors
DESC: Final = 0x01  # REQUEST SENSE: descriptor format

# READ, WRITE and all CDBs of the same form: opcode, flags, LBA, group, blocks, control.
RW6: Final = struct.Struct(">BBHBB")  # LBA: bits 4-0 of byte 1, then 16 bits; 0 blocks mean 256
RW10: Final = struct.Struct(">BBIBHB")
RW12: Final = struct.Struct(">BBIIBB")  # blocks before group
RW16: Final = struct.Struct(">BBQIBB")  # blocks before group
# What a READ or WRITE has to say: flags, LBA, blocks.
_SAID10: Final = struct.Struct(">xBIxH")
_SAID16: Final = struct.Struct(">xBQI")
unpack10: Final[Callable[..., Any]] = unpacker(_SAID10)
unpack16: Final[Callable[..., Any]] = unpacker(_SAID16)
Said = tuple[int, int, int]

# The same in a slot of 16 bytes, with zero for group and control.
_SLOT10: Final = struct.Struct(">BBIxHx6x")
_SLOT16: Final = struct.Struct(">BBQIxx")
_pack10: Final[Callable[..., None]] = packer(_SLOT10)
_pack16: Final[Callable[..., None]] = packer(_SLOT16)

Slot = memoryview | bytearray


def waits_for_medium(block: Slot | bytes) -> bool:
    """Whether it is a SYNCHRONIZE CACHE, or a WRITE with FUA: targets wait for the medium then, and
    are told what it could not keep of any write."""
    if block[0] in (opcodes.SYNCHRONIZE_CACHE_10, opcodes.SYNCHRONIZE_CACHE_16):
        return True
    return block[0] in (opcodes.WRITE_10, opcodes.WRITE_16) and block[1] & FUA != 0


def pack_read10(slot: Slot, lba: int, blocks: int, flags: int) -> None:
    _pack10(slot, 0, 0x28, flags, lba, blocks)


def pack_write10(slot: Slot, lba: int, blocks: int, flags: int) -> None:
    _pack10(slot, 0, 0x2A, flags, lba, blocks)


def pack_read16(slot: Slot, lba: int, blocks: int, flags: int) -> None:
    _pack16(slot, 0, 0x88, flags, lba, blocks)


def pack_write16(slot: Slot, lba: int, blocks: int, flags: int) -> None:
    _pack16(slot, 0, 0x8A, flags, lba, blocks)


def test_unit_ready() -> bytes:
    return bytes(6)


def request_sense(allocation: int = 252, descriptor: bool = False) -> bytes:
    flags = DESC if descriptor else 0
    return struct.pack(">BBxxBx", opcodes.REQUEST_SENSE, flags, allocation)


def inquiry(allocation: int, page: int | None = None) -> bytes:
    """INQUIRY for standard data, or with ``page`` for that page of vital product data."""
    if page is None:
        return struct.pack(">BBBHx", opcodes.INQUIRY, 0, 0, allocation)
    return struct.pack(">BBBHx", opcodes.INQUIRY, EVPD, page, allocation)


def report_luns(allocation: int) -> bytes:
    return struct.pack(">B5xIxx", opcodes.REPORT_LUNS, allocation)


def read_capacity10() -> bytes:
    return RW10.pack(opcodes.READ_CAPACITY_10, 0, 0, 0, 0, 0)


def read_capacity16(allocation: int = 32) -> bytes:
    return RW16.pack(opcodes.SERVICE_ACTION_IN_16, opcodes.SA_READ_CAPACITY_16, 0, allocation, 0, 0)


def get_lba_status16(lba: int, allocation: int) -> bytes:
    return RW16.pack(opcodes.SERVICE_ACTION_IN_16, opcodes.SA_GET_LBA_STATUS, lba, allocation, 0, 0)


def mode_sense6(page: int, allocation: int, block_descriptors: bool = False) -> bytes:
    flags = 0 if block_descriptors else DBD
    return struct.pack(">BBBxBx", opcodes.MODE_SENSE_6, flags, page, allocation)


def mode_sense10(page: int, allocation: int, block_descriptors: bool = False) -> bytes:
    flags = 0 if block_descriptors else DBD
    return struct.pack(">BBB4xHx", opcodes.MODE_SENSE_10, flags, page, allocation)


def mode_select6(length: int) -> bytes:
    """MODE SELECT(6) of standard pages (PF). ``length``: bytes of the parameter list, which is the
    Data-Out."""
    return struct.pack(">BB2xBx", opcodes.MODE_SELECT_6, PF, length)


def mode_select10(length: int) -> bytes:
    """MODE SELECT(10) of standard pages (PF). ``length``: bytes of the parameter list, which is the
    Data-Out."""
    return struct.pack(">BB5xHx", opcodes.MODE_SELECT_10, PF, length)


def synchronize_cache10(lba: int, blocks: int, immed: bool = False) -> bytes:
    """SYNCHRONIZE CACHE(10). 0 blocks: to the end of the LUN."""
    flags = SYNC_IMMED if immed else 0
    return RW10.pack(opcodes.SYNCHRONIZE_CACHE_10, flags, lba, 0, blocks, 0)


def synchronize_cache16(lba: int, blocks: int, immed: bool = False) -> bytes:
    """SYNCHRONIZE CACHE(16). 0 blocks: to the end of the LUN."""
    flags = SYNC_IMMED if immed else 0
    return RW16.pack(opcodes.SYNCHRONIZE_CACHE_16, flags, lba, blocks, 0, 0)


def pre_fetch10(lba: int, blocks: int) -> bytes:
    """PRE-FETCH(10), answered at once (IMMED). 0 blocks: to the end of the LUN."""
    return RW10.pack(opcodes.PRE_FETCH_10, SYNC_IMMED, lba, 0, blocks, 0)


def pre_fetch16(lba: int, blocks: int) -> bytes:
    """PRE-FETCH(16), answered at once (IMMED). 0 blocks: to the end of the LUN."""
    return RW16.pack(opcodes.PRE_FETCH_16, SYNC_IMMED, lba, blocks, 0, 0)


def unmap(length: int) -> bytes:
    """UNMAP. ``length``: bytes of the parameter list, which is the Data-Out."""
    return struct.pack(">B6xHx", opcodes.UNMAP, length)


def write_same10(lba: int, blocks: int, unmap: bool = False) -> bytes:
    """WRITE SAME(10). Data-Out: one block. 0 blocks: to the end of the LUN."""
    return RW10.pack(opcodes.WRITE_SAME_10, UNMAP if unmap else 0, lba, 0, blocks, 0)


def write_same16(lba: int, blocks: int, unmap: bool = False, ndob: bool = False) -> bytes:
    """WRITE SAME(16). Data-Out: one block, or nothing with ``ndob``. 0 blocks: to the end of the
    LUN."""
    flags = (UNMAP if unmap else 0) | (NDOB if ndob else 0)
    return RW16.pack(opcodes.WRITE_SAME_16, flags, lba, blocks, 0, 0)


def compare_and_write(lba: int, blocks: int, flags: int = 0) -> bytes:
    """COMPARE AND WRITE of at most 255 blocks. Data-Out: ``blocks`` blocks to compare, then as many
    to write."""
    return struct.pack(">BBQ3xBxx", opcodes.COMPARE_AND_WRITE, flags, lba, blocks)


def xdwriteread10(lba: int, blocks: int, flags: int = 0) -> bytes:
    """XDWRITEREAD(10) (SBC-3). Data-Out: ``blocks`` blocks to write; Data-In: the exclusive or of
    these and the blocks that they replace."""
    return RW10.pack(opcodes.XDWRITEREAD_10, flags, lba, 0, blocks, 0)


def verify10(lba: int, blocks: int, flags: int = 0) -> bytes:
    return RW10.pack(opcodes.VERIFY_10, flags, lba, 0, blocks, 0)


def verify16(lba: int, blocks: int, flags: int = 0) -> bytes:
    return RW16.pack(opcodes.VERIFY_16, flags, lba, blocks, 0, 0)
