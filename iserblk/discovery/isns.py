"""iSNS, the name server of storage networks: its messages, and what a client asks (RFC 4171).

A message is one or more PDUs of a 12-byte header and up to 64 KiB of payload:

    0-1  version, 1          4-5  payload length           8-9    TRANSACTION ID
    2-3  FUNCTION ID         6-7  flags                    10-11  SEQUENCE ID, 0 in the first PDU

A payload is attributes, of tag (4 bytes), length (4 bytes, a multiple of 4) and value: in requests
the source (who asks), the message key, a delimiter (tag 0), and the operating attributes; in
responses a status (4 bytes) comes first. Everything received is untrusted: RemoteProtocolError, and
nothing else, is raised for it. No I/O here.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import Portal

VERSION = 1
HEADER = struct.Struct(">HHHHHH")
MAXIMUM_PDU = 0xFFFC
MAXIMUM_MESSAGE = 4 << 20  # bytes of payload, all PDUs together
MAXIMUM_ATTRIBUTES = 65536  # of one message
MAXIMUM_TARGETS = 4096  # whose portals are asked for
MAXIMUM_PORTALS = 256  # of one target
_MAXIMUM_NAME = 223

# Functions; a response has the bit set.
DEV_ATTR_REG = 0x0001
DEV_ATTR_QRY = 0x0002
DEV_DEREG = 0x0004
RESPONSE = 0x8000

CLIENT = 0x8000
SERVER = 0x4000
AUTHENTICATED = 0x2000
LAST = 0x0800
FIRST = 0x0400

# Tags.
DELIMITER = 0
ENTITY_IDENTIFIER = 1
ENTITY_PROTOCOL = 2
PORTAL_ADDRESS = 16
PORTAL_PORT = 17
ISCSI_NAME = 32
ISCSI_NODE_TYPE = 33
GROUP_ISCSI_NAME = 48
GROUP_ADDRESS = 49
GROUP_PORT = 50
GROUP_TAG = 51

PROTOCOL_ISCSI = 2
NODE_TARGET = 1
NODE_INITIATOR = 2
_UDP = 0x10000  # in a portal's port

_STATUS = {
    1: "unknown error",
    2: "message format error",
    3: "invalid registration",
    5: "invalid query",
    6: "the source is unknown to it",
    7: "the source is absent",
    8: "the source is not authorized",
    9: "no such entry",
    10: "version not supported",
    11: "internal error",
    12: "busy",
    13: "option not understood",
    14: "invalid update",
    15: "message not supported",
    20: "ESI not available",
    21: "invalid deregistration",
    22: "registration features not supported",
}

NO_SUCH_ENTRY = 9


def status_words(status: int) -> str:
    return _STATUS.get(status) or f"status {status}"


class Attribute(NamedTuple):
    tag: int
    value: bytes


class Message(NamedTuple):
    """``payload``: of all its PDUs."""

    function: int
    transaction: int
    payload: bytes


def number(tag: int, value: int) -> Attribute:
    return Attribute(tag, struct.pack(">I", value))


def text(tag: int, value: str) -> Attribute:
    raw = value.encode() + b"\0"
    return Attribute(tag, raw + bytes(-len(raw) % 4))


def asked(tag: int) -> Attribute:
    """An operating attribute of a query: its value is wanted."""
    return Attribute(tag, b"")


def encode_attributes(attributes: Iterable[Attribute]) -> bytes:
    return b"".join(struct.pack(">II", tag, len(value)) + value for tag, value in attributes)


def encode_request(function: int, transaction: int, attributes: Iterable[Attribute]) -> bytes:
    payload = encode_attributes(attributes)
    assert len(payload) <= MAXIMUM_PDU  # ours are short
    flags = CLIENT | FIRST | LAST
    return HEADER.pack(VERSION, function, len(payload), flags, transaction, 0) + payload


def _bad(words: str) -> RemoteProtocolError:
    return RemoteProtocolError("iSNS", words)


def attributes_untrusted(payload: bytes) -> list[Attribute]:
    found: list[Attribute] = []
    at = 0
    while at < len(payload):
        if at + 8 > len(payload):
            raise _bad("an attribute is cut off")
        tag, length = struct.unpack_from(">II", payload, at)
        at += 8
        if length % 4 or at + length > len(payload):
            raise _bad(f"attribute {tag} has {length} bytes, of {len(payload) - at}")
        if len(found) == MAXIMUM_ATTRIBUTES:
            raise _bad(f"more than {MAXIMUM_ATTRIBUTES} attributes")
        found.append(Attribute(tag, payload[at : at + length]))
        at += length
    return found


def response_untrusted(message: Message) -> tuple[int, list[Attribute]]:
    """Status and attributes; of a response that is no success no attributes are looked at."""
    if len(message.payload) < 4:
        raise _bad("a response without a status")
    (status,) = struct.unpack_from(">I", message.payload)
    return status, [] if status else attributes_untrusted(message.payload[4:])


class MessageReader:
    """Puts messages together from a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._parts = bytearray()
        self._sequence = 0

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now. Raises RemoteProtocolError: the end of it."""
        self._bytes += data
        return list(self._messages())

    def _messages(self) -> Iterator[Message]:
        while len(self._bytes) >= HEADER.size:
            version, function, length, flags, transaction, sequence = HEADER.unpack_from(
                self._bytes
            )
            if version != VERSION:
                raise _bad(f"version {version}: is this an iSNS server?")
            if flags & AUTHENTICATED:
                raise _bad("authentication is not supported")
            if len(self._bytes) < HEADER.size + length:
                return
            if bool(flags & FIRST) != (sequence == 0) or sequence != self._sequence:
                raise _bad(f"PDU {sequence} of a message, expected {self._sequence}")
            if len(self._parts) + length > MAXIMUM_MESSAGE:
                raise _bad(f"a message of more than {MAXIMUM_MESSAGE} bytes")
            self._parts += self._bytes[HEADER.size : HEADER.size + length]
            del self._bytes[: HEADER.size + length]
            self._sequence += 1
            if flags & LAST:
                payload = bytes(self._parts)
                self._parts.clear()
                self._sequence = 0
                yield Message(function, transaction, payload)


# -- values ----------------------------------------------------------------------------------------


def text_untrusted(attribute: Attribute) -> str:
    try:
        value = attribute.value.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise _bad(f"attribute {attribute.tag} is no UTF-8") from None
    if not value or not value.isprintable() or len(value.encode()) > _MAXIMUM_NAME:
        raise _bad(f"attribute {attribute.tag} is no name")
    return value


def number_untrusted(attribute: Attribute) -> int:
    if len(attribute.value) != 4:
        raise _bad(f"attribute {attribute.tag} has {len(attribute.value)} bytes")
    return int.from_bytes(attribute.value, "big")


def address_untrusted(attribute: Attribute) -> str:
    if len(attribute.value) != 16:
        raise _bad(f"attribute {attribute.tag} is no IP address")
    address = ipaddress.IPv6Address(attribute.value)
    return str(address.ipv4_mapped or address)


# -- what a client asks ----------------------------------------------------------------------------


def registration(initiator: str) -> list[Attribute]:
    """Of an initiator as a node of an entity that the server names. Most servers answer queries of
    registered nodes only."""
    return [
        text(ISCSI_NAME, initiator),
        Attribute(DELIMITER, b""),
        Attribute(ENTITY_IDENTIFIER, b""),
        number(ENTITY_PROTOCOL, PROTOCOL_ISCSI),
        text(ISCSI_NAME, initiator),
        number(ISCSI_NODE_TYPE, NODE_INITIATOR),
    ]


def own_query(initiator: str) -> list[Attribute]:
    """Whether we are registered already: then it is not ours to end that."""
    return [
        text(ISCSI_NAME, initiator),
        text(ISCSI_NAME, initiator),
        Attribute(DELIMITER, b""),
        asked(ISCSI_NAME),
    ]


def names_untrusted(attributes: Iterable[Attribute]) -> list[str]:
    """Of nodes: what is behind the delimiter."""
    return [text_untrusted(each) for each in _operating(attributes) if each.tag == ISCSI_NAME]


def deregistration(initiator: str, entity: str) -> list[Attribute]:
    return [
        text(ISCSI_NAME, initiator),
        Attribute(DELIMITER, b""),
        text(ENTITY_IDENTIFIER, entity),
    ]


def entity_untrusted(attributes: Iterable[Attribute]) -> str:
    """The entity of a registration; "" where the response does not say."""
    for attribute in attributes:
        if attribute.tag == ENTITY_IDENTIFIER and attribute.value:
            return text_untrusted(attribute)
    return ""


def target_query(initiator: str) -> list[Attribute]:
    """Which targets there are."""
    return [
        text(ISCSI_NAME, initiator),
        number(ISCSI_NODE_TYPE, NODE_TARGET),
        Attribute(DELIMITER, b""),
        asked(ISCSI_NAME),
        asked(ISCSI_NODE_TYPE),
    ]


def targets_untrusted(attributes: Iterable[Attribute]) -> list[str]:
    """Names, each once, in the order of the answer."""
    names: dict[str, None] = {}
    name = ""
    for attribute in _operating(attributes):
        if attribute.tag == ISCSI_NAME:
            name = text_untrusted(attribute)
        elif attribute.tag == ISCSI_NODE_TYPE and name:
            if number_untrusted(attribute) & NODE_TARGET:
                names[name] = None
            name = ""
        if len(names) > MAXIMUM_TARGETS:
            raise _bad(f"more than {MAXIMUM_TARGETS} targets")
    return list(names)


def portal_query(initiator: str, target: str) -> list[Attribute]:
    """Where one target is: its portal groups."""
    return [
        text(ISCSI_NAME, initiator),
        text(GROUP_ISCSI_NAME, target),
        Attribute(DELIMITER, b""),
        asked(GROUP_ISCSI_NAME),
        asked(GROUP_ADDRESS),
        asked(GROUP_PORT),
        asked(GROUP_TAG),
    ]


def portals_untrusted(attributes: Iterable[Attribute], target: str) -> list[Portal]:
    """TCP portals of ``target``. One whose tag is missing or null may not be used: that is how iSNS
    says that the target is not there."""
    found: dict[Portal, None] = {}
    name = host = ""
    port = 0
    for attribute in _operating(attributes):
        if attribute.tag == GROUP_ISCSI_NAME:
            name, host, port = text_untrusted(attribute), "", 0
        elif attribute.tag == GROUP_ADDRESS:
            host = address_untrusted(attribute)
        elif attribute.tag == GROUP_PORT:
            port = number_untrusted(attribute)
        elif attribute.tag == GROUP_TAG:
            # iSCSI names are compared without case.
            same = name.lower() == target.lower()
            if same and host and 0 < port < _UDP and attribute.value:
                found[Portal(host, port, number_untrusted(attribute) & 0xFFFF)] = None
            host, port = "", 0
        if len(found) > MAXIMUM_PORTALS:
            raise _bad(f"more than {MAXIMUM_PORTALS} portals of {target}")
    return list(found)


def _operating(attributes: Iterable[Attribute]) -> Iterator[Attribute]:
    """What follows the delimiter; before it the server repeats the message key."""
    behind = False
    for attribute in attributes:
        if behind:
            yield attribute
        behind = behind or attribute.tag == DELIMITER
