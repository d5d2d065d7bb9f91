"""Finds out how guests can run here, once, with a guest that does nothing.

If the host itself is a virtual machine, a guest may hang although /dev/kvm exists. A container may
forbid what a kernel in user mode needs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lablib.archive import cache, say
from lablib.kernel import Kernel
from lablib.vm import Died, Machine
from lablib.wish import Wish

_BANNER_S = 20
_WHOLE_S = 90


def usable(kernel: Kernel) -> bool:
    """Whether hardware acceleration works, or, with a kernel of user mode, whether that does. The
    answer is kept until the host boots again, or the kernel changes. Raises Absent."""
    if not kernel.user_mode and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    tried = {
        "host": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "kernel": kernel.root.name,
    }
    kept = cache() / ("user-mode.json" if kernel.user_mode else "acceleration.json")
    try:
        known = json.loads(kept.read_text())
    except (OSError, ValueError):
        known = {}
    if {name: known.get(name) for name in tried} != tried:
        known = {**tried, "usable": _try(kernel)}
        fresh = kept.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps(known))
        fresh.rename(kept)
    return bool(known["usable"])


def _try(kernel: Kernel) -> bool:
    what = "a kernel in user mode" if kernel.user_mode else "hardware acceleration"
    say(f"trying {what} (once)")
    with Machine(Wish(kernel, kvm=not kernel.user_mode), ["true"]) as machine:

        def banner() -> bool:
            return machine.console.exists() and "Linux version" in machine.console.read_text(
                errors="replace"
            )

        try:
            machine.wait(_BANNER_S, until=banner)
            works = machine.wait(_WHOLE_S) == 0
        except Died as how:
            say(f"using software emulation: with {what} {str(how).splitlines()[0]}")
            return False
    return works
