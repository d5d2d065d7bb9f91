"""INQUIRY data and VPD pages: round trips, short pages, hostile bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import inquiry
from iserblk.scsi.inquiry import BlockLimits, Designator, Provisioning

U32 = st.integers(0, 0xFFFFFFFF)
TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=4)

DECODERS: list[Callable[[bytes], object]] = [
    inquiry.decode_standard,
    inquiry.decode_supported_pages,
    inquiry.decode_serial,
    inquiry.decode_identifiers,
    inquiry.decode_block_limits,
    inquiry.decode_characteristics,
    inquiry.decode_provisioning,
]


@given(TEXT, TEXT, TEXT)
def test_standard_round_trip(vendor: str, product: str, revision: str) -> None:
    raw = inquiry.encode_standard(inquiry.DISK, vendor, product, revision)
    assert len(raw) == 96 and raw[4] == 91
    found = inquiry.decode_standard(raw)
    assert found == (0, inquiry.DISK, 6, vendor, product, revision, 0)


def test_standard_of_no_device() -> None:
    found = inquiry.decode_standard(inquiry.encode_standard(inquiry.NO_DEVICE, "V", "P", "R"))
    assert (found.qualifier, found.device_type) == (3, 0x1F)


def test_standard_cut_short() -> None:
    raw = inquiry.encode_standard(inquiry.DISK, "VENDOR", "PRODUCT", "REV1")
    for length in range(1, len(raw)):
        found = inquiry.decode_standard(raw[:length])
        assert found.device_type == inquiry.DISK
        assert "VENDOR".startswith(found.vendor)
    assert inquiry.decode_standard(raw[:36]).revision == "REV1"
    with pytest.raises(RemoteProtocolError, match="no data"):
        inquiry.decode_standard(b"")


def test_text_from_the_network_is_made_fit_for_a_log() -> None:
    raw = bytearray(inquiry.encode_standard(inquiry.DISK, "", "", ""))
    raw[8:16] = b"\x1b[31m\n\xff "
    assert inquiry.decode_standard(raw).vendor == "?[31m??"  # type: ignore[arg-type]


@pytest.mark.parametrize("decode", DECODERS)
@given(data=st.binary(max_size=300))
def test_hostile_bytes(decode: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        decode(data)


@pytest.mark.parametrize(
    ("decode", "code"), list(zip(DECODERS[1:], (0, 0x80, 0x83, 0xB0, 0xB1, 0xB2), strict=True))
)
@given(body=st.binary(max_size=300), length=st.integers(0, 0xFFFF))
def test_hostile_pages(
    decode: Callable[[bytes], object], code: int, body: bytes, length: int
) -> None:
    """With the right head nothing is unusable: short or odd pages say less, no more."""
    decode(bytes((0, code)) + length.to_bytes(2, "big") + body)


@pytest.mark.parametrize(
    ("decode", "nothing"),
    list(
        zip(
            DECODERS[1:],
            ((), "", (), BlockLimits(), inquiry.Characteristics(False), Provisioning()),
            strict=True,
        )
    ),
)
def test_a_page_that_is_not_there(decode: Callable[[None], object], nothing: object) -> None:
    assert decode(None) == nothing


def test_another_page_than_asked_for() -> None:
    with pytest.raises(RemoteProtocolError, match="0x80 came instead of 0xb0"):
        inquiry.decode_block_limits(inquiry.encode_serial("S"))


def test_supported_pages_and_serial() -> None:
    assert inquiry.decode_supported_pages(inquiry.encode_supported_pages((0x83, 0, 0x80))) == (
        0,
        0x80,
        0x83,
    )
    assert inquiry.decode_serial(inquiry.encode_serial("  ABC 123 ")) == "ABC 123"


BLOCK_LIMITS = st.builds(
    BlockLimits,
    st.booleans(),
    st.integers(0, 255),
    st.integers(0, 0xFFFF),
    *[U32] * 6,
    st.just(0),
    st.integers(0, 2**64 - 1),
)


@given(BLOCK_LIMITS, st.integers(0, 0x7FFFFFFF))
def test_block_limits_round_trip(limits: BlockLimits, alignment: int) -> None:
    if limits.unmap_granularity:
        limits = limits._replace(unmap_alignment=alignment)
    raw = inquiry.encode_block_limits(limits)
    assert len(raw) == 64
    assert inquiry.decode_block_limits(raw) == limits


def test_block_limits_of_the_first_edition() -> None:
    """SBC-2's page ended behind the optimal transfer length."""
    full = BlockLimits(max_transfer_length=100, optimal_transfer_length=50, max_unmap_lba_count=7)
    raw = bytearray(inquiry.encode_block_limits(full)[:16])
    raw[3] = 12
    assert inquiry.decode_block_limits(raw) == full._replace(max_unmap_lba_count=0)  # type: ignore[arg-type]


def test_alignment_counts_only_when_valid() -> None:
    raw = bytearray(
        inquiry.encode_block_limits(BlockLimits(unmap_granularity=8, unmap_alignment=3))
    )
    assert inquiry.decode_block_limits(raw).unmap_alignment == 3  # type: ignore[arg-type]
    raw[32] &= 0x7F
    assert inquiry.decode_block_limits(raw).unmap_alignment == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "rotational"), [(0, False), (1, False), (7200, True)])
def test_characteristics(rate: int, rotational: bool) -> None:
    raw = bytearray(inquiry.encode_characteristics())
    assert not inquiry.decode_characteristics(raw).rotational  # type: ignore[arg-type]
    raw[4:6] = rate.to_bytes(2, "big")
    assert inquiry.decode_characteristics(raw).rotational is rotational  # type: ignore[arg-type]


@given(st.builds(Provisioning, *[st.booleans()] * 4))
def test_provisioning_round_trip(provisioning: Provisioning) -> None:
    raw = inquiry.encode_provisioning(provisioning)
    assert len(raw) == 8
    assert inquiry.decode_provisioning(raw) == provisioning


def test_identifiers() -> None:
    lun = inquiry.ASSOCIATION_LUN
    designators = [
        Designator(lun, inquiry.TYPE_NAA, inquiry.BINARY, bytes.fromhex("6001405aabbccdd0")),
        Designator(lun, inquiry.TYPE_EUI64, inquiry.BINARY, b"\1\2\3\4\5\6\7\x08"),
        Designator(lun, inquiry.TYPE_T10, inquiry.ASCII, b"VENDOR  42"),
        Designator(lun, inquiry.TYPE_NAME, inquiry.UTF8, inquiry.name_string("naa.60")),
        Designator(inquiry.ASSOCIATION_PORT, inquiry.TYPE_NAA, inquiry.BINARY, b"12345678"),
        Designator(lun, 0, inquiry.BINARY, b"vendor's own"),
    ]
    raw = inquiry.encode_identifiers(designators)
    assert list(inquiry.decode_designators(raw)) == designators
    assert inquiry.decode_identifiers(raw) == (
        "naa.6001405aabbccdd0",
        "eui.0102030405060708",
        "t10.VENDOR  42",
        "name.naa.60",
    )
    # A page cut inside a descriptor tells those before it.
    assert inquiry.decode_identifiers(raw[:20]) == ("naa.6001405aabbccdd0",)


def test_a_uuid_of_a_serial_number() -> None:
    """SPC-5, UUID identifier: 1h in the upper half of the first byte, a reserved one, the UUID. It
    stays what it is: initiators know LUNs by it."""
    raw = inquiry.uuid_of_serial("SN-1")
    assert raw[:2] == b"\x10\x00" and len(raw) == 18
    designator = Designator(inquiry.ASSOCIATION_LUN, inquiry.TYPE_UUID, inquiry.BINARY, raw)
    page = inquiry.encode_identifiers([designator])
    assert page[4:8] == bytes((1, 10, 0, 18))
    assert inquiry.decode_identifiers(page) == ("uuid.033a6e6e-d5db-57d0-9fb4-836d7ef71217",)


@pytest.mark.parametrize("raw", [bytes(18), b"\x20" + bytes(17), b"\x10" + bytes(16), b"\x10"])
def test_what_is_no_uuid(raw: bytes) -> None:
    designator = Designator(inquiry.ASSOCIATION_LUN, inquiry.TYPE_UUID, inquiry.BINARY, raw)
    assert inquiry.decode_identifiers(inquiry.encode_identifiers([designator])) == ()


def test_different_bytes_are_different_identifiers() -> None:
    """Also where they are no text: a T10 vendor ID may end with a binary number."""

    def named(kind: int, *raw: bytes) -> tuple[str, ...]:
        each = [Designator(inquiry.ASSOCIATION_LUN, kind, inquiry.BINARY, data) for data in raw]
        return inquiry.decode_identifiers(inquiry.encode_identifiers(each))

    assert named(inquiry.TYPE_T10, b"VENDOR  \1\2", b"VENDOR  \1\3", b"VENDOR  12") == (
        "t10.VENDOR 0x0102",
        "t10.VENDOR 0x0103",
        "t10.VENDOR  12",
    )
    assert len(set(named(inquiry.TYPE_NAME, "iqn.ä".encode(), "iqn.é".encode()))) == 2
    assert named(inquiry.TYPE_T10, bytes(12), b" " * 8) == ()


@pytest.mark.parametrize(
    "identifier",
    [
        "naa.60014051d2e3f4a5b6c7d8e9f0a1b2c3",
        "naa.5000c500aabb0001",
        "naa.2123000c50aabb00",
        "eui.0010c500aabb0001",
        "eui.0102030405060708" + "0010c500aabb0001",  # an extension, then the EUI-64
        "uuid.c7dd4d3b-3d1f-5f1d-8f3f-000000000001",
        "name.iqn.2026-11.example:disk,L,0x0001",
        "name.naa.60014051D2E3F4A5B6C7D8E9F0A1B2C3",
        "name.eui.0010C500AABB0001",
    ],
)
def test_what_is_unique_world_wide(identifier: str) -> None:
    assert inquiry.is_world_wide(identifier)


@pytest.mark.parametrize(
    "identifier",
    [
        "naa.3000000000010001",  # assigned locally: tgtd's
        "naa.6000000000000000000000000e000001",  # company 000000
        "naa.5000000000000001",
        "naa.2123000000aabb00",
        "naa.1000c500aabb0001",
        *("naa.", "naa.6", "naa.5xyzxyz00000001"),
        "eui.0000000100010001",
        "eui.0102030405060708" + "0000000100010001",
        "uuid.00000000-0000-0000-0000-000000000000",
        "t10.IET     00010001",
        *("name.", "name.iqn.", "name.disk", "name.naa.3000000000010001", "name.0x69716e2e"),
    ],
)
def test_what_is_not(identifier: str) -> None:
    assert not inquiry.is_world_wide(identifier)


def test_ports_and_targets_name_their_protocol() -> None:
    raw = inquiry.encode_identifiers(
        [Designator(inquiry.ASSOCIATION_TARGET, inquiry.TYPE_NAME, inquiry.UTF8, b"iqn\0")]
    )
    assert raw[4:8] == bytes((0x53, 0xA8, 0, 4))


@given(st.text(max_size=40), st.text(max_size=40))
def test_naa_follows_from_the_text_alone(one: str, other: str) -> None:
    naa = inquiry.naa_locally_assigned(one)
    assert len(naa) == 8 and naa[0] >> 4 == 3
    assert (naa == inquiry.naa_locally_assigned(other)) == (one == other)


@given(st.text(max_size=20))
def test_name_string_is_terminated_and_padded(name: str) -> None:
    raw = inquiry.name_string(name)
    assert len(raw) % 4 == 0 and raw[-1] == 0
    assert raw.rstrip(b"\0") == name.encode().rstrip(b"\0")


def test_device_types_in_words() -> None:
    assert inquiry.device_type_words(0x0C) == "a storage array controller"
    assert inquiry.device_type_words(0x1B) == "device type 0x1b"


def test_gateway() -> None:
    """The names of the longest way that is allowed fit into what is asked for."""
    page = inquiry.encode_gateway(["iqn.a", "iqn.b"])
    assert page == b"\0\xfd\0\x1ciserblk gateway\0iqn.a\0iqn.b\0"
    assert inquiry.decode_gateway(page) == ("iqn.a", "iqn.b")
    longest = tuple(f"iqn.{number:0219d}" for number in range(inquiry.MAX_GATEWAYS))
    page = inquiry.encode_gateway(longest)
    assert len(page) <= inquiry.GATEWAY_LENGTH and inquiry.decode_gateway(page) == longest


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"", ()),
        (b"another maker's page\0", ()),
        (b"iserblk gateway\0", ()),
        (b"iserblk gateway\0iqn.cut", ()),
        (b"iserblk gateway\0iqn.\xff\0\0", ("iqn.\ufffd", "")),
        (b"iserblk gateway\0iqn.\x1b[2J\n\0", ("iqn.?[2J?",)),
    ],
)
def test_gateway_pages_of_others(body: bytes, names: tuple[str, ...]) -> None:
    assert inquiry.decode_gateway(inquiry.encode_page(0xFD, body)) == names
    assert inquiry.decode_gateway(None) == ()
