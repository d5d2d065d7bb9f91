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
    @given(HALF, HALF, WORD, LONG, WORD)
    def reads(length: int, control: int, stag: int, to: int, word: int) -> None:
        memory = b"\xff" + ddp.HEADER.pack(length, control, stag, to, word) + b"\xff"
        assert form.unpack_header(memory, 1) == (length, control, stag, to, word)
        assert form.unpack_header(memoryview(memory)[1:-1], 0) == (length, control, stag, to, word)

    reads()


def test_a_header_that_is_not_there(form: Any) -> None:
    memory = memoryview(bytes(ddp.UNTAGGED_SIZE))
    for at in (1, *EDGES[2:]):
        with pytest.raises((IndexError, struct.error)):
            form.unpack_header(memory, at)
    with pytest.raises((IndexError, struct.error)):
        form.unpack_header(memory[:-1], 0)


def test_an_fpdu_ends_with_its_crc(form: Any) -> None:
    @given(st.binary(max_size=100), st.binary(max_size=9), st.integers(1, 2**32 - 1))
    def checks(data: bytes, before: bytes, error: int) -> None:
        crc = ddp.crc_of(data)
        start, stop = len(before), len(before) + len(data) + ddp.CRC_SIZE
        memory = mmap.mmap(-1, 4096)
        memory[:stop] = before + data + ddp.pack_crc(crc)
        assert form.is_valid(memory, start, stop) is True
        memory[:stop] = before + data + ddp.pack_crc(crc ^ error)
        assert form.is_valid(memory, start, stop) is False

    checks()


def test_the_longest_fpdu(form: Any) -> None:
    body = bytes(range(256)) * (ddp.MAX_FPDU // 256) + bytes(4)
    assert len(body) == ddp.MAX_FPDU - ddp.CRC_SIZE
    whole = body + ddp.pack_crc(ddp.crc_of(body))
    assert form.is_valid(whole, 0, len(whole))


def test_an_fpdu_that_is_not_there(form: Any) -> None:
    for start, stop in ((0, 25), (-1, 20), (21, 20), *((0, edge) for edge in EDGES[2:])):
        with pytest.raises(IndexError):
            form.is_valid(bytes(24), start, stop)


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
