"""Which other mounts keep a file system alive that was unmounted: in mount namespaces of other
processes (containers, ``unshare -m``, units with PrivateMounts), or bound to another directory.

Its server goes on for them. What may be seen is /proc/PID/mountinfo of the processes that this one
sees; a namespace that no such process is in stays unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from iserblk.printable import printable, shell_word

PROC = Path("/proc")


class Holder(NamedTuple):
    """``pid`` 0: this namespace. ``place``: the mount point there; ``name``: of the process."""

    pid: int
    name: str
    place: str

    def words(self, mountpoint: str) -> str:
        """What holds the file system that was at ``mountpoint``, and how it is ended, in words."""
        if not self.pid:
            return f"it is mounted at {printable(self.place)}, too: unmount that as well"
        there = "" if self.place == mountpoint else f", at {printable(self.place)}"
        command = f"nsenter -t {self.pid} -m umount {shell_word(self.place)}"
        return (
            f"the mount namespace of process {self.pid} ({self.name}) has it mounted still{there}:"
            f" end that process, or run {command}"
        )


def mounts(mountinfo: str) -> Iterator[tuple[str, str, str]]:
    """Type, device (``major:minor``) and mount point of each line of a mountinfo file."""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        words = before.split(" ")
        if separator and len(words) > 4:
            yield after.split(" ")[0], words[2], unescape(words[4])


def unescape(text: str) -> str:
    """Decode a path of mountinfo, where blanks, newlines and backslashes are octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), text)


def holder(kind: str, device: str, proc: Path = PROC) -> Holder | None:
    """The first mount of the file system of this type and device; None: none that may be seen."""
    seen = {_namespace(proc / "self")}
    place = _place(proc / "self", kind, device)
    if place is not None:
        return Holder(0, "", place)
    for pid in sorted(int(each.name) for each in proc.iterdir() if each.name.isdecimal()):
        process = proc / str(pid)
        namespace = _namespace(process)
        if namespace is not None and namespace in seen:
            continue
        seen.add(namespace)
        place = _place(process, kind, device)
        if place is not None:
            return Holder(pid, _name(process), place)
    return None


def _namespace(process: Path) -> str | None:
    """Of a process; None: it may not be seen, or has ended."""
    try:
        return os.readlink(process / "ns/mnt")
    except OSError:
        return None


def _place(process: Path, kind: str, device: str) -> str | None:
    try:
        text = (process / "mountinfo").read_text("utf-8", "surrogateescape")
    except OSError:  # it has ended, or may not be seen
        return None
    for found in mounts(text):
        if found[:2] == (kind, device):
            return found[2]
    return None


def _name(process: Path) -> str:
    try:
        return printable((process / "comm").read_text("utf-8", "replace").strip())
    except OSError:
        return "?"
