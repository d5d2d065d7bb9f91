"""The messages of the NBD protocol: their numbers and layouts.

Source: the protocol's own document (doc/proto.md of the NBD project) and its extension "extended
headers" (the same document on the branch extension-ext-header). All numbers on the wire are
big-endian.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple

from iserblk.errors import IserblkError
from iserblk.octets import packer, unpacker

# --- handshake -----------------------------------------------------------------------------------

# NBDMAGIC, IHAVEOPT, handshake flags (16 bits): the first that a server says.
GREETING: Final = struct.Struct(">8s8sH")
MAGIC: Final = b"NBDMAGIC"
OPTION_MAGIC: Final = b"IHAVEOPT"
FIXED_NEWSTYLE: Final = 1 << 0  # flags of both ends
NO_ZEROES: Final = 1 << 1
CLIENT_FLAGS: Final = struct.Struct(">I")

OPTION: Final = struct.Struct(">8sII")  # IHAVEOPT, option, length of its data
OPTION_REPLY: Final = struct.Struct(">QIII")  # magic, option, type of the reply, length of its data
OPTION_REPLY_MAGIC: Final = 0x3E889045565A9
EXPORT_NAME_REPLY: Final = struct.Struct(">QH")  # size, transmission flags
EXPORT_NAME_ZEROES: Final = 124  # behind it, unless both ends have NO_ZEROES

MOST_STRING: Final = 4096  # bytes of any string of the protocol


class Option(IntEnum):
    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    STARTTLS = 5
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10
    EXTENDED_HEADERS = 11


REP_ACK: Final = 1
REP_SERVER: Final = 2
REP_INFO: Final = 3
REP_META_CONTEXT: Final = 4
_ERROR: Final = 1 << 31
REP_ERR_UNSUP: Final = _ERROR | 1
REP_ERR_POLICY: Final = _ERROR | 2
REP_ERR_INVALID: Final = _ERROR | 3
REP_ERR_PLATFORM: Final = _ERROR | 4
REP_ERR_TLS_REQD: Final = _ERROR | 5
REP_ERR_UNKNOWN: Final = _ERROR | 6
REP_ERR_SHUTDOWN: Final = _ERROR | 7
REP_ERR_BLOCK_SIZE_REQD: Final = _ERROR | 8
REP_ERR_TOO_BIG: Final = _ERROR | 9
REP_ERR_EXT_HEADER_REQD: Final = _ERROR | 10

INFO_EXPORT: Final = 0
INFO_NAME: Final = 1
INFO_DESCRIPTION: Final = 2
INFO_BLOCK_SIZE: Final = 3
INFO = struct.Struct(">H")  # its type, in front of each
INFO_EXPORT_DATA: Final = struct.Struct(">HQH")  # type, size, transmission flags
INFO_BLOCK_SIZE_DATA: Final = struct.Struct(">HIII")  # type; minimum, preferred, largest payload

BASE_ALLOCATION: Final = "base:allocation"
BASE: Final = "base:"
ALLOCATION_ID: Final = 1  # of base:allocation, as its context ID

# Transmission flags: what an export can do.
HAS_FLAGS: Final = 1 << 0
READ_ONLY: Final = 1 << 1
SEND_FLUSH: Final = 1 << 2
SEND_FUA: Final = 1 << 3
ROTATIONAL: Final = 1 << 4
SEND_TRIM: Final = 1 << 5
SEND_WRITE_ZEROES: Final = 1 << 6
SEND_DF: Final = 1 << 7
CAN_MULTI_CONN: Final = 1 << 8
SEND_CACHE: Final = 1 << 10
SEND_FAST_ZERO: Final = 1 << 11
BLOCK_STATUS_PAYLOAD: Final = 1 << 12

# --- transmission --------------------------------------------------------------------------------

# magic, flags, command, cookie, offset, length
REQUEST: Final = struct.Struct(">IHHQQI")
REQUEST_MAGIC: Final = 0x25609513
EXTENDED_REQUEST: Final = struct.Struct(">IHHQQQ")
EXTENDED_REQUEST_MAGIC: Final = 0x21E41C71
# Bound once: compiled code looks a method up at each call.
unpack_request: Final[Callable[..., Any]] = unpacker(REQUEST)
unpack_extended_request: Final[Callable[..., Any]] = unpacker(EXTENDED_REQUEST)

RequestFields = tuple[int, int, int, int, int, int]
"""What both layouts of requests return: with types, so that compiled code has numbers and not
objects."""

SIMPLE_REPLY: Final = struct.Struct(">IIQ")  # magic, error, cookie
pack_simple_reply: Final[Callable[..., None]] = packer(SIMPLE_REPLY)
SIMPLE_REPLY_MAGIC: Final = 0x67446698
CHUNK: Final = struct.Struct(">IHHQI")  # magic, flags, type, cookie, length of the payload
CHUNK_MAGIC: Final = 0x668E33EF
EXTENDED_CHUNK: Final = struct.Struct(">IHHQQQ")  # magic, flags, type, cookie, its offset, length
EXTENDED_CHUNK_MAGIC: Final = 0x6E8A278C
DATA_CHUNK: Final = struct.Struct(">IHHQIQ")  # a chunk of data: header, offset of the data
EXTENDED_DATA_CHUNK: Final = struct.Struct(">IHHQQQQ")
pack_data_chunk: Final[Callable[..., None]] = packer(DATA_CHUNK)
pack_extended_data_chunk: Final[Callable[..., None]] = packer(EXTENDED_DATA_CHUNK)
DATA_OFFSET: Final = 8  # bytes of the payload of a chunk of data that are no data

READ: Final = 0
WRITE: Final = 1
DISC: Final = 2
FLUSH: Final = 3
TRIM: Final = 4
CACHE: Final = 5
WRITE_ZEROES: Final = 6
BLOCK_STATUS: Final = 7

FLAG_FUA: Final = 1 << 0
FLAG_NO_HOLE: Final = 1 << 1
FLAG_DF: Final = 1 << 2
FLAG_REQ_ONE: Final = 1 << 3
FLAG_FAST_ZERO: Final = 1 << 4
FLAG_PAYLOAD_LEN: Final = 1 << 5  # extended headers: the length is that of the payload

CHANGES: Final = (WRITE, TRIM, WRITE_ZEROES)  # commands that change the disk

# FUA is allowed with every command, and ignored where nothing is written.
FLAGS: dict[int, int] = {
    READ: FLAG_FUA | FLAG_DF,
    WRITE: FLAG_FUA,
    DISC: FLAG_FUA,
    FLUSH: FLAG_FUA,
    TRIM: FLAG_FUA,
    CACHE: FLAG_FUA,
    WRITE_ZEROES: FLAG_FUA | FLAG_NO_HOLE | FLAG_FAST_ZERO,
    BLOCK_STATUS: FLAG_FUA | FLAG_REQ_ONE,
}

# Transmission flags without which a command is refused.
OFFERS: dict[int, int] = {
    FLUSH: SEND_FLUSH,
    TRIM: SEND_TRIM,
    CACHE: SEND_CACHE,
    WRITE_ZEROES: SEND_WRITE_ZEROES,
}

REPLY_DONE: Final = 1 << 0
TYPE_NONE: Final = 0
TYPE_OFFSET_DATA: Final = 1
TYPE_BLOCK_STATUS: Final = 5
TYPE_BLOCK_STATUS_EXT: Final = 6
TYPE_ERROR: Final = 1 << 15 | 1
ERROR_DATA: Final = struct.Struct(">IH")  # error, length of the text behind it
CONTEXT_ID: Final = struct.Struct(">I")
EXTENT: Final = struct.Struct(">II")  # length, flags of the context
EXTENDED_CONTEXT: Final = struct.Struct(">II")  # context ID, number of extents
EXTENDED_EXTENT: Final[struct.Struct] = struct.Struct(">QQ")
# The payload of a BLOCK_STATUS request with FLAG_PAYLOAD_LEN: length, then IDs of contexts.
STATUS_PAYLOAD: Final = struct.Struct(">Q")

MOST_PAYLOAD: Final = 32 << 20  # bytes that clients may send or ask for without asking first
PREFERRED: Final = 4096
MOST_EXTENTS: Final = 1 << 12  # of one answer

EPERM: Final = 1
EIO: Final = 5
ENOMEM: Final = 12
EINVAL: Final = 22
ENOSPC: Final = 28
EOVERFLOW: Final = 75
ENOTSUP: Final = 95
ESHUTDOWN: Final = 108

_ERRORS: Final = {
    errno.EPERM: EPERM,
    errno.EACCES: EPERM,
    errno.EROFS: EPERM,
    errno.ENOMEM: ENOMEM,
    errno.EINVAL: EINVAL,
    errno.ENOSPC: ENOSPC,
    errno.EFBIG: ENOSPC,
    errno.EDQUOT: ENOSPC,
    errno.EOVERFLOW: EOVERFLOW,
    errno.EOPNOTSUPP: ENOTSUP,
    errno.ESHUTDOWN: ESHUTDOWN,
}


def string(text: str) -> bytes:
    """``text`` as a string of the protocol: UTF-8 without NUL, cut where it is too long."""
    data = text.replace("\0", "?").encode(errors="replace")
    if len(data) > MOST_STRING:
        data = data[:MOST_STRING].decode(errors="ignore").encode()  # not inside a character
    return data


def error_of(error: IserblkError) -> int:
    """The error that NBD has for one of ours. A lost connection or a timeout is EIO."""
    return _ERRORS.get(error.errno, EIO)


class Negotiated(NamedTuple):
    """What a handshake has agreed on for the transmission.

    ``structured``: replies are chunks; ``extended``: so they are, with headers of 64-bit lengths.
    ``contexts``: base:allocation was selected for this export.
    """

    export: str
    structured: bool
    extended: bool
    contexts: bool
    flags: int  # transmission flags that were told
