"""ALUA: REPORT TARGET PORT GROUPS, identities of ports, and sense data that tells of states."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import alua, inquiry, sense
from iserblk.scsi.alua import PortGroup, PortIdentity

# Two groups of two ports each, as SPC-4 lays them out.
REPORT = bytes.fromhex(
    "00000020 80 8f 0001 00 02 00 02 0000 0001 0000 0002 02 8f 0002 00 01 00 02 0000 0003 0000 0004"
)
GROUPS = [PortGroup(1, 0, True, 0x8F, 2, (1, 2)), PortGroup(2, 2, False, 0x8F, 1, (3, 4))]


def test_cdb() -> None:
    assert alua.report_target_port_groups(1024).hex() == "a30a00000000000004000000"


def test_report() -> None:
    assert alua.decode_report(REPORT) == GROUPS
    assert alua.encode_report(GROUPS) == REPORT
    assert alua.length_of_report(REPORT[:4]) == len(REPORT)
    assert alua.length_of_report(b"") == 4
    assert [alua.state_words(each.state) for each in GROUPS] == ["active/optimized", "standby"]
    assert alua.state_words(9) == "access state 0x9"


@pytest.mark.parametrize("size", range(4, len(REPORT)))
def test_what_is_cut_off_is_left_out(size: int) -> None:
    found = alua.decode_report(REPORT[:size])
    assert found == GROUPS[: len(found)]
    assert len(found) == (size >= 20)


def test_bytes_behind_the_end_do_not_count() -> None:
    assert alua.decode_report(REPORT + REPORT[4:]) == GROUPS


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes came"),
        (b"\0\0\0", "3 bytes came"),
        (alua.encode_report([GROUPS[0], GROUPS[0]]), "group 1 was reported twice"),
    ],
)
def test_no_reports(data: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        alua.decode_report(data)


@given(st.binary(max_size=200))
def test_any_report(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        for group in alua.decode_report(data):
            assert 0 <= group.state <= 0x0F and alua.state_words(group.state)


def test_set() -> None:
    """Bytes of SPC-4, SET TARGET PORT GROUPS."""
    data = alua.encode_set({1: alua.STANDBY, 0x1234: alua.ACTIVE_OPTIMIZED})
    assert data.hex(" ") == "00 00 00 00 02 00 00 01 00 00 12 34"
    assert alua.decode_set(data) == [(1, alua.STANDBY), (0x1234, 0)]
    assert alua.set_target_port_groups(12).hex(" ") == "a4 0a 00 00 00 00 00 00 00 0c 00 00"
    for length in (0, 1, 3, 5, 11, 13):
        with pytest.raises(RemoteProtocolError):
            alua.decode_set(data[:length] if length <= 12 else data + b"x")


@given(st.binary(max_size=64))
def test_any_list(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert len(alua.decode_set(data)) == len(data) // 4 - 1


def test_port_identity() -> None:
    page = inquiry.encode_identifiers(alua.port_designators(3, 2))
    identity = alua.decode_port_identity(page)
    assert identity == PortIdentity(3, 2)
    assert alua.state_here(GROUPS, identity) == GROUPS[1]
    assert alua.state_here(GROUPS, PortIdentity(2)) == GROUPS[0]  # by the port alone
    assert alua.state_here(GROUPS, PortIdentity(1, 7)) is None
    assert alua.state_here(GROUPS, PortIdentity()) is None
    assert alua.decode_port_identity(None) == PortIdentity()


def test_designators_of_the_lun_name_no_port() -> None:
    raw = b"\0\0\0\5"
    page = inquiry.encode_identifiers(
        [
            inquiry.Designator(0, inquiry.TYPE_PORT_GROUP, inquiry.BINARY, raw),
            inquiry.Designator(1, inquiry.TYPE_PORT_GROUP, inquiry.BINARY, raw + b"\0"),
        ]
    )
    assert alua.decode_port_identity(page) == PortIdentity()


@given(st.binary(max_size=120))
def test_any_page(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        alua.decode_port_identity(data)


@pytest.mark.parametrize(
    ("key", "code", "state"),
    [
        (sense.NOT_READY, 0x040A, alua.TRANSITIONING),
        (sense.NOT_READY, 0x040B, alua.STANDBY),
        (sense.NOT_READY, 0x040C, alua.UNAVAILABLE),
        (sense.NOT_READY, 0x0412, alua.OFFLINE),
        (sense.ILLEGAL_REQUEST, 0x040C, alua.UNAVAILABLE),
        (sense.NOT_READY, 0x0401, None),
        (sense.UNIT_ATTENTION, 0x040B, None),
    ],
)
def test_states_in_sense_data(key: int, code: int, state: int | None) -> None:
    assert alua.state_of_sense(sense.decode(raw(key, code))) == state


def test_state_changes() -> None:
    for code, changed in ((0x2A06, True), (0x2A07, True), (0x2A09, False)):
        assert alua.is_state_change(sense.decode(raw(sense.UNIT_ATTENTION, code))) is changed
    assert not alua.is_state_change(sense.decode(raw(sense.NOT_READY, 0x2A06)))


def raw(key: int, code: int) -> bytes:
    return sense.encode_fixed(key, code >> 8, code & 0xFF)


@pytest.mark.parametrize("tpgs", range(4))
def test_tpgs_of_inquiry_data(tpgs: int) -> None:
    data = inquiry.encode_standard(inquiry.DISK, "V", "P", "1", tpgs)
    assert inquiry.decode_standard(data).tpgs == tpgs
    assert data[5] == tpgs << 4
