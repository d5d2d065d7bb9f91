"""The end of a file: what becomes zero, what stays, and that no write is lost to zeroes."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import trio
import trio.testing

from fuse_mount.lun_file import NO_END, LunFile
from iserblk.disk.seam import Rest
from iserblk.errors import ScsiError
from iserblk.loop.strands import elsewhere, open_strands
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info

SIZE = 16 * 1024
OLD = b"\xee"


class SlowDisk(AsyncFake):
    """Zeroes and writes a part at a time; anything may happen in between. ``zeroed``: what was made
    zero; ``failing``: the methods that fail, having done half."""

    def __init__(self) -> None:
        super().__init__(FakeDisk(lun_info(0, size=SIZE)))
        self.fake.data[:] = OLD * SIZE
        self.zeroed: list[tuple[int, int]] = []
        self.failing: set[str] = set()

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        half = len(buffer) // 2
        await super().write(buffer[:half], offset)
        if "write" in self.failing:
            raise ScsiError("write: made to fail")
        await super().write(buffer[half:], offset + half)

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        assert patient and not fast and length > 0
        self.zeroed.append((offset, length))
        for start in range(offset, offset + length, 1024):
            await super().zero(start, min(1024, offset + length - start), may_trim=may_trim)
            if "zero" in self.failing:
                raise ScsiError("zero: made to fail")

    @property
    def content(self) -> bytes:
        return bytes(self.fake.data)


@pytest.fixture
def disk() -> SlowDisk:
    return SlowDisk()


@pytest.fixture
def file(disk: SlowDisk) -> LunFile:
    return LunFile("lun0", disk)


async def write(file: LunFile, offset: int, data: bytes) -> None:
    """As the operation of the file system does it."""
    if offset + len(data) > file.end:
        await file.write_behind(memoryview(data), offset)
    else:
        await file.disk.write(memoryview(data), offset)


async def test_without_truncation_there_is_no_end(file: LunFile, disk: SlowDisk) -> None:
    await write(file, 9000, b"x" * 100)
    assert file.end == NO_END and disk.zeroed == []
    assert disk.content == OLD * 9000 + b"x" * 100 + OLD * (SIZE - 9100)


async def test_a_write_behind_the_end_has_zeroes_before_it(file: LunFile, disk: SlowDisk) -> None:
    await file.truncate(1000, None)
    await write(file, 5000, b"x" * 10)
    assert disk.content == OLD * 1000 + bytes(4000) + b"x" * 10 + OLD * (SIZE - 5010)
    await write(file, 2000, b"y" * 10)  # before the end
    await write(file, 5005, b"z" * 10)  # across it
    assert disk.zeroed == [(1000, 4000)] and file.end == 5015


async def test_a_truncation_that_extends_makes_zeroes(file: LunFile, disk: SlowDisk) -> None:
    await file.truncate(1000, None)
    assert not disk.dirty
    await file.truncate(3000, None)
    assert disk.dirty  # so fsync(2) and the unmount flush
    assert disk.content == OLD * 1000 + bytes(2000) + OLD * (SIZE - 3000)
    await file.truncate(2000, None)
    await file.truncate(SIZE, None)
    assert disk.content == OLD * 1000 + bytes(SIZE - 1000)
    assert file.end == NO_END


async def test_an_end_that_reaches_the_size_is_none(file: LunFile, disk: SlowDisk) -> None:
    """A LUN that grows afterwards is a disk that grew: nothing is made zero."""
    await file.truncate(0, None)
    await write(file, 0, b"x" * SIZE)
    assert file.end == NO_END
    disk.fake.info = replace(disk.info, size=2 * SIZE)
    disk.fake.data += OLD * SIZE
    await disk.refresh()
    await write(file, SIZE + 1000, b"y")
    assert disk.zeroed == []


async def test_an_end_stays_where_it_is_when_the_lun_grows(file: LunFile, disk: SlowDisk) -> None:
    await file.truncate(1000, None)
    disk.fake.info = replace(disk.info, size=2 * SIZE)
    disk.fake.data += OLD * SIZE
    await disk.refresh()
    await write(file, SIZE + 1000, b"y")
    assert disk.zeroed == [(1000, SIZE)] and file.end == SIZE + 1001


@pytest.mark.parametrize("how", ["write", "truncate"])
async def test_zeroes_that_fail_leave_the_end(file: LunFile, disk: SlowDisk, how: str) -> None:
    await file.truncate(1000, None)
    disk.failing = {"zero"}
    request = write(file, 5000, b"x") if how == "write" else file.truncate(5000, None)
    with pytest.raises(ScsiError):
        await request
    assert file.end == 1000 and disk.content[5000] == OLD[0]
    disk.failing = set()
    await write(file, 6000, b"y")
    assert disk.zeroed[1:] == [(1000, 5000)] and file.end == 6001


async def test_a_write_that_fails_is_behind_the_end(file: LunFile, disk: SlowDisk) -> None:
    """What it has written of its bytes is zeroed by the next write that begins behind them."""
    await file.truncate(1000, None)
    disk.failing = {"write"}
    with pytest.raises(ScsiError):
        await write(file, 5000, b"x" * 100)
    disk.failing = set()
    await write(file, 7000, b"y")
    assert disk.content == OLD * 1000 + bytes(6000) + b"y" + OLD * (SIZE - 7001)


async def test_the_end_is_shown_while_an_open_file_that_truncated_is_open(file: LunFile) -> None:
    await file.truncate(1000, None)
    assert file.shown_end == NO_END
    for handle in (3, 4):
        await file.truncate(0, handle)
    await write(file, 0, b"x" * 10)
    file.closed(3)
    file.closed(5)
    assert file.shown_end == 10
    file.closed(4)
    assert file.shown_end == NO_END and file.end == 10


@pytest.mark.parametrize(
    ("flags", "truncator", "kept"),
    [
        (os.O_RDWR, None, True),
        (os.O_RDWR, 7, False),  # it is not done yet
        (os.O_RDONLY, None, False),
        (os.O_WRONLY, None, False),
    ],
)
async def test_what_a_program_that_writes_has_read_stays(
    file: LunFile, disk: SlowDisk, flags: int, truncator: int | None, kept: bool
) -> None:
    """`dd if=mbr of=lun0 count=1`, and then a loop device, or qemu."""
    await file.truncate(512, truncator)
    file.opened(8, flags)
    file.read_behind(8, 512, 1024)
    await write(file, 9000, b"x")
    if kept:
        assert disk.content == OLD * 9000 + b"x" + OLD * (SIZE - 9001)
    else:
        assert disk.content == OLD * 512 + bytes(9000 - 512) + b"x" + OLD * (SIZE - 9001)


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY])
async def test_a_disk_in_use_that_another_program_truncates(
    file: LunFile, disk: SlowDisk, flags: int
) -> None:
    """`dd if=mbr of=lun0 count=1` while a loop device has the file: it reads no more what it has in
    its cache. What dd itself skips is zero all the same."""
    file.opened(8, flags)
    await file.truncate(0, 9)
    await file.truncate(0, 10)
    file.closed(10)
    await write(file, 512, b"m" * 512)
    file.closed(9)
    await write(file, 9000, b"x")
    gap = OLD * 7976 if flags == os.O_RDWR else bytes(7976)
    assert disk.content == bytes(512) + b"m" * 512 + gap + b"x" + OLD * (SIZE - 9001)


async def test_only_open_files_count(file: LunFile, disk: SlowDisk) -> None:
    file.opened(8, os.O_RDWR)
    file.closed(8)
    await file.truncate(512, None)
    file.read_behind(8, 512, 1024)
    assert file.end == 512


async def test_truncation_is_logged_as_data_may_go(
    file: LunFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await file.truncate(SIZE, None)
    assert not caplog.records
    await file.truncate(512, None)
    assert "lun0: cut to 512 bytes" in caplog.text


# --- a model: an ordinary file --------------------------------------------------------------------

offsets = st.one_of(st.integers(0, SIZE - 1), st.sampled_from([0, 1, 511, 512, 4096, SIZE - 1]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), offsets, st.integers(1, 3000)),
        st.tuples(st.just("truncate"), st.one_of(offsets, st.just(SIZE)), st.just(0)),
    ),
    max_size=12,
)


@hypothesis.given(steps)
@hypothesis.settings(deadline=None, max_examples=100)
def test_like_an_ordinary_file(script: list[tuple[str, int, int]]) -> None:
    """The LUN has what an ordinary file has that was treated in the same way, and behind the end of
    that what it had."""

    async def run() -> None:
        disk = SlowDisk()
        file = LunFile("lun0", disk)
        ordinary = bytearray(disk.content)
        expected = bytearray(disk.content)
        for number, (what, position, length) in enumerate(script, 1):
            if what == "write":
                data = bytes([number]) * min(length, SIZE - position)
                await write(file, position, data)
                ordinary += bytes(max(0, position - len(ordinary)))
                ordinary[position : position + len(data)] = data
            else:
                await file.truncate(position, None)
                del ordinary[position:]
                ordinary += bytes(position - len(ordinary))
            expected[: len(ordinary)] = ordinary
            assert disk.content == expected
            assert min(file.end, SIZE) == len(ordinary)

    trio.run(run)


# --- several at once ------------------------------------------------------------------------------

Work = Callable[[], Awaitable[None]]


async def all_at_once(works: list[Work], as_strands: bool) -> None:
    async def call(work: Work, turns: int) -> None:
        for _ in range(turns):
            await elsewhere(trio.lowlevel.checkpoint)
        await work()

    if as_strands:
        async with open_strands() as group:
            for turns, work in enumerate(works):
                group.start_soon(call, work, turns)
    else:
        async with trio.open_nursery() as nursery:
            for turns, work in enumerate(works):
                nursery.start_soon(call, work, turns)


@pytest.mark.parametrize("as_strands", [False, True])
@hypothesis.given(st.permutations(range(8)), st.integers(0, SIZE), st.integers(1, 2048))
@hypothesis.settings(deadline=None, max_examples=30)
def test_no_write_is_zeroed_by_another(
    as_strands: bool, order: list[int], end: int, length: int
) -> None:
    """Eight writes at once, in any order, of whatever begins or ends behind the end. Each is there
    when it has been answered, and afterwards."""

    async def run() -> None:
        disk = SlowDisk()
        file = LunFile("lun0", disk)
        await file.truncate(end, None)

        def written(number: int) -> tuple[int, bytes]:
            return number * 2048, bytes([number + 1]) * length

        async def one(number: int) -> None:
            offset, data = written(number)
            await write(file, offset, data)
            done.add(number)
            for each in done:
                at, wanted = written(each)
                assert disk.content[at : at + length] == wanted

        done: set[int] = set()
        await all_at_once([lambda number=each: one(number) for each in order], as_strands)  # type: ignore[misc]
        expected = bytearray(OLD * end + bytes(SIZE - end))
        for each in range(8):
            offset, data = written(each)
            expected[offset : offset + length] = data
        last = max(end, 7 * 2048 + length)
        assert disk.content == bytes(expected[:last]) + OLD * (SIZE - last)

    trio.run(run)


class Held(SlowDisk):
    """Its writes wait for ``let``."""

    def __init__(self) -> None:
        super().__init__()
        self.let = trio.Event()

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        await elsewhere(self.let.wait)
        await super().write(buffer, offset)


async def test_a_write_that_waits_can_be_cancelled() -> None:
    """The writes behind it in the queue go on."""
    disk = Held()
    file = LunFile("lun0", disk)
    await file.truncate(0, None)
    given_up = trio.CancelScope()

    async def cancelled() -> None:
        with given_up:
            await write(file, 9000, b"b")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, file, 8000, b"a")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(cancelled)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(write, file, 10_000, b"c")
        await trio.testing.wait_all_tasks_blocked()
        given_up.cancel()
        await trio.testing.wait_all_tasks_blocked()
        disk.let.set()
    assert disk.content == bytes(8000) + b"a" + bytes(1999) + b"c" + OLD * (SIZE - 10_001)
    await write(file, 12_000, b"d")  # the turn is free


async def test_strands_that_wait_are_closed() -> None:
    """As when the mount is ended by force."""
    disk = Held()
    file = LunFile("lun0", disk)
    await file.truncate(0, None)
    with trio.CancelScope() as scope:
        async with open_strands() as group:
            for offset in (8000, 9000, 10_000):
                group.start_soon(write, file, offset, b"x")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    disk.let.set()
    await write(file, 12_000, b"d")
    assert disk.content == bytes(12_000) + b"d" + OLD * (SIZE - 12_001)
