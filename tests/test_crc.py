"""CRC32C, in both forms."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk import crc

Crc = Callable[..., int]


@pytest.fixture(params=["iserblk._crc", "crc32c"])
def crc32c(request: pytest.FixtureRequest) -> Crc:
    if request.param == "iserblk._crc":
        pytest.importorskip(request.param, reason="not compiled: run scripts/setup")
    form: Crc = importlib.import_module(request.param).crc32c
    return form


def bitwise(data: bytes, value: int = 0) -> int:
    """By the definition: the reflected polynomial 82F63B78, a bit at a time."""
    rest = value ^ 0xFFFFFFFF
    for byte in data:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return rest ^ 0xFFFFFFFF


# RFC 7143 appendix A.4.
@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (bytes(32), "aa36918a"),
        (b"\xff" * 32, "43aba862"),
        (bytes(range(32)), "4e79dd46"),
        (bytes(range(31, -1, -1)), "5cdb3f11"),
    ],
)
def test_examples_of_the_standard(crc32c: Crc, data: bytes, digest: str) -> None:
    assert crc32c(data).to_bytes(4, "little").hex() == digest


def test_definition(crc32c: Crc) -> None:
    @given(st.binary(max_size=600), st.integers(0, 0xFFFFFFFF), st.integers(0, 64))
    def agrees(data: bytes, value: int, start: int) -> None:
        assert crc32c(memoryview(data)[start:], value) == bitwise(data[start:], value)

    agrees()


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5])
def test_large_ones_are_the_sum_of_their_parts(crc32c: Crc, size: int) -> None:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    value = 0
    for start in range(0, size, 65521):
        value = crc32c(data[start : start + 65521], value)
    assert crc32c(data) == value


def test_no_buffer_is_kept(crc32c: Crc) -> None:
    data = bytearray(b"123456789")
    assert crc32c(data) == 0xE3069283
    data.clear()
    for wrong in ("text", 7, memoryview(b"12345678")[::2]):
        with pytest.raises((TypeError, BufferError, ValueError)):
            crc32c(wrong)


def test_the_quickest_form_is_taken() -> None:
    try:
        import iserblk._crc  # noqa: PLC0415
    except ImportError:
        assert crc.crc32c.__module__.startswith("crc32c")
    else:
        assert crc.crc32c is iserblk._crc.crc32c
