"""Markers and CRC: the figures of RFC 5044, and streams checked by an independent reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.rcap.iwarp import ddp
from iserblk.rcap.iwarp.markers import MarkerFramer
from tests.rcap.wire import Unmarker

# RFC 5044 figure 5: the first FPDU of a stream; figure 6: the second, after one of 492 bytes.
FIGURE_5 = bytes.fromhex(
    "00000000 002a4143 00000000 00000000 00000001 00000000" + "00" * 24 + "52239983"
)
FIGURE_6 = bytes.fromhex(
    "002a4143 00000000 00000000 00000002 00000000 00000014" + "00" * 24 + "84925898"
)


def _send(msn: int, size: int) -> list[bytes]:
    header = ddp.UntaggedHeader(18 + size, 0x4143, 0, 0, msn, 0)
    return [header.pack(), bytes(size)]


# shows: SYSTEM-14
def test_figure_5() -> None:
    # proves: ISER-5.1-13
    assert MarkerFramer(crc=True).frame(_send(1, 24)) == FIGURE_5


def test_figure_6() -> None:
    framer = MarkerFramer(crc=True)
    # An FPDU of 492 bytes with its marker: 488 without, 20 of header and 4 of CRC.
    assert len(framer.frame(_send(1, 464))) == 492
    assert framer.frame(_send(2, 24)) == FIGURE_6


# shows: SYSTEM-14
@pytest.mark.parametrize("crc", [True, False])
@given(sizes=st.lists(st.integers(0, 1600), min_size=1, max_size=12))
def test_an_independent_reader_finds_every_marker_and_crc(crc: bool, sizes: list[int]) -> None:
    framer, reader = MarkerFramer(crc=crc), Unmarker(crc=crc)
    for msn, size in enumerate(sizes, 1):
        pieces = _send(msn, size)
        clean = ddp.encode_fpdu(
            ddp.UntaggedHeader(18 + size, 0x4143, 0, 0, msn, 0), bytes(size), crc=crc
        )
        assert reader.feed(framer.frame(pieces)) == clean
    assert reader.position == framer.position
    assert reader.markers == -(-framer.position // 512)


@pytest.mark.parametrize("emss", [536, 1448, 1460, 9000, 65483])
def test_fpdu_with_markers_fits_the_segment_wherever_it_starts(emss: int) -> None:
    largest = ddp.mulpdu(emss, crc=True, markers=True)
    for position in range(0, 1024, 4):
        framer = MarkerFramer(crc=True)
        framer.position = position
        assert len(framer.frame([bytes(largest + 2)])) <= emss


@pytest.mark.parametrize(
    ("emss", "crc", "markers", "expected"),
    [
        (1448, True, False, 1442),
        (1460, True, False, 1454),
        (1461, True, False, 1454),
        (1448, True, True, 1430),
        (1448, False, False, 65535),
        (1448, False, True, 1430),
        (100, True, False, 128),
        (100, True, True, 128),
    ],
)
def test_mulpdu(emss: int, crc: bool, markers: bool, expected: int) -> None:
    assert ddp.mulpdu(emss, crc=crc, markers=markers) == expected
