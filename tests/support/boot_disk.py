"""A disk image from which a PC boots: a boot loader, Linux, and a root file system.

Made without root and without mounts. The first partition (FAT) has syslinux, the kernel and an
initial RAM disk with the modules for virtio disks and ext4; the second (ext4) is the root file
system, whose only program is busybox. After its init has run a script the machine powers off.
"""

from __future__ import annotations

import lzma
import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

from tests.support.nbdkit import run

MIB = 1 << 20
SECTOR = 512
FAT_AT = MIB
FAT_SIZE = 63 * MIB
ROOT_AT = FAT_AT + FAT_SIZE
SIZE = 128 * MIB
_MBR_CODE = Path("/usr/lib/syslinux/mbr/mbr.bin")
PROGRAMS = ("syslinux", "mformat", "mcopy", "mkfs.ext4", "busybox")
_BUSYBOX = Path("/bin/busybox")
_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")

_SYSLINUX = """SERIAL 0
DEFAULT linux
LABEL linux
  KERNEL /vmlinuz
  INITRD /initrd
  APPEND console=ttyS0 panic=-1 mitigations=off no_timer_check loglevel=4
"""
_INIT = """#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /root
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t devtmpfs none /dev
for module in /modules/*; do /bin/busybox insmod $module; done
until /bin/busybox test -b /dev/vda2; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda2 /root || exec /bin/busybox poweroff -f
exec /bin/busybox switch_root /root /init
"""
_ROOT_INIT = """#!/bin/busybox sh
busybox() {{ /bin/busybox "$@"; }}
busybox mount -t proc none /proc
busybox mount -t devtmpfs none /dev
exec >/dev/ttyS0 2>&1
{script}
busybox sync
busybox mount -o remount,ro /
busybox poweroff -f
"""


def missing() -> str:
    """What this machine lacks for ``make``; "": nothing."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    return ", ".join(absent) or ("" if _MBR_CODE.exists() else "syslinux-common")


def make(image: Path, kernel: Path, modules: Path, script: str) -> None:
    """Write ``image``, of SIZE bytes. ``kernel``: vmlinuz; ``modules``: its /lib/modules/RELEASE.
    ``script``: shell commands of busybox that run on the root file system."""
    scratch = image.with_suffix(".parts")
    scratch.mkdir()
    with image.open("wb") as file:
        file.truncate(SIZE)
        file.write(_MBR_CODE.read_bytes().ljust(440, b"\0"))
        file.seek(446)
        file.write(_partition(0x80, 0x0C, FAT_AT, FAT_SIZE))
        file.write(_partition(0x00, 0x83, ROOT_AT, SIZE - ROOT_AT))
        file.seek(510)
        file.write(b"\x55\xaa")
    initrd, settings = scratch / "initrd", scratch / "syslinux.cfg"
    initrd.write_bytes(_initrd(modules))
    settings.write_text(_SYSLINUX)
    fat = f"{image}@@{FAT_AT}"
    geometry = ("-T", FAT_SIZE // SECTOR, "-h", 64, "-s", 32, "-H", FAT_AT // SECTOR)
    run("mformat", "-i", fat, *geometry, "::")
    run("mcopy", "-i", fat, kernel, "::/vmlinuz")
    run("mcopy", "-i", fat, initrd, settings, "::/")
    run("syslinux", "--offset", FAT_AT, "--install", image)
    root = scratch / "root"
    for folder in ("bin", "proc", "dev"):
        (root / folder).mkdir(parents=True)
    shutil.copy(_BUSYBOX, root / "bin/busybox")
    (root / "init").write_text(_ROOT_INIT.format(script=script))
    (root / "init").chmod(0o755)
    blocks = (SIZE - ROOT_AT) // 1024
    run("mkfs.ext4", "-q", "-F", "-d", root, "-E", f"offset={ROOT_AT}", "-b", "1024", image, blocks)
    shutil.rmtree(scratch)


def _partition(flag: int, kind: int, at: int, size: int) -> bytes:
    """An entry of a partition table; the BIOS finds the sectors by their numbers alone."""
    beyond = b"\xfe\xff\xff"
    first, count = at // SECTOR, size // SECTOR
    return struct.pack("<B3sB3sII", flag, beyond, kind, beyond, first, count)


def _initrd(modules: Path) -> bytes:
    files = [("init", _INIT.encode(), 0o100755), ("bin", b"", 0o40755), ("modules", b"", 0o40755)]
    files.append(("bin/busybox", _BUSYBOX.read_bytes(), 0o100755))
    for number, path in enumerate(_in_order(modules)):
        content = path.read_bytes()
        if path.suffix == ".xz":
            content = lzma.decompress(content)
        files.append((f"modules/{number:02}.ko", content, 0o100644))
    return b"".join(_member(number, *each) for number, each in enumerate(files)) + _member(
        0, "TRAILER!!!", b"", 0
    )


def _in_order(modules: Path) -> Iterable[Path]:
    """The files of _MODULES, each after those that it needs."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, others = line.partition(":")
        needs[path] = others.split()
    by_name = {os.path.basename(path).partition(".")[0].replace("-", "_"): path for path in needs}
    order: dict[str, None] = {}
    for name in _MODULES:
        if name in by_name:  # else it is in the kernel
            for path in [*reversed(needs[by_name[name]]), by_name[name]]:
                order[path] = None
    return [modules / path for path in order]


def _member(number: int, name: str, content: bytes, mode: int) -> bytes:
    """A member of an archive in cpio's format "newc", as the kernel reads it."""
    path = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)
