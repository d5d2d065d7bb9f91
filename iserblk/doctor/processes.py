"""Processes of iserblk: their command lines, and the environment that iserblk reads."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from iserblk.doctor.machine import Machine

_MOST = 256  # processes
_FIRST = 8  # words of a command line in which the program is named

# Variables that iserblk reads, or that change what it does.
_VARIABLES = (
    *("LIBISCSI_CHAP_USERNAME", "LIBISCSI_CHAP_PASSWORD"),
    *("LIBISCSI_CHAP_TARGET_USERNAME", "LIBISCSI_CHAP_TARGET_PASSWORD"),
    *("ISERBLK_PLAIN", "ISERBLK_CONFIG_DIR", "CREDENTIALS_DIRECTORY", "XDG_RUNTIME_DIR"),
    *("XDG_CONFIG_HOME", "NO_COLOR", "TERM", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV"),
    *("CSI_ENDPOINT", "NODE_ID", "IBV_FORK_SAFE", "RDMAV_FORK_SAFE"),
)
_SECRET = ("PASSWORD",)  # ends of names of those that have a secret


@dataclass(slots=True, frozen=True)
class Process:
    """A process. ``words``: its command line, which may have secrets. ``directory``: in which it
    runs; "/" where that is not known. ``environment``: None: this user may not read it."""

    pid: int
    uid: int
    words: tuple[str, ...] = field(repr=False)
    directory: str = "/"
    environment: Mapping[str, str] | None = field(default=None, repr=False)


def processes(machine: Machine) -> list[Process]:
    """The processes of iserblk, as far as /proc shows them, but for this one; 256 at most."""
    found: list[Process] = []
    every = [each for each in machine.entries("/proc", "[0-9]*") if each.name.isdigit()]
    for path in sorted(every, key=lambda each: int(each.name)):
        if int(path.name) == os.getpid():
            continue
        words = _nul_separated(machine, f"/proc/{path.name}/cmdline")
        if not _is_ours(words):
            continue
        try:
            uid = path.stat().st_uid
        except OSError:  # it has ended
            continue
        try:
            directory = os.readlink(path / "cwd")
        except OSError:  # of another user
            directory = "/"
        variables = None
        if os.access(path / "environ", os.R_OK):
            variables = dict(
                (name, value)
                for each in _nul_separated(machine, f"/proc/{path.name}/environ")
                for name, equals, value in [each.partition("=")]
                if equals
            )
        found.append(Process(int(path.name), uid, tuple(words), directory, variables))
        if len(found) == _MOST:
            break
    return found


def hidden(machine: Machine) -> bool:
    """Whether /proc does not show the processes of other users (hidepid of proc(5))."""
    return machine.exists("/proc/self") and not machine.exists("/proc/1/cmdline")


def _nul_separated(machine: Machine, name: str) -> list[str]:
    text = machine.read(name)
    return text.removesuffix("\0").split("\0") if text else []


def _is_ours(words: Sequence[str]) -> bool:
    """Whether a program of iserblk is run: itself, by an interpreter, sudo or nbdkit."""
    for word in words[:_FIRST]:
        name = word.rpartition("/")[2]
        if name.partition(".")[0] in ("iserblk", "mount.iserblk") or name.startswith("iserblk.cli"):
            return True
        if name in ("mount.iserblk", "umount.fuse.iserblk", "iserblk.py"):
            return True
    return False


def variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """The variables of ``environment`` that concern iserblk, and their values; None: the value is a
    secret."""
    for name in _VARIABLES:
        if name in environment:
            yield name, None if name.endswith(_SECRET) else environment[name]
