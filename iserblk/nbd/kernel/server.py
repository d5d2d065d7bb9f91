"""Starts nbdkit in the background for a device, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from iserblk.credentials import handed_on
from iserblk.errors import IserblkError
from iserblk.metrics.address import default_option
from iserblk.nbd.kernel.programs import (
    PLUGIN,
    last_line,
    nbdkit_environment,
    nbdkit_program,
    signals_held,
)
from iserblk.nbd.kernel.state import Home, read_pid

# Threads of each connection. The kernel spreads requests over the connections by processor.
_THREADS = 16
_START_S = 60.0


def start(home: Home, urls: Sequence[str], options: Mapping[str, str]) -> None:
    """Start nbdkit; return when it accepts connections at ``home.socket``. It logs to syslog.

    nbdkit ends when its last client disconnects, so do not connect for a test before the real
    client. It gets secrets through descriptors that it inherits. It serves metrics unless
    ``options`` say otherwise. Raises IserblkError; nbdkit may still be starting then.
    """
    metrics = default_option(str(home.device.path), home.device.places.run)
    with handed_on(urls, {**metrics, **options}) as handed:
        words = [nbdkit_program(), "--unix", str(home.socket), "--pidfile", str(home.nbdkit_pid)]
        words += ["--threads", str(_THREADS), "--filter=exitlast", "python", str(PLUGIN)]
        words += [f"uri={url}" for url in handed.urls]
        words += [f"{name}={value}" for name, value in handed.options.items()]
        _run(words, handed.descriptors)
    deadline = time.monotonic() + _START_S
    while not read_pid(home.nbdkit_pid):  # in the background nbdkit logs in again, which takes time
        if time.monotonic() > deadline:
            raise IserblkError(f"nbdkit is not ready after {_START_S:g} s; syslog may say why")
        time.sleep(0.01)


def _run(words: Sequence[str], descriptors: Sequence[int]) -> None:
    """Run nbdkit until it has gone to the background. Raises IserblkError."""
    process = None
    try:
        with signals_held():
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=nbdkit_environment(),
                cwd="/",
                pass_fds=descriptors,
            )
        _, said = process.communicate(timeout=_START_S)
    except subprocess.TimeoutExpired:
        raise IserblkError(f"nbdkit is not ready after {_START_S:g} s") from None
    finally:
        if process is not None:  # ``Server`` finds an nbdkit in the background by its socket
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    if process.returncode:
        raise IserblkError(f"nbdkit did not start: {last_line(said)}")


class Server:
    """The nbdkit of a device, if it is running. pidfds refer to its processes, so a signal can hit
    no other process.

    While nbdkit starts, it may be several processes. Use this class as a context manager.
    """

    def __init__(self, home: Home) -> None:
        pid = read_pid(home.nbdkit_pid)
        # nbdkit writes its pid file late, and an attach may have been killed before that.
        self._processes = _Processes([pid] if pid else _everyone(home), home.socket, nbdkit=True)
        self.ended = self._processes.ended

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._processes.close()

    def end(self, within_s: float) -> bool:
        """Ask nbdkit to flush, log out and end; kill it if it has not ended after ``within_s``.
        True: it ended by itself."""
        if self.ended():
            return True
        self._processes.send(signal.SIGTERM)
        if self.ended(within_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """Kill nbdkit. The kernel then fails the requests that are under way."""
        self._processes.send(signal.SIGKILL)
        self.ended(10.0)


def let_clients_finish(home: Home, within_s: float) -> None:
    """Wait until the nbd-client of an attach that was killed has ended; kill it after ``within_s``.
    Only then is it certain whether the device is connected."""
    clients = _Processes(_everyone(home), home.socket, nbdkit=False)
    try:
        if not clients.ended(within_s):
            clients.send(signal.SIGKILL)
            clients.ended(within_s)
    finally:
        clients.close()


class _Processes:
    """Those processes of ``pids`` that have ``socket`` on their command line: nbdkit, or with
    ``nbdkit=False`` its clients."""

    def __init__(self, pids: Iterable[int], socket: Path, *, nbdkit: bool) -> None:
        self._fds: list[int] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                words = _command_line(pid)
                if os.fsencode(socket) in words and (b"nbdkit" in words[0]) == nbdkit:
                    self._fds.append(fd)
                else:
                    os.close(fd)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether all processes have ended. Waits up to ``within_s`` for that."""
        deadline = time.monotonic() + within_s
        for fd in self._fds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        return True

    def send(self, number: int) -> None:
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _everyone(home: Home) -> list[int]:
    if not home.exists():
        return []
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]
