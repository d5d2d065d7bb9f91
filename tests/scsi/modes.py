"""MODE SENSE(10) data with the header of MODE SENSE(6), to be decoded by one function."""

from __future__ import annotations


def as_sense6(data: bytes) -> bytes:
    """SPC-4, mode parameter header: lengths shrink from two bytes to one; nothing else moves."""
    behind = data[8 : 2 + int.from_bytes(data[:2], "big")]
    descriptors = int.from_bytes(data[6:8], "big")
    return bytes((3 + len(behind), data[2], data[3], descriptors)) + behind
