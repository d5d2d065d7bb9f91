"""Formats of images, as qemu-img makes them, and by their first bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from iserblk.images import image_format, image_warning


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"QFI\xfb\0\0\0\1", "qcow"),
        (b"QFI\xfb\0\0\0\2", "qcow2"),
        (b"QFI\xfb\0\0\0\3", "qcow2"),
        (b"KDMV\1\0\0\0", "vmdk"),
        (b"COWD\1\0\0\0", "vmdk"),
        (b"# Disk DescriptorFile\nversion=1\n", "vmdk"),
        (b"vhdxfile", "vhdx"),
        (b"conectix", "vpc"),
        (
            b"<<< Oracle VM VirtualBox Disk Image >>>\n".ljust(64, b"\0") + b"\x7f\x10\xda\xbe",
            "vdi",
        ),
        (b"QED\0", "qed"),
        (b"WithoutFreeSpace", "parallels"),
        (b"WithouFreSpacExt", "parallels"),
        (b"", None),
        (b"QFI", None),
        (b"QED ", None),
        (bytes(4096), None),
        (b"\xeb\x63\x90".ljust(510, b"\0") + b"\x55\xaa", None),  # a boot sector
        (bytes(4) + b"QFI\xfb", None),
    ],
)
def test_magic(head: bytes, name: str | None) -> None:
    assert image_format(head) == name
    assert image_format(head.ljust(4096, b"\0")) == name


@pytest.mark.parametrize(
    "name", ["qcow", "qcow2", "vmdk", "vhdx", "vpc", "vdi", "qed", "parallels"]
)
def test_what_qemu_img_makes(tmp_path: Path, name: str) -> None:
    if shutil.which("qemu-img") is None:
        pytest.skip("qemu-img is not installed (package qemu-utils)")
    path = tmp_path / "image"
    made = subprocess.run(
        ["qemu-img", "create", "-q", "-f", name, path, "64M"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"qemu-img does not make it: {made.stderr}")
    fd = os.open(path, os.O_RDONLY)
    warning = image_warning(fd, str(path)) or ""
    os.close(fd)
    assert (
        warning.startswith(f"{path}: a {name} image") and f"qemu-img convert -f {name}" in warning
    )
    raw = tmp_path / "raw"
    subprocess.run(["qemu-img", "convert", "-f", name, "-O", "raw", path, raw], check=True)
    fd = os.open(raw, os.O_RDONLY)
    assert image_warning(fd, str(raw)) is None
    os.close(fd)


def test_what_cannot_be_read_is_not_warned_of(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    assert image_warning(fd, "x") is None
    os.close(fd)
