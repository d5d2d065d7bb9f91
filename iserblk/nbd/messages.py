"""The messages of the NBD protocol: their numbers and layouts.

Source: the protocol's own document (doc/proto.md of the NBD project) and its extension "extended
headers" (the same document on the branch extension-ext-header). All numbers on the wire are
big-endian.
"""

from __future__ import annotations

import errno
import struct
from enum import IntEnum
from typing import NamedTuple

from iserblk.errors import IserblkError

# --- handshake -----------------------------------------------------------------------------------

# NBDMAGIC, IHAVEOPT, handshake flags (16 bits): the first that a server says.
GREETING = struct.Struct(">8s8sH")
MAGIC = b"NBDMAGIC"
OPTION_MAGIC = b"IHAVEOPT"
FIXED_NEWSTYLE = 1 << 0  # flags of both ends
NO_ZEROES = 1 << 1
CLIENT_FLAGS = struct.Struct(">I")

OPTION = struct.Struct(">8sII")  # IHAVEOPT, option, length of its data
OPTION_REPLY = struct.Struct(">QIII")  # magic, option, type of the reply, length of its data
OPTION_REPLY_MAGIC = 0x3E889045565A9
EXPORT_NAME_REPLY = struct.Struct(">QH")  # size, transmission flags
EXPORT_NAME_ZEROES = 124  # behind it, unless both ends have NO_ZEROES

MOST_STRING = 4096  # bytes of any string of the protocol


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


REP_ACK = 1
REP_SERVER = 2
REP_INFO = 3
REP_META_CONTEXT = 4
_ERROR = 1 << 31
REP_ERR_UNSUP = _ERROR | 1
REP_ERR_POLICY = _ERROR | 2
REP_ERR_INVALID = _ERROR | 3
REP_ERR_PLATFORM = _ERROR | 4
REP_ERR_TLS_REQD = _ERROR | 5
REP_ERR_UNKNOWN = _ERROR | 6
REP_ERR_SHUTDOWN = _ERROR | 7
REP_ERR_BLOCK_SIZE_REQD = _ERROR | 8
REP_ERR_TOO_BIG = _ERROR | 9
REP_ERR_EXT_HEADER_REQD = _ERROR | 10

INFO_EXPORT = 0
INFO_NAME = 1
INFO_DESCRIPTION = 2
INFO_BLOCK_SIZE = 3
INFO = struct.Struct(">H")  # its type, in front of each
INFO_EXPORT_DATA = struct.Struct(">HQH")  # type, size, transmission flags
INFO_BLOCK_SIZE_DATA = struct.Struct(">HIII")  # type; minimum, preferred, largest payload

BASE_ALLOCATION = "base:allocation"
BASE = "base:"
ALLOCATION_ID = 1  # of base:allocation, as its context ID

# Transmission flags: what an export can do.
HAS_FLAGS = 1 << 0
READ_ONLY = 1 << 1
SEND_FLUSH = 1 << 2
SEND_FUA = 1 << 3
ROTATIONAL = 1 << 4
SEND_TRIM = 1 << 5
SEND_WRITE_ZEROES = 1 << 6
SEND_DF = 1 << 7
CAN_MULTI_CONN = 1 << 8
SEND_CACHE = 1 << 10
SEND_FAST_ZERO = 1 << 11
BLOCK_STATUS_PAYLOAD = 1 << 12

# --- transmission --------------------------------------------------------------------------------

# magic, flags, command, cookie, offset, length
REQUEST = struct.Struct(">IHHQQI")
REQUEST_MAGIC = 0x25609513
EXTENDED_REQUEST = struct.Struct(">IHHQQQ")
EXTENDED_REQUEST_MAGIC = 0x21E41C71

SIMPLE_REPLY = struct.Struct(">IIQ")  # magic, error, cookie
SIMPLE_REPLY_MAGIC = 0x67446698
CHUNK = struct.Struct(">IHHQI")  # magic, flags, type, cookie, length of the payload
CHUNK_MAGIC = 0x668E33EF
EXTENDED_CHUNK = struct.Struct(">IHHQQQ")  # magic, flags, type, cookie, offset of request, length
EXTENDED_CHUNK_MAGIC = 0x6E8A278C
DATA_CHUNK = struct.Struct(">IHHQIQ")  # a chunk of data: its header, and the offset of the data
EXTENDED_DATA_CHUNK = struct.Struct(">IHHQQQQ")
DATA_OFFSET = 8  # bytes of the payload of a chunk of data that are no data

READ = 0
WRITE = 1
DISC = 2
FLUSH = 3
TRIM = 4
CACHE = 5
WRITE_ZEROES = 6
BLOCK_STATUS = 7

FLAG_FUA = 1 << 0
FLAG_NO_HOLE = 1 << 1
FLAG_DF = 1 << 2
FLAG_REQ_ONE = 1 << 3
FLAG_FAST_ZERO = 1 << 4
FLAG_PAYLOAD_LEN = 1 << 5  # extended headers: the length is that of the payload

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

REPLY_DONE = 1 << 0
TYPE_NONE = 0
TYPE_OFFSET_DATA = 1
TYPE_BLOCK_STATUS = 5
TYPE_BLOCK_STATUS_EXT = 6
TYPE_ERROR = 1 << 15 | 1
ERROR_DATA = struct.Struct(">IH")  # error, length of the text behind it
CONTEXT_ID = struct.Struct(">I")
EXTENT = struct.Struct(">II")  # length, flags of the context
EXTENDED_CONTEXT = struct.Struct(">II")  # context ID, number of extents
EXTENDED_EXTENT = struct.Struct(">QQ")
# The payload of a BLOCK_STATUS request with FLAG_PAYLOAD_LEN: length, then IDs of contexts.
STATUS_PAYLOAD = struct.Struct(">Q")

MOST_PAYLOAD = 32 << 20  # bytes that clients may send or ask for without having asked the server
PREFERRED = 4096
MOST_EXTENTS = 1 << 12  # of one answer

EPERM = 1
EIO = 5
ENOMEM = 12
EINVAL = 22
ENOSPC = 28
EOVERFLOW = 75
ENOTSUP = 95
ESHUTDOWN = 108

_ERRORS = {
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
