"""Many requests in flight from one trio task: they are begun by plain calls, and their ends are
waited for together.

With a task for each request trio runs one of them for each answer: a third of what a 4 KiB read
over iSER costs the client at depth 32. Here it runs one, once for all the answers that came
together. The event-driven front-ends work in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import get_ident

import trio

from iserblk.commands.command import Command, Waiter
from iserblk.disk.seam import DirectDisk, Rest
from iserblk.errors import IserblkError, LocalProtocolError
from iserblk.loop.nap import Nap


class Request:
    """A read or write of a queue; implements Waiter for its command.

    ``buffer``, ``offset``, ``writes`` and ``tag`` are as they were given. When ``ended`` of the
    queue has returned the request, ``error`` is what it failed with, or None, and ``buffer`` is
    free.
    """

    __slots__ = ("buffer", "error", "offset", "owner", "pending", "slot", "tag", "writes")

    def __init__(
        self, owner: RequestQueue, buffer: memoryview, offset: int, writes: bool, tag: object
    ) -> None:
        self.owner = owner
        self.buffer = buffer
        self.offset = offset
        self.writes = writes
        self.tag = tag
        self.error: IserblkError | None = None
        self.pending = 0
        self.slot: Command | None = None

    def task_done(self) -> None:
        """Implements Waiter, for one command."""
        self.pending -= 1
        self.owner._answer(self)


class RequestQueue:
    """Requests to one disk, of one trio task. ``open_queue`` makes it.

    ``open``: requests that have begun and that ``ended`` has not returned. The buffer of each is
    the queue's. No order is kept between them, as with any two requests that are under way at once.
    """

    def __init__(self, disk: DirectDisk, nursery: trio.Nursery) -> None:
        self.open = 0
        self._disk = disk
        self._nursery = nursery
        self._under_way = 0  # commands
        self._answered: deque[Request] = deque()  # whose command has ended
        self._over: list[Request] = []  # that a task has carried out
        self._nap = Nap()  # of ``ended``
        self._waits = False  # a task in ``ended``
        self._keeper = Nap()  # of ``_keep``
        self._returned = Nap()  # of ``_drain``
        self._closed = False
        self._home = get_ident()

    @trio.lowlevel.enable_ki_protection
    def read(self, buffer: memoryview, offset: int, tag: object = None) -> Request:
        """Begin to fill ``buffer`` (writable, contiguous bytes) from ``offset`` on. Does not wait:
        what finds no room in the session waits for it by itself. Raises LocalProtocolError in
        another thread, when the queue is closed, and for what is no memoryview; all else is the
        ``error`` of the request."""
        self._check(buffer)
        request = Request(self, buffer, offset, False, tag)
        slot = request.slot = self._disk.begin_read(buffer, offset, request)
        self.open += 1
        if slot is None:
            self._nursery.start_soon(self._carry_out, request, False, None)
        else:
            self._under_way += 1
        return request

    @trio.lowlevel.enable_ki_protection
    def write(
        self, buffer: memoryview, offset: int, tag: object = None, *, fua: bool = False
    ) -> Request:
        """Begin to write ``buffer``; with ``fua`` it is on stable storage at the end. Else see
        ``read``. A flush covers the writes that ``ended`` has returned before it is called."""
        self._check(buffer)
        request = Request(self, buffer, offset, True, tag)
        slot = None if fua else self._disk.begin_write(buffer, offset, request)
        request.slot = slot
        self.open += 1
        if slot is None:
            self._nursery.start_soon(self._carry_out, request, fua, None)
        else:
            self._under_way += 1
        return request

    def _check(self, buffer: object) -> None:
        if self._closed:
            raise LocalProtocolError("the queue of requests is closed: begin requests before that")
        if get_ident() != self._home:
            raise LocalProtocolError(
                "the queue of requests belongs to the trio loop that opened it, in another thread:"
                " call it there (trio.from_thread.run_sync does)"
            )
        if not isinstance(buffer, memoryview):
            raise LocalProtocolError(
                f"a request takes a memoryview of its buffer, not a {type(buffer).__name__}"
            )

    @trio.lowlevel.enable_ki_protection  # an interrupt is raised only where it waits
    async def ended(self) -> list[Request]:
        """Wait until a request has ended; return all that have since the last call. [] where none
        is open. If it is cancelled, the requests go on."""
        if self._waits:
            raise LocalProtocolError("another task waits for this queue: give each its own")
        self._settle()
        if not self.open:
            await trio.lowlevel.checkpoint()
            self._settle()  # of a request that has begun meanwhile, and ended
        while self.open and not self._over:
            self._waits = True
            try:
                await self._nap.sleep()
            finally:
                self._waits = False
                self._returned.wake()
                if self._answered:
                    # This task may be cancelled in the turn in which the answers come. Then another
                    # task settles them.
                    self._keeper.wake()
            self._settle()
        over, self._over = self._over, []
        self.open -= len(over)
        self._returned.wake()
        return over

    def _answer(self, request: Request) -> None:
        """The command of a request has ended. It is settled soon, whatever the user of the queue
        waits for: until then it keeps its place in the session, and the lock of its blocks."""
        self._under_way -= 1
        self._answered.append(request)
        if self._waits and not self._closed:
            self._nap.wake()
        else:
            self._keeper.wake()

    def _settle(self) -> None:
        answered = self._answered
        while answered:  # one by one: none is lost where a bug raises
            self._end(answered.popleft())

    def _end(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None  # ``read`` or ``write`` set it
        disk = self._disk
        try:
            rest = disk.end_write(slot) if request.writes else disk.end_read(slot)
        except IserblkError as error:
            request.error = error
        except BaseException:  # a bug
            request.error = IserblkError("internal error")
            self._over.append(request)
            raise
        else:
            if rest is not None and not self._closed:
                self._nursery.start_soon(self._carry_out, request, False, rest)
                return
            if rest is not None:
                request.error = _closed()
        self._over.append(request)

    @trio.lowlevel.enable_ki_protection
    async def _carry_out(self, request: Request, fua: bool, rest: Rest | None) -> None:
        """Body of a task: a request that takes more than one command, or waits for room.
        ``rest``: of one that has begun already."""
        disk = self._disk
        try:
            if request.writes:
                await disk.write(request.buffer, request.offset, fua, rest)
            else:
                await disk.read_into(request.buffer, request.offset, rest)
        except IserblkError as error:
            request.error = error
        except BaseException:  # the queue is being closed, or a bug
            request.error = _closed()
            raise
        finally:
            self._over.append(request)
            self._nap.wake()
            self._returned.wake()

    @trio.lowlevel.enable_ki_protection
    async def _drain(self) -> None:
        """Wait until all have ended. Raises the first error of those that nobody has fetched: a
        task that waits in ``ended``, now or later, goes first."""
        error: IserblkError | None = None
        while True:
            self._settle()
            if not self._waits:
                over, self._over = self._over, []
                self.open -= len(over)
                for request in over:
                    error = error or request.error
            if not self.open:
                break
            await self._returned.sleep()
        if error is not None:
            raise error

    @trio.lowlevel.enable_ki_protection
    async def _keep(self) -> None:
        """Body of a task, to be cancelled at the end. Then abort at the target what is under way,
        and wait until it has ended: before that no buffer is free."""
        try:
            while True:
                if not self._waits:
                    self._settle()
                if self._over:
                    self._nap.wake()
                    self._returned.wake()
                await self._keeper.sleep()
        finally:
            with trio.CancelScope(shield=True):
                self._closed = True
                self._disk.abandon(self._is_mine)
                while self._under_way > 0:
                    await self._keeper.sleep()
                self._settle()
                self._nap.wake()  # one that waits, shielded from being cancelled

    def _is_mine(self, waiter: Waiter) -> bool:
        return isinstance(waiter, Request) and waiter.owner is self

    def _forget(self) -> None:
        """After the end. Nobody asks for what is left, which refers to buffers."""
        if not self._waits:
            self._over.clear()
            self.open = 0


def _closed() -> IserblkError:
    return IserblkError("the queue was closed before the request had been carried out")


@asynccontextmanager
async def open_queue(disk: DirectDisk) -> AsyncIterator[RequestQueue]:
    """A queue of requests to ``disk``. At the end of the context it waits for those that are open,
    and raises the first error that ``ended`` has not returned. If the context is left by an
    exception, or cancelled, they are aborted at the target; their buffers are free afterwards.
    Raises LocalProtocolError where the disk belongs to another trio loop."""
    disk.check_here()
    error: BaseException | None = None
    queue: RequestQueue | None = None
    try:
        async with trio.open_nursery() as nursery:
            queue = RequestQueue(disk, nursery)
            nursery.start_soon(queue._keep)
            try:
                yield queue
                await queue._drain()
            except (Exception, KeyboardInterrupt) as problem:
                error = problem  # raised below, not inside the nursery's exception group
            nursery.cancel_scope.cancel()
    finally:
        if queue is not None:
            queue._forget()
    if error is not None:
        raise error
