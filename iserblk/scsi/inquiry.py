"""INQUIRY: standard data and vital product data (VPD) pages (SPC-4; the B0h family: SBC-4).

Standard data                                     VPD page
    0      bits 7-5 qualifier, 4-0 device type       0    as standard
    2      version                                   1    page code
    3      bit 4 HISUP, bits 3-0 response format     2-3  PAGE LENGTH (what follows)
    4      ADDITIONAL LENGTH (what follows)          4    the page's own
    7      bit 1 CMDQUE
    8-15   vendor     16-31 product     32-35 revision
    58-73  version descriptors

Targets may send short pages (older standards had fewer fields). Missing bytes count as zero, which
means "not reported" in all fields. Decoders of pages take None for a page that the LUN does not
have.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

Data = bytes | memoryview

# Peripheral qualifier and device type.
DISK = 0x00
NO_DEVICE = 0x7F  # qualifier 3, type 1Fh: there is no LUN, and there cannot be

# VPD pages.
SUPPORTED_PAGES = 0x00
UNIT_SERIAL_NUMBER = 0x80
DEVICE_IDENTIFICATION = 0x83
EXTENDED_INQUIRY_DATA = 0x86
MODE_PAGE_POLICY = 0x87
BLOCK_LIMITS = 0xB0
BLOCK_DEVICE_CHARACTERISTICS = 0xB1
LOGICAL_BLOCK_PROVISIONING = 0xB2
GATEWAY = 0xFD  # vendor specific: a signature says that it is ours

_DEVICE_TYPES = {
    0x00: "a disk",
    0x01: "a tape",
    0x02: "a printer",
    0x03: "a processor",
    0x04: "a write-once device",
    0x05: "a CD or DVD",
    0x07: "an optical disk",
    0x08: "a media changer",
    0x0C: "a storage array controller",
    0x0D: "an enclosure",
    0x0E: "a simplified disk",
    0x11: "an object store",
    0x14: "a host managed zoned disk",
    0x1E: "a well-known LUN",
    0x1F: "nothing",
}

_STANDARD = struct.Struct(">BBBBBBBB8s16s4s")
_STANDARD_LENGTH = 96
_VERSION_DESCRIPTORS_AT = 58
_VERSION_SPC4 = 6
_HISUP_FORMAT_2 = 0x12
_CMDQUE = 0x02
_TPGS_SHIFT = 4
_3PC = 0x08
# SAM-5, iSCSI, SPC-4, SBC-3: no version claimed.
_VERSION_DESCRIPTORS = struct.pack(">4H", 0x00A0, 0x0960, 0x0460, 0x04C0)


def device_type_words(device_type: int) -> str:
    return _DEVICE_TYPES.get(device_type) or f"device type {device_type:#04x}"


def _text(raw: Data) -> str:
    """ASCII from the network as text for a log, without blanks around it. Other bytes become
    '?'."""
    return "".join(
        chr(byte) if 0x20 <= byte < 0x7F else "?" for byte in bytes(raw).strip(b" \0")
    ).strip()


class Standard(NamedTuple):
    """Decoded standard INQUIRY data."""

    qualifier: int  # 0: a device is connected
    device_type: int
    version: int
    vendor: str
    product: str
    revision: str
    tpgs: int = 0  # how target port groups change their states, see alua; 0: not at all


def decode_standard(data: Data) -> Standard:
    """Decode standard INQUIRY data. Raises RemoteProtocolError when ``data`` is empty."""
    if not data:
        raise RemoteProtocolError("SCSI", "INQUIRY answered with no data")
    head, _, version, _, _, flags, _, _, vendor, product, revision = _STANDARD.unpack(
        bytes(data[: _STANDARD.size]).ljust(_STANDARD.size, b"\0")
    )
    return Standard(
        head >> 5,
        head & 0x1F,
        version,
        _text(vendor),
        _text(product),
        _text(revision),
        flags >> _TPGS_SHIFT & 3,
    )


def encode_standard(
    peripheral: int,
    vendor: str,
    product: str,
    revision: str,
    tpgs: int = 0,
    third_party: bool = False,
) -> bytes:
    """Standard INQUIRY data, 96 bytes. ``peripheral``: DISK or NO_DEVICE. ``third_party``: 3PC,
    it has EXTENDED COPY."""
    data = bytearray(_STANDARD_LENGTH)
    _STANDARD.pack_into(
        data,
        0,
        peripheral,
        0,
        _VERSION_SPC4,
        _HISUP_FORMAT_2,
        _STANDARD_LENGTH - 5,
        tpgs << _TPGS_SHIFT | (_3PC if third_party else 0),
        0,
        _CMDQUE,
        vendor.encode("ascii").ljust(8),
        product.encode("ascii").ljust(16),
        revision.encode("ascii").ljust(4),
    )
    data[_VERSION_DESCRIPTORS_AT : _VERSION_DESCRIPTORS_AT + 8] = _VERSION_DESCRIPTORS
    return bytes(data)


# -- vital product data ----------------------------------------------------------------------------


def encode_page(code: int, body: bytes) -> bytes:
    """A VPD page of a disk."""
    return struct.pack(">BBH", DISK, code, len(body)) + body


def _body(data: Data | None, code: int) -> bytes:
    """The bytes behind the header of a page, as far as they have come; b"" for a missing page.

    Raises RemoteProtocolError when it is another page.
    """
    if data is None or len(data) < 4:
        return b""
    _, found, length = struct.unpack_from(">BBH", data)
    if found != code:
        raise RemoteProtocolError("SCSI", f"VPD page {found:#04x} came instead of {code:#04x}")
    return bytes(data[4 : 4 + length])


def encode_supported_pages(codes: Iterable[int]) -> bytes:
    return encode_page(SUPPORTED_PAGES, bytes(sorted(codes)))


def decode_supported_pages(data: Data | None) -> tuple[int, ...]:
    return tuple(_body(data, SUPPORTED_PAGES))


def encode_serial(serial: str) -> bytes:
    return encode_page(UNIT_SERIAL_NUMBER, serial.encode("ascii"))


def decode_serial(data: Data | None) -> str:
    return _text(_body(data, UNIT_SERIAL_NUMBER))


# Device identification: descriptors of
#     0  bits 7-4 protocol, 3-0 code set    1  bit 7 PIV, bits 5-4 association, 3-0 type
#     3  length                             4  the designator
ASSOCIATION_LUN = 0
ASSOCIATION_PORT = 1
ASSOCIATION_TARGET = 2
TYPE_T10 = 1
TYPE_EUI64 = 2
TYPE_NAA = 3
TYPE_RELATIVE_PORT = 4
TYPE_PORT_GROUP = 5
TYPE_NAME = 8
TYPE_UUID = 10
BINARY = 1
ASCII = 2
UTF8 = 3
_ISCSI_PIV = 0x80
_ISCSI_PROTOCOL = 0x50
_UUID_TYPE = 0x10  # of a UUID designator: a UUID as RFC 4122 has it, behind two bytes
_UUID_LENGTH = 18
_VENDOR_LENGTH = 8  # of a T10 vendor ID designator
# For the UUIDs of LUNs of our target. It must never change: LUNs would get other names.
_UUIDS_OF_SERIALS = uuid.UUID("6eb66672-8227-4072-a6a3-7673ed988563")


class Designator(NamedTuple):
    association: int
    kind: int
    code_set: int
    data: bytes


def naa_locally_assigned(text: str) -> bytes:
    """An 8-byte NAA 3h identifier that depends on ``text`` alone: a LUN keeps its name."""
    digest = hashlib.sha256(text.encode()).digest()
    return bytes((0x30 | digest[0] & 0x0F,)) + digest[1:8]


def uuid_of_serial(serial: str) -> bytes:
    """A UUID designator that depends on ``serial`` alone: the same LUN has the same behind every
    target name, and after a restart."""
    return bytes((_UUID_TYPE, 0)) + uuid.uuid5(_UUIDS_OF_SERIALS, serial).bytes


def name_string(name: str) -> bytes:
    """A SCSI name string: UTF-8, then 1 to 4 zero bytes, to a multiple of 4 bytes."""
    raw = name.encode() + b"\0"
    return raw + bytes(-len(raw) % 4)


def encode_identifiers(designators: Iterable[Designator]) -> bytes:
    body = bytearray()
    for association, kind, code_set, data in designators:
        # Only designators of ports and targets name a protocol.
        protocol, piv = (_ISCSI_PROTOCOL, _ISCSI_PIV) if association else (0, 0)
        body += bytes((protocol | code_set, piv | association << 4 | kind, 0, len(data))) + data
    return encode_page(DEVICE_IDENTIFICATION, bytes(body))


def decode_designators(data: Data | None) -> Iterator[Designator]:
    """The designators that are complete in ``data``."""
    body = _body(data, DEVICE_IDENTIFICATION)
    at = 0
    while at + 4 <= len(body):
        end = at + 4 + body[at + 3]
        if end > len(body):
            break
        yield Designator(
            body[at + 1] >> 4 & 3, body[at + 1] & 15, body[at] & 15, body[at + 4 : end]
        )
        at = end


def decode_identifiers(data: Data | None) -> tuple[str, ...]:
    """The names of the LUN, in the order of the page: "naa.6001…", "eui.…", "uuid.…", "t10.…",
    "name.…"; without blank ones."""
    names = []
    for association, kind, _, raw in decode_designators(data):
        if association != ASSOCIATION_LUN or not raw:
            continue
        if kind == TYPE_NAA:
            names.append(f"naa.{raw.hex()}")
        elif kind == TYPE_EUI64:
            names.append(f"eui.{raw.hex()}")
        elif kind == TYPE_UUID and len(raw) == _UUID_LENGTH and raw[0] & 0xF0 == _UUID_TYPE:
            names.append(f"uuid.{uuid.UUID(bytes=raw[2:])}")
        elif kind == TYPE_T10 and raw.strip(b" \0"):
            names.append(f"t10.{_t10_text(raw)}")
        elif kind == TYPE_NAME and raw.strip(b" \0"):
            names.append(f"name.{_exact_text(raw)}")
    return tuple(names)


def _exact_text(raw: bytes) -> str:
    """As ``_text``, but different bytes remain different: hexadecimal where it is no plain text."""
    plain = raw.strip(b" \0")
    if all(0x20 <= byte < 0x7F for byte in plain):
        return _text(raw)
    return f"0x{raw.hex()}"


def _t10_text(raw: bytes) -> str:
    """A vendor, and what that has written behind: often text, but any bytes may stand there."""
    exact = _exact_text(raw)
    if not exact.startswith("0x"):
        return exact
    return f"{_text(raw[:_VENDOR_LENGTH])} {_exact_text(raw[_VENDOR_LENGTH:])}"


def is_world_wide(identifier: str) -> bool:
    """Whether no other LUN in the world has this identifier, one of ``decode_identifiers``: NAA 2h,
    5h and 6h and EUI-64 with a company ID, a UUID, a SCSI name string.

    A company ID of zero names no company (programs of which all copies number their LUNs alike,
    tgtd for one, leave it so). NAA 3h is assigned locally. A T10 vendor ID is no better than the
    care of its vendor, and free programs have none: "IET     00010001" is LUN 1 of every tgtd.
    """
    kind, _, text = identifier.lower().partition(".")
    if kind == "name":
        kind, _, text = text.partition(".")
        if kind == "iqn":
            return bool(text)
    if kind == "naa":
        at = {"2": 4, "5": 1, "6": 1}.get(text[:1])
        return at is not None and _is_company(text[at : at + 6])
    if kind == "eui":
        # With an extension of 8 bytes, that stands in front (SPC-4, EUI-64 based designators).
        return _is_company(text[16:22] if len(text) == 32 else text[:6])
    return kind == "uuid" and bool(text.strip("0-"))


def _is_company(digits: str) -> bool:
    try:
        return int(digits, 16) != 0
    except ValueError:
        return False


# Extended INQUIRY data (SPC-4): 5 HEADSUP, ORDSUP, SIMPSUP (bits 2 to 0); 6 bit 0 V_SUP;
# 13 MAXIMUM SUPPORTED SENSE DATA LENGTH; 64 bytes in all.
_EXTENDED = struct.Struct(">BBB6xB50x")
_TASK_ATTRIBUTES = 0x07
_V_SUP = 0x01


def encode_extended(volatile: bool, sense_length: int) -> bytes:
    """The page of a LUN that obeys the task attributes SIMPLE, ORDERED and HEAD OF QUEUE.
    ``volatile``: it may have a volatile cache. ``sense_length``: bytes of its longest sense
    data."""
    body = _EXTENDED.pack(0, _TASK_ATTRIBUTES, _V_SUP if volatile else 0, sense_length)
    return encode_page(EXTENDED_INQUIRY_DATA, body)


# Mode page policy (SPC-4): descriptors of page code, subpage code, bit 7 MLUS and the policy.
_ALL_PAGES = 0x3F
_ALL_SUBPAGES = 0xFF
_SHARED = 0


def encode_mode_page_policy() -> bytes:
    """The page of a LUN that has one copy of each mode page, for all I_T nexuses."""
    return encode_page(MODE_PAGE_POLICY, bytes((_ALL_PAGES, _ALL_SUBPAGES, _SHARED, 0)))


# Block limits, from byte 4: WSNZ, compare and write, granularity, maximum and optimal transfer,
# pre-fetch, unmap blocks and descriptors, unmap granularity and alignment, write same, atomic.
_BLOCK_LIMITS = struct.Struct(">BBHIIIIIIIQ20x")
_UGAVALID = 0x80000000


class BlockLimits(NamedTuple):
    """The limits of a LUN, in logical blocks; 0: not reported."""

    wsnz: bool = False  # WRITE SAME of 0 blocks is refused
    max_compare_and_write_length: int = 0
    optimal_granularity: int = 0
    max_transfer_length: int = 0
    optimal_transfer_length: int = 0
    max_prefetch_length: int = 0
    max_unmap_lba_count: int = 0
    max_unmap_descriptor_count: int = 0
    unmap_granularity: int = 0
    unmap_alignment: int = 0
    max_write_same_length: int = 0


def encode_block_limits(limits: BlockLimits) -> bytes:
    wsnz, *middle, alignment, write_same = limits
    if limits.unmap_granularity:
        alignment |= _UGAVALID
    body = _BLOCK_LIMITS.pack(wsnz, *middle, alignment, write_same)
    return encode_page(BLOCK_LIMITS, body)


def decode_block_limits(data: Data | None) -> BlockLimits:
    body = _body(data, BLOCK_LIMITS)[: _BLOCK_LIMITS.size]
    wsnz, *middle, alignment, write_same = _BLOCK_LIMITS.unpack(
        body.ljust(_BLOCK_LIMITS.size, b"\0")
    )
    alignment = alignment & ~_UGAVALID if alignment & _UGAVALID else 0
    return BlockLimits._make((bool(wsnz & 1), *middle, alignment, write_same))


# Block device characteristics: 4-5 MEDIUM ROTATION RATE; 60 bytes in all.
_NON_ROTATING = 1


class Characteristics(NamedTuple):
    rotational: bool


def encode_characteristics() -> bytes:
    """The page of a LUN that does not rotate."""
    body = struct.pack(">H58x", _NON_ROTATING)
    return encode_page(BLOCK_DEVICE_CHARACTERISTICS, body)


def decode_characteristics(data: Data | None) -> Characteristics:
    """A rate in rpm means rotating; 0 (not reported) and 1 (non-rotating) do not."""
    body = _body(data, BLOCK_DEVICE_CHARACTERISTICS).ljust(2, b"\0")
    return Characteristics(int.from_bytes(body[:2], "big") > _NON_ROTATING)


# Logical block provisioning: 4 THRESHOLD EXPONENT; 5 LBPU, LBPWS, LBPWS10, LBPRZ
# (3 bits); 6 bits 2-0 type.
_LBPU = 0x80
_LBPWS = 0x40
_LBPWS10 = 0x20
_LBPRZ_ZERO = 0x04  # the lowest of LBPRZ's three bits; the others do not matter then
_THIN = 2


class Provisioning(NamedTuple):
    lbpu: bool = False  # UNMAP
    lbpws: bool = False  # WRITE SAME(16) with UNMAP
    lbpws10: bool = False
    lbprz: bool = False  # unmapped blocks read as zeroes


def encode_provisioning(provisioning: Provisioning, threshold_exponent: int = 0) -> bytes:
    """The page of a thinly provisioned LUN. ``threshold_exponent``: log2 of the blocks in a
    threshold set; 0: there are no thresholds."""
    bits = (_LBPU, _LBPWS, _LBPWS10, _LBPRZ_ZERO)
    flags = sum(bit for bit, is_set in zip(bits, provisioning, strict=True) if is_set)
    return encode_page(LOGICAL_BLOCK_PROVISIONING, bytes((threshold_exponent, flags, _THIN, 0)))


def decode_provisioning(data: Data | None) -> Provisioning:
    flags = _body(data, LOGICAL_BLOCK_PROVISIONING).ljust(2, b"\0")[1]
    return Provisioning(
        bool(flags & _LBPU),
        bool(flags & _LBPWS),
        bool(flags & _LBPWS10),
        bool(flags & _LBPRZ_ZERO),
    )


# Gateway (ours): a signature, then the names of the targets on the way to the LUN, each with a zero
# byte behind it. A gateway's LUN has the vendor and product of another maker, whose drivers look at
# vendor-specific pages of their own: the usual ones begin at C0h and E0h.
_GATEWAY_SIGNATURE = b"iserblk gateway\0"
MAX_GATEWAYS = 16  # names in a page
GATEWAY_LENGTH = 4096  # bytes: room for a page whose names are as long as names may be


def encode_gateway(names: Iterable[str]) -> bytes:
    return encode_page(
        GATEWAY, _GATEWAY_SIGNATURE + b"".join(name.encode() + b"\0" for name in names)
    )


def decode_gateway(data: Data | None) -> tuple[str, ...]:
    """The names of targets, the nearest one first; () for a page that is not ours."""
    body = _body(data, GATEWAY)
    if not body.startswith(_GATEWAY_SIGNATURE):
        return ()
    names = body[len(_GATEWAY_SIGNATURE) :].split(b"\0")[:-1]
    return tuple(_printable(name.decode(errors="replace")) for name in names)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
