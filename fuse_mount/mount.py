"""Mount, serve, unmount.

The server holds a lock on the directory that it mounts over (the one underneath, opened before
the mount) for as long as it lives. A second mount there is refused by it, and ``unmount`` waits
for it: when the lock is free, everything has been flushed and the target was told goodbye.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import logging
import logging.handlers
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NoReturn

from fuse_mount.errors import BY_STATUS, MountError, MountFailed, SystemProblem, UsageError
from fuse_mount.options import MountOptions, parse_options
from iserblk.errors import BadArgument, IserblkError, NotSupported
from iserblk.metrics.address import default_option
from iserblk.url import parse_url

log = logging.getLogger(__name__)

_SUBTYPE = "iserblk"
_FILE_SYSTEM = f"fuse.{_SUBTYPE}"  # as /proc/mounts has it

# Requests that pyfuse3 answers at once. Idle workers cost nothing measurable (1 to 40 tried); with
# as many as the usual depth none is started and ended per request.
_MIN_TASKS = 32
_MAX_TASKS = 128
# The kernel keeps at most 12 asynchronous requests under way unless told. fio 4k randread at depth
# 32 on a fake disk: 25 K with 12, 36 K with 64.
_MAX_BACKGROUND = 64

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_UNMOUNT_TIMEOUT_S = 120.0


def mount_foreground(
    urls: Sequence[str],
    mountpoint: str,
    options: Sequence[str],
    ready: Callable[[], None],
) -> None:
    """Serve the LUNs of ``urls`` under ``mountpoint`` until it is unmounted.

    ``options`` are the values of -o, each a comma-separated list. ``ready`` is called once, in
    the trio loop, when the files can be used. Returns after a clean unmount: ``fusermount3 -u``,
    ``umount``, or SIGTERM, SIGINT or SIGHUP, which mean the same (requests under way are
    finished, everything is flushed). A second signal does not wait for the target. Raises
    MountError, or SystemExit with 128 + signal when one came before ``ready``; nothing is mounted
    then.
    """
    settled = parse_options(options)
    mountpoint = whole_path(mountpoint)
    _check_system()
    import trio  # noqa: PLC0415 - what may be missing was just looked for

    from iserblk.waiting.descriptors import signals_noted  # noqa: PLC0415

    with _locked(mountpoint):
        number = 0
        try:
            with signals_noted(*_ENDING) as early:
                number = trio.run(_serve, list(urls), mountpoint, settled, ready, early)
        except Exception as error:
            raise _for_mount(mountpoint, error) from None
    if number:
        raise SystemExit(128 + number)


def mount_background(urls: Sequence[str], mountpoint: str, options: Sequence[str]) -> int:
    """The same in a process of its own: returns its pid when the files can be used.

    Call it before any thread is started: it forks. Raises MountError, as ``mount_foreground``
    would; the process has ended then, as it has when a signal's exception comes out.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        _child(urls, mountpoint, options, write_end)
    os.close(write_end)
    try:
        with os.fdopen(read_end, "rb") as pipe:
            said = pipe.read()
    except BaseException:  # told to end while it was starting
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if said == b"ready":
        return pid
    _, status = os.waitpid(pid, 0)
    if not said:
        raise MountFailed(f"{mountpoint}: the server ended unexpectedly (status {status:#x})")
    answer = json.loads(said)
    raise BY_STATUS[answer["status"]](answer["error"])


def unmount(mountpoint: str) -> None:
    """Unmount, and wait until the server has flushed, logged out and ended.

    Flushes before, so that an error of that is seen here. Raises UsageError (nothing of ours is
    mounted there), MountFailed (in use; flush failed; the server did not end in time).
    """
    mountpoint = whole_path(mountpoint)
    kind, _ = is_mounted(mountpoint)
    if kind != _FILE_SYSTEM:
        raise UsageError(f"{mountpoint}: no LUNs are mounted there")
    try:
        _fsync(mountpoint)
    except OSError as error:
        if error.errno != errno.ENOTCONN:  # a dead server: unmounting is all that can be done
            raise MountFailed(f"{mountpoint}: still mounted, flush failed: {error}") from None
    ended = subprocess.run(
        _unmount_command(mountpoint), stderr=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode:
        words = " ".join(ended.stderr.split()).removeprefix(f"umount: {mountpoint}: ")
        raise MountFailed(f"{mountpoint}: still mounted: {words or 'cannot unmount'} "
                          f"(`fuser -vm` shows what uses it)")  # fmt: skip
    deadline = time.monotonic() + _UNMOUNT_TIMEOUT_S
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _try_lock(directory, fcntl.LOCK_SH):
            if time.monotonic() > deadline:
                raise MountFailed(f"{mountpoint}: unmounted, but its server has not ended yet")
            time.sleep(0.02)
    finally:
        os.close(directory)


def whole_path(mountpoint: str) -> str:
    """As a path from / on. Raises UsageError."""
    if not mountpoint:
        raise UsageError("the mount point is empty: name a directory")
    try:
        return os.path.abspath(mountpoint)
    except FileNotFoundError:
        raise UsageError(
            f"{mountpoint}: the current directory is gone: give the whole path, from / on"
        ) from None


# --- serving -----------------------------------------------------------------------------------


async def _serve(
    urls: list[str],
    mountpoint: str,
    options: MountOptions,
    ready: Callable[[], None],
    came: list[int],
) -> int:
    """Returns the signal that came before ``ready``, or 0. ``came``: those that came before this
    was called."""
    # What needs packages that _check_system looked for.
    import pyfuse3  # noqa: PLC0415
    import trio  # noqa: PLC0415

    from fuse_mount.operations import LunFiles  # noqa: PLC0415
    from fuse_mount.readers import Readers  # noqa: PLC0415
    from iserblk.disk.aio import open_disks  # noqa: PLC0415

    early = 0
    mounted = closed = False

    async def end_on_signals(signals: AsyncIterator[int]) -> None:
        nonlocal early
        number = await anext(signals)
        if mounted:
            if not closed:
                pyfuse3.terminate()
            await anext(signals)
            log.error("%s: told twice to end: not waiting for the target", mountpoint)
        else:
            early = number
        nursery.cancel_scope.cancel()

    failed: Sequence[str] = ()
    # From before the mount on: a signal that kills would leave a dead one behind.
    with trio.open_signal_receiver(*_ENDING) as signals:
        if came:
            return came[0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_on_signals, signals)
            served = default_option(mountpoint) | options.disk
            async with open_disks(urls, served) as disks:
                files = LunFiles(disks.disks, options)
                pyfuse3.trio = Readers().namespace()  # type: ignore[attr-defined]
                _mount(files, mountpoint, _source(urls[0]), options)
                try:
                    _raise_background_limit(mountpoint)
                    mounted = True
                    ready()
                    await pyfuse3.main(_MIN_TASKS, _MAX_TASKS)
                    failed = await files.flush_all()
                finally:
                    closed = True
                    pyfuse3.close(unmount=True)
            nursery.cancel_scope.cancel()
    if failed:
        raise MountFailed(f"{mountpoint}: data may be lost: {'; '.join(failed)}")
    return early


def _source(url: str) -> str:
    """What the mount table names. As it was given where that tells nothing: mount(8) compares it
    with the line of fstab, to see what is mounted already."""
    parsed = parse_url(url)
    return parsed.redacted() if parsed.user or parsed.options else url


def _mount(files: Any, mountpoint: str, url: str, options: MountOptions) -> None:
    """Raises MountFailed with what libfuse and fusermount3 say about it on stderr."""
    import pyfuse3  # noqa: PLC0415

    name = url.replace("\\", "\\\\").replace(",", "\\,")
    words = {"default_permissions", f"subtype={_SUBTYPE}", f"fsname={name}"}
    words |= {"ro"} if options.read_only else set()
    words |= {"allow_other"} if options.allow_other else set()
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            pyfuse3.init(files, mountpoint, words)
        except RuntimeError as error:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
            raise MountFailed(f"{mountpoint}: {lines[-1] if lines else error}") from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _raise_background_limit(mountpoint: str) -> None:
    """Let more requests be under way at once than the kernel's 12; works without.

    Only fusectl can say that. Where the machine has not mounted it (containers), it is mounted for
    a moment at a directory of our own. The connection's directory is called after the mount's
    minor device number. (To ask for that with stat(2) would be to wait for ourselves.)
    """
    _, number = is_mounted(mountpoint)
    name = f"{number}/max_background"
    try:
        if os.path.isdir(f"/sys/fs/fuse/connections/{number}"):
            _write_limit(f"/sys/fs/fuse/connections/{name}")
            return
        with tempfile.TemporaryDirectory(prefix="iserblk-fusectl.") as directory:
            _system_call("mount", b"fusectl", directory.encode(), b"fusectl", 0, None)
            try:
                _write_limit(f"{directory}/{name}")
            finally:
                _system_call("umount2", directory.encode(), 0)
    except OSError as error:
        log.debug("max_background stays at the kernel's default: %s", error)


def _write_limit(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(_MAX_BACKGROUND))


def _system_call(name: str, *arguments: bytes | int | None) -> None:
    """One of libc's functions that answer 0 or errno. (mount(8) would look at every mount,
    ours among them, and wait for it.)"""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


# --- before mounting ---------------------------------------------------------------------------


def _check_system() -> None:
    try:
        import pyfuse3  # noqa: F401, PLC0415
        import trio  # noqa: F401, PLC0415
    except ImportError as error:
        raise SystemProblem(f"{error}: run scripts/setup") from None
    if not os.path.exists("/dev/fuse"):
        raise SystemProblem("no /dev/fuse: run modprobe fuse (in a container: --device /dev/fuse)")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise SystemProblem("fusermount3 is missing, which mounts for other users than root: "
                            "install the package fuse3")  # fmt: skip


@contextlib.contextmanager
def _locked(mountpoint: str) -> Iterator[None]:
    """Check that the directory can be mounted over, and hold its lock."""
    kind, _ = is_mounted(mountpoint)
    if kind == _FILE_SYSTEM:
        raise UsageError(f"{mountpoint}: LUNs are mounted there already; iserblk umount it first")
    try:
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{mountpoint}: {_NO_DIRECTORY.get(error.errno or 0, error)}") from None
    try:
        if os.listdir(directory):
            raise UsageError(f"{mountpoint}: not empty, and would be hidden by the mount")
        if not _try_lock(directory, fcntl.LOCK_EX):
            raise UsageError(f"{mountpoint}: another mount is starting or ending there")
        yield
    finally:
        os.close(directory)


_NO_DIRECTORY = {
    errno.ENOENT: "no such directory: make it first",
    errno.ENOTDIR: "not a directory",
    errno.EACCES: "permission denied",
    errno.ENOTCONN: "a mount whose server has died: fusermount3 -u it first",
}


def _try_lock(directory: int, kind: int) -> bool:
    try:
        fcntl.flock(directory, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_mounted(mountpoint: str) -> tuple[str, int]:
    """Type and minor device number of the topmost file system that is mounted exactly there, or
    ("", 0). Asks proc(5) mountinfo, and so waits for no file system."""
    found = ("", 0)
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            _, _, device, _, place, *_ = before.split(" ")
            if _unescape(place) == mountpoint:
                found = (after.split(" ")[0], int(device.partition(":")[2]))
    return found


def _unescape(text: str) -> str:
    """mountinfo writes blanks, newlines and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), text)


# --- unmounting --------------------------------------------------------------------------------


def _fsync(mountpoint: str) -> None:
    """fsync of the directory flushes every LUN."""
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _unmount_command(mountpoint: str) -> list[str]:
    return ["umount", mountpoint] if os.geteuid() == 0 else ["fusermount3", "-u", mountpoint]


# --- errors and the background -----------------------------------------------------------------


def _for_mount(mountpoint: str, error: Exception) -> Exception:
    """As mount(8) has it. A bug, also one beside other errors, comes out as it is."""
    while isinstance(error, ExceptionGroup):
        known, unknown = error.split((IserblkError, OSError))
        if known is None or unknown is not None:
            return error
        error = known.exceptions[0]
    if isinstance(error, MountError):
        return error
    if isinstance(error, (BadArgument, NotSupported)):
        return UsageError(str(error))
    if isinstance(error, OSError):
        return MountFailed(f"{mountpoint}: {error.strerror or error}")
    return MountFailed(str(error)) if isinstance(error, IserblkError) else error


def _child(urls: Sequence[str], mountpoint: str, options: Sequence[str], pipe: int) -> NoReturn:
    """Body of the background process: never returns into its caller's code."""

    def ready() -> None:
        _detach()
        os.write(pipe, b"ready")
        os.close(pipe)

    status = 0
    try:
        mount_foreground(urls, mountpoint, options, ready)
    except MountError as error:
        status = error.exit_status
        _report(pipe, status, str(error))
    except (KeyboardInterrupt, SystemExit):
        status = MountFailed.exit_status
        _report(pipe, status, f"{mountpoint}: told to end before it was mounted")
    except BaseException:
        status = MountFailed.exit_status
        log.exception("%s: internal error", mountpoint)
        _report(pipe, status, f"{mountpoint}: internal error, see the log")
    finally:
        os._exit(status)


def _report(pipe: int, status: int, error: str) -> None:
    """To the parent that still waits, or to the log."""
    try:
        os.write(pipe, json.dumps({"status": status, "error": error}).encode())
    except OSError:  # closed by ready()
        log.error("%s", error)


def _detach() -> None:
    """Leave the terminal: own session, no standard streams, logs to syslog."""
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    if os.path.exists("/dev/log"):
        syslog = logging.handlers.SysLogHandler(
            "/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON
        )
        syslog.setFormatter(logging.Formatter(f"iserblk-mount[{os.getpid()}]: %(message)s"))
        root.addHandler(syslog)
