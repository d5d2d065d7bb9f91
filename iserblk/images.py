"""Formats of virtual machines' disk images, by their first bytes.

A file is served and copied byte by byte. An image with a format of its own must be converted
before, else a client sees the format's header and tables in place of the disk.

Sources: QEMU, docs/interop/{qcow2,parallels,qed_spec}.txt and block/{vmdk,vdi,vpc}.c; [MS-VHDX]
section 2.2.1.
"""

from __future__ import annotations

import os
from typing import Final

_HEAD: Final = 4096  # bytes to look at

# Offset, bytes, format: a name that qemu-img knows.
_MAGIC: Final = (
    (0, b"QFI\xfb\0\0\0\1", "qcow"),
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
    (0, b"QED\0", "qed"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
)


def image_format(head: bytes) -> str | None:
    """The format of an image that begins with ``head``; None: none that is known, so raw."""
    for offset, magic, name in _MAGIC:
        if head.startswith(magic, offset):
            return name
    return None


def image_warning(fd: int, path: str) -> str | None:
    """What to warn of where the open file is an image with a format; None: nothing, or it cannot be
    read."""
    try:
        name = image_format(os.pread(fd, _HEAD, 0))
    except OSError:
        return None
    if name is None:
        return None
    return (
        f"{path}: a {name} image is taken byte by byte, not as the disk in it;"
        f" `qemu-img convert -f {name} -O raw` makes a raw image of it"
    )
