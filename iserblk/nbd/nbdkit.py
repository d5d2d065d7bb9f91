"""Runs nbdkit with the plugin of this project, as a child in the foreground.

The listening socket is handed over as systemd does it (sd_listen_fds(3)). So port 0 is possible,
and errors of the address have our own texts. nbdkit ends when this process ends, even if this
process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from iserblk import errors
from iserblk.credentials import FIRST_DESCRIPTOR, handed_on
from iserblk.disk.blocking import open_disks
from iserblk.endings import Endings, ending_signals
from iserblk.errors import BadArgument, IserblkError, RemoteProtocolError, TransportError
from iserblk.loop.blocking import readable
from iserblk.loop.clock import monotonic
from iserblk.nbd.kernel.programs import PLUGIN, last_line, nbdkit_environment, nbdkit_program

log = logging.getLogger(__name__)

# LISTEN_PID must be nbdkit's pid: the shell has that pid already, because exec keeps it.
_HAND_OVER = 'exec 3<&0 </dev/null >&2; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
# The plugin finds here the number of a descriptor, and writes a line to it: "ready", or the name of
# an error's class in iserblk.errors and its text.
_READY = "ISERBLK_READY_FD"
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
    *,
    logs: bool = False,
) -> int:
    """Run nbdkit with the options ``words`` until it ends, by itself or by a signal; returns the
    exit status: 1 where data may be lost, which was said then. ``ready`` is called once the plugin
    has logged in, and clients are served. ``logs``: what nbdkit says goes to our log, and not as it
    is to stderr. Raises IserblkError if nbdkit fails, or the plugin cannot log in."""
    with handed_on(urls, options) as handed:
        plugin = ["python", str(PLUGIN), *(f"uri={url}" for url in handed.urls)]
        plugin += [f"{name}={value}" for name, value in handed.options.items()]
        program = [nbdkit_program(), "--exit-with-parent", *words]
        tell = _log if logs else _write
        return _run(sock, program, plugin, handed.descriptors, ready, tell)


def _run(
    sock: socket.socket,
    program: list[str],
    plugin: list[str],
    descriptors: list[int],
    ready: Callable[[], None],
    tell: Callable[[list[str]], None],
) -> int:
    def end(_number: int) -> None:
        if not told.impatient:
            child.terminate()
            return
        log.error("told twice to end: not waiting for the target; what was written since the last"
                  " flush may be lost")  # fmt: skip
        child.kill()

    told = Endings(ending_signals(), end)
    heard, tells = _pipe()
    with heard:
        with tells:
            child = subprocess.Popen(
                ["/bin/sh", "-c", _HAND_OVER, "sh", *program, *plugin],
                stdin=sock.fileno(),
                env={**nbdkit_environment(), _READY: str(tells.fileno())},
                stderr=subprocess.PIPE,
                pass_fds=[*descriptors, tells.fileno()],
                # Of a terminal it hears nothing itself: it would end at SIGHUP, ignored or not.
                start_new_session=True,
            )
        assert child.stderr is not None
        said = _Said(child.stderr, tell)
        told.listen()
        try:
            started = _wait_for(heard, child)
            if started:
                said.pass_on()
                ready()
            child.wait()
        finally:
            _end(child)
            said.end()
        lost = started and b"lost" in heard.read()
    if lost or told.impatient:
        return IserblkError.exit_status  # the plugin, or ``end``, has said what may be lost
    if told.first:
        return 128 + told.first
    if child.returncode and not started:
        for line in said.kept:
            log.info("nbdkit: %s", line)
        # Behind its error nbdkit may say where its options are described.
        errors = [line for line in said.kept if line.startswith("nbdkit: error: ")]
        words = last_line("\n".join(errors or said.kept)).removeprefix("nbdkit: error: ")
        raise IserblkError(f"nbdkit does not start: {words}")
    if child.returncode:
        raise IserblkError(f"nbdkit ended with status {child.returncode}")
    return 0


def _write(lines: list[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def _log(lines: list[str]) -> None:
    for line in lines:
        log.warning("%s", line)


class _Said:
    """What nbdkit writes to stderr. It is kept until ``pass_on``, so that an error of its start is
    one line of ours; from then on ``tell`` has its lines as they come."""

    def __init__(self, stream: IO[bytes], tell: Callable[[list[str]], None]) -> None:
        self.kept: list[str] = []
        self._stream = stream
        self._tell = tell
        self._lock = threading.Lock()
        self._passes = False
        self._thread = threading.Thread(target=self._read, name="nbdkit-stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._lock:
                self.kept.append(line.decode(errors="replace").rstrip("\n"))
                if self._passes:
                    self._pass()

    def _pass(self) -> None:
        lines, self.kept = self.kept, []
        self._tell(lines)

    def pass_on(self) -> None:
        with self._lock:
            self._passes = True
            if self.kept:
                self._pass()

    def end(self) -> None:
        """nbdkit has ended: all that it wrote is here, or was passed on."""
        self._thread.join()
        self._stream.close()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """One of whose ends a shell leaves alone."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        high = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    finally:
        os.close(write_end)
    return os.fdopen(read_end, "rb", 0), os.fdopen(high, "wb", 0)


def _wait_for(heard: IO[bytes], child: subprocess.Popen[bytes]) -> bool:
    """True once the plugin has logged in, and clients are served; False when nbdkit ended before
    that. Raises the plugin's error where it could not log in, and IserblkError after
    ``_START_TIMEOUT_S``."""
    deadline = monotonic() + _START_TIMEOUT_S
    said = b""
    while not said.endswith(b"\n"):
        if not readable(heard.fileno(), deadline):
            raise IserblkError(f"nbdkit is not ready after {_START_TIMEOUT_S:g} s")
        more = heard.read(1000)
        if not more:
            child.wait()
            return False
        said += more
    name, _, text = said.decode(errors="replace").strip().partition(" ")
    if name == "ready":
        return True
    kind = getattr(errors, name)
    raise (TransportError if kind is RemoteProtocolError else kind)(text)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End nbdkit if it still runs: it flushes first; after ``_END_TIMEOUT_S`` it is killed."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
