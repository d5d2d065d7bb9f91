"""The trio driver: one task, the pump, runs a session; operations wait in the tasks that run them.

No task is started per operation, and no channel is used: the pump reschedules the waiting task. A
send costs as much as all of Python's work on a command. So commands of operations that one batch of
answers woke are sent together. Commands of other origin (a front-end that reads its own queue) are
gathered as long as each turn of the loop brings more, if enough are in flight to keep the target
busy meanwhile; those of several clients with a queue each, for one turn. But no more than a few are
gathered: else the target would have nothing to do until they come.

With several sessions in one trio loop the pumps sleep: the sessions share a ``Multiplexer``, whose
only task does their turns. A session that is alone waits by itself, which takes a system call less.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from threading import get_ident
from typing import Final, TypeVar

import trio

from iserblk.errors import ConnectionLost, LocalProtocolError
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.driving import LOGOUT_S, STALLED_S, TICK_S
from iserblk.initiator.session.logout import PARTING_S, fill_logout
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import QUEUED, Operation, Waiter
from iserblk.loop import strands
from iserblk.loop.busy_polling import FEW, Pace
from iserblk.loop.clock import monotonic
from iserblk.loop.descriptors import Nap, WriteWatch
from iserblk.loop.interrupts import uninterrupted
from iserblk.loop.multiplexing import Multiplexer, multiplexer
from iserblk.loop.strands import Strand, elsewhere, park
from iserblk.loop.tasks import sleep, until_readable
from iserblk.loop.watching import Watch

T = TypeVar("T")
AT_ONCE: Final = 8  # batches of answers for strands, before trio runs anything else
GATHER_FROM: Final = 4  # commands under way, from which number on others are gathered
GATHER_DECAY: Final = 0.97  # of the recent number of commands under way, per command
GATHER_QUIET: Final = 3  # turns of the loop without another command, after which they are sent
GATHER_BESIDE: Final = (
    8  # commands under way beside those of a ``hold``, from which on it waits for others
)
GATHER_COMMANDS: Final = 8  # at most, that are sent at once
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
        self._writes = WriteWatch(session, self._progress)
        self._batch = False  # of answers: what their tasks and strands submit is sent at its end
        self._lately = 0.0
        self._tick_due = math.inf
        self._ended = trio.Event()  # the pump found the session's end
        self._gatherer = Nap()
        self._quiet = GATHER_QUIET
        self._pace = Pace(session.busy_poll_us)
        self._watch = Watch()
        self._broken: BaseException | None = None
        self._answered = 0
        self._came = 0  # answers, the last time
        self._due = 0  # ``_gone_on`` when all woken tasks have run
        self._late = False  # ``_end_turn`` has waited for them
        self._changed = trio.Event()
        self._shared: Multiplexer | None = None  # the pump counts there
        self._shared_fd = -1  # which the multiplexer watches; -1: none
        self._home = get_ident()  # the thread in which trio runs
        self.reconnect: Callable[[], None] | None = None
        session.drive(self)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the session until it has failed or the task is cancelled. Cancel the task only when
        no operation runs: a cancelled operation, too, waits until its commands are aborted."""
        shared = self._shared = multiplexer()
        shared.sharers += 1
        try:
            await self._pump(task_status, shared)
        except BaseException as error:
            group = BaseExceptionGroup("", [error])
            if group.split(trio.Cancelled)[1] is not None:
                self._break(error)
            raise
        finally:
            shared.sharers -= 1
            self._watch.close()
            self._withdraw()

    def _break(self, error: BaseException) -> None:
        """End the session after a bug: else no waiter would ever be told."""
        self.session.fail(ConnectionLost(f"{self.session.portal}: the pump broke: {error!r}"))

    @uninterrupted  # an interrupt in ``progress`` would lose answers
    async def _pump(self, task_status: trio.TaskStatus[None], shared: Multiplexer) -> None:
        session = self.session
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tick)
            nursery.start_soon(self._watch_writes)
            nursery.start_soon(self._gather)
            task_status.started()
            fd = session.fileno()
            while session.error is None:
                if session.suspended is not None:
                    await self._changed.wait()
                    fd = session.fileno()
                    continue
                if shared.sharers > 1 and self._share(shared, fd):
                    await self._changed.wait()
                    self._withdraw()
                    fd = session.fileno()
                    continue
                self._rest(fd)
                try:
                    await until_readable(fd)
                except trio.ClosedResourceError:
                    fd = session.fileno()
                    continue  # the session failed, or was suspended, while this task slept
                self._wake_up()
                for _ in range(AT_ONCE):
                    count, resumed = self._take_answers()
                    if count > 1 and not resumed:
                        # Let all woken tasks run, and submit, before their commands are sent.
                        due = self._gone_on() + count
                        await trio.lowlevel.cancel_shielded_checkpoint()
                        if self._gone_on() < due:
                            await trio.lowlevel.cancel_shielded_checkpoint()
                    self._send_batch()
                    if not resumed or self._without_connection():
                        break
            self._ended.set()
            nursery.cancel_scope.cancel()
        if self._broken is not None:
            raise self._broken

    def _wake_up(self) -> None:
        self._look_back(self._pace.work())
        if self._came < SINGLY and self.session.queue.busy >= BUSY:
            # The target answers one command after the other, and each answer wakes us. Let it, or
            # the client, have this processor if they wait for one: what they do meanwhile is then
            # taken in at once. Else this returns immediately.
            os.sched_yield()

    # -- with other sessions in this loop ---------------------------------------------------------

    def _share(self, shared: Multiplexer, fd: int) -> bool:
        """Have the multiplexer do the pump's turns, until ``_changed``. False: the system has no
        room for another descriptor to be watched."""
        try:
            shared.add(fd, self._come)
        except OSError:
            return False
        self._shared_fd = fd
        self._rest(fd)
        return True

    def _withdraw(self) -> None:
        fd, self._shared_fd = self._shared_fd, -1
        if fd >= 0 and self._shared is not None:
            self._shared.remove(fd)

    def _come(self) -> None:
        """See Multiplexer: a turn of the pump."""
        if self._without_connection():
            self._withdraw()  # what is there to be read is not ours
            return
        self._wake_up()
        try:
            for _ in range(AT_ONCE):
                count, resumed = self._take_answers()
                if count > 1 and not resumed and self._shared is not None:
                    self._due = self._gone_on() + count
                    self._late = False
                    self._shared.later(self._end_turn)
                    return
                self._send_batch()
                if not resumed or self._without_connection():
                    break
        except BaseException as error:
            self._broken = error
            self._break(error)
            return
        self._rest_shared()

    def _end_turn(self) -> None:
        """See Multiplexer.later: tasks that the answers have woken have submitted commands, or do
        so in this turn of the loop."""
        if self._shared is not None and not self._late and self._gone_on() < self._due:
            self._late = True
            self._shared.later(self._end_turn)
            return
        try:
            self._send_batch()
        except BaseException as error:
            self._broken = error
            self._break(error)
            return
        self._rest_shared()

    def _rest_shared(self) -> None:
        fd = self._shared_fd
        if fd < 0 or self._without_connection():
            return  # the pump learns what becomes of the session
        if self._shared is not None and self._shared.sharers == 1:
            self.changed()  # it is alone, and waits by itself
        else:
            self._rest(fd)

    # -- a turn -----------------------------------------------------------------------------------

    def _gone_on(self) -> int:
        """Grows by one for each woken task that has run: it has submitted its next command, or
        given its slot back. trio runs the tasks of a turn in any order, as a rule in theirs or in
        the reverse one; so ours, though it was scheduled behind them, may come before them. Then
        they have all run in the turn after that."""
        queue = self.session.queue
        return queue.cmd_sn - queue.busy  # (a CmdSN that begins anew costs one turn)

    def _take_answers(self) -> tuple[int, int]:
        """Returns how many commands have ended, and how many strands were resumed. ``_send_batch``
        is to follow."""
        session, queue = self.session, self.session.queue
        queue.corked = strands.held = self._batch = True
        count = 0
        try:
            count = session.progress(monotonic())
        finally:
            queue.corked = strands.held = False
            resumed = strands.run()
        self._answered += count
        self._came = count
        return count, resumed

    def _send_batch(self) -> None:
        self._batch = False
        self.session.queue.flush()
        if self.session.wants_write():
            self._writes.wake()

    def _without_connection(self) -> bool:
        # A function of its own: the compiler takes a field that a condition has narrowed to None
        # for None until the next assignment, whatever the calls in between have done to it.
        return self.session.error is not None or self.session.suspended is not None

    def _rest(self, fd: int) -> None:
        if self.session.queue.busy > FEW:
            return
        pace = self._pace
        pace.rest(self._answered)
        if pace.near:
            self._watch.attend(fd, pace.until, self._ready)

    def _ready(self) -> bool:
        """See Watch: in place of the pump's turn."""
        if self._without_connection():
            return False
        session = self.session
        self._look_back(self._pace.work())
        try:
            self._take_answers()
            self._send_batch()
        except BaseException as error:
            self._broken = error
            self._break(error)
            return False
        fd = session.fileno()
        if fd < 0:
            return False
        if self._shared_fd >= 0:
            self._rest_shared()
        else:
            self._rest(fd)
        return True

    async def _watch_writes(self) -> None:
        while True:
            await self._writes.run()  # until its connection is closed

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
        strand = strands.running
        return TrioWaiter() if strand is None else TrioWaiter(strand.owner)

    def blocked(self) -> None:
        self._writes.wake()

    def closing(self, fd: int) -> None:
        self._watch.close()
        self._withdraw()
        trio.lowlevel.notify_closing(fd)

    def changed(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def again(self) -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(self._progress, idempotent=True)

    def kick(self) -> None:
        """See ``iserblk.initiator.reconnecting``: runs ``progress`` at once."""
        self._progress()

    def flush_soon(self) -> None:
        if self.session.queue.unsent >= GATHER_COMMANDS:
            self.session.queue.flush()  # the target can begin, while more may come
            return
        if self._batch:
            return
        # How many were under way lately, not now: with a front-end that hands over one request per
        # turn, each would be answered before the next, and none would ever be gathered.
        self._lately = max(self.session.queue.busy, self._lately * GATHER_DECAY)
        if self._lately < GATHER_FROM:
            self.session.queue.flush()
        else:
            self._quiet = GATHER_QUIET
            self._gatherer.wake()

    def hold(self) -> bool:
        """Have commands that are submitted from now on leave together, at ``release`` or a turn of
        the loop later. Returns the argument of ``release``."""
        held, self._batch = self._batch, True
        return held

    def release(self, held: bool) -> None:
        if held:
            return
        self._batch = False
        queue = self.session.queue
        unsent = queue.unsent
        if 0 < unsent < GATHER_COMMANDS and queue.busy - unsent >= GATHER_BESIDE:
            # There are other clients, and some may be about to begin commands in this turn, too:
            # a send for each would cost as much as all else that a command costs.
            self._quiet = 1
            self._gatherer.wake()
        else:
            queue.flush()

    @uninterrupted
    async def _gather(self) -> None:
        """Send commands a few turns of the loop late, together with those that came meanwhile."""
        session = self.session
        while True:
            if not session.queue.unsent:
                await self._gatherer.sleep()
            seen = quiet = 0
            while quiet < self._quiet and seen < GATHER_COMMANDS:
                await trio.lowlevel.checkpoint()
                quiet = quiet + 1 if session.queue.unsent == seen else 0
                seen = session.queue.unsent
            session.queue.flush()

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

    async def wait(self, waiter: TrioWaiter) -> None:
        """Wait for commands of this task. If it is cancelled, or interrupted in the main task, they
        are aborted at the target; the buffers are free when Cancelled or KeyboardInterrupt is
        raised. A second interrupt ends the session instead of waiting for the target.

        In a strand: when the strand is closed meanwhile, its commands are aborted before that.
        """
        strand = strands.running
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
            session.logging_out = True
            session.queue.send_immediate(control, waiter)
            with trio.move_on_after(LOGOUT_S):
                await waiter.wait()
            if not waiter.pending and session.error is None:
                with trio.move_on_after(PARTING_S):
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
                    assert isinstance(step, TrioWaiter)  # ``new_waiter`` made it
                    await self.wait(step)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()
