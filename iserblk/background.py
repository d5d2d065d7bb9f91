"""A process in the background: it has no terminal, and its log goes to syslog.

A command that serves goes there by a fork, before it starts any thread. The new process begins to
serve, on the terminal still, and then says so; its parent waits for that, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import signal
import sys

from iserblk.printable import PrintableFormatter

SYSLOG = "/dev/log"
JOURNAL = "/run/systemd/journal/socket"
READY = b"ready"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def log_to_syslog(name: str) -> None:
    """From now on, log to syslog as ``name`` instead of anywhere else; nowhere on a machine without
    syslog."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    if os.path.exists(SYSLOG):
        syslog = logging.handlers.SysLogHandler(SYSLOG, logging.handlers.SysLogHandler.LOG_DAEMON)
        syslog.setFormatter(PrintableFormatter(f"{name}[{os.getpid()}]: %(message)s"))
        root.addHandler(syslog)
    else:
        root.addHandler(logging.NullHandler())  # else Python prints warnings on stderr


def where_log_is(name: str) -> str:
    """Where the log of a process is that logs to syslog as ``name``: what to run, or why nothing
    helps."""
    if os.path.exists(JOURNAL):
        return f"journalctl -t {name}"
    if os.path.exists(SYSLOG):
        return f"the lines of {name} in this machine's syslog (/var/log/syslog, /var/log/messages)"
    return "none, as this machine has no syslog; with -f it is on the terminal"


def release_streams() -> None:
    """Replace the standard streams by /dev/null, so that their readers see the end."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)


class Parent:
    """In the new process: the process that waits for it. ``released``: it has been told that this
    process serves, and waits no more."""

    def __init__(self, pipe: int) -> None:
        self.released = False
        self._pipe = pipe

    def release(self, name: str, directory: str | None = "/") -> None:
        """This process serves now: it leaves the terminal, and logs to syslog as ``name``.
        ``directory``: where it goes; None: it stays, as relative paths mean something to it. Raises
        OSError when the parent has gone; the terminal is left all the same."""
        os.setsid()
        if directory is not None:
            os.chdir(directory)
        release_streams()
        log_to_syslog(name)
        self.released = True
        self._say(READY)

    def refuse(self, words: bytes) -> bool:
        """This process does not serve, and ``words`` say why. False: no
        process waits for it any more."""
        try:
            self._say(words)
        except OSError:
            return False
        return True

    def _say(self, words: bytes) -> None:
        """Nothing can be said after that."""
        pipe, self._pipe = self._pipe, -1
        if pipe < 0:
            raise BrokenPipeError
        try:
            os.write(pipe, words)
        finally:
            os.close(pipe)


class Child:
    """In the process that was there before: the new one. ``status``: as waitpid has it, once the
    new one has ended."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.status = 0
        self._pipe = pipe

    def said(self) -> bytes:
        """Wait until it serves (READY), or has ended: then what it said, perhaps nothing. A signal
        whose handler raises ends the new process, too; so does one that came since ``fork``."""
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
            with os.fdopen(self._pipe, "rb") as pipe:
                said = pipe.read()
            if said != READY:
                self.status = self._reap()
        except BaseException:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGTERM)
                self._reap()
            raise
        return said

    def _reap(self) -> int:
        return os.waitpid(self.pid, 0)[1]


def fork() -> Parent | Child:
    """Make the process that is to serve. To be called before any thread is started. Returns what
    the calling process has to know of the other one, in each of both. In the calling process no
    signal ends anything before ``Child.said``: else the new process would be left behind."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is left in them would be written by both
    read_end, write_end = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    pid = os.fork()
    if pid:
        os.close(write_end)
        return Child(pid, read_end)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(read_end)
    return Parent(write_end)
