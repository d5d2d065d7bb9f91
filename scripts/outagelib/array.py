"""In the guest: LIO as a machine of its own, behind a network, with disks that have a write cache.

It is in the network namespace NAMESPACE, at the other end of a veth pair. Its disks are null_blk's,
in memory: what is written to one is in its cache until a flush, and gone when its power is cut.
Whatever the target is told after it has come back has to reach it by the network, as from any array
that has booted.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

NAMESPACE = "array"
PORT = 3260
HOST = "array.lab"  # as initiators know it
_OURS = "10.9.10.1"
_ADDRESSES = ("10.9.10.2", "10.9.10.3")
_CACHE_MIB = 64
_CONFIGFS = Path("/sys/kernel/config")
_CORE = _CONFIGFS / "target/core"
_DISKS = _CONFIGFS / "nullb"
_HOSTS = Path("/etc/hosts")
# By LIO's default a WRITE whose data takes longer ends the session. The guest is emulated.
_DATA_OUT_S = 60
_PROGRAM_S = 300


def run(*words: object) -> str:
    """Run a program that must succeed; its stdout. Raises RuntimeError with its last line."""
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=_PROGRAM_S,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(map(str, words))}: {said[-1] if said else done.returncode}")
    return done.stdout


def iqn(name: str) -> str:
    return f"iqn.2026-11.lab.array:{name}"


class Array:
    """One LUN, number 0 of a target of its own, for each of ``names``; ``initiators``: the names
    of the initiators that may come."""

    def __init__(self, names: Sequence[str], size_mib: int, initiators: Sequence[str]) -> None:
        self._names = names
        self._initiators = initiators
        self._address = _ADDRESSES[0]
        for module in ("veth", "sch_netem", "target_core_mod", "target_core_iblock"):
            run("modprobe", module)
        run("modprobe", "iscsi_target_mod")
        run("modprobe", "null_blk", "nr_devices=0")
        self._make_network()
        for name in names:
            disk = self._disk(name)
            disk.mkdir()
            for setting, value in (
                ("size", size_mib),
                ("blocksize", 512),
                ("memory_backed", 1),
                ("cache_size", _CACHE_MIB),
                ("power", 1),
            ):
                (disk / setting).write_text(str(value))

    def device(self, name: str) -> Path:
        """The disk at the target itself."""
        return Path("/dev") / self._disk(name).name

    def _disk(self, name: str) -> Path:
        # By this name each kernel calls its device, whether by the directory or by a number.
        return _DISKS / f"nullb{self._names.index(name)}"

    # --- the service -----------------------------------------------------------------------

    def start(self) -> None:
        """Make the target's configuration, as its service does at its start."""
        for number, name in enumerate(self._names):
            store = _CORE / f"iblock_{number}" / name
            store.mkdir(parents=True)
            (store / "control").write_text(f"udev_path={self.device(name)}")
            (store / "enable").write_text("1")
            (store / "wwn/vpd_unit_serial").write_text(f"array-{name}")
            group = self._group(name)
            lun = group / "lun/lun_0"
            lun.mkdir(parents=True)
            (lun / "disk").symlink_to(store)
            for attribute, value in (("authentication", 0), ("demo_mode_write_protect", 0)):
                (group / "attrib" / attribute).write_text(str(value))
            for initiator in self._initiators:
                known = group / "acls" / initiator / "lun_0"
                known.mkdir(parents=True)
                (known.parent / "attrib/dataout_timeout").write_text(str(_DATA_OUT_S))
                (known / "disk").symlink_to(lun)
                (known / "write_protect").write_text("0")
            # A portal belongs to the network of the process that makes it.
            portal = group / "np" / f"{self._address}:{PORT}"
            run("nsenter", f"--net=/run/netns/{NAMESPACE}", "mkdir", portal)
            (group / "enable").write_text("1")

    def stop(self) -> None:
        """Take the configuration down: all sessions end, and nothing listens."""
        for number, name in enumerate(self._names):
            group, store = self._group(name), _CORE / f"iblock_{number}" / name
            (group / "enable").write_text("0")
            for known in group.glob("acls/*/lun_0"):
                (known / "disk").unlink()
                known.rmdir()
                known.parent.rmdir()
            for portal in group.glob("np/*:*"):
                portal.rmdir()
            (group / "lun/lun_0/disk").unlink()
            for directory in (group / "lun/lun_0", group, group.parent, store, store.parent):
                directory.rmdir()

    def _group(self, name: str) -> Path:
        return _CONFIGFS / "target/iscsi" / iqn(name) / "tpgt_1"

    # --- disks -----------------------------------------------------------------------------

    def lose_cache(self) -> None:
        """Cut the power of the disks, and give it back. No target uses them."""
        for name in self._names:
            for power in ("0", "1"):
                (self._disk(name) / "power").write_text(power)

    # --- the network -----------------------------------------------------------------------

    def _make_network(self) -> None:
        run("ip", "netns", "add", NAMESPACE)
        run("ip", "link", "add", "array0", "type", "veth", "peer", "name", "array1",
            "netns", NAMESPACE)  # fmt: skip
        run("ip", "address", "add", f"{_OURS}/24", "dev", "array0")
        run("ip", "link", "set", "array0", "up")
        for device in ("lo", "array1"):
            run("ip", "-n", NAMESPACE, "link", "set", device, "up")
        run("ip", "-n", NAMESPACE, "address", "add", f"{self._address}/24", "dev", "array1")
        self._name()

    def _name(self) -> None:
        """Let its name lead to its address."""
        others = [line for line in _HOSTS.read_text().splitlines() if HOST not in line]
        _HOSTS.write_text("\n".join([*others, f"{self._address} {HOST}"]) + "\n")

    def cut(self) -> None:
        """Let no packet pass, in either direction; the links stay up, as at a switch between."""
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            words = ["tc", *inside, "qdisc", "add", "dev", device, "root", "netem"]
            run(*words, "loss", "100%")

    def join(self) -> None:
        for inside, device in ((("-n", NAMESPACE), "array1"), ((), "array0")):
            run("tc", *inside, "qdisc", "delete", "dev", device, "root")

    def move(self) -> None:
        """Give it another address, and its name with it. Its service does not run."""
        old, self._address = self._address, _ADDRESSES[1]
        run("ip", "-n", NAMESPACE, "address", "delete", f"{old}/24", "dev", "array1")
        run("ip", "-n", NAMESPACE, "address", "add", f"{self._address}/24", "dev", "array1")
        self._name()
