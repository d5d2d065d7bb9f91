"""The greeting of both ends: Hello and HelloReply (RFC 7145 sections 5.1.3, 9.3, 9.4, 10.1.3).

      Hello                         HelloReply
0     opcode 2 | reserved (4 bits)  opcode 3 | reserved (3 bits) | REJ 0x01
1     MaxVer | MinVer               MaxVer | CurVer
2-3   iSER-IRD                      iSER-ORD
4-    reserved, to the end of the header

Each of them is a header and nothing else: 28 bytes, or 12 with the header of RFC 5046, whose
sections 5.1.3, 9.3 and 9.4 say the same. No PDU follows, and neither counts as an unexpected PDU.

The initiator declares how many RDMA Reads it takes at a time, its iSER-IRD. The target takes the
minimum of that and of its own depth as its iSER-ORD, and declares that. It rejects an initiator
that takes RDMA Reads where it can make none itself, and one whose versions it does not know.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from iserblk.datamover.iser import HEADER_LENGTH, HELLO, HELLO_REPLY, ZERO_BASED_LENGTH
from iserblk.errors import RemoteProtocolError

REJ: Final = 0x01
LAYOUT: Final = struct.Struct(">BBH")
MOST: Final = 0xFFFF  # what iSER-IRD and iSER-ORD can say


class Form(NamedTuple):
    """A specification's form of the two messages. ``length``: bytes of a header. ``version``: what
    is sent as MaxVer, MinVer and CurVer. ``known``: the versions that a peer may speak.
    ``without_key``: the Hello is required where login has not declared iSERHelloRequired."""

    length: int
    version: int
    known: tuple[int, ...]
    without_key: bool


# The figures of appendix B of RFC 7145 have version 1, its text has 10: a peer may send either.
RFC_7145: Final = Form(HEADER_LENGTH, 10, (10, 1), False)
# RFC 5046 has no such key: its connections always begin with a Hello.
RFC_5046: Final = Form(ZERO_BASED_LENGTH, 1, (1,), True)


class Hello(NamedTuple):
    """The first message of an initiator. ``ird``: RDMA Reads that it takes at a time."""

    max_version: int
    min_version: int
    ird: int

    def pack(self, length: int) -> bytes:
        """The message, ``length`` bytes."""
        return _pack(HELLO, self.max_version, self.min_version, self.ird, length)

    @classmethod
    def unpack_untrusted(cls, message: memoryview | bytes, length: int) -> Hello:
        """Raises RemoteProtocolError where ``message`` has not exactly ``length`` bytes, or is no
        Hello, or its smallest version is above its largest."""
        _, *fields = _unpack(message, length, HELLO, "Hello")
        hello = cls(*fields)
        if hello.min_version > hello.max_version:
            raise RemoteProtocolError(
                "iSER", f"a Hello of versions {hello.min_version} to {hello.max_version}"
            )
        return hello


class HelloReply(NamedTuple):
    """The first message of a target. ``rejected``: REJ, the target ends the connection. ``ord``:
    RDMA Reads that it makes at a time."""

    rejected: bool
    max_version: int
    version: int
    ord: int

    def pack(self, length: int) -> bytes:
        """The message, ``length`` bytes."""
        first = HELLO_REPLY | REJ if self.rejected else HELLO_REPLY
        return _pack(first, self.max_version, self.version, self.ord, length)

    @classmethod
    def unpack_untrusted(cls, message: memoryview | bytes, length: int) -> HelloReply:
        """Raises RemoteProtocolError where ``message`` has not exactly ``length`` bytes, or is no
        HelloReply, or its version is above its largest."""
        first, *fields = _unpack(message, length, HELLO_REPLY, "HelloReply")
        reply = cls(bool(first & REJ), *fields)
        if reply.version > reply.max_version:
            raise RemoteProtocolError(
                "iSER", f"a HelloReply of version {reply.version}, above {reply.max_version}"
            )
        return reply


def _pack(first: int, high: int, low: int, depth: int, length: int) -> bytes:
    return LAYOUT.pack(first, high << 4 | low, depth).ljust(length, b"\0")


def _unpack(
    message: memoryview | bytes, length: int, opcode: int, name: str
) -> tuple[int, int, int, int]:
    if len(message) != length:
        raise RemoteProtocolError("iSER", f"a {name} of {len(message)} bytes, not {length}")
    first, versions, depth = LAYOUT.unpack_from(message)
    if first & 0xF0 != opcode:
        raise RemoteProtocolError("iSER", f"opcode {first >> 4} where {name} is due")
    return first, versions >> 4, versions & 0x0F, depth


def greeting(form: Form, ird: int) -> Hello:
    """The Hello of an initiator that takes ``ird`` RDMA Reads at a time."""
    return Hello(form.version, form.version, min(ird, MOST))


def answer(form: Form, hello: Hello, ord: int) -> HelloReply:
    """The reply of a target that makes ``ord`` RDMA Reads at a time, at most (section 10.1.3.2)."""
    known = any(hello.min_version <= each <= hello.max_version for each in form.known)
    rejected = not known or (hello.ird > 0 and ord == 0)
    return HelloReply(rejected, form.version, form.version, min(ord, hello.ird))


def check_reply_untrusted(form: Form, hello: Hello, reply: HelloReply) -> None:
    """Check what a target answered to our ``hello``. Raises RemoteProtocolError when it rejects the
    connection, and for what does not follow from the Hello."""
    if reply.rejected:
        raise RemoteProtocolError(
            "iSER",
            f"the target rejects this connection (REJ in its HelloReply): it speaks version "
            f"{reply.version}, we speak {form.version}; it makes {reply.ord} RDMA Reads at a time, "
            f"we take {hello.ird}",
        )
    if reply.version not in form.known:
        raise RemoteProtocolError(
            "iSER", f"a HelloReply of version {reply.version}, we speak {form.version}"
        )
    if reply.ord > hello.ird:
        raise RemoteProtocolError(
            "iSER", f"the target wants {reply.ord} RDMA Reads at a time, we declared {hello.ird}"
        )
    if hello.ird and not reply.ord:
        raise RemoteProtocolError("iSER", "the target makes no RDMA Reads, and did not say REJ")
