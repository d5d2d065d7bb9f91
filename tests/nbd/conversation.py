"""What an NBD client says, and how it reads what a server says: written from the protocol's
document, and not with the code under test."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, cast

from iserblk.disk.seam import DirectDisk
from iserblk.nbd.exports import Export
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info

FIXED, NO_ZEROES = 1, 2
EXPORT_NAME, ABORT, LIST, STARTTLS, INFO, GO = 1, 2, 3, 5, 6, 7
STRUCTURED_REPLY, LIST_META_CONTEXT, SET_META_CONTEXT, EXTENDED_HEADERS = 8, 9, 10, 11

ACK, SERVER, INFORMATION, META_CONTEXT = 1, 2, 3, 4
UNSUP, POLICY, INVALID, PLATFORM, TLS_REQD, UNKNOWN, SHUTDOWN, BLOCK_SIZE_REQD, TOO_BIG = (
    (1 << 31) + number for number in range(1, 10)
)
EXT_HEADER_REQD = (1 << 31) + 10

READ, WRITE, DISC, FLUSH, TRIM, CACHE, WRITE_ZEROES, BLOCK_STATUS = range(8)
FUA, NO_HOLE, DF, REQ_ONE, FAST_ZERO, PAYLOAD_LEN = (1 << bit for bit in range(6))


def export(name: str = "lun0", read_only: bool = False, **changes: Any) -> Export:
    """An export of a disk in memory; ``changes``: of its LunInfo."""
    disk = AsyncFake(FakeDisk(lun_info(0, name=name, **({"size": 1 << 20} | changes))))
    return Export(name, cast(DirectDisk, disk), read_only)


# -- handshake -------------------------------------------------------------------------------------


def client_flags(flags: int = FIXED | NO_ZEROES) -> bytes:
    return flags.to_bytes(4)


def option(number: int, data: bytes = b"", length: int | None = None) -> bytes:
    """``length``: what it says of its data, where that is not true."""
    told = len(data) if length is None else length
    return b"IHAVEOPT" + number.to_bytes(4) + told.to_bytes(4) + data


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return len(data).to_bytes(4) + data


def about(name: str | bytes, *wanted: int) -> bytes:
    """Data of INFO and GO."""
    return string(name) + len(wanted).to_bytes(2) + b"".join(each.to_bytes(2) for each in wanted)


def contexts(name: str, *queries: str) -> bytes:
    """Data of LIST_META_CONTEXT and SET_META_CONTEXT."""
    return string(name) + len(queries).to_bytes(4) + b"".join(map(string, queries))


class Answer(NamedTuple):
    """A reply to an option."""

    option: int
    kind: int
    data: bytes


def answers(stream: bytes) -> list[Answer]:
    """Replies to options; there is nothing else in ``stream``."""
    found, at = [], 0
    while at < len(stream):
        magic, number, kind, length = struct.unpack_from(">QIII", stream, at)
        assert magic == 0x3E889045565A9
        at += 20
        found.append(Answer(number, kind, stream[at : at + length]))
        assert len(found[-1].data) == length
        at += length
    return found


# -- transmission ----------------------------------------------------------------------------------


def request(
    command: int,
    cookie: int,
    offset: int = 0,
    length: int = 0,
    flags: int = 0,
    data: bytes = b"",
    extended: bool = False,
) -> bytes:
    if extended:
        header = struct.pack(">IHHQQQ", 0x21E41C71, flags, command, cookie, offset, length)
    else:
        header = struct.pack(">IHHQQI", 0x25609513, flags, command, cookie, offset, length)
    return header + data


def write(cookie: int, offset: int, data: bytes, flags: int = 0, extended: bool = False) -> bytes:
    if extended:
        flags |= PAYLOAD_LEN
    return request(WRITE, cookie, offset, len(data), flags, data, extended)


class Reply(NamedTuple):
    """``kind``: of the chunk; in a simple reply 0, or 1 with data. ``offset``: of an extended
    one."""

    cookie: int
    error: int
    kind: int
    data: bytes
    offset: int = 0


SIMPLE, STRUCTURED, EXTENDED = MODES = ("simple", "structured", "extended")


def replies(stream: bytes, mode: str, reads: dict[int, int]) -> list[Reply]:
    """Replies of one chunk each; there is nothing else in ``stream``. ``reads``: by cookie how many
    bytes a READ asked for, which a simple reply does not tell."""
    found, at, offset = [], 0, 0
    while at < len(stream):
        if mode == SIMPLE:
            magic, error, cookie = struct.unpack_from(">IIQ", stream, at)
            assert magic == 0x67446698
            at += 16
            length = 0 if error else reads.get(cookie, 0)
            found.append(Reply(cookie, error, int(length > 0), stream[at : at + length]))
            assert len(found[-1].data) == length
            at += length
            continue
        if mode == STRUCTURED:
            magic, flags, kind, cookie, length = struct.unpack_from(">IHHQI", stream, at)
            assert magic == 0x668E33EF
            at += 20
        else:
            magic, flags, kind, cookie, offset, length = struct.unpack_from(">IHHQQQ", stream, at)
            assert magic == 0x6E8A278C
            at += 32
        assert flags == 1  # the last chunk of the reply
        payload = stream[at : at + length]
        assert len(payload) == length
        at += length
        error = 0
        if kind == 1 << 15 | 1:
            error, words = struct.unpack_from(">IH", payload)
            assert error and len(payload) == 6 + words
            payload = payload[6:]
        elif kind == 0:
            assert not payload
        found.append(Reply(cookie, error, kind, payload, offset))
    return found
