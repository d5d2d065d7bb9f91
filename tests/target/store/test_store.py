"""FileStore on real files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from iserblk import files
from iserblk.target.store import store
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.status import WritebackError
from iserblk.target.store.store import FileStore
from tests.support import clocks
from tests.support.until import until_blocking

SIZE = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with all calls, and one on tmpfs, which lacks some."""
    if request.param == "disk":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def lun(directory: Path) -> Iterator[FileStore]:
    opened = open_file(str(directory / "lun"), size=SIZE)
    yield opened
    opened.close()


def read(lun: FileStore, offset: int, length: int) -> bytes:
    buffer = memoryview(bytearray(b"\xee" * length))
    assert lun.read_into(buffer, offset, False)
    return bytes(buffer)


def test_what_is_written_is_read(lun: FileStore) -> None:
    data = os.urandom(8192)
    for durable in (False, True):
        assert lun.write(memoryview(data), 4096, durable, nowait=True)
        assert read(lun, 0, 16384) == bytes(4096) + data + bytes(4096)
    lun.flush()
    buffer = memoryview(bytearray(8192))
    assert lun.read_into(buffer, 4096, nowait=True), "it is in the page cache"
    assert buffer == data


def test_a_hole_that_is_not_cached_still_reads_without_error(lun: FileStore) -> None:
    buffer = memoryview(bytearray(b"\xee" * 4096))
    if not lun.read_into(buffer, SIZE - 4096, nowait=True):
        assert lun.read_into(buffer, SIZE - 4096, nowait=False)
    assert buffer == bytes(4096)


def test_what_was_cut_off_a_file_is_an_error(lun: FileStore) -> None:
    """A read must not return zeroes, nor a write enlarge the file: that would hide the loss."""
    lun.write(memoryview(b"x" * 8192), 0, False, False)
    os.ftruncate(lun.fd, 4096)
    assert read(lun, 0, 4096) == b"x" * 4096
    words = f"lun was made smaller: it ends at byte 4096, its LUN has {SIZE} bytes"
    for offset, length in ((3584, 1024), (4096, 512), (SIZE - 512, 512)):
        with pytest.raises(OSError, match=words) as caught:
            read(lun, offset, length)
        assert caught.value.errno == errno.EIO
        for change in (
            lambda at, n: lun.write(memoryview(bytes(n)), at, False, False),
            lambda at, n: lun.write(memoryview(bytes(n)), at, True, True),
            lun.punch,
            lun.zero,
        ):
            with pytest.raises(OSError, match=words):
                change(offset, length)
    assert os.fstat(lun.fd).st_size == 4096
    assert read(lun, 0, 4096) == b"x" * 4096
    assert lun.extents(0, SIZE, 100) == [(0, 4096, True)]
    with pytest.raises(OSError, match=words):
        lun.extents(8192, 4096, 100)
    os.ftruncate(lun.fd, SIZE)  # on purpose: then there are zeroes
    assert read(lun, 4096, 512) == bytes(512)


@pytest.mark.parametrize("operation", ["punch", "zero"])
def test_clearing(lun: FileStore, operation: str) -> None:
    lun.write(memoryview(b"x" * SIZE), 0, False, False)
    getattr(lun, operation)(4096, 65536)
    getattr(lun, operation)(512 * 1024 + 100, 50)
    content = read(lun, 0, SIZE)
    expected = bytearray(b"x" * SIZE)
    expected[4096 : 4096 + 65536] = bytes(65536)
    expected[512 * 1024 + 100 :][:50] = expected[512 * 1024 + 100 : 512 * 1024 + 150] = bytes(50)
    assert content == expected
    assert os.fstat(lun.fd).st_size == SIZE


def test_punching_gives_space_back_and_extents_tell(lun: FileStore) -> None:
    assert lun.extents(0, SIZE, 100) == [(0, SIZE, False)]
    lun.write(memoryview(b"x" * SIZE), 0, False, False)
    lun.flush()
    assert lun.extents(0, SIZE, 100) == [(0, SIZE, True)]
    before = os.fstat(lun.fd).st_blocks
    lun.punch(65536, 131072)
    assert os.fstat(lun.fd).st_blocks < before
    assert lun.extents(0, SIZE, 100) == [
        (0, 65536, True),
        (65536, 131072, False),
        (196608, SIZE - 196608, True),
    ]
    assert lun.extents(0, SIZE, 1) == [(0, 65536, True)]
    assert lun.extents(0, SIZE, 2) == [(0, 65536, True), (65536, 131072, False)]
    assert lun.extents(70000, 1000, 100) == [(70000, 1000, False)]


@pytest.mark.parametrize("operation", ["punch", "zero"])
def test_clearing_where_the_file_system_cannot(
    lun: FileStore, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store writes zeroes in pieces then, and does not try the call again."""
    asked: list[int] = []

    def refuse(fd: int, mode: int, offset: int, length: int) -> bool:
        asked.append(mode)
        return False

    monkeypatch.setattr(store, "fallocate", refuse)
    monkeypatch.setattr(store, "ZEROES", memoryview(bytes(1000)))
    lun.write(memoryview(b"x" * 8192), 0, False, False)
    for _ in range(2):
        getattr(lun, operation)(512, 2500)
    assert read(lun, 0, 8192) == b"x" * 512 + bytes(2500) + b"x" * 5180
    modes = [files.PUNCH_HOLE] if operation == "punch" else [files.ZERO_RANGE, files.PUNCH_HOLE]
    assert asked == modes


@pytest.mark.plain("replaces a method")
@pytest.mark.parametrize("operation", ["punch", "zero"])
@pytest.mark.parametrize(
    ("offset", "length", "asked"),
    [
        (512, 512, []),
        (512, 8192, [(4096, 4096)]),
        (4096, 4608, [(4096, 4096)]),
        (3584, 13312, [(4096, 12288)]),
        (8192, 4096, [(8192, 4096)]),
    ],
)
def test_clearing_where_sectors_are_larger_than_blocks(
    lun: FileStore,
    operation: str,
    offset: int,
    length: int,
    asked: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device of 4096-byte sectors refuses parts of them: they are written, the rest is not."""
    done: list[tuple[int, int]] = []
    written: list[int] = []
    write = lun.write

    def device(fd: int, mode: int, offset: int, length: int) -> bool:
        if offset % 4096 or length % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        done.append((offset, length))
        os.pwrite(fd, bytes(length), offset)
        return True

    def counted(data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        written.append(len(data))
        return write(data, offset, durable, nowait)

    lun.write(memoryview(b"x" * 32768), 0, False, False)
    monkeypatch.setattr(store, "fallocate", device)
    monkeypatch.setattr(lun, "write", counted)
    for _ in range(2):
        getattr(lun, operation)(offset, length)
    expected = b"x" * offset + bytes(length) + b"x" * (32768 - offset - length)
    assert read(lun, 0, 32768) == expected
    assert done == 2 * asked
    assert sum(written) == 2 * (length - sum(each for _, each in asked))


def test_fallocate_raises_what_is_no_lack_of_support(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    with pytest.raises(OSError, match="Invalid argument") as info:
        files.fallocate(fd, files.PUNCH_HOLE, -1, 10)
    assert info.value.errno == errno.EINVAL
    os.close(fd)
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="Illegal seek"):
        files.fallocate(writer, files.PUNCH_HOLE, 0, 10)
    os.close(reader)
    os.close(writer)


def test_extents_of_what_cannot_tell(lun: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seek = os.lseek

    def refuse(fd: int, offset: int, whence: int) -> int:
        if whence != os.SEEK_END:
            raise OSError(errno.EINVAL, "Invalid argument")
        return seek(fd, offset, whence)

    monkeypatch.setattr(os, "lseek", refuse)
    assert lun.extents(4096, 8192, 10) == [(4096, 8192, True)]


def test_a_file_that_takes_no_more_is_an_error(
    lun: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short write is continued, and one of nothing ends it."""
    counts = iter([100, 50, 0])
    monkeypatch.setattr(os, "pwritev", lambda *arguments: next(counts))
    with pytest.raises(OSError, match="no more"):
        lun.write(memoryview(bytes(512)), 0, False, False)


def test_a_short_write_is_continued(lun: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, data, offset, flags: real(fd, (data[0][:100],), offset, flags)
    )
    data = os.urandom(1024)
    assert lun.write(memoryview(data), 512, False, False)
    assert read(lun, 512, 1024) == data


@pytest.mark.parametrize(("durable", "flags"), [(False, 0), (True, os.RWF_DSYNC)])
def test_a_durable_write_is_so_in_all_its_parts(
    lun: FileStore, monkeypatch: pytest.MonkeyPatch, durable: bool, flags: int
) -> None:
    seen: list[int] = []

    def write_some(fd: int, data: tuple[memoryview], offset: int, how: int) -> int:
        seen.append(how)
        return min(100, len(data[0]))

    monkeypatch.setattr(os, "pwritev", write_some)
    assert lun.write(memoryview(bytes(250)), 0, durable, False)
    assert seen == [flags] * 3


def test_prefetch_is_harmless(lun: FileStore) -> None:
    lun.prefetch(0, SIZE)
    assert read(lun, 0, 512) == bytes(512)


def test_usage(lun: FileStore) -> None:
    """What the file occupies, in whole blocks of its file system, and what is free there."""
    before = lun.usage()
    assert before is not None and before[0] == 0
    lun.write(memoryview(bytes(b"x" * 65536)), 0, False, False)
    lun.flush()
    after = lun.usage()
    assert after is not None and after[0] >= 65536 and after[1] > 0
    lun.punch(0, SIZE)
    now = lun.usage()
    assert now is not None and now[0] < after[0]


# -- what the kernel could not write back ----------------------------------------------------------


class Kernel:
    """What the kernel does of a file whose disk fails: ``lost`` is told to the next call that waits
    for the disk, and to no other; and to the witness once (errseq_t).

    ``meanwhile``: called while such a call is under way, once.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.untold: list[int] = []  # errno
        self.unseen: list[int] = []  # by the witness
        self.full = False
        self.flushes = 0
        self.meanwhile: Callable[[], object] | None = None
        monkeypatch.setattr(os, "pwritev", self._pwritev)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)
        monkeypatch.setattr(store, "writeback_error", self._look)

    def lose(self, number: int = errno.EIO) -> None:
        self.untold[:] = self.unseen[:] = [number]

    def _pwritev(self, fd: int, data: tuple[memoryview], offset: int, flags: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        if flags & os.RWF_DSYNC:
            self._wait()
        return len(data[0])

    def fdatasync(self, _fd: int) -> None:
        self.flushes += 1
        self._wait()

    def _wait(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if self.untold:
            raise OSError(self.untold.pop(), "lost")

    def _look(self, _witness: int) -> int:
        return self.unseen.pop() if self.unseen else 0


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    return Kernel(monkeypatch)


@pytest.fixture
def losses(lun: FileStore) -> list[int]:
    """Of what the store has told its owner."""
    told: list[int] = []
    lun.on_loss = lambda error: told.append(error.errno or 0)
    return told


BLOCK = memoryview(bytes(512))


def refused(call: Callable[[], object]) -> int:
    with pytest.raises(WritebackError) as caught:
        call()
    assert caught.value.errno is not None
    return caught.value.errno


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_that_another_call_has_taken(
    lun: FileStore, kernel: Kernel, losses: list[int], number: int
) -> None:
    """The data of either may be lost, and the kernel has told only one of them."""

    def other() -> None:
        kernel.lose(number)
        assert refused(lambda: lun.write(BLOCK, 4096, True, False)) == number

    for call in (lun.flush, lambda: lun.write(BLOCK, 0, True, False)):
        kernel.meanwhile = other
        assert refused(call) == number
        call()
    assert losses == [number] * 2, "each loss is told once"


def test_a_disk_that_is_full_has_lost_nothing(
    lun: FileStore, kernel: Kernel, losses: list[int]
) -> None:
    """But for what is written back it may be full, too, and the errno of a write with RWF_DSYNC
    does not tell which."""
    kernel.full = True
    with pytest.raises(OSError, match="full") as caught:
        lun.write(BLOCK, 0, True, False)
    assert not isinstance(caught.value, WritebackError) and not losses
    kernel.full = False
    kernel.lose(errno.ENOSPC)
    assert refused(lambda: lun.write(BLOCK, 0, True, False)) == errno.ENOSPC
    assert losses == [errno.ENOSPC]


def test_a_loss_that_is_known_is_that_of_earlier_calls(lun: FileStore, kernel: Kernel) -> None:
    kernel.lose()
    refused(lun.flush)
    lun.write(BLOCK, 0, True, False)
    lun.flush()


class CountedLock:
    """A lock that knows which threads wait for it."""

    all: ClassVar[list[CountedLock]] = []

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[int] = set()
        self.all.append(self)

    def keeps(self, count: int) -> bool:
        """Whether so many threads wait for the one that has it."""
        return self._lock.locked() and len(self._waiting) == count

    def __enter__(self) -> None:
        self._waiting.add(threading.get_ident())
        self._lock.acquire()
        self._waiting.remove(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_flushes_that_wait_share_the_next_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Kernel
) -> None:
    """One that fails concerns all that have asked while it was under way: what the kernel told it
    may be what it has lost of theirs."""
    monkeypatch.setattr(CountedLock, "all", [])
    monkeypatch.setattr(store, "Lock", CountedLock)
    lun = open_file(str(tmp_path / "lun"), size=SIZE)
    losses: list[OSError] = []
    lun.on_loss = losses.append
    failed: list[bool] = []

    def flush() -> None:
        try:
            lun.flush()
        except WritebackError:
            failed.append(True)
        else:
            failed.append(False)

    threads = [threading.Thread(target=flush) for _ in range(3)]

    def others() -> None:
        for each in threads:
            each.start()
        until_blocking(lambda: any(each.keeps(len(threads)) for each in CountedLock.all))
        kernel.lose()

    kernel.meanwhile = others
    flush()
    for each in threads:
        each.join()
    assert failed == [True] * 4 and kernel.flushes == 2
    assert [each.errno for each in losses] == [errno.EIO]
    flush()
    assert not failed[-1]
    lun.close()


def test_a_flush_that_was_not_carried_out_covers_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Kernel
) -> None:
    monkeypatch.setattr(CountedLock, "all", [])
    monkeypatch.setattr(store, "Lock", CountedLock)
    lun = open_file(str(tmp_path / "lun"), size=SIZE)
    flushed: list[int] = []  # how many flushes of the kernel had succeeded by then
    succeeded = 0

    def fdatasync(fd: int) -> None:
        nonlocal succeeded
        kernel.fdatasync(fd)
        if kernel.flushes == 2:
            raise MemoryError
        succeeded += 1

    def flush() -> None:
        try:
            lun.flush()
        except MemoryError:
            return
        flushed.append(succeeded)

    threads = [threading.Thread(target=flush) for _ in range(2)]

    def others() -> None:
        for each in threads:
            each.start()
        until_blocking(lambda: any(each.keeps(len(threads)) for each in CountedLock.all))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    kernel.meanwhile = others
    flush()
    for each in threads:
        each.join()
    assert flushed == [1, 2]
    lun.close()


def test_the_witness_of_a_real_file(tmp_path: Path) -> None:
    """It sees nothing where nothing was lost."""
    path = tmp_path / "lun"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDWR)
    witness = files.open_witness(fd)
    assert witness >= 0
    os.pwrite(fd, bytes(512), 0)
    os.fdatasync(fd)
    assert files.writeback_error(witness) == files.writeback_error(-1) == 0
    os.close(witness)
    os.close(fd)
    assert files.open_witness(fd) == -1


# -- a write in the loop ---------------------------------------------------------------------------


def in_page_cache(fd: int, length: int) -> int:
    """How many pages of the file's first ``length`` bytes are: mincore(2)."""
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    with mmap.mmap(fd, length) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.byref(start), ctypes.c_size_t(length), pages) == 0
        del start
    return sum(each & 1 for each in pages)


@pytest.mark.parametrize("at", [512, 4096 - 512, 8192 + 512])
def test_a_write_that_has_to_read_first_is_for_a_thread(tmp_path: Path, at: int) -> None:
    """Part of a page that is not in the page cache: the kernel reads it from the disk."""

    lun = open_file(str(tmp_path / "lun"), size=SIZE)
    assert lun.write(memoryview(b"x" * 16384), 0, False, nowait=True), "whole pages"
    data = memoryview(b"y" * 1024)
    # The kernel may hold a page for a moment, or the file system may drop none; and to ask for a
    # page has the kernel read it, which a disk may have done before the kernel looks.
    for _ in range(100):
        lun.flush()
        os.posix_fadvise(lun.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not in_page_cache(lun.fd, 16384):
            if not lun.write(data, at, False, nowait=True):
                break
            assert lun.write(memoryview(b"x" * 1024), at, False, nowait=True), "it is cached"
        time.sleep(0.05)
    else:
        pytest.skip("the file system does not drop its pages, or its disk is as quick as a cache")
    assert read(lun, at, 1024) == b"x" * 1024, "nothing was written"
    assert lun.write(data, at, False, nowait=False)
    assert lun.write(data, at, False, nowait=True), "it is cached"
    assert read(lun, at, 1024) == data
    lun.close()


def test_a_disk_that_hangs_holds_up_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call in a thread shows it: from then on writes are for threads, too, until it ends."""
    now = [100.0]
    clocks.give(monkeypatch, lambda: now[0])
    lun = open_file(str(tmp_path / "lun"), size=SIZE)
    data = memoryview(bytes(4096))
    begun, answers = threading.Event(), threading.Event()

    def hang(_fd: int) -> None:
        begun.set()
        answers.wait()

    monkeypatch.setattr(os, "fdatasync", hang)
    thread = threading.Thread(target=lun.flush)
    thread.start()
    begun.wait()
    assert lun.write(data, 0, False, nowait=True), "a flush may take a moment"
    now[0] += 10
    assert not lun.write(data, 0, False, nowait=True)
    answers.set()
    thread.join()
    assert lun.write(data, 0, False, nowait=True)
    lun.close()
