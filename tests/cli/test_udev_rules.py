"""The rules for udev, read by udev itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_units import RULES, install
from tests.support.nbdkit import need
from tests.support.target import END_S

ID = "3600140500112233445566778899aabbc"
TOLD = f"ID_SERIAL={ID}\nID_WWN_WITH_EXTENSION=0x{ID[1:]}\nID_ISERBLK={ID}\n"

# In mounts of its own: the rules, /run with what attach has told, and a /dev without links. udevadm
# test(8) makes the links that it finds.
SCRIPT = r"""
set -e
mount -t tmpfs none /etc/udev/rules.d
cp "$1" /etc/udev/rules.d/59-iserblk.rules
mount -t tmpfs none /run
[ -z "$4" ] || { mkdir -p "/run/iserblk/$2"; printf "$4" >"/run/iserblk/$2/udev"; }
number=$(tr : ' ' <"/sys/class/block/$2/dev")
mount -t tmpfs none /dev
mknod "/dev/$2" b $number
mknod /dev/null c 1 3
udevadm test --action="$3" "/sys/class/block/$2"
"""


@pytest.fixture
def device() -> str:
    """A block device, in place of an NBD device."""
    need("udevadm", "unshare")
    if os.geteuid():
        pytest.skip("only root may mount")
    found = sorted(Path("/sys/class/block").glob("loop*[0-9]"))
    if not found:
        pytest.skip("this kernel has no loop device")
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("mount namespaces are not permitted here")
    return found[-1].name


def links(device: str, tmp_path: Path, action: str = "change", told: str = TOLD) -> set[str]:
    """The links by identity that udev makes for ``device`` by our rules and its own."""
    root = tmp_path / "root"
    assert install(root).returncode == 0
    rules = tmp_path / "rules"
    text = (root / RULES).read_text()
    assert 'KERNEL!="nbd*"' in text
    rules.write_text(text.replace('KERNEL!="nbd*"', 'KERNEL!="loop*"'))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", rules, device, action, told],
        capture_output=True,
        text=True,
        check=False,
        timeout=END_S,
    )
    assert done.returncode == 0, done.stderr
    wrong = [line for line in done.stderr.splitlines() if re.search(r"59-iserblk\S* Invalid", line)]
    assert not wrong
    found = re.search("^DEVLINKS=(.*)$", done.stdout, re.MULTILINE)
    every = found[1].split() if found else []
    return {link for link in every if re.search("/(iserblk|wwn)-", link)}


def test_links_by_the_identity(device: str, tmp_path: Path) -> None:
    """udev's own rules make the second link of the properties."""
    assert links(device, tmp_path) == {
        f"/dev/disk/by-id/iserblk-{ID}",
        f"/dev/disk/by-id/wwn-0x{ID[1:]}",
    }


def test_no_links(device: str, tmp_path: Path) -> None:
    """After a detach, and for a LUN without a name."""
    assert links(device, tmp_path, told="") == set()
    assert links(device, tmp_path, told="ID_VENDOR=IET\n") == set()
