"""A disk as a file object, over a disk in memory."""

from __future__ import annotations

import errno
import io
import random
from typing import Any, cast

import pytest

from iserblk.disk.file import BUFFER, DiskFile, open_file
from iserblk.disk.seam import BlockingDisk, FlushClient
from iserblk.errors import BadArgument, CommandTimeout, OutOfRange, WriteProtected
from tests.support.fake_disk import FakeDisk, lun_info

SIZE = 64 << 10


class Memory(FakeDisk):
    """Has the attributes of a real disk that a file needs. ``flushes``: how many; ``error``: what
    every call raises."""

    def __init__(self, size: int = SIZE, **changes: Any) -> None:
        super().__init__(lun_info(0, size=size, **changes))
        self.data[:] = random.Random(size).randbytes(size)
        self.flushes = 0
        self.requests: list[tuple[str, int, int]] = []
        self.error: Exception | None = None

    @property
    def size(self) -> int:
        return self.info.size

    def check(self, method: str, offset: int, length: int) -> None:
        self.requests.append((method, offset, length))
        if self.error is not None:
            raise self.error
        super().check(method, offset, length)

    def flush(self, client: FlushClient | None = None) -> None:
        super().flush(client)
        self.flushes += 1


def opened(disk: Memory, mode: str = "rb", buffering: int = -1, **window: Any) -> Any:
    return open_file(cast(BlockingDisk, disk), mode, buffering, **window)


@pytest.mark.parametrize("buffering", [0, 700, -1])
@pytest.mark.parametrize("window", [{}, {"offset": 1000, "length": 9999}])
def test_as_a_file_in_memory(buffering: int, window: dict[str, int]) -> None:
    """Random reads, writes and seeks do what they do to a BytesIO that cannot grow."""
    disk = Memory()
    start, size = window.get("offset", 0), window.get("length", SIZE)
    before = bytes(disk.data)
    model = io.BytesIO(before[start : start + size])
    chance = random.Random(buffering)
    with opened(disk, "r+b", buffering, **window) as file:
        for _ in range(400):
            match chance.randrange(6):
                case 0:
                    at = chance.randrange(size + 100)
                    assert file.seek(at) == model.seek(at)
                case 1:
                    by = chance.randrange(-200, 200)
                    if model.tell() + by >= 0:
                        assert file.seek(by, io.SEEK_CUR) == model.seek(by, io.SEEK_CUR)
                case 2:
                    assert file.seek(-77, io.SEEK_END) == model.seek(-77, io.SEEK_END)
                case 3:
                    data = chance.randbytes(chance.choice((0, 1, 511, 700, 5000)))
                    data = data[: max(0, size - model.tell())]
                    assert file.write(data) == model.write(data)
                case 4:
                    count = chance.choice((0, 1, 512, 800, 6000, -1))
                    assert file.read(count) == model.read(count)
                case 5:
                    buffer, other = bytearray(3000), bytearray(3000)
                    assert file.readinto(buffer) == model.readinto(other)
                    assert buffer == other
            assert file.tell() == model.tell()
    assert disk.data[start : start + size] == model.getvalue()
    assert disk.data[:start] == before[:start]
    assert disk.data[start + size :] == before[start + size :]


@pytest.mark.parametrize("buffering", [0, -1])
def test_the_end(buffering: int) -> None:
    """Reads end there. A write is cut there, and the next one finds no room."""
    disk = Memory()
    with opened(disk, "r+b", buffering) as file:
        file.seek(-10, io.SEEK_END)
        assert file.read(100) == disk.data[-10:] and file.read(100) == b""
        file.seek(SIZE + 5)
        assert file.read() == b"" and file.readinto(bytearray(4)) == 0
        file.seek(-4, io.SEEK_END)
        if not buffering:
            assert file.write(b"12345678") == 4
            assert file.write(b"") == 0
        with pytest.raises(OSError, match=f"ends at byte {SIZE}") as caught:
            file.write(b"12345678")
            file.flush()
        assert caught.value.errno == errno.ENOSPC
        if buffering:
            file.raw.close()  # what is left in the buffer has no place
    assert disk.data[-4:] == b"1234"


def test_one_request_for_each_call_without_a_buffer() -> None:
    disk = Memory()
    with opened(disk, "r+b", 0) as file:
        file.seek(700)
        file.read(1000)
        file.write(b"x" * 5000)
        assert disk.requests == [("read", 700, 1000), ("write", 1700, 5000)]
        assert file.readall() == disk.data[6700:]


def test_few_requests_with_a_buffer() -> None:
    disk = Memory(8 * BUFFER)
    with opened(disk) as file:
        assert b"".join(iter(lambda: file.read(1000), b"")) == disk.data
    assert [length for _, _, length in disk.requests] == [BUFFER] * 8


@pytest.mark.parametrize("buffering", [0, -1])
@pytest.mark.parametrize("mode", ["wb", "r+b"])
def test_flush_and_close_are_synchronize_cache(mode: str, buffering: int) -> None:
    """And nothing else is: not a seek, nor what the buffer writes by itself."""
    disk = Memory()
    file = opened(disk, mode, buffering)
    file.write(b"a" * 10)
    file.seek(100)
    file.write(b"b" * 10)
    if mode == "r+b":
        file.read(10)
    assert disk.flushes == 0
    file.flush()
    assert disk.flushes == 1 and disk.data[100:110] == b"b" * 10
    file.flush()
    assert disk.flushes == 1  # nothing was changed since
    file.write(b"c")
    file.close()
    file.close()
    assert disk.flushes == 2


@pytest.mark.parametrize("buffering", [0, -1])
def test_reading_never_flushes(buffering: int) -> None:
    disk = Memory()
    disk.dirty = True
    with opened(disk, "rb", buffering) as file:
        file.read(10)
        file.flush()
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
    assert disk.flushes == 0


@pytest.mark.parametrize("buffering", [0, -1])
def test_closed(buffering: int) -> None:
    file = opened(Memory(), "r+b", buffering)
    raw = file if not buffering else file.raw
    file.close()
    assert file.closed and raw.closed
    calls = [raw.readable, raw.writable, raw.seekable, raw.readall, raw.flush, raw.tell]
    calls += [file.read, file.tell, file.flush, lambda: file.write(b"x"), lambda: file.seek(0)]
    calls += [lambda: file.readinto(bytearray(1)), lambda: raw.truncate(0)]
    for call in calls:
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize("buffering", [0, -1])
def test_errors_are_those_of_files(buffering: int) -> None:
    """OSErrors with the errno and the words of the disk's error. A flush that fails in ``close``
    is told, and the file is closed all the same."""
    disk = Memory()
    file = opened(disk, "r+b", buffering)
    file.write(b"data")
    disk.error = CommandTimeout("lun0: not done within 30 s")
    with pytest.raises(OSError, match="not done within 30 s") as caught:
        file.seek(1000)
        file.read(1)
    assert caught.value.errno == CommandTimeout.errno
    assert caught.value.__cause__ is disk.error
    with pytest.raises(OSError, match="not done within"):
        file.close()
    assert file.closed


def test_what_it_refuses() -> None:
    disk = Memory()
    for mode in ("r", "w", "ab", "xb", "rt", ""):
        with pytest.raises(BadArgument, match='give "rb" to read'):
            opened(disk, mode)
    for buffering in (1, -2):
        with pytest.raises(BadArgument, match="give 0 for none"):
            opened(disk, "rb", buffering)
    for window in ({"offset": -1}, {"length": -1}, {"offset": SIZE + 1}, {"length": SIZE + 1}):
        with pytest.raises(OutOfRange, match="leave the disk"):
            opened(disk, "rb", -1, **window)
    with pytest.raises(WriteProtected, match='open it with "rb"'):
        opened(Memory(read_only=True), "r+b")
    with opened(disk, "rb", 0) as file:
        with pytest.raises(TypeError, match="can be written to"):
            file.readinto(b"1234")
        with pytest.raises(OSError, match="before the file"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 7)
        with pytest.raises(io.UnsupportedOperation, match="size cannot be changed"):
            file.truncate(0)
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    with opened(disk, "wb", 0) as file, pytest.raises(io.UnsupportedOperation):
        file.read(1)


def test_what_it_tells() -> None:
    disk = Memory()
    with opened(disk, "rb") as file:
        assert isinstance(file, io.BufferedReader) and isinstance(file.raw, DiskFile)
        assert (file.name, file.mode, file.raw.size) == ("lun0", "rb", SIZE)
        assert file.readable() and file.seekable() and not file.writable()
    with opened(disk, "wb", offset=100) as file:
        assert isinstance(file, io.BufferedWriter) and file.raw.size == SIZE - 100
        assert not file.readable() and file.writable()


def test_other_buffers() -> None:
    """Of items larger than a byte, and with more dimensions: their bytes count."""
    disk = Memory()
    words = memoryview(bytearray(64)).cast("I")
    with opened(disk, "r+b", 0) as file:
        assert file.readinto(words) == 64 and words.tobytes() == disk.data[:64]
        assert file.write(memoryview(bytes(range(64))).cast("B", (8, 8))) == 64
    assert disk.data[64:128] == bytes(range(64))


def test_a_disk_that_grows() -> None:
    """A file without a length goes to the end, wherever that is by then."""
    disk = Memory()
    with opened(disk, "rb", 0) as file, opened(disk, "rb", 0, length=SIZE) as fixed:
        file.seek(0, io.SEEK_END)
        fixed.seek(0, io.SEEK_END)
        disk.info = lun_info(0, size=SIZE + 512)
        disk.data.extend(b"n" * 512)
        assert file.read() == b"n" * 512 and file.tell() == SIZE + 512
        assert fixed.read() == b""
