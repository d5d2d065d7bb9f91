"""The guest's kernel: the distribution's full one, and siw built for it, in the cache.

The image comes as linux-image-amd64 ships it (the cloud kernel has no RDMA). siw is in Debian's
source, but not in its package: it is built once as an external module. The kernel of user mode is
the distribution's, too; it has no RDMA at all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lablib.archive import Absent, Archive, cache, call, filling, say

_BUILD_TIMEOUT_S = 300
_USER_MODE_MODULES = "usr/lib/uml/modules"


@dataclass(frozen=True)
class Kernel:
    """One unpacked kernel. ``root`` is laid out like a root file system: boot, lib/modules."""

    root: Path
    user_mode: bool = False
    """The kernel is a program of the host, which runs the guest's programs as its own processes."""

    @property
    def release(self) -> str:
        """The output of ``uname -r`` in the guest."""
        if self.user_mode:
            return next((self.root / _USER_MODE_MODULES).iterdir()).name
        return self.image.name.removeprefix("vmlinuz-")

    @property
    def image(self) -> Path:
        if self.user_mode:
            return self.root / "usr" / "bin" / "linux.uml"
        return next((self.root / "boot").glob("vmlinuz-*"))

    @property
    def modules(self) -> Path:
        return self.root / "lib" / "modules" / self.release

    @property
    def version(self) -> str:
        """The version of the Debian package."""
        return (self.root / "version").read_text().strip()


def the_kernel() -> Kernel:
    """The kernel in the cache; downloaded if there is none. Raises Absent."""
    return Kernel(_kept("kernel", _fetch_kernel).resolve())


def _kept(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The file or directory of that name in the cache. If it is missing, ``make`` makes it: of a
    scratch directory and the path."""
    path = cache() / name
    if not path.exists():
        with filling() as scratch:
            if not path.exists():
                make(scratch, path)
    return path


def _fetch_kernel(scratch: Path, current: Path) -> None:
    archive = Archive(scratch)
    images = archive.dependencies("linux-image-amd64")
    package = next((name for name in images if name.startswith("linux-image-")), None)
    if package is None:
        raise Absent("the package linux-image-amd64 depends on no kernel")
    root = scratch / "root"
    version = images[package]
    archive.unpack([f"{package}={version}" if version else package], root)
    release = package.removeprefix("linux-image-")
    if not (root / "lib").exists():  # since Debian 13 packages have no /lib: it is a link
        (root / "lib").symlink_to("usr/lib")
    call(["depmod", "-b", str(root), release], _BUILD_TIMEOUT_S)
    (root / "version").write_text(version)
    home = cache() / f"kernel-{release}-{version}"
    root.rename(home)
    current.symlink_to(home.name)
    say(f"kernel {release} is in {home}")


def user_mode_kernel() -> Kernel:
    """The kernel of user mode in the cache; downloaded if there is none. Raises Absent."""
    return Kernel(_kept("user-mode", _fetch_user_mode).resolve(), user_mode=True)


def _fetch_user_mode(scratch: Path, current: Path) -> None:
    root = scratch / "root"
    Archive(scratch).unpack(["user-mode-linux"], root)
    # depmod and modprobe know modules by this path alone.
    (root / "lib").mkdir()
    (root / "lib" / "modules").symlink_to(f"../{_USER_MODE_MODULES}")
    release = Kernel(root, user_mode=True).release
    call(["depmod", "-b", str(root), release], _BUILD_TIMEOUT_S)
    home = cache() / f"user-mode-{release}"
    root.rename(home)
    current.symlink_to(home.name)
    say(f"kernel {release} of user mode is in {home}")


def siw_module(kernel: Kernel) -> Path:
    """siw.ko for that kernel; built if the cache has none. Raises Absent."""
    name = f"siw-{kernel.release}-{kernel.version}.ko"
    return _kept(name, lambda scratch, module: _build_siw(scratch, module, kernel))


def _build_siw(scratch: Path, module: Path, kernel: Kernel) -> None:
    series = ".".join(kernel.release.split(".")[:2])
    flavour = f"linux-headers-{kernel.release}"
    archive = Archive(scratch)
    root = scratch / "root"
    headers = {flavour: kernel.version, **archive.dependencies(flavour)}
    archive.unpack(
        [f"{name}={version}" if version else name for name, version in headers.items()]
        + [f"linux-source-{series}={kernel.version}"],
        root,
    )
    # The package's Makefile names its files by the paths that they have when installed.
    build = root / "usr" / "src" / flavour
    makefile = build / "Makefile"
    makefile.write_text(re.sub(r"(?<=\s)/usr/src", f"{root}/usr/src", makefile.read_text()))
    say(f"building siw for {kernel.release} (once)")
    tree = f"linux-source-{series}"
    folder = f"{tree}/drivers/infiniband/sw/siw"
    tarball = root / "usr" / "src" / f"{tree}.tar.xz"
    call(["tar", "-C", str(scratch), "-xJf", str(tarball), folder], _BUILD_TIMEOUT_S)
    source = scratch / folder
    call(
        ["make", "-s", f"-j{os.cpu_count()}", "-C", str(build), f"M={source}",
         "CONFIG_RDMA_SIW=m", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"],  # no pahole here
        _BUILD_TIMEOUT_S,
    )  # fmt: skip
    (source / "siw.ko").rename(module)


def open_iscsi() -> Path:
    """open-iscsi with its own libraries, unpacked, because to install it would start a daemon."""
    return _kept("open-iscsi", _fetch_open_iscsi)


def _fetch_open_iscsi(scratch: Path, directory: Path) -> None:
    root = scratch / "root"
    archive = Archive(scratch)
    own = [
        name  # libisns0t64 in some releases
        for name in archive.dependencies("open-iscsi")
        if name.startswith(("libopeniscsiusr", "libisns0"))
    ]
    archive.unpack(["open-iscsi", *own], root)
    root.rename(directory)
