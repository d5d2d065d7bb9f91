"""Servers whose iserblk is removed, or replaced by another version, while they run: what they may
need later is loaded by then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.metrics.scraping import scrape
from iserblk.nbd.kernel.orders import LISTEN, PROGRAM, READY
from tests.integration.conftest import StartTarget
from tests.support.nbdkit import need, run
from tests.support.target import END_S, IQN, ROOT, running_target
from tests.support.until import until_blocking

MIB = 1 << 20


class Copied:
    """A copy of the package, for one process that tells what it loads."""

    def __init__(self, folder: Path) -> None:
        self.place, self._bytecode = folder / "copy", folder / "bytecode"
        self._log = folder / "log"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "iserblk", self.place / "iserblk", ignore=ignored)
        for library in ROOT.glob("iserblk__mypyc*.so"):
            shutil.copy2(library, self.place)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.place),
            "PYTHONPYCACHEPREFIX": str(self._bytecode),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPROFILEIMPORTTIME": "1",
        }

    @contextmanager
    def running(
        self, words: Sequence[str], status: int, inherited: Sequence[int] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        """A module as a process, which has to end with ``status`` after SIGTERM."""
        with self._log.open("w") as stderr, subprocess.Popen(
            [sys.executable, "-m", *words],
            env=self.environment, cwd="/", pass_fds=inherited,
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        ) as process:  # fmt: skip
            try:
                yield process
                process.terminate()
                assert process.wait(END_S) == status, self._log.read_text()
            finally:
                process.kill()
        assert "Traceback" not in self._log.read_text()

    def wait_until_loaded(self, module: str) -> None:
        """By a process that writes to its standard error."""
        until_blocking(lambda: f" {module}\n" in self._log.read_text())

    def wait_until_found(self, module: str) -> None:
        """By a process that does not: its bytecode is there."""
        name = module.rpartition(".")[2]
        until_blocking(lambda: any(self._bytecode.rglob(f"{name}.*.pyc")))

    def remove(self) -> None:
        shutil.rmtree(self.place)
        shutil.rmtree(self._bytecode)


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    return Copied(tmp_path)


def test_nbd_goes_on_without_its_files(copied: Copied, tmp_path: Path) -> None:
    """With new clients, a target that comes back, metrics, and in its end."""
    need("nbdcopy")
    source, back, metrics = tmp_path / "source", tmp_path / "back", tmp_path / "metrics"
    source.write_bytes(os.urandom(MIB))
    spec, log = [f"{tmp_path}/lun:size=1M"], tmp_path / "target.log"
    with running_target(spec, log) as target:
        listen, words = target.listen, ["nbd", f"{target.url}/0", f"--metrics={metrics}"]
        words += ["--socket", f"{tmp_path}/socket"]
        with copied.running(["iserblk.cli", *words], 128 + signal.SIGTERM) as process:
            assert process.stdout is not None
            ready, uri = process.stdout.readline().split()
            assert ready == "ready"
            copied.wait_until_loaded("iserblk.metrics.exposition")
            copied.remove()
            run("nbdcopy", "--flush", source, uri)
            target.stop()
            with running_target(spec, log, listen, IQN):
                run("nbdcopy", uri, back)
                (lun,) = scrape(metrics).luns
            assert back.read_bytes() == source.read_bytes()
            assert lun.reconnects == 1


def test_the_server_of_a_device_can_speak_to_the_kernel_without_its_files(
    copied: Copied, start_target: StartTarget, tmp_path: Path
) -> None:
    """It will have to when the LUN grows."""
    url = f"uri={start_target('lun:size=1M').url}/0"
    read_end, write_end = os.pipe()
    words = [PROGRAM, f"{tmp_path}/socket", str(write_end), LISTEN, url, "metrics=off"]
    with os.fdopen(read_end, "rb") as pipe, copied.running(words, 0, [write_end]):
        os.close(write_end)
        assert pipe.read() == READY
        copied.wait_until_found("iserblk.nbd.kernel.netlink")
