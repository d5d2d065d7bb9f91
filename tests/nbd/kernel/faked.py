"""``python -m tests.nbd.kernel.faked ROOT …``: the command line, looking below ROOT instead of at
the system's places (tests/nbd/kernel/fake_kernel.py)."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

from iserblk.cli import attach, detach
from iserblk.cli.main import main
from iserblk.nbd.kernel import client, device
from tests.nbd.kernel.fake_kernel import FakeNetlink

_fsync = os.fsync


def fsync(fd: int) -> None:
    """As the kernel's, of a device: leaves a note while the device is connected, and fails where it
    is told to (FakeKernel)."""
    _fsync(fd)
    name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
    if (root / "sys" / "block" / name / "pid").exists():
        (root / f"synced-{name}").touch()
        if (root / f"bad-{name}").exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))


if __name__ == "__main__":
    root = Path(sys.argv.pop(1))
    os.fsync = fsync  # type: ignore[assignment]
    places = device.Directories(root / "sys", root / "dev", Path("/proc"), root / "run")
    attach.DIRECTORIES = detach.DIRECTORIES = places
    client.KERNEL = FakeNetlink(root)
    device.need_root = lambda: None
    main()
