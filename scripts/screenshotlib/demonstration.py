"""A machine with targets, NBD servers and an exporter, to take pictures of. Runs in namespaces of
its own (``within``): what it starts ends with it, and nothing else of the machine is in sight."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from screenshotlib import LeftOut

HOST = "storage-client"
_WORDS = "--mount --uts --ipc --net --pid --fork --mount-proc --kill-child"
_NAME = "iqn.2026-11.example"
ARRAY, ARCHIVE = f"{_NAME}:array", f"{_NAME}:archive"
NEAR, FAR, OLD = "10.0.0.1", "10.0.0.2", "10.0.0.3"
SRV, RUN = Path("/srv"), Path("/run")
ISERBLK = [sys.executable, "-P", "-m", "iserblk"]

# Socket → what its clients do: reads, writes in a second, bytes of each.
_LOADS = {"db": (220, 140, 8192), "mail": (60, 45, 4096), "archive": (4, 10, 131072)}


def within(arguments: Sequence[str]) -> list[str]:
    """The command that runs this program's ``arguments`` in namespaces. Raises LeftOut."""
    for program, package in (("unshare", "util-linux"), ("mount", "mount"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            raise LeftOut(f"{program} is missing: `apt-get install {package}`")
    words = ["unshare", *(["--user", "--map-root-user"] if os.geteuid() else []), *_WORDS.split()]
    tried = subprocess.run([*words, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or ["refused"])[-1]
        raise LeftOut(f"the demonstration needs namespaces: run it as root ({said})")
    return [*words, sys.executable, "-P", "-m", "screenshotlib", "--inside", *arguments]


class Demonstration:
    """What runs. Its processes end with the namespace of processes."""

    def __init__(self) -> None:
        socket.sethostname(HOST)
        # Copies of this machine's mounts would keep their servers alive when they are unmounted.
        subprocess.run(
            ["umount", "--all", "--types", "fuse.iserblk", "--lazy"],
            capture_output=True,
            check=False,
        )
        for place in (SRV, RUN):
            _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(place))
        _run("ip", "link", "set", "lo", "up")
        for address in (NEAR, FAR, OLD):
            _run("ip", "address", "add", f"{address}/24", "dev", "lo")
        self.named = SRV / "named"
        self.named.mkdir(mode=0o700)
        (RUN / "nbd").mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
            "ISERBLK_CONFIG_DIR": str(self.named),
            "LC_ALL": "C.UTF-8",
            "HOME": str(SRV),
        }
        self._archive: subprocess.Popen[str] | None = None
        self.exporter = ""  # its URL

    def start(self) -> None:
        """Start all of it. Raises LeftOut."""
        self._serve(
            "target", "--iqn", ARRAY, "--listen", f"{NEAR}:3260,1", "--listen", f"{FAR}:3260,2",
            "--lun", f"{SRV}/db.img:size=64G", "--lun", f"{SRV}/mail.img:size=16G",
        )  # fmt: skip
        self._start_archive()
        urls = [f"iser://{host}/{ARRAY}/0" for host in (NEAR, FAR)]
        self.iserblk("add", "db", *urls, "--io-timeout", "60")
        self.iserblk("add", "mail", f"iscsi://{NEAR}/{ARRAY}/1")
        self.iserblk("add", "archive", f"iser://{OLD}/{ARCHIVE}/0", "--io-timeout", "60")
        for name, numbers in _LOADS.items():
            path = RUN / "nbd" / name
            self._serve("nbd", name, "--socket", str(path))
            words = [sys.executable, "-P", "-m", "screenshotlib.load", str(path)]
            subprocess.Popen([*words, *map(str, numbers)], env=self.environment)
        said = self._serve("exporter", "--listen", "127.0.0.1:13260")
        self.exporter = said.removesuffix("metrics")

    def interrupt(self) -> None:
        """The archive's target goes away, and comes back: for pictures of events."""
        assert self._archive is not None
        self._archive.kill()
        self._archive.wait()
        time.sleep(1)
        self._start_archive()

    def iserblk(self, *words: str, statuses: Sequence[int] = (0,)) -> str:
        """Run a command to its end; its output. Raises LeftOut."""
        done = subprocess.run(
            [*ISERBLK, *words], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode not in statuses:
            raise LeftOut(f"iserblk {words[0]} has failed: {done.stderr.strip()}")
        return done.stdout

    def _start_archive(self) -> None:
        self._serve(
            "target", "--iqn", ARCHIVE, "--listen", f"{OLD}:3260",
            "--lun", f"{SRV}/archive.img:size=2T",
        )  # fmt: skip
        self._archive = self._last

    def _serve(self, *words: str) -> str:
        """Start a command that serves; what it says behind ``ready``. Raises LeftOut."""
        log = RUN / "log"
        with log.open("ab") as file:
            self._last = subprocess.Popen(
                [*ISERBLK, *words], env=self.environment, stdout=subprocess.PIPE, stderr=file,
                text=True,
            )  # fmt: skip
        assert self._last.stdout is not None
        word, _, rest = self._last.stdout.readline().strip().partition(" ")
        if word != "ready":
            raise LeftOut(f"iserblk {words[0]} has not started: {log.read_text().strip()}")
        return rest


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LeftOut(f"{words[0]} has failed: {done.stderr.strip()}")
