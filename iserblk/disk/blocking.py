"""Disks for threads: ``with open_disks(urls, options) as disks``.

A thread of their own has the disks (``iserblk.disk.disk_thread``). A thread that calls a method
hands its request over, and waits until it has ended. An interrupt (KeyboardInterrupt) aborts the
request at the target; it is raised when the buffer is free.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from iserblk.disk import aio
from iserblk.disk.disk_thread import DiskThread, HandedRequest
from iserblk.disk.file import open_file
from iserblk.disk.seam import (
    AsyncLun,
    BlockingLun,
    CommandResult,
    Extent,
    FlushClient,
    LossCount,
    LunInfo,
)
from iserblk.errors import ConnectionLost, IserblkError

log = logging.getLogger(__name__)

T = TypeVar("T")

# So often a thread that opens disks, which may take an outage, has Python look at its signals. A
# signal that has come when Python had looked, and before the thread slept, does not end the sleep;
# nor does one of which the kernel tells another thread.
_LOOK_S = 1.0


class Bell:
    """Wakes the thread that waits for it; a ring is kept until then.

    It is a descriptor: what writes to it gives up the GIL, so that the thread that wakes need not
    wait for that. (With a lock it would.) It is closed when nothing refers to it any more: a thread
    that is about to ring then rings nothing else."""

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def wait(self) -> None:
        os.read(self._fd, 8)

    def __del__(self) -> None:
        with suppress(AttributeError):  # there was no descriptor for it
            os.close(self._fd)


class Place:
    """Where a thread waits until its ``request`` has ended. Both are used again and again."""

    __slots__ = ("request", "wait")

    def __init__(self, owner: DiskThread, disk: AsyncLun) -> None:
        bell = Bell()
        self.wait = bell.wait
        self.request = HandedRequest(owner, disk, bell.ring)


class Places:
    """The places of all threads: those that are free."""

    def __init__(self, thread: DiskThread) -> None:
        self.thread = thread
        self._free: deque[Place] = deque()

    def take(self, disk: AsyncLun) -> Place:
        try:
            return self._free.pop()
        except IndexError:
            return self._new(disk)

    def _new(self, disk: AsyncLun) -> Place:
        try:
            return Place(self.thread, disk)
        except OSError as error:
            text = (
                f"no descriptor for a thread that waits: {error.strerror}; raise the limit of"
                " descriptors (ulimit -n, LimitNOFILE=)"
            )
        raise IserblkError(text)

    def carry_out(self, place: Place) -> Any:
        """Hand the request over, and wait for its end; returns its result. Raises what it has
        failed with; an interrupt when its buffer is free."""
        request = place.request
        try:
            self.thread.send(request)
            place.wait()
        except BaseException:
            try:
                self._take_back(place)
            except BaseException:  # another interrupt, before its first step or between two
                self._take_back(place)
            raise
        result, error = request.renew()
        self._free.append(place)
        if self.thread.is_over:
            self.close()  # again
        if error is not None:
            try:
                raise error
            finally:
                error = None  # its traceback has this frame: nothing is to wait for a collection
        return result

    def call(self, disk: AsyncLun, operation: Callable[[], Awaitable[T]]) -> T:
        """Have the disks' thread await ``operation()``; else see ``carry_out``."""
        place = self.take(disk)
        place.request.call(disk, operation)
        result: T = self.carry_out(place)
        return result

    def do(self, disk: AsyncLun, function: Callable[[], T]) -> T:
        """Call ``function`` in the disks' thread; returns its result. (When that thread has ended,
        nothing else uses what belonged to it.)"""

        async def called() -> T:
            return function()

        try:
            return self.call(disk, called)
        except ConnectionLost:
            self.thread.join()  # it may be ending still
            return function()

    def _take_back(self, place: Place) -> None:
        """On return the request is not under way. Its place is not used again: what was
        interrupted may be told of its end late."""
        thread, request = self.thread, place.request
        while True:
            try:
                ended = threading.Event()
                thread.take_back(HandedRequest(thread, request.disk, ended.set), request)
                ended.wait()
                break
            except BaseException:  # another interrupt: it is urgent
                thread.cut()
        request.renew()

    def close(self) -> None:
        self._free.clear()


class ThreadClient:
    """Implements FlushClient for threads: ``client`` belongs to the thread of the disks."""

    def __init__(self, client: FlushClient, disk: AsyncLun, places: Places) -> None:
        self.client = client
        self._disk = disk
        self._places = places

    @property
    def owed(self) -> bool:
        return self.client.owed

    @property
    def count(self) -> LossCount:
        return self.client.count

    def told(self, losses: int) -> None:
        self._places.do(self._disk, partial(self.client.told, losses))

    def unheard(self) -> None:
        self._places.do(self._disk, self.client.unheard)

    def lost_elsewhere(self, losses: int) -> None:
        self._places.do(self._disk, partial(self.client.lost_elsewhere, losses))

    def ended(self) -> None:
        self._places.do(self._disk, self.client.ended)


class ThreadDisk:
    """Implements BlockingLun: one LUN for threads. ``disk``: belongs to the thread of the disks.
    ``places``: of all LUNs of the set."""

    def __init__(self, disk: AsyncLun, places: Places) -> None:
        self.disk = disk
        self.places = places
        self._take = places.take
        self._carry_out = places.carry_out
        self._call = places.call
        self.client: FlushClient = self._for_threads(disk.client)
        self.files: weakref.WeakSet[BinaryIO] = weakref.WeakSet()

    @property
    def info(self) -> LunInfo:
        return self.disk.info

    @property
    def size(self) -> int:
        return self.disk.size

    @property
    def dirty(self) -> bool:
        return self.disk.dirty

    @property
    def unflushed(self) -> int | None:
        return self.disk.unflushed

    def new_client(self) -> FlushClient:
        return self._for_threads(self.places.do(self.disk, self.disk.new_client))

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        begin = partial(self.disk.only_client, before, changed)
        return self._for_threads(self.places.do(self.disk, begin))

    def _for_threads(self, client: FlushClient) -> ThreadClient:
        return ThreadClient(client, self.disk, self.places)

    def refresh(self) -> int:
        size: int = self._call(self.disk, self.disk.refresh)
        return size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        place = self._take(self.disk)
        place.request.read(self.disk, buffer, offset)
        self._carry_out(place)

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        place = self._take(self.disk)
        place.request.write(self.disk, buffer, offset, fua)
        self._carry_out(place)

    def flush(self, client: FlushClient | None = None) -> None:
        asks = client or self.client
        given = asks.client if isinstance(asks, ThreadClient) else asks
        try:
            self._call(self.disk, partial(self.disk.flush, given))
        except IserblkError as error:
            # Not before: a thread that is interrupted instead has heard of no loss.
            if client is None and error.losses:
                self._tell(asks, error.losses)
            raise

    def _tell(self, client: FlushClient, losses: int) -> None:
        try:
            client.told(losses)
        except BaseException:  # interrupted: that is raised, and not the error that tells
            client.unheard()
            raise

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        self._call(self.disk, partial(self.disk.trim, offset, length, fua, patient=patient))

    def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        zero = partial(self.disk.zero, may_trim=may_trim, fast=fast, fua=fua, patient=patient)
        self._call(self.disk, partial(zero, offset, length))

    def extents(self, offset: int, length: int) -> list[Extent]:
        return self._call(self.disk, partial(self.disk.extents, offset, length))

    def cache(self, offset: int, length: int) -> None:
        self._call(self.disk, partial(self.disk.cache, offset, length))

    def open(
        self, mode: str = "rb", buffering: int = -1, *, offset: int = 0, length: int | None = None
    ) -> BinaryIO:
        file = open_file(self, mode, buffering, offset=offset, length=length)
        self.files.add(file)
        return file

    def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        command = partial(self.disk.command, cdb, data_in, data_out, timeout_s=timeout_s)
        return self._call(self.disk, command)


class ThreadDiskSet:
    """The opened disks: ``disks`` by export name, in URL order; ``default`` is the name of the
    first. ``ending``: of all their sessions.

    A set that is not closed is when the interpreter ends; so are its files before it."""

    def __init__(self, opener: Callable[[], AbstractAsyncContextManager[aio.TrioDiskSet]]) -> None:
        """Connect. Raises what connecting raises, and then leaves nothing behind."""
        self._opened = threading.Event()
        self._error: BaseException | None = None
        self._thread = thread = DiskThread(opener, self._opened.set, self._over)
        self._places = Places(thread)
        try:
            thread.start()
            while not self._opened.wait(_LOOK_S):
                pass
            if self._error is not None:
                thread.join()
                error, self._error = self._error, None
                raise error
            self.ending = thread.ending.by(thread.call)
            places = self._places
            self._disks = {name: ThreadDisk(disk, places) for name, disk in thread.disks.items()}
            self.disks: dict[str, BlockingLun] = {**self._disks}
            self.default = next(iter(self.disks))
            atexit.register(self._exit)
        except BaseException:  # interrupted, or what opening has raised
            thread.close()
            raise

    def _over(self, error: BaseException | None) -> None:
        self._error = error
        self._opened.set()

    def close(self) -> None:
        """Log out and end the thread of the disks. Flushes nothing. Idempotent; what runs in other
        threads still ends with ConnectionLost."""
        self._thread.close()
        self._thread.join()
        atexit.unregister(self._exit)
        self._places.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _exit(self) -> None:
        """The set was not closed. Behind this no thread runs that could write what its files have
        kept."""
        for name, disk in self._disks.items():
            for file in [*disk.files]:
                try:
                    file.close()
                except OSError as error:
                    log.error("%s: a file was not closed, and cannot be: %s", name, error)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_disks(urls: Sequence[str], options: Mapping[str, str] | None = None) -> ThreadDiskSet:
    """Log in to every URL and find its disks. ``options`` hold for each URL that has no others
    (docs/options.md). Raises BadArgument, NotSupported, TransportError,
    LoginError, NoSuchLun…; then no thread, descriptor or session is left."""
    return ThreadDiskSet(partial(aio.open_disks, urls, dict(options or {})))
