"""The limit on locked memory (RLIMIT_MEMLOCK): registered memory is locked memory.

It is checked before memory is registered, so that the error names the limit and the remedy.
"""

from __future__ import annotations

import resource
from pathlib import Path

CAP_IPC_LOCK = 14
STATUS = Path("/proc/self/status")
REMEDY = "raise it (ulimit -l unlimited; LimitMEMLOCK=infinity in a systemd unit), or run as root"


def lockable() -> int | None:
    """Bytes that this process may still lock; None: there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return None
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    if int(fields.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1:
        return None
    used = sum(int(fields.get(name, "0").split()[0]) for name in ("VmPin", "VmLck"))
    return max(0, int(limit) - used * 1024)


def shortage(needed: int, what: str) -> str | None:
    """When ``needed`` bytes cannot be locked, one line with the reason and the remedy; else None.
    ``what``: the thing that needs them, for the text."""
    left = lockable()
    if left is None or left >= needed:
        return None
    return (
        f"the locked-memory limit is too small for {what}: {needed >> 10} KiB are needed, "
        f"{left >> 10} KiB are left; {REMEDY}"
    )
