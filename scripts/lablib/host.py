"""Whether this machine can boot a guest, before one is asked for."""

from __future__ import annotations

import os
import shutil

from lablib.archive import Absent
from lablib.kernel import the_kernel
from lablib.setups import SETUPS, TOP, provide

_PROGRAMS = ("qemu-system-x86_64", "busybox", "modprobe", "setpriv")


def path() -> str:
    """$PATH with .venv first, and with Debian's directories for administrators' programs."""
    ours = [str(TOP / ".venv" / "bin")]
    theirs = os.environ.get("PATH", os.defpath).split(":")
    system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return ":".join(dict.fromkeys([*ours, *theirs, *system]))


def need_programs() -> None:
    """Check that the programs of the lab are installed. Raises Absent."""
    for program in _PROGRAMS:
        if shutil.which(program, path=path()) is None:
            raise Absent(f"{program} is not installed: run scripts/setup --tests")


def why_not(name: str) -> str | None:
    """Why the set-up is not available here, in one line; None if it is. Fetches what the set-up
    needs, to find out."""
    try:
        need_programs()
        provide(SETUPS[name], the_kernel())
    except Absent as reason:
        return str(reason)
    return None
