"""nbdkit: starting it in the background, and seeing it end."""

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

# Of each of the connections; the kernel spreads requests over them by processor.
_THREADS = 16
_START_S = 60.0


def start(home: Home, urls: Sequence[str], options: Mapping[str, str]) -> None:
    """Returns when nbdkit takes connections at ``home.socket``. It logs to syslog.

    It ends with its last client; so the first must be the one that stays. Secrets get to it
    through descriptors that it inherits. Metrics are served unless ``options`` say otherwise.
    Raises IserblkError.
    """
    metrics = default_option(str(home.device.path), home.device.places.run)
    with handed_on(urls, {**metrics, **options}) as handed:
        words = [nbdkit_program(), "--unix", str(home.socket), "--pidfile", str(home.nbdkit_pid)]
        words += ["--threads", str(_THREADS), "--filter=exitlast", "python", str(PLUGIN)]
        words += [f"uri={url}" for url in handed.urls]
        words += [f"{name}={value}" for name, value in handed.options.items()]
        _run(words, handed.descriptors)
    deadline = time.monotonic() + _START_S
    while not read_pid(home.nbdkit_pid):  # it logs in again, once it has gone to the background
        if time.monotonic() > deadline:
            raise IserblkError(f"nbdkit is not ready after {_START_S:g} s; syslog may say why")
        time.sleep(0.01)


def _run(words: Sequence[str], descriptors: Sequence[int]) -> None:
    """Until it has gone to the background."""
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
        if process is not None:  # what of it has gone to the background is found by its socket
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    if process.returncode:
        raise IserblkError(f"nbdkit did not start: {last_line(said)}")


class Server:
    """The nbdkit of a device, if it lives; a descriptor holds it, so no other process is meant.

    While it starts these may be several processes. Use as a context manager.
    """

    def __init__(self, home: Home) -> None:
        pid = read_pid(home.nbdkit_pid)
        # Its pid file is written late in its start, and an attach may have been killed before.
        self._processes = _Processes([pid] if pid else _everyone(home), home.socket, nbdkit=True)
        self.ended = self._processes.ended

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._processes.close()

    def end(self, within_s: float) -> bool:
        """Ask it to flush, log out and end; kill it when it has not after ``within_s``. True when
        it ended by itself."""
        if self.ended():
            return True
        self._processes.send(signal.SIGTERM)
        if self.ended(within_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """The kernel then fails what it has under way: nothing waits for it any more."""
        self._processes.send(signal.SIGKILL)
        self.ended(10.0)


def let_clients_finish(home: Home, within_s: float) -> None:
    """An attach that was killed may have left its nbd-client at work: whether the device is
    connected is known when that has ended."""
    clients = _Processes(_everyone(home), home.socket, nbdkit=False)
    try:
        if not clients.ended(within_s):
            clients.send(signal.SIGKILL)
            clients.ended(within_s)
    finally:
        clients.close()


class _Processes:
    """Those of ``pids`` that name ``socket`` on their command lines: nbdkit, or its clients."""

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
        """All of them. Waits up to ``within_s``."""
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
