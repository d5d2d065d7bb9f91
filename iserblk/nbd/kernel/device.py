"""The kernel's NBD devices: which exist, which are in use, and by which processes."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from iserblk.errors import BadArgument, Busy, IserblkError, NotSupported, PermissionDenied
from iserblk.nbd.kernel.programs import program

SECTOR = 512  # bytes; the unit of sizes in sysfs, whatever the block size of the device
# In the directory queue/ of a device in sysfs.
_IO_TIMEOUT = "io_timeout"
_MAX_SECTORS = "max_sectors_kb"
_NAME = re.compile("nbd[0-9]+")
_PARTITION = re.compile("nbd[0-9]+p[0-9]+")


@dataclass(slots=True, frozen=True)
class Directories:
    """Directories: those where the kernel shows devices and processes, and that of our state."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    proc: Path = Path("/proc")
    run: Path = Path("/run/iserblk")


def panics_after(directories: Directories) -> float:
    """Seconds for which a task may wait in the kernel before this machine panics; ``math.inf``: it
    does not."""
    kernel = directories.proc / "sys" / "kernel"
    try:
        panics = int((kernel / "hung_task_panic").read_text())
        seconds = int((kernel / "hung_task_timeout_secs").read_text())
    except (OSError, ValueError):  # this kernel does not look for such tasks
        return math.inf
    return float(seconds) if panics and seconds else math.inf


@dataclass(slots=True, frozen=True)
class Device:
    """One NBD device of the kernel. ``name``: nbd0, nbd1, …"""

    name: str
    directories: Directories

    @property
    def path(self) -> Path:
        return self.directories.dev / self.name

    def _read(self, attribute: str) -> str:
        try:
            return (self.directories.sys / "block" / self.name / attribute).read_text().strip()
        except OSError:
            return ""

    @property
    def client(self) -> int:
        """Id of the process that connected the device, and may have ended; 0: not connected."""
        pid = self._read("pid")
        return int(pid) if pid.isdigit() else 0

    @property
    def index(self) -> int:
        return int(self.name.removeprefix("nbd"))

    @property
    def backend(self) -> str:
        """The name of what is attached, as it was given to the kernel; "": none was given, the
        device is not connected, or the kernel is older than Linux 5.14."""
        return self._read("backend")

    @property
    def size(self) -> int:
        """Size in bytes; 0 while the device is not connected."""
        return int(self._read("size") or 0) * SECTOR

    def _statistics(self) -> list[int]:
        """The fields of sysfs ``stat``, numbered from 1 as in Documentation/block/stat.rst of
        Linux. Missing fields are 0."""
        return [0] + [int(field) for field in self._read("stat").split()] + [0] * 17

    def completed(self) -> int:
        """Number of requests that have ended since the device exists, well or with an error."""
        statistics = self._statistics()
        return statistics[1] + statistics[5] + statistics[12] + statistics[16]

    def under_way(self) -> int:
        """Number of requests that have been sent and have not ended. Those that wait for a
        connection are not among them."""
        return self._statistics()[9]

    def changed(self) -> int:
        """Number of sectors in write and discard requests since the device exists, flushed or
        not."""
        statistics = self._statistics()
        return statistics[7] + statistics[14]

    def unchanged_since(self, changed: int) -> bool:
        """Whether surely nothing was sent to be written since ``changed()`` was that."""
        return self.changed() == changed and self._read("queue/iostats") != "0"

    def look_after(self, milliseconds: int) -> None:
        """Have the kernel look after each later request when that time has passed since it was
        sent, and again each time that it passes. Does nothing where the kernel has no such setting
        (before Linux 5.0)."""
        self.set_queue({_IO_TIMEOUT: str(milliseconds)})

    def take_requests_of(self, length: int) -> None:
        """Have the kernel send up to so many bytes in one request, where it can."""
        self.set_queue({_MAX_SECTORS: str(length >> 10)})

    def queue(self) -> dict[str, str]:
        """The settings that ``look_after`` and ``take_requests_of`` change, as they are now: the
        kernel keeps them when the device is disconnected. Those that it does not have are left
        out."""
        found = {name: self._read(f"queue/{name}") for name in (_IO_TIMEOUT, _MAX_SECTORS)}
        return {name: value for name, value in found.items() if value}

    def set_queue(self, settings: Mapping[str, str]) -> None:
        """What the kernel does not take stays as it is."""
        for name, value in settings.items():
            with contextlib.suppress(OSError):
                path = self.directories.sys / "block" / self.name / "queue" / name
                path.write_text(f"{value}\n")

    def announce(self) -> None:
        """Have the kernel send an event that says that the device has changed."""
        with contextlib.suppress(OSError):
            fd = os.open(self.directories.sys / "block" / self.name / "uevent", os.O_WRONLY)
            try:
                os.write(fd, b"change")
            finally:
                os.close(fd)

    def mounts(self) -> list[str]:
        """Mount points of the device and its partitions, in our mount namespace."""
        numbers = {self._read("dev")}
        for partition in (self.directories.sys / "block" / self.name).glob(f"{self.name}p*/dev"):
            numbers.add(partition.read_text().strip())
        found = []
        mountinfo = (self.directories.proc / "self/mountinfo").read_text(errors="surrogateescape")
        for line in mountinfo.splitlines():
            _, _, number, _, place, *_ = line.split(" ")
            # File systems with several devices (btrfs) show a number of their own.
            source = line.partition(" - ")[2].split(" ")[1]
            if number in numbers or self._owns(source):
                found.append(place)
        return found

    def openers(self) -> list[str]:
        """Other processes that have the device or a partition open, as ``name (pid)``. Processes
        that the kernel hides from us are missing."""
        found = []
        for directory in self.directories.proc.glob("[0-9]*"):
            if directory.name != str(os.getpid()) and any(map(self._owns, _links(directory))):
                try:
                    name = (directory / "comm").read_text().strip()
                except OSError:
                    continue
                found.append(f"{name} ({directory.name})")
        return found

    def _owns(self, path: str) -> bool:
        """Whether ``path`` is the device, or a partition of it."""
        directory, _, name = path.rpartition("/")
        if directory != str(self.directories.dev):
            return False
        return name == self.name or (
            name.startswith(f"{self.name}p") and _PARTITION.fullmatch(name) is not None
        )

    def claim(self) -> int:
        """Open the device so that no process can mount it while it is open. Returns the descriptor,
        which the caller closes. Raises Busy if it is mounted, in any namespace, or used for swap,
        RAID or device mapper; else IserblkError."""
        try:
            return os.open(self.path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise IserblkError(f"{self.path}: {error.strerror}") from None
        mounts = self.mounts()
        if mounts:
            raise Busy(f"{self.path}: mounted on {', '.join(mounts)}: umount it first")
        raise Busy(f"{self.path}: in use (swap, RAID, device mapper, or mounted in another "
                   f"namespace): end that use first; `lsblk {self.path}` shows more")  # fmt: skip


def _links(process: Path) -> list[str]:
    """The paths of the files that a process has open. ``process``: its directory in /proc."""
    found = []
    with contextlib.suppress(OSError), os.scandir(process / "fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(descriptor.path))
    return found


def find(path: str, directories: Directories) -> Device:
    """The device at ``path``, /dev/nbd0 or nbd0. Raises BadArgument when there is no such
    device."""
    real = os.path.realpath(directories.dev / path)
    device = Device(os.path.basename(real), directories)
    if os.path.dirname(real) != os.path.realpath(directories.dev) or not _NAME.fullmatch(
        device.name
    ):
        raise BadArgument(f"{path}: no NBD device; name one, e.g. /dev/nbd0")
    if not (directories.sys / "block" / device.name).is_dir():
        last = every(directories)[-1:]
        there = f"there are nbd0 to {last[0].name}" if last else "there is none at all"
        raise BadArgument(f"{path}: no such device; {there} "
                          "(`modprobe nbd nbds_max=N` makes more)")  # fmt: skip
    return device


def every(directories: Directories) -> list[Device]:
    """All NBD devices of this kernel, in numerical order."""
    names = [path.name for path in (directories.sys / "block").glob("nbd*")]
    names = [name for name in names if _NAME.fullmatch(name)]
    return [Device(name, directories) for name in sorted(names, key=lambda name: int(name[3:]))]


def need_root() -> None:
    """Raises PermissionDenied unless this process runs as root."""
    if os.geteuid():
        raise PermissionDenied("only root may connect and disconnect /dev/nbdX: use sudo; "
                               "`iserblk mount` and `iserblk nbd` work without root")  # fmt: skip


def need_module(directories: Directories) -> None:
    """Load the kernel's nbd module if there are no NBD devices. Raises NotSupported."""
    if every(directories):
        return
    modprobe = program("modprobe", "kmod")
    done = subprocess.run(
        [modprobe, "nbd"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if not every(directories):
        said = (done.stderr.strip().splitlines() or ["modprobe made no devices"])[-1]
        raise NotSupported(
            f"no NBD devices: this kernel's nbd module cannot be loaded ({said}); boot a kernel "
            "that has it (Debian: linux-image-amd64), or use `iserblk mount` or `iserblk nbd`"
        )
