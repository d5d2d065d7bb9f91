"""NBD servers in the foreground: nbdkit with our plugin, and our own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.target import END_S, ROOT
from tests.support.until import until_blocking

OURS = [sys.executable, "-m", "iserblk.cli", "nbd"]
PLUGIN = ROOT / "nbd_plugin" / "iserblk.py"


def need(*programs: str) -> None:
    """Skip the test unless the programs are installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (scripts/setup --tests installs them)")


@contextmanager
def running_nbdkit(
    urls: list[str], directory: Path, threads: int = 32, parameters: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yields the NBD URI of the default export; at the end nbdkit must go with status 0. Skips the
    test where there is no nbdkit."""
    need("nbdkit")
    socket = directory / "nbd.sock"
    listening = directory / "nbd.pid"  # the socket is there before nbdkit listens on it
    listening.unlink(missing_ok=True)
    log = directory / "nbdkit.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["nbdkit", "-f", "-t", str(threads), "-U", str(socket), "-P", str(listening)]
            + ["python", str(PLUGIN)]
            + [f"uri={url}" for url in urls]
            + list(parameters),
            stderr=stderr,
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            return listening.exists()

        until_blocking(listens)
        yield f"nbd+unix:///?socket={socket}"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()


@contextmanager
def running_nbd(
    by: str,
    urls: list[str],
    directory: Path,
    parameters: tuple[str, ...] = (),
    status: int = 128 + signal.SIGTERM,
) -> Iterator[str]:
    """The same by ``by``: nbdkit, or iserblk (our server), which must go with ``status``.
    ``parameters``: URL options, name=value."""
    if by == "nbdkit":
        with running_nbdkit(urls, directory, parameters=parameters) as uri:
            yield uri
        return
    words = [f"--{each}" for each in parameters]
    log = directory / "nbd.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*OURS, *urls, "--socket", str(directory / "nbd.sock"), *words],
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
        )
    assert process.stdout is not None
    try:
        word, _, uri = process.stdout.readline().decode().strip().partition(" ")
        assert word == "ready", log.read_text()
        yield uri
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    assert process.returncode == status, log.read_text()
    assert "Traceback" not in log.read_text()


def run(*words: object) -> str:
    """Run a client to its end; its stdout. Its stderr is in the failure."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words[0]}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
