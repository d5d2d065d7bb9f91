"""Whether this machine can boot a guest, before one is asked for."""

from __future__ import annotations

import os
import shutil

from lablib.archive import Absent
from lablib.kernel import the_kernel
from lablib.setups import SETUPS, TOP, provide

# Where a guest has a file system of its own, in place of the host's files.
_HIDDEN = ("/dev", "/run", "/var/cache", "/var/log", "/var/tmp", "/var/lib/apt", "/var/lib/private")
_PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "setpriv")


def path() -> str:
    """$PATH with .venv first, and with Debian's directories for administrators' programs."""
    ours = [str(TOP / ".venv" / "bin")]
    theirs = os.environ.get("PATH", os.defpath).split(":")
    system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return ":".join(dict.fromkeys([*ours, *theirs, *system]))


def need_host() -> None:
    """Check that the programs of the lab are installed, and that a guest will see this checkout.
    Raises Absent."""
    for directory in _HIDDEN:
        if TOP.is_relative_to(directory):
            raise Absent(f"{TOP}: guests do not see {directory}; use a checkout elsewhere")
    for program in _PROGRAMS:
        if shutil.which(program, path=path()) is None:
            raise Absent(f"{program} is not installed: run scripts/setup --tests")


def why_not(name: str) -> str | None:
    """Why the set-up is not available here, in one line; None if it is. Fetches what the set-up
    needs, to find out."""
    try:
        need_host()
        provide(SETUPS[name], the_kernel())
    except Absent as reason:
        return str(reason)
    return None
