"""What two servers of one device say to each other, when one takes over the kernel's connections
from the other; without I/O.

    successor                              server
    HELLO                        →
                                           answers what has begun, and has the target flush
                                 ←         LOSSES
                                 ←         CONNECTION, with the socket as SCM_RIGHTS; for each
                                 ←         BYTES, as many as the connection has announced
                                 ←         ALL
    TAKEN                        →
    serves                                 ends

Or REFUSED in place of LOSSES: then the server goes on as before. It does so, too,
when TAKEN does not come. A message is a packet (SOCK_SEQPACKET), and begins in all versions alike:

    0  magic ``iserblkN``      8  version, 2 bytes      10  kind, 2 bytes      12  data

LOSSES: how often the LUN has lost writes, and of how many of these the kernel was told, 8 bytes
each. It comes again, between any two messages, when the server hears of one more, as by a deferred
error, until it has logged out; behind ALL only the first number counts. Version 1 has no LOSSES. A
server speaks the version of the HELLO; to a successor that has only version 1 it hands over only
while there is no loss to tell. A successor begins with its own version; to a server that refuses
that in version 1 it says HELLO again, in version 1.

REFUSED is the same in all versions: 1 byte, 1 where the successor may have the server end instead;
and a text in UTF-8. CONNECTION: modes (bit 0 structured replies, 1 extended headers, 2 metadata
contexts), transmission flags, 2 bytes each, and the number of bytes to come, 4 bytes. ALL: how many
connections there were, 2 bytes. Numbers are big-endian.

What comes is untrusted: ``decode_untrusted``, ``more_losses_untrusted`` and
``Takeover.receive_untrusted`` raise RemoteProtocolError and nothing else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from iserblk.disk.seam import LossCount
from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.nbd.buffers import INTAKE
from iserblk.nbd.messages import Negotiated

VERSION = 2
WITHOUT_LOSSES = 1  # the version
MOST = 16 << 10  # bytes of a packet
MOST_CONNECTIONS = 64

_HEADER = struct.Struct(">8sHH")
_MAGIC = b"iserblkN"
_CONNECTION = struct.Struct(">HHI")
_ALL = struct.Struct(">H")
_LOSSES = struct.Struct(">QQ")
_STRUCTURED, _EXTENDED, _CONTEXTS = 1, 2, 4
_MOST_TEXT = 500  # bytes
_NAME = "hand-over"  # of the protocol, in errors


class Kind(IntEnum):
    """Of a message."""

    HELLO = 1
    REFUSED = 2
    CONNECTION = 3
    BYTES = 4
    ALL = 5
    TAKEN = 6
    LOSSES = 7


class State(StrEnum):
    """Of the server that is asked."""

    SERVING = "serving"
    DRAINING = "answering what has begun"
    OFFERED = "offered"
    GIVEN = "given"


class Event(StrEnum):
    """What changes the state."""

    ASKED = "HELLO"
    STILL = "nothing is under way, and everything is flushed"
    TAKEN = "TAKEN"
    KEPT = "refused, or the successor is late or gone"


TABLE: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.SERVING, Event.ASKED): State.DRAINING,
        (State.DRAINING, Event.STILL): State.OFFERED,
        (State.DRAINING, Event.KEPT): State.SERVING,
        (State.OFFERED, Event.TAKEN): State.GIVEN,
        (State.OFFERED, Event.KEPT): State.SERVING,
    }
)


class Refused(IserblkError):
    """The server keeps its connections. ``may_end``: it can be told to end instead."""

    def __init__(self, text: str, may_end: bool) -> None:
        super().__init__(text)
        self.may_end = may_end


class Message(NamedTuple):
    """``data``: what is behind the header."""

    version: int
    kind: int
    data: bytes


class Given(NamedTuple):
    """A connection; its socket comes beside it. ``unparsed``: as of ``client.PausedConnection``."""

    negotiated: Negotiated
    unparsed: bytes


def encode(kind: Kind, data: bytes = b"", version: int = VERSION) -> bytes:
    return _HEADER.pack(_MAGIC, version, kind) + data


def encode_refused(text: str, may_end: bool, version: int = VERSION) -> bytes:
    words = text.encode()[:_MOST_TEXT].decode(errors="ignore").encode()
    return encode(Kind.REFUSED, bytes((may_end,)) + words, version)


def encode_losses(count: LossCount) -> bytes:
    return encode(Kind.LOSSES, _LOSSES.pack(*count))


def encode_connection(given: Given, version: int = VERSION) -> Iterator[bytes]:
    """The messages of a connection. The socket goes with the first one."""
    agreed = given.negotiated
    modes = agreed.structured * _STRUCTURED | agreed.extended * _EXTENDED
    modes |= agreed.contexts * _CONTEXTS
    unparsed = given.unparsed
    yield encode(Kind.CONNECTION, _CONNECTION.pack(modes, agreed.flags, len(unparsed)), version)
    step = MOST - _HEADER.size
    for at in range(0, len(unparsed), step):
        yield encode(Kind.BYTES, unparsed[at : at + step], version)


def encode_all(count: int, version: int = VERSION) -> bytes:
    return encode(Kind.ALL, _ALL.pack(count), version)


def decode_untrusted(packet: bytes) -> Message:
    if len(packet) < _HEADER.size or len(packet) > MOST:
        raise RemoteProtocolError(_NAME, f"a message of {len(packet)} bytes")
    magic, version, kind = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise RemoteProtocolError(_NAME, "not a server of iserblk")
    return Message(version, kind, packet[_HEADER.size :])


def hello_untrusted(packet: bytes) -> int:
    """``packet`` is a HELLO; returns its version. Raises Refused for one that is not known: that is
    no breach."""
    message = decode_untrusted(packet)
    if not WITHOUT_LOSSES <= message.version <= VERSION:
        raise Refused(_of_version(message.version), True)
    _expect(message, Kind.HELLO)
    return message.version


def expect_untrusted(packet: bytes, kind: Kind, version: int = VERSION) -> None:
    """``packet`` is a message of this kind, without data. Raises Refused where it has another
    version than the HELLO: that is no breach."""
    message = decode_untrusted(packet)
    if message.version != version:
        raise Refused(_of_version(message.version), True)
    _expect(message, kind)


def _expect(message: Message, kind: Kind) -> None:
    if message.kind != kind or message.data:
        raise RemoteProtocolError(_NAME, f"message {message.kind} in place of {kind.name}")


def _of_version(version: int) -> str:
    return f"it hands over in version {version}, and not {VERSION}"


def more_losses_untrusted(packet: bytes, known: int) -> int:
    """``packet`` is LOSSES that came behind ALL: how many there are beside the ``known`` ones."""
    message = decode_untrusted(packet)
    if message.kind != Kind.LOSSES or len(message.data) != _LOSSES.size:
        raise RemoteProtocolError(_NAME, f"message {message.kind} behind {Kind.ALL.name}")
    return max(0, LossCount(*_LOSSES.unpack(message.data)).losses - known)


class OlderServer(IserblkError):
    """The server has only version 1: say HELLO in that."""


class Takeover:
    """The successor's side, which has said HELLO in ``version``. ``given``: the connections, once
    they are ``complete``; the first belongs to the first descriptor. ``losses``: of the LUN."""

    def __init__(self, version: int = VERSION) -> None:
        self.given: list[Given] = []
        self.complete = False
        self.losses = LossCount()
        self._version = version
        self._counted = version == WITHOUT_LOSSES
        self._agreed: Negotiated | None = None
        self._left = 0  # bytes to come
        self._bytes = b""

    def receive_untrusted(self, packet: bytes, descriptors: int) -> None:
        """One packet, and the number of descriptors that came with it. Raises also Refused and
        OlderServer."""
        message = decode_untrusted(packet)
        kind, data = message.kind, message.data
        if kind == Kind.REFUSED and not self.given and self._agreed is None:
            if message.version == WITHOUT_LOSSES != self._version:
                raise OlderServer(_of_version(message.version))
            if not data:
                raise RemoteProtocolError(_NAME, "a refusal without a reason")
            words = data[1:].decode(errors="replace")
            text = "".join(each if each.isprintable() else "?" for each in words)
            raise Refused(text or "it does not say why", data[0] == 1)
        if message.version != self._version:
            raise Refused(_of_version(message.version), True)
        if self.complete or descriptors != (kind == Kind.CONNECTION):
            raise RemoteProtocolError(_NAME, f"message {kind} with {descriptors} descriptors")
        if kind == Kind.LOSSES and self._version != WITHOUT_LOSSES and len(data) == _LOSSES.size:
            self._counted = True
            losses, told = _LOSSES.unpack(data)
            self.losses = LossCount(max(losses, self.losses.losses), told)
            if told > losses:
                raise RemoteProtocolError(_NAME, "more losses were told than there were")
        elif kind == Kind.CONNECTION and self._counted and not self._left:
            self._begin(data)
        elif kind == Kind.BYTES and 0 < len(data) <= self._left:
            self._left -= len(data)
            self._bytes += data
        elif kind == Kind.ALL and not self._left and len(data) == _ALL.size:
            self._end(*_ALL.unpack(data))
        else:
            raise RemoteProtocolError(_NAME, f"message {kind} of {len(data)} bytes, out of place")

    def _begin(self, data: bytes) -> None:
        self._finish()
        if len(data) != _CONNECTION.size:
            raise RemoteProtocolError(_NAME, f"a connection in {len(data)} bytes")
        modes, flags, self._left = _CONNECTION.unpack(data)
        structured, extended = modes & _STRUCTURED != 0, modes & _EXTENDED != 0
        contexts = modes & _CONTEXTS != 0
        known = modes <= _STRUCTURED | _EXTENDED | _CONTEXTS
        if not known or ((extended or contexts) and not structured):
            raise RemoteProtocolError(_NAME, f"a connection with modes {modes:#x}")
        if self._left > INTAKE or len(self.given) == MOST_CONNECTIONS:
            raise RemoteProtocolError(_NAME, "more than a server has")
        self._agreed = Negotiated("", structured, extended, contexts, flags)

    def _finish(self) -> None:
        if self._agreed is not None:
            self.given.append(Given(self._agreed, self._bytes))
            self._agreed, self._bytes = None, b""

    def _end(self, count: int) -> None:
        self._finish()
        if count != len(self.given) or not count:
            raise RemoteProtocolError(_NAME, f"{len(self.given)} connections in place of {count}")
        self.complete = True
