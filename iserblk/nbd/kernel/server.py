"""Starts the server of a device in the background, ours or nbdkit, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

from iserblk.credentials import handed_on
from iserblk.errors import IserblkError
from iserblk.loop.blocking import readable, sleep
from iserblk.loop.clock import monotonic
from iserblk.metrics.address import default_option
from iserblk.nbd.kernel.orders import (
    LISTEN,
    PROGRAM,
    READY,
    TAKE,
    TAKE_FIRST,
    NoHandOver,
    error_of,
    words_of,
)
from iserblk.nbd.kernel.programs import (
    PLUGIN,
    last_line,
    nbdkit_environment,
    nbdkit_program,
    signals_held,
)
from iserblk.nbd.kernel.state import Home, write_pid
from iserblk.pidfile import read_pid

# Of nbdkit, for each connection. The kernel spreads requests over the connections by processor.
_THREADS = 16
_START_S = 60.0
_SETTLE_S = 10.0  # for a successor, to listen where the old server has listened
_OWN = (sys.executable, "-P", "-m", PROGRAM)


def start(
    home: Home, urls: Sequence[str], options: Mapping[str, str], *, by_nbdkit: bool = False
) -> None:
    """Start the server; return when it accepts connections at ``home.socket``. It logs to syslog.

    The server ends when its last client disconnects, so do not connect for a test before the real
    client. It gets secrets through descriptors that it inherits. It serves metrics unless
    ``options`` say otherwise. Raises IserblkError; a server may still be starting then.
    """
    for left in (home.server_pid, home.socket):  # of a server that was killed
        left.unlink(missing_ok=True)
    metrics = default_option(str(home.device.path), home.device.directories.run)
    with handed_on(urls, {**metrics, **options}) as handed:
        words = words_of(handed.urls, handed.options)
        if by_nbdkit:
            _start_nbdkit(home, words, handed.descriptors)
        else:
            with signals_held():
                process, pipe = _run_own(home, LISTEN, words, handed.descriptors)
                write_pid(home.server_pid, process.pid)
            with pipe:
                _wait_until_ready(process, pipe.fileno())


@contextlib.contextmanager
def succeeded(
    home: Home, urls: Sequence[str], options: Mapping[str, str], *, take_first: bool
) -> Iterator[None]:
    """Start a successor of the server that runs, which must be ours. The block begins when the
    successor serves the kernel: it is to end, or kill, the old server. At the end of the block the
    successor has taken its place.

    ``take_first``: the LUN can be opened only when the old server has ended. Raises NoHandOver when
    the old server keeps its connections, or there is no server any more; another IserblkError when
    the successor cannot serve: the old server goes on then. Signals wait until it is clear which of
    them serves.
    """
    pid = read_pid(home.server_pid)
    metrics = default_option(str(home.device.path), home.device.directories.run, taken=True)
    with handed_on(urls, {**metrics, **options}) as handed, contextlib.ExitStack() as stack:
        words = words_of(handed.urls, handed.options)
        with signals_held():
            # While there is none, ``Server`` finds both: until it is written, either may serve.
            home.server_pid.unlink(missing_ok=True)
            how = TAKE_FIRST if take_first else TAKE
            process, pipe = _run_own(home, how, words, handed.descriptors)
            stack.enter_context(pipe)
            try:
                _wait_until_ready(process, pipe.fileno())
                pid = process.pid
            finally:
                if pid:
                    write_pid(home.server_pid, pid)
        yield
        _read(pipe.fileno(), monotonic() + _SETTLE_S)


def _run_own(
    home: Home, how: str, words: Sequence[str], descriptors: Sequence[int]
) -> tuple[subprocess.Popen[bytes], FileIO]:
    """The process, and what it reports."""
    read_end, write_end = os.pipe()
    pipe = FileIO(read_end)
    try:
        process = subprocess.Popen(
            [*_OWN, str(home.socket), str(write_end), how, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=[write_end, *descriptors],
        )
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(write_end)
    return process, pipe


def _wait_until_ready(process: subprocess.Popen[bytes], pipe: int) -> None:
    """Raises IserblkError; the process has ended then."""
    said = _read(pipe, monotonic() + _START_S)
    if said == READY:
        process.returncode = 0  # it outlives this process; else Python warns of that
        return
    status = process.poll()
    process.kill()
    process.wait()
    if said:
        raise error_of(said)
    if status is None:
        raise NoHandOver(f"the server is not ready after {_START_S:g} s; syslog may say why")
    raise IserblkError(f"the server ended unexpectedly (status {status}); syslog may say why")


def _read(pipe: int, deadline: float) -> bytes:
    """What is written to ``pipe`` until its end, or until ``deadline``; or READY."""
    said = b""
    while readable(pipe, deadline):
        data = os.read(pipe, 1 << 16)
        if not data:
            break
        said += data
        if said == READY:
            break
    return said


def _start_nbdkit(home: Home, words: Sequence[str], descriptors: Sequence[int]) -> None:
    program = [nbdkit_program(), "--unix", str(home.socket), "--pidfile", str(home.server_pid)]
    program += ["--threads", str(_THREADS), "--filter=exitlast", "python", str(PLUGIN)]
    _run([*program, *words], {"ISERBLK_OWED": str(home.owed)}, descriptors)
    deadline = monotonic() + _START_S
    while not read_pid(home.server_pid):  # in the background nbdkit logs in again: it takes time
        if monotonic() > deadline:
            raise IserblkError(f"nbdkit is not ready after {_START_S:g} s; syslog may say why")
        sleep(0.01)


def _run(words: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]) -> None:
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
                env={**nbdkit_environment(), **variables},
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
    """The server of a device, if it is running. pidfds refer to its processes, so a signal can hit
    no other process.

    While nbdkit starts, it may be several processes. Use this class as a context manager.
    """

    def __init__(self, home: Home) -> None:
        pid = read_pid(home.server_pid)
        # nbdkit writes its pid file late, and an attach may have been killed before that.
        self._processes = _Processes([pid] if pid else _everyone(home), home.socket)
        self.ended = self._processes.ended

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self._processes.close()

    def end(self, within_s: float) -> bool:
        """Ask it to flush, log out and end; kill it if it has not ended after ``within_s``.
        True: it ended by itself."""
        if self.ended():
            return True
        self._processes.send(signal.SIGTERM)
        if self.ended(within_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        """Kill it. The kernel then fails the requests that are under way."""
        self._processes.send(signal.SIGKILL)
        self.ended(10.0)


class _Processes:
    """Those processes of ``pids`` that are servers, and have ``socket`` on their command line."""

    def __init__(self, pids: Iterable[int], socket: Path) -> None:
        self._fds: list[int] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(pid)
                words = _command_line(pid)
                if os.fsencode(socket) in words and _serves(words):
                    self._fds.append(fd)
                else:
                    os.close(fd)

    def ended(self, within_s: float = 0.0) -> bool:
        """Whether all processes have ended. Waits up to ``within_s`` for that."""
        deadline = monotonic() + within_s
        return all(readable(fd, deadline) for fd in self._fds)

    def send(self, number: int) -> None:
        for fd in self._fds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _serves(words: Sequence[bytes]) -> bool:
    """Whether a command line is that of a server."""
    return b"nbdkit" in words[0] or PROGRAM.encode() in words


def _everyone(home: Home) -> list[int]:
    if not home.exists():
        return []
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _command_line(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]
