"""Layouts and numbers of NBD against bytes written down from the protocol's document; sections are
those of doc/proto.md, "ext" those of its branch extension-ext-header."""

from __future__ import annotations

import errno
import struct

import pytest

from iserblk import errors
from iserblk.nbd import messages as nbd
from tests.nbd import conversation

GOLDEN: list[tuple[str, struct.Struct, tuple[object, ...], str]] = [
    (
        "Newstyle negotiation: S, with both handshake flags",
        nbd.GREETING,
        (nbd.MAGIC, nbd.OPTION_MAGIC, nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES),
        "4e42444d41474943 49484156454f5054 0003",
    ),
    (
        "Newstyle negotiation: C",
        nbd.CLIENT_FLAGS,
        (nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES,),
        "00000003",
    ),
    (
        "Newstyle negotiation: an option, GO with 6 bytes",
        nbd.OPTION,
        (nbd.OPTION_MAGIC, nbd.Option.GO, 6),
        "49484156454f5054 00000007 00000006",
    ),
    (
        "Newstyle negotiation: the reply to EXPORT_NAME",
        nbd.EXPORT_NAME_REPLY,
        (1 << 40, nbd.HAS_FLAGS | nbd.SEND_FLUSH),
        "0000010000000000 0005",
    ),
    (
        "Fixed newstyle negotiation: a reply, ERR_UNSUP of option 99",
        nbd.OPTION_REPLY,
        (nbd.OPTION_REPLY_MAGIC, 99, nbd.REP_ERR_UNSUP, 0),
        "0003e889045565a9 00000063 80000001 00000000",
    ),
    (
        "Option reply types: INFO_EXPORT",
        nbd.INFO_EXPORT_DATA,
        (nbd.INFO_EXPORT, 4096, nbd.HAS_FLAGS | nbd.READ_ONLY),
        "0000 0000000000001000 0003",
    ),
    (
        "Option reply types: INFO_BLOCK_SIZE",
        nbd.INFO_BLOCK_SIZE_DATA,
        (nbd.INFO_BLOCK_SIZE, 1, nbd.PREFERRED, nbd.MOST_PAYLOAD),
        "0003 00000001 00001000 02000000",
    ),
    (
        "Request message: WRITE with FUA",
        nbd.REQUEST,
        (nbd.REQUEST_MAGIC, nbd.FLAG_FUA, nbd.WRITE, 0x0102030405060708, 1 << 33, 512),
        "25609513 0001 0001 0102030405060708 0000000200000000 00000200",
    ),
    (
        "ext, Request message: BLOCK_STATUS of 2^40 bytes",
        nbd.EXTENDED_REQUEST,
        (nbd.EXTENDED_REQUEST_MAGIC, nbd.FLAG_REQ_ONE, nbd.BLOCK_STATUS, 7, 512, 1 << 40),
        "21e41c71 0008 0007 0000000000000007 0000000000000200 0000010000000000",
    ),
    (
        "Simple reply message: ENOSPC",
        nbd.SIMPLE_REPLY,
        (nbd.SIMPLE_REPLY_MAGIC, nbd.ENOSPC, 7),
        "67446698 0000001c 0000000000000007",
    ),
    (
        "Structured reply chunk message: NONE",
        nbd.CHUNK,
        (nbd.CHUNK_MAGIC, nbd.REPLY_DONE, nbd.TYPE_NONE, 7, 0),
        "668e33ef 0001 0000 0000000000000007 00000000",
    ),
    (
        "Structured reply types: OFFSET_DATA of 4096 bytes at 2^33",
        nbd.DATA_CHUNK,
        (nbd.CHUNK_MAGIC, nbd.REPLY_DONE, nbd.TYPE_OFFSET_DATA, 7, 4104, 1 << 33),
        "668e33ef 0001 0001 0000000000000007 00001008 0000000200000000",
    ),
    (
        "ext, Extended reply chunk message: ERROR with 6 bytes",
        nbd.EXTENDED_CHUNK,
        (nbd.EXTENDED_CHUNK_MAGIC, nbd.REPLY_DONE, nbd.TYPE_ERROR, 7, 1 << 33, 6),
        "6e8a278c 0001 8001 0000000000000007 0000000200000000 0000000000000006",
    ),
    (
        "ext, OFFSET_DATA behind an extended header",
        nbd.EXTENDED_DATA_CHUNK,
        (nbd.EXTENDED_CHUNK_MAGIC, nbd.REPLY_DONE, nbd.TYPE_OFFSET_DATA, 7, 512, 520, 512),
        "6e8a278c 0001 0001 0000000000000007 0000000000000200 0000000000000208 0000000000000200",
    ),
    ("Structured reply types: ERROR", nbd.ERROR_DATA, (nbd.EINVAL, 3), "00000016 0003"),
    ("Structured reply types: BLOCK_STATUS, its context", nbd.CONTEXT_ID, (1,), "00000001"),
    (
        "Structured reply types: BLOCK_STATUS, a descriptor: a hole of zeroes",
        nbd.EXTENT,
        (65536, 3),
        "00010000 00000003",
    ),
    ("ext, BLOCK_STATUS_EXT, its head", nbd.EXTENDED_CONTEXT, (1, 2), "00000001 00000002"),
    (
        "ext, BLOCK_STATUS_EXT, a descriptor",
        nbd.EXTENDED_EXTENT,
        (1 << 40, 3),
        "0000010000000000 0000000000000003",
    ),
    ("ext, BLOCK_STATUS with data: its length", nbd.STATUS_PAYLOAD, (512,), "0000000000000200"),
]


@pytest.mark.parametrize(
    ("layout", "values", "golden"), [row[1:] for row in GOLDEN], ids=[row[0] for row in GOLDEN]
)
def test_golden_bytes(layout: struct.Struct, values: tuple[object, ...], golden: str) -> None:
    assert layout.pack(*values) == bytes.fromhex(golden)
    assert layout.unpack(bytes.fromhex(golden)) == values


def test_numbers_of_options_and_replies() -> None:
    """Sections "Option types" and "Option reply types"."""
    named = {each.name: each.value for each in nbd.Option}
    assert named == {
        name: getattr(conversation, name)
        for name in (
            *("EXPORT_NAME", "ABORT", "LIST", "STARTTLS", "INFO", "GO", "STRUCTURED_REPLY"),
            *("LIST_META_CONTEXT", "SET_META_CONTEXT", "EXTENDED_HEADERS"),
        )
    }
    for name in (
        *("UNSUP", "POLICY", "INVALID", "PLATFORM", "TLS_REQD", "UNKNOWN", "SHUTDOWN"),
        *("BLOCK_SIZE_REQD", "TOO_BIG", "EXT_HEADER_REQD"),
    ):
        assert getattr(nbd, f"REP_ERR_{name}") == getattr(conversation, name)
    assert nbd.REP_ERR_EXT_HEADER_REQD == 0x8000000A


def test_transmission_flags() -> None:
    """Section "Transmission flags"; bit 9 is that of an extension that is not supported."""
    flags = (
        *(nbd.HAS_FLAGS, nbd.READ_ONLY, nbd.SEND_FLUSH, nbd.SEND_FUA, nbd.ROTATIONAL),
        *(nbd.SEND_TRIM, nbd.SEND_WRITE_ZEROES, nbd.SEND_DF, nbd.CAN_MULTI_CONN, 1 << 9),
        *(nbd.SEND_CACHE, nbd.SEND_FAST_ZERO, nbd.BLOCK_STATUS_PAYLOAD),
    )
    assert flags == tuple(1 << bit for bit in range(13))


def test_flags_of_commands() -> None:
    """Section "Command flags": FUA goes with every command."""
    assert list(nbd.FLAGS) == [
        *(conversation.READ, conversation.WRITE, conversation.DISC, conversation.FLUSH),
        *(conversation.TRIM, conversation.CACHE, conversation.WRITE_ZEROES),
        conversation.BLOCK_STATUS,
    ]
    more = {command: flags & ~1 for command, flags in nbd.FLAGS.items() if flags != 1}
    assert all(flags & 1 for flags in nbd.FLAGS.values())
    assert more == {nbd.READ: 0x4, nbd.WRITE_ZEROES: 0x12, nbd.BLOCK_STATUS: 0x8}
    assert nbd.FLAG_PAYLOAD_LEN == 0x20


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (errors.OutOfRange("x"), 22),
        (errors.BadArgument("x"), 22),
        (errors.WriteProtected("x"), 1),
        (errors.NotSupported("x"), 95),
        (errors.ConnectionLost("x"), 5),
        (errors.CommandTimeout("x"), 5),
        (errors.RemoteProtocolError("iSCSI", "x"), 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_are_those_of_the_protocol(error: errors.IserblkError, number: int) -> None:
    assert nbd.error_of(error) == number


def test_every_error_becomes_one_that_the_protocol_has() -> None:
    """Section "Error values": no other number is allowed."""
    allowed = {1, 5, 12, 22, 28, 75, 95, 108}
    for number in errno.errorcode:
        error = errors.IserblkError("x")
        error.errno = number
        assert nbd.error_of(error) in allowed
    for number in (errno.EDQUOT, errno.EFBIG):
        error.errno = number
        assert nbd.error_of(error) == 28


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ("", b""),
        ("lün", b"l\xc3\xbcn"),
        ("a\0b", b"a?b"),
        ("\udcff", b"?"),
        ("x" * 4096, b"x" * 4096),
        ("x" * 4097, b"x" * 4096),
        ("x" * 4095 + "ü", b"x" * 4095),
    ],
    ids=["empty", "UTF-8", "NUL", "no character", "longest", "too long", "cut before a character"],
)
def test_strings(text: str, data: bytes) -> None:
    """Section "Conventions", on strings: UTF-8, no NUL, at most 4096 bytes."""
    assert nbd.string(text) == data
