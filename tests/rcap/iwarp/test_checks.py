"""The checks of segments: each rule with the Terminate that its breach gets, and its limits."""

from __future__ import annotations

import pytest

from iserblk.rcap import seam
from iserblk.rcap.iwarp import checks, ddp, rdmap
from iserblk.rcap.iwarp.reads import OutstandingRead
from iserblk.rcap.stags import Region

Code = tuple[int, int, int]

UNTAGGED = ddp.VERSION | rdmap.VERSION
TAGGED = UNTAGGED | ddp.TAGGED
LAST = TAGGED | ddp.LAST
LENGTH = 4096


def code(fault: checks.Fault | None) -> Code | None:
    """The Terminate's layer, type and code; every fault has words, too."""
    if fault is None:
        return None
    assert fault[0]
    return fault[1]


def region(rights: int = seam.REMOTE_READ | seam.REMOTE_WRITE) -> Region:
    made = Region(0x100)
    made.length = LENGTH
    made.rights = rights
    return made


# shows: SYSTEM-49
@pytest.mark.parametrize(
    ("of", "layer"), [(rdmap.TO_WRAP, "RDMAP"), (ddp.TO_WRAP, "DDP"), (ddp.MPA_CRC, "MPA")]
)
def test_the_exception_names_the_layer_of_the_terminate(of: Code, layer: str) -> None:
    error = checks.protocol_error(("words", of))
    assert (error.layer, error.terminate) == (layer, of)
    assert str(error) == f"{layer}: words"


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (UNTAGGED, None),
        (TAGGED, None),
        (TAGGED | 0x3C30, None),  # reserved bits
        (UNTAGGED & ~ddp.VERSION_MASK, ddp.UNTAGGED_VERSION),
        (TAGGED & ~ddp.VERSION_MASK, ddp.TAGGED_VERSION),
        (UNTAGGED | ddp.VERSION_MASK, ddp.UNTAGGED_VERSION),
        (TAGGED & ~rdmap.VERSION_MASK, rdmap.INVALID_VERSION),
        (TAGGED | rdmap.VERSION_MASK, rdmap.INVALID_VERSION),
        (ddp.TAGGED, ddp.TAGGED_VERSION),  # both are wrong: DDP's is looked at first
    ],
)
def test_versions(control: int, expected: Code | None) -> None:
    assert code(checks.version_fault(control)) == expected


def test_an_opcode_in_the_wrong_kind_of_segment() -> None:
    for control, opcode, kind in (
        (TAGGED | rdmap.SEND, 3, " tagged"),
        (UNTAGGED | rdmap.READ_RESPONSE, 2, " untagged"),
    ):
        text, terminate = checks.opcode_fault(control)
        assert str(opcode) in text and kind in text
        assert terminate == rdmap.UNEXPECTED_OPCODE


RANGES = [
    (0, LENGTH, None),
    (LENGTH - 1, 1, None),
    (LENGTH, 1, "bounds"),
    (1, LENGTH, "bounds"),
    (ddp.MAX_TO, 1, "bounds"),
    (ddp.MAX_TO, 2, "wrap"),
]


@pytest.mark.parametrize(("to", "size", "fault"), RANGES)
def test_ranges_of_a_write_and_of_the_source_of_a_read(
    to: int, size: int, fault: str | None
) -> None:
    """The same rules, under the codes of DDP and of RDMAP."""
    write = {None: None, "bounds": ddp.BASE_OR_BOUNDS, "wrap": ddp.TO_WRAP}
    read = {None: None, "bounds": rdmap.BASE_OR_BOUNDS, "wrap": rdmap.TO_WRAP}
    assert code(checks.write_fault(region(), 0x100, to, size)) == write[fault]
    assert code(checks.source_fault(region(), 0x100, to, size)) == read[fault]


def test_rights() -> None:
    readable, writable = region(seam.REMOTE_READ), region(seam.REMOTE_WRITE)
    assert checks.write_fault(writable, 0x100, 0, 1) is None
    assert code(checks.write_fault(readable, 0x100, 0, 1)) == rdmap.ACCESS_RIGHTS
    assert checks.source_fault(readable, 0x100, 0, 1) is None
    assert code(checks.source_fault(writable, 0x100, 0, 1)) == rdmap.ACCESS_RIGHTS


def test_rights_come_before_bounds_and_the_stag_before_both() -> None:
    assert code(checks.write_fault(None, 0x100, LENGTH, 1)) == ddp.INVALID_STAG
    assert code(checks.source_fault(None, 0x100, LENGTH, 1)) == rdmap.INVALID_STAG
    assert code(checks.write_fault(region(0), 0x100, LENGTH, 1)) == rdmap.ACCESS_RIGHTS
    assert code(checks.source_fault(region(0), 0x100, LENGTH, 1)) == rdmap.ACCESS_RIGHTS


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"qn": ddp.QN_SEND}, ddp.INVALID_QN),
        ({"msn": 8}, ddp.MSN_RANGE),
        ({"msn": 6}, ddp.MSN_RANGE),
        ({"mo": 4}, ddp.INVALID_MO),
        ({"control": UNTAGGED}, ddp.INVALID_MO),  # not the last segment
        ({"length": 45}, ddp.MESSAGE_TOO_LONG),
        ({"length": 47}, ddp.MESSAGE_TOO_LONG),
        ({"qn": 2, "msn": 8}, ddp.INVALID_QN),
    ],
)
def test_the_framing_of_a_read_request(changes: dict[str, int], expected: Code | None) -> None:
    """18 bytes of header, and 28 of the request, make a ULPDU of 46 bytes."""
    good = {"length": 46, "control": UNTAGGED | ddp.LAST, "qn": 1, "msn": 7, "mo": 0}
    fault = checks.read_request_fault(**{**good, **changes}, expected_msn=7)
    assert code(fault) == expected


def outstanding() -> OutstandingRead:
    """A Read of 1000 bytes with STag 9, of which 400 bytes have come."""
    read = OutstandingRead(9, memoryview(bytearray(1000)), "token")
    read.placed = 400
    return read


@pytest.mark.parametrize(
    ("size", "control", "stag", "to", "expected"),
    [
        (300, TAGGED, 9, 400, None),
        (600, LAST, 9, 400, None),
        (600, TAGGED, 9, 400, None),  # an empty last segment may follow
        (300, TAGGED, 8, 400, ddp.INVALID_STAG),
        (300, TAGGED, 9, 399, ddp.BASE_OR_BOUNDS),
        (300, TAGGED, 9, 401, ddp.BASE_OR_BOUNDS),
        (601, LAST, 9, 400, ddp.BASE_OR_BOUNDS),
        (599, LAST, 9, 400, ddp.BASE_OR_BOUNDS),  # the response ends too early
        (0, TAGGED, 8, 77, None),  # an empty segment: its STag and TO do not count
        (0, LAST, 9, 400, ddp.BASE_OR_BOUNDS),
    ],
)
def test_a_read_response(
    size: int, control: int, stag: int, to: int, expected: Code | None
) -> None:
    assert code(checks.response_fault(outstanding(), size, control, stag, to)) == expected


def test_a_read_response_without_a_read() -> None:
    assert code(checks.response_fault(None, 0, LAST, 9, 0)) == rdmap.UNEXPECTED_OPCODE


@pytest.mark.parametrize(
    ("size", "receives", "fields", "expected"),
    [
        (100, 1, (0, 5, 0), None),
        (512, 1, (0, 5, 0), None),
        (0, 1, (0, 5, 0), None),
        (-1, 1, (0, 5, 0), ddp.MPA_LENGTH),
        (100, 1, (1, 5, 0), ddp.INVALID_QN),
        (100, 1, (0, 6, 0), ddp.MSN_RANGE),
        (100, 1, (0, 5, 4), ddp.INVALID_MO),
        (100, 0, (0, 5, 0), ddp.NO_BUFFER),
        (513, 1, (0, 5, 0), ddp.MESSAGE_TOO_LONG),
    ],
)
def test_a_send(
    size: int, receives: int, fields: tuple[int, int, int], expected: Code | None
) -> None:
    """Receives have 512 bytes, and MSN 5 from its beginning is expected."""
    assert code(checks.send_fault(size, 512, receives, fields, (5, 0))) == expected


def test_later_segments_count_with_those_before() -> None:
    assert checks.send_fault(112, 512, 1, (0, 5, 400), (5, 400)) is None
    fault = checks.send_fault(113, 512, 1, (0, 5, 400), (5, 400))
    assert code(fault) == ddp.MESSAGE_TOO_LONG
