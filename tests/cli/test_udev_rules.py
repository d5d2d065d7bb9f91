"""The rules for udev, read by udev itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.test_units import RULES, install
from tests.support import udev

ID = "3600140500112233445566778899aabbc"
TOLD = f"ID_SERIAL={ID}\nID_WWN_WITH_EXTENSION=0x{ID[1:]}\nID_ISERBLK={ID}\n"


@pytest.fixture
def device() -> str:
    """A block device, in place of an NBD device."""
    udev.need_udev()
    found = sorted(Path("/sys/class/block").glob("loop*[0-9]"))
    if not found:
        pytest.skip("this kernel has no loop device")
    return found[-1].name


def links(device: str, tmp_path: Path, action: str = "change", told: str = TOLD) -> set[str]:
    """The links by identity that udev makes for ``device`` by our rules and its own."""
    root = tmp_path / "root"
    assert install(root).returncode == 0
    rules = tmp_path / "rules"
    text = (root / RULES).read_text()
    assert 'KERNEL!="nbd*"' in text
    rules.write_text(text.replace('KERNEL!="nbd*"', 'KERNEL!="loop*"'))
    found = udev.links(device, rules, told, action)
    return {link for link in found if re.search("/(iserblk|wwn)-", link)}


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
