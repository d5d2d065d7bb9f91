"""What each FPDU of a usual kind takes, in one call each: its header, its CRC, its place.

scripts/setup compiles these functions (``_frames.pyx``), on top of ISA-L. The functions here do the
same where that was not possible: several layouts and slices for each of them, which cost a frame
four times as many instructions. ``ddp`` has the layouts.

No position that is given to them leads out of a buffer: they raise IndexError, or struct.error.
"""

from __future__ import annotations

from mmap import mmap

from iserblk.rcap.iwarp import ddp

_PADS = (b"", b"\0", b"\0\0", b"\0\0\0")


def _unpack_header(buffer: bytes | memoryview | mmap, at: int) -> ddp.Header:
    """The fields of ``ddp.HEADER``, of the FPDU that begins at ``buffer[at]``."""
    header: ddp.Header = ddp.HEADER.unpack_from(buffer, at)
    return header


def _is_valid(buffer: bytes | memoryview | mmap, start: int, stop: int) -> bool:
    """Whether the FPDU in ``buffer[start:stop]`` ends with its CRC."""
    if not 0 <= start <= stop <= len(buffer):
        raise IndexError("an FPDU that is not in the buffer")
    return ddp.crc_of(memoryview(buffer)[start:stop]) == ddp.GOOD_CRC


def _place(target: memoryview, to: int, source: memoryview | mmap, start: int, size: int) -> None:
    """Copy ``source[start : start + size]`` to ``target[to:]``."""
    if size < 0 or not 0 <= to <= len(target) - size or not 0 <= start <= len(source) - size:
        raise IndexError("a place that is not in its buffer")
    target[to : to + size] = memoryview(source)[start : start + size]


def _fill_send(
    frame: memoryview, ulpdu: int, control: int, invalidate: int, msn: int, crc: bool
) -> None:
    """Write the header of a Send in one segment to the begin of ``frame``, which has the message
    and its pad, and with ``crc`` the CRC to its last four bytes. ``ulpdu``: ULPDU_Length."""
    end = len(frame) - ddp.CRC_SIZE
    if end < ddp.UNTAGGED_SIZE:
        raise IndexError("a frame of another length")
    ddp.UNTAGGED_HEADER.pack_into(frame, 0, ulpdu, control, invalidate, 0, msn, 0)
    if crc:
        ddp.CRC.pack_into(frame, end, ddp.crc_of(frame[:end]))


def _around_tagged(
    data: memoryview, control: int, stag: int, to: int, crc: bool
) -> tuple[bytes, bytes]:
    """What comes before and behind ``data`` in a tagged FPDU: its header; its pad and CRC, which is
    zero without ``crc``."""
    size = len(data)
    if size > ddp.MAX_ULPDU - ddp.TAGGED_SIZE + ddp.LENGTH_SIZE:
        raise IndexError("more data than a frame has")
    header = ddp.TAGGED_HEADER.pack(size + ddp.TAGGED_SIZE - ddp.LENGTH_SIZE, control, stag, to)
    pad = _PADS[-size & 3]
    if not crc:
        return header, pad + bytes(ddp.CRC_SIZE)
    value = ddp.crc_of(pad, ddp.crc_of(data, ddp.crc_of(header)))
    return header, pad + ddp.CRC.pack(value)


try:
    from iserblk.rcap.iwarp._frames import (
        around_tagged,
        fill_send,
        is_valid,
        place,
        unpack_header,
    )
except ImportError:
    around_tagged = _around_tagged
    fill_send = _fill_send
    is_valid = _is_valid
    place = _place
    unpack_header = _unpack_header

__all__ = ["around_tagged", "fill_send", "is_valid", "place", "unpack_header"]
