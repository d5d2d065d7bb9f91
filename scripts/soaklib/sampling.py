"""What a process has, by /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Sample(NamedTuple):
    """``at_s``: seconds of the run. ``pid``: a process that was restarted has another one.
    ``memory``: resident, in bytes."""

    at_s: float
    pid: int
    memory: int
    descriptors: int
    threads: int


def sample(pid: int, at_s: float) -> Sample | None:
    """None: the process has ended, or is about to."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        count = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:
        return None
    memory = int(fields["VmRSS"].split()[0]) << 10
    return Sample(at_s, pid, memory, count, int(fields["Threads"]))
