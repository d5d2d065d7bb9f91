"""Requests of other threads: one thread has the disks, with a loop that begins and ends their
requests by plain calls.

Threads hand requests over in a deque, with one wake-up for all that come together. So the sessions
are looked after whatever those threads do: pings are answered, deadlines are kept, and a lost
connection is made again. ``iserblk.disk.blocking`` is the face for threads that wait,
``iserblk.disk.asyncio`` the one for tasks of asyncio.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final

import trio

from iserblk.commands.command import Command, Waiter
from iserblk.disk.aio import TrioDiskSet
from iserblk.disk.ending import EndOfUse
from iserblk.disk.seam import AsyncLun, Rest
from iserblk.errors import ConnectionLost, IserblkError
from iserblk.loop import guest
from iserblk.loop.busy_polling import FEW, Pace, pace_of
from iserblk.loop.here import loop_here
from iserblk.loop.nap import Nap
from iserblk.loop.seam import Loop
from iserblk.loop.strands import Strand, Strands, open_strands, park
from iserblk.loop.work import Function, nothing

READ: Final = 0
WRITE: Final = 1
CALL: Final = 2  # ``operation``
TAKE_BACK: Final = 3  # ``about``
NOTHING: Final = memoryview(b"")

_WAITS: Final = 0  # in the deque, or not handed over
_BEGUN: Final = 1
_ENDED: Final = 2


class HandedRequest:
    """A request to ``disk`` that a thread hands over; implements Waiter for its command.

    The thread says with ``read``, ``write`` or ``call`` what it is, and reads ``result`` and
    ``error`` behind the end. ``over`` is called when the request has ended, as a rule in the disks'
    thread: from then on its buffer is free."""

    def __init__(self, owner: DiskThread, disk: AsyncLun, over: Callable[[], object]) -> None:
        self.owner = owner
        self.over = over
        self.kind = CALL
        self.disk = disk
        self.buffer = NOTHING
        self.offset = 0
        self.fua = False
        self.operation: Callable[[], Awaitable[Any]] | None = None
        self.about: HandedRequest | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.pending = 0
        self.state = _WAITS
        self.unwanted = False  # it is taken back
        self.slot: Command | None = None
        self.strand: Strand | None = None
        self.followers: list[HandedRequest] = []  # that take it back

    def read(self, disk: AsyncLun, buffer: memoryview, offset: int) -> None:
        self.kind = READ
        self.disk = disk
        self.buffer = buffer
        self.offset = offset

    def write(self, disk: AsyncLun, buffer: memoryview, offset: int, fua: bool) -> None:
        self.kind = WRITE
        self.disk = disk
        self.buffer = buffer
        self.offset = offset
        self.fua = fua

    def call(self, disk: AsyncLun, operation: Callable[[], Awaitable[Any]]) -> None:
        """The disks' thread is to await ``operation()``, whose result is that of the request."""
        self.kind = CALL
        self.disk = disk
        self.operation = operation

    def task_done(self) -> None:
        self.pending -= 1
        self.owner.answered(self)

    def renew(self) -> tuple[Any, BaseException | None]:
        """In the thread that has waited for it: it may be handed over again. Returns its result and
        its error."""
        ended = self.result, self.error
        self.buffer = NOTHING
        self.operation = self.result = self.error = self.slot = self.strand = None
        self.state = _WAITS
        return ended


class DiskThread:
    """A thread, and the disks that it has open.

    ``opener`` makes their context. ``opened`` is called in the thread when ``disks`` is there,
    ``over`` at the end of the thread, with what it has raised, or None. Requests that are under way
    at the end are aborted at the target; those and later ones raise ConnectionLost.
    """

    def __init__(
        self,
        opener: Callable[[], AbstractAsyncContextManager[TrioDiskSet]],
        opened: Callable[[], object],
        over: Callable[[BaseException | None], object],
    ) -> None:
        self.disks: dict[str, AsyncLun] = {}
        self.ending = EndOfUse()
        self.is_over = False
        self._opener = opener
        self._opened = opened
        self._when_over = over
        self._why = "the disks are closed"
        self._loop: Loop | None = None
        # ``_take_in`` and ``_on_answers`` while the thread runs: a method is bound once, not for
        # each request.
        self._taking_in: Function = nothing
        self._answering: Function = nothing
        self._unwanted = False
        self._scope: trio.CancelScope | None = None
        self._group: Strands | None = None
        self._nursery: trio.Nursery | None = None
        self._strand: Strand | None = None
        self._bug: BaseException | None = None  # that a turn has met
        self._inbox: deque[HandedRequest] = deque()
        self._asked = False  # ``_take_in`` is to be called
        self._done: deque[HandedRequest] = deque()  # whose command has ended
        self._woken = False  # ``_on_answers`` is to be called
        self._carried: set[HandedRequest] = set()  # by strands of their own
        self._open = 0
        self._commands = 0  # under way, each of one request
        self._answers = 0
        self._closing = False  # nothing begins any more
        self._returned = Nap()  # of ``_abandon``
        self._pace: Pace | None = None
        # (As ``_thread`` the compiled field would have the name of a keyword of C.)
        self._runner = threading.Thread(target=self._body, name="iserblk-disks", daemon=True)

    # -- any thread -------------------------------------------------------------------------------

    def start(self) -> None:
        _running.add(self)
        self._runner.start()

    def send(self, request: HandedRequest) -> None:
        """Hand ``request`` over. Raises ConnectionLost where the disks are closed."""
        if self.is_over:
            raise ConnectionLost(self._why)
        self._inbox.append(request)
        if not self._asked:
            self._asked = True
            self._wake(self._taking_in)
        if self.is_over:
            self._refuse()

    def take_back(self, letter: HandedRequest, request: HandedRequest) -> None:
        """Abort ``request``, which may have been handed over or not, at the target. ``letter`` ends
        when ``request`` does, or at once."""
        request.unwanted = True
        letter.kind = TAKE_BACK
        letter.about = request
        if self.is_over:
            letter.over()
            return
        self._inbox.append(letter)
        # In any case: an interrupt may have come between the two steps in ``send``.
        self._wake(self._take_in)
        if self.is_over:
            self._refuse()

    def cut(self) -> None:
        """Do not wait for targets: cut all connections. They are made again."""
        self._wake(self.ending.disconnect)

    def close(self) -> None:
        """Ask for the end, which ``join`` waits for."""
        self._unwanted = True
        self._wake(self._end)

    def join(self) -> None:
        self._runner.join()

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function`` soon in the disks' thread, if there is one still."""
        if not self.is_over:
            self._wake(function)

    def forked(self) -> None:
        """In a child process, which has no such thread. A thread of the parent may have held a lock
        of the loop, and its bell is the parent's: nothing here may wake it."""
        self.is_over = True
        self._loop = None
        self._why = "the disks belong to the process that opened them: open disks behind the fork"

    def _wake(self, function: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None:
            loop.wake(function)

    def _refuse(self) -> None:
        """Of those that were handed over nothing has begun, and nothing will."""
        inbox = self._inbox
        while inbox:
            try:
                request = inbox.popleft()
            except IndexError:  # another thread has refused the last one
                return
            request.error = ConnectionLost(self._why)
            request.state = _ENDED
            request.over()

    # -- the thread -------------------------------------------------------------------------------

    def _body(self) -> None:
        error: BaseException | None = None
        try:
            guest.run(self._main)
        except BaseException as problem:
            error = problem
        self.is_over = True
        self._taking_in = self._answering = nothing  # no circle is left
        _running.discard(self)
        self._refuse()
        self._when_over(error)

    async def _main(self) -> None:
        self._taking_in, self._answering = self._take_in, self._on_answers
        self._loop = loop_here()  # from now on others wake it
        with trio.CancelScope() as opening:
            self._scope = opening
            if self._unwanted:
                return
            async with self._opener() as disks:
                self.disks = disks.disks
                self.ending = disks.ending
                self._pace = pace_of(disks.busy_poll_us)
                try:
                    with trio.CancelScope() as serving:
                        self._scope = serving
                        await self._serve()
                finally:
                    self._closing = True
                    self._scope = None

    def _end(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _serve(self) -> None:
        try:
            async with trio.open_nursery() as self._nursery, open_strands() as self._group:
                self._strand = self._group.start_soon(self._on_batches, name="requests of threads")
                # A strand of its own: it is there also where the other one has met a bug.
                last = self._group.start_soon(_rest, name="the end of requests of threads")
                last.abandon = self._abandon
                self._opened()
                await trio.sleep_forever()
        finally:
            for request in [*self._carried]:  # whose strands were closed before they began
                self._fail(request)
            self._group = self._nursery = self._strand = None

    def answered(self, request: HandedRequest) -> None:
        """The command of ``request`` has ended."""
        self._commands -= 1
        self._done.append(request)
        if self._closing:
            self._returned.wake()
        elif not self._woken and self._loop is not None and self._strand is not None:
            self._woken = True
            if self._commands >= FEW:
                self._strand.wake()
            else:  # nothing else comes with it: the call alone takes less
                self._loop.call_soon(self._answering)

    async def _on_batches(self) -> None:
        """Body of the strand: it is resumed as soon as the answers that came together are taken in,
        and what is begun then leaves with what other strands begin."""
        while True:
            await park()
            if self._bug is not None:
                bug, self._bug = self._bug, None  # no circle is left
                raise bug
            self._on_answers()

    def _on_answers(self) -> None:
        self._woken = False
        group = self._group
        if group is not None and not group.closing:  # else ``_abandon`` settles them
            self._turn()

    def _take_in(self) -> None:
        self._asked = False  # before it looks: what comes later asks again
        group = self._group
        if group is None or group.closing:
            return  # they are refused at the end of the thread
        pace = self._pace
        if pace is not None:
            pace.work()
        self._turn()
        if pace is None or self._open > FEW or self._loop is None:
            return
        if pace.rest(self._answers):
            self._loop.stay_awake(pace.until)

    def _turn(self) -> None:
        try:
            self._settle()
            if self._inbox:
                self._begin_all()
        except BaseException as bug:
            # For the strand to raise, which ends the use of the disks. The loop would cancel the
            # sessions besides, and nothing would abort what other threads wait for.
            self._bug = bug
            if self._strand is not None:
                self._strand.wake()

    def _begin_all(self) -> None:
        """What begins together is sent together."""
        inbox = self._inbox
        held: list[tuple[AsyncLun, bool]] = []
        disk: AsyncLun | None = None
        try:
            while inbox:
                if inbox[0].disk is not disk:  # mostly all of it is for one
                    disk = inbox[0].disk
                    held.append((disk, disk.begin_batch()))
                self._begin(inbox.popleft())
        finally:
            for each, before in held:
                each.end_batch(before)

    def _begin(self, request: HandedRequest) -> None:
        if request.kind == TAKE_BACK:
            self._take_back(request)
            return
        request.state = _BEGUN
        self._open += 1
        if request.unwanted:
            request.error = IserblkError("interrupted")
            self._ended(request)
            return
        slot: Command | None = None
        try:
            if request.kind == READ:
                slot = request.disk.begin_read(request.buffer, request.offset, request)
            elif request.kind == WRITE and not request.fua:
                slot = request.disk.begin_write(request.buffer, request.offset, request)
        except Exception as error:
            if request.pending:  # a bug: its command is under way, in spite of it
                self._commands += 1
                raise
            request.error = error  # an argument that is none
            self._ended(request)
            return
        request.slot = slot
        if slot is None:
            self._carry_on(request, None)
        else:
            self._commands += 1

    def _settle(self) -> None:
        done = self._done
        while done:  # one by one: none is lost where a bug raises
            request = done.popleft()
            slot = request.slot
            try:
                assert slot is not None  # ``_begin`` set it
                if request.kind == READ:
                    rest = request.disk.end_read(slot)
                else:
                    rest = request.disk.end_write(slot)
            except IserblkError as error:
                request.error = self._aborted() if self._closing else error
            except BaseException:  # a bug
                request.error = IserblkError("internal error")
                self._ended(request)
                raise
            else:
                if rest is not None and not (self._closing or request.followers):
                    self._carry_on(request, rest)
                    continue
                if rest is not None:
                    request.error = self._aborted()
            self._ended(request)

    def _aborted(self) -> ConnectionLost:
        return ConnectionLost("the disks were closed while a request was under way")

    def _carry_on(self, request: HandedRequest, rest: Rest | None) -> None:
        """Give ``request``, which takes more than one command, a strand."""
        assert self._group is not None
        self._carried.add(request)
        request.strand = self._group.start_soon(
            self._carry_out, request, rest, name="a request of a thread"
        )

    async def _carry_out(self, request: HandedRequest, rest: Rest | None) -> None:
        """Body of a strand. ``rest``: of a request that has begun already."""
        try:
            if request.kind == READ:
                await request.disk.read_into(request.buffer, request.offset, rest)
            elif request.kind == WRITE:
                await request.disk.write(request.buffer, request.offset, request.fua, rest)
            else:
                assert request.operation is not None
                request.result = await request.operation()
        except Exception as error:
            request.error = error
        except BaseException:  # the strand is being closed
            self._fail(request)
            raise
        self._carried.discard(request)
        self._ended(request)

    def _fail(self, request: HandedRequest) -> None:
        self._carried.discard(request)
        if request.state == _BEGUN:
            request.error = self._aborted()
            self._ended(request)

    def _ended(self, request: HandedRequest) -> None:
        self._open -= 1
        self._answers += 1
        request.state = _ENDED
        followers = request.followers
        if followers:
            request.followers = []
        request.over()
        for each in followers:
            each.over()

    def _take_back(self, letter: HandedRequest) -> None:
        request = letter.about
        assert request is not None
        if request.state != _BEGUN:
            letter.over()
            return
        request.followers.append(letter)
        if len(request.followers) > 1:
            return  # it is being aborted
        if request.strand is not None:
            assert self._nursery is not None
            self._nursery.start_soon(self._stop, request, request.strand)
        else:
            request.disk.abandon(lambda waiter: waiter is request)

    async def _stop(self, request: HandedRequest, strand: Strand) -> None:
        assert self._group is not None
        if await self._group.stop(strand):
            self._fail(request)  # where it had not begun

    async def _abandon(self, _waiter: object) -> None:
        """The strands are being closed. Abort the commands, and wait until they have ended: before
        that no buffer is free."""
        self._closing = True
        for disk in self.disks.values():  # (Those of one session abort the same commands.)
            disk.abandon(self._is_mine)
        while self._commands > 0:
            await self._returned.sleep()
        try:
            self._settle()
        except BaseException:  # a bug: the others end all the same
            while self._done:
                with suppress(BaseException):
                    self._settle()
            raise

    def _is_mine(self, waiter: Waiter) -> bool:
        return isinstance(waiter, HandedRequest)


async def _rest() -> None:
    """Body of a strand, until it is closed."""
    await park()


_running: set[DiskThread] = set()


def _forked() -> None:
    for each in [*_running]:
        each.forked()


os.register_at_fork(after_in_child=_forked)
