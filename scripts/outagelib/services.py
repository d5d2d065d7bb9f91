"""In the guest: what makes targets of the array's disks. One target for each, which is called as
the initiator is that it is for.

LIO is the kernel's own; tgtd and istgt are programs, which are killed where the service stops. What
they have not flushed goes with the power of the disks: tgtd writes past the page cache, and what
istgt has there goes no further than to the disk's cache, when the device vanishes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from outagelib.programs import run

NAMESPACE = "array"
PORT = 3260
BASE = "iqn.2026-11.lab.array"
_RUN = Path("/run/outage.target")
_START_S = 120.0
_LOOK_S = 0.1
_LISTENS = "0A"  # the state of a socket, in /proc/PID/net/tcp


def iqn(name: str) -> str:
    return f"{BASE}:{name}"


class Service(Protocol):
    """``lun``: the number that the disk of each target has."""

    lun: int

    def start(self, address: str) -> None:
        """Serve there."""

    def stop(self) -> None:
        """All sessions end, and nothing listens."""


class Lio:
    """``disks``: of each name. ``initiators``: the names of the initiators that may come."""

    lun = 0
    _CORE = Path("/sys/kernel/config/target/core")
    _ISCSI = Path("/sys/kernel/config/target/iscsi")
    # By LIO's default a WRITE whose data takes longer ends the session. The guest is emulated.
    _DATA_OUT_S = 60

    def __init__(self, disks: Mapping[str, Path], initiators: Sequence[str], _prefix: Path) -> None:
        self._disks = disks
        self._initiators = initiators
        for module in ("target_core_mod", "target_core_iblock", "iscsi_target_mod"):
            run("modprobe", module)

    def start(self, address: str) -> None:
        """Make the target's configuration, as its service does at its start."""
        for number, (name, disk) in enumerate(self._disks.items()):
            store = self._CORE / f"iblock_{number}" / name
            store.mkdir(parents=True)
            (store / "control").write_text(f"udev_path={disk}")
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
                (known.parent / "attrib/dataout_timeout").write_text(str(self._DATA_OUT_S))
                (known / "disk").symlink_to(lun)
                (known / "write_protect").write_text("0")
            # A portal belongs to the network of the process that makes it.
            portal = group / "np" / f"{address}:{PORT}"
            run("nsenter", f"--net=/run/netns/{NAMESPACE}", "mkdir", portal)
            (group / "enable").write_text("1")

    def stop(self) -> None:
        """Take the configuration down."""
        for number, name in enumerate(self._disks):
            group, store = self._group(name), self._CORE / f"iblock_{number}" / name
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
        return self._ISCSI / iqn(name) / "tpgt_1"


class _Program:
    """A target that is a program. It runs in the array's network namespace. ``run``: a directory
    for its files."""

    def __init__(self, name: str) -> None:
        self.run = _RUN / name
        self.run.mkdir(parents=True)
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, address: str, *words: object) -> None:
        """Start it, and wait until it listens at the address. Raises RuntimeError: it does not."""
        log = self.run / "log"
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{NAMESPACE}", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "TGT_IPC_SOCKET": str(self.run / "ipc")},
            )
        deadline = time.monotonic() + _START_S
        table = Path(f"/proc/{self._process.pid}/net/tcp")
        while not listens(table, address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"{words[0]} does not listen: {' '.join(said[-1:])}")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def listens(table: Path, address: str) -> bool:
    """Whether a socket does at that address, and PORT. ``table``: /proc/PID/net/tcp, which is that
    of another network for a moment."""
    local = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{PORT:04X}"
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    return any(row[1] == local and row[3] == _LISTENS for row in rows)


class Tgtd(_Program):
    """``prefix``: the directory in which `scripts/peers tgt` has unpacked it."""

    lun = 1  # 0 is its controller

    def __init__(self, disks: Mapping[str, Path], _initiators: Sequence[str], prefix: Path) -> None:
        super().__init__("tgtd")
        self._disks = disks
        self._programs = prefix / "usr/sbin"

    def start(self, address: str) -> None:
        self._run(address, self._programs / "tgtd", "-f", "--iscsi", f"portal={address}:{PORT}")
        for number, (name, disk) in enumerate(self._disks.items(), 1):
            self._admin(number, "new", "target", "-T", iqn(name))
            more = ("--bstype", "rdwr", "--bsoflags", "direct")
            self._admin(number, "new", "logicalunit", "--lun", self.lun, "-b", disk, *more)
            # Only now initiators find it: a target without the LUN would be another one to them.
            self._admin(number, "bind", "target", "-I", "ALL")

    def _admin(self, number: int, operation: str, mode: str, *more: object) -> None:
        words = ("--lld", "iscsi", "--op", operation, "--mode", mode, "--tid", number, *more)
        run("env", f"TGT_IPC_SOCKET={self.run / 'ipc'}", self._programs / "tgtadm", *words)


class Istgt(_Program):
    """``prefix``: the directory in which `scripts/peers istgt` has unpacked it."""

    lun = 0

    def __init__(self, disks: Mapping[str, Path], _initiators: Sequence[str], prefix: Path) -> None:
        super().__init__("istgt")
        self._disks = disks
        self._program = prefix / "usr/sbin/istgt"

    def start(self, address: str) -> None:
        configuration = self.run / "istgt.conf"
        configuration.write_text(istgt_configuration(self._disks, address, self.run))
        self._run(address, self._program, "-D", "-c", configuration)


def istgt_configuration(disks: Mapping[str, Path], address: str, place: Path) -> str:
    """Beside what its own example has. ``place``: for its files."""
    text = f"""\
[Global]
  NodeBase "{BASE}"
  PidFile {place}/istgt.pid
  AuthFile {place}/auth.conf
  MediaDirectory {place}
  Timeout 30
  NopInInterval 20
  DiscoveryAuthMethod None
  MaxSessions 16
  MaxConnections 4
  MaxR2T 32
  MaxOutstandingR2T 16
  DefaultTime2Wait 2
  DefaultTime2Retain 60
  FirstBurstLength 262144
  MaxBurstLength 1048576
  MaxRecvDataSegmentLength 262144
  InitialR2T Yes
  ImmediateData Yes
  DataPDUInOrder Yes
  DataSequenceInOrder Yes
  ErrorRecoveryLevel 0
[UnitControl]
  AuthMethod None
[PortalGroup1]
  Portal P1 {address}:{PORT}
[InitiatorGroup1]
  InitiatorName "ALL"
  Netmask {address}/24
"""
    for number, (name, disk) in enumerate(disks.items(), 1):
        text += f"""\
[LogicalUnit{number}]
  TargetName {name}
  Mapping PortalGroup1 InitiatorGroup1
  AuthMethod None
  UseDigest Auto
  UnitType Disk
  UnitInquiry "istgt" "{name}" "0123" "A{number}"
  LUN0 Storage {disk} Auto
"""
    return text


SERVICES: dict[str, type[Lio] | type[Tgtd] | type[Istgt]] = {
    "LIO": Lio,
    "tgtd": Tgtd,
    "istgt": Istgt,
}
