"""The machine's disk: Debian by mmdebstrap, with our package, and what a server needs to boot."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lablib.archive import Absent, cache, call, filling

from bootlib import say

RELEASES = {"bookworm": "bookworm", "12": "bookworm", "trixie": "trixie", "13": "trixie"}
# The last one brings the commands to the guest without a network.
_PACKAGES = (
    "systemd-sysv", "udev", "dbus", "kmod", "iproute2", "e2fsprogs", "fuse3",
    "linux-image-amd64", "initramfs-tools", "python3", "qemu-guest-agent",
)  # fmt: skip
_LEFT_OUT = (
    "/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*",
    *(f"{top}/lib/modules/*/kernel/{part}/*" for top in ("", "/usr") for part in (
        "sound", "drivers/gpu", "drivers/media", "drivers/net/ethernet", "drivers/net/wireless",
        "drivers/infiniband", "drivers/staging", "drivers/iio", "drivers/usb", "drivers/hwmon",
    )),
)  # fmt: skip
# For the initial RAM disk: with all modules it takes longer to unpack than the rest to boot.
_MODULES = ("virtio_pci", "virtio_blk", "ext4", "crc32c_generic")
_SIZE = "3G"  # sparse
_LIMIT_S = 1800.0
_AUTOMOUNT = "/usr/share/mmdebstrap/hooks/file-mirror-automount"  # for --include=/path/x.deb

_FILES = {
    "etc/hostname": "boot\n",
    "etc/hosts": "127.0.0.1 localhost boot\n",
    "etc/fstab": "/dev/vda  /  ext4  errors=remount-ro  0  1\n",
    "etc/systemd/network/10-boot.network": (
        "[Match]\nName=eth0\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    # It would tell the journal of each question whether a command has ended.
    "etc/systemd/system/qemu-guest-agent.service.d/quiet.conf": (
        "[Service]\nLogLevelMax=warning\n"
    ),
}
_ENABLED = ("systemd-networkd.service", "systemd-networkd-wait-online.service")
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer",
    "e2scrub_all.timer", "e2scrub_reap.service",
)  # fmt: skip


@dataclass(frozen=True)
class Disk:
    """The files of a machine that has not booted yet. ``image`` is never written."""

    image: Path
    kernel: Path
    initrd: Path

    def overlay(self, place: Path) -> Path:
        """A file for what boots change of the disk."""
        call(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self.image),
              str(place)], 60)  # fmt: skip
        return place


def the_disk(release: str, package: Path) -> Disk:
    """The disk with ``package``, from the cache; made if the cache has another one or none. Raises
    Absent."""
    package = package.resolve()
    key = hashlib.sha256(package.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    home = cache() / f"boot-{release}"
    disk = Disk(home / "image", home / "kernel", home / "initrd")
    with filling() as scratch:
        if not (home / "key").exists() or (home / "key").read_text() != key:
            say(f"making a disk with {release} and {package.name} (some minutes, once)")
            made = scratch / "disk"
            made.mkdir()
            _make(release, package, scratch / "root", made)
            (made / "key").write_text(key)
            shutil.rmtree(home, ignore_errors=True)
            made.rename(home)
    return disk


def _make(release: str, package: Path, root: Path, made: Path) -> None:
    if os.geteuid():
        raise Absent("mmdebstrap needs root: run it as root")
    conf = "$1/etc/initramfs-tools/conf.d"
    listed = "$1/usr/share/initramfs-tools/modules.d"
    hook = (
        f"mkdir -p {conf} {listed}; echo MODULES=list >{conf}/boot;"
        f" printf '%s\\n' {' '.join(_MODULES)} >{listed}/boot"
    )
    call(
        ["mmdebstrap", "--quiet", "--variant=minbase", "--format=directory",
         f"--include={','.join((*_PACKAGES, str(package)))}",
         f"--hook-dir={_AUTOMOUNT}",
         *(f"--aptopt={line}" for line in _apt_settings()),
         *(f"--dpkgopt=path-exclude={each}" for each in _LEFT_OUT),
         f"--essential-hook={hook}",
         release, str(root)],
        _LIMIT_S,
    )  # fmt: skip
    for name, text in _FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
    # With an empty one systemd would take the first boot for that of a new machine, and enable
    # every unit that there is.
    (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
    (root / "var/log/journal").mkdir(parents=True, exist_ok=True)
    call(["chroot", str(root), "systemctl", "--quiet", "enable", *_ENABLED], 60)
    call(["chroot", str(root), "systemctl", "--quiet", "mask", *_MASKED], 60)
    for name, pattern in (("kernel", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        found = sorted((root / "boot").glob(pattern))
        if not found:
            raise Absent(f"{release}: the kernel's package has made no /boot/{pattern}")
        shutil.move(found[-1], made / name)
    call(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(made / "image"), _SIZE], 300)
    shutil.rmtree(root)


def _apt_settings() -> Iterator[str]:
    """What this machine's apt has been told of its network and its clock."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    for line in dump.stdout.splitlines():
        name = line.partition(" ")[0]
        if name.startswith(("Acquire::http::", "Acquire::https::", "Acquire::Check-")):
            yield line
