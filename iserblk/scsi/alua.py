"""Asymmetric logical unit access (ALUA): the access states of the ports of a LUN.

Sources: SPC-4, Asymmetric logical unit access; REPORT TARGET PORT GROUPS command; SET TARGET PORT
GROUPS command. The answer of the first is RETURN DATA LENGTH (4 bytes), then for each group

    0    bit 7 PREF, bits 3-0 state        5    STATUS CODE
    1    states that it may have           7    TARGET PORT COUNT
    2-3  TARGET PORT GROUP                 8-   for each port 4 bytes, the last two its
                                                RELATIVE TARGET PORT IDENTIFIER

The parameter list of SET TARGET PORT GROUPS is 4 reserved bytes, then 4 bytes for each group

    0    bits 3-0 state                    2-3  TARGET PORT GROUP
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import inquiry, opcodes
from iserblk.scsi.inquiry import Designator
from iserblk.scsi.sense import ILLEGAL_REQUEST, NOT_READY, UNIT_ATTENTION, Sense

# Asymmetric access states.
ACTIVE_OPTIMIZED = 0x0
ACTIVE_NON_OPTIMIZED = 0x1
STANDBY = 0x2
UNAVAILABLE = 0x3
LBA_DEPENDENT = 0x4
OFFLINE = 0xE
TRANSITIONING = 0xF

STATE_WORDS = {
    ACTIVE_OPTIMIZED: "active/optimized",
    ACTIVE_NON_OPTIMIZED: "active/non-optimized",
    STANDBY: "standby",
    UNAVAILABLE: "unavailable",
    LBA_DEPENDENT: "logical block dependent",
    OFFLINE: "offline",
    TRANSITIONING: "transitioning",
}
# In these states every command is carried out.
USABLE = frozenset((ACTIVE_OPTIMIZED, ACTIVE_NON_OPTIMIZED, LBA_DEPENDENT))

# Byte 1 of a group: which states it may have.
SUPPORTS_TRANSITIONING = 0x80
SUPPORTS_OFFLINE = 0x40
SUPPORTS_LBA_DEPENDENT = 0x10
SUPPORTS_UNAVAILABLE = 0x08
SUPPORTS_STANDBY = 0x04
SUPPORTS_NON_OPTIMIZED = 0x02
SUPPORTS_OPTIMIZED = 0x01

# TPGS of standard INQUIRY data: whether states change by themselves (implicit) or by command.
TPGS_NONE = 0
TPGS_IMPLICIT = 1
TPGS_EXPLICIT = 2
TPGS_BOTH = 3  # the two above are its bits

# Sense data about states: ASC << 8 | ASCQ.
IN_TRANSITION = 0x040A
IN_STANDBY = 0x040B
IS_UNAVAILABLE = 0x040C
IS_OFFLINE = 0x0412
STATE_CHANGED = 0x2A06
TRANSITION_FAILED = 0x2A07
_STATE_OF_SENSE = {
    IN_TRANSITION: TRANSITIONING,
    IN_STANDBY: STANDBY,
    IS_UNAVAILABLE: UNAVAILABLE,
    IS_OFFLINE: OFFLINE,
}

_PREFERRED = 0x80
_HEADER = struct.Struct(">I")
_GROUP = struct.Struct(">BBHxBxB")
_PORT = struct.Struct(">xxH")
_IDENTIFIER = struct.Struct(">xxH")
_SET_HEADER = 4
_SET_GROUP = struct.Struct(">BxH")
MAXIMUM_GROUPS = 4096  # in one answer; in practice there are two or four


def state_words(state: int) -> str:
    """A state in words. Accepts any number."""
    return STATE_WORDS.get(state) or f"access state {state:#x}"


class PortGroup(NamedTuple):
    """One target port group. ``preferred``: the device server prefers its ports. ``supported``: the
    SUPPORTS_ bits. ``status``: what changed the state last (0: nothing, 1: SET TARGET PORT GROUPS,
    2: the device itself). ``ports``: relative target port identifiers."""

    group: int
    state: int
    preferred: bool = False
    supported: int = 0
    status: int = 0
    ports: tuple[int, ...] = ()


def report_target_port_groups(allocation: int) -> bytes:
    """The CDB, which asks for the length only header format of SPC-3 and SPC-4."""
    return struct.pack(
        ">BB4xIxx", opcodes.MAINTENANCE_IN, opcodes.SA_REPORT_TARGET_PORT_GROUPS, allocation
    )


def encode_report(groups: Iterable[PortGroup]) -> bytes:
    body = bytearray()
    for each in groups:
        first = each.state | (_PREFERRED if each.preferred else 0)
        body += _GROUP.pack(first, each.supported, each.group, each.status, len(each.ports))
        for port in each.ports:
            body += _PORT.pack(port)
    return _HEADER.pack(len(body)) + bytes(body)


def decode_report(data: bytes | memoryview) -> list[PortGroup]:
    """The groups that are complete in ``data``. Raises RemoteProtocolError when the length is
    missing, and for a group that comes twice."""
    return list(_groups(bytes(data)))


def _groups(raw: bytes) -> Iterator[PortGroup]:
    if len(raw) < _HEADER.size:
        raise RemoteProtocolError("SCSI", f"REPORT TARGET PORT GROUPS: {len(raw)} bytes came")
    end = min(len(raw), _HEADER.size + _HEADER.unpack_from(raw)[0])
    at = _HEADER.size
    seen: set[int] = set()
    while at + _GROUP.size <= end and len(seen) < MAXIMUM_GROUPS:
        first, supported, group, status, count = _GROUP.unpack_from(raw, at)
        at += _GROUP.size
        if at + count * _PORT.size > end:
            return
        if group in seen:
            raise RemoteProtocolError("SCSI", f"target port group {group} was reported twice")
        seen.add(group)
        ports = tuple(_PORT.unpack_from(raw, at + _PORT.size * i)[0] for i in range(count))
        at += count * _PORT.size
        yield PortGroup(group, first & 0x0F, bool(first & _PREFERRED), supported, status, ports)


def length_of_report(data: bytes | memoryview) -> int:
    """Bytes of the complete answer of which ``data`` is the beginning; at least 4."""
    if len(data) < _HEADER.size:
        return _HEADER.size
    return _HEADER.size + int(_HEADER.unpack_from(bytes(data[: _HEADER.size]))[0])


# -- to set states ---------------------------------------------------------------------------------


def set_target_port_groups(length: int) -> bytes:
    """The CDB; ``length``: bytes of the parameter list."""
    return struct.pack(
        ">BB4xIxx", opcodes.MAINTENANCE_OUT, opcodes.SA_SET_TARGET_PORT_GROUPS, length
    )


def encode_set(states: Mapping[int, int]) -> bytes:
    """The parameter list of SET TARGET PORT GROUPS. ``states``: by group."""
    groups = (_SET_GROUP.pack(state, group) for group, state in states.items())
    return bytes(_SET_HEADER) + b"".join(groups)


def decode_set(data: bytes | memoryview) -> list[tuple[int, int]]:
    """The (group, state) pairs of a parameter list, in its order; descriptor i begins at byte
    4 + 4 i. Raises RemoteProtocolError for a list that ends within one."""
    if len(data) < _SET_HEADER or (len(data) - _SET_HEADER) % _SET_GROUP.size:
        raise RemoteProtocolError("SCSI", f"SET TARGET PORT GROUPS: a list of {len(data)} bytes")
    found = _SET_GROUP.iter_unpack(bytes(data[_SET_HEADER:]))
    return [(group, first & 0x0F) for first, group in found]


# -- the port that was asked -----------------------------------------------------------------------


class PortIdentity(NamedTuple):
    """The port through which a page was read. A field is None where the page does not say."""

    relative_port: int | None = None
    group: int | None = None


def decode_port_identity(page: bytes | memoryview | None) -> PortIdentity:
    """The port from the device identification page (VPD 83h). Raises RemoteProtocolError when
    ``page`` is another page."""
    found: dict[int, int] = {}
    for association, kind, _, raw in inquiry.decode_designators(page):
        wanted = kind in (inquiry.TYPE_RELATIVE_PORT, inquiry.TYPE_PORT_GROUP)
        if association == inquiry.ASSOCIATION_PORT and wanted and len(raw) == _IDENTIFIER.size:
            found.setdefault(kind, _IDENTIFIER.unpack(raw)[0])
    return PortIdentity(found.get(inquiry.TYPE_RELATIVE_PORT), found.get(inquiry.TYPE_PORT_GROUP))


def port_designators(relative_port: int, group: int) -> tuple[Designator, Designator]:
    """The designators that ``decode_port_identity`` reads."""
    return (
        Designator(
            inquiry.ASSOCIATION_PORT,
            inquiry.TYPE_RELATIVE_PORT,
            inquiry.BINARY,
            _IDENTIFIER.pack(relative_port),
        ),
        Designator(
            inquiry.ASSOCIATION_PORT,
            inquiry.TYPE_PORT_GROUP,
            inquiry.BINARY,
            _IDENTIFIER.pack(group),
        ),
    )


def state_here(groups: Iterable[PortGroup], identity: PortIdentity) -> PortGroup | None:
    """The group of the port in ``identity``; None where the answers do not say."""
    for each in groups:
        if each.group == identity.group:
            return each
    if identity.group is None and identity.relative_port is not None:
        for each in groups:
            if identity.relative_port in each.ports:
                return each
    return None


# -- sense data ------------------------------------------------------------------------------------


def state_of_sense(sense: Sense) -> int | None:
    """The access state for which a command was refused; None: it was refused for another reason.

    Another path to the LUN may carry out the command. This path will not until its state changes
    (TRANSITIONING: until the change under way has ended).
    """
    # SPC-4 has NOT READY; some devices send ILLEGAL REQUEST on a path that they do not serve.
    if sense.is_deferred or sense.key not in (NOT_READY, ILLEGAL_REQUEST):
        return None
    return _STATE_OF_SENSE.get(sense.code)


def is_state_change(sense: Sense) -> bool:
    """Whether this is a unit attention that tells that states have changed, or failed to change:
    ask for them again."""
    return sense.key == UNIT_ATTENTION and sense.code in (STATE_CHANGED, TRANSITION_FAILED)
