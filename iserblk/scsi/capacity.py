"""READ CAPACITY parameter data (SBC-4).

(10)  0 I last LBA (FFFFFFFFh: too large to fit)   4 I block length
(16)  0 Q last LBA    8 I block length    12 B protection
      13 bits 3-0: a physical block is 2^n logical ones
      14 bit 7 LBPME, bit 6 LBPRZ, then 14 bits: lowest aligned LBA
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

_LAYOUT10 = struct.Struct(">II")
_LAYOUT16 = struct.Struct(">QIBBH16x")
_USED16 = 16  # bytes that are needed; the rest is reserved
_LBPME = 0x8000
_LBPRZ = 0x4000
_LAST10 = 0xFFFFFFFF
_SMALLEST_BLOCK = 512
_LARGEST_BLOCK = 1 << 16
_LARGEST_SIZE = 1 << 63  # bytes: what file offsets hold


class UnusableCapacity(RemoteProtocolError):
    """The data is complete, but a LUN of such a capacity cannot be used. ``reason``: why, to follow
    "the LUN has"."""

    def __init__(self, reason: str) -> None:
        super().__init__("SCSI", f"READ CAPACITY: the LUN has {reason}")
        self.reason = reason


class UntoldCapacity(UnusableCapacity):
    """READ CAPACITY(10) says that the capacity is too large for it."""


class Capacity(NamedTuple):
    """The size of a LUN and of its blocks."""

    blocks: int
    block_size: int  # bytes
    physical_block_size: int  # bytes
    lbpme: bool = False  # thin: blocks can be unmapped, GET LBA STATUS tells
    lbprz: bool = False  # unmapped blocks read as zeroes


def _check(capacity: Capacity) -> Capacity:
    size = capacity.block_size
    if not _SMALLEST_BLOCK <= size <= _LARGEST_BLOCK or size & (size - 1):
        raise UnusableCapacity(
            f"a block length of {size} bytes; a power of 2 from 512 to 65536 is needed"
        )
    if capacity.blocks * size >= _LARGEST_SIZE:
        raise UnusableCapacity(
            f"{capacity.blocks} blocks of {size} bytes, which is too large: less than 8 EiB can be"
            " used"
        )
    return capacity


def encode10(blocks: int, block_size: int) -> bytes:
    return _LAYOUT10.pack(min(blocks - 1, _LAST10), block_size)


def decode10(data: bytes | memoryview) -> Capacity:
    """READ CAPACITY(10) data. Raises RemoteProtocolError for data that cannot be used, also where
    the last LBA does not fit into 32 bits (UntoldCapacity)."""
    if len(data) < _LAYOUT10.size:
        raise RemoteProtocolError("SCSI", f"READ CAPACITY(10) answered with {len(data)} bytes")
    last, block_size = _LAYOUT10.unpack_from(data)
    if last == _LAST10:
        raise UntoldCapacity("2^32 blocks or more: only READ CAPACITY(16) tells how many")
    return _check(Capacity(last + 1, block_size, block_size))


def encode16(capacity: Capacity) -> bytes:
    exponent = (capacity.physical_block_size // capacity.block_size).bit_length() - 1
    flags = (_LBPME if capacity.lbpme else 0) | (_LBPRZ if capacity.lbprz else 0)
    return _LAYOUT16.pack(capacity.blocks - 1, capacity.block_size, 0, exponent, flags)


def decode16(data: bytes | memoryview) -> Capacity:
    """READ CAPACITY(16) data. Raises RemoteProtocolError for data that cannot be used: where it is
    complete, UnusableCapacity."""
    if len(data) < _USED16:
        raise RemoteProtocolError("SCSI", f"READ CAPACITY(16) answered with {len(data)} bytes")
    last, block_size, _, exponent, flags = _LAYOUT16.unpack(
        bytes(data[: _LAYOUT16.size]).ljust(_LAYOUT16.size, b"\0")
    )
    physical = block_size << (exponent & 0x0F)
    lbpme, lbprz = bool(flags & _LBPME), bool(flags & _LBPRZ)
    return _check(Capacity(last + 1, block_size, physical, lbpme, lbprz))
