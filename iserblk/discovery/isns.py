"""Messages of iSNS, the name server of storage networks, and its clients' requests (RFC 4171).

A message is one or more PDUs, each with a 12-byte header and up to 64 KiB of payload:

    0-1  version, 1          4-5  payload length           8-9    TRANSACTION ID
    2-3  FUNCTION ID         6-7  flags                    10-11  SEQUENCE ID, 0 in the first PDU

A payload is a list of attributes: tag (4 bytes), length (4 bytes, a multiple of 4) and value. A
request has the source (the node that asks), the message key, a delimiter (tag 0), and the
operating attributes. A response has a status (4 bytes) before its attributes. Everything received
is untrusted: only RemoteProtocolError is raised for it. No I/O here.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import Portal
from iserblk.names import may_name

VERSION = 1
HEADER = struct.Struct(">HHHHHH")
MAXIMUM_PDU = 0xFFFC
MAXIMUM_MESSAGE = 4 << 20  # bytes of payload, all PDUs together
MAXIMUM_ATTRIBUTES = 65536  # in one message
MAXIMUM_TARGETS = 4096  # in one answer
MAXIMUM_PORTALS = 256  # of one target

# Functions; in a response, the bit RESPONSE is set as well.
DEV_ATTR_REG = 0x0001
DEV_ATTR_QRY = 0x0002
DEV_DEREG = 0x0004
RESPONSE = 0x8000

CLIENT = 0x8000
SERVER = 0x4000
AUTHENTICATED = 0x2000
REPLACE = 0x1000  # of a registration: it takes the place of what is registered
LAST = 0x0800
FIRST = 0x0400

# Tags.
DELIMITER = 0
ENTITY_IDENTIFIER = 1
ENTITY_PROTOCOL = 2
REGISTRATION_PERIOD = 6
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
_UDP = 0x10000  # a bit in a portal's port

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
    """One message. ``payload``: that of all its PDUs."""

    function: int
    transaction: int
    payload: bytes


def number(tag: int, value: int) -> Attribute:
    return Attribute(tag, struct.pack(">I", value))


def text(tag: int, value: str) -> Attribute:
    raw = value.encode() + b"\0"
    return Attribute(tag, raw + bytes(-len(raw) % 4))


def asked(tag: int) -> Attribute:
    """An operating attribute of a query: it asks for the value of ``tag``."""
    return Attribute(tag, b"")


def encode_attributes(attributes: Iterable[Attribute]) -> bytes:
    return b"".join(struct.pack(">II", tag, len(value)) + value for tag, value in attributes)


def address(tag: int, host: str) -> Attribute:
    """``host``: an IP address. IPv4 addresses travel as IPv6 addresses (section 6.3.1)."""
    parsed = ipaddress.ip_address(host)
    mapped = bytes(10) + b"\xff\xff" if parsed.version == 4 else b""
    return Attribute(tag, mapped + parsed.packed)


def encode_request(
    function: int, transaction: int, attributes: Iterable[Attribute], flags: int = 0
) -> bytes:
    """One message, in as many PDUs as it needs. ``flags``: REPLACE, or none."""
    payload = encode_attributes(attributes)
    parts = [payload[at : at + MAXIMUM_PDU] for at in range(0, len(payload), MAXIMUM_PDU)] or [b""]
    pdus = []
    for sequence, part in enumerate(parts):
        place = (0 if sequence else FIRST) | (LAST if sequence == len(parts) - 1 else 0)
        header = HEADER.pack(
            VERSION, function, len(part), CLIENT | flags | place, transaction, sequence
        )
        pdus.append(header + part)
    return b"".join(pdus)


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
            raise _bad(f"attribute {tag} of {length} bytes, but {len(payload) - at} bytes are left")
        if len(found) == MAXIMUM_ATTRIBUTES:
            raise _bad(f"more than {MAXIMUM_ATTRIBUTES} attributes")
        found.append(Attribute(tag, payload[at : at + length]))
        at += length
    return found


def response_untrusted(message: Message) -> tuple[int, list[Attribute]]:
    """Status and attributes of a response; no attributes unless the status is 0 (success)."""
    if len(message.payload) < 4:
        raise _bad("a response without a status")
    (status,) = struct.unpack_from(">I", message.payload)
    return status, [] if status else attributes_untrusted(message.payload[4:])


class MessageReader:
    """Assembles messages from a stream of bytes, which may come in pieces of any length."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._parts = bytearray()
        self._sequence = 0

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes. Returns the messages that are complete now. Raises RemoteProtocolError; the
        reader is unusable then."""
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
        raise _bad(f"attribute {attribute.tag} is not UTF-8") from None
    if not may_name(value):
        raise _bad(f"attribute {attribute.tag} is no name")
    return value


def number_untrusted(attribute: Attribute) -> int:
    if len(attribute.value) != 4:
        raise _bad(f"attribute {attribute.tag} has {len(attribute.value)} bytes instead of 4")
    return int.from_bytes(attribute.value, "big")


def address_untrusted(attribute: Attribute) -> str:
    if len(attribute.value) != 16:
        raise _bad(f"attribute {attribute.tag} is no IP address")
    address = ipaddress.IPv6Address(attribute.value)
    return str(address.ipv4_mapped or address)


# -- what a target says ----------------------------------------------------------------------------


def target_registration(
    target: str, entity: str, portals: Iterable[Portal], period_s: int
) -> list[Attribute]:
    """Registers a target, with its portals and their groups, as the only node of ``entity``.
    ``portals``: hosts are IP addresses. ``period_s``: after so many seconds without a message the
    server forgets the entity; the response has the value that holds."""
    found = list(portals)
    attributes = [
        text(ISCSI_NAME, target),
        text(ENTITY_IDENTIFIER, entity),
        Attribute(DELIMITER, b""),
        text(ENTITY_IDENTIFIER, entity),
        number(ENTITY_PROTOCOL, PROTOCOL_ISCSI),
        number(REGISTRATION_PERIOD, period_s),
    ]
    for each in found:
        attributes += [address(PORTAL_ADDRESS, each.host), number(PORTAL_PORT, each.port)]
    attributes += [text(ISCSI_NAME, target), number(ISCSI_NODE_TYPE, NODE_TARGET)]
    for each in found:
        attributes += [
            text(GROUP_ISCSI_NAME, target),
            address(GROUP_ADDRESS, each.host),
            number(GROUP_PORT, each.port),
            number(GROUP_TAG, each.tag or 0),
        ]
    return attributes


def period_untrusted(attributes: Iterable[Attribute], default_s: int) -> int:
    """The registration period, in seconds, in the response to a registration; 0: none."""
    for attribute in _operating(attributes):
        if attribute.tag == REGISTRATION_PERIOD and attribute.value:
            return number_untrusted(attribute)
    return default_s


# -- what a client asks ----------------------------------------------------------------------------


def registration(initiator: str) -> list[Attribute]:
    """Registers an initiator as a node of an entity, whose name the server chooses. Most servers
    answer only queries of registered nodes."""
    return [
        text(ISCSI_NAME, initiator),
        Attribute(DELIMITER, b""),
        Attribute(ENTITY_IDENTIFIER, b""),
        number(ENTITY_PROTOCOL, PROTOCOL_ISCSI),
        text(ISCSI_NAME, initiator),
        number(ISCSI_NODE_TYPE, NODE_INITIATOR),
    ]


def own_query(initiator: str) -> list[Attribute]:
    """Asks whether the initiator is registered already; if so, we must not deregister it."""
    return [
        text(ISCSI_NAME, initiator),
        text(ISCSI_NAME, initiator),
        Attribute(DELIMITER, b""),
        asked(ISCSI_NAME),
    ]


def names_untrusted(attributes: Iterable[Attribute]) -> list[str]:
    """The names of nodes in a response, after its delimiter."""
    return [text_untrusted(each) for each in _operating(attributes) if each.tag == ISCSI_NAME]


def deregistration(node: str, entity: str) -> list[Attribute]:
    """Removes ``entity``, with all that belongs to it; ``node`` is registered there."""
    return [
        text(ISCSI_NAME, node),
        Attribute(DELIMITER, b""),
        text(ENTITY_IDENTIFIER, entity),
    ]


def entity_untrusted(attributes: Iterable[Attribute]) -> str:
    """The entity in the response to a registration; "": it has none."""
    for attribute in attributes:
        if attribute.tag == ENTITY_IDENTIFIER and attribute.value:
            return text_untrusted(attribute)
    return ""


def target_query(initiator: str) -> list[Attribute]:
    """Asks for the names of all targets."""
    return [
        text(ISCSI_NAME, initiator),
        number(ISCSI_NODE_TYPE, NODE_TARGET),
        Attribute(DELIMITER, b""),
        asked(ISCSI_NAME),
        asked(ISCSI_NODE_TYPE),
    ]


def targets_untrusted(attributes: Iterable[Attribute], left_out: list[str]) -> list[str]:
    """Names of targets in a response, each once, in the order of the response. Nodes that cannot be
    read are added to ``left_out``, in words."""
    names: dict[str, None] = {}
    name = ""
    for attribute in _operating(attributes):
        try:
            if attribute.tag == ISCSI_NAME:
                name = ""
                name = text_untrusted(attribute)
            elif attribute.tag == ISCSI_NODE_TYPE and name:
                node, name = name, ""
                if number_untrusted(attribute) & NODE_TARGET:
                    names[node] = None
        except RemoteProtocolError as error:
            left_out.append(f"{error}: {attribute.value[:40]!r}")
        if len(names) > MAXIMUM_TARGETS:
            raise _bad(f"more than {MAXIMUM_TARGETS} targets")
    return list(names)


def portal_query(initiator: str, target: str) -> list[Attribute]:
    """Asks for the portals and portal groups of one target."""
    return [
        text(ISCSI_NAME, initiator),
        text(GROUP_ISCSI_NAME, target),
        Attribute(DELIMITER, b""),
        asked(GROUP_ISCSI_NAME),
        asked(GROUP_ADDRESS),
        asked(GROUP_PORT),
        asked(GROUP_TAG),
    ]


def portals_untrusted(
    attributes: Iterable[Attribute], target: str, left_out: list[str]
) -> list[Portal]:
    """TCP portals of ``target`` in a response. A portal whose tag is missing or null is left out:
    so iSNS tells that the target cannot be reached through it. Portals that cannot be read are
    added to ``left_out``, in words."""
    found: dict[Portal, None] = {}
    name = host = ""
    port = 0
    for attribute in _operating(attributes):
        try:
            if attribute.tag == GROUP_ISCSI_NAME:
                name, host, port = "", "", 0
                name = text_untrusted(attribute)
            elif attribute.tag == GROUP_ADDRESS:
                host = ""
                host = address_untrusted(attribute)
            elif attribute.tag == GROUP_PORT:
                port = 0
                port = number_untrusted(attribute)
            elif attribute.tag == GROUP_TAG:
                # Case does not count in iSCSI names.
                same = name.lower() == target.lower()
                if same and host and 0 < port < _UDP and attribute.value:
                    found[Portal(host, port, number_untrusted(attribute) & 0xFFFF)] = None
                host, port = "", 0
        except RemoteProtocolError as error:
            left_out.append(f"a portal of {target}: {error}: {attribute.value[:40]!r}")
        if len(found) > MAXIMUM_PORTALS:
            raise _bad(f"more than {MAXIMUM_PORTALS} portals of {target}")
    return list(found)


def _operating(attributes: Iterable[Attribute]) -> Iterator[Attribute]:
    """The attributes after the delimiter. Before it the server repeats the message key."""
    behind = False
    for attribute in attributes:
        if behind:
            yield attribute
        behind = behind or attribute.tag == DELIMITER
