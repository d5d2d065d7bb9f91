"""The trio driver: one task, the pump, runs a session; operations wait in the tasks that run them.

No task is started per operation, and no channel is used: the pump reschedules the waiting task. A
send costs as much as all of Python's work on a command. So commands of operations that one batch of
answers woke are sent together. Commands of other origin (a front-end that reads its own queue) are
gathered as long as each turn of the loop brings more, if enough are in flight to keep the target
busy meanwhile; those of several clients with a queue each, for one turn. But no more than a few are
gathered: else the target would have nothing to do until they come.

The pump itself sleeps as long as all goes well: the loop does its turns, by plain calls.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from threading import get_ident
from typing import Final, TypeVar

import trio

from iserblk.commands.command import QUEUED, Operation, Waiter
from iserblk.errors import ConnectionLost, LocalProtocolError
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.driving import GATHER_COMMANDS, LOGOUT_S, STALLED_S, TICK_S
from iserblk.initiator.session.logout import CLOSE_S, fill_logout
from iserblk.initiator.session.session import Session
from iserblk.loop import strands
from iserblk.loop.busy_polling import FEW, Pace, pace_of
from iserblk.loop.clock import monotonic
from iserblk.loop.here import loop_here
from iserblk.loop.interrupts import uninterrupted
from iserblk.loop.seam import Watch
from iserblk.loop.strands import Strand, elsewhere, park
from iserblk.loop.tasks import sleep

T = TypeVar("T")
MOST_BATCHES: Final = 8  # batches of answers for strands, before trio runs anything else
GATHER_FROM: Final = 4  # commands under way, from which number on others are gathered
GATHER_DECAY: Final = 0.97  # of the recent number of commands under way, per command
GATHER_QUIET: Final = 3  # turns of the loop without another command, after which they are sent
GATHER_BESIDE: Final = (
    8  # commands under way beside those of a batch, from which on it waits for others
)
SINGLY: Final = 4  # answers at a time: fewer than this come one by one
BUSY: Final = 8  # commands under way, from which number on other processes are let go first


class TrioWaiter:
    """Implements Waiter for one trio task, or one strand. ``owner``: of the strand."""

    __slots__ = ("owner", "pending", "strand", "task")

    def __init__(self, owner: object = None) -> None:
        self.owner = owner
        self.pending = 0
        self.task: trio.lowlevel.Task | None = None
        self.strand: Strand | None = None

    def task_done(self) -> None:
        self.pending -= 1
        if self.pending:
            return
        if self.strand is not None:
            self.strand.wake()
            self.strand = None
        elif self.task is not None:
            trio.lowlevel.reschedule(self.task)
            self.task = None

    async def wait(self) -> None:
        """Wait until ``pending`` is 0. On Cancelled ``pending`` still counts what is not done."""
        if self.pending:
            self.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class TrioDriver:
    """Runs one session. Implements SessionDriver, and Driver of the reconnector.

    ``run`` is the body of the pump task, to be started in a nursery.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ladder = Ladder(session)
        self._queue = session.queue
        self._lately = 0.0
        self._tick_due = math.inf
        self._ended = trio.Event()  # the pump found the session's end
        self._loop = loop_here()
        self._strands = strands.here()
        self._ready = self._strands.ready
        self._watch: Watch | None = None
        self._full = False  # the socket takes no more: output waits
        self._gathering = False  # ``_gather`` is to be called
        self._quiet = GATHER_QUIET
        self._seen = self._silent = 0  # commands, and turns without another one
        self._again = False  # ``progress`` is to be called
        self._pace = pace_of(session.busy_poll_us)
        self._broken: BaseException | None = None
        self._answered = 0
        self._came = 0  # answers, the last time
        self._due = 0  # ``_gone_on`` when all woken tasks have run
        self._late = False  # ``_end_turn`` has waited for them
        self._changed = trio.Event()
        self._home = get_ident()  # the thread in which trio runs
        self.reconnect: Callable[[], None] | None = None
        session.drive(self)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the session until it has failed or the task is cancelled. Cancel the task only when
        no operation runs: a cancelled operation, too, waits until its commands are aborted."""
        try:
            await self._pump(task_status)
        except BaseException as error:
            group = BaseExceptionGroup("", [error])
            if group.split(trio.Cancelled)[1] is not None:
                self._break(error)
            raise
        finally:
            self._withdraw()

    def _break(self, error: BaseException) -> None:
        """End the session after a bug: else no waiter would ever be told."""
        self.session.fail(ConnectionLost(f"{self.session.portal}: the pump broke: {error!r}"))

    def _broke(self, error: BaseException) -> None:
        """A function that the loop has called has met a bug: the pump raises it."""
        self._broken = error
        self._break(error)

    @uninterrupted  # an interrupt in ``progress`` would lose answers
    async def _pump(self, task_status: trio.TaskStatus[None]) -> None:
        session = self.session
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tick)
                task_status.started()
                while session.error is None:
                    changed = self._changed
                    if session.suspended is None:
                        self._attach()
                    await changed.wait()
                    self._withdraw()
                self._ended.set()
                nursery.cancel_scope.cancel()
        finally:
            # Also where an operation that ended for it has cancelled this task meanwhile.
            if self._broken is not None:
                raise self._broken

    def _attach(self) -> None:
        """Have the loop do the turns, until ``_withdraw``."""
        session = self.session
        try:
            self._watch = self._loop.watch(session.fileno(), self._come)
        except OSError as error:
            session.fail(ConnectionLost(f"{session.portal}: cannot wait for it: {error.strerror}"))
            return
        self._full = False
        self._look_at_output()
        if self._pace is not None:
            self._rest(self._pace)

    def _withdraw(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _look_at_output(self) -> None:
        full = self.session.wants_write()
        if full is not self._full and self._watch is not None:
            self._full = full
            self._watch.want(readable=True, writable=full)

    # -- a turn -----------------------------------------------------------------------------------

    def _come(self) -> None:
        """Answers have come, or the socket takes more."""
        if not self.session.life.connected:
            self._withdraw()  # what is there to be read is not ours
            return
        pace = self._pace
        now = monotonic() if pace is None else pace.work()
        if now - self._tick_due > STALLED_S:
            self._look_back(now)
        if self._came < SINGLY and self._queue.busy >= BUSY:
            # The target answers one command after the other, and each answer wakes us. Let it, or
            # the client, have this processor if they wait for one: what they do meanwhile is then
            # taken in at once. Else this returns immediately.
            os.sched_yield()
        try:
            for _ in range(MOST_BATCHES):
                count, resumed = self._take_answers(now)
                if count > 1 and not resumed:
                    # Let all woken tasks run, and submit, before their commands are sent.
                    self._due = self._gone_on() + count
                    self._late = False
                    self._loop.call_soon(self._end_turn)
                    return
                self._send_batch()
                # With few under way none is answered as quickly as that.
                if not resumed or self._queue.busy <= FEW or self._without_connection():
                    break
        except BaseException as error:
            self._broke(error)
            return
        if self._pace is not None:
            self._rest(self._pace)

    def _end_turn(self) -> None:
        """Tasks that the answers have woken have submitted commands, or do so in this turn of the
        loop."""
        if not self._late and self._gone_on() < self._due:
            self._late = True
            self._loop.call_soon(self._end_turn)
            return
        try:
            self._send_batch()
        except BaseException as error:
            self._broke(error)
            return
        if self._pace is not None:
            self._rest(self._pace)

    def _gone_on(self) -> int:
        """Grows by one for each woken task that has run: it has submitted its next command, or
        given its slot back. trio runs the tasks of a turn in any order, as a rule in theirs or in
        the reverse one; so ours, though it was scheduled behind them, may come before them. Then
        they have all run in the turn after that."""
        queue = self._queue
        return queue.cmd_sn - queue.busy  # (a CmdSN that begins anew costs one turn)

    def _take_answers(self, now: float) -> tuple[int, int]:
        """Returns how many commands have ended, and how many strands were resumed: what these
        submit is a batch. ``_send_batch`` is to follow."""
        queue = self._queue
        queue.batch = self._strands.held = True
        count = 0
        try:
            count = self.session.progress(now)
        finally:
            self._strands.held = False
            resumed = self._strands.run() if self._ready else 0
        self._answered += count
        self._came = count
        return count, resumed

    def _send_batch(self) -> None:
        queue = self._queue
        queue.batch = False
        if queue.unsent:
            queue.flush()
        self._look_at_output()

    def _without_connection(self) -> bool:
        # A function of its own: the compiler takes a field that a condition has looked at as it was
        # until the next assignment, whatever the calls in between have done to it.
        return not self.session.life.connected

    def _rest(self, pace: Pace) -> None:
        watch = self._watch
        if watch is not None and self._queue.busy <= FEW and pace.rest(self._answered):
            watch.expect(pace.until)

    # -- what the session calls -------------------------------------------------------------------

    def check_here(self) -> None:
        """Raises LocalProtocolError in another thread than that of its loop: the pump would wake a
        task in its own loop."""
        if get_ident() != self._home:
            raise LocalProtocolError(
                "the disk belongs to the trio loop that opened it, in another thread: call it there"
                " (trio.from_thread.run does), or open disks in this loop, too"
            )

    def new_waiter(self) -> TrioWaiter:
        """A waiter for this task; in a strand, with its owner. Raises as ``check_here``."""
        self.check_here()
        strand = self._strands.running
        return TrioWaiter() if strand is None else TrioWaiter(strand.owner)

    def blocked(self) -> None:
        self._look_at_output()

    def closing(self, _fd: int) -> None:
        self._withdraw()

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def again(self) -> None:
        if not self._again:
            self._again = True
            self._loop.call_soon(self._go_on)

    def kick(self) -> None:
        """See ``iserblk.initiator.reconnecting``: runs ``progress`` at once."""
        self._progress()

    def flush_soon(self) -> None:
        queue = self._queue
        if queue.unsent >= GATHER_COMMANDS:
            queue.flush()  # the target can begin, while more may come
            return
        # How many were under way lately, not now: with a front-end that hands over one request per
        # turn, each would be answered before the next, and none would ever be gathered.
        self._lately = max(queue.busy, self._lately * GATHER_DECAY)
        if self._lately < GATHER_FROM:
            queue.flush()
        else:
            self._gather_soon(GATHER_QUIET)

    def begin_batch(self) -> bool:
        """Have commands that are submitted from now on leave together, at ``end_batch`` or a turn
        of the loop later. Returns the argument of ``end_batch``."""
        queue = self._queue
        held, queue.batch = queue.batch, True
        return held

    def end_batch(self, held: bool) -> None:
        if held:
            return
        queue = self._queue
        queue.batch = False
        unsent = queue.unsent
        if not unsent:
            return
        if unsent < GATHER_COMMANDS and queue.busy - unsent >= GATHER_BESIDE:
            # There are other clients, and some may be about to begin commands in this turn, too:
            # a send for each would cost as much as all else that a command costs.
            self._gather_soon(1)
        else:
            queue.flush()

    def _gather_soon(self, quiet: int) -> None:
        """Send commands some turns of the loop late, together with those that come meanwhile:
        ``quiet`` turns after the last one."""
        self._quiet = quiet
        if not self._gathering:
            self._gathering = True
            self._seen = self._silent = 0
            self._loop.call_soon(self._gather)

    def _gather(self) -> None:
        unsent = self._queue.unsent
        self._silent = self._silent + 1 if unsent == self._seen else 0
        self._seen = unsent
        if self._silent < self._quiet and unsent < GATHER_COMMANDS:
            self._loop.call_soon(self._gather)
            return
        self._gathering = False
        self._unless_broken(self._queue.flush)

    def _go_on(self) -> None:
        self._again = False
        self._unless_broken(self._progress)

    def _unless_broken(self, function: Callable[[], None]) -> None:
        if self._without_connection():
            return
        try:
            function()
        except BaseException as error:
            self._broke(error)

    def _progress(self) -> None:
        self.session.progress(monotonic())

    @uninterrupted
    async def _tick(self) -> None:
        while True:
            self._tick_due = monotonic() + TICK_S
            await sleep(TICK_S)
            self._look_back(monotonic())
            self._progress()  # an answer that is here is in time, however late this task runs
            self.ladder.tick(monotonic())

    def _look_back(self, now: float) -> None:
        """Before answers are taken in: whether this process has run lately."""
        late = now - self._tick_due
        if late > STALLED_S:
            self._tick_due = now + TICK_S
            self.ladder.stalled(late, now)

    async def wait(self, waiter: Waiter) -> None:
        """Wait for commands of this task. If it is cancelled, or interrupted in the main task, they
        are aborted at the target; the buffers are free when Cancelled or KeyboardInterrupt is
        raised. A second interrupt ends the session instead of waiting for the target.

        In a strand: when the strand is closed meanwhile, its commands are aborted before that.
        """
        assert isinstance(waiter, TrioWaiter)  # ``new_waiter`` made it
        strand = self._strands.running
        if strand is not None:
            if waiter.pending:
                waiter.strand = strand
                strand.waiter = waiter
                strand.abandon = self._abandon
                await park()
                strand.abandon = None
            return
        problem: BaseException | None = None
        try:
            await waiter.wait()
        except BaseException as error:
            problem = error
        if problem is not None:
            try:
                await self._abandon(waiter)
                raise problem
            finally:
                problem = None  # its traceback has this frame: nothing is to wait for a collection

    async def _abandon(self, waiter: TrioWaiter) -> None:
        waiter.strand = None
        session = self.session
        session.queue.forget(waiter)
        now = monotonic()
        for slot in session.queue.tasks:
            if slot.waiter is waiter:
                self.ladder.cancel(slot, now)
        try:
            with trio.CancelScope(shield=True):
                await waiter.wait()
        except BaseException:
            session.fail(ConnectionLost(f"{session.portal}: interrupted"))
            raise

    def abandon(self, mine: Callable[[Waiter], bool]) -> int:
        """Begin to abort at the target the commands whose waiter is ``mine``; returns how many.
        Their waiters are told when they have ended: only then their buffers are free."""
        now = monotonic()
        slots = [slot for slot in self.session.queue.tasks if slot.state >= QUEUED]
        slots = [slot for slot in slots if mine(slot.waiter)]
        for slot in slots:
            self.ladder.cancel(slot, now)
        return len(slots)

    @uninterrupted
    async def log_out(self) -> None:
        """Log out if the target still answers, and end the session in any case."""
        session = self.session
        control = session.queue.take_control()
        if control is not None:
            waiter = TrioWaiter()
            waiter.pending = 1
            fill_logout(control)
            session.life.leaving = True
            session.queue.send_immediate(control, waiter)
            with trio.move_on_after(LOGOUT_S):
                await waiter.wait()
            if not waiter.pending and session.error is None:
                with trio.move_on_after(CLOSE_S):
                    await self._ended.wait()
        session.fail(ConnectionLost(f"{session.portal}: logged out"))

    @uninterrupted  # an interrupt is raised only where it waits
    async def run_operation(self, operation: Operation[T]) -> T:
        """Run ``operation`` to its end; returns its result."""
        try:
            while True:
                step = next(operation)
                if isinstance(step, float):
                    await elsewhere(sleep, step)
                    self._look_back(monotonic())
                else:
                    await self.wait(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()
