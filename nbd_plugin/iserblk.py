"""iserblk as an nbdkit plugin: remote SCSI LUNs as NBD exports.

    nbdkit python nbd_plugin/iserblk.py uri=iser://HOST/IQN/LUN [uri=… ] [io-timeout=30 …]

nbdkit's Python plugin runs this file as ``__main__``, without ``__file__``, with the
distribution's ``sys.path``; the callbacks below are those of nbdkit-python-plugin(3), API 2.
What belongs to a process (sockets, threads, an event loop) starts in ``after_fork``.

Each LUN is one export, called as ``iserblk.disk`` calls it; the first URL's is the default one.
Nothing is kept per NBD connection but a Handle: all connections share the LUN's session.

A failed callback raises, after the errno for the client was set. nbdkit prints one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import signal
import site
import stat
import sys
import sysconfig
import syslog
import traceback
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import nbdkit


def _find_packages(plugin: str) -> None:
    """Make ``import iserblk`` and what it needs work, wherever nbdkit was started.

    ``plugin`` is this file as typed. The checkout around it goes first; the packages of its .venv
    go where an interpreter of that .venv would have them, before the distribution's. This file's
    own directory stays off the path: its name would shadow the package.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.realpath(plugin)))
    if os.path.isfile(os.path.join(checkout, "iserblk", "__init__.py")):
        sys.path.insert(0, checkout)
    venv = os.path.join(checkout, ".venv")
    packages = sysconfig.get_path("purelib", "venv", {"base": venv, "platbase": venv})
    if os.path.isdir(packages):
        site.addsitedir(packages)
        sys.path.sort(key=lambda entry: entry.endswith("dist-packages"))


_find_packages(sys._getframe().f_code.co_filename)

try:
    from iserblk import __version__
    from iserblk.disk.blocking import ThreadDiskSet, open_disks
    from iserblk.disk.multipath.addresses import settle
    from iserblk.disk.seam import BlockingDisk, Extent
    from iserblk.errors import BadArgument, IserblkError
    from iserblk.options import Options
    from iserblk.url import parse_url
except ImportError as missing:
    # Python looks for its library beside the first python3 in PATH, and takes that of another.
    if sys.prefix == "/usr":
        _remedy = "run scripts/setup in the checkout of iserblk"
    else:
        _remedy = f"nbdkit got the Python library in {sys.prefix}: put /usr/bin first in PATH"
    # SystemExit while nbdkit loads the script ends it with this one line and exit status 1.
    sys.exit(f"nbdkit: iserblk: {missing}; {_remedy}")

API_VERSION = 2

P = ParamSpec("P")
T = TypeVar("T")

# NBD knows these errors; nbdkit turns every other errno into EINVAL, which tells the client that
# its request was malformed. A lost connection or a timeout is none of that: EIO.
_NBD_ERRNOS = {errno.EPERM, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EINVAL}
_NBD_ERRNOS |= {errno.ENOSPC, errno.EFBIG, errno.EOPNOTSUPP, errno.ESHUTDOWN}

_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for the child when its parent has ended
_M_TRIM_THRESHOLD = -1  # mallopt(3)

_log = logging.getLogger("iserblk.nbd")
_urls: list[str] = []
_options: dict[str, str] = {}
_opened: list[ThreadDiskSet] = []  # one, from after_fork to cleanup


# --- errors and logs ---------------------------------------------------------------------------


def _format_exception(kind: Any, error: Any, tb: Any) -> list[str]:
    """What nbdkit prints of an exception: it calls traceback.format_exception for it.

    Expected errors are one line for the user; anything else is a bug and shows where.
    """
    if isinstance(error, IserblkError):
        return [str(error)]
    return _format_traceback(kind, error, tb)


_format_traceback = traceback.format_exception
traceback.format_exception = _format_exception  # type: ignore[assignment]


def _failed(error: IserblkError) -> IserblkError:
    """Set what the client is told; returns the exception to raise.

    A new one, to be raised outside of the handler: nbdkit 1.32 never frees the exceptions that it
    is given, and ``error`` holds the frames of the whole data path.
    """
    nbdkit.set_error(error.errno if error.errno in _NBD_ERRNOS else errno.EIO)
    return IserblkError(str(error))


def _reported(callback: Callable[P, T]) -> Callable[P, T]:
    """Errors of a callback as nbdkit wants them; pread and pwrite save this call."""

    @functools.wraps(callback)
    def report(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return callback(*args, **kwargs)
        except IserblkError as error:
            failure = _failed(error)
        raise failure

    return report


class _NbdkitLog(logging.Handler):
    """Warnings where nbdkit puts its own messages, all else to ``nbdkit -v``."""

    def __init__(self) -> None:
        super().__init__()
        # Once daemonised, nbdkit's stderr is /dev/null (1, 3) and it logs to syslog.
        stderr = os.fstat(2)
        self._daemon = stat.S_ISCHR(stderr.st_mode) and stderr.st_rdev == os.makedev(1, 3)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno < logging.WARNING:
            nbdkit.debug(text)
        elif self._daemon:
            syslog.syslog(syslog.LOG_WARNING, f"iserblk: {text}")
        else:
            with contextlib.suppress(OSError):  # the reader of our stderr may have gone
                print(f"nbdkit: iserblk: {text}", file=sys.stderr, flush=True)


# --- the life of the process -------------------------------------------------------------------


def dump_plugin() -> None:
    print(f"iserblk_version={__version__}")


def thread_model() -> int:
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def config(key: str, value: str) -> None:
    """One ``key=value`` of nbdkit's command line."""
    if key == "uri":
        parse_url(value)
        _urls.append(value)
        return
    name = key.replace("_", "-")
    if name == "script":
        raise BadArgument("a second file was given; a URL is given as uri=URL")
    if name in _options:
        raise BadArgument(f"{name}= was given twice")
    Options.from_pairs([(name, value)])
    _options[name] = value


def config_complete() -> None:
    if not _urls:
        raise BadArgument("no URL: give uri=iser://HOST/IQN/LUN")
    settle(_urls, _options)  # secrets from a pipe are read once, before anything forks


def get_ready() -> None:
    """Log in and out once, so that what is wrong is said while the user listens.

    A daemonising nbdkit has told its caller "done" before after_fork runs, and its stderr is
    gone. The trial runs in a child: threads and sockets of this process would not survive
    nbdkit's own fork.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            open_disks(_urls, _options).close()
        except IserblkError as error:
            os.write(write_end, str(error).encode())
        except BaseException:
            os.write(write_end, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write_end)
    interrupted = False
    with os.fdopen(read_end, "rb") as pipe:
        try:
            said = pipe.read()
        except KeyboardInterrupt:
            interrupted = True
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if interrupted:
        raise IserblkError("interrupted during the first login")
    if said:
        raise IserblkError(said.decode())
    if status:
        raise IserblkError(f"the first login ended unexpectedly (wait status {status:#x})")


def _give_memory_back() -> None:
    """nbdkit has a buffer per thread of a connection: with it they go back to the system. glibc,
    left alone, takes the size of the first that is freed for one that is better kept."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)


def after_fork() -> None:
    _give_memory_back()
    logger = logging.getLogger("iserblk")
    logger.addHandler(_NbdkitLog())
    logger.setLevel(logging.INFO)
    _opened.append(open_disks(_urls, _options))


def cleanup() -> None:
    """nbdkit is ending. A client should have flushed; one that just went away may not have."""
    while _opened:
        with contextlib.closing(_opened.pop()) as disks:
            for name, disk in disks.disks.items():
                # (One without a write cache is sent nothing.)
                if disk.dirty:
                    try:
                        disk.flush()
                    except IserblkError as error:
                        _log.error("%s: the last flush failed, data may be lost: %s", name, error)


# --- exports and connections -------------------------------------------------------------------


class Handle:
    """One NBD connection to one LUN; the methods of its disk bound once, for the hot callbacks."""

    __slots__ = ("disk", "read", "write")

    def __init__(self, disk: BlockingDisk) -> None:
        self.disk = disk
        self.read = disk.read_into
        self.write = disk.write


def _describe(disk: BlockingDisk) -> str:
    info = disk.info
    return f"{info.vendor} {info.product}, {info.target} LUN {info.lun}"


def list_exports(readonly: bool, is_tls: bool) -> list[tuple[str, str]]:
    return [(name, _describe(disk)) for name, disk in _opened[0].disks.items()]


def default_export(readonly: bool, is_tls: bool) -> str:
    return _opened[0].default


def open(readonly: bool) -> Handle:
    (disks,) = _opened
    name = nbdkit.export_name() or disks.default
    if name not in disks.disks:
        nbdkit.set_error(errno.ENOENT)
        raise BadArgument(f"no export {name[:80]!r}; there are: {', '.join(disks.disks)}")
    return Handle(disks.disks[name])


def export_description(h: Handle) -> str:
    return _describe(h.disk)


@_reported
def get_size(h: Handle) -> int:
    """Of this connection: NBD has no way to tell it of a change."""
    try:
        return h.disk.refresh()
    except IserblkError as error:
        _log.warning("%s: the size is the last one known: %s", h.disk.info.name, error)
        return h.disk.size


def block_size(h: Handle) -> tuple[int, int, int]:
    """Any alignment works, whole blocks of the medium work best; 32 MiB is what NBD clients may
    assume without asking."""
    return 1, max(h.disk.info.physical_block_size, 4096), 32 << 20


def is_rotational(h: Handle) -> bool:
    return h.disk.info.rotational


def can_write(h: Handle) -> bool:
    return not h.disk.info.read_only


def can_multi_conn(h: Handle) -> bool:
    """All connections share the LUN's session and nothing is cached here: what one connection was
    answered is seen by the others, and a flush on one covers the writes of all."""
    return True


def can_flush(h: Handle) -> bool:
    return True


def can_fua(h: Handle) -> int:
    return int(nbdkit.FUA_NATIVE)


def can_trim(h: Handle) -> bool:
    return h.disk.info.can_trim


def can_zero(h: Handle) -> bool:
    """Where the LUN cannot, the disk writes zeroes."""
    return True


def can_fast_zero(h: Handle) -> bool:
    """That is: a fast zero which would not be fast is refused at once."""
    return True


def can_extents(h: Handle) -> bool:
    return h.disk.info.can_extents


def can_cache(h: Handle) -> int:
    return int(nbdkit.CACHE_NATIVE)


# --- requests ----------------------------------------------------------------------------------
# nbdkit brackets every callback with PyGILState_Ensure and _Release, which build and destroy a
# thread's whole Python state each time: with 32 threads most of what a request costs. There is no
# documented way round that: a state is its thread's to give back, and nbdkit tells no plugin when a
# thread ends. (CPython 3.13 aborts where another thread does it.)
# ``buf`` is nbdkit's memory and dead after the return; BlockingDisk gives it back before that.


def pread(h: Handle, buf: memoryview, offset: int, flags: int) -> None:
    try:
        h.read(buf, offset)
        return
    except IserblkError as error:
        failure = _failed(error)
    raise failure


def pwrite(h: Handle, buf: memoryview, offset: int, flags: int) -> None:
    try:
        h.write(buf, offset, flags & nbdkit.FLAG_FUA != 0)
        return
    except IserblkError as error:
        failure = _failed(error)
    raise failure


@_reported
def flush(h: Handle, flags: int) -> None:
    h.disk.flush()


@_reported
def trim(h: Handle, count: int, offset: int, flags: int) -> None:
    h.disk.trim(offset, count, flags & nbdkit.FLAG_FUA != 0)


@_reported
def zero(h: Handle, count: int, offset: int, flags: int) -> None:
    h.disk.zero(
        offset,
        count,
        may_trim=flags & nbdkit.FLAG_MAY_TRIM != 0,
        fast=flags & nbdkit.FLAG_FAST_ZERO != 0,
        fua=flags & nbdkit.FLAG_FUA != 0,
    )


@_reported
def cache(h: Handle, count: int, offset: int, flags: int) -> None:
    h.disk.cache(offset, count)


@_reported
def extents(h: Handle, count: int, offset: int, flags: int) -> list[Extent]:
    """The seam's flags of an extent are NBD's, and so nbdkit's."""
    return h.disk.extents(offset, count)
