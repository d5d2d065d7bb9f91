"""A FUSE mount of ours, served by a process of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.forking import Forked
from tests.support.nbdkit import run
from tests.support.target import END_S, ROOT
from tests.support.until import until_blocking


def need_fuse() -> None:
    """Skip the test unless FUSE mounts can be made."""
    if importlib.util.find_spec("pyfuse3") is None:
        pytest.skip("pyfuse3 is not installed (scripts/setup installs it)")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse on this machine (modprobe fuse)")
    if os.geteuid() and shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is not installed (package fuse3), and this is not root")


def need_loop_mounts(kind: str) -> None:
    """Skip the test unless file systems of ``kind`` can be mounted from a file."""
    if os.geteuid():
        pytest.skip("loop mounts need root")
    if not os.path.exists("/dev/loop-control"):
        pytest.skip("no /dev/loop-control on this machine (modprobe loop)")
    subprocess.run(["modprobe", "-q", kind], check=False)
    words = Path("/proc/filesystems").read_text().split()
    if kind not in words:
        pytest.skip(f"this kernel has no {kind} file system")


@contextmanager
def running_mount(urls: list[str], mountpoint: Path, *options: str) -> Iterator[Path]:
    """Yields the directory with the files; at the end the server must go with status 0."""
    mountpoint.mkdir(exist_ok=True)
    log = mountpoint.with_name(f"{mountpoint.name}.log")
    with log.open("ab") as stderr:
        process = Forked(
            "fuse_mount",
            [*urls, str(mountpoint), *(word for option in options for word in ("-o", option))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=os.environ,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready "), log.read_text()
        yield mountpoint
    finally:
        process.terminate()
        try:
            process.communicate(timeout=END_S)
        finally:
            process.kill()
            process.communicate()
            # Only after a server that died: else the directory is free already.
            subprocess.run(["umount", "--lazy", mountpoint], stderr=subprocess.DEVNULL, check=False)
    assert process.returncode == 0, log.read_text()


@contextmanager
def loop_mount(image: Path, mountpoint: Path, *options: str) -> Iterator[Path]:
    """The file system in ``image``, unmounted again at the end, everywhere: a test beside this one
    that has made a mount namespace has the file system mounted there, until it ends."""
    mountpoint.mkdir(exist_ok=True)
    run("mount", "-o", ",".join(("loop", *options)), image, mountpoint)
    try:
        yield mountpoint
    finally:
        run("umount", mountpoint)
        until_blocking(lambda: not run("losetup", "--associated", image))
