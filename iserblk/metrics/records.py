"""Records of the processes of iserblk that run here: what each is, where, and which LUNs it uses.
So a process that serves no metrics is known, too, and a second writer hears of the first, without a
connection to it.

A record is a file PID.START.process in the directory of the sockets of metrics: the process id,
and when that process has started, in ticks since the machine has (proc_pid_stat(5)). The numbers
say whether it runs still, where it is seen; in another namespace of processes, or where a unit does
not see those of others (ProtectProc=), the lock says it that each process holds on its record. The
record of a process that was killed is removed by the next process of its user that looks. Every
user may read the records of root.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from iserblk.errors import RemoteProtocolError
from iserblk.metrics.address import directory, unit_directory
from iserblk.metrics.places import OTHERS_PLACES, OWN_PLACES, directories, of_others
from iserblk.metrics.process import began, this_is

log = logging.getLogger(__name__)

_SUFFIX = ".process"
_NAME = re.compile(r"([1-9][0-9]{0,9})\.([1-9][0-9]{0,19})\.process", re.ASCII)
_LONGEST = 1 << 20  # bytes of a file
# struct flock of fcntl(2): a whole file, and no process, as the lock is the descriptor's. Unlike
# flock(2) it takes the right to write to the file, which others do not have.
_LOCK = struct.Struct("hhqqi4x")


@dataclass(slots=True, frozen=True)
class RecordedLun:
    """A LUN that a process uses. ``url``: without user info and options. ``size``: bytes.
    ``writes``: the process writes to it. ``identifiers``: those of VPD page 83h."""

    url: str
    size: int
    writes: bool
    identifiers: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Record:
    """``began``: seconds since 1970. ``where``: a device, a mount point, an NBD socket, …; "" for a
    command that ends by itself."""

    pid: int
    command: str
    where: str
    began: int
    luns: tuple[RecordedLun, ...] = ()

    @property
    def words(self) -> str:
        """The process, for messages."""
        at = f" at {self.where}" if self.where else ""
        return f"process {self.pid} (iserblk {self.command}{at})"


@dataclass(slots=True, frozen=True)
class Found:
    """A record, and the user whose it is."""

    record: Record
    uid: int


class Recorded:
    """The record of this process, while the context is open. Where there is no place for it, the
    process works without."""

    def __init__(self, command: str, where: str = "") -> None:
        this_is(command)
        self.record = Record(os.getpid(), command, where, began())
        self._path: Path | None = None
        self._held = -1  # the file, open and locked

    def __enter__(self) -> Recorded:
        self._put()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._held)
            self._path, self._held = None, -1

    def use(self, luns: Sequence[RecordedLun]) -> None:
        """From now on, the process uses these LUNs."""
        self.record = replace(self.record, luns=tuple(luns))
        self._put()

    def _put(self) -> None:
        name = f"{self.record.pid}.{started(self.record.pid)}{_SUFFIX}"
        content = _content(self.record)
        for each in (directory(), unit_directory()):
            if each is None:
                continue
            try:
                each.mkdir(mode=0o755, exist_ok=True)
                held = _write(each / f".{name}", content, each / name)
            except OSError as error:
                log.info("this process has no record in %s: %s", each, error.strerror)
            else:
                before, self._path, self._held = self._held, each / name, held
                if before >= 0:
                    os.close(before)
                return


def _content(record: Record) -> bytes:
    """No more than is read: some LUNs are left out of a record with thousands of them."""
    luns = record.luns
    while len(content := json.dumps(asdict(replace(record, luns=luns))).encode()) > _LONGEST:
        luns = luns[: min(len(luns) - 1, len(luns) * _LONGEST // len(content))]
    if luns != record.luns:
        log.info("%d LUNs are left out of this process's record", len(record.luns) - len(luns))
    return content


def _write(part: Path, content: bytes, path: Path) -> int:
    """Write a record, which comes into its place whole and locked. Returns its descriptor, with the
    lock. Raises OSError; nothing is left then."""
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    held = os.open(part, flags, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.fcntl(held, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        left = memoryview(content)
        while left:
            left = left[os.write(held, left) :]
        os.fchmod(held, 0o644)  # whatever the umask is
        part.rename(path)
    except BaseException:
        os.close(held)
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return held


def started(pid: int) -> int:
    """When a process has started, in ticks; 0: there is none, it has ended and its parent has not
    noticed yet, or that is hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        state, *fields = text.rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, IndexError, ValueError):
        return 0


def parse_record_untrusted(text: str) -> Record:
    """The record in the text of a file. Raises RemoteProtocolError."""
    try:
        values = json.loads(text)
        return Record(
            _integer(values["pid"]),
            _text(values["command"]),
            _text(values["where"]),
            _integer(values["began"]),
            tuple(
                RecordedLun(
                    _text(each["url"]),
                    _integer(each["size"]),
                    each["writes"] is True,
                    tuple(map(_text, each["identifiers"])),
                )
                for each in values["luns"]
            ),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RemoteProtocolError("record", f"the file is no record: {error!r}"[:200]) from None


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("a number is wrong")
    return value


def _text(value: object) -> str:
    if type(value) is not str or len(value) > _LONGEST:
        raise ValueError("a text is wrong")
    return value


def running() -> list[Found]:
    """The records of processes that run, as far as this process may read them."""
    return [found for where in (*directories(), *of_others()) for found in _in(where)]


def _in(where: Path) -> Iterator[Found]:
    try:
        of = os.lstat(where)
        names = sorted(os.listdir(where)) if stat.S_ISDIR(of.st_mode) else []
    except OSError:
        return
    own = of.st_uid == os.geteuid()
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    for match in matches[: OWN_PLACES if own else OTHERS_PLACES]:
        path = where / match[0]
        pid = int(match[1])
        if started(pid) != int(match[2]) and not _is_held(path):
            if own:
                with contextlib.suppress(OSError):
                    path.unlink()
            continue
        try:
            record = parse_record_untrusted(_read(path, of.st_uid))
        except (OSError, RemoteProtocolError) as error:
            log.info("%s: %s", path, error)
            continue
        if record.pid == pid:
            yield Found(record, of.st_uid)


def _is_held(path: Path) -> bool:
    """Whether a process that may write to the file, its owner's, has it locked."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        asked = _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        (kind, *_) = _LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    except OSError:  # no regular file, or a file system without locks
        return False
    finally:
        os.close(fd)
    return bool(kind == fcntl.F_WRLCK)


def _read(path: Path, owner: int) -> str:
    """Raises OSError, RemoteProtocolError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise RemoteProtocolError("record", "it is no file of the owner of its directory")
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise RemoteProtocolError("record", "it is too long")
    return content.decode(errors="replace")
