"""Disks for asyncio: ``async with open_disks(urls, options) as disks``.

A thread of their own has the disks (``iserblk.disk.disk_thread``). So sessions are looked after
whatever the asyncio loop does meanwhile: pings are answered, deadlines are kept, a lost connection
is made again. Requests that a turn of the loop makes go over together, and so do the answers. No
request has a thread of its own.

Cancelling: the request is aborted at the target, and CancelledError is raised when that is done:
then its buffer is free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from iserblk.disk import aio
from iserblk.disk.disk_thread import DiskThread, HandedRequest
from iserblk.disk.seam import AsyncLun, CommandResult, Extent, LunInfo
from iserblk.errors import ConnectionLost, IserblkError, LocalProtocolError
from iserblk.loop.work import nothing

T = TypeVar("T")


class _Future(asyncio.Future[Any]):
    """The end of ``request``. ``cancel`` only asks: the future is cancelled when the request has
    ended."""

    def __init__(self, face: _Face, thread: DiskThread, disk: AsyncLun) -> None:
        super().__init__(loop=face.loop)
        self.request = HandedRequest(thread, disk, partial(face.ended, self))
        self._thread = thread
        self._unwanted = False

    def cancel(self, msg: Any = None) -> bool:
        if self.done():
            return False
        if not self._unwanted:
            self._unwanted = True
            request = self.request
            self._thread.take_back(HandedRequest(self._thread, request.disk, nothing), request)
        return True

    def end(self) -> None:
        """The request has ended."""
        request = self.request
        request.over = nothing  # it refers to this future: no circle is left
        if self._unwanted:
            super().cancel()
        elif request.error is not None:
            self.set_exception(request.error)
        else:
            self.set_result(request.result)


class _Face:
    """The disks' thread, for asyncio's. All methods but ``ended`` are called in asyncio's."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, str]) -> None:
        self.loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self.loop.create_future()
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._answers: deque[_Future] = deque()
        self._told = False  # asyncio's thread will look at ``_answers``
        self._thread = DiskThread(
            partial(aio.open_disks, urls, options),
            partial(self._tell, partial(self._opened.set_result, None)),
            lambda error: self._tell(partial(self._finish, error)),
        )

    async def open(self) -> dict[str, AsyncLun]:
        """Raises what ``aio.open_disks`` raises; then the thread has ended. So it has when this is
        cancelled."""
        self._thread.start()
        try:
            await asyncio.wait([self._opened, self._over], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            with suppress(Exception):
                await self.close()
            raise
        if self._over.done():
            await self.close()
        return self._thread.disks

    async def close(self) -> None:
        """Log out. What is still under way is aborted, and ends with ConnectionLost."""
        self._thread.close()
        cancelled = False
        while not self._over.done():
            try:
                await asyncio.wait([self._over])
            except asyncio.CancelledError:
                cancelled = True
        self._thread.join()  # it has nothing left to do
        self._deliver()
        if cancelled:
            raise asyncio.CancelledError
        self._over.result()

    def future(self, disk: AsyncLun) -> _Future:
        """For a request, which is to be begun. Raises LocalProtocolError in another loop, or none:
        nothing would tell it of the end, before which the buffer is in use."""
        if not self._is_running():
            raise LocalProtocolError(
                "the disk belongs to the asyncio loop that opened it: call it there"
                " (asyncio.run_coroutine_threadsafe does), or open disks in this loop, too"
            )
        return _Future(self, self._thread, disk)

    def begin(self, future: _Future) -> _Future:
        """Raises ConnectionLost where the disks are closed."""
        self._thread.send(future.request)
        return future

    async def tell(self, disk: AsyncLun, losses: int) -> None:
        """The client of ``disk`` was told of ``losses``. Requests that are begun later find it so.
        Goes on when it is cancelled: the caller is about to raise the error that tells."""

        async def told() -> None:
            disk.client.told(losses)

        future = self.future(disk)
        future.request.call(disk, told)
        try:
            self.begin(future)
        except ConnectionLost:  # nothing else uses the client any more
            disk.client.told(losses)
            return
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])

    def _is_running(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _deliver(self) -> None:
        self._told = False  # before it looks: an answer that comes later tells again
        answers = self._answers
        while answers:
            answers.popleft().end()

    # -- the disks' thread ------------------------------------------------------------------------

    def ended(self, future: _Future) -> None:
        self._answers.append(future)
        if not self._told:
            self._told = True
            self._tell(self._deliver)

    def _tell(self, call: Callable[[], object]) -> None:
        """Call it in asyncio's thread, if its loop still runs."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)


class AsyncioDisk:
    """One LUN for tasks of the asyncio loop that opened it. The methods are those of ``AsyncLun``,
    without those of ``DirectDisk``; all flushes are those of one FlushClient."""

    def __init__(self, disk: AsyncLun, face: _Face) -> None:
        self._disk = disk
        self._face = face

    async def _request(self, operation: Callable[[], Awaitable[T]]) -> T:
        future = self._face.future(self._disk)
        future.request.call(self._disk, operation)
        result: T = await self._face.begin(future)
        return result

    @property
    def info(self) -> LunInfo:
        return self._disk.info

    @property
    def size(self) -> int:
        return self._disk.size

    @property
    def dirty(self) -> bool:
        return self._disk.dirty

    @property
    def unflushed(self) -> int | None:
        return self._disk.unflushed

    async def refresh(self) -> int:
        return await self._request(self._disk.refresh)

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        future = self._face.future(self._disk)
        future.request.read(self._disk, buffer, offset)
        await self._face.begin(future)

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        future = self._face.future(self._disk)
        future.request.write(self._disk, buffer, offset, fua)
        await self._face.begin(future)

    async def flush(self) -> None:
        try:
            await self._request(partial(self._disk.flush, self._disk.client))
        except IserblkError as error:
            # Not before: a task that is cancelled instead has heard of no loss.
            await self._face.tell(self._disk, error.losses)
            raise

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        await self._request(partial(self._disk.trim, offset, length, fua, patient=patient))

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        zero = partial(self._disk.zero, may_trim=may_trim, fast=fast, fua=fua, patient=patient)
        await self._request(partial(zero, offset, length))

    async def extents(self, offset: int, length: int) -> list[Extent]:
        return await self._request(partial(self._disk.extents, offset, length))

    async def cache(self, offset: int, length: int) -> None:
        await self._request(partial(self._disk.cache, offset, length))

    async def command(
        self,
        cdb: bytes,
        data_in: bytearray | memoryview | None = None,
        data_out: bytes | bytearray | memoryview | None = None,
        *,
        timeout_s: float | None = None,
    ) -> CommandResult:
        """See ``BlockingLun.command``."""
        command = partial(self._disk.command, cdb, data_in, data_out, timeout_s=timeout_s)
        return await self._request(command)


class AsyncioDiskSet:
    """The opened disks: ``disks`` by export name, in URL order; ``default`` is the name of the
    first."""

    def __init__(self, disks: dict[str, AsyncioDisk]) -> None:
        self.disks = disks
        self.default = next(iter(disks))


@asynccontextmanager
async def open_disks(
    urls: Sequence[str], options: Mapping[str, str] | None = None
) -> AsyncIterator[AsyncioDiskSet]:
    """Log in to every URL, find its disks; log out at the end. ``options`` hold for each URL that
    has no others (docs/options.md). Requests that are under way at the end are aborted; those that
    have no answer raise ConnectionLost. Raises what connecting raises; then no thread, descriptor
    or session is left."""
    face = _Face(urls, dict(options or {}))
    opened = await face.open()
    try:
        yield AsyncioDiskSet({name: AsyncioDisk(disk, face) for name, disk in opened.items()})
    finally:
        await face.close()
