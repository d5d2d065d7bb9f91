"""RLIMIT_MEMLOCK, looked at before it hurts: registered memory is locked memory."""

from __future__ import annotations

import resource
from pathlib import Path

CAP_IPC_LOCK = 14
STATUS = Path("/proc/self/status")
REMEDY = "raise it (ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit), or run as root"


def lockable() -> int | None:
    """Bytes that this process may still lock; None: without limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    if int(fields.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
        return None
    used = sum(int(fields.get(name, "0").split()[0]) for name in ("VmPin", "VmLck"))
    return max(0, int(limit) - used * 1024)


def shortage(needed: int, what: str) -> str | None:
    """One line with the remedy when ``needed`` bytes cannot be locked, else None."""
    left = lockable()
    if left is None or left >= needed:
        return None
    return (
        f"the locked-memory limit is too small for {what}: {needed >> 10} KiB are needed, "
        f"{left >> 10} KiB are left; {REMEDY}"
    )
