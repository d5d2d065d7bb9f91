"""A tgtd that is killed and comes back with the same LUN. Needs ``scripts/peers tgt``."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.until import until_blocking

IQN = "iqn.2026-11.example:tgtd"
_ADMIN_S = 120.0  # a virtual machine may be emulated


class MortalTgtd:
    """tgtd over Traditional iSCSI. ``programs``: the directory with tgtd and tgtadm. ``address``,
    ``port``: where it listens (afterwards ``address`` has both); ``also``: further addresses.
    ``place``: a directory for its log and its disk of ``size`` bytes. What it has answered is in
    that file, ``disk``, and outlives it; ``device`` takes its place. Its LUN has the identifiers
    that every tgtd gives."""

    def __init__(
        self,
        programs: Path,
        address: str,
        port: int,
        place: Path,
        size: int,
        iqn: str = IQN,
        also: Sequence[str] = (),
        device: str = "",
    ) -> None:
        self.url = f"iscsi://{address}:{port}/{iqn}/1"
        self._iqn = iqn
        self._programs = programs
        self.address = (address, port)
        self._also = also
        self._place = place
        # Its own control socket: the usual place may belong to another tgtd.
        self._environment = {**os.environ, "TGT_IPC_SOCKET": str(place / "ipc")}
        self.disk = Path(device or place / "tgtd-disk")
        if not device:
            with self.disk.open("wb") as file:
                file.truncate(size)
        said = subprocess.run([programs / "tgtd", "-V"], capture_output=True, text=True, check=True)
        self.version = f"tgt {said.stdout.strip()}"
        self.start()

    def start(self) -> None:
        port = self.address[1]
        portal = ",portal=".join(f"{each}:{port}" for each in (self.address[0], *self._also))
        with open(self._place / "tgtd.log", "ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "tgtd", "-f", "--iscsi", f"portal={portal}"],
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        until_blocking(self._listens)
        self._admin("new", "target", "-T", self._iqn)
        self._admin("new", "logicalunit", "--lun", "1", "-b", str(self.disk))
        # Only now initiators find it: a target without the LUN would be another one to them.
        self._admin("bind", "target", "-I", "ALL")

    def remove_lun(self) -> None:
        """Under its sessions."""
        self._admin("delete", "logicalunit", "--lun", "1")

    def add_lun(self, disk: Path, serial: str) -> None:
        """Give the number of the LUN to ``disk``."""
        self._admin("new", "logicalunit", "--lun", "1", "-b", str(disk))
        names = f"scsi_id={serial},scsi_sn={serial}"
        self._admin("update", "logicalunit", "--lun", "1", "--params", names)

    def _listens(self) -> bool:
        assert self._process.poll() is None, "tgtd has ended"
        try:
            socket.create_connection(self.address, 1).close()
        except ConnectionRefusedError:
            return False
        return True

    def _admin(self, operation: str, mode: str, *more: str) -> None:
        words = ("--lld", "iscsi", "--op", operation, "--mode", mode, "--tid", "1", *more)
        program = self._programs / "tgtadm"
        subprocess.run([program, *words], env=self._environment, check=True, timeout=_ADMIN_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
