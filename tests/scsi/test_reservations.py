"""CDBs and parameter data of persistent reservations."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.scsi import reservations as pr
from iserblk.scsi.reservations import FullStatus, OutParameters, Reservation, TransportId

KEYS = st.integers(0, pr.MAXIMUM_KEY)
GENERATIONS = st.integers(0, 2**32 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
TRANSPORT_IDS = st.builds(
    TransportId, NAMES, st.just(b"") | st.binary(min_size=6, max_size=6)
).filter(lambda each: each.isid or ",i,0x" not in each.name)
TYPES = st.sampled_from(pr.TYPES)
HOST = TransportId("iqn.2026-11.example:host", bytes.fromhex("800102030405"))


@st.composite
def full_status(draw: st.DrawFn) -> FullStatus:
    holder = draw(st.booleans())
    kind = draw(TYPES) if holder else 0
    port = draw(st.integers(0, 65535))
    return FullStatus(draw(KEYS), holder, kind, draw(st.booleans()), port, draw(TRANSPORT_IDS))


def test_cdbs() -> None:
    assert pr.reserve_in(pr.READ_FULL_STATUS, 0x1234).hex() == "5e030000000000123400"
    out = pr.reserve_out(pr.PREEMPT_AND_ABORT, pr.EXCLUSIVE_ACCESS_REGISTRANTS)
    assert out.hex() == "5f050600000000001800"


def test_golden() -> None:
    raw = pr.encode_parameters(OutParameters(0x0102030405060708, 0x1112131415161718, pr.APTPL))
    assert raw.hex(" ", 4) == "01020304 05060708 11121314 15161718 00000000 01000000"
    raw = pr.encode_reservation(7, Reservation(0xAB, 6))
    assert raw.hex(" ", 4) == "00000007 00000010 00000000 000000ab 00000000 00060000"
    assert pr.encode_capabilities(0x04).hex() == "00080480ea010000"
    raw = pr.encode_transport_id(HOST)
    assert raw == b"\x45\0\0\x2c" + b"iqn.2026-11.example:host,i,0x800102030405\0".ljust(44, b"\0")
    short = pr.encode_transport_id(TransportId("iqn.a", b""))
    assert short == b"\x05\0\0\x14" + b"iqn.a".ljust(20, b"\0")


@given(KEYS, KEYS, st.integers(0, 255))
def test_parameters_round_trip(key: int, action_key: int, flags: int) -> None:
    parameters = OutParameters(key, action_key, flags)
    raw = pr.encode_parameters(parameters)
    assert len(raw) == pr.PARAMETER_LENGTH + (4 if flags & pr.SPEC_I_PT else 0)
    assert pr.decode_parameters(memoryview(raw)) == parameters


@pytest.mark.parametrize("key", [-1, 2**64])
def test_keys_that_cannot_be(key: int) -> None:
    for parameters in (OutParameters(key), OutParameters(0, key)):
        with pytest.raises(LocalProtocolError, match="64 bits"):
            pr.encode_parameters(parameters)


@given(TRANSPORT_IDS)
def test_transport_id_round_trip(initiator: TransportId) -> None:
    raw = pr.encode_transport_id(initiator)
    assert len(raw) % 4 == 0 and len(raw) >= 24 and raw[-1] == 0
    assert pr.decode_transport_id(raw) == initiator


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x45\0\0",
        b"\x05\0\0\x14" + bytes(20),
        b"\x05\0\0\x04\xff\xfe\0\0",
        b"\x45\0\0\x14" + bytes(20),
        b"\x45\0\0\x04\xff\xfe\0\0",
    ],
)
def test_transport_ids_that_cannot_be(raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        pr.decode_transport_id(raw)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"iqn.a\0,\0i\0,\0000\0x\0", "iqn.a"),  # as some versions of LIO do, in part
        (b"iqn.a\0\0\0", "iqn.a"),
        (b"iqn.a,i,0x0102\0\0", "iqn.a,i,0x0102"),
        (b"iqn.a,i,0x01020304050x\0\0", "iqn.a,i,0x01020304050x"),
        (b",i,0x010203040506\0\0\0", ",i,0x010203040506"),
    ],
)
def test_transport_ids_without_the_isid_that_they_announce(raw: bytes, name: str) -> None:
    whole = b"\x45\0" + len(raw).to_bytes(2, "big") + raw
    assert pr.decode_transport_id(whole) == (name, b"")


def test_transport_id_of_another_protocol() -> None:
    assert pr.decode_transport_id(b"\x06\0\0\0" + bytes(20)) is None  # SAS


@given(GENERATIONS, st.lists(KEYS, max_size=9))
def test_keys_round_trip(generation: int, keys: list[int]) -> None:
    raw = pr.encode_keys(generation, keys)
    assert pr.decode_keys(raw) == (generation, keys)
    assert pr.decode_keys(raw[:-1] if keys else raw) == (generation, keys[:-1])


@given(GENERATIONS, st.none() | st.builds(Reservation, KEYS, TYPES, st.integers(0, 15)))
def test_reservation_round_trip(generation: int, reservation: Reservation | None) -> None:
    raw = pr.encode_reservation(generation, reservation)
    assert pr.decode_reservation(raw) == (generation, reservation)


def test_a_reservation_cut_short_is_not_taken_for_none() -> None:
    raw = pr.encode_reservation(1, Reservation(5, 1))
    for length in range(len(raw)):
        with pytest.raises(RemoteProtocolError):
            pr.decode_reservation(raw[:length])


def test_capabilities() -> None:
    found = pr.decode_capabilities(pr.encode_capabilities(0x01))
    assert found.persists and found.types == set(pr.TYPES)  # type: ignore[comparison-overlap]
    assert not pr.decode_capabilities(pr.encode_capabilities(0x04)).persists
    assert pr.decode_capabilities(bytes.fromhex("0008000080000000")).types is None
    only = pr.decode_capabilities(bytes.fromhex("0008008008010000"))
    assert only.types == {pr.EXCLUSIVE_ACCESS, pr.EXCLUSIVE_ACCESS_ALL}  # type: ignore[comparison-overlap]
    with pytest.raises(RemoteProtocolError):
        pr.decode_capabilities(bytes(7))


@given(GENERATIONS, st.lists(full_status(), max_size=5))
def test_full_status_round_trip(generation: int, registrations: list[FullStatus]) -> None:
    raw = pr.encode_full_status(generation, registrations)
    assert pr.decode_full_status(raw) == (generation, registrations)
    if registrations:
        assert pr.decode_full_status(raw[:-1]) == (generation, registrations[:-1])


def test_a_registration_of_no_iscsi_initiator() -> None:
    raw = pr.encode_full_status(1, [FullStatus(7, True, 1, False, 1, None)])
    assert pr.decode_full_status(raw)[1][0].initiator is None


@given(st.binary(max_size=120) | st.binary(max_size=80).map(lambda raw: bytes(7) + b"\x60" + raw))
def test_hostile_bytes(data: bytes) -> None:
    for decode in (
        pr.decode_keys,
        pr.decode_reservation,
        pr.decode_capabilities,
        pr.decode_full_status,
        pr.decode_parameters,
        pr.decode_transport_id,
    ):
        with contextlib.suppress(RemoteProtocolError):
            decode(data)
    for head in (b"\x05\0\0\x40", b"\x45\0\0\x40"):
        with contextlib.suppress(RemoteProtocolError):
            found = pr.decode_transport_id(head + data)
            assert found is not None and found.name


def test_words() -> None:
    assert pr.type_words(6) == "Exclusive Access, Registrants Only"
    assert pr.type_words(2) == "reservation type 0x2"


def test_golden_parameter_list_with_spec_i_pt() -> None:
    """SPC-4, PERSISTENT RESERVE OUT parameter list: SPEC_I_PT is bit 3 of byte 20; TRANSPORTID
    PARAMETER DATA LENGTH in bytes 24-27, then the TransportIDs."""
    name = b"iqn.2026-11.example:b,i,0x806162636465"
    raw = bytes.fromhex(
        "0000000000000000 000000000000000a 00000000 08 000000"
        "0000002c 45 00 0028"
    ) + name + b"\0\0"  # fmt: skip
    initiator = TransportId("iqn.2026-11.example:b", b"\x80abcde")
    assert pr.encode_parameters(OutParameters(0, 0xA, pr.SPEC_I_PT, (initiator,))) == raw
    assert pr.decode_parameters(raw) == (0, 0xA, pr.SPEC_I_PT, (initiator,))
    other = b"\x06" + bytes(23)  # SAS: 24 bytes, no length
    both = raw[:24] + (24 + 44).to_bytes(4, "big") + other + raw[28:]
    assert pr.decode_parameters(both).initiators == (None, initiator)


def test_golden_parameter_list_of_register_and_move() -> None:
    """SPC-4, PERSISTENT RESERVE OUT with REGISTER AND MOVE: UNREG and APTPL in byte 17, RELATIVE
    TARGET PORT IDENTIFIER in bytes 18-19, the TransportID's length in 20-23."""
    raw = bytes.fromhex(
        "000000000000000a 000000000000000b 00 03 0102 0000002c 45 00 0028"
    ) + b"iqn.2026-11.example:b,i,0x806162636465\0\0"[:40]  # fmt: skip
    initiator = TransportId("iqn.2026-11.example:b", b"\x80abcde")
    moved = pr.MoveParameters(0xA, 0xB, pr.UNREG | pr.APTPL, 0x0102, initiator)
    assert pr.encode_move_parameters(moved) == raw
    assert pr.decode_move_parameters(raw) == moved
    for wrong in (raw[:23], raw[:-1], raw + bytes(4), raw[:20] + bytes(4)):
        with pytest.raises(RemoteProtocolError):
            pr.decode_move_parameters(wrong)
