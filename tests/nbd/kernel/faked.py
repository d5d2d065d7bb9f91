"""``python -m tests.nbd.kernel.faked ROOT …``: the command line, looking below ROOT instead of at
the system's places (tests/nbd/kernel/fake_kernel.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from iserblk.cli import attach, detach
from iserblk.cli.main import main
from iserblk.nbd.kernel import client, device
from tests.nbd.kernel.fake_kernel import FakeNetlink

if __name__ == "__main__":
    root = Path(sys.argv.pop(1))
    places = device.Places(root / "sys", root / "dev", Path("/proc"), root / "run")
    attach.PLACES = detach.PLACES = places
    client.KERNEL = FakeNetlink(root)
    device.need_root = lambda: None
    main()
