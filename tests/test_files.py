"""Text in bounds, fallocate(2) on real files, and locks and types of file systems."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from iserblk import files
from iserblk.errors import BadArgument
from iserblk.files import PUNCH_HOLE, ZERO_RANGE, fallocate, file_system, lock_lun, write_whole
from iserblk.target.access import read_access
from iserblk.target.lunlist import read_lun_list
from iserblk.target.ports import read_states

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


def test_readers_share_the_lock_of_a_lun(tmp_path: Path, fd: int) -> None:
    (tmp_path / "link").hardlink_to(tmp_path / "file")
    other, third = (os.open(tmp_path / name, os.O_RDONLY) for name in ("link", "file"))
    assert lock_lun(fd, shared=True) and lock_lun(other, shared=True)
    assert not lock_lun(third, shared=False)
    os.close(other)
    assert lock_lun(fd, shared=False)
    assert not lock_lun(third, shared=True)
    os.close(third)


def test_the_type_of_a_file_system(fd: int) -> None:
    name = os.readlink(f"/proc/self/fd/{fd}")
    said = subprocess.run(
        ["findmnt", "-n", "-o", "FSTYPE", "-T", name], stdout=subprocess.PIPE, text=True, check=True
    )
    assert file_system(fd) == said.stdout.strip()
    read_end, write_end = os.pipe()
    assert file_system(read_end) == ""  # it is mounted nowhere
    os.close(read_end)
    os.close(write_end)


# -- text that somebody has written --------------------------------------------------------------


def test_text_has_a_bound(tmp_path: Path) -> None:
    """/dev/zero has no end; a file is read up to the bound, and no further."""
    path = tmp_path / "text"
    path.write_text("ä" * (files.MOST_TEXT // 2))
    assert len(files.read_text(path)) == files.MOST_TEXT // 2
    path.write_bytes(b"x" * (files.MOST_TEXT + 1))
    for each in (path, Path("/dev/zero")):
        with pytest.raises(OSError, match="more than 4194304 bytes") as caught:
            files.read_text(each)
        assert caught.value.errno == errno.EFBIG
    path.write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        files.read_text(path)


@pytest.mark.parametrize("read", [read_access, read_lun_list, read_states])
def test_files_of_a_target_without_an_end(read: Callable[[Path], object]) -> None:
    with pytest.raises(BadArgument, match="/dev/zero: more than 4194304 bytes"):
        read(Path("/dev/zero"))


def test_a_file_is_written_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"one", replace=False)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"one", 0o600)
    with pytest.raises(FileExistsError):
        write_whole(path, b"two", replace=False)
    path.chmod(0o644)
    write_whole(path, b"three", replace=True)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"three", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_not_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"two", replace=True)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"one"]


_KILLED = """
import os, sys
from pathlib import Path
from iserblk.files import write_whole
os.fsync = lambda fd: os._exit(0)
write_whole(Path(sys.argv[1]), b"a secret", replace=True)
"""


def _killed_writer(path: Path) -> Path:
    """What a writer leaves that is killed when its content is written."""
    subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=True)
    (left,) = path.parent.glob(f".{path.name}.????????")
    assert left.read_bytes() == b"a secret"
    return left


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path, other = tmp_path / "disk.chap", tmp_path / "disk"
    left, of_other = _killed_writer(path), _killed_writer(other)
    assert re.fullmatch(r"\.disk\.chap\.[0-9a-f]{8}", left.name)
    write_whole(path, b"another", replace=True)
    assert sorted(tmp_path.iterdir()) == [of_other, path]
    files.remove_parts(other)
    assert [*tmp_path.iterdir()] == [path]


def test_the_part_of_a_living_writer_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "disk.chap"
    fsync = os.fsync
    seen = []

    def meanwhile(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        write_whole(path, b"of the second writer", replace=True)
        seen.extend(sorted(each.name for each in tmp_path.iterdir()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_whole(path, b"of the first writer", replace=True)
    assert len(seen) == 2
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [
        ("disk.chap", b"of the first writer")
    ]


def test_a_part_that_is_taken_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer comes between the making of the part and its lock."""
    path = tmp_path / "file"
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        files.remove_parts(path)
        assert [*tmp_path.iterdir()] == []
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_whole(path, b"all", replace=False)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"all")]


@pytest.mark.parametrize("other", ["directory", "link", "pipe", "no locks", "of a user"])
def test_what_no_writer_left_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    path, part = tmp_path / "file", tmp_path / ".file.0123abcd"
    if other == "directory":
        part.mkdir()
    elif other == "link":
        part.symlink_to("/dev/null")
    elif other == "pipe":
        os.mkfifo(part)
    elif other == "of a user":
        part = tmp_path / ".file.backup"
        part.touch()
    else:
        part.touch()

        def no_locks(_fd: int, _how: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", no_locks)
    write_whole(path, b"all", replace=True)
    assert sorted(tmp_path.iterdir()) == [part, path]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ECONNABORTED])
def test_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert files.is_there(str(tmp_path)) and files.is_there(str(tmp_path / "link"))
    assert not files.is_there(str(tmp_path / "missing"))
    assert not files.is_there(str(tmp_path / ("x" * 300)))

    def no_answer(_path: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "lstat", no_answer)  # type: ignore[attr-defined]
    assert files.is_there("mount")  # its server was killed, perhaps while it was asked


@pytest.fixture(params=["compiled", "as written"])
def read_at(request: pytest.FixtureRequest) -> Callable[..., int]:
    if request.param == "as written":
        found: Callable[..., int] = vars(files)["_read_at"]
        return found
    compiled = pytest.importorskip("iserblk._files", reason="not compiled: run scripts/setup")
    assert files.read_at is compiled.read_at
    return compiled.read_at


@pytest.mark.parametrize("size", [1, 4096, 65535, 65536, 300_000])
def test_a_read_fills_its_buffer_and_no_more(
    tmp_path: Path, read_at: Callable[..., int], size: int
) -> None:
    data = bytes(range(251)) * (SIZE // 251)
    path = tmp_path / "file"
    path.write_bytes(data)
    memory = bytearray(b"\xee" * (size + 20))
    with path.open("rb") as file:
        assert read_at(file.fileno(), memoryview(memory)[10:-10], 77, 0) == size
    assert memory == b"\xee" * 10 + data[77 : 77 + size] + b"\xee" * 10


def test_a_read_at_the_end_of_the_file(fd: int, read_at: Callable[..., int]) -> None:
    memory = memoryview(bytearray(8))
    assert read_at(fd, memory, SIZE - 3, 0) == 3
    assert memory == b"xxx" + bytes(5)
    for at in (SIZE, SIZE + 1, 2**62):
        assert read_at(fd, memory, at, 0) == 0
    assert read_at(fd, memory[:0], 0, 0) == 0


def test_a_read_that_fails(fd: int, read_at: Callable[..., int]) -> None:
    memory = memoryview(bytearray(8))
    for at, flags, number in ((-2, 0, errno.EINVAL), (0, 1 << 30, errno.EOPNOTSUPP)):
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
            read_at(fd, memory, at, flags)
        assert caught.value.errno == number
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.EBADF))):
        read_at(-1, memory, 0, 0)


@pytest.mark.parametrize("wrong", [bytes(8), memoryview(bytes(8)), None, 7])
def test_a_read_into_what_cannot_be_written(
    fd: int, read_at: Callable[..., int], wrong: object
) -> None:
    with pytest.raises((TypeError, BufferError)):
        read_at(fd, wrong, 0, 0)


@pytest.mark.parametrize(("at", "flags"), [(2**63, 0), (0, 2**31)])
def test_numbers_that_the_system_does_not_take(
    fd: int, read_at: Callable[..., int], at: int, flags: int
) -> None:
    with pytest.raises(OverflowError):
        read_at(fd, memoryview(bytearray(8)), at, flags)
