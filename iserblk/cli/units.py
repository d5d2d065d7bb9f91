"""The systemd units of named LUNs: enabled, disabled, and their state."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from iserblk.errors import BadArgument, IserblkError, NotSupported, PermissionDenied
from iserblk.installation import HERE
from iserblk.named.files import SYSTEM, Named

RUNNING = Path("/run/systemd/system")  # exists where systemd is the service manager
DIRECTORY = SYSTEM  # the units read the files there

_DONE = {"enable": "enabled and started", "disable": "disabled and stopped"}


def unit_of(named: Named) -> str:
    """The unit that is meant for a named LUN. Raises BadArgument."""
    if named.devices and named.mountpoint:
        raise BadArgument(f"{named.path}: it has both DEVICE and MOUNTPOINT: leave one out")
    return f"iserblk-{'mount' if named.mountpoint else 'attach'}@{named.name}.service"


def need_systemd() -> None:
    """Raises NotSupported or PermissionDenied unless units can be started here."""
    if not RUNNING.is_dir() or shutil.which("systemctl") is None:
        raise NotSupported(
            "systemd does not run here, and nothing else starts units: use `iserblk attach NAME`"
            " or `iserblk mount NAME`, or a line in /etc/fstab"
        )
    if os.geteuid():
        raise PermissionDenied("only root may enable and disable units: use sudo")


def order(what: str, named: Named) -> str:
    """Have systemd enable and start (``enable``), or disable and stop, the unit of a named LUN.
    Returns what was done, for the user. Raises BadArgument, NotSupported or IserblkError."""
    if named.path.parent != DIRECTORY:
        raise BadArgument(f"{named.path}: the units read {DIRECTORY}: add {named.name} as root,"
                          " without another directory set")  # fmt: skip
    unit = unit_of(named)
    # Without the unit, systemctl says the same of a wrong name and of a missing installation.
    if _systemctl("cat", "--", unit).returncode:
        raise NotSupported(f"there is no unit {unit}: {HERE.units()}")
    done = _systemctl(what, "--now", "--", unit)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"systemctl ended with {done.returncode}"
        raise IserblkError(f"{unit}: {said}; `systemctl status {unit}` says more")
    return f"{unit} is {_DONE[what]}"


def state_of(named: Named) -> tuple[bool | None, bool | None]:
    """Whether the unit of a named LUN is enabled, and whether it is active. None: not known, as
    there is no systemd, or the units read another directory."""
    if (
        named.path.parent != DIRECTORY
        or not RUNNING.is_dir()
        or shutil.which("systemctl") is None
        or (named.devices and named.mountpoint)
    ):
        return None, None
    unit = unit_of(named)
    enabled = _systemctl("is-enabled", "--quiet", "--", unit).returncode == 0
    return enabled, _systemctl("is-active", "--quiet", "--", unit).returncode == 0


def _systemctl(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["systemctl", *words],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise NotSupported(f"systemctl cannot be run: {error.strerror}") from None
