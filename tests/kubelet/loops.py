"""``python -m tests.kubelet.loops SOCKET REGISTRY DIRECTORY``: the CSI plugin with loop devices in
place of NBD devices, for machines whose kernel has no nbd module.

The node service, its records, mkfs and mounts are those of ``iserblk csi``. LUN N is the file N in
DIRECTORY. It wants the secret that tests give the volumes. Prints ``ready`` as ``iserblk csi``.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from iserblk.csi.host import Machine
from iserblk.csi.node import Node
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.server import serve
from iserblk.csi.volumes import Records, Volume
from iserblk.nbd.kernel.device import Directories
from iserblk.url import parse_url
from tests.kubelet.node import HOSTNAME, SECRET, USER


def losetup(*words: str) -> str:
    return subprocess.check_output(["losetup", *words], text=True).strip()


def attached(directory: Path) -> dict[str, Path]:
    """The loop devices of files in ``directory``, and those."""
    lines = losetup("--list", "--noheadings", "--output", "NAME,BACK-FILE").splitlines()
    found = [line.strip().split(maxsplit=1) for line in lines if not line.endswith(" (deleted)")]
    files = {name: Path(file) for name, file in sorted(found)}
    return {name: file for name, file in files.items() if file.parent == directory}


def detach_all(directory: Path) -> None:
    for name in attached(directory):
        losetup("--detach", name)


class Loops(Machine):
    """Devices have no servers."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Directories())
        self._directory = directory

    def _file(self, volume: Volume) -> Path:
        return self._directory / f"{parse_url(volume.urls[0]).lun}"

    def free_device(self, taken: object) -> str:
        return losetup("--find")

    def attach(self, volume: Volume, secret: Path) -> bool:
        if not volume.urls[0].startswith(f"iser://{USER}@") or secret.read_text() != f"{SECRET}\n":
            raise Refused(Code.UNAUTHENTICATED, "the secret is another one")
        if not self.is_attached(volume):
            words = ["losetup", volume.device, str(self._file(volume))]
            english = {**os.environ, "LC_ALL": "C"}
            done = subprocess.run(words, env=english, capture_output=True, text=True, check=False)
            if "busy" in done.stderr:  # a program beside these tests has found it free, too
                return False
            done.check_returncode()
        return True

    def is_attached(self, volume: Volume) -> bool:
        return attached(self._directory).get(volume.device) == self._file(volume)

    def is_served(self, volume: Volume) -> bool:
        return True

    def attached_at(self, path: str) -> str:
        mounted = self.mounted(path)
        places = () if mounted is None else (mounted.source, f"/dev{mounted.root}")
        return next((each for each in attached(self._directory) if each in places), "")

    def also_attached_at(self, volume: Volume) -> list[str]:
        return []  # the tests' files are different ones

    def detach(self, path: str) -> None:
        losetup("--detach", path)

    def device_count(self) -> int:
        return 8


def main(socket: Path, registry: Path, directory: Path) -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    node = Node(HOSTNAME, Loops(directory), Records(directory / "records"))
    serve(node, socket, registry, socket, lambda: print(f"ready unix://{socket}"), stopped)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main(*map(Path, sys.argv[1:]))
