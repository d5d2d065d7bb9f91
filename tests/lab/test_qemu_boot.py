"""A guest of QEMU boots from a LUN over NBD, by its own boot loader, and writes to it."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from lablib.host import why_not
from lablib.kernel import the_kernel

from tests.support import boot_disk
from tests.support.interop import Record, package
from tests.support.nbdkit import run, running_nbd
from tests.support.target import running_target

LIMIT_S = 400  # emulated, on a machine that may be busy
SCRIPT = """
busybox dd if=/dev/urandom of=/written bs=64k count=64 conv=fsync
busybox sha256sum /written
"""


@pytest.fixture
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A disk that boots, and runs SCRIPT; skips where it cannot be made."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    reason = why_not("none") or boot_disk.missing()
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    kernel = the_kernel()
    disk = tmp_path / "disk.img"
    boot_disk.make(disk, kernel.image, kernel.modules, SCRIPT)
    return disk


@pytest.mark.timeout(LIMIT_S + 200)
def test_a_guest_boots_from_a_lun(image: Path, tmp_path: Path, record: Record) -> None:
    console = tmp_path / "console"
    with (
        running_target([str(image)], tmp_path / "target.log") as target,
        running_nbd("iserblk", [f"{target.url}/0"], tmp_path) as uri,
    ):
        subprocess.run(
            [
                *("qemu-system-x86_64", "-machine", "pc", "-accel", "tcg", "-m", "256M"),
                *("-nodefaults", "-display", "none", "-no-reboot", "-serial", f"file:{console}"),
                *("-drive", f"file={uri},if=virtio,format=raw,cache=none"),
            ],
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=LIMIT_S,
        )
    root = f"{image}?offset={boot_disk.ROOT_AT}"
    said = console.read_text(errors="replace")
    written = tmp_path / "written"
    run("debugfs", "-R", f"dump /written {written}", root)
    found = written.read_bytes()
    assert len(found) == 4 << 20
    assert f"{hashlib.sha256(found).hexdigest()}  /written" in said
    run("e2fsck", "-f", "-n", root)
    record(
        ours="iserblk nbd",
        peer="QEMU guest, nbd+unix://",
        version=package("qemu-system-x86"),
        transport="NBD, Unix socket; iSER, software iWARP",
        ran="a guest boots from the LUN (syslinux, Linux, ext4 root), writes 4 MiB, powers off; "
        "e2fsck, and the file compared",
    )
