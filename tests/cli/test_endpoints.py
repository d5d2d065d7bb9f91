"""Files as source or destination of a copy."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from iserblk import files
from iserblk.cli.endpoints import FileEnd, open_destination, open_source, same_place, two_ends
from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO
from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.target.store.lunfile import open_file
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info

KIB = 1024


async def source_size(path: Path) -> int:
    async with open_source([str(path)], {}) as end:
        return end.size


async def destination_size(path: Path) -> int:
    async with open_destination([str(path)], {}) as end:
        return end.size


@pytest.mark.parametrize("opened", [source_size, destination_size])
async def test_what_is_no_disk_is_refused(
    opened: Callable[[Path], Awaitable[int]], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with trio.fail_after(10):  # no process has the other end open
        for path in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
            with pytest.raises(BadArgument, match=f"{path}: "):
                await opened(path)
    with pytest.raises(BadArgument, match="No such file"):
        await opened(tmp_path / "no" / "such")


async def test_a_source_must_exist_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="No such file"):
        await source_size(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, PermissionDenied), (errno.EROFS, PermissionDenied), (errno.EBUSY, Busy)],
)
async def test_the_system_says_no(
    number: int, kind: type[IserblkError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call is refused. (The refusal is faked: root is refused nothing.)"""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        await destination_size(tmp_path / "file")


async def test_an_existing_destination_is_not_touched_by_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    assert await destination_size(tmp_path / "file") == 8
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("size", "content"), [(10, b"precious\0\0"), (8, b"precious"), (3, b"pre")]
)
async def test_resizing_keeps_what_is_there(tmp_path: Path, size: int, content: bytes) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    async with open_destination([str(tmp_path / "file")], {}) as end:
        assert isinstance(end, FileEnd)
        await end.resize(size)
        assert end.size == size
    assert (tmp_path / "file").read_bytes() == content


async def test_where_a_file_has_grown_it_is_zero_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where holes cannot be made, none is filled with zeroes. What was written there becomes zero
    all the same."""
    monkeypatch.setattr(files, "fallocate", lambda *_: False)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4 * KIB)
    async with open_destination([str(path)], {}) as end:
        assert isinstance(end, FileEnd)
        await end.resize(1024 * KIB)
        await end.zero(0, 4 * KIB, may_trim=True)
        await end.zero(4 * KIB, 1020 * KIB, may_trim=True)
        assert path.stat().st_blocks * 512 <= 8 * KIB
        await end.write(memoryview(b"y" * 10), 64 * KIB)
        await end.zero(60 * KIB, 8 * KIB)
    assert path.read_bytes() == bytes(1024 * KIB)


async def test_targets_and_copies_keep_off_each_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(path)
    async with open_source([str(tmp_path / "link")], {}):
        open_file(str(path), read_only=True).close()
        with pytest.raises(Busy, match="`iserblk copy` uses it"):
            open_file(str(path))
    async with open_destination([str(path)], {}) as end:
        assert isinstance(end, FileEnd)
        lun = open_file(str(path), read_only=True)
        with pytest.raises(Busy, match=f"{path}: a target serves it"):
            await end.lock(to_write=True)
        lun.close()
        await end.lock(to_write=True)
        with pytest.raises(Busy, match="`iserblk copy` uses it"):
            open_file(str(path), read_only=True)
        with pytest.raises(Busy, match="another copy uses it"):
            await source_size(path)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOLCK])
async def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "lock_lun", refuse)
    (tmp_path / "file").write_bytes(b"x")
    assert await source_size(tmp_path / "file") == 1


async def test_udev_may_look_at_a_device_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """It holds a shared lock meanwhile. A target does not let go."""
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(stat, "S_ISBLK", stat.S_ISREG)
    async with open_destination([str(tmp_path / "file")], {}) as end:
        assert isinstance(end, FileEnd)
        udev = os.open(tmp_path / "file", os.O_RDONLY)
        assert files.lock_lun(udev, shared=True)
        with pytest.raises(Busy):
            await end.lock(to_write=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.lock, True)
            await trio.sleep(1)
            os.close(udev)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            ("naa.6001405aabbccdd00000000000000001",),
            ("naa.6001405aabbccdd00000000000000001",),
            True,
        ),
        (("eui.0123456789abcdef", "t10.one"), ("t10.other", "eui.0123456789abcdef"), True),
        (
            ("naa.6001405aabbccdd00000000000000001",),
            ("naa.6001405aabbccdd00000000000000002",),
            False,
        ),
        # The name of the target, which some give to each of their LUNs.
        (
            ("name.iqn.2026-11.example:a", "naa.6001405aabbccdd00000000000000001"),
            ("name.iqn.2026-11.example:a", "naa.6001405aabbccdd00000000000000002"),
            False,
        ),
        # What two hosts with the same program, and its defaults, have.
        (("t10.IET     00010001", "naa.3000000100000001"), ("t10.IET     00010001",), False),
        ((), (), False),
    ],
)
def test_one_lun_by_two_names(one: tuple[str, ...], other: tuple[str, ...], same: bool) -> None:
    def lun(target: str, **changes: Any) -> Any:
        return AsyncFake(FakeDisk(lun_info(0, target=target, **changes)))

    first = lun("iqn.2026-11.example:a", identifiers=one)
    assert same_place(first, lun("iqn.2026-11.example:b", identifiers=other)) is same
    assert same_place(first, lun("iqn.2026-11.example:a", identifiers=()))
    larger = lun("iqn.2026-11.example:b", identifiers=other, size=16 * 1024 * KIB)
    assert not same_place(first, larger)


async def test_data_and_zeroes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 300 * KIB)
    async with open_destination([str(path)], {}) as end:
        await end.write(memoryview(b"abc"), 1000)
        await end.zero(64 * KIB, 128 * KIB, may_trim=True)
        await end.zero(5, 7)
        buffer = bytearray(5)
        await end.read_into(memoryview(buffer), 999)
        await end.flush()
    expected = bytearray(b"\xff" * 300 * KIB)
    expected[1000:1003] = b"abc"
    expected[64 * KIB : 192 * KIB] = bytes(128 * KIB)
    expected[5:12] = bytes(7)
    assert path.read_bytes() == expected
    assert buffer == b"\xffabc\xff"


async def test_zeroes_where_holes_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * (3 * 1024 * KIB))
    monkeypatch.setattr(files, "fallocate", lambda *_: False)
    async with open_destination([str(path)], {}) as end:
        await end.zero(1, 2 * 1024 * KIB + 5, may_trim=True)
    data = path.read_bytes()
    assert data[:1] + data[2 * 1024 * KIB + 6 :] == b"\xff" * (1024 * KIB - 5)
    assert not any(data[1 : 2 * 1024 * KIB + 6])


async def test_extents_of_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1024 * KIB)
        file.seek(256 * KIB)
        file.write(b"x" * 256 * KIB)
    async with open_source([str(path)], {}) as end:
        hole = EXTENT_HOLE | EXTENT_ZERO
        assert await end.extents(0, end.size) == [
            (0, 256 * KIB, hole),
            (256 * KIB, 256 * KIB, EXTENT_DATA),
            (512 * KIB, 512 * KIB, hole),
        ]
        assert await end.extents(300 * KIB, 10) == [(300 * KIB, 10, EXTENT_DATA)]
        assert await end.extents(600 * KIB, 10) == [(600 * KIB, 10, hole)]


async def test_a_file_that_shrinks_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    async with open_source([str(path)], {}) as end:
        os.truncate(path, 50)
        with pytest.raises(IserblkError, match="ends at byte 50"):
            await end.read_into(memoryview(bytearray(100)), 0)


async def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    async with open_source([str(path)], {}) as end:
        with pytest.raises(IserblkError, match=f"{path}: Bad file descriptor"):
            await end.write(memoryview(b"x"), 0)


async def test_the_same_file_by_two_names(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    (tmp_path / "link").hardlink_to(tmp_path / "one")
    (tmp_path / "other").touch()
    ends: dict[str, Any] = {}
    async with (
        open_source([str(tmp_path / "one")], {}) as ends["one"],
        open_destination([str(tmp_path / "link")], {}) as ends["link"],
        open_destination([str(tmp_path / "other")], {}) as ends["other"],
    ):
        assert same_place(ends["one"], ends["link"])
        assert not same_place(ends["one"], ends["other"])


A1, A2 = "iser://a1/iqn.2026-11.example:a/0", "iscsi://a2/iqn.2026-11.EXAMPLE:a/0"
B1, B2 = "iser://b1/iqn.2026-11.example:a/1", "iser://b2/iqn.2026-11.example:a/1"


@pytest.mark.parametrize(
    ("places", "source"),
    [
        ([A1, "file"], 1),
        (["one", "other"], 1),
        (["one", "one"], 1),  # found out when both are open
        ([A1, A2, "file"], 2),
        (["file", A1, A2], 1),
        ([A1, A2, B1], 2),
        ([A1, B1, B2], 1),
        ([A1, A2, B1, B2], 2),
    ],
)
def test_two_ends(places: list[str], source: int) -> None:
    assert two_ends(places, "copy") == (places[:source], places[source:])


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ([A1, A2], "are the same"),
        (["file"], "write the second behind it"),
        ([A1], "write the second behind it"),
        ([A1, B1, A2], "and here are 3; the URLs of one LUN have to stand together"),
        (["a", "b", "c"], "and here are 3"),
        ([A1, "nonsense://"], "nonsense"),
    ],
)
def test_what_are_no_two_ends(places: list[str], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        two_ends(places, "copy")


async def test_a_destination_knows_whether_it_has_made_the_file(tmp_path: Path) -> None:
    """What it has made it can remove, but not what has the name by then."""
    path = tmp_path / "file"
    async with open_destination([str(path)], {}) as end:
        assert isinstance(end, FileEnd) and end.created
    async with open_destination([str(path)], {}) as end:
        assert isinstance(end, FileEnd) and not end.created
        path.rename(tmp_path / "other")
        path.write_text("of another program")
        end.remove()
        assert path.read_text() == "of another program"
        path.unlink()
        end.remove()
        (tmp_path / "other").rename(path)
        end.remove()
    assert not path.exists()
