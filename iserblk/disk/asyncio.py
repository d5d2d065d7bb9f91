"""Disks for asyncio: ``async with open_disks(urls, options) as disks``.

trio runs in a thread of its own, with ``iserblk.disk.aio`` in it. So sessions are looked after
whatever the asyncio loop does meanwhile: pings are answered, deadlines are kept, a lost connection
is made again. Requests that a turn of the loop makes go over together, and so do the answers. No
request has a thread of its own.

Cancelling: the request is aborted at the target, and CancelledError is raised when that is done:
then its buffer is free.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import trio

from iserblk.disk import aio
from iserblk.disk.seam import AsyncLun, CommandResult, Extent, LunInfo
from iserblk.errors import ConnectionLost, IserblkError, LocalProtocolError

T = TypeVar("T")


def _closed() -> ConnectionLost:
    return ConnectionLost("the disks were closed while a request was under way")


class _Request(asyncio.Future[T], Generic[T]):
    """One operation of a disk. It runs in trio's thread; the future belongs to asyncio's.

    ``cancel`` only asks: the future is cancelled when the operation has ended.
    """

    def __init__(self, trio_thread: _TrioThread, operation: Callable[[], Awaitable[T]]) -> None:
        super().__init__(loop=trio_thread.loop)
        self._trio_thread = trio_thread
        self._operation = operation
        self._scope: trio.CancelScope | None = None
        self._unwanted = False
        self._outcome: T | None = None
        self._problem: Exception | None = None

    def cancel(self, msg: Any = None) -> bool:
        if self.done():
            return False
        if not self._unwanted:
            self._unwanted = True
            self._trio_thread.soon(self._stop)
        return True

    def _stop(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """In trio's thread."""
        try:
            if not self._unwanted:  # from here to the first wait ``_stop`` cannot come
                with trio.CancelScope() as self._scope:
                    self._outcome = await self._operation()
        except trio.Cancelled:
            self._problem = _closed()
            raise
        except Exception as error:
            self._problem = error
        finally:
            self._trio_thread.ended(self)

    def end(self) -> None:
        """In asyncio's thread."""
        if self._unwanted:
            super().cancel()
        elif self._problem is not None:
            self.set_exception(self._problem)
        else:
            self.set_result(self._outcome)  # type: ignore[arg-type]

    def refuse(self) -> None:
        """In asyncio's thread: it has not begun, and cannot any more."""
        self._problem = _closed()
        self.end()


class _TrioThread:
    """A thread that runs trio, with the disks of ``urls`` open in it. All methods but ``ended`` are
    called in asyncio's thread."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, str]) -> None:
        self.loop = asyncio.get_running_loop()
        self._urls = urls
        self._options = options
        self._begun = self.loop.create_future()  # trio runs, or cannot
        self._opened: asyncio.Future[None] = self.loop.create_future()
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._token: trio.lowlevel.TrioToken
        self._scope: trio.CancelScope
        self._stop: trio.Event
        self._nursery: trio.Nursery
        self._closing = False  # no request begins any more
        self.disks: dict[str, AsyncLun] = {}
        self._requests: deque[_Request[Any]] = deque()
        self._asked = False  # trio's thread will look at ``_requests``
        self._answers: deque[_Request[Any]] = deque()
        self._told = False  # asyncio's thread will look at ``_answers``
        self._thread = threading.Thread(target=self._body, name="iserblk-trio", daemon=True)

    # -- asyncio's thread -------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises what ``aio.open_disks`` raises; then the thread has ended. So it has when this is
        cancelled."""
        self._thread.start()
        try:
            await _wait_through(self._begun)
            await asyncio.wait([self._opened, self._over], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not self._over.done():
                self.soon(self._scope.cancel)
            with suppress(Exception):
                await self._ended()
            raise
        if self._over.done():
            await self._ended()

    async def close(self) -> None:
        """Log out. What is still under way is aborted, and ends with ConnectionLost."""
        self.soon(self._stop.set)
        await self._ended()

    async def _ended(self) -> None:
        try:
            await _wait_through(self._over)
        finally:
            self._thread.join()  # it has nothing left to do
        self._over.result()

    def soon(self, call: Callable[[], object]) -> None:
        """Call it in trio's thread, if that still runs."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call)

    def request(self, operation: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        """Begin ``operation``. Raises LocalProtocolError in another loop, or none: nothing would
        tell it of the end, before which the buffer is in use."""
        if not self._is_running():
            raise LocalProtocolError(
                "the disk belongs to the asyncio loop that opened it: call it there"
                " (asyncio.run_coroutine_threadsafe does), or open disks in this loop, too"
            )
        if self._over.done():
            raise ConnectionLost("the disks are closed")
        request = _Request(self, operation)
        self._requests.append(request)
        if not self._asked:
            self._asked = True
            self.soon(self._begin)
        return request

    def _is_running(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False

    def _deliver(self) -> None:
        self._told = False  # before it looks: see ``_begin``
        answers = self._answers
        while answers:
            answers.popleft().end()

    # -- trio's thread ----------------------------------------------------------------------------

    def _body(self) -> None:
        error: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as problem:
            error = problem
        self._tell(partial(self._finish, error))

    def _finish(self, error: BaseException | None) -> None:
        """In asyncio's thread."""
        if not self._begun.done():
            self._begun.set_result(None)
        for request in self._requests:
            request.refuse()
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _tell(self, call: Callable[[], object]) -> None:
        """Call it in asyncio's thread, if its loop still runs."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        with trio.CancelScope() as self._scope:
            self._tell(partial(self._begun.set_result, None))
            async with aio.open_disks(self._urls, self._options) as disks:
                self.disks = disks.disks
                async with trio.open_nursery() as self._nursery:
                    self._tell(partial(self._opened.set_result, None))
                    try:
                        await self._stop.wait()
                    finally:  # also where what looks after the sessions has broken
                        self._closing = True
                        self._nursery.cancel_scope.cancel()

    def _begin(self) -> None:
        # In this order: a request that is not seen here has found the flag as it was left.
        self._asked = False
        requests = self._requests
        while requests and not self._closing:
            self._nursery.start_soon(requests.popleft().run)

    def ended(self, request: _Request[Any]) -> None:
        self._answers.append(request)
        if not self._told:
            self._told = True
            self._tell(self._deliver)


async def _wait_through(future: asyncio.Future[Any]) -> None:
    """Wait for ``future`` also when cancelled meanwhile; raise CancelledError then."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


class AsyncioDisk:
    """One LUN for tasks of the asyncio loop that opened it. The methods are those of
    ``AsyncLun``."""

    def __init__(self, disk: AsyncLun, request: Callable[[Callable[[], Any]], Any]) -> None:
        self._disk = disk
        self._request = request

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
        size: int = await self._request(self._disk.refresh)
        return size

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        await self._request(partial(self._disk.read_into, buffer, offset))

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        await self._request(partial(self._disk.write, buffer, offset, fua))

    async def flush(self) -> None:
        try:
            await self._request(partial(self._disk.flush, self._disk.client))
        except IserblkError as error:
            # Not before: a task that is cancelled instead has heard of no loss.
            self._disk.client.told(error.losses)
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
        found: list[Extent] = await self._request(partial(self._disk.extents, offset, length))
        return found

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
        result: CommandResult = await self._request(command)
        return result


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
    has no others (docs/options.md). Requests that are under way at the end are aborted, and raise
    ConnectionLost. Raises what connecting raises; then no thread, descriptor or session is left."""
    thread = _TrioThread(list(urls), options or {})
    await thread.open()
    try:
        yield AsyncioDiskSet(
            {name: AsyncioDisk(disk, thread.request) for name, disk in thread.disks.items()}
        )
    finally:
        await thread.close()
