"""FileStore on real files, and every reason why a file cannot be a LUN."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk import files
from iserblk.errors import BadArgument, Busy, PermissionDenied
from iserblk.target.store import lunfile, store
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.store import FileStore

SIZE = 1 << 20


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """On a file system with all calls, and on tmpfs, which lacks some."""
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
    """Zeroes would be taken for data. No write makes the file larger again, which would hide it."""
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
    """Then zeroes are written, in pieces; and it is not asked again."""
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


# -- opening ---------------------------------------------------------------------------------------


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def refused(path: Path, kind: type[Exception], words: str, **options: int | bool | None) -> None:
    before = descriptors()
    with pytest.raises(kind, match=words) as info:
        open_file(str(path), **options)  # type: ignore[arg-type]
    assert str(path) in str(info.value)
    assert descriptors() == before


def test_size_creates_and_grows_sparsely(tmp_path: Path) -> None:
    path = tmp_path / "new"
    for size in (1 << 30, 2 << 30, 2 << 30):
        open_file(str(path), size=size).close()
        assert path.stat().st_size == size
        assert path.stat().st_blocks == 0
    for read_only in (False, True):
        same = open_file(str(path), read_only=read_only)
        assert same.size == 2 << 30
        same.close()


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "no", BadArgument, "no such file; `:size=1G` creates it")
    refused(tmp_path / "no", BadArgument, "creates none", size=SIZE, read_only=True)
    refused(tmp_path / "no" / "file", BadArgument, "directory does not exist", size=SIZE)
    assert not list(tmp_path.iterdir())


def test_things_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path, BadArgument, "a directory")
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", BadArgument, "neither a regular file nor a block device")
    refused(Path("/dev/null"), BadArgument, "neither a regular file nor a block device")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "loop", BadArgument, "symbolic links")


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (0, {}, "0 bytes are less than one block"),
        (511, {}, "511 bytes are less than one block"),
        (512, {"block": 4096}, "512 bytes are less than one block"),
        (1025, {}, "not a multiple of 512-byte blocks; `:size=1536` enlarges it"),
        (4608, {"block": 4096}, "`:size=8192` enlarges it"),
        (2048, {"size": 1024}, "2048 bytes, more than `:size=1024`"),
        (1024, {"size": 1000}, "size 1000 is not a positive multiple of 512-byte"),
        (1024, {"size": 512, "block": 4096}, "not a positive multiple of 4096-byte"),
        (1024, {"size": 2048, "read_only": True}, "less than `:size=2048`, and cannot grow"),
    ],
)
def test_sizes_that_cannot_be(
    tmp_path: Path, content: int, options: dict[str, int], words: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * content)
    refused(path, BadArgument, words, **options)
    assert path.read_bytes() == b"x" * content


def test_a_size_that_the_file_system_refuses_leaves_no_file(tmp_path: Path) -> None:
    refused(tmp_path / "huge", BadArgument, "File too large", size=1 << 62)
    assert not list(tmp_path.iterdir())


def test_two_targets_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(SIZE))
    writer = open_file(str(path))
    refused(path, Busy, "another target serves it")
    refused(path, Busy, "another target serves it", read_only=True)
    writer.close()
    readers = [open_file(str(path), read_only=True) for _ in range(2)]
    refused(path, Busy, "another target serves it")
    for reader in readers:
        with pytest.raises(OSError, match="Bad file descriptor"):
            reader.write(memoryview(bytes(512)), 0, False, False)
        reader.close()


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory of an ordinary user, which the test then is."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_permissions(nobody: Path) -> None:
    os.seteuid(0)
    for name, mode in (("readable", 0o644), ("private", 0o600)):
        (nobody / name).write_bytes(bytes(SIZE))
        (nobody / name).chmod(mode)
    (nobody / "closed").mkdir(mode=0o700)
    os.seteuid(65534)
    refused(nobody / "readable", PermissionDenied, "`:ro` serves it read-only")
    open_file(str(nobody / "readable"), read_only=True).close()
    for read_only in (False, True):
        refused(nobody / "private", PermissionDenied, "user needs access", read_only=read_only)
    refused(nobody / "closed" / "file", PermissionDenied, "Permission denied")
    refused(nobody / "new", PermissionDenied, "Permission denied", size=SIZE)


def test_a_device_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mounted block device is asked for with O_EXCL, and refused by the kernel."""
    path = tmp_path / "device"
    path.write_bytes(bytes(SIZE))
    monkeypatch.setattr(lunfile, "kind_of", lambda *arguments: stat.S_IFBLK)
    flags: list[int] = []

    def busy(path: str, how: int, mode: int) -> int:
        flags.append(how)
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "open", busy)
    refused(path, Busy, "perhaps mounted")
    assert flags[0] & os.O_EXCL and not flags[0] & os.O_CREAT


@pytest.fixture(params=["512", "4096"])
def loop_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """With sectors of so many bytes."""
    image = tmp_path / "image"
    image.write_bytes(b"x" * SIZE)
    command = ["losetup", "--find", "--show", "--sector-size", request.param, str(image)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device can be set up: {error}")
    yield Path(made.stdout.strip())
    subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


def test_a_block_device(loop_device: Path) -> None:
    lun = open_file(str(loop_device))
    assert lun.size == SIZE
    refused(loop_device, Busy, "in use")
    assert lun.extents(0, SIZE, 10) == [(0, SIZE, True)]
    lun.punch(4096, 8192)
    lun.zero(65536, 4096)
    lun.punch(131072 + 512, 8192)
    lun.zero(262144 + 512, 512)
    lun.write(memoryview(b"y" * 512), 512, True, False)
    lun.flush()
    expected = bytearray(b"x" * SIZE)
    expected[4096:12288] = bytes(8192)
    expected[65536:69632] = bytes(4096)
    expected[131584:139776] = bytes(8192)
    expected[262656:263168] = bytes(512)
    expected[512:1024] = b"y" * 512
    assert read(lun, 0, SIZE) == expected
    lun.close()
    refused(loop_device, BadArgument, "cannot grow", size=2 * SIZE)
    open_file(str(loop_device), read_only=True).close()
