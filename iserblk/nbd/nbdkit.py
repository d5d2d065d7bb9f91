"""Runs nbdkit with the plugin of this project, as a child in the foreground.

The listening socket is handed over as systemd does it (sd_listen_fds(3)). So port 0 is possible,
and errors of the address have our own texts. nbdkit ends when this process ends, even if this
process is killed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from iserblk.credentials import handed_on
from iserblk.disk.blocking import open_disks
from iserblk.errors import BadArgument, IserblkError
from iserblk.nbd.kernel.programs import PLUGIN, last_line, nbdkit_environment, nbdkit_program

log = logging.getLogger(__name__)

# LISTEN_PID must be nbdkit's pid: the shell has that pid already, because exec keeps it.
_HAND_OVER = 'exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 60.0


def check(urls: Sequence[str], options: Mapping[str, str], filters: Sequence[str] = ()) -> None:
    """Find errors of the programs, the filters and the URLs, because nbdkit has one exit status for
    all errors: logs in and out. Raises IserblkErrors."""
    program = nbdkit_program()
    if filters:
        _check_filters(program, filters)
    open_disks(urls, options).close()


def _check_filters(program: str, filters: Sequence[str]) -> None:
    said = subprocess.run(
        [program, "--dump-config"], stdout=subprocess.PIPE, check=False, env=nbdkit_environment()
    ).stdout.decode(errors="replace")
    match = re.search("^filterdir=(.+)$", said, re.MULTILINE)
    if match is None:
        return
    for name in filters:
        # nbdkit(1): with one of these characters it is a file; nbdkit finds it.
        if "/" not in name and "." not in name:
            path = Path(match[1], f"nbdkit-{name}-filter.so")
            if not path.exists():
                raise BadArgument(
                    f"--filter {name[:60]}: nbdkit has no such filter; those of this machine are in"
                    f" {path.parent}"
                )


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

    scratch = tempfile.TemporaryDirectory(prefix="iserblk-")
    with scratch:
        pid_file = Path(scratch.name) / "pid"
        child = subprocess.Popen(
            ["/bin/sh", "-c", _HAND_OVER, "sh", *program, "--pidfile", str(pid_file), *plugin],
            stdin=sock.fileno(),
            env=nbdkit_environment(),
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
        )
        assert child.stderr is not None
        said = _Said(child.stderr)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        try:
            started = _wait_for(pid_file, child)
            if started:
                scratch.cleanup()  # so that SIGKILL does not leave it
                said.pass_on()
                ready()
            child.wait()
        finally:
            _end(child)
            said.end()
    if told:
        return 128 + told
    if child.returncode and not started:
        for line in said.kept:
            log.info("nbdkit: %s", line)
        words = last_line("\n".join(said.kept)).removeprefix("nbdkit: error: ")
        raise IserblkError(f"nbdkit does not start: {words}")
    if child.returncode:
        raise IserblkError(f"nbdkit ended with status {child.returncode}")
    return 0


class _Said:
    """What nbdkit writes to stderr. It is kept until ``pass_on``, so that an error of its start is
    one line of ours; from then on it goes to our stderr as it comes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.kept: list[str] = []
        self._stream = stream
        self._lock = threading.Lock()
        self._passes = False
        self._thread = threading.Thread(target=self._read, name="nbdkit-stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._lock:
                self.kept.append(line.decode(errors="replace").rstrip("\n"))
                if self._passes:
                    self._write()

    def _write(self) -> None:
        lines, self.kept = self.kept, []
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()

    def pass_on(self) -> None:
        with self._lock:
            self._passes = True
            if self.kept:
                self._write()

    def end(self) -> None:
        """nbdkit has ended: all that it wrote is here, or was passed on."""
        self._thread.join()
        self._stream.close()


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
