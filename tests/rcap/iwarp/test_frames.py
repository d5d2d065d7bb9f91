"""What an FPDU takes in one call, in both forms, against the layouts of ``ddp``."""

from __future__ import annotations

import importlib
import mmap
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.rcap.iwarp import ddp, frames

COMPILED = "iserblk.rcap.iwarp._frames"
NAMES = frames.__all__

WORD = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
LONG = st.sampled_from([0, 2**32, 2**62 - 1, 2**62, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
HALF = st.integers(0, 2**16 - 1)
EDGES = [0, 1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]


class Form:
    """The functions of one form, by the names that they have in ``frames``."""

    def __init__(self, module: Any, prefix: str) -> None:
        for name in NAMES:
            setattr(self, name, getattr(module, prefix + name))


@pytest.fixture(params=["compiled", "as written"], scope="module")
def form(request: pytest.FixtureRequest) -> Any:
    if request.param == "as written":
        return Form(frames, "_")
    pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
    return Form(importlib.import_module(COMPILED), "")


def test_the_compiled_form_is_used() -> None:
    compiled = pytest.importorskip(COMPILED, reason="not compiled: run scripts/setup")
    assert all(getattr(frames, name) is getattr(compiled, name) for name in NAMES)


def test_a_header_of_either_kind(form: Any) -> None:
    @given(HALF, HALF, WORD, LONG, WORD, st.booleans())
    def reads(length: int, control: int, stag: int, to: int, word: int, crc: bool) -> None:
        memory = b"\xff" + ddp.HEADER.pack(length, control, stag, to, word) + b"\xff"
        fields = (length, control, stag, to, word)
        assert form.look(memory, 1, len(memory), crc)[:5] == fields
        assert form.look(memoryview(memory)[1:-1], 0, ddp.UNTAGGED_SIZE, crc)[:5] == fields

    reads()


def test_a_header_that_is_not_there(form: Any) -> None:
    memory = memoryview(bytes(ddp.UNTAGGED_SIZE))
    far_below = ((at, -(2**63) + below) for at in (0, 1, 2**63 - 1) for below in (0, 19, 20))
    for at, stop in ((-1, 20), (1, 20), (1, 21), (0, 19), (0, -1), (20, 0), *far_below):
        with pytest.raises(IndexError):
            form.look(memory, at, stop, True)
    for edge in EDGES[2:]:
        for at, stop in ((edge, 20), (0, edge), (edge, edge)):
            with pytest.raises(IndexError):
                form.look(memory, at, stop, True)
    with pytest.raises(IndexError):
        form.look(memory[:-1], 0, ddp.UNTAGGED_SIZE, False)


def fpdu(length: int, seed: int) -> bytes:
    """An FPDU with its CRC, whose ULPDU has ``length`` bytes."""
    body = length.to_bytes(2, "big") + bytes((seed + at) & 0xFF for at in range(length))
    body += bytes(-len(body) & 3)
    return body + ddp.pack_crc(ddp.crc_of(body))


def test_an_fpdu_may_be_taken(form: Any) -> None:
    least = ddp.TAGGED_SIZE - ddp.LENGTH_SIZE

    @given(st.integers(least, 100), st.integers(0, 9), st.integers(1, 2**32 - 1), st.booleans())
    def takes(length: int, before: int, error: int, crc: bool) -> None:
        whole = fpdu(length, error)
        stop = before + len(whole)
        memory = mmap.mmap(-1, 4096)
        memory[before:stop] = whole
        assert form.look(memory, before, stop, crc)[5] is True
        assert form.look(memory, before, stop + 100, crc)[5] is True
        if len(whole) > ddp.UNTAGGED_SIZE:
            assert form.look(memory, before, stop - 1, crc)[5] is False
        wrong = int.from_bytes(whole[-ddp.CRC_SIZE :], "little") ^ error
        memory[stop - ddp.CRC_SIZE : stop] = ddp.pack_crc(wrong)
        assert form.look(memory, before, stop, crc)[5] is not crc

    takes()


def test_an_fpdu_has_room_for_a_header(form: Any) -> None:
    for length in range(ddp.TAGGED_SIZE - ddp.LENGTH_SIZE):
        whole = fpdu(length, 1) + bytes(ddp.UNTAGGED_SIZE)
        for crc in (True, False):
            assert form.look(whole, 0, len(whole), crc)[5] is False


def test_the_longest_fpdu(form: Any) -> None:
    whole = fpdu(ddp.MAX_ULPDU, 1)
    assert len(whole) == ddp.MAX_FPDU
    assert form.look(whole, 0, len(whole), True)[5] is True
    assert form.look(whole, 0, len(whole) - 1, True)[5] is False


def test_data_comes_to_its_place(form: Any) -> None:
    @given(st.binary(min_size=1, max_size=64), st.data())
    def places(data: bytes, draw: st.DataObject) -> None:
        size = draw.draw(st.integers(0, len(data)))
        start = draw.draw(st.integers(0, len(data) - size))
        to = draw.draw(st.integers(0, 40))
        target = bytearray(b"\xee" * (to + size + 3))
        form.place(memoryview(target), to, memoryview(data), start, size)
        assert target == b"\xee" * to + data[start : start + size] + b"\xee" * 3

    places()


@pytest.mark.parametrize(
    ("to", "start", "size"),
    [(5, 0, 4), (0, 5, 4), (-1, 0, 4), (0, -1, 4), (0, 0, 9), (0, 0, -1), (9, 0, 0), (0, 9, 0)]
    + [place for edge in EDGES[2:] for place in ((edge, 0, 4), (0, edge, 4), (0, 0, edge))],
)
def test_a_place_outside_of_a_buffer(form: Any, to: int, start: int, size: int) -> None:
    target = bytearray(8)
    with pytest.raises(IndexError):
        form.place(memoryview(target), to, memoryview(b"\xee" * 8), start, size)
    assert target == bytes(8)


def test_a_place_that_is_read_only(form: Any) -> None:
    with pytest.raises((BufferError, TypeError)):
        form.place(memoryview(bytes(8)), 0, memoryview(b"\xee" * 8), 0, 4)


@pytest.mark.parametrize("crc", [True, False])
def test_the_frame_of_a_send(form: Any, crc: bool) -> None:
    @given(st.binary(max_size=70), HALF, WORD, WORD)
    def fills(message: bytes, control: int, invalidate: int, msn: int) -> None:
        ulpdu = len(message) + ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE
        frame = bytearray(b"\xff" * ddp.fpdu_size(ulpdu))
        end = ddp.UNTAGGED_SIZE + len(message)
        frame[ddp.UNTAGGED_SIZE : -ddp.CRC_SIZE] = message + bytes(-end & 3)
        form.fill_send(memoryview(frame), ulpdu, control, invalidate, msn, crc)
        header = ddp.UntaggedHeader(ulpdu, control, invalidate, 0, msn, 0)
        wanted = ddp.encode_fpdu(header, message, crc=crc)
        assert frame[: -ddp.CRC_SIZE] == wanted[: -ddp.CRC_SIZE]
        assert frame[-ddp.CRC_SIZE :] == (wanted[-ddp.CRC_SIZE :] if crc else b"\xff" * 4)

    fills()


def test_a_frame_that_is_too_short(form: Any) -> None:
    frame = bytearray(ddp.UNTAGGED_SIZE + ddp.CRC_SIZE - 1)
    with pytest.raises(IndexError):
        form.fill_send(memoryview(frame), 18, 0x4143, 1, 2, True)
    assert not any(frame)


@pytest.mark.parametrize("crc", [True, False])
def test_what_is_around_tagged_data(form: Any, crc: bool) -> None:
    @given(st.binary(max_size=70), HALF, WORD, LONG)
    def surrounds(data: bytes, control: int, stag: int, to: int) -> None:
        header, trailer = form.around_tagged(memoryview(data), control, stag, to, crc)
        ulpdu = len(data) + ddp.TAGGED_SIZE - ddp.LENGTH_SIZE
        layout = ddp.TaggedHeader(ulpdu, control, stag, to)
        assert header + data + trailer == ddp.encode_fpdu(layout, data, crc=crc)

    surrounds()


def test_the_longest_tagged_data(form: Any) -> None:
    most = ddp.MAX_ULPDU - ddp.TAGGED_SIZE + ddp.LENGTH_SIZE
    header, trailer = form.around_tagged(memoryview(bytes(most)), 0xC140, 1, 0, True)
    assert header[:2] == b"\xff\xff"
    assert len(header) + most + len(trailer) == ddp.fpdu_size(ddp.MAX_ULPDU)
    with pytest.raises((IndexError, OverflowError, struct.error)):
        form.around_tagged(memoryview(bytes(most + 1)), 0xC140, 1, 0, True)


@pytest.mark.parametrize("wrong", [-1, 2**64])
def test_numbers_that_no_field_takes(form: Any, wrong: int) -> None:
    with pytest.raises((OverflowError, struct.error)):
        form.around_tagged(memoryview(b""), 0xC140, 1, wrong, True)
    with pytest.raises((OverflowError, struct.error)):
        form.fill_send(memoryview(bytearray(24)), 18, 0x4143, wrong, 2, True)
