"""The file system's methods, called directly, over a fake disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

pyfuse3 = pytest.importorskip("pyfuse3", reason="pyfuse3 is missing: run scripts/setup")

from fuse_mount.operations import LunFiles  # noqa: E402 - after the look for pyfuse3
from fuse_mount.options import MountOptions  # noqa: E402
from iserblk.errors import CommandTimeout, ScsiError  # noqa: E402
from tests.support.fake_disk import MIB, AsyncFake, FakeDisk, lun_info  # noqa: E402

LUN0, LUN1 = pyfuse3.ROOT_INODE + 1, pyfuse3.ROOT_INODE + 2
SIZE = 8 * MIB


def files(options: MountOptions | None = None, **changes: Any) -> LunFiles:
    disks = {f"lun{each}": AsyncFake(FakeDisk(lun_info(each, **changes))) for each in range(2)}
    return LunFiles(disks, options or MountOptions())


NO_CONTEXT: Any = None  # the request's context, which the operations do not use


async def refused(number: int, call: Awaitable[object]) -> None:
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await call
    assert errno.errorcode[caught.value.errno] == errno.errorcode[number]


async def test_names() -> None:
    fs = files()
    assert (await fs.lookup(pyfuse3.ROOT_INODE, b"lun1", NO_CONTEXT)).st_ino == LUN1
    await refused(errno.ENOENT, fs.lookup(pyfuse3.ROOT_INODE, b"lun2", NO_CONTEXT))
    entry = await fs.getattr(pyfuse3.ROOT_INODE, NO_CONTEXT)
    assert stat.S_ISDIR(entry.st_mode) and stat.S_IMODE(entry.st_mode) == 0o755


@pytest.mark.parametrize(
    ("mounted_ro", "lun_ro", "umask", "mode"),
    [
        (False, False, 0o022, 0o644),
        (True, False, 0o022, 0o444),
        (False, True, 0o022, 0o444),
        (False, False, 0o077, 0o600),
    ],
)
async def test_attributes(mounted_ro: bool, lun_ro: bool, umask: int, mode: int) -> None:
    options = MountOptions(read_only=mounted_ro, uid=7, gid=8, umask=umask)
    entry = await files(options, read_only=lun_ro).getattr(LUN0, NO_CONTEXT)
    assert stat.S_ISREG(entry.st_mode) and stat.S_IMODE(entry.st_mode) == mode
    assert (entry.st_uid, entry.st_gid) == (7, 8)
    assert (entry.st_size, entry.st_blocks, entry.st_blksize) == (SIZE, SIZE // 512, MIB)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
async def test_a_read_only_lun_is_not_opened_for_writing(flags: int) -> None:
    await refused(errno.EROFS, files(read_only=True).open(LUN0, flags, NO_CONTEXT))
    await refused(errno.EROFS, files(MountOptions(read_only=True)).open(LUN0, flags, NO_CONTEXT))
    await files(read_only=True).open(LUN0, os.O_RDONLY, NO_CONTEXT)


@pytest.mark.parametrize(("direct", "keep"), [(True, False), (False, False), (False, True)])
async def test_open_says_what_the_kernel_may_cache(direct: bool, keep: bool) -> None:
    opened = await files(MountOptions(direct_io=direct, keep_cache=keep)).open(LUN1, 0, NO_CONTEXT)
    assert (opened.fh, opened.direct_io, opened.keep_cache) == (1, direct, keep)


@pytest.mark.parametrize(("offset", "length"), [(0, MIB), (1, 511), (SIZE - 4096, 4096)])
async def test_what_was_written_is_read_from_that_lun(offset: int, length: int) -> None:
    fs = files()
    data = os.urandom(length)
    assert await fs.write(0, offset, data) == length
    assert await fs.read(0, offset, length) == data
    assert await fs.read(1, offset, length) == bytes(length)


async def test_the_end_is_that_of_a_block_device() -> None:
    fs = files()
    assert len(await fs.read(0, SIZE - 10, 4096)) == 10
    assert len(await fs.read(0, SIZE, 4096)) == 0
    assert len(await fs.read(0, SIZE + 5, 4096)) == 0
    assert await fs.write(0, SIZE - 10, b"x" * 4096) == 10
    await refused(errno.ENOSPC, fs.write(0, SIZE, b"x"))
    assert await fs.read(0, SIZE - 11, 11) == b"\0" + b"x" * 10


async def test_reads_at_once_do_not_share_a_buffer() -> None:
    """Each read waits within read_into while other reads hold their buffers."""
    fs = files()
    for number in range(32):
        await fs.write(0, number * 4096, bytes([number]) * 4096)
    seen: list[bytes] = []

    async def read(number: int) -> None:
        # As pyfuse3 does: the result is used before anything is awaited.
        seen.append(bytes(await fs.read(0, number * 4096, 4096)))

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(read, number)
    assert sorted(seen) == [bytes([number]) * 4096 for number in range(32)]


async def test_a_cancelled_read_gives_its_buffer_back() -> None:
    buffers: list[object] = []

    class Recording(AsyncFake):
        async def read_into(self, buffer: memoryview, offset: int, deadline: float = 0.0) -> None:
            buffers.append(buffer.obj)
            await super().read_into(buffer, offset, deadline)

    fs = LunFiles({"lun0": Recording(FakeDisk(lun_info(0)))}, MountOptions())
    with trio.CancelScope() as scope:
        scope.cancel()
        await fs.read(0, 0, 4096)
    assert scope.cancelled_caught
    await fs.read(0, 0, 4096)
    assert len(buffers) == 2 and buffers[0] is buffers[1]


class Setting:
    """A stand-in for SetattrFields, which Python code cannot make."""

    def __init__(self, *names: str) -> None:
        for name in ("mode", "uid", "gid", "size", "atime", "mtime", "ctime"):
            setattr(self, f"update_{name}", name in names)


async def test_truncating_changes_nothing() -> None:
    fs = files()
    await fs.write(0, 0, b"kept")
    wanted = pyfuse3.EntryAttributes()
    for size in (0, 1, SIZE):
        wanted.st_size = size
        assert (await fs.setattr(LUN0, wanted, Setting("size"), None, NO_CONTEXT)).st_size == SIZE  # type: ignore[arg-type]
    wanted.st_size = SIZE + 1
    await refused(errno.EFBIG, fs.setattr(LUN0, wanted, Setting("size"), None, NO_CONTEXT))  # type: ignore[arg-type]
    await fs.open(LUN0, os.O_RDWR | os.O_TRUNC, NO_CONTEXT)
    assert await fs.read(0, 0, 4) == b"kept"  # type: ignore[comparison-overlap]


async def test_times_move_and_can_be_set_owner_and_mode_cannot() -> None:
    fs = files()
    wanted = pyfuse3.EntryAttributes()
    wanted.st_mtime_ns = 12_345
    entry = await fs.setattr(LUN0, wanted, Setting("mtime"), None, NO_CONTEXT)  # type: ignore[arg-type]
    assert entry.st_mtime_ns == 12_345
    await fs.write(0, 0, b"x")
    assert (await fs.getattr(LUN0, NO_CONTEXT)).st_mtime_ns > 12_345
    for field in ("mode", "uid", "gid"):
        await refused(errno.EPERM, fs.setattr(LUN0, wanted, Setting(field), None, NO_CONTEXT))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["create", "mknod", "mkdir", "symlink", "link", "unlink", "rmdir", "rename"]
)
async def test_names_do_not_change(name: str) -> None:
    await refused(errno.EPERM, getattr(files(), name)(pyfuse3.ROOT_INODE, b"lun0", NO_CONTEXT))


async def test_errors_are_errnos_and_bugs_are_eio(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = [FakeDisk(lun_info(each)) for each in range(2)]
    fs = LunFiles({each.info.name: AsyncFake(each) for each in fakes}, MountOptions())
    for error, number in (
        (CommandTimeout("late"), errno.EIO),
        (ScsiError("medium"), errno.EIO),
        (ZeroDivisionError("a bug"), errno.EIO),
    ):
        for name in ("read_into", "write", "flush"):

            def fail(*_: object, error: Exception = error) -> None:
                raise error

            monkeypatch.setattr(fakes[0], name, fail)
        fakes[0].dirty = True
        await refused(number, fs.read(0, 0, 1))
        await refused(number, fs.write(0, 0, b"x"))
        await refused(number, fs.fsync(0, False))
        await refused(number, fs.fsyncdir(pyfuse3.ROOT_INODE, False))
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"] * 4


async def test_the_last_flush_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", '{"flush": "CommandTimeout"}')
    fs = files()
    assert await fs.flush_all() == []  # nothing was written
    for number in (0, 1):
        await fs.write(number, 0, b"x")
    failed = await fs.flush_all()
    assert [line.partition(":")[0] for line in failed] == ["lun0", "lun1"]


async def test_statfs_is_full() -> None:
    answer = await files().statfs(NO_CONTEXT)
    assert answer.f_blocks * answer.f_frsize == 2 * SIZE
    assert answer.f_bfree == answer.f_bavail == 0
    assert answer.f_files == 2


# -- a LUN that grows ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["getattr", "read", "write", "truncate"])
async def test_a_grown_lun_is_larger_at_once(how: str) -> None:
    disk = AsyncFake(FakeDisk(lun_info(0)))
    fs = LunFiles({"lun0": disk}, MountOptions())
    disk.fake.info = replace(disk.info, size=SIZE + MIB)
    disk.fake.data += bytes(MIB)
    if how == "read":
        assert len(await fs.read(0, SIZE, 4096)) == 4096
    elif how == "write":
        assert await fs.write(0, SIZE, bytes(4096)) == 4096
    elif how == "truncate":
        entry = pyfuse3.EntryAttributes()
        entry.st_size = SIZE + MIB
        fields = SimpleNamespace(
            update_size=True, update_mode=False, update_uid=False, update_gid=False,
            update_mtime=False,
        )  # fmt: skip
        await fs.setattr(LUN0, entry, fields, None, NO_CONTEXT)  # type: ignore[arg-type]
    assert (await fs.getattr(LUN0, NO_CONTEXT)).st_size == SIZE + MIB
