"""Commands that serve, under timeout(1) and nohup(1), and in a terminal that is closed: everything
is flushed, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import iserblk
from tests.cli.commands import COMMAND, environment
from tests.contract.nbd_servers import libnbd
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need
from tests.support.target import END_S, TargetProcess, running_target
from tests.support.until import until_blocking

nbd = libnbd()
SIZE = 1 << 20
DATA = b"not flushed by its writer"


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    """Its file has what was flushed, and nothing else."""
    spec = f"{tmp_path}/lun:size={SIZE}:volatile-cache=1M"
    with running_target([spec], tmp_path / "target.log") as running:
        yield running


def flushed(tmp_path: Path) -> bool:
    return (tmp_path / "lun").read_bytes()[: len(DATA)] == DATA


class ByNbd:
    """``iserblk nbd``. ``status``: how it ends after a signal."""

    def __init__(self, *words: str) -> None:
        self._words = words

    def words(self, target: TargetProcess, place: Path) -> list[str]:
        if self._words:
            need("nbdkit")
        return ["nbd", f"{target.url}/0", "--socket", str(place / "s"), *self._words]

    @contextmanager
    def writing(self, _ready: str, place: Path) -> Iterator[None]:
        """DATA has been written, and not flushed."""
        client = nbd.NBD()
        client.connect_unix(str(place / "s"))
        client.pwrite(DATA, 0)
        if self._words:  # nbdkit 1.32 ends when its clients have gone, and not before
            client.shutdown()
        yield

    def status(self, number: int) -> int:
        return 128 + number

    def check(self, place: Path) -> None:
        assert not (place / "s").exists()


class ByMount(ByNbd):
    def words(self, target: TargetProcess, place: Path) -> list[str]:
        need_fuse()
        (place / "files").mkdir()
        return ["mount", "-f", f"{target.url}/0", str(place / "files")]

    @contextmanager
    def writing(self, _ready: str, place: Path) -> Iterator[None]:
        with open(place / "files" / "lun0", "r+b", buffering=0) as file:
            file.write(DATA)
        yield

    def status(self, _number: int) -> int:
        return 0

    def check(self, place: Path) -> None:
        assert not os.path.ismount(place / "files")


class ByTarget(ByNbd):
    """A gateway: what is behind it is flushed."""

    def words(self, target: TargetProcess, _place: Path) -> list[str]:
        iqn = "iqn.2026-11.example:gateway"
        return ["target", "--listen", "127.0.0.1:0", "--iqn", iqn, "--lun", f"{target.url}/0"]

    @contextmanager
    def writing(self, ready: str, _place: Path) -> Iterator[None]:
        with iserblk.open_disks([f"{ready}/0"]) as disks:
            disks.disks[disks.default].write(memoryview(DATA), 0)
        yield

    def check(self, _place: Path) -> None:
        pass


WAYS = {
    "nbd": ByNbd(),
    "nbd --nbdkit": ByNbd("--nbdkit"),
    "mount -f": ByMount(),
    "target": ByTarget(),
}
EACH = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def ready_line(read: Callable[[], bytes]) -> str:
    """What is behind ``ready`` in the first line."""
    said = b""
    while not said.endswith(b"\n"):
        more = read()
        assert more, said
        said += more
    word, _, rest = said.decode().strip().partition(" ")
    assert word == "ready", said
    return rest


@EACH
def test_timeout_sends_its_signal_twice(way: ByNbd, target: TargetProcess, tmp_path: Path) -> None:
    """timeout(1) sends it to the command, and a moment later to its group."""
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["timeout", str(END_S), *COMMAND, *way.words(target, tmp_path)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(),
        )
    try:
        assert process.stdout is not None
        out = process.stdout.fileno()
        ready = ready_line(lambda: os.read(out, 1))
        with way.writing(ready, tmp_path):
            assert not flushed(tmp_path)
            process.terminate()
            assert process.wait(END_S) == way.status(signal.SIGTERM)
    finally:
        process.kill()
        process.communicate()
    assert flushed(tmp_path)
    assert log.read_text() == ""
    way.check(tmp_path)


class Terminal:
    """A command in a terminal of its own, which ``close`` closes."""

    def __init__(self, words: list[str], directory: Path) -> None:
        self._ours, theirs = os.openpty()
        try:
            self.process = subprocess.Popen(
                ["setsid", "--ctty", *words],
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                cwd=directory,
                env=environment(),
            )
        finally:
            os.close(theirs)

    def read(self) -> bytes:
        return os.read(self._ours, 1)

    def close(self) -> None:
        """The kernel has sent SIGHUP when this returns."""
        os.close(self._ours)
        self._ours = -1

    def end(self) -> None:
        if self._ours >= 0:
            self.close()
        self.process.kill()
        self.process.wait()


@EACH
def test_a_terminal_that_is_closed(way: ByNbd, target: TargetProcess, tmp_path: Path) -> None:
    # nohup, perhaps around all tests, has the signal ignored.
    command = ["env", "--default-signal=HUP", *COMMAND, *way.words(target, tmp_path)]
    terminal = Terminal(command, tmp_path)
    try:
        with way.writing(ready_line(terminal.read), tmp_path):
            assert not flushed(tmp_path)
            terminal.close()
            assert terminal.process.wait(END_S) == way.status(signal.SIGHUP)
    finally:
        terminal.end()
    assert flushed(tmp_path)
    way.check(tmp_path)


@EACH
def test_nohup(way: ByNbd, target: TargetProcess, tmp_path: Path) -> None:
    """It goes on when the terminal is closed."""
    out = tmp_path / "nohup.out"
    command = ["nohup", *COMMAND, *way.words(target, tmp_path)]
    terminal = Terminal(command, tmp_path)
    try:
        until_blocking(lambda: out.exists() and b"ready " in out.read_bytes())
        (ready,) = (line for line in out.read_text().splitlines() if line.startswith("ready "))
        terminal.close()
        with way.writing(ready.removeprefix("ready "), tmp_path):
            assert not flushed(tmp_path)
            terminal.process.terminate()
            assert terminal.process.wait(END_S) == way.status(signal.SIGTERM)
    finally:
        terminal.end()
    assert flushed(tmp_path)
    way.check(tmp_path)
