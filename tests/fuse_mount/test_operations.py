"""The file system's methods, called directly, over a fake disk."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest
import trio

pyfuse3 = pytest.importorskip("pyfuse3", reason="pyfuse3 is missing: run scripts/setup")

from fuse_mount.operations import LunFiles  # noqa: E402 - after the look for pyfuse3
from fuse_mount.options import MountOptions  # noqa: E402
from iserblk.disk.seam import FlushClient, Rest  # noqa: E402
from iserblk.errors import CommandTimeout, ScsiError  # noqa: E402
from tests.support.fake_disk import MIB, AsyncFake, FakeDisk, lun_info  # noqa: E402

LUN0, LUN1 = pyfuse3.ROOT_INODE + 1, pyfuse3.ROOT_INODE + 2
SIZE = 8 * MIB


def files(options: MountOptions | None = None, **changes: Any) -> LunFiles:
    disks = {f"lun{each}": AsyncFake(FakeDisk(lun_info(each, **changes))) for each in range(2)}
    return LunFiles(disks, options or MountOptions())


NO_CONTEXT: Any = None  # the request's context, which the operations do not use


async def opened(fs: LunFiles, inode: int = LUN0, flags: int = os.O_RDWR) -> int:
    """The handle of a file that was opened."""
    return (await fs.open(inode, flags, NO_CONTEXT)).fh


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
    answer = await files(MountOptions(direct_io=direct, keep_cache=keep)).open(LUN1, 0, NO_CONTEXT)
    assert (answer.direct_io, answer.keep_cache) == (direct, keep)


@pytest.mark.parametrize(("offset", "length"), [(0, MIB), (1, 511), (SIZE - 4096, 4096)])
async def test_what_was_written_is_read_from_that_lun(offset: int, length: int) -> None:
    fs = files()
    first, other = await opened(fs), await opened(fs, LUN1)
    data = os.urandom(length)
    assert await fs.write(first, offset, data) == length
    assert await fs.read(first, offset, length) == data
    assert await fs.read(other, offset, length) == bytes(length)


async def test_the_end_is_that_of_a_block_device() -> None:
    fs = files()
    fh = await opened(fs)
    assert len(await fs.read(fh, SIZE - 10, 4096)) == 10
    assert len(await fs.read(fh, SIZE, 4096)) == 0
    assert len(await fs.read(fh, SIZE + 5, 4096)) == 0
    assert await fs.write(fh, SIZE - 10, b"x" * 4096) == 10
    await refused(errno.ENOSPC, fs.write(fh, SIZE, b"x"))
    assert await fs.read(fh, SIZE - 11, 11) == b"\0" + b"x" * 10


async def test_reads_at_once_do_not_share_a_buffer() -> None:
    """Each read waits within read_into while other reads hold their buffers."""
    fs = files()
    fh = await opened(fs)
    for number in range(32):
        await fs.write(fh, number * 4096, bytes([number]) * 4096)
    seen: list[bytes] = []

    async def read(number: int) -> None:
        # As pyfuse3 does: the result is used before anything is awaited.
        seen.append(bytes(await fs.read(fh, number * 4096, 4096)))

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(read, number)
    assert sorted(seen) == [bytes([number]) * 4096 for number in range(32)]


async def test_a_cancelled_read_gives_its_buffer_back() -> None:
    buffers: list[object] = []

    class Recording(AsyncFake):
        async def read_into(
            self, buffer: memoryview, offset: int, rest: Rest | None = None
        ) -> None:
            buffers.append(buffer.obj)
            await super().read_into(buffer, offset, rest)

    fs = LunFiles({"lun0": Recording(FakeDisk(lun_info(0)))}, MountOptions())
    fh = await opened(fs)
    with trio.CancelScope() as scope:
        scope.cancel()
        await fs.read(fh, 0, 4096)
    assert scope.cancelled_caught
    await fs.read(fh, 0, 4096)
    assert len(buffers) == 2 and buffers[0] is buffers[1]


class Setting:
    """A stand-in for SetattrFields, which Python code cannot make."""

    def __init__(self, *names: str) -> None:
        for name in ("mode", "uid", "gid", "size", "atime", "mtime", "ctime"):
            setattr(self, f"update_{name}", name in names)


async def truncate(fs: LunFiles, size: int, fh: int | None = None) -> int:
    """ftruncate(2), or truncate(2) without ``fh``; returns the size that the answer tells."""
    wanted = pyfuse3.EntryAttributes()
    wanted.st_size = size
    answer = await fs.setattr(LUN0, wanted, Setting("size"), fh, NO_CONTEXT)  # type: ignore[arg-type]
    return answer.st_size


async def told_size(fs: LunFiles) -> int:
    return (await fs.getattr(LUN0, NO_CONTEXT)).st_size


@pytest.mark.parametrize("size", [0, 1, SIZE])
async def test_truncating_leaves_the_bytes_and_the_size_of_the_lun(size: int) -> None:
    fs = files()
    fh = await opened(fs)
    await fs.write(fh, 0, b"kept")
    assert await truncate(fs, size) == SIZE
    assert await told_size(fs) == SIZE
    assert await fs.read(fh, 0, 4) == b"kept"  # type: ignore[comparison-overlap]
    await refused(errno.EFBIG, truncate(fs, SIZE + 1))


@pytest.mark.parametrize("how", ["open", "ftruncate"])
async def test_the_end_is_told_as_long_as_the_file_is_open(how: str) -> None:
    """dd conv=sparse looks at the end how long the file is, and extends it, if it is too short.
    Afterwards, and for files that others truncate by name, stat(2) tells the size of the LUN."""
    fs = files()
    other = await opened(fs)
    if how == "open":
        fh = await opened(fs, flags=os.O_WRONLY | os.O_TRUNC)
    else:
        fh = await opened(fs)
        assert await truncate(fs, 0, fh) == 0
    entry = await fs.getattr(LUN0, NO_CONTEXT)
    assert (entry.st_size, entry.st_blocks, entry.attr_timeout) == (0, 0, 0.0)
    await fs.write(fh, 0, b"x" * 700)
    await fs.write(other, 800, b"y" * 100)
    entry = await fs.getattr(LUN0, NO_CONTEXT)
    assert (entry.st_size, entry.st_blocks) == (900, 2)
    assert await truncate(fs, 5000, fh) == 5000
    assert (await fs.getattr(LUN1, NO_CONTEXT)).st_size == SIZE
    await fs.release(fh)
    entry = await fs.getattr(LUN0, NO_CONTEXT)
    assert (entry.st_size, entry.st_blocks) == (SIZE, SIZE // 512) and entry.attr_timeout > 0
    fh = await opened(fs)
    assert await truncate(fs, SIZE, fh) == SIZE  # extended: there is no end any more
    assert bytes(await fs.read(fh, 4990, 20)) == bytes(20)


@pytest.mark.parametrize(
    ("begin", "kept"),
    [
        (512, 8000),
        (511, 511 + 4096),  # as by a program with a buffer that is larger than its header
        (0, 4096),  # as by the kernel, which reads ahead
    ],
)
async def test_what_a_read_has_shown_is_not_zeroed(begin: int, kept: int) -> None:
    """A boot sector is written, then a program changes the file system behind it. One that begins
    behind the end uses the LUN as a disk; else more than what it has read is not known to it."""
    fs = files()
    fh = await opened(fs)
    await fs.write(fh, 0, b"\xee" * 9000)
    await truncate(fs, 512)
    assert await fs.read(fh, begin, 4096) == b"\xee" * 4096
    await fs.write(fh, 1000, b"x")
    await fs.write(fh, 8000, b"x")
    shown = bytearray(b"\xee" * kept + bytes(8000 - kept))
    shown[1000] = ord("x")
    assert await fs.read(await opened(fs, flags=os.O_RDONLY), 512, 7488) == shown[512:]


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR | os.O_TRUNC])
async def test_a_read_across_the_end_that_moves_nothing(flags: int) -> None:
    """Of a program that only reads, or has itself truncated the file."""
    fs = files()
    await fs.write(await opened(fs), 0, b"\xee" * 9000)
    if flags & os.O_TRUNC:
        fh = await opened(fs, flags=flags)
        await fs.write(fh, 0, bytes(512))
    else:
        await truncate(fs, 512)
        fh = await opened(fs, flags=flags)
    await fs.read(fh, 0, 4096)
    await fs.write(await opened(fs, flags=os.O_WRONLY), 8000, b"x")
    assert await fs.read(await opened(fs, flags=os.O_RDONLY), 512, 7488) == bytes(7488)


@pytest.mark.parametrize("options", [{"lun": True}, {"mount": True}])
async def test_a_read_only_lun_is_not_truncated(options: dict[str, bool]) -> None:
    fs = files(MountOptions(read_only="mount" in options), read_only="lun" in options)
    await refused(errno.EROFS, truncate(fs, 0))
    await refused(errno.EROFS, fs.open(LUN0, os.O_RDONLY | os.O_TRUNC, NO_CONTEXT))


async def test_times_move_and_can_be_set_owner_and_mode_cannot() -> None:
    fs = files()
    wanted = pyfuse3.EntryAttributes()
    wanted.st_mtime_ns = 12_345
    entry = await fs.setattr(LUN0, wanted, Setting("mtime"), None, NO_CONTEXT)  # type: ignore[arg-type]
    assert entry.st_mtime_ns == 12_345
    await fs.write(await opened(fs), 0, b"x")
    assert (await fs.getattr(LUN0, NO_CONTEXT)).st_mtime_ns > 12_345
    await fs.setattr(LUN0, wanted, Setting("mtime"), None, NO_CONTEXT)  # type: ignore[arg-type]
    await truncate(fs, 0)
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
    fh = await opened(fs)
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
        await refused(number, fs.read(fh, 0, 1))
        await refused(number, fs.write(fh, 0, b"x"))
        await refused(number, fs.fsync(fh, False))
        await refused(number, fs.fsyncdir(pyfuse3.ROOT_INODE, False))
    assert [record.levelname for record in caplog.records if record.exc_info] == ["ERROR"] * 4


class Losing:
    """Two files, of whose first LUN writes are lost."""

    def __init__(self) -> None:
        self.fakes = [FakeDisk(lun_info(each)) for each in range(2)]
        self.fs = LunFiles({each.info.name: AsyncFake(each) for each in self.fakes}, MountOptions())
        self.losses = self.fakes[0].losses

    async def open(self, inode: int = LUN0) -> int:
        return await opened(self.fs, inode)

    async def hears(self, handle: Any) -> bool:
        """Its fsync fails."""
        try:
            await self.fs.fsync(handle, False)
        except pyfuse3.FUSEError as error:
            assert error.errno == errno.EIO
            return True
        return False


LOST = pytest.mark.logs("fsync: lun0: writes were lost")


@LOST
async def test_each_open_file_hears_of_a_loss_once() -> None:
    lun = Losing()
    one, other, third = await lun.open(), await lun.open(), await lun.open(LUN1)
    assert len({one, other, third}) == 3
    lun.losses.add()
    await lun.fs.write(one, 0, b"x")
    for handle in (other, one):
        assert await lun.hears(handle) and not await lun.hears(handle)
    assert not await lun.hears(third)
    assert not await lun.hears(await lun.open())
    assert await lun.fs.flush_all() == []


@LOST
async def test_what_close_has_not_told_is_told_to_who_opens_later() -> None:
    """close(2) itself says nothing, as with a file system of Linux's."""
    lun = Losing()
    one, other = await lun.open(), await lun.open()
    lun.losses.add()
    assert await lun.hears(other)
    await lun.fs.release(one)
    later = await lun.open()
    assert await lun.hears(later) and not await lun.hears(later)
    assert not await lun.hears(await lun.open())


@LOST
async def test_fsync_of_the_directory_is_of_a_new_client() -> None:
    """So it hears of what was not told, as before an unmount."""
    lun = Losing()
    one = await lun.open()
    lun.losses.add()
    directory = await lun.fs.opendir(pyfuse3.ROOT_INODE, NO_CONTEXT)
    await refused(errno.EIO, lun.fs.fsyncdir(directory, False))
    await lun.fs.fsyncdir(directory, False)
    assert await lun.hears(one)


async def test_the_last_flush_tells_of_what_no_file_was_told() -> None:
    lun = Losing()
    await lun.open()
    lun.losses.add()
    lun.losses.new_client().told(1)
    assert await lun.fs.flush_all() == [
        "lun0: the last flush failed, data may be lost: lun0: writes were lost"
    ]


async def test_the_last_flush_names_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAULTS", '{"flush": "CommandTimeout"}')
    fs = files()
    assert await fs.flush_all() == []  # nothing was written
    for inode in (LUN0, LUN1):
        await fs.write(await opened(fs, inode), 0, b"x")
    failed = await fs.flush_all()
    assert [line.partition(":")[0] for line in failed] == ["lun0", "lun1"]


class Slow(AsyncFake):
    """A flush does not end. ``begun``: it was asked for."""

    begun = False

    async def flush(self, client: FlushClient | None = None) -> None:
        self.begun = True
        await trio.sleep_forever()


async def test_the_last_flushes_begin_together(autojump_clock: trio.abc.Clock) -> None:
    """A target that is away holds up no other, and what the other has told is known."""
    slow, other = Slow(FakeDisk(lun_info(0))), AsyncFake(FakeDisk(lun_info(1)))
    fs = LunFiles({"lun0": slow, "lun1": other}, MountOptions())
    for inode in (LUN0, LUN1):
        await fs.write(await opened(fs, inode), 0, b"x")
    other.fake.losses.add()
    with trio.move_on_after(1.0):
        await fs.flush_all()
    assert slow.begun and not other.fake.dirty
    told, unknown = fs.not_flushed()
    assert told == "lun1: the last flush failed, data may be lost: lun1: writes were lost"
    assert unknown.startswith("lun0: not flushed")


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
    fh = await opened(fs)
    disk.fake.info = replace(disk.info, size=SIZE + MIB)
    disk.fake.data += bytes(MIB)
    if how == "read":
        assert len(await fs.read(fh, SIZE, 4096)) == 4096
    elif how == "write":
        assert await fs.write(fh, SIZE, bytes(4096)) == 4096
    elif how == "truncate":
        await truncate(fs, SIZE + MIB)
    assert (await fs.getattr(LUN0, NO_CONTEXT)).st_size == SIZE + MIB
