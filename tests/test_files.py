"""fallocate(2) on real files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.files import PUNCH_HOLE, ZERO_RANGE, fallocate

SIZE = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(found, b"x" * SIZE)
    yield found
    os.close(found)


@pytest.mark.parametrize("mode", [PUNCH_HOLE, ZERO_RANGE])
def test_the_range_reads_as_zeroes_and_the_size_stays(fd: int, mode: int) -> None:
    if not fallocate(fd, mode, 4096, 8192):
        pytest.skip("the file system of the tests does not know this mode")
    assert os.fstat(fd).st_size == SIZE
    assert os.pread(fd, SIZE, 0) == b"x" * 4096 + bytes(8192) + b"x" * (SIZE - 12288)


def test_nothing_grows_behind_the_end(fd: int) -> None:
    if not fallocate(fd, PUNCH_HOLE, SIZE, 4096):
        pytest.skip("the file system of the tests does not punch holes")
    assert os.fstat(fd).st_size == SIZE


def test_what_cannot_have_holes_says_so_or_fails() -> None:
    """A pipe: ESPIPE, an error like any other."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ESPIPE)) as caught:
            fallocate(writing, PUNCH_HOLE, 0, 1)
        assert caught.value.errno == errno.ESPIPE
    finally:
        os.close(reading)
        os.close(writing)


def test_a_mode_that_is_not_known() -> None:
    """A file system in memory cannot collapse a range."""
    fd = os.memfd_create("file")
    try:
        os.ftruncate(fd, 8192)
        assert fallocate(fd, 0x08, 0, 4096) is False
        assert os.fstat(fd).st_size == 8192
    finally:
        os.close(fd)


def test_a_descriptor_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError) as caught:
            fallocate(fd, PUNCH_HOLE, 0, 1)
        assert caught.value.errno == errno.EBADF
    finally:
        os.close(fd)
