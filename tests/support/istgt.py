"""istgt in the foreground, which may be killed and comes back. Needs ``scripts/peers istgt``."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.target import END_S, ROOT
from tests.support.until import until_blocking

BASE = "iqn.2026-11.example"
# Its secrets must have 12 to 16 characters.
OWN, THEIRS = ("host", "hush-hush-hush"), ("disk", "not-a-word-more")
# Targets by the authentication that they ask for, in istgt's words.
ASKS = {"none": "None", "one-way": "CHAP", "mutual": "CHAP Mutual"}

_CONFIGURATION = """\
[Global]
  NodeBase "{base}"
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
  DefaultTime2Wait 0
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
  Portal P1 127.0.0.1:{port}
[InitiatorGroup1]
  InitiatorName "ALL"
  Netmask 127.0.0.0/8
"""
_UNIT = """\
[LogicalUnit{number}]
  TargetName {asks}
  Mapping PortalGroup1 InitiatorGroup1
  AuthMethod {method}
  AuthGroup AuthGroup1
  UseDigest Auto
  UnitType Disk
  UnitInquiry "istgt" "{asks}" "0123" "S{number}"
  BlockLength {block}
  LUN0 Storage {disk} Auto
"""


def program() -> Path:
    """The path of istgt; skips the test where there is none, and says why."""
    found = subprocess.run(
        [ROOT / "scripts/peers", "istgt"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires istgt: {found.stderr.strip().splitlines()[-1]}")
    return Path(found.stdout.strip()) / "usr/sbin/istgt"


class Istgt:
    """istgt with a disk of ``size`` bytes for each target of ASKS. ``urls``: of LUN 0, by the
    authentication; ``url``: of the target without authentication. ``names``: of all targets.
    ``address``: where it listens. What has been written is in the file ``disk()`` at once, in the
    kernel's memory, and outlives it. ``disks``: devices in the place of such files, by the
    authentication. ``block``: bytes."""

    def __init__(
        self,
        program: Path,
        place: Path,
        size: int,
        disks: Mapping[str, Path] | None = None,
        block: int = 512,
    ) -> None:
        self._program = program
        self._place = place
        self._disks = disks or {}
        self._port = free_port()
        text = _CONFIGURATION.format(base=BASE, place=place, port=self._port)
        for number, (asks, method) in enumerate(ASKS.items(), 1):
            if asks not in self._disks:
                with self.disk(asks).open("wb") as file:
                    file.truncate(size)
            text += _UNIT.format(
                number=number, asks=asks, method=method, disk=self.disk(asks), block=block
            )
        (place / "istgt.conf").write_text(text)
        words = " ".join(f'"{word}"' for word in (*OWN, *THEIRS))
        (place / "auth.conf").write_text(f"[AuthGroup1]\n  Auth {words}\n")
        self.address = ("127.0.0.1", self._port)
        self.portal = f"127.0.0.1:{self._port}"
        self.names = [f"{BASE}:{asks}" for asks in ASKS]
        self.urls = {asks: f"iscsi://{self.portal}/{BASE}:{asks}/0" for asks in ASKS}
        self.url = self.urls["none"]
        self.log = place / "istgt.log"
        said = subprocess.run([program, "-V"], capture_output=True, text=True, check=True)
        # "istgt version 0.4", and another line: "istgt extra version 20111008".
        self.version = "istgt " + " ".join(line.split()[-1] for line in said.stdout.splitlines())
        self.start()

    def disk(self, asks: str = "none") -> Path:
        return self._disks.get(asks, self._place / asks)

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "-D", "-c", self._place / "istgt.conf"], stdout=log, stderr=log
            )
        try:
            until_blocking(self._listens)
        except BaseException:
            self.kill()
            raise

    def _listens(self) -> bool:
        self.check()
        try:
            socket.create_connection(self.address, 1).close()
        except ConnectionRefusedError:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it in order; fails if it has crashed before."""
        try:
            self.check()
            self._process.terminate()
            self._process.wait(END_S)
        finally:
            self.kill()

    def check(self) -> None:
        assert self._process.poll() is None, self.log.read_text(errors="replace")
