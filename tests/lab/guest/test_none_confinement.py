"""iserblk-attach@ does its work within what it confines: under a systemd, with a kernel that has
NBD devices. tests/scripts/test_confinement.py tries what is forbidden, and has the other units."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.guest.attached import MIB, connected
from tests.support.confined import unit_settings
from tests.support.manager import running_manager

IQN = "iqn.2026-11.example:disk"
PORT = 3270
DEVICE = "/dev/nbd3"


@pytest.mark.long
def test_a_device_is_attached_and_written_and_detached(tmp_path: Path) -> None:
    # The kernel has its family of netlink for NBD in the first network namespace alone.
    with running_manager(tmp_path, unit_settings(), network=False) as manager:
        config = manager.path("/etc/iserblk/disk.toml")
        portal = f'[[portal]]\nlisten = "127.0.0.1:{PORT}"\n'
        lun = '[lun.0]\nfile = "/var/lib/iserblk/disk"\nsize = "8M"\n'
        config.write_text(f'iqn = "{IQN}"\n{portal}{lun}')
        manager.path("/etc/iserblk/data.conf").write_text(
            f"URL=iser://127.0.0.1:{PORT}/{IQN}/0\nDEVICE={DEVICE}\nOPTIONS=io-timeout=60\n"
        )
        manager.start("iserblk-target@disk")
        manager.start("iserblk-attach@data")
        data = b"written once" * (MIB // 12)
        manager.path("/run/data").write_bytes(data)
        manager.run("dd", "if=/run/data", f"of={DEVICE}", "bs=64k", "conv=fsync")
        manager.stop("iserblk-attach@data")
        assert connected() == []
        assert manager.path("/var/lib/iserblk/disk").read_bytes()[: len(data)] == data
        manager.stop("iserblk-target@disk")
