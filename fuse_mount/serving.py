"""Serves LUNs as files at a mount point, from the first login to the last flush."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence

import pyfuse3
import trio

from fuse_mount.errors import DataAtRisk, MountFailed
from fuse_mount.mounted import (
    FILE_SYSTEM,
    MNT_DETACH,
    SUBTYPE,
    How,
    is_mounted,
    system_call,
    unmount_command,
)
from fuse_mount.operations import LunFiles
from fuse_mount.options import MountOptions
from fuse_mount.readers import Readers
from iserblk.disk.aio import TrioDiskSet, open_disks
from iserblk.disk.ending import LONGEST_S, EndOfUse
from iserblk.disk.wish import Wish
from iserblk.disk.writers import is_shared, note_use
from iserblk.limited_log import limited_lines, tell_left_out
from iserblk.loop.stopping import is_stopping, mount_unit, own_unit, watch
from iserblk.loop.tasks import sleep
from iserblk.loop.until_told import UntilTold
from iserblk.metrics.address import default_option
from iserblk.metrics.records import Recorded
from iserblk.options import LASTING
from iserblk.url import is_url, parse_url

log = logging.getLogger(__name__)

# Requests that pyfuse3 works on at a time. Idle workers cost nothing measurable (1 to 40 tried).
# With as many workers as the usual queue depth, no worker is started and ended per request.
_MIN_TASKS = 32
_MAX_TASKS = 128
# The kernel's default is at most 12 asynchronous requests at a time. fio 4k randread at depth 32 on
# a fake disk: 25 K IOPS with 12, 36 K with 64.
_MAX_BACKGROUND = 64

# pyfuse3 logs each answer that the kernel refuses. With ENOENT (fuse(4)) no program waits for the
# answer any more: the request was interrupted, or its file system was unmounted.
_REFUSED = "fuse_reply_* failed"

# How long a server that is told to end waits until files are closed: the kernel reports this only
# after close(2), or the umount(8) of a loop mount, has returned.
CLOSED_S = 2.0
_TELL_S = 60.0  # between two looks at what was left out of the log


class Mount:
    """One mount, and the server behind it. ``wish``: how ``unmount`` wants it to end, where there
    is a place for wishes. ``recorded``: the record of this process."""

    def __init__(
        self,
        urls: Sequence[str],
        mountpoint: str,
        options: MountOptions,
        told: UntilTold,
        recorded: Recorded,
        wish: Wish | None,
    ) -> None:
        self._urls = urls
        self._mountpoint = mountpoint
        self._options = options
        self._told = told
        self._recorded = recorded
        self._wish = wish
        self._files: LunFiles | None = None  # once they are mounted
        self._closed = False  # pyfuse3 serves no more
        self._early = 0  # a signal that came before ``ready``
        self._ending = EndOfUse()
        self._failed: list[str] = []
        self._in_use: list[str] = []  # files that were open for writing when a signal came
        self._unflushed: int | None = None

    async def run(self, source: str, ready: Callable[[], None]) -> int:
        """Mount and serve. Returns the number of a signal that came before ``ready``, or 0.
        ``source``: the first URL, or what names it, as it was given. Raises DataAtRisk."""
        if self._wish is not None:
            self._wish.forget()  # of a server that was killed
        logging.getLogger("pyfuse3").addFilter(is_of_use)
        if self._told.first:
            return self._told.first
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_on_signals, nursery.cancel_scope)
            served = default_option(self._mountpoint) | LASTING | self._options.disk
            async with open_disks(self._urls, served) as disks:
                note_use(
                    self._recorded,
                    [disk.info for disk in disks.disks.values()],
                    writes=not self._options.read_only,
                    shared=is_shared(self._urls, served),
                )
                await self._serve(disks, source, ready, nursery)
            nursery.cancel_scope.cancel()
        self._raise_for_loss()
        return self._early

    async def _serve(
        self, disks: TrioDiskSet, source: str, ready: Callable[[], None], nursery: trio.Nursery
    ) -> None:
        mountpoint = self._mountpoint
        self._ending = disks.ending
        files = LunFiles(disks.disks, self._options, disks.ending)
        pyfuse3.trio = Readers().namespace()  # type: ignore[attr-defined]
        _mount(files, mountpoint, _source(source), self._options)
        _, number = is_mounted(mountpoint)
        try:
            _raise_background_limit(number)
            self._files = files
            ready()
            with limited_lines():  # behind ``ready``, which says where the log is
                nursery.start_soon(_tell_left_out)
                async with trio.open_nursery() as watching:
                    watching.start_soon(watch, disks.ending.waits, self._wished, self._ask)
                    await pyfuse3.main(_MIN_TASKS, _MAX_TASKS)
                    watching.cancel_scope.cancel()
                if not self._told.first:
                    _detach_dead(mountpoint, number)
                disks.ending.ask()
                with trio.move_on_after(LONGEST_S) as limit:
                    failed = await files.flush_all()
                if limit.cancelled_caught:
                    failed = files.not_flushed()
                self._failed = list(failed)
                self._unflushed = files.unflushed
        finally:
            self._closed = True
            pyfuse3.close(unmount=True)
            _detach_dead(mountpoint, number)

    async def _end_on_signals(self, everything: trio.CancelScope) -> None:
        number = await self._told.begun()
        if self._files is None:
            self._early = number
        else:
            await self._end(self._files)
        everything.cancel()

    async def _end(self, files: LunFiles) -> None:
        """Returns when the target is waited for no longer."""
        self._ending.ask()
        by_force = self._wish is not None and self._wish.by_force
        if by_force:
            self._ending.give_up()
        if not self._closed:
            with trio.move_on_after(0 if by_force else CLOSED_S):
                await files.all_closed()
        if not self._closed:  # nor has the kernel's connection ended meanwhile (umount --force)
            self._in_use = list(files.written_to)
            pyfuse3.terminate()
        with trio.move_on_after(LONGEST_S):
            await self._told.lost_patience()
        impatient = self._told.endings.impatient
        why = "told twice to end" if impatient else f"not done in {LONGEST_S:g} s"
        log.error("%s: %s: not waiting for the target", self._mountpoint, why)
        self._failed, self._unflushed = list(files.not_flushed()), files.unflushed

    def _wished(self) -> bool:
        mine = {own_unit(), mount_unit(self._mountpoint)}
        return (self._wish is not None and self._wish.made) or is_stopping(mine)

    def _ask(self, wanted: bool) -> None:
        if not self._told.first:
            self._ending.ask(wanted)

    def _raise_for_loss(self) -> None:
        failed = self._failed
        if failed and self._wish is not None:
            self._wish.leave(self._unflushed)
        if self._in_use:
            failed.append(
                f"{', '.join(self._in_use)} was open for writing: what its users have not written"
                " to it yet fails (a loop mount loses what it had in memory): close and unmount"
                " first"
            )
        if failed:
            raise DataAtRisk(
                f"{self._mountpoint}: data may be lost: {'; '.join(failed)}", self._unflushed
            )


async def _tell_left_out() -> None:
    """See ``iserblk.limited_log``."""
    while True:
        await sleep(_TELL_S)
        tell_left_out()


def is_of_use(record: logging.LogRecord) -> bool:
    """A filter for what pyfuse3 logs."""
    said = record.getMessage()
    return _REFUSED not in said or not said.endswith(os.strerror(errno.ENOENT))


def _source(url: str) -> str:
    """The source for the mount table: the URL or name as given, as mount(8) compares it with the
    line of fstab to see what is mounted; but without user info and options if it has any."""
    if not is_url(url):
        return url
    parsed = parse_url(url)
    return parsed.redacted() if parsed.user or parsed.options else url


def _mount(files: LunFiles, mountpoint: str, url: str, options: MountOptions) -> None:
    """Mount. Raises MountFailed with the last line that libfuse or fusermount3 wrote to stderr."""
    name = url.replace("\\", "\\\\").replace(",", "\\,")
    words = {"default_permissions", f"subtype={SUBTYPE}", f"fsname={name}"}
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


def _detach_dead(mountpoint: str, number: int) -> None:
    """Unmount what this server does not serve any more: the file system at ``mountpoint`` with
    minor device ``number``, where it is still there. umount(8) with -f has the kernel end the
    connection, and then refuses to unmount files in use; libfuse leaves such a mount alone. An
    error is only logged."""
    if is_mounted(mountpoint) != (FILE_SYSTEM, number):
        return
    log.warning(
        "%s: the kernel has ended the connection while files were in use (umount -f does so):"
        " unmounted; requests to open files fail",
        mountpoint,
    )
    try:
        if os.geteuid() == 0:
            system_call("umount2", os.fsencode(mountpoint), MNT_DETACH)
        else:
            subprocess.run(unmount_command(mountpoint, How.LAZY), check=False)
    except OSError as error:
        log.error("%s: it stays mounted, and is dead: %s", mountpoint, error)


def _raise_background_limit(number: int) -> None:
    """Raise the kernel's limit of 12 asynchronous requests. An error is only logged.

    The limit can be set only in fusectl. If the machine has not mounted that (containers), mount it
    for a moment at a temporary directory. ``number``: the minor device number of the mount, which
    is the name of the connection's directory. (stat(2) would tell it, too, but this server would
    have to answer.)
    """
    name = f"{number}/max_background"
    try:
        if os.path.isdir(f"/sys/fs/fuse/connections/{number}"):
            _write_limit(f"/sys/fs/fuse/connections/{name}")
            return
        with tempfile.TemporaryDirectory(prefix="iserblk-fusectl.") as directory:
            system_call("mount", b"fusectl", directory.encode(), b"fusectl", 0, None)
            try:
                _write_limit(f"{directory}/{name}")
            finally:
                system_call("umount2", directory.encode(), 0)
    except OSError as error:
        log.debug("max_background stays at the kernel's default: %s", error)


def _write_limit(path: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(_MAX_BACKGROUND))
