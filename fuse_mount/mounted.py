"""What is mounted where, as the kernel's tables tell it, and the system calls that change it."""

from __future__ import annotations

import ctypes
import enum
import os

from fuse_mount.holders import unescape

SUBTYPE = "iserblk"
FILE_SYSTEM = f"fuse.{SUBTYPE}"  # as /proc/mounts has it
MNT_DETACH = 2  # umount2(2)


class How(enum.Enum):
    """How ``unmount`` unmounts; the words are umount(8)'s."""

    FLUSHED = ""
    FORCE = "--force"  # not flushed before, and requests under way fail
    AT_ONCE = "at once"  # both, and the server gives its targets up, whatever uses the files
    LAZY = "--lazy"  # when nothing uses the files any more; nothing is waited for


def is_mounted(mountpoint: str) -> tuple[str, int]:
    """Type and minor device number of the topmost file system mounted exactly at ``mountpoint``, or
    ("", 0). Reads /proc/self/mountinfo, and so waits for no file system."""
    found = ("", 0)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            _, _, device, _, place, *_ = before.split(" ")
            if unescape(place) == mountpoint:
                found = (after.split(" ")[0], int(device.partition(":")[2]))
    return found


def source_at(mountpoint: str) -> str:
    """The source of what is mounted there: a URL without secrets, or a name."""
    found = ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if unescape(before.split(" ")[4]) == mountpoint:
                found = unescape(after.split(" ")[1])
    return found


def is_ours(mountpoint: str) -> bool:
    """Whether LUNs are mounted there, by a server that may be dead. Waits for no file system."""
    return is_mounted(mountpoint)[0] == FILE_SYSTEM


def unmount_command(mountpoint: str, how: How) -> list[str]:
    if os.geteuid() != 0:
        return [
            "fusermount3",
            "-u",
            *(["-z"] if how in (How.LAZY, How.AT_ONCE) else []),
            mountpoint,
        ]
    # Without its helper, which may be what called us.
    words = [How.FORCE.value, How.LAZY.value] if how is How.AT_ONCE else [how.value]
    return ["umount", "--internal-only", *filter(None, words), mountpoint]


def system_call(name: str, *arguments: bytes | int | None) -> None:
    """Call a function of libc that returns 0, or sets errno. Raises OSError. (The program mount(8)
    would look at every mount, and wait for ours.)"""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
