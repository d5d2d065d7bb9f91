"""Real mounts over fake disks: what the kernel, users and mount(8) see."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fuse_mount import mount, mounted
from fuse_mount.errors import DataAtRisk, MountFailed, UsageError
from iserblk.disk.wish import Wish
from iserblk.limited_log import BURST
from iserblk.metrics.address import socket_of
from iserblk.metrics.places import directories
from tests.support import forking
from tests.support.forking import Forked
from tests.support.fuse import need_loop_mounts
from tests.support.nbdkit import run
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking

URL = "iser://127.0.0.1/iqn.2026-11.example:fake/0"
MODULE = "tests.fuse_mount.fake_mount"
MIB = 1 << 20
SIZE = 8 * MIB
NOBODY = 65534

if not os.path.exists("/dev/fuse"):
    pytest.skip("no /dev/fuse: modprobe fuse", allow_module_level=True)
if os.geteuid() != 0 and shutil.which("fusermount3") is None:
    pytest.skip("fusermount3 is missing: install fuse3", allow_module_level=True)
pytest.importorskip("pyfuse3", reason="pyfuse3 is missing: run scripts/setup")


class Mounts:
    """Starts mounts of fake disks at ``place``."""

    def __init__(self, directory: Path) -> None:
        self.place = directory / "a place"  # mountinfo escapes the blank
        self.place.mkdir()
        self.calls = directory / "calls"
        self.servers: list[Forked] = []

    def environment(self, luns: Any = ({},), **faults: str) -> dict[str, str]:
        return dict(
            os.environ,
            FAKE_LUNS=json.dumps(luns),
            FAKE_LOG=str(self.calls),
            **({"FAKE_FAULTS": json.dumps(faults)} if faults else {}),
        )

    def start(self, *options: str, luns: Any = ({},), **faults: str) -> Forked:
        """Start a mount in the foreground; returns when the files are usable."""
        server = Forked(
            MODULE,
            [URL, str(self.place), *(part for each in options for part in ("-o", each))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment(luns, **faults),
        )
        self.servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline() == f"ready {self.place}\n"
        return server

    def run(self, *words: str, **faults: str) -> subprocess.CompletedProcess[str]:
        return forking.run(MODULE, words, env=self.environment(**faults), timeout=60)

    def log(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    made = Mounts(tmp_path)
    yield made
    for server in made.servers:
        if server.poll() is None:
            server.terminate()
        server.communicate(timeout=60)
    left = mounted.is_mounted(str(made.place))
    if left != ("", 0):
        subprocess.run(["umount", "--lazy", made.place], check=False)
    assert left == ("", 0)


def ended(server: Forked) -> tuple[int, str]:
    _, said = server.communicate(timeout=60)
    return server.returncode, said  # type: ignore[return-value]


def test_what_is_there(mounts: Mounts) -> None:
    mounts.start(luns=[{}, {"size": 3 * MIB, "read_only": True}])
    assert sorted(os.listdir(mounts.place)) == ["lun0", "lun1"]
    first, second = (mounts.place / name for name in ("lun0", "lun1"))
    assert (first.stat().st_size, second.stat().st_size) == (SIZE, 3 * MIB)
    assert second.stat().st_mode & 0o777 == 0o444
    assert os.statvfs(mounts.place).f_bfree == 0
    with pytest.raises(OSError) as caught:
        second.open("r+b")
    assert caught.value.errno == errno.EROFS
    assert mounted.is_mounted(str(mounts.place))[0] == "fuse.iserblk"


def test_data_and_fsync(mounts: Mounts) -> None:
    mounts.start()
    data = os.urandom(3 * MIB + 17)
    with open(mounts.place / "lun0", "r+b", buffering=0) as file:
        file.seek(100)
        assert file.write(data) == len(data)
        assert "lun0 flush" not in mounts.log()
        os.fsync(file.fileno())
        assert mounts.log()[-1] == "lun0 flush"
        file.seek(100)
        assert file.read(len(data)) == data
    assert mounts.log().count("lun0 flush") == 1  # close(2) does not flush


def test_a_target_that_fails_each_request_does_not_fill_the_log(mounts: Mounts) -> None:
    server = mounts.start(read="CommandTimeout")
    with open(mounts.place / "lun0", "rb", buffering=0) as file:
        for number in range(100):
            with pytest.raises(OSError):
                os.pread(file.fileno(), 512, number * 65536)
    server.terminate()
    _, said = ended(server)
    lines = said.splitlines()
    assert BURST < len(lines) < 2 * BURST
    assert "more lines like this one are left out" in lines[-1]


def test_a_request_of_1_mib_arrives_whole(mounts: Mounts) -> None:
    mounts.start(luns=[{"max_transfer": MIB}], write="CommandTimeout")
    with open(mounts.place / "lun0", "r+b", buffering=0) as file, mmap.mmap(-1, MIB) as aligned:
        with pytest.raises(OSError) as caught:
            file.write(aligned)
        assert caught.value.errno == errno.EIO
    assert mounts.log()[-1] == f"write 0 {MIB}"


def test_a_shared_mapping_needs_the_page_cache(mounts: Mounts) -> None:
    """A shared mapping fails without the page cache (docs/limits.md). With `-o auto_cache`
    msync(2) brings its data to the disk."""
    data = os.urandom(8192)
    direct = mounts.start()
    with open(mounts.place / "lun0", "r+b", buffering=0) as file:
        with pytest.raises(OSError, match="No such device") as caught:
            mmap.mmap(file.fileno(), SIZE)
        assert caught.value.errno == errno.ENODEV
        with mmap.mmap(file.fileno(), SIZE, mmap.MAP_PRIVATE) as private:
            assert private[:512] == bytes(512)
    subprocess.run(["umount", mounts.place], check=True)
    assert ended(direct)[0] == 0
    mounts.start("auto_cache")
    with (
        open(mounts.place / "lun0", "r+b", buffering=0) as file,
        mmap.mmap(file.fileno(), SIZE) as shared,
    ):
        shared[4096:12288] = data
        shared.flush()
        assert mounts.log()[-1] == "lun0 flush"
        past_the_cache = os.open(mounts.place / "lun0", os.O_RDONLY | os.O_DIRECT)
        with mmap.mmap(-1, 8192) as there:
            assert os.preadv(past_the_cache, [there], 4096) == 8192
            assert there[:] == data
        os.close(past_the_cache)


def test_the_end_and_truncating(mounts: Mounts) -> None:
    mounts.start()
    path = mounts.place / "lun0"
    with open(path, "r+b", buffering=0) as file:
        file.write(b"kept")
        file.seek(SIZE - 5)
        assert file.write(b"0123456789") == 5
        with pytest.raises(OSError) as caught:
            file.write(b"x")
        assert caught.value.errno == errno.ENOSPC
        assert file.read(1) == b""
    os.truncate(path, 0)
    path.open("wb").close()  # O_TRUNC
    assert path.stat().st_size == SIZE
    assert path.read_bytes()[:4] == b"kept"
    with pytest.raises(OSError) as caught:
        os.truncate(path, SIZE + 1)
    assert caught.value.errno == errno.EFBIG


def full(path: Path) -> Path:
    """The file, with something in its first MiB."""
    with path.open("r+b", buffering=0) as file:
        file.write(b"\xee" * MIB)
    return path


CACHING = ["direct_io", "auto_cache", "kernel_cache"]


@pytest.mark.parametrize("option", CACHING)
def test_holes_read_as_zeroes(mounts: Mounts, option: str) -> None:
    """Through the file that wrote, through one that was open before, and from the disk: whatever
    the kernel has in its page cache."""
    mounts.start(option)
    path = full(mounts.place / "lun0")
    with path.open("rb", buffering=0) as reader, path.open("w+b", buffering=0) as writer:
        # (The kernel looks into its page cache only up to the end that stat(2) tells.)
        assert reader.read(MIB) == (b"\xee" * MIB if option == "direct_io" else b"")
        writer.write(b"one")
        writer.seek(100_000)
        writer.write(b"two")
        writer.truncate(200_000)
        expected = b"one" + bytes(99_997) + b"two" + bytes(99_997)
        assert os.pread(writer.fileno(), 200_000, 0) == expected
        assert os.fstat(writer.fileno()).st_size == 200_000
        assert os.pread(reader.fileno(), 200_000, 0) == expected
        writer.close()
        assert os.pread(reader.fileno(), MIB, 0) == expected + b"\xee" * (MIB - 200_000)
        assert os.fstat(reader.fileno()).st_size == SIZE
        # Read, and so in the page cache, before it is zeroed.
        with path.open("r+b", buffering=0) as later:
            later.seek(500_000)
            later.write(b"three")
            expected += bytes(300_000) + b"three"
            assert os.pread(reader.fileno(), MIB, 0) == expected + b"\xee" * (MIB - 500_005)
    assert path.read_bytes()[:500_005] == expected


@pytest.mark.parametrize("option", CACHING[1:])
def test_a_mapping_of_a_file_that_was_extended(mounts: Mounts, option: str) -> None:
    """As linkers write their output: truncated to its size, mapped, and written in any order."""
    mounts.start(option)
    path = full(mounts.place / "lun0")
    with path.open("w+b", buffering=0) as file:
        file.truncate(MIB // 2)
        with mmap.mmap(file.fileno(), MIB // 2) as shared:
            for page in (100, 7, 50):
                shared[page * 4096 : page * 4096 + 10] = b"0123456789"
            shared.flush()
    content = bytearray(b"\xee" * MIB)
    content[: MIB // 2] = bytes(MIB // 2)
    for page in (100, 7, 50):
        content[page * 4096 : page * 4096 + 10] = b"0123456789"
    past_the_cache = os.open(path, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as there:
        assert os.preadv(past_the_cache, [there], 0) == MIB
        assert there[:] == content
    os.close(past_the_cache)


def test_a_new_mount_knows_no_end(mounts: Mounts) -> None:
    server = mounts.start()
    path = mounts.place / "lun0"
    os.truncate(path, 0)
    assert path.stat().st_size == SIZE
    with path.open("r+b", buffering=0) as file:
        file.seek(5000)
        file.write(b"x")
    assert [line for line in mounts.log() if " zero " in line] == [
        "lun0 zero 0 5000 may_trim=True fast=False fua=False"
    ]
    subprocess.run(["umount", mounts.place], check=True)
    assert ended(server)[0] == 0
    server = mounts.start()
    with path.open("r+b", buffering=0) as file:
        file.seek(9000)
        file.write(b"x")
    assert sum(" zero " in line for line in mounts.log()) == 1


def test_zeroes_that_fail_fail_the_request(mounts: Mounts) -> None:
    mounts.start(zero="ScsiError")
    path = mounts.place / "lun0"
    with path.open("wb", buffering=0) as file:
        file.write(b"x" * 512)
        file.seek(5000)
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b"y")
        with pytest.raises(OSError, match="Input/output error"):
            file.truncate(5000)
        assert os.fstat(file.fileno()).st_size == 512


@pytest.mark.parametrize(
    ("what", "number"),
    [
        (lambda place: (place / "new").touch(), errno.EPERM),
        (lambda place: (place / "lun0").unlink(), errno.EPERM),
        (lambda place: (place / "lun0").rename(place / "other"), errno.EPERM),
        (lambda place: (place / "new").mkdir(), errno.EPERM),
        (lambda place: (place / "new").symlink_to("lun0"), errno.EPERM),
        (lambda place: os.link(place / "lun0", place / "new"), errno.EPERM),
        (lambda place: os.setxattr(place / "lun0", "user.a", b"b"), errno.EOPNOTSUPP),
        (lambda place: os.getxattr(place / "lun0", "user.a"), errno.EOPNOTSUPP),
        (lambda place: (place / "lun7").stat(), errno.ENOENT),
    ],
)
def test_what_cannot_be_done(mounts: Mounts, what: Callable[[Path], object], number: int) -> None:
    mounts.start()
    with pytest.raises(OSError) as caught:
        what(mounts.place)
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[number]


def test_many_at_once_keep_apart(mounts: Mounts) -> None:
    mounts.start()
    wrong: list[int] = []

    def work(number: int) -> None:
        with open(mounts.place / "lun0", "r+b", buffering=0) as file:
            for turn in range(20):
                data = bytes([number, turn]) * 8192
                os.pwrite(file.fileno(), data, number * 64 * 1024)
                if os.pread(file.fileno(), len(data), number * 64 * 1024) != data:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_unmount_flush_and_log_out(mounts: Mounts, number: signal.Signals) -> None:
    if number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, by nohup")
    server = mounts.start(luns=[{}, {"read_only": True}])
    (mounts.place / "lun0").write_bytes(b"x")
    server.send_signal(number)
    assert ended(server) == (0, "")
    assert mounts.log()[-2:] == ["lun0 flush", "close"]


def test_a_signal_during_the_logout(mounts: Mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during the logout changes nothing: the mount is ending already."""
    monkeypatch.setenv("FAKE_CLOSE_S", "1")
    server = mounts.start()
    subprocess.run(["fusermount3", "-u", mounts.place], check=True)
    until_blocking(lambda: mounts.log()[-1] == "closing")
    server.terminate()
    assert ended(server) == (0, "")
    assert mounts.log()[-1] == "close"


def test_a_signal_while_a_file_is_open(mounts: Mounts) -> None:
    server = mounts.start()
    file = os.open(mounts.place / "lun0", os.O_RDONLY)
    try:
        assert os.read(file, 1) == b"\0"
        server.terminate()
        assert ended(server)[0] == 0
        with pytest.raises(OSError) as caught:
            os.read(file, 1)
        assert caught.value.errno == errno.ENOTCONN
    finally:
        with contextlib.suppress(OSError):  # close(2) asks the server, too
            os.close(file)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_a_signal_while_a_file_is_open_for_writing(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, flags: int
) -> None:
    """The signal's sender hears of it: what the file's user holds, such as the page cache of a loop
    mount, has nowhere to go."""
    monkeypatch.setenv("FAKE_CLOSED_S", "0.1")
    server = mounts.start(luns=[{}, {}])
    file = os.open(mounts.place / "lun1", flags)
    try:
        server.terminate()
        status, said = ended(server)
    finally:
        with contextlib.suppress(OSError):
            os.close(file)
    assert status == 1
    assert f"{mounts.place}: data may be lost: lun1 was open for writing: " in said


def test_a_file_that_is_closed_right_after_the_signal(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CLOSED_S", "3600")  # however slow this test is
    server = mounts.start()
    file = os.open(mounts.place / "lun0", os.O_RDWR)
    server.terminate()
    time.sleep(0.3)
    os.write(file, b"x")
    os.close(file)
    assert ended(server) == (0, "")
    assert mounts.log()[-2:] == ["lun0 flush", "close"]


@pytest.mark.skipif(os.geteuid() != 0, reason="umount --force needs root")
def test_a_file_system_that_is_gone_while_a_close_is_waited_for(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal has come while a file was open for writing, and the connection to the kernel ends
    meanwhile: the server logs out in order."""
    monkeypatch.setenv("FAKE_CLOSE_S", "3")  # longer than a close is waited for
    server = mounts.start()
    file = os.open(mounts.place / "lun0", os.O_RDWR)
    try:
        server.terminate()
        subprocess.run(["umount", "--force", mounts.place], check=False, stderr=subprocess.DEVNULL)
        status, _ = ended(server)
    finally:
        with contextlib.suppress(OSError):
            os.close(file)
    assert status in (0, 1)  # 1: the close was given up before
    assert mounts.log()[-2:] == ["closing", "close"]


@pytest.mark.skipif(os.geteuid() != 0, reason="umount --force needs root")
@pytest.mark.parametrize("by", ["umount", "helper"])
def test_umount_by_force_of_what_is_in_use_leaves_no_dead_mount(mounts: Mounts, by: str) -> None:
    """The kernel refuses to unmount what is in use, and ends its connection all the same: the
    server unmounts, flushes, and logs out."""
    server = mounts.start()
    file = os.open(mounts.place / "lun0", os.O_RDWR)
    try:
        os.write(file, b"x")
        if by == "helper":
            done = mounts.run("--umount-helper", str(mounts.place), "-f")
            assert (done.returncode, done.stderr) == (0, "")
        else:
            words = ["umount", "--internal-only", "--force", str(mounts.place)]
            subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
        status, said = ended(server)
    finally:
        with contextlib.suppress(OSError):
            os.close(file)
    assert status == 0
    assert said.rstrip().endswith("unmounted; requests to open files fail")
    assert mounts.log()[-2:] == ["lun0 flush", "close"]
    assert mounted.is_mounted(str(mounts.place)) == ("", 0)
    again = mounts.start()
    again.terminate()
    assert ended(again) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a loop mount needs root")
def test_a_signal_under_a_loop_mount(mounts: Mounts, tmp_path: Path) -> None:
    need_loop_mounts("ext4")
    server = mounts.start()
    run("mkfs.ext4", "-q", "-F", mounts.place / "lun0")
    inside = tmp_path / "inside"
    inside.mkdir()
    run("mount", "-o", "loop", mounts.place / "lun0", inside)
    try:
        (inside / "file").write_bytes(b"not synchronized")
        server.terminate()
        status, said = ended(server)
    finally:
        run("umount", inside)
    assert status == 1
    assert "lun0 was open for writing: " in said


def test_fusermount_ends_it_too(mounts: Mounts) -> None:
    server = mounts.start()
    (mounts.place / "lun0").write_bytes(b"x")
    subprocess.run(["fusermount3", "-u", mounts.place], check=True)
    assert ended(server) == (0, "")
    assert mounts.log()[-2:] == ["lun0 flush", "close"]


def test_what_was_only_read_is_not_flushed(mounts: Mounts) -> None:
    server = mounts.start()
    assert (mounts.place / "lun0").read_bytes()[:1] == b"\0"
    subprocess.run(["fusermount3", "-u", mounts.place], check=True)
    assert ended(server) == (0, "")
    assert "lun0 flush" not in mounts.log()


def test_a_failed_last_flush_is_said(mounts: Mounts) -> None:
    server = mounts.start(flush="CommandTimeout")
    (mounts.place / "lun0").write_bytes(b"x")
    server.terminate()
    status, said = ended(server)
    assert status == 1
    assert "data may be lost: lun0: the last flush failed" in said


class Real:
    """A mount of a LUN of our target, whose requests may wait for a day; 4096 bytes of it are
    written, and not flushed."""

    def __init__(self, mounts: Mounts, target: TargetProcess) -> None:
        self.place = mounts.place
        self.url = f"{target.url}/0"
        words = [f"{self.url}?io-timeout=86400", str(self.place)]
        self.server = Forked(
            "tests.fuse_mount.hasty_mount",
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ),
        )
        mounts.servers.append(self.server)
        assert self.server.stdout is not None
        assert self.server.stdout.readline() == f"ready {self.place}\n"
        with open(self.place / "lun0", "r+b", buffering=0) as file:
            file.write(b"x" * 4096)


def wishes_at(place: Path) -> list[Wish]:
    """Those of another unmount of ``place``."""
    return [Wish(socket_of(str(place), each).with_suffix(".ending")) for each in directories()]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    with running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "target.log") as running:
        yield running


def test_a_target_that_is_away_does_not_keep_the_unmount(
    mounts: Mounts, target: TargetProcess
) -> None:
    """However long requests may wait; both processes name what is lost."""
    real = Real(mounts, target)
    target.kill()
    with pytest.raises(DataAtRisk) as caught:
        mount.unmount(str(mounts.place))
    assert caught.value.exit_status == 1
    said = str(caught.value)
    assert f"unmounted, and the target is away: 4096 bytes written to {real.url}" in said
    status, said = ended(real.server)
    assert status == 1
    assert "lun0: the last flush failed, data may be lost: 4096 unflushed bytes: " in said


def test_a_target_that_is_away_does_not_keep_the_server(
    mounts: Mounts, target: TargetProcess
) -> None:
    real = Real(mounts, target)
    target.kill()
    real.server.terminate()
    status, said = ended(real.server)
    assert status == 1
    assert "lun0: the last flush failed, data may be lost: 4096 unflushed bytes: " in said


def test_where_the_files_are_in_use_requests_wait_again(
    mounts: Mounts, target: TargetProcess
) -> None:
    """The unmount has not taken place, and so the end is not wished for any more."""
    real = Real(mounts, target)
    with open(mounts.place / "lun0", "r+b", buffering=0) as file:
        with pytest.raises(MountFailed, match="still mounted"):
            mount.unmount(str(mounts.place))
        assert not any(wish.made for wish in wishes_at(mounts.place))
        file.write(b"y")
    mount.unmount(str(mounts.place))
    assert ended(real.server) == (0, "")


def test_an_unmount_that_fails_withdraws_nothing_of_another(
    mounts: Mounts, target: TargetProcess
) -> None:
    """That one must not wait for as long as requests may."""
    real = Real(mounts, target)
    target.kill()
    failed: list[BaseException] = []

    def unmounted() -> None:
        with pytest.raises(DataAtRisk) as caught:
            mount.unmount(str(mounts.place))
        failed.append(caught.value)

    unmounting = threading.Thread(target=unmounted)
    unmounting.start()
    until_blocking(lambda: any(wish.made for wish in wishes_at(mounts.place)))
    others = wishes_at(mounts.place)
    for other in others:
        other.make()
        other.withdraw()
    unmounting.join(120)
    assert "4096 bytes written to " in str(failed[0])
    assert ended(real.server)[0] == 1


def test_unmounts_at_once_are_both_told_of_a_loss(mounts: Mounts) -> None:
    """What the server has left is there until the last one has read it."""
    server = mounts.start(flush="CommandTimeout")
    (mounts.place / "lun0").write_bytes(b"x")
    other = next(iter(wishes_at(mounts.place)))
    other.make()
    with pytest.raises(MountFailed, match="flush failed"):
        mount.unmount(str(mounts.place))
    with pytest.raises(DataAtRisk, match="its last flush has failed"):
        mount.unmount(str(mounts.place), mounted.How.FORCE)
    assert other.left is not None
    other.withdraw()
    with pytest.raises(UsageError, match="no LUNs are mounted there"):
        mount.unmount(str(mounts.place))
    assert other.left is None
    assert ended(server)[0] == 1


def test_what_another_unmount_has_open_is_waited_for(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = mounts.start()
    other = next(iter(wishes_at(mounts.place)))
    other.make()
    directory = os.open(mounts.place, os.O_RDONLY)
    refused: list[int] = []
    runs = subprocess.run

    def run(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        done = runs(*words, **options)
        if done.returncode and not refused:
            refused.append(done.returncode)
            os.close(directory)
        return done

    monkeypatch.setattr(subprocess, "run", run)
    mount.unmount(str(mounts.place))
    assert refused
    other.withdraw()
    assert ended(server) == (0, "")


def test_by_force_nothing_is_waited_for(mounts: Mounts, target: TargetProcess) -> None:
    """Whatever uses the files."""
    real = Real(mounts, target)
    with open(mounts.place / "lun0", "rb", buffering=0):
        target.pause()
        try:
            with pytest.raises(DataAtRisk, match="it was not flushed: 4096 bytes written to "):
                mount.unmount(str(mounts.place), mounted.How.AT_ONCE)
            status, said = ended(real.server)
        finally:
            target.resume()
    assert status == 1
    assert "4096 unflushed bytes: " in said and "given up by force" in said


def test_background_and_unmount(mounts: Mounts) -> None:
    """A background mount returns when the files are usable, and holds no pipe of its caller. Its
    unmount returns after the logout."""
    begun = mounts.run("--background", URL, str(mounts.place), "ro")
    assert begun.returncode == 0, begun.stderr
    assert os.listdir(mounts.place) == ["lun0"]
    pidfd = os.pidfd_open(int(begun.stdout))
    assert os.readlink(f"/proc/{int(begun.stdout)}/fd/2") == "/dev/null"
    finished = mounts.run("--unmount", str(mounts.place))
    assert finished.returncode == 0, finished.stderr
    # "close" was logged before unmount returned; the process ends a moment later.
    assert mounts.log()[-1] == "close"
    os.close(pidfd)


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_unmounting_what_another_namespace_has_too(mounts: Mounts) -> None:
    """The server goes on for that; the command says so at once, and how it is ended."""
    server = mounts.start()
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo there; read end"]
    holding = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holding.stdout is not None
        if holding.stdout.readline() != "there\n":
            pytest.skip("no mount namespaces here")
        done = mounts.run("--unmount", str(mounts.place))
        assert done.returncode == 32
        assert "unmounted here, but its server goes on: the mount namespace of" in done.stderr
        assert f"process {holding.pid} (sh)" in done.stderr
        assert f"nsenter -t {holding.pid} -m umount '{mounts.place}'" in done.stderr
        again = mounts.run("--unmount", str(mounts.place))
        assert again.returncode == 1
        assert f"an earlier mount goes on (process {server.pid}): another mount" in again.stderr
        assert server.poll() is None
    finally:
        holding.communicate("\n", timeout=60)
    assert ended(server) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a bind mount needs root")
def test_the_umount_helper_waits_for_another_mount(mounts: Mounts, tmp_path: Path) -> None:
    """At a shutdown the network must not go before the server; it says what it waits for."""
    server = mounts.start()
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", mounts.place, other], check=True)
    helper = Forked(
        MODULE,
        ["--umount-helper", str(mounts.place)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=mounts.environment(),
    )
    try:
        assert helper.stderr is not None
        assert f"it is mounted at {other}, too" in helper.stderr.readline()
        assert helper.poll() is None
    finally:
        subprocess.run(["umount", other], check=True)
    assert ended(helper)[0] == 0
    assert ended(server) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a bind mount needs root")
def test_unmounting_what_is_bound_elsewhere(mounts: Mounts, tmp_path: Path) -> None:
    server = mounts.start()
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "--bind", mounts.place, other], check=True)
    try:
        done = mounts.run("--unmount", str(mounts.place))
        assert done.returncode == 32
        assert done.stderr.rstrip().endswith(f"it is mounted at {other}, too: unmount that as well")
    finally:
        subprocess.run(["umount", other], check=True)
    assert ended(server) == (0, "")


def test_unmounting_what_is_in_use_leaves_it(mounts: Mounts) -> None:
    mounts.run("--background", URL, str(mounts.place))
    with open(mounts.place / "lun0", "rb"):
        busy = mounts.run("--unmount", str(mounts.place))
        assert busy.returncode == 32
        assert os.listdir(mounts.place) == ["lun0"]
    assert mounts.run("--unmount", str(mounts.place)).returncode == 0


def test_unmounting_where_the_flush_fails_leaves_it(mounts: Mounts) -> None:
    server = mounts.start(flush="ScsiError")
    (mounts.place / "lun0").write_bytes(b"x")
    failed = mounts.run("--unmount", str(mounts.place))
    assert failed.returncode == 32
    assert "still mounted, flush failed" in failed.stderr
    assert os.listdir(mounts.place) == ["lun0"]
    server.terminate()


def test_the_umount_helper_waits_for_the_server(mounts: Mounts) -> None:
    """As systemd needs it at a shutdown: the network must not go before the logout."""
    mounts.run("--background", URL, str(mounts.place))
    (mounts.place / "lun0").write_bytes(b"x")
    done = mounts.run("--umount-helper", str(mounts.place), "-n", "-v", "-r", "-t", "fuse.iserblk")
    assert (done.returncode, done.stderr) == (0, "")
    assert mounts.log()[-1] == "close"


def test_umount_force_and_lazy(mounts: Mounts) -> None:
    """--force does not ask whether the flush is good; --lazy waits for nothing. Both through the
    helper."""
    server = mounts.start(flush="ScsiError")
    (mounts.place / "lun0").write_bytes(b"x")
    assert mounts.run("--umount-helper", str(mounts.place)).returncode == 32
    forced = mounts.run("--umount-helper", str(mounts.place), "-f")
    assert forced.returncode == 1
    assert "its last flush has failed: data written to " in forced.stderr
    assert ended(server)[0] == 1
    server = mounts.start()
    with open(mounts.place / "lun0", "rb") as file:
        lazy = mounts.run("--umount-helper", str(mounts.place), "-l")
        assert (lazy.returncode, lazy.stderr) == (0, "")
        assert os.listdir(mounts.place) == [] and server.poll() is None
        file.read(1)
    assert ended(server) == (0, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="unmounts what another user has mounted: needs root")
@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="needs fusermount3: install fuse3")
def test_root_unmounts_what_another_user_has_mounted(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a shutdown. Root may not look into it, so its server alone flushes."""
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are root's alone
        mounts.place, mounts.calls = Path(directory, "a place"), Path(directory, "calls")
        mounts.place.mkdir()
        for path in (Path(directory), mounts.place):
            os.chown(path, NOBODY, NOBODY)
        with monkeypatch.context() as patch:
            patch.setenv("FAKE_USER", str(NOBODY))
            begun = mounts.run("--background", URL, str(mounts.place))
        assert begun.returncode == 0, begun.stderr
        with pytest.raises(PermissionError):
            os.listdir(mounts.place)
        done = mounts.run("--umount-helper", str(mounts.place))
        assert (done.returncode, done.stderr) == (0, "")
        assert mounts.log()[-1] == "close"
        assert mounted.is_mounted(str(mounts.place)) == ("", 0)


def test_unmounting_nothing(mounts: Mounts) -> None:
    failed = mounts.run("--unmount", str(mounts.place))
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "no LUNs are mounted there" in failed.stderr


@pytest.mark.parametrize("words", [["--background"], []])
@pytest.mark.parametrize(
    ("error", "status"),
    [("ConnectFailed", 32), ("TargetNotFound", 32), ("NotSupported", 1)],
)
def test_what_fails_ends_in_one_line_and_mounts_nothing(
    mounts: Mounts, words: list[str], error: str, status: int
) -> None:
    failed = mounts.run(*words, URL, str(mounts.place), open=error)
    assert failed.returncode == status
    assert failed.stderr.count("\n") == 1
    assert "open: made to fail" in failed.stderr
    assert failed.stdout == ""


def test_wrong_mount_points(mounts: Mounts, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    mounts.start()
    for place, text in (
        (tmp_path / "missing", "no such directory"),
        (tmp_path / "file", "not a directory"),
        (tmp_path / "full", "not empty"),
        (mounts.place, "mounted there already"),
    ):
        failed = mounts.run(URL, str(place))
        assert failed.returncode == 1
        assert failed.stderr.count("\n") == 1
        assert text in failed.stderr
    assert os.listdir(mounts.place) == ["lun0"]


@pytest.mark.parametrize("words", [["-o", "colour=blue"], ["--colour"]])
def test_wrong_usage_asks_no_target(mounts: Mounts, words: list[str]) -> None:
    failed = mounts.run(URL, str(mounts.place), *words)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "colour" in failed.stderr
    assert not mounts.calls.exists()


def test_what_a_killed_server_has_left_goes_with_the_mount(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The socket of its metrics: else the place is told to be down for good."""
    where = tmp_path / "run"
    where.mkdir()
    monkeypatch.setattr(mount, "directories", lambda: [tmp_path / "none", where])
    path = socket_of(str(mounts.place), where)
    server = mounts.start()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
        mount.unmount(str(mounts.place))
        assert path.exists()  # that of a process that lives
    assert server.wait(60) == 0
    server = mounts.start()
    server.kill()
    server.wait(60)
    mount.unmount(str(mounts.place))
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with pytest.raises(mount.UsageError, match="no LUNs are mounted"):  # type: ignore[attr-defined]
        mount.unmount(str(mounts.place))  # by fusermount3 before
    assert not path.exists()


def test_a_missing_device_or_helper_is_said(
    monkeypatch: pytest.MonkeyPatch, mounts: Mounts
) -> None:
    real = os.path.exists
    monkeypatch.setattr(mount.os.path, "exists", lambda path: path != "/dev/fuse" and real(path))  # type: ignore[attr-defined]
    with pytest.raises(mount.SystemProblem, match="modprobe fuse") as caught:  # type: ignore[attr-defined]
        mount.mount_foreground([URL], str(mounts.place), [], lambda: None)
    assert caught.value.exit_status == 2
    monkeypatch.undo()
    monkeypatch.setattr(mount.os, "geteuid", lambda: 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(mount.shutil, "which", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(mount.SystemProblem, match="fuse3"):  # type: ignore[attr-defined]
        mount.mount_foreground([URL], str(mounts.place), [], lambda: None)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    with pytest.raises(mount.SystemProblem, match="scripts/setup"):  # type: ignore[attr-defined]
        mount.mount_foreground([URL], str(mounts.place), [], lambda: None)
