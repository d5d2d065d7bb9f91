"""PERSISTENT RESERVE IN and OUT: CDBs and parameter data (SPC-4, Persistent reservations).

CDB (10)   1 bits 4-0 service action   OUT: 2 scope (bits 7-4), type (bits 3-0); 5 I length
           IN: 7 H allocation length
OUT list   0 Q RESERVATION KEY   8 Q SERVICE ACTION RESERVATION KEY   16 I -   20 bit 3 SPEC_I_PT,
           bit 2 ALL_TG_PT, bit 0 APTPL   21 3 bytes -
           with SPEC_I_PT: 24 I TRANSPORTID PARAMETER DATA LENGTH (what follows)   28 TransportIDs
           of REGISTER AND MOVE: 0 Q, 8 Q as above   17 bit 1 UNREG, bit 0 APTPL   18 H RELATIVE
           TARGET PORT IDENTIFIER   20 I TRANSPORTID PARAMETER DATA LENGTH   24 TransportID
READ KEYS, READ RESERVATION, READ FULL STATUS
           0 I PRGENERATION   4 I ADDITIONAL LENGTH (what follows)
           keys: Q each;  reservation: Q key, I -, B -, B scope and type, H -
           full status, each: Q key, I -, B (bit 1 ALL_TG_PT, bit 0 R_HOLDER), B scope and type,
           I -, H relative target port, I length of the TransportID, TransportID
REPORT CAPABILITIES
           0 H 8   2 B (bit 4 CRH, bit 3 SIP_C, bit 2 ATP_C, bit 0 PTPL_C)   3 B (bit 7 TMV, bits
           6-4 ALLOW COMMANDS, bit 0 PTPL_A)   4 H types   6 H -
TransportID of iSCSI
           0 B format (bits 7-6), protocol 5   2 H ADDITIONAL LENGTH   4 name, for format 1 with
           ",i,0x" and the ISID in hexadecimal behind it, then zeroes to a multiple of 4

The ``decode_…`` functions take bytes from the network. Entries that are not complete are left out:
the allocation length may have been too short for them.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.scsi import opcodes

Data = bytes | memoryview

# Service actions of PERSISTENT RESERVE IN.
READ_KEYS = 0x00
READ_RESERVATION = 0x01
REPORT_CAPABILITIES = 0x02
READ_FULL_STATUS = 0x03

# Service actions of PERSISTENT RESERVE OUT.
REGISTER = 0x00
RESERVE = 0x01
RELEASE = 0x02
CLEAR = 0x03
PREEMPT = 0x04
PREEMPT_AND_ABORT = 0x05
REGISTER_AND_IGNORE = 0x06
REGISTER_AND_MOVE = 0x07

# Types.
WRITE_EXCLUSIVE = 1
EXCLUSIVE_ACCESS = 3
WRITE_EXCLUSIVE_REGISTRANTS = 5
EXCLUSIVE_ACCESS_REGISTRANTS = 6
WRITE_EXCLUSIVE_ALL = 7  # all registrants hold it
EXCLUSIVE_ACCESS_ALL = 8
TYPES: tuple[int, ...] = (1, 3, 5, 6, 7, 8)

# Flags of the OUT parameter list.
SPEC_I_PT = 0x08
ALL_TG_PT = 0x04
APTPL = 0x01  # of REGISTER AND MOVE, too
UNREG = 0x02  # only of REGISTER AND MOVE

PARAMETER_LENGTH = 24  # without TransportIDs
MAXIMUM_PARAMETER_LENGTH = 1 << 14  # that the device server takes
MAXIMUM_ALLOCATION = 0xFFFF
MAXIMUM_KEY = 0xFFFFFFFFFFFFFFFF

# The parser of the device server uses these layouts, too.
IN_CDB = struct.Struct(">BB5xHx")
OUT_CDB = struct.Struct(">BBB2xIx")
_PARAMETERS = struct.Struct(">QQ4xB3x")
_MOVE = struct.Struct(">QQxBHI")
_LENGTH = struct.Struct(">I")
_HEADER = struct.Struct(">II")
_KEY = struct.Struct(">Q")
_RESERVATION = struct.Struct(">Q5xB2x")
_FULL = struct.Struct(">Q4xBB4xHI")
_CAPABILITIES = struct.Struct(">HBBH2x")
_TRANSPORT = struct.Struct(">BxH")

_TYPE_MASK = 0x0F
_R_HOLDER = 0x01
_FULL_ALL_TG_PT = 0x02
_TMV = 0x80
_PTPL_A = 0x01
_ISCSI = 0x05
_PROTOCOL_MASK = 0x0F
_FORMAT_SHIFT = 6
_WITH_ISID = 1
_ISID_MARK = b",i,0x"
_ISID_DIGITS = re.compile(rb"[0-9A-Fa-f]{12}")
_OTHER_TRANSPORT = 24
_LEAST_TRANSPORT = 20  # bytes behind the head of a TransportID
# The bit of each type in the mask of REPORT CAPABILITIES.
_TYPE_BITS = {1: 0x0200, 3: 0x0800, 5: 0x2000, 6: 0x4000, 7: 0x8000, 8: 0x0001}

_TYPE_WORDS = {
    WRITE_EXCLUSIVE: "Write Exclusive",
    EXCLUSIVE_ACCESS: "Exclusive Access",
    WRITE_EXCLUSIVE_REGISTRANTS: "Write Exclusive, Registrants Only",
    EXCLUSIVE_ACCESS_REGISTRANTS: "Exclusive Access, Registrants Only",
    WRITE_EXCLUSIVE_ALL: "Write Exclusive, All Registrants",
    EXCLUSIVE_ACCESS_ALL: "Exclusive Access, All Registrants",
}


def type_words(kind: int) -> str:
    """The name of a reservation type. Accepts any number."""
    return _TYPE_WORDS.get(kind) or f"reservation type {kind:#x}"


class TransportId(NamedTuple):
    """An iSCSI initiator port. ``isid`` b"": the initiator with all its ports, or an unknown
    port."""

    name: str
    isid: bytes


class OutParameters(NamedTuple):
    """The parameter list of PERSISTENT RESERVE OUT. ``initiators``: with SPEC_I_PT, to be
    registered as well; None: of another protocol than iSCSI, or without a name in UTF-8."""

    key: int  # RESERVATION KEY: under which the sender is registered
    action_key: int = 0  # SERVICE ACTION RESERVATION KEY: the new key, or the key to preempt
    flags: int = 0  # SPEC_I_PT, ALL_TG_PT, APTPL
    initiators: tuple[TransportId | None, ...] = ()


class MoveParameters(NamedTuple):
    """The parameter list of REGISTER AND MOVE. ``port``, ``initiator``: the nexus that gets the
    reservation; None: of another protocol than iSCSI, or without a name in UTF-8."""

    key: int
    action_key: int
    flags: int  # UNREG, APTPL
    port: int
    initiator: TransportId | None


class Reservation(NamedTuple):
    """A reservation, as READ RESERVATION reports it."""

    key: int  # of the holder; 0 for the All Registrants types
    type: int
    scope: int = 0  # 0: the LUN


class Capabilities(NamedTuple):
    """The data of REPORT CAPABILITIES. ``flags`` and ``more`` are bytes 2 and 3. ``types``: the
    reservation types that the LUN supports, None where it does not say."""

    flags: int
    more: int
    types: frozenset[int] | None

    @property
    def persists(self) -> bool:
        """Whether registrations can survive a loss of power (PTPL_C)."""
        return bool(self.flags & 0x01)


class FullStatus(NamedTuple):
    """One registration, as READ FULL STATUS reports it.

    ``type`` has a meaning only with ``holder``. ``port``: the relative target port, 0 where the
    registration holds on all ports. ``initiator`` None: no iSCSI TransportID."""

    key: int
    holder: bool
    type: int
    all_ports: bool
    port: int
    initiator: TransportId | None


# -- CDBs ------------------------------------------------------------------------------------------


def reserve_in(action: int, allocation: int = MAXIMUM_ALLOCATION) -> bytes:
    return IN_CDB.pack(opcodes.PERSISTENT_RESERVE_IN, action, allocation)


def reserve_out(action: int, kind: int = 0, length: int = PARAMETER_LENGTH) -> bytes:
    """``kind``: a reservation type; the scope is the LUN. ``length``: bytes of the parameter
    list."""
    return OUT_CDB.pack(opcodes.PERSISTENT_RESERVE_OUT, action, kind, length)


# -- the parameter list of PERSISTENT RESERVE OUT --------------------------------------------------


def encode_parameters(parameters: OutParameters) -> bytes:
    """The parameter list: 24 bytes, and what SPEC_I_PT adds. Raises LocalProtocolError for a key of
    more than 64 bits."""
    if not (0 <= parameters.key <= MAXIMUM_KEY and 0 <= parameters.action_key <= MAXIMUM_KEY):
        raise LocalProtocolError("a reservation key has 64 bits")
    head = _PARAMETERS.pack(*parameters[:3])
    if not parameters.flags & SPEC_I_PT:
        return head
    names = b"".join(encode_transport_id(each) for each in parameters.initiators if each)
    return head + _LENGTH.pack(len(names)) + names


def decode_parameters(data: Data) -> OutParameters:
    """Decode the parameter list. Raises RemoteProtocolError for a list that is too short or too
    long for what it holds; the device server answers that with PARAMETER LIST LENGTH ERROR."""
    if len(data) < PARAMETER_LENGTH:
        raise RemoteProtocolError("SCSI", f"PERSISTENT RESERVE OUT with {len(data)} bytes")
    key, action_key, flags = _PARAMETERS.unpack_from(data)
    if not flags & SPEC_I_PT:
        if len(data) != PARAMETER_LENGTH:
            raise RemoteProtocolError("SCSI", f"PERSISTENT RESERVE OUT with {len(data)} bytes")
        return OutParameters(key, action_key, flags)
    rest = data[PARAMETER_LENGTH:]
    if len(rest) < _LENGTH.size or _LENGTH.unpack_from(rest)[0] != len(rest) - _LENGTH.size:
        raise RemoteProtocolError("SCSI", f"SPEC_I_PT with {len(rest)} bytes of TransportIDs")
    return OutParameters(key, action_key, flags, tuple(_transport_ids(rest[_LENGTH.size :])))


def encode_move_parameters(parameters: MoveParameters) -> bytes:
    """The parameter list of REGISTER AND MOVE."""
    name = b"" if parameters.initiator is None else encode_transport_id(parameters.initiator)
    return _MOVE.pack(*parameters[:4], len(name)) + name


def decode_move_parameters(data: Data) -> MoveParameters:
    """Decode the parameter list of REGISTER AND MOVE. Raises as ``decode_parameters``."""
    if len(data) < _MOVE.size:
        raise RemoteProtocolError("SCSI", f"REGISTER AND MOVE with {len(data)} bytes")
    key, action_key, flags, port, length = _MOVE.unpack_from(data)
    if length != len(data) - _MOVE.size:
        raise RemoteProtocolError("SCSI", f"REGISTER AND MOVE with {len(data)} bytes")
    found = _transport_ids(data[_MOVE.size :])
    if len(found) != 1:
        raise RemoteProtocolError("SCSI", f"REGISTER AND MOVE to {len(found)} initiators")
    return MoveParameters(key, action_key, flags, port, found[0])


def _transport_ids(data: Data) -> list[TransportId | None]:
    """The TransportIDs that fill ``data``; None for what names no iSCSI initiator."""
    found: list[TransportId | None] = []
    at = 0
    while at < len(data):
        if at + _TRANSPORT.size > len(data):
            raise RemoteProtocolError("SCSI", "a TransportID that is cut off")
        head, length = _TRANSPORT.unpack_from(data, at)
        # Those of other protocols have 24 bytes, and no length.
        if head & _PROTOCOL_MASK != _ISCSI:
            length = _OTHER_TRANSPORT - _TRANSPORT.size
        end = at + _TRANSPORT.size + length
        if end > len(data):
            raise RemoteProtocolError("SCSI", "a TransportID that is cut off")
        try:
            found.append(decode_transport_id(data[at:end]))
        except RemoteProtocolError:  # no name, or bytes that are none: no fault of the lengths
            found.append(None)
        at = end
    return found


# -- TransportID -----------------------------------------------------------------------------------


def encode_transport_id(initiator: TransportId) -> bytes:
    raw = initiator.name.encode()
    if initiator.isid:
        raw += _ISID_MARK + initiator.isid.hex().encode()
    raw += bytes(1 + (-len(raw) - 1) % 4)  # it ends with at least one zero
    raw = raw.ljust(_LEAST_TRANSPORT, b"\0")
    form = _WITH_ISID if initiator.isid else 0
    return _TRANSPORT.pack(form << _FORMAT_SHIFT | _ISCSI, len(raw)) + raw


def decode_transport_id(data: Data) -> TransportId | None:
    """Decode a TransportID; None when it is of another protocol than iSCSI. Raises
    RemoteProtocolError when it has no name.

    In format 1 without a readable ISID, only the name is taken: some versions of LIO put a zero
    byte between name and ISID.
    """
    if len(data) < _TRANSPORT.size:
        raise RemoteProtocolError("SCSI", f"a TransportID of {len(data)} bytes")
    head, length = _TRANSPORT.unpack_from(data)
    if head & _PROTOCOL_MASK != _ISCSI:
        return None
    raw, _, _ = bytes(data[_TRANSPORT.size : _TRANSPORT.size + length]).partition(b"\0")
    isid = b""
    if head >> _FORMAT_SHIFT == _WITH_ISID:
        name, _, digits = raw.rpartition(_ISID_MARK)
        if name and _ISID_DIGITS.fullmatch(digits):
            raw, isid = name, bytes.fromhex(digits.decode())
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise RemoteProtocolError("SCSI", "a TransportID whose name is not UTF-8") from None
    if not text:
        raise RemoteProtocolError("SCSI", "a TransportID without a name")
    return TransportId(text, isid)


# -- the answers of PERSISTENT RESERVE IN ----------------------------------------------------------


def _body(data: Data, what: str) -> tuple[int, Data]:
    """PRGENERATION, and the bytes behind the header as far as they have come."""
    if len(data) < _HEADER.size:
        raise RemoteProtocolError("SCSI", f"{what} answered with {len(data)} bytes")
    generation, length = _HEADER.unpack_from(data)
    return generation, data[_HEADER.size : _HEADER.size + length]


def encode_keys(generation: int, keys: list[int]) -> bytes:
    body = b"".join(map(_KEY.pack, keys))
    return _HEADER.pack(generation, len(body)) + body


def decode_keys(data: Data) -> tuple[int, list[int]]:
    """PRGENERATION, and the key of each registration. Raises RemoteProtocolError when the header is
    not complete."""
    generation, body = _body(data, "READ KEYS")
    whole = len(body) - len(body) % _KEY.size
    return generation, [key for (key,) in _KEY.iter_unpack(body[:whole])]


def encode_reservation(generation: int, reservation: Reservation | None) -> bytes:
    if reservation is None:
        return _HEADER.pack(generation, 0)
    key, kind, scope = reservation
    return _HEADER.pack(generation, _RESERVATION.size) + _RESERVATION.pack(key, scope << 4 | kind)


def decode_reservation(data: Data) -> tuple[int, Reservation | None]:
    """PRGENERATION, and the reservation or None. Raises RemoteProtocolError for a reservation that
    is not complete, because that must not count as none."""
    generation, body = _body(data, "READ RESERVATION")
    if not _HEADER.unpack_from(data)[1]:
        return generation, None
    if len(body) < _RESERVATION.size:
        raise RemoteProtocolError("SCSI", f"READ RESERVATION answered with {len(data)} bytes")
    key, kind = _RESERVATION.unpack_from(body)
    return generation, Reservation(key, kind & _TYPE_MASK, kind >> 4)


def encode_capabilities(flags: int, activated: bool = False) -> bytes:
    """The data of REPORT CAPABILITIES, with all types. ``flags``: byte 2. ``activated``: PTPL_A,
    registrations survive a loss of power."""
    mask = sum(_TYPE_BITS.values())
    return _CAPABILITIES.pack(_CAPABILITIES.size, flags, _TMV | (_PTPL_A if activated else 0), mask)


def decode_capabilities(data: Data) -> Capabilities:
    """Decode the data of REPORT CAPABILITIES. Raises RemoteProtocolError for less than 8 bytes."""
    if len(data) < _CAPABILITIES.size:
        raise RemoteProtocolError("SCSI", f"REPORT CAPABILITIES answered with {len(data)} bytes")
    _, flags, more, mask = _CAPABILITIES.unpack_from(data)
    known = frozenset(kind for kind, bit in _TYPE_BITS.items() if mask & bit)
    return Capabilities(flags, more, known if more & _TMV else None)


def encode_full_status(generation: int, registrations: list[FullStatus]) -> bytes:
    """The data of READ FULL STATUS. Without ``initiator`` a registration gets no TransportID."""
    body = b""
    for each in registrations:
        name = b"" if each.initiator is None else encode_transport_id(each.initiator)
        flags = (_R_HOLDER if each.holder else 0) | (_FULL_ALL_TG_PT if each.all_ports else 0)
        kind = each.type if each.holder else 0
        body += _FULL.pack(each.key, flags, kind, each.port, len(name)) + name
    return _HEADER.pack(generation, len(body)) + body


def decode_full_status(data: Data) -> tuple[int, list[FullStatus]]:
    """PRGENERATION, and the registrations. Raises RemoteProtocolError when the header is not
    complete, and for an iSCSI TransportID without a name."""
    generation, body = _body(data, "READ FULL STATUS")
    found = []
    at = 0
    while at + _FULL.size <= len(body):
        key, flags, kind, port, length = _FULL.unpack_from(body, at)
        at += _FULL.size
        if at + length > len(body):
            break
        initiator = decode_transport_id(body[at : at + length]) if length else None
        at += length
        holder, everywhere = bool(flags & _R_HOLDER), bool(flags & _FULL_ALL_TG_PT)
        found.append(
            FullStatus(key, holder, kind & _TYPE_MASK if holder else 0, everywhere, port, initiator)
        )
    return generation, found
