"""Describes the machine of a run: the numbers mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_VERSIONS = {
    "nbdkit": ["nbdkit", "--version"],
    "fio": ["fio", "--version"],
    "qemu": ["qemu-nbd", "--version"],
    "checkout": ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
}


def describe() -> dict[str, Any]:
    """The description, ready for JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        **{name: first_line(command) for name, command in _VERSIONS.items()},
    }


def cpu_model(cpuinfo: str) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1] if found else platform.machine()


def first_line(command: list[str]) -> str | None:
    """The first line that the program prints; None if the program is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip()
