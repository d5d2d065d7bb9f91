"""A file with the number of the process that serves, as daemons have it: it is there, whole, as
long as the process serves.

The process holds a lock (flock(2)) on its file, which ends with the process, however that happens.
So a number that has come again to another process is not taken for the server's. Files of other
programs have no such lock: there the process has to be one that is no younger than the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from iserblk import files
from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.loop.clock import since_boot, since_epoch

_PART = ".new"  # behind the name, of the file that a process holds while it starts
_MARGIN_S = 2.0  # clocks of processes and of files


class Pidfile:
    """The file of this process at ``path``. A context: within it no other process can have that
    file; at its end the file is removed, if it is still this process's."""

    def __init__(self, path: str) -> None:
        """``path`` may be relative to the present directory. Raises BadArgument."""
        if not path:
            raise BadArgument("--pidfile: the name is empty: name a file")
        self._said = path
        self._path = Path(os.path.abspath(path))
        if not self._path.name:  # / or //
            raise BadArgument(f"--pidfile {path}: a directory: name a file")
        self._part = self._path.with_name(self._path.name + _PART)
        self._held = -1
        self._at = self._part

    def __enter__(self) -> Pidfile:
        """Raises Busy where another process has the file, and BadArgument or PermissionDenied where
        it cannot be written; nothing is left then."""
        try:
            self._hold()
            try:
                self._look()
            except BaseException:
                self._leave()
                raise
        except OSError as error:
            raise self._refusal(error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave()

    def write(self) -> None:
        """This process serves now. Raises BadArgument or PermissionDenied; there is no file
        then."""
        try:
            os.write(self._held, f"{os.getpid()}\n".encode())
            self._part.rename(self._path)
        except OSError as error:
            raise self._refusal(error) from None
        self._at = self._path

    def _hold(self) -> None:
        """Open and lock the file that this process is going to rename."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            held = os.open(self._part, flags, 0o644)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is(held, self._part):
                    os.ftruncate(held, 0)
                    self._held = held
                    return
            except BlockingIOError:
                os.close(held)
                raise Busy(
                    f"--pidfile {self._said}: another process is starting with it; name another"
                    " file"
                ) from None
            except BaseException:
                os.close(held)
                raise
            os.close(held)  # its process has just renamed or removed it: now it is in place

    def _look(self) -> None:
        """Raises Busy, or BadArgument for what is no file. What a dead process has left does no
        harm: it is replaced."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(found.st_mode):
            raise BadArgument(f"--pidfile {self._said}: exists, and is no regular file")
        pid = read_pid(self._path)
        if _is_locked(self._path) or (pid != os.getpid() and _lives(pid, found.st_mtime)):
            raise Busy(
                f"--pidfile {self._said}: process {pid} has it, and runs; end that process, or name"
                " another file"
            )

    def _leave(self) -> None:
        held, self._held = self._held, -1
        try:
            if self._is(held, self._at):
                with contextlib.suppress(OSError):
                    self._at.unlink()
        finally:
            os.close(held)

    @staticmethod
    def _is(descriptor: int, path: Path) -> bool:
        """Whether the file at ``path`` is the open one."""
        try:
            there = os.lstat(path)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(descriptor))

    def _refusal(self, error: OSError) -> IserblkError:
        kind = PermissionDenied if isinstance(error, PermissionError) else BadArgument
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.lstat(self._part).st_mode):  # the user has not named that
                return BadArgument(
                    f"--pidfile {self._said}: {self._part.name} is in the way: remove it"
                )
        return kind(f"--pidfile {self._said}: {error.strerror or error}")


def read_pid(path: Path) -> int:
    """The number in a file that any program may have written; 0: there is none (yet)."""
    try:
        return max(0, int(files.read_text(path)))
    except (OSError, ValueError):
        return 0


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def _lives(pid: int, since: float) -> bool:
    """Whether there is a process of this number that has begun by ``since``, in seconds of the time
    of day; else that of the file has ended, and its number has come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    state, ticks = fields[0], int(fields[19])  # proc(5): state, starttime
    booted = since_epoch() - since_boot()
    begun = booted + ticks / os.sysconf("SC_CLK_TCK")
    return state not in (b"Z", b"X") and begun <= since + _MARGIN_S
