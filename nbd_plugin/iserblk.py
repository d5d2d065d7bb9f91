"""An nbdkit plugin that serves remote SCSI LUNs as NBD exports.

    nbdkit -U SOCKET python nbd_plugin/iserblk.py uri=iser://HOST/IQN/LUN [uri=…] [option=value …]

nbdkit's Python plugin runs this file as ``__main__``, without ``__file__``, with the
distribution's ``sys.path``. The callbacks below are those of nbdkit-python-plugin(3), API 2.
Sockets, threads and the event loop would not survive nbdkit's fork, so they start in
``after_fork``.

Each LUN is one export, with the name that ``iserblk.disk`` gives it. The default export is the
first LUN of the first URL. The only state of an NBD connection is a Handle: all connections share
the LUN's session.

A callback that fails sets the errno for the client, and raises. nbdkit prints one line.
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
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import nbdkit


def _find_packages(plugin: str) -> None:
    """Extend ``sys.path`` so that iserblk and its packages can be imported, wherever nbdkit runs.

    ``plugin``: the path of this file, as given to nbdkit. The checkout of this file comes first.
    The packages of its .venv come before those of the distribution, as in an interpreter of the
    .venv. The directory of this file is not added: there iserblk.py would hide the package.
    """
    checkout = os.path.dirname(os.path.dirname(os.path.realpath(plugin)))
    if os.path.isfile(os.path.join(checkout, "iserblk", "__init__.py")):
        sys.path.insert(0, checkout)
    venv = os.path.join(checkout, ".venv")
    packages = sysconfig.get_path("purelib", "venv", {"base": venv, "platbase": venv})
    if os.path.isdir(packages):
        site.addsitedir(packages)
        sys.path.sort(key=lambda entry: entry.endswith("dist-packages"))


def _remedy(missing: ImportError) -> str:
    """What to do after an import that failed. Where iserblk itself is not beside this file, the
    words are all that can be said."""
    # Python looks for its library beside the first python3 in PATH, which may be another Python.
    if sys.prefix != "/usr":
        return f"nbdkit got the Python library in {sys.prefix}: put /usr/bin first in PATH"
    try:
        from iserblk.installation import HERE  # noqa: PLC0415
    except ImportError:
        return "this file has to stay beside the package iserblk"
    return HERE.for_nbdkit(missing.name or "", sys.version_info[:2])


_find_packages(sys._getframe().f_code.co_filename)

try:
    from iserblk import __version__
    from iserblk.disk.blocking import ThreadDiskSet, open_disks
    from iserblk.disk.ending import all_unflushed, last_flush_failed, not_flushed
    from iserblk.disk.multipath.addresses import settle
    from iserblk.disk.seam import BlockingDisk, Extent, FlushClient, LossCount
    from iserblk.disk.wish import Wish
    from iserblk.errors import BadArgument, IserblkError, NotSupported
    from iserblk.limited_log import LineLimit
    from iserblk.loop.stopping import LOOK_S, is_stopping, own_unit
    from iserblk.named.resolving import urls_of
    from iserblk.nbd.kernel.owed import Owed
    from iserblk.nbd.long_changes import LONG, LongChangesOfThreads
    from iserblk.options import Options
    from iserblk.url import is_url, parse_url
except ImportError as missing:
    # SystemExit while nbdkit loads the script ends it with this one line and exit status 1.
    sys.exit(f"nbdkit: iserblk: {missing}; {_remedy(missing)}")

API_VERSION = 2

P = ParamSpec("P")
T = TypeVar("T")

# The errors of NBD. nbdkit turns every other errno into EINVAL, which tells the client that its
# request was malformed. For a lost connection or a timeout the client must get EIO instead.
_NBD_ERRNOS = {errno.EPERM, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EINVAL}
_NBD_ERRNOS |= {errno.ENOSPC, errno.EFBIG, errno.EOPNOTSUPP, errno.ESHUTDOWN}

_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that the child gets when its parent ends
_M_TRIM_THRESHOLD = -1  # mallopt(3)

WISH = "ending"  # in the directory of ISERBLK_OWED

_log = logging.getLogger("iserblk.nbd")
_urls: list[str] = []
_options: dict[str, str] = {}
_long: dict[str, LongChangesOfThreads] = {}  # by the name of a LUN
_opened: list[ThreadDiskSet] = []  # one element, from after_fork to cleanup
_handles: set[Handle] = set()  # nbdkit does not close those that are open when it ends
_only: list[OnlyClient] = []  # of a server of `iserblk attach`: one element
_watches: list[EndWatch] = []  # one element, from after_fork to cleanup
_parent: list[int] = []  # where `iserblk nbd` runs nbdkit: what it reads from


# --- errors and logs ---------------------------------------------------------------------------


def _format_exception(kind: Any, error: Any, tb: Any) -> list[str]:
    """The text that nbdkit prints for an exception: it calls traceback.format_exception.

    An IserblkError is one line for the user. Any other exception is a bug, with its traceback.
    """
    if isinstance(error, IserblkError):
        return [str(error)]
    return _format_traceback(kind, error, tb)


_format_traceback = traceback.format_exception
traceback.format_exception = _format_exception  # type: ignore[assignment]


def _failed(error: IserblkError) -> IserblkError:
    """Set the errno for the client. Returns the exception to raise.

    It is a new exception; raise it outside of the handler. nbdkit 1.32 never frees the exceptions
    that it gets, and ``error`` holds the frames of the whole data path.
    """
    nbdkit.set_error(error.errno if error.errno in _NBD_ERRNOS else errno.EIO)
    return IserblkError(str(error))


def _reported(callback: Callable[P, T]) -> Callable[P, T]:
    """Decorator of callbacks: errors become those of ``_failed``. pread and pwrite have this code
    inline, to save a call."""

    @functools.wraps(callback)
    def report(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return callback(*args, **kwargs)
        except IserblkError as error:
            failure = _failed(error)
        raise failure

    return report


class _NbdkitLog(logging.Handler):
    """Writes warnings where nbdkit writes its own messages; the rest only with ``nbdkit -v``."""

    def __init__(self) -> None:
        super().__init__()
        # In the background, nbdkit's stderr is /dev/null (1, 3), and nbdkit logs to syslog.
        stderr = os.fstat(2)
        self._daemon = stat.S_ISCHR(stderr.st_mode) and stderr.st_rdev == os.makedev(1, 3)

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno < logging.WARNING:
            nbdkit.debug(text)
        elif self._daemon:
            syslog.syslog(syslog.LOG_WARNING, f"iserblk: {text}")
        else:
            with contextlib.suppress(OSError):  # the reader of our stderr may have ended
                print(f"nbdkit: iserblk: {text}", file=sys.stderr, flush=True)


# --- the life of the process -------------------------------------------------------------------


def dump_plugin() -> None:
    print(f"iserblk_version={__version__}")


def thread_model() -> int:
    return int(nbdkit.THREAD_MODEL_PARALLEL)


def config(key: str, value: str) -> None:
    """Take one ``key=value`` of nbdkit's command line."""
    if key == "uri":
        if is_url(value):
            parse_url(value)
        _urls.append(value)
        return
    name = key.replace("_", "-")
    if name == "script":
        raise BadArgument("a second file was given; a URL is given as uri=URL")
    if name in _options:
        raise BadArgument(f"{name}= was given twice; give it once")
    Options.from_pairs([(name, value)])
    _options[name] = value


def config_complete() -> None:
    if not _urls:
        raise BadArgument("there is no URL: give uri=iser://HOST/IQN/LUN")
    _urls[:] = urls_of(_urls, _options)
    settle(_urls, _options)  # reads secrets, perhaps from a pipe: once, before any fork


def get_ready() -> None:
    """Log in and out once, so that errors appear while the user still waits.

    When nbdkit goes to the background, its caller returns, and stderr is closed, before after_fork
    runs. The trial runs in a child: threads and sockets of this process would not survive nbdkit's
    own fork.
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
        raise IserblkError(
            f"the process of the first login ended unexpectedly (wait status {status:#x})"
        )


def _give_memory_back() -> None:
    """Make glibc return large buffers to the system when they are freed. nbdkit has a buffer for
    each thread of a connection. By default, after the first such buffer is freed, glibc takes
    buffers of that size from the heap, and keeps them there."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)


def after_fork() -> None:
    _give_memory_back()
    logger = logging.getLogger("iserblk")
    handler = _NbdkitLog()
    handler.addFilter(LineLimit(handler))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        _opened.append(open_disks(_urls, _options))
    except IserblkError as error:
        kind = next(
            each for each in type(error).__mro__ if each.__module__ == IserblkError.__module__
        )
        _tell_parent(f"{kind.__name__} {error}")
        raise
    (disks,) = _opened
    path = os.environ.get("ISERBLK_OWED", "")
    _watches.append(EndWatch(disks, Wish(Path(path).with_name(WISH)) if path else None))
    if path:
        _only.append(OnlyClient(disks.disks[disks.default], Owed(Path(path))))
    _tell_parent("ready")


def _tell_parent(line: str) -> None:
    """Where `iserblk nbd` runs nbdkit, it waits for this line (see iserblk/nbd/nbdkit.py)."""
    number = os.environ.pop("ISERBLK_READY_FD", "")
    if number:
        _parent.append(int(number))
    for parent in _parent:
        with contextlib.suppress(OSError):
            # Python's encoding inside of nbdkit may be ASCII.
            os.write(parent, f"{' '.join(line.split())}\n".encode(errors="backslashreplace"))


def cleanup() -> None:
    """Flush and log out: nbdkit ends. A client that went away may not have flushed."""
    for handle in [*_handles]:
        close(handle)
    while _watches:
        watch = _watches.pop()
        watch.end()
        with contextlib.closing(_opened.pop()) as disks:
            for each in _only:
                each.ended()
            last = functools.partial(_flush_last, watch)
            # At the same time: a target that is away holds up no other.
            with ThreadPoolExecutor(len(disks.disks), "iserblk-flush") as threads:
                flushed = [*threads.map(last, disks.disks, disks.disks.values())]
            if not all(flushed):
                watch.leave(all_unflushed(disks.disks.values()))
                _tell_parent("lost")


def _flush_last(watch: EndWatch, name: str, disk: BlockingDisk) -> bool:
    """Whether nothing is left to flush. (For a LUN without a write cache, the disk sends no
    command.)"""
    if disk.dirty and watch.by_force:
        _log.error("%s", not_flushed(name, disk))
        return False
    if disk.dirty:
        try:
            disk.flush(disk.new_client())
        except IserblkError as error:
            _log.error("%s", last_flush_failed(name, disk, error))
            return False
    for each in _only:
        each.changed()
    return True


class EndWatch:
    """A thread that asks for the end of the use of ``disks``, while requests wait for a target that
    is away: when nbdkit is told to end, which no callback hears of before its requests have ended;
    when the device is being detached (``wish``), and when the machine shuts down. ``by_force``:
    nothing is to be flushed."""

    def __init__(self, disks: ThreadDiskSet, wish: Wish | None) -> None:
        self.by_force = False
        self._ending = disks.ending
        self._wish = wish
        self._unit = own_unit()
        self._end = threading.Event()
        if wish is not None:
            wish.begin()  # of a server before this one
        self._thread = threading.Thread(target=self._run, name="iserblk-end", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sleep = ctypes.CDLL(None).nbdkit_nanosleep  # the Python of nbdkit 1.32 does not have it
        while not self._end.wait(LOOK_S):
            if not self._ending.waits():
                continue
            if sleep(1, 0):  # nbdkit is told to end
                self._ending.ask()
                return
            self._look()

    def _look(self) -> None:
        wish = self._wish
        if wish is not None and wish.by_force:
            self._ending.give_up()
        self._ending.ask((wish is not None and wish.made) or is_stopping({self._unit}))

    def end(self) -> None:
        """nbdkit ends, and its requests have ended."""
        self._end.set()
        self._thread.join()
        self._ending.ask()
        self.by_force = self._wish is not None and self._wish.by_force

    def leave(self, unflushed: int | None) -> None:
        """See Wish."""
        if self._wish is not None:
            self._wish.leave(unflushed)


# --- exports and connections -------------------------------------------------------------------


class OnlyClient:
    """The client of all connections, where these are of one device, whose server has others before
    and after it."""

    def __init__(self, disk: BlockingDisk, owed: Owed) -> None:
        self._owed = owed
        self._disk = disk
        self._lock = threading.Lock()
        with self._lock:  # the disks' thread may call ``changed`` before there is ``client``
            self.client = disk.only_client(owed.read(), self.changed)

    def changed(self) -> None:
        with self._lock:  # so that the last count is written last
            self._owed.write(self.client.count)

    def ended(self) -> None:
        """The last flush is to follow, and ``changed`` when it has succeeded."""
        self.client.ended()
        if self._disk.dirty:
            losses, told = self.client.count
            self._owed.write(LossCount(losses + 1, told))


class Handle:
    """One NBD connection to one LUN. It keeps two bound methods of the disk, for speed. ``long``:
    of all connections to the LUN."""

    __slots__ = ("client", "disk", "long", "read", "write")

    def __init__(self, disk: BlockingDisk, client: FlushClient) -> None:
        self.disk = disk
        self.client = client
        self.long = _long.setdefault(disk.info.name, LongChangesOfThreads())
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
    disk = disks.disks[name]
    if not _only:
        # One may be gone, and come again before its end is noticed: what it was not told of is left
        # to clients that begin from now on.
        for other in _handles.copy():
            if other.disk is disk and other.client.owed:
                other.client.ended()
    handle = Handle(disk, _only[0].client if _only else disk.new_client())
    _handles.add(handle)
    return handle


def close(h: Handle) -> None:
    _handles.discard(h)
    if not _only:
        h.client.ended()


def export_description(h: Handle) -> str:
    return _describe(h.disk)


@_reported
def get_size(h: Handle) -> int:
    """The size in bytes for this connection; NBD cannot tell the client of a later change."""
    try:
        return h.disk.refresh()
    except IserblkError as error:
        _log.warning("%s: the size is the last one known: %s", h.disk.info.name, error)
        return h.disk.size


def block_size(h: Handle) -> tuple[int, int, int]:
    """Minimum, preferred and maximum request. Any alignment works; whole physical blocks are
    fastest. NBD clients may assume 32 MiB without asking."""
    return 1, max(h.disk.info.physical_block_size, 4096), 32 << 20


def is_rotational(h: Handle) -> bool:
    return h.disk.info.rotational


def can_write(h: Handle) -> bool:
    return not h.disk.info.read_only


def can_multi_conn(h: Handle) -> bool:
    """Always: all connections share the LUN's session, and nothing is cached here. So every
    connection sees completed writes of the others, and a flush covers the writes of all."""
    return True


def can_flush(h: Handle) -> bool:
    return True


def can_fua(h: Handle) -> int:
    return int(nbdkit.FUA_NATIVE)


def can_trim(h: Handle) -> bool:
    return h.disk.info.can_trim


def can_zero(h: Handle) -> bool:
    """Always: if the LUN cannot, the disk writes zeroes."""
    return True


def can_fast_zero(h: Handle) -> bool:
    """Always: a request for a fast zero that would not be fast is refused at once."""
    return True


def can_extents(h: Handle) -> bool:
    return h.disk.info.can_extents


def can_cache(h: Handle) -> int:
    return int(nbdkit.CACHE_NATIVE)


# --- requests ----------------------------------------------------------------------------------
# nbdkit calls PyGILState_Ensure and _Release around every callback. They create and destroy the
# Python state of the thread each time; with 32 threads this is most of the cost of a request. No
# documented way avoids it: only the thread itself may release its state, and nbdkit does not tell
# plugins when a thread ends. (CPython 3.13 aborts if another thread releases it.)
# ``buf`` is nbdkit's memory, invalid after the return; BlockingDisk does not use it longer.


def pread(h: Handle, buf: memoryview, offset: int, flags: int) -> None:
    try:
        h.read(buf, offset)
        return
    except IserblkError as error:
        failure = _failed(error)
    raise failure


def pwrite(h: Handle, buf: memoryview, offset: int, flags: int) -> None:
    if h.long.under_way:
        h.long.let_end(offset, len(buf))
    try:
        h.write(buf, offset, flags & nbdkit.FLAG_FUA != 0)
        return
    except IserblkError as error:
        failure = _failed(error)
    raise failure


def flush(h: Handle, flags: int) -> None:
    try:
        h.disk.flush(h.client)
        return
    except IserblkError as error:
        losses = error.losses
        failure = _failed(error)
    if losses and not _has_hung_up():
        h.client.told(losses)
    raise failure


def _has_hung_up() -> bool:
    """Whether the client of this connection will not get the answer. nbdkit says so only to what
    sleeps; Python's module ``nbdkit`` of 1.32 has no function for that."""
    sleep = getattr(ctypes.CDLL(None), "nbdkit_nanosleep", None)
    return sleep is not None and sleep(0, 1) != 0


@_reported
def trim(h: Handle, count: int, offset: int, flags: int) -> None:
    """A trim is a hint. Where the LUN turns out to refuse it, after this client was told that it
    can (``can_trim``), nbdkit has no error for it that clients understand: nothing is done."""
    with contextlib.suppress(NotSupported), _change(h, offset, count) as patient:
        h.disk.trim(offset, count, flags & nbdkit.FLAG_FUA != 0, patient=patient)


@contextlib.contextmanager
def _change(h: Handle, offset: int, count: int) -> Iterator[bool]:
    """Around a trim or zero of this range. True: it may take as long as it makes progress. Not for
    the kernel, which gives a server up that does not answer in time."""
    patient = count > LONG and not _only
    if patient:
        with h.long.one(offset, count):
            yield True
    else:
        if h.long.under_way:
            h.long.let_end(offset, count)
        yield False


@_reported
def zero(h: Handle, count: int, offset: int, flags: int) -> None:
    with _change(h, offset, count) as patient:
        h.disk.zero(
            offset,
            count,
            may_trim=flags & nbdkit.FLAG_MAY_TRIM != 0,
            fast=flags & nbdkit.FLAG_FAST_ZERO != 0,
            fua=flags & nbdkit.FLAG_FUA != 0,
            patient=patient,
        )


@_reported
def cache(h: Handle, count: int, offset: int, flags: int) -> None:
    h.disk.cache(offset, count)


@_reported
def extents(h: Handle, count: int, offset: int, flags: int) -> list[Extent]:
    """The extents of the range. Their flags are those of NBD already, as ``Extent`` has them."""
    return h.disk.extents(offset, count)
