"""Standard input and output as ends of a copy, on descriptors of this process."""

from __future__ import annotations

import os
import pty
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from iserblk.cli import transfer
from iserblk.cli.streams import Stream
from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO
from iserblk.errors import BadArgument, Busy, IserblkError, first_error
from iserblk.files import lock_lun
from tests.cli.test_transfer import MemoryEnd

MIB = 1 << 20
CONTENT = random.Random(1).randbytes(3 * MIB) + bytes(2 * MIB) + random.Random(2).randbytes(MIB + 7)


@contextmanager
def reading(content: bytes) -> Iterator[Stream]:
    """A pipe into which another thread writes, in pieces of odd sizes."""
    out, into = os.pipe()

    def write() -> None:
        with open(into, "wb", buffering=0) as file:
            for at in range(0, len(content), 77_777):
                piece = memoryview(content)[at : at + 77_777]
                try:
                    while piece:  # a process that is stopped and goes on may have written a part
                        piece = piece[file.write(piece) :]
                except BrokenPipeError:
                    return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield Stream(out, "stdin")
    finally:
        os.close(out)
        thread.join()


@contextmanager
def writing(taken: bytearray, most: int = 1 << 40) -> Iterator[Stream]:
    """A pipe that another thread reads, and closes after ``most`` bytes."""
    out, into = os.pipe()

    def read() -> None:
        with open(out, "rb", buffering=0) as file:
            while len(taken) < most and (data := file.read(min(99_999, most - len(taken)))):
                taken.extend(data)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield Stream(into, "stdout")
    finally:
        os.close(into)
        thread.join()


def disk(size: int) -> MemoryEnd:
    return MemoryEnd([(b"\xff" * size, EXTENT_DATA)])


@pytest.mark.parametrize("length", [0, 1, MIB, MIB + 1, len(CONTENT)])
async def test_what_comes_is_written(length: int) -> None:
    content = CONTENT[:length]
    advanced: list[int] = []
    with reading(content) as stream:
        assert stream.size is None
        end = disk(8 * MIB)
        totals, more = await transfer.copy_in(stream, end, end.size, advanced.append)
    assert end.data == content + b"\xff" * (8 * MIB - length)
    assert (totals.data + totals.zero, more, sum(advanced)) == (length, False, length)
    assert end.flushed_after == len(end.writes) + len(end.zeroes)


async def test_zeroes_that_come_are_not_sent() -> None:
    with reading(CONTENT) as stream:
        end = disk(8 * MIB)
        totals, _ = await transfer.copy_in(stream, end, end.size, lambda _count: None)
    assert totals.zero == 2 * MIB
    assert sum(length for _, length in end.zeroes) == 2 * MIB


@pytest.mark.parametrize("over", [1, MIB, 3 * MIB])
async def test_more_than_there_is_room_for_is_told(over: int) -> None:
    size = len(CONTENT) - over
    with reading(CONTENT) as stream:
        end = disk(size)
        _, more = await transfer.copy_in(stream, end, size, lambda _count: None)
    assert more and end.data == CONTENT[:size]
    assert end.flushed_after == len(end.writes) + len(end.zeroes)


async def test_as_much_as_there_is_room_for() -> None:
    with reading(CONTENT) as stream:
        end = disk(len(CONTENT))
        _, more = await transfer.copy_in(stream, end, end.size, lambda _count: None)
    assert not more and end.data == CONTENT


async def test_what_goes_out_is_in_order() -> None:
    """Holes are zeroes there."""
    runs = [
        (CONTENT[: 3 * MIB + 5], EXTENT_DATA),
        (bytes(5 * MIB), EXTENT_HOLE | EXTENT_ZERO),
        (CONTENT[:777], EXTENT_DATA),
    ]
    end, taken = MemoryEnd(runs), bytearray()
    with writing(taken) as stream:
        totals = await transfer.copy_out(end, stream, lambda _count: None)
    assert taken == b"".join(data for data, _ in runs)
    assert totals.zero == 5 * MIB
    assert sum(length for _, length in end.reads) == totals.data == 3 * MIB + 5 + 777


async def test_a_reader_that_leaves_is_told() -> None:
    end, taken = disk(8 * MIB), bytearray()
    with writing(taken, 1000) as stream, pytest.raises(BaseExceptionGroup) as caught:
        await transfer.copy_out(end, stream, lambda _count: None)
    error = first_error(caught.value)
    assert isinstance(error, IserblkError)
    assert "stdout was closed after " in str(error) and "bytes: not all was taken" in str(error)


async def test_a_pipe_that_does_not_block(tmp_path: Path) -> None:
    """Another program that has the pipe may have set that."""
    taken = bytearray()
    with writing(taken) as stream:
        os.set_blocking(stream.fd, False)
        await stream.write(memoryview(CONTENT))
    assert taken == CONTENT
    with reading(CONTENT) as stream:
        os.set_blocking(stream.fd, False)
        buffer = bytearray(len(CONTENT) + 1)
        assert await stream.read_into(memoryview(buffer)) == len(CONTENT)


async def test_a_thread_that_waits_keeps_nobody() -> None:
    """The other end of the pipe neither writes nor closes it."""
    out, into = os.pipe()
    stream = Stream(out, "stdin")
    with trio.move_on_after(0.01) as scope:
        await stream.read_into(memoryview(bytearray(1)))
    assert scope.cancelled_caught
    os.close(into)
    os.close(out)


async def test_a_file_behind_it(tmp_path: Path) -> None:
    """Its size is known, from where it stands; and no target may serve it."""
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    with path.open("r+b", buffering=0) as file, path.open("r+b", buffering=0) as other:
        file.seek(1000)
        stream = Stream(file.fileno(), "stdin")
        assert stream.size == len(CONTENT) - 1000
        end = disk(stream.size)
        await transfer.copy_in(stream, end, end.size, lambda _count: None)
        assert end.data == CONTENT[1000:]
        await stream.lock(to_write=False)
        await stream.flush()
        assert not lock_lun(other.fileno(), shared=False)
    with path.open("r+b", buffering=0) as file, path.open("r+b", buffering=0) as other:
        assert lock_lun(other.fileno(), shared=False)
        with pytest.raises(Busy, match="stdout: a target serves it"):
            await Stream(file.fileno(), "stdout").lock(to_write=True)


@pytest.mark.parametrize(
    ("device", "flags", "words"),
    [
        ("/dev/full", os.O_WRONLY, "stdout: No space left on device, after 0 bytes"),
        ("/dev/null", os.O_RDONLY, "stdout: it is closed"),  # as ``main`` replaces a closed one
    ],
)
async def test_what_cannot_be_written(device: str, flags: int, words: str) -> None:
    fd = os.open(device, flags)
    with pytest.raises(IserblkError, match=words):
        await Stream(fd, "stdout").write(memoryview(b"x"))
    os.close(fd)


def test_no_terminal() -> None:
    master, slave = pty.openpty()
    with pytest.raises(BadArgument, match="stdin is a terminal"):
        Stream(slave, "stdin")
    os.close(slave)
    os.close(master)
