"""nbdkit with our plugin, in the foreground."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.target import END_S, ROOT
from tests.support.until import until_blocking

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
    """Yields the NBD URI of the default export; at the end nbdkit must go with status 0."""
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


def run(*words: object) -> str:
    """Run a client to its end; its stdout. Its stderr is in the failure."""
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words[0]}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout
