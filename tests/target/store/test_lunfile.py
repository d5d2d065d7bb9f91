"""Opening files and block devices as LUNs: every reason why one cannot be a LUN."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, Busy, PermissionDenied
from iserblk.target.store import lunfile
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.store import FileStore
from tests.support.descriptors import descriptors, descriptors_to_begin_with

SIZE = 1 << 20


def content(lun: FileStore) -> bytes:
    buffer = memoryview(bytearray(lun.size))
    assert lun.read_into(buffer, 0, False)
    return bytes(buffer)


def refused(path: Path, kind: type[Exception], words: str, **options: int | bool | None) -> None:
    before = descriptors_to_begin_with()
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


def test_the_name_of_a_new_file_is_on_stable_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all that is flushed to it could be gone with the name."""
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), (tmp_path / "lun").exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.chdir(tmp_path)
    open_file("lun", size=SIZE).close()
    open_file(str(tmp_path / "lun"), size=SIZE).close()
    assert synced == [(str(tmp_path), True)]

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    refused(tmp_path / "other", BadArgument, "Input/output error", size=SIZE)
    assert not (tmp_path / "other").exists()


def test_missing(tmp_path: Path) -> None:
    refused(tmp_path / "no", BadArgument, "no such file; `size=1G` creates it")
    refused(tmp_path / "no", BadArgument, "leave out `ro` to create it", size=SIZE, read_only=True)
    for size in (None, SIZE):  # which would not create the directory
        refused(tmp_path / "no" / "file", BadArgument, "directory .*does not exist", size=size)
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
        (1025, {}, "not a multiple of 512-byte blocks; `size=1536` enlarges it"),
        (4608, {"block": 4096}, "`size=8192` enlarges it"),
        (2048, {"size": 1024}, "2048 bytes, more than `size=1024`"),
        (1024, {"size": 1000}, "size 1000 is not a positive multiple of 512-byte"),
        (1024, {"size": 512, "block": 4096}, "not a positive multiple of 4096-byte"),
        (1024, {"size": 2048, "read_only": True}, "less than `size=2048`, and is served with `ro`"),
    ],
)
def test_sizes_that_cannot_be(
    tmp_path: Path, content: int, options: dict[str, int], words: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * content)
    refused(path, BadArgument, words, **options)
    assert path.read_bytes() == b"x" * content


@pytest.mark.parametrize(
    ("content", "block", "enough"), [(0, 512, 512), (1025, 512, 1536), (512, 4096, 4096)]
)
def test_the_remedy_for_a_file_that_is_served_read_only(
    tmp_path: Path, content: int, block: int, enough: int
) -> None:
    """`size=` would write to it."""
    path = tmp_path / "a file"
    path.write_bytes(b"x" * content)
    with pytest.raises(BadArgument) as caught:
        open_file(str(path), read_only=True, block=block)
    remedy = str(caught.value).rpartition("; ")[2]
    assert remedy == f"`truncate -s {enough} '{path}'` enlarges it"
    subprocess.run(["sh", "-c", remedy.split("`")[1]], check=True)
    lun = open_file(str(path), read_only=True, block=block)
    assert lun.size == enough
    lun.close()


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
    """A directory of an ordinary user; the test runs as that user."""
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
    refused(nobody / "readable", PermissionDenied, "`ro` serves it read-only")
    open_file(str(nobody / "readable"), read_only=True).close()
    for read_only in (False, True):
        refused(
            nobody / "private",
            PermissionDenied,
            "user .*access",
            read_only=read_only,
        )
    refused(nobody / "closed" / "file", PermissionDenied, "Permission denied")
    refused(nobody / "new", PermissionDenied, "Permission denied", size=SIZE)


@pytest.mark.plain("replaces a function of its module")
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


@contextlib.contextmanager
def a_loop_device(folder: Path, size: int, *words: str) -> Iterator[Path]:
    """Of a new file of ``size`` bytes; ``words``: of losetup."""
    image = folder / "image"
    image.write_bytes(b"x" * size)
    command = ["losetup", "--find", "--show", *words, str(image)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device can be set up: {error}")
    try:
        yield Path(made.stdout.strip())
    finally:
        subprocess.run(["losetup", "--detach", made.stdout.strip()], check=True)


@pytest.fixture(params=["512", "4096"])
def loop_device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A loop device with sectors of 512 or 4096 bytes."""
    with a_loop_device(tmp_path, SIZE, "--sector-size", request.param) as device:
        subprocess.run(["blockdev", "--setrw", device], check=True)
        yield device


def test_a_device_cannot_be_enlarged(tmp_path: Path) -> None:
    with a_loop_device(tmp_path, 4096 + 512) as device:
        refused(device, BadArgument, "of 4096-byte blocks; leave out `block=`", block=4096)


def test_a_device_that_is_not_connected(tmp_path: Path) -> None:
    # (One that has been detached may be another test's by now.)
    with a_loop_device(tmp_path, 0) as device:
        refused(device, BadArgument, "its 0 bytes .*; connect the device first")


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
    assert content(lun) == expected
    lun.close()
    refused(loop_device, BadArgument, "cannot grow", size=2 * SIZE)
    open_file(str(loop_device), read_only=True).close()
