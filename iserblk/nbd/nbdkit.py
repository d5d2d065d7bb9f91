"""Runs nbdkit with the plugin of this project, as a child in the foreground.

The listening socket is handed over as systemd does it (sd_listen_fds(3)). So port 0 is possible,
and errors of the address have our own texts. nbdkit ends when this process ends, even if this
process is killed.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from iserblk.credentials import handed_on
from iserblk.disk.blocking import open_disks
from iserblk.errors import IserblkError
from iserblk.nbd.kernel.programs import PLUGIN, nbdkit_environment, nbdkit_program

# LISTEN_PID must be nbdkit's pid: the shell has that pid already, because exec keeps it.
_HAND_OVER = 'exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 60.0


def check(urls: Sequence[str], options: Mapping[str, str]) -> None:
    """Find errors of the programs and the URLs, because nbdkit has one exit status for all errors:
    logs in and out. Raises IserblkErrors."""
    nbdkit_program()
    open_disks(urls, options).close()


def serve(
    sock: socket.socket,
    urls: Sequence[str],
    options: Mapping[str, str],
    words: Sequence[str],
    ready: Callable[[], None],
) -> int:
    """Run nbdkit with the options ``words`` until it ends, by itself or by a signal; returns the
    exit status. ``ready`` is called once clients can connect. Raises IserblkError if nbdkit
    fails."""
    with handed_on(urls, options) as handed:
        plugin = ["python", str(PLUGIN), *(f"uri={url}" for url in handed.urls)]
        plugin += [f"{name}={value}" for name, value in handed.options.items()]
        program = [nbdkit_program(), "--exit-with-parent", *words]
        return _run(sock, program, plugin, handed.descriptors, ready)


def _run(
    sock: socket.socket,
    program: list[str],
    plugin: list[str],
    descriptors: list[int],
    ready: Callable[[], None],
) -> int:
    told = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        told = number
        child.terminate()

    with tempfile.TemporaryDirectory(prefix="iserblk-") as scratch:
        pid_file = Path(scratch) / "pid"
        child = subprocess.Popen(
            ["/bin/sh", "-c", _HAND_OVER, "sh", *program, "--pidfile", str(pid_file), *plugin],
            stdin=sock.fileno(),
            env=nbdkit_environment(),
            pass_fds=descriptors,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        try:
            if _wait_for(pid_file, child):
                ready()
            child.wait()
        finally:
            _end(child)
    if told:
        return 128 + told
    if child.returncode:
        raise IserblkError(f"nbdkit ended with status {child.returncode}")
    return 0


def _wait_for(pid_file: Path, child: subprocess.Popen[bytes]) -> bool:
    """True once nbdkit takes connections, False when it ended before that. Raises IserblkError
    after ``_START_TIMEOUT_S``."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while child.poll() is None:
        if pid_file.exists():
            return True
        if time.monotonic() > deadline:
            raise IserblkError(f"nbdkit is not ready after {_START_TIMEOUT_S:g} s")
        time.sleep(0.01)
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End nbdkit if it still runs: it flushes first; after ``_END_TIMEOUT_S`` it is killed."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
