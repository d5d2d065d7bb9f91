"""What is done to the machine for a volume: its device, its file system, mounts.

Each function runs the system's own program, and raises Refused with the program's last line. None
of them takes for granted how far an earlier call, which may have been killed, has come.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from iserblk.csi.refusals import OF_STATUS, Code, Refused
from iserblk.csi.volumes import BLOCK, MOUNT, Volume, lock_of_call
from iserblk.errors import Busy, IserblkError
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.nbd.kernel import device
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.server import Server
from iserblk.nbd.kernel.state import Home, locked
from iserblk.url import parse_url

_BUSY = 28
_GROW_S = 15.0  # for a server to see, and tell the kernel, that its LUN has grown
_LOOK_S = 0.5
_HEAD, _TAIL = 8 << 20, 2 << 20  # bytes of a device in which blkid finds all that it knows
_XFS_IN_PROGRESS = 126  # byte of the super block: mkfs has not ended
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(slots=True, frozen=True)
class Mounted:
    """A mount. ``number``: of the file system, as major:minor; ``root``: what of it is mounted;
    ``source``: the path of its device."""

    place: str
    number: str
    root: str
    read_only: bool
    source: str


class Host(Protocol):
    """What the node service does to its machine."""

    def free_device(self, taken: Sequence[str]) -> str:
        """The path of a device that is not in use, nor in ``taken``. Raises Refused."""

    def attach(self, volume: Volume, secret: Path) -> bool:
        """Attach the LUN at ``volume.device``, which may be done already: then a server that has
        died gets a successor. False: that device is in use for something else. Raises Refused."""

    def is_attached(self, volume: Volume) -> bool:
        """Whether the LUN is attached at ``volume.device``, whatever its server does."""

    def is_served(self, volume: Volume) -> bool:
        """Whether the server of the device lives."""

    def attached_at(self, path: str) -> str:
        """The path of the device that iserblk has attached, and that, or whose file system, is
        mounted at ``path``; "": none."""

    def also_attached_at(self, volume: Volume) -> list[str]:
        """The paths of other devices that iserblk has attached the same LUN at."""

    def detach(self, path: str) -> None:
        """Flush and detach the device ``path``. Raises Refused."""

    def size(self, volume: Volume) -> int:
        """Bytes of the device."""

    def wait_for_size(self, volume: Volume, secret: Path, size: int) -> int:
        """Wait until the device has ``size`` bytes, or some seconds. Returns its size."""

    def file_system(self, volume: Volume) -> str:
        """The type of the file system on the device; "": there is nothing on it, or, where
        ``volume.formatting``, what a mkfs has left that was interrupted. Raises Refused when there
        is something else, or the device cannot be read."""

    def format(self, volume: Volume) -> None: ...

    def erase_unfinished(self, volume: Volume) -> None:
        """Erase what is left of a file system, on an empty LUN, whose mkfs was interrupted. A file
        system that is complete stays. Raises Refused."""

    def mounted(self, path: str) -> Mounted | None:
        """What is mounted at ``path``, the uppermost."""

    def shown(self, volume: Volume) -> list[Mounted]:
        """Where else the device, or all of its file system, is mounted: the target paths of its
        pods. (Not what a kubelet makes of these itself.)"""

    def url(self, path: str) -> str:
        """The URL of the LUN that iserblk has attached at the device ``path``, without user and
        options."""

    def number(self, path: str) -> str:
        """major:minor of a block device; of a file or directory, that of its file system."""

    def mount(self, volume: Volume, path: str) -> None:
        """Check the file system, and mount it at ``path``, which is made."""

    def bind(self, volume: Volume, source: str, path: str, read_only: bool) -> None:
        """Show ``source``, a directory or a device, at ``path`` as well; ``path`` is made. To be
        called again where it was interrupted."""

    def unmount(self, path: str) -> None:
        """Unmount all that is mounted at ``path``, and remove it. Does nothing where there is
        nothing."""

    def grow(self, volume: Volume, path: str) -> None:
        """Let the file system at ``path`` fill its device."""

    def usage(self, path: str) -> os.statvfs_result: ...

    def device_count(self) -> int: ...


class Machine:
    """Implements Host on this machine. ``directories``: see Directories."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories

    # --- the device ---

    def free_device(self, taken: Sequence[str]) -> str:
        try:
            device.need_module(self._directories)
        except IserblkError as error:
            raise _refused(error) from None
        for each in device.every(self._directories):
            if not each.client and str(each.path) not in taken:
                with contextlib.suppress(Busy), locked(each):
                    return str(each.path)
        raise Refused(
            Code.FAILED_PRECONDITION,
            "all NBD devices of this node are in use: `modprobe -r nbd; modprobe nbd nbds_max=N`",
        )

    def attach(self, volume: Volume, secret: Path) -> bool:
        words = ["attach", *_options(volume, secret), *volume.urls, volume.device]
        if self.is_attached(volume):
            words.insert(1, "--replace")
        if words[1] != "--replace" or not self.is_served(volume):
            done = run_iserblk(words)
            if done.returncode == _BUSY and self._is_in_use(volume.device):
                return False
            _check_iserblk(done)
        # Also where it was attached before, by a plugin that was killed then. The kernel keeps this
        # for the next LUN of the device, too.
        _run("blockdev", "--setro" if volume.read_only else "--setrw", volume.device)
        return True

    def _is_in_use(self, path: str) -> bool:
        each = self._device(path)
        try:
            with locked(each):
                return bool(each.client)
        except Busy:
            return True

    def is_attached(self, volume: Volume) -> bool:
        if not volume.device:
            return False
        home = Home(self._device(volume.device))
        return home.is_ours() and home.state().url in map(_redacted, volume.urls)

    def is_served(self, volume: Volume) -> bool:
        with Server(Home(self._device(volume.device))) as server:
            return not server.ended()

    def attached_at(self, path: str) -> str:
        mounted = self.mounted(path)
        if mounted is None:
            return ""
        number = ""
        with contextlib.suppress(OSError):
            if stat.S_ISBLK(os.stat(path).st_mode):
                number = self.number(path)
        for each in device.every(self._directories):
            found = str(each.path)
            is_it = self.number(found) == number if number else found == mounted.source
            if is_it and Home(each).is_ours():
                return found
        return ""

    def also_attached_at(self, volume: Volume) -> list[str]:
        name = Home(self._device(volume.device)).state().backend
        homes = [Home(each) for each in device.every(self._directories) if name]
        return [
            str(home.device.path)
            for home in homes
            if str(home.device.path) != volume.device
            and home.state().backend == name
            and home.is_ours()
        ]

    def detach(self, path: str) -> None:
        read_only = _started("blockdev", "--getro", path).stdout.strip() == "1"
        if read_only:
            _run("blockdev", "--setrw", path)  # others may use the device next
        done = run_iserblk(["detach", path])
        attached = Home(self._device(path)).is_ours()
        if attached and read_only:
            _run("blockdev", "--setro", path)
        if done.returncode and not attached:
            raise Refused(Code.DATA_LOSS, _last_line(done.stderr))
        _check_iserblk(done)

    def size(self, volume: Volume) -> int:
        return self._device(volume.device).size

    def wait_for_size(self, volume: Volume, secret: Path, size: int) -> int:
        each = self._device(volume.device)
        end = monotonic() + _GROW_S
        while each.size < size and monotonic() < end:
            _read_directly(volume.device)  # the target tells of it in its next answer
            sleep(_LOOK_S)
        if each.size < size:  # it does not tell: a server that begins asks
            done = run_iserblk(
                ["attach", "--replace", *_options(volume, secret), *volume.urls, volume.device]
            )
            _check_iserblk(done)
        return each.size

    def number(self, path: str) -> str:
        return number_of(path)

    def _device(self, path: str) -> Device:
        return Device(os.path.basename(path), self._directories)

    def device_count(self) -> int:
        return len(device.every(self._directories))

    # --- file systems ---

    def file_system(self, volume: Volume) -> str:
        # blkid says of what it cannot read that there is nothing on it. What it looks at is read
        # before, and the kernel keeps it while the device is open.
        try:
            descriptor = os.open(volume.device, os.O_RDONLY | os.O_CLOEXEC)
            try:
                begin = _read_ends(descriptor)
                done = _started("blkid", "-p", "-o", "export", volume.device)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise Refused(
                Code.UNAVAILABLE, f"{volume.device}: its LUN cannot be read: {error.strerror}"
            ) from None
        if done.returncode == 2:
            return ""
        found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        if done.returncode or "TYPE" not in found:
            what = found.get("PTTYPE")
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"volume {volume.volume_id}: its LUN has "
                + (f"a partition table ({what})" if what else "more than one thing on it")
                + "; use volumeMode: Block, or erase it (wipefs -a)",
            )
        if found["TYPE"] == "xfs" and begin[_XFS_IN_PROGRESS]:
            if not volume.formatting:
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume.volume_id}: a mkfs.xfs has begun on its LUN, and has not "
                    "ended; if none runs, erase what it has left (wipefs -a)",
                )
            return ""  # mkfs of other file systems writes last what tells their type
        return found["TYPE"]

    def format(self, volume: Volume) -> None:
        force = "-F" if volume.fs.startswith("ext") else "-f"
        _run(f"mkfs.{volume.fs}", force, volume.device)

    def erase_unfinished(self, volume: Volume) -> None:
        if not self.file_system(replace(volume, formatting=True)):
            _run("wipefs", "--all", "--types", "xfs", volume.device)

    def mount(self, volume: Volume, path: str) -> None:
        if volume.fs.startswith("ext") and not volume.read_only:
            done = _started("fsck", "-a", volume.device)
            if done.returncode > 1:  # 1: mended
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"volume {volume.volume_id}: its file system needs fsck by hand: "
                    + _last_line(done.stdout or done.stderr),
                )
        os.makedirs(path, mode=0o750, exist_ok=True)
        flags = ["ro"] if volume.read_only else []
        words = ["-t", volume.fs, "-o", ",".join([*flags, *volume.flags]) or "defaults"]
        _run("mount", *words, volume.device, path)

    def grow(self, volume: Volume, path: str) -> None:
        if volume.fs == "xfs":
            _run("xfs_growfs", path)
        elif volume.fs == "btrfs":
            _run("btrfs", "filesystem", "resize", "max", path)
        else:
            _run("resize2fs", volume.device)

    def usage(self, path: str) -> os.statvfs_result:
        return os.statvfs(path)

    # --- mounts ---

    def mounted(self, path: str) -> Mounted | None:
        found = None
        real = os.path.realpath(path)
        for each in mounts():
            if each.place == real:
                found = each
        return found

    def shown(self, volume: Volume) -> list[Mounted]:
        found: dict[str, Mounted] = {}
        own = self.mounted(volume.place)
        for each in mounts():
            if own is None or each.place == own.place:
                continue
            if volume.kind == MOUNT:
                is_it = (each.source, each.root) == (own.source, own.root)
            else:
                # A kubelet binds a pod's device once more, at dev/UID-OF-POD.
                is_it = (
                    each.root == own.root
                    and os.path.basename(os.path.dirname(each.place)) != "dev"
                    and is_device(each.place, self.number(volume.device))
                )
            if is_it:
                found[each.place] = each
        return list(found.values())

    def url(self, path: str) -> str:
        return Home(self._device(path)).state().url

    def bind(self, volume: Volume, source: str, path: str, read_only: bool) -> None:
        if self.mounted(path) is None:
            if volume.kind == BLOCK:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
            else:
                os.makedirs(path, mode=0o750, exist_ok=True)
            _run("mount", "--bind", source, path)
        if read_only:
            _run("mount", "-o", "remount,bind,ro", path)

    def unmount(self, path: str) -> None:
        while self.mounted(path) is not None:
            _run("umount", path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                os.rmdir(path)  # never what is in it
            else:
                os.unlink(path)


def number_of(path: str) -> str:
    """See Host."""
    status = os.stat(path)
    number = status.st_rdev or status.st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def is_device(path: str, number: str) -> bool:
    """Whether the file is the block device of this number."""
    try:
        return stat.S_ISBLK(os.stat(path).st_mode) and number_of(path) == number
    except OSError:
        return False


def mounts() -> Iterator[Mounted]:
    """All mounts, the uppermost of a place last."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, _, number, root, place, options, *_ = line.split(" ")
            source = _unescaped(line.partition(" - ")[2].split(" ")[1])
            read_only = "ro" in options.split(",")
            yield Mounted(_unescaped(place), number, _unescaped(root), read_only, source)


def _redacted(text: str) -> str:
    return parse_url(text).redacted()


def _options(volume: Volume, secret: Path) -> list[str]:
    options = dict(volume.options)
    if volume.has_secret:
        options["chap-secret-file"] = str(secret)
    return ["-o", ",".join(f"{name}={value}" for name, value in options.items())] if options else []


def run_iserblk(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of iserblk to its end, as this interpreter has it."""
    return _ended([sys.executable, "-P", "-m", "iserblk.cli", "-q", *words])


def _check_iserblk(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        code = OF_STATUS.get(done.returncode, Code.INTERNAL)
        raise Refused(code, _last_line(done.stderr) or f"exit status {done.returncode}")


def _refused(error: IserblkError) -> Refused:
    return Refused(OF_STATUS.get(error.exit_status, Code.INTERNAL), str(error))


def _started(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which(words[0])
    if program is None:
        raise Refused(
            Code.INTERNAL, f"{words[0]}: no such program; install it in the plugin's image"
        )
    return _ended([program, *words[1:]])


def _ended(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The lock of the call is the program's, too: it may outlive a plugin that is killed."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        pass_fds=lock_of_call(),
    )


def _run(*words: str) -> None:
    done = _started(*words)
    if done.returncode:
        said = _last_line(done.stderr) or f"exit status {done.returncode}"
        raise Refused(Code.INTERNAL, f"{words[0]}: {said}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _unescaped(text: str) -> str:
    """A path as mountinfo has it (proc(5)): white space and backslashes in octal digits."""
    replaced: Callable[[re.Match[str]], str] = lambda match: chr(int(match[1], 8))  # noqa: E731
    return _ESCAPE.sub(replaced, text)


def _read_ends(descriptor: int) -> bytes:
    """Read the begin and the end of a device. Returns the begin. Raises OSError."""
    begin = b""
    while len(begin) < _HEAD and (data := os.pread(descriptor, _HEAD - len(begin), len(begin))):
        begin += data
    size = os.lseek(descriptor, 0, os.SEEK_END)
    at = max(len(begin), size - _TAIL)
    while at < size and (data := os.pread(descriptor, size - at, at)):
        at += len(data)
    return begin


def _read_directly(path: str) -> None:
    with contextlib.suppress(OSError):  # what is wrong with it is found elsewhere
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(descriptor, 4096, 0)
        finally:
            os.close(descriptor)
