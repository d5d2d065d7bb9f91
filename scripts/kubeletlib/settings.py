"""Settings of the kernel that a kubelet changes, of the whole machine: they are set back, also
behind a run that was killed, by the next one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kubeletlib.build import say

_PROC = Path("/proc/sys")
# Until the machine starts anew, as the settings.
_KEPT = Path("/run/iserblk-kubelet-settings.json")
TUNED = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)


@contextmanager
def kept(proc: Path = _PROC, file: Path = _KEPT) -> Iterator[None]:
    """At the end the settings are what they were, and ``file`` is gone, which has them until
    then. One that is there is of a run that was killed: first its settings are set back."""
    if file.exists():
        changed = _set_back(proc, json.loads(file.read_text()))
        say(f"a run before was killed; set back what it had left changed: {changed or 'nothing'}")
    before = {name: (proc / name).read_text() for name in TUNED if (proc / name).exists()}
    part = file.with_suffix(".new")
    part.write_text(json.dumps(before))
    part.rename(file)
    try:
        yield
    finally:
        _set_back(proc, before)
        file.unlink()


def _set_back(proc: Path, before: Mapping[str, str]) -> str:
    """Returns the names of those that had changed, with their values now."""
    changed = []
    for name, text in before.items():
        if (proc / name).read_text() != text:
            (proc / name).write_text(text)
            changed.append(f"{name.replace('/', '.')}={text.strip()}")
    return ", ".join(changed)
