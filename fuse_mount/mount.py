"""Mounts the LUNs as files, serves them, and unmounts.

The server locks the directory under its mount point (opened before the mount), and holds the lock
until it ends. The lock prevents a second mount there. ``unmount`` waits for it: when the lock is
free, everything has been flushed, and the server has logged out of the target.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from fuse_mount.errors import (
    BY_STATUS,
    DataAtRisk,
    MountError,
    MountFailed,
    SystemProblem,
    UsageError,
)
from fuse_mount.holders import holder
from fuse_mount.mounted import (
    FILE_SYSTEM,
    How,
    is_mounted,
    is_ours,
    source_at,
    unmount_command,
)
from fuse_mount.options import parse_options
from iserblk.background import READY, Child, Parent, fork, where_log_is
from iserblk.disk.wish import Wish
from iserblk.errors import BadArgument, IserblkError, NotSupported
from iserblk.installation import HERE, no_pyfuse3
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.metrics.address import directory as own_directory
from iserblk.metrics.address import make_room, socket_of, unit_directory
from iserblk.metrics.places import directories
from iserblk.metrics.records import Recorded, running
from iserblk.named.resolving import resolve
from iserblk.url import is_url

log = logging.getLogger(__name__)

_UNMOUNT_TIMEOUT_S = 120.0
# When unmounting looks for other mounts of the file system: a server mostly ends before that.
_FIRST_LOOK_S = 0.2
_LOOK_S = 1.0
_OTHER_S = 2.0  # how long an unmount waits for what another one has open
LOG_NAME = "iserblk-mount"  # of a server in the background, in syslog


def mount_foreground(
    urls: Sequence[str],
    mountpoint: str,
    options: Sequence[str],
    ready: Callable[[], None],
) -> None:
    """Serve the LUNs of ``urls`` under ``mountpoint`` until it is unmounted.

    ``options``: the values of -o, each a comma-separated list. ``ready`` is called once, in the
    trio loop, when the files can be used. Returns after a clean unmount by ``fusermount3 -u``,
    ``umount``, SIGTERM, SIGINT or SIGHUP: requests under way are finished, and everything is
    flushed. After a further signal of an impatient user (iserblk/endings.py) the server no longer
    waits for the target. Raises MountError: DataAtRisk where a flush failed, or where a signal came
    while a program had a file open for writing, as what that program holds (the page cache of a
    loop mount) has nowhere to go. Or SystemExit with 128 + the signal's number if a signal came
    before ``ready``. Nothing is mounted then.
    """
    settled = parse_options(options)
    source = urls[0]
    try:
        resolved = resolve(urls, settled.disk)
    except IserblkError as error:
        raise UsageError(str(error)) from None
    if resolved.words:  # the command's own override them
        settled = parse_options([*resolved.words, *options])
    mountpoint = whole_path(mountpoint)
    _check_system()
    # After the check: trio and pyfuse3 may be missing.
    from fuse_mount.serving import Mount  # noqa: PLC0415
    from iserblk.loop import guest  # noqa: PLC0415
    from iserblk.loop.until_told import until_told  # noqa: PLC0415

    place = own_directory() or unit_directory()
    wish = _wish(mountpoint, place) if place is not None else None
    with _locked(mountpoint):
        number = 0
        try:
            with until_told() as told, Recorded("mount", mountpoint) as recorded:
                mount = Mount(resolved.urls, mountpoint, settled, told, recorded, wish)
                number = guest.run(partial(mount.run, source, ready))
        except Exception as error:
            raise _for_mount(mountpoint, error) from None
    if number:
        raise SystemExit(128 + number)


def mount_background(urls: Sequence[str], mountpoint: str, options: Sequence[str]) -> int:
    """Serve the LUNs in a new process; return its pid when the files can be used.

    Call this before any thread is started, as it forks. Raises MountError as ``mount_foreground``
    does, or the exception of a signal; the new process has ended then.
    """
    other = fork()
    if isinstance(other, Parent):
        _child(urls, mountpoint, options, other)
    assert isinstance(other, Child)
    said = other.said()
    if said == READY:
        return other.pid
    if not said:
        raise MountFailed(
            f"{mountpoint}: the server ended unexpectedly (wait status {other.status:#x})"
        )
    answer = json.loads(said)
    raise BY_STATUS[answer["status"]](answer["error"])


def unmount(mountpoint: str, how: How = How.FLUSHED, waits: bool = False) -> None:
    """Unmount, and wait until the server has flushed, logged out and ended. ``waits``: also where
    the file system is mounted elsewhere, which is logged then; else it is an error at once.

    Flushes first, so that an error of the flush is raised here; but not what another user has
    mounted without allow_other, which its server flushes at its end. A target that is away is given
    up after less than a minute (``iserblk.disk.ending``): then it is unmounted all the same. Raises
    DataAtRisk then; UsageError (no LUNs are mounted there); or MountFailed: still mounted if the
    flush failed for another reason, or the files are in use; unmounted if the server did not end in
    time.
    """
    mountpoint = whole_path(mountpoint)
    kind, number = is_mounted(mountpoint)
    if kind != FILE_SYSTEM:
        _forget(mountpoint)
        raise UsageError(f"{mountpoint}: no LUNs are mounted there{_still_served(mountpoint)}")
    source = source_at(mountpoint)
    wishes = [_wish(mountpoint, where) for where in directories()]
    try:
        for wish in wishes:
            if how is not How.LAZY:
                wish.make(by_force=how is How.AT_ONCE)
        if how is How.AT_ONCE:
            _tell_server(mountpoint)
        lost = how is How.FLUSHED and not _is_flushed(mountpoint)
        _unmount_now(mountpoint, how, wishes)
        left = None if how is How.LAZY else _wait_for_server(mountpoint, number, waits)
    finally:
        for wish in wishes:
            wish.withdraw()  # it may be mounted still, here or elsewhere
    _forget(mountpoint)
    if lost or left is not None:
        what = f"{left} bytes" if left else "data"
        why = "it was not flushed" if how is How.AT_ONCE else "its last flush has failed"
        why = "the target is away" if lost else why
        raise DataAtRisk(
            f"{mountpoint}: unmounted, and {why}: {what} written to {source} since the last"
            " flush may be lost"
        )


def _still_served(mountpoint: str) -> str:
    """In words: that the server of files that were mounted there runs; or ""."""
    for found in running():
        record = found.record
        if record.command == "mount" and record.where == mountpoint:
            return (
                f"; the server of an earlier mount goes on (process {record.pid}): another mount"
                " namespace has the files mounted, or it is ending"
            )
    return ""


def _unmount_now(mountpoint: str, how: How, wishes: Sequence[Wish]) -> None:
    """What another ``unmount`` holds open while it flushes is waited for; and by force, what its
    server unmounts itself, as the kernel has ended the connection. Raises MountFailed: still
    mounted."""
    deadline = monotonic() + _OTHER_S
    while True:
        ended = subprocess.run(
            unmount_command(mountpoint, how), stderr=subprocess.PIPE, text=True, check=False
        )
        if not ended.returncode or not is_ours(mountpoint):  # else the server, or that one, has
            return
        waits = how is How.FORCE or any(wish.made_by_others for wish in wishes)
        if monotonic() > deadline or not waits:
            words = " ".join(ended.stderr.split()).removeprefix(f"umount: {mountpoint}: ")
            raise MountFailed(f"{mountpoint}: still mounted: {words or 'cannot unmount'} "
                              f"(`fuser -vm` shows what uses it)")  # fmt: skip
        sleep(_OTHER_S / 40)


def _is_flushed(mountpoint: str) -> bool:
    """Flush every LUN. False: a target that is away was given up. Raises MountFailed."""
    try:
        _fsync(mountpoint)
    except OSError as error:
        # The server is dead; or root unmounts what another user has mounted, where root may not
        # look: then the server alone knows how its last flush went.
        if error.errno in (errno.ENOTCONN, errno.EACCES):
            return True
        if error.errno == errno.ETIMEDOUT:
            return False
        raise MountFailed(f"{mountpoint}: still mounted, flush failed: {error}") from None
    return True


def _wish(mountpoint: str, where: Path) -> Wish:
    return Wish(socket_of(mountpoint, where).with_suffix(".ending"))


def _tell_server(mountpoint: str) -> None:
    """Have the server look at the wish now, if its process can be found."""
    for found in running():
        record = found.record
        if record.command == "mount" and record.where == mountpoint:
            with contextlib.suppress(OSError):
                # (A record is its user's word, and that user may name no process of others.)
                if os.stat(f"/proc/{record.pid}").st_uid == found.uid:
                    os.kill(record.pid, signal.SIGTERM)


def _wait_for_server(mountpoint: str, number: int, waits: bool) -> int | None:
    """Wait until the server of the file system that was at ``mountpoint``, minor device ``number``,
    has ended; returns how many bytes it has not flushed, where it says so. Where the file system is
    mounted elsewhere, too, its server goes on for that: see ``unmount``."""
    told = False
    now = monotonic()
    deadline, look = now + _UNMOUNT_TIMEOUT_S, now + _FIRST_LOOK_S
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        while not _try_lock(directory, fcntl.LOCK_SH):
            now = monotonic()
            if now > look and not told:
                look = now + _LOOK_S
                found = holder(FILE_SYSTEM, f"0:{number}")
                if found is not None:
                    text = f"{mountpoint}: unmounted here, but its server goes on: "
                    text += found.words(mountpoint)
                    if not waits:
                        raise MountFailed(text)
                    told = True
                    log.warning("%s (waiting for that)", text)
            if now > deadline:
                raise MountFailed(
                    f"{mountpoint}: unmounted, but its server still runs: it waits for the target,"
                    " or a mount namespace that cannot be seen from here has the files mounted;"
                    f" its log: {where_log_is(LOG_NAME)}"
                )
            sleep(0.02)
    finally:
        os.close(directory)
    left = [_wish(mountpoint, where).left for where in directories()]
    known = [count for count in left if count is not None]
    return sum(known) if known else None


def _forget(mountpoint: str) -> None:
    """Remove the socket of metrics that a server which was killed has left: else its place would be
    told to be down for good. And what it, or an unmount, has left in files; unless another unmount
    is under way, which has perhaps not read them yet. Those of a server that lives, or is starting,
    stay."""
    directory = -1
    with contextlib.suppress(OSError):  # it is gone: no server can start there
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if directory >= 0 and not _try_lock(directory, fcntl.LOCK_SH):
            return
        wishes = [_wish(mountpoint, where) for where in directories()]
        if any(wish.made for wish in wishes):
            return
        for wish in wishes:
            wish.forget()
        for where in directories():
            try:
                make_room(socket_of(mountpoint, where))
            except IserblkError as error:
                log.debug("%s", error)
    finally:
        if directory >= 0:
            os.close(directory)


def whole_path(mountpoint: str) -> str:
    """The absolute path of ``mountpoint``. Raises UsageError."""
    if not mountpoint:
        raise UsageError("the mount point is empty: name a directory")
    if is_url(mountpoint):
        raise UsageError("a URL stands in place of the mount point: name a directory there")
    try:
        return os.path.abspath(mountpoint)
    except FileNotFoundError:
        raise UsageError(
            f"{mountpoint}: the current directory is gone: give the mount point as an absolute path"
        ) from None


# --- serving -----------------------------------------------------------------------------------


# --- before mounting ---------------------------------------------------------------------------


def _check_system() -> None:
    try:
        import pyfuse3  # noqa: F401, PLC0415
        import trio  # noqa: F401, PLC0415
    except ImportError as error:
        raise SystemProblem(f"{error}: {no_pyfuse3()}") from None
    if not os.path.exists("/dev/fuse"):
        raise SystemProblem("no /dev/fuse: run modprobe fuse (in a container: --device /dev/fuse)")
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        raise SystemProblem("fusermount3 is missing, which other users than root need: "
                            + HERE.programs("fuse3"))  # fmt: skip


@contextlib.contextmanager
def _locked(mountpoint: str) -> Iterator[None]:
    """Check that the directory can be a mount point, and hold its lock. Raises UsageError."""
    kind, _ = is_mounted(mountpoint)
    if kind == FILE_SYSTEM:
        raise UsageError(
            f"{mountpoint}: LUNs are mounted there already; unmount them first (iserblk umount)"
        )
    try:
        directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{mountpoint}: {_NO_DIRECTORY.get(error.errno or 0, error)}") from None
    try:
        if os.listdir(directory):
            raise UsageError(f"{mountpoint}: the directory is not empty; name an empty directory")
        if not _try_lock(directory, fcntl.LOCK_EX):
            raise UsageError(f"{mountpoint}: another mount is starting or ending there; try later")
        yield
    finally:
        os.close(directory)


_NO_DIRECTORY = {
    errno.ENOENT: "no such directory: create it first",
    errno.ENOTDIR: "not a directory: name a directory",
    errno.EACCES: "permission denied: name a directory that this user can read",
    errno.ENOTCONN: "there is a mount whose server has died: unmount it first (fusermount3 -u)",
}


def _try_lock(directory: int, kind: int) -> bool:
    try:
        fcntl.flock(directory, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- unmounting --------------------------------------------------------------------------------


def _fsync(mountpoint: str) -> None:
    """Flush every LUN, by an fsync of the directory. Raises OSError."""
    directory = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# --- errors and the background -----------------------------------------------------------------


def _for_mount(mountpoint: str, error: Exception) -> Exception:
    """Convert ``error`` to a MountError. A bug, alone or in a group with other errors, is returned
    unchanged."""
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


def _child(
    urls: Sequence[str], mountpoint: str, options: Sequence[str], parent: Parent
) -> NoReturn:
    """The body of the background process; never returns to its caller."""
    status = 0
    try:
        mount_foreground(urls, mountpoint, options, lambda: parent.release(LOG_NAME))
    except MountError as error:
        status = error.exit_status
        _report(parent, status, str(error))
    except (KeyboardInterrupt, SystemExit):
        status = MountFailed.exit_status
        _report(parent, status, f"{mountpoint}: ended by a signal before it was mounted")
    except BaseException:
        status = MountFailed.exit_status
        log.exception("%s: internal error", mountpoint)
        _report(parent, status, f"{mountpoint}: internal error; see the log")
    finally:
        os._exit(status)


def _report(parent: Parent, status: int, error: str) -> None:
    """Send the error to the parent if it still waits, else log it."""
    if not parent.refuse(json.dumps({"status": status, "error": error}).encode()):
        log.error("%s", error)
