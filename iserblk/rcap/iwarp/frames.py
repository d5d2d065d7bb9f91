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

Look = tuple[int, int, int, int, int, bool]
"""Of an FPDU: the fields of ``ddp.HEADER``, and whether it may be taken."""


def _look(buffer: bytes | memoryview | mmap, at: int, stop: int, crc: bool) -> Look:
    """The fields of ``ddp.HEADER``, of the FPDU that begins at ``buffer[at]``; and whether it may
    be taken: all of it lies in ``buffer[at:stop]``, it has room for a header, and with ``crc`` it
    ends with its CRC."""
    if not 0 <= at <= stop - ddp.UNTAGGED_SIZE or stop > len(buffer):
        raise IndexError("a header that is not in the buffer")
    header: ddp.Header = ddp.HEADER.unpack_from(buffer, at)
    length = header[0]
    size = ((length + ddp.LENGTH_SIZE + 3) & ~3) + ddp.CRC_SIZE  # as ``ddp.fpdu_size``: a call less
    good = length >= ddp.TAGGED_SIZE - ddp.LENGTH_SIZE and size <= stop - at
    if good and crc:
        good = ddp.crc_of(memoryview(buffer)[at : at + size]) == ddp.GOOD_CRC
    return (*header, good)


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
        look,
        place,
    )
except ImportError:
    around_tagged = _around_tagged
    fill_send = _fill_send
    look = _look
    place = _place

__all__ = ["around_tagged", "fill_send", "look", "place"]
