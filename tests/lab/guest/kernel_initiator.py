"""The kernel's initiator, over iSER or TCP: logs in to our target, and uses the disk it makes."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cli.commands import environment
from tests.support.forking import Forked
from tests.support.programs import run

IQN = "iqn.2026-11.example:lab"
SLOW_S = 240  # for one step; the machine is emulated


@contextmanager
def our_target(file: Path, listen: str, *options: str, namespace: str = "") -> Iterator[str]:
    """Run ``iserblk target`` with one LUN; yields its URL. ``namespace``: where, if not here."""
    words = ["target", "--iqn", IQN, "--lun", f"{file}:wce=1", "--listen", f"{listen}:3260"]
    with open(file.with_suffix(".log"), "w+") as log:
        process = Forked(
            "iserblk.cli",
            [*words, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            namespace=namespace,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready "), (line, Path(log.name).read_text())
            yield line.split()[1]
            assert process.poll() is None, Path(log.name).read_text()
        finally:
            process.terminate()
            process.communicate(timeout=30)


def iscsiadm(*words: str) -> str:
    return run("iscsiadm", *words)


@contextmanager
def logged_in(
    listen: str,
    settings: dict[str, str],
    interface: str = "iser",
    port: int = 3260,
    iqn: str = IQN,
    lun: str = "*",
) -> Iterator[Path]:
    """Log in; yields the session's block device. ``settings``: of the node record. ``interface``:
    iscsiadm's, `iser` for ib_iser, `default` for iscsi_tcp. ``lun``: its number, where the target
    has several."""
    node = ("-m", "node", "-T", iqn, "-p", f"{listen}:{port}")
    iscsiadm(*node, "-o", "new", "-I", interface)
    for name, value in settings.items():
        iscsiadm(*node, "-o", "update", "-n", name, "-v", value)
    iscsiadm(*node, "-I", interface, "--login")
    try:
        yield block_device(lun)
    finally:
        iscsiadm(*node, "--logout")
        iscsiadm(*node, "-o", "delete")


def block_device(lun: str = "*") -> Path:
    """The block device of the only session. It appears some time after the login."""
    for _ in range(SLOW_S * 5):
        for session in Path("/sys/class/iscsi_session").glob("session*"):
            for block in session.glob(f"device/target*/*:{lun}/block/sd*"):
                device = Path("/dev") / block.name
                if device.exists():
                    return device
        time.sleep(0.2)
    raise AssertionError("no disk appeared: " + run("dmesg")[-2000:])


def negotiated() -> dict[str, str]:
    """The keys of the session, as the kernel reports them."""
    text = iscsiadm("-m", "session", "-P", "2")
    return dict(re.findall(r"^\s*(\w+): (.*)$", text, re.MULTILINE))


def fio_verify(device: Path, size: str, *more: str) -> None:
    """Run fio: random sizes at random places, deep; each block is checked when it is read back."""
    run(
        "fio", "--name=verify", f"--filename={device}", "--ioengine=libaio", "--direct=1",
        "--rw=randwrite", "--bsrange=4k-512k", f"--size={size}", "--iodepth=16",
        "--verify=crc32c", "--verify_fatal=1", "--randseed=7", *more,
    )  # fmt: skip


def file_system(device: Path, mount_point: Path, tree: Path) -> None:
    """Run mkfs.ext4, copy a tree in, mount again, copy it out; run fsck."""
    run("mkfs.ext4", "-q", "-F", device)
    mount_point.mkdir(exist_ok=True)
    run("mount", device, mount_point)
    try:
        run("cp", "-r", tree, mount_point / "tree")
    finally:
        run("umount", mount_point)
    run("mount", device, mount_point)
    try:
        run("diff", "-r", tree, mount_point / "tree")
    finally:
        run("umount", mount_point)
    run("fsck.ext4", "-f", "-n", device)
