"""Whether the service manager is about to end what uses a LUN: the machine is shutting down, or a
unit is being stopped.

At a shutdown a file system is unmounted before the server of its device is told to end, and the
unmount waits for the server. So the server has to look for itself. systemctl(1) tells of jobs: the
stop of a unit is one, from the moment at which it is wanted.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import trio

from iserblk.loop.tasks import sleep

SHUTDOWN = "shutdown.target"
LOOK_S = 3.0  # between two looks, while requests wait for a target
_ENDS = ("stop", "restart")
_JOBS = ("systemctl", "--no-pager", "--no-legend", "--plain", "--full", "list-jobs")
_ANSWER_S = 5.0
_PLAIN = re.compile(rb"[a-zA-Z0-9:_.]")
_UNIT = re.compile(r"[^/]+\.(?:service|mount|scope)")


async def watch(
    waits: Callable[[], bool], wished: Callable[[], bool], ask: Callable[[bool], None]
) -> None:
    """Body of a task: while there are requests that wait (``waits``), call ``ask`` with whether the
    end is wished for. ``wished`` may block; it is called in a thread."""
    while True:
        await sleep(LOOK_S)
        if waits():
            ask(await trio.to_thread.run_sync(wished, abandon_on_cancel=True))


def is_stopping(units: Collection[str], manager: Path = Path("/run/systemd/system")) -> bool:
    """Whether the machine is shutting down, or one of ``units`` is being stopped, or is about to
    be. False where systemd is not the service manager (``manager``: a directory that is there where
    it is), or does not answer. May take seconds."""
    if not manager.is_dir():
        return False
    try:
        said = subprocess.run(
            _JOBS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=_ANSWER_S,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ends(said.decode(errors="replace"), units)


def ends(jobs: str, units: Collection[str]) -> bool:
    """The same of what `systemctl list-jobs` prints: number, unit, kind of job, state."""
    for line in jobs.splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        _, unit, kind, *_ = words
        if (unit == SHUTDOWN and kind == "start") or (unit in units and kind in _ENDS):
            return True
    return False


def own_unit(cgroup: Path = Path("/proc/self/cgroup")) -> str:
    """The unit of the system's manager that this process belongs to; "": none. Of what a user's
    manager has started it is that manager's: units of its own may have the names of others."""
    try:
        lines = cgroup.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        for name in line.rpartition(":")[2].split("/"):
            if _UNIT.fullmatch(name):
                return name
    return ""


def mount_unit(mountpoint: str) -> str:
    """The unit of a mount point, as systemd-escape(1) has it."""
    path = os.fsencode(os.path.normpath(mountpoint)).strip(b"/")
    if not path:
        return "-.mount"
    escaped = ""
    for at in range(len(path)):
        byte = path[at : at + 1]
        if byte == b"/":
            escaped += "-"
        elif _PLAIN.fullmatch(byte) and not (byte == b"." and at == 0):
            escaped += byte.decode()
        else:
            escaped += f"\\x{byte[0]:02x}"
    return f"{escaped}.mount"
