"""A session of the target: what its connections share. No trio, no socket.

CmdSN and the command window, the I_T nexus, the tasks by their ITT, and the memory for their data
(RFC 7143 sections 4.2.2.1, 4.4.3). A task is allegiant to one connection, which moves its data.

At ErrorRecoveryLevel 2 the tasks of a lost connection are kept for a while, without any that moves
their data, until TASK REASSIGN makes them allegiant to another one (sections 7.2.2, 7.5, 11.14).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from iserblk.errors import TransportError
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import time2retain_beside
from iserblk.iscsi.serial import serial_lt
from iserblk.scsi import status as sam
from iserblk.target.iscsi.buffers import (
    GUARANTEED,
    UNASKED,
    BufferPool,
    DataBudget,
    size_of,
)
from iserblk.target.iscsi.numbers import CommandWindow
from iserblk.target.iscsi.owners import SessionOwner, Unowned
from iserblk.target.iscsi.tasks.slot import (
    COMPLETED,
    DEFERRED,
    DORMANT,
    ENDED,
    FETCHING,
    RUNNING,
    SUSPENDED,
    UNSOLICITED,
    WAITING,
    Allegiance,
    TargetTask,
)
from iserblk.target.ports import TargetPort
from iserblk.target.seam import DeviceServer, Nexus

log = logging.getLogger(__name__)

DATA_BUDGET = 64 << 20  # bytes of buffers in use, above which commands wait
# States in which a task can be ended at once.
_BEGUN: Final = (DEFERRED, DORMANT, UNSOLICITED, SUSPENDED, COMPLETED)
RECOVERY: Final = 2  # the ErrorRecoveryLevel at which tasks survive their connection
_MOST_LOSSES: Final = 8  # of the connection of a task that still lacks data
_FENCES: Final = 64  # requests that wait for commands before them


def _nothing() -> None:
    """For tasks whose end nobody waits for."""


class _Waiting(NamedTuple):
    """A PDU that has come before others with a smaller CmdSN. ``slot``: of its command. ``held``:
    bytes of its copy."""

    connection: Allegiance
    slot: TargetTask | None
    run: Callable[[], None]
    held: int


class _Missing:
    """A command that has not come, at a look."""

    __slots__ = ("cmd_sn",)

    def __init__(self, cmd_sn: int) -> None:
        self.cmd_sn = cmd_sn


class _Fence(NamedTuple):
    """A request that waits until all commands before ``cmd_sn`` have come."""

    connection: Allegiance
    cmd_sn: int
    run: Callable[[], None]


class TargetSession:
    """Implements Joinable and NexusTasks.

    ``tasks``: by ITT, those that have not ended. ``answered``: at ErrorRecoveryLevel 2 also those
    whose status the initiator has not acknowledged. ``deferred``: tasks that wait for buffers, in
    their order. ``running``: how many are in threads. ``connections``: those that are not closed
    yet. ``lost``: connections that have failed, or were logged out for recovery, and whose tasks
    are kept. ``done``: no command starts any more. ``attached``: the device server knows ``nexus``.

    ``owner``: set by the server of the session.
    """

    def __init__(self, device: DeviceServer, budget: DataBudget, address: str = "") -> None:
        """``address``: of the peer of its leading connection."""
        self._device = device
        self._task_sets = device.task_sets
        self._budget = budget
        self.owner: SessionOwner = Unowned()
        self.pool = BufferPool(budget, address)
        self.window = CommandWindow()
        self.tasks: dict[int, TargetTask] = {}
        self.answered: dict[int, TargetTask] = {}
        self.deferred: deque[TargetTask] = deque()
        self.running = 0
        self.connections: list[Allegiance] = []
        self.lost: list[Allegiance] = []
        self._waiting: dict[int, _Waiting] = {}  # by CmdSN
        self._fences: list[_Fence] = []
        self._missing: _Missing | None = None
        self._orphans: set[TargetTask] = set()  # in threads, of LUNs that are gone
        self._draining = False
        self.nexus: Nexus  # while ``attached``, and afterwards
        self.attached = False
        self.paused = 0
        self.done = False
        self._over = False
        # What login has agreed on.
        self.initiator_name = ""
        self.isid = b""
        self.user = ""
        self.portal_group = 0
        self.depth = 0
        self.parameters = SessionParameters()
        self.recovers = False
        self.time2retain = 0  # seconds; of what was agreed on as much as is kept

    def attach(
        self,
        initiator: str,
        isid: bytes,
        port: TargetPort,
        user: str,
        depth: int,
        parameters: SessionParameters,
    ) -> None:
        """Begin full feature phase of a normal session, with what its leading login agreed on.
        ``depth``: commands in its window, which the caller sets."""
        self.initiator_name = initiator
        self.isid = isid
        self.user = user
        self.portal_group = port.tag
        self.depth = depth
        self.parameters = parameters
        self.recovers = parameters.error_recovery_level == RECOVERY
        # Login may have agreed on it before it knew Time2Wait.
        self.time2retain = time2retain_beside(
            parameters.default_time2wait, parameters.default_time2retain
        )
        self.nexus = Nexus(initiator, isid, self, port)
        self._device.attach(self.nexus)
        self.attached = True

    # -- what a login asks ------------------------------------------------------------------------

    @property
    def exp_cmd_sn(self) -> int:
        return self.window.exp_cmd_sn

    @property
    def max_cmd_sn(self) -> int:
        return self.window.max_cmd_sn

    def takes(self, cid: int) -> bool:
        """See Joinable. At ErrorRecoveryLevel 2 there is room for one connection more: it may have
        to clean up after another one (RFC 7143 section 6.3.4)."""
        if any(each.cid == cid and not each.done for each in self.connections):
            return True
        most = self.parameters.max_connections + (1 if self.recovers else 0)
        return sum(not each.done for each in self.connections) < most

    @property
    def retention_s(self) -> int:
        """Seconds for which the tasks of a lost connection are kept (section 7.5)."""
        return self.parameters.default_time2wait + self.time2retain if self.time2retain else 0

    # -- connections ------------------------------------------------------------------------------

    def find(self, cid: int) -> Allegiance | None:
        """The connection with this CID, a lost one included. The latest counts: one that had the
        CID before may be kept still, for tasks whose status is not acknowledged."""
        for each in [*reversed(self.connections), *reversed(self.lost)]:
            if each.cid == cid and not (each.done and each not in self.lost):
                return each
        return None

    def join(self, connection: Allegiance) -> None:
        """Add a connection, behind its login. A connection with the same CID is reinstated: the
        login logs it out, at ErrorRecoveryLevel 2 for recovery (sections 6.3.4, 11.14)."""
        old = self.find(connection.cid)
        self.connections.append(connection)
        if old is not None:
            log.info("%s: connection %d reinstated", self.initiator_name, connection.cid)
            self.log_out(old, self.recovers)
        for each in self.connections:
            each.note_acknowledgements()

    def lose(self, connection: Allegiance) -> None:
        """The connection has failed. Its tasks are kept, or end; with the last connection the
        session ends, unless it is kept."""
        if self.recovers and self.time2retain and self.attached:
            self._keep(connection)
        elif self.has_others(connection):
            self._terminate(connection)
        else:
            self.abandon()
        connection.disconnect()

    def log_out(self, connection: Allegiance, recovery: bool) -> None:
        """Another connection logs this one out, explicitly or not. ``recovery``: its tasks may be
        reassigned, once it is closed."""
        kept = connection in self.lost
        if recovery and self.time2retain:
            if not kept:
                self._keep(connection)
            if not connection.recovered:
                connection.recovered = True
                connection.notify_recovery()
        elif kept:
            self.expire(connection)
        else:
            self._terminate(connection)
        if not kept:
            connection.disconnect()
            connection.notify_ended()

    def set_aside(self, connection: Allegiance) -> None:
        """The connection logs itself out for recovery."""
        if self.time2retain:
            self._keep(connection)
            connection.recovered = True
        elif self.has_others(connection):
            self._terminate(connection)
        else:
            self.abandon(connection)

    def has_others(self, connection: Allegiance) -> bool:
        """Whether the session goes on without the connection."""
        return bool(self.lost) or any(
            not each.done for each in self.connections if each is not connection
        )

    def leave(self, connection: Allegiance) -> None:
        """A connection is closed: nothing touches its buffers any more. With the last one the
        session ends, unless it is kept."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        if connection not in self.lost:
            for slot in [each for each in self.answered.values() if each.connection is connection]:
                del self.answered[slot.itt]
        connection.release()
        waiting, connection.on_closed = connection.on_closed, []
        for tell in waiting:
            tell()
        self.let_go(connection)
        if self.deferred:
            self._wake()  # there are buffers for them now
        if not self.connections:
            self.pool.trim()
        if self.lost:
            self._budget.wake()
        self._end_if_over()

    def expire(self, connection: Allegiance) -> None:
        """End what is kept for a lost connection. Does nothing if nothing is."""
        if connection not in self.lost:
            return
        self.lost.remove(connection)
        self._terminate(connection)
        connection.release()
        connection.notify_released()
        if self.deferred:
            self._wake()
        self._budget.wake()
        self._end_if_over()

    def let_go(self, connection: Allegiance) -> None:
        """Some tasks of the connection have a new allegiance, or have ended: keep it no longer than
        it takes."""
        if (
            connection in self.lost
            and connection.recovered
            and any(not each.done for each in self.connections)
            and connection not in self.connections
            and not any(slot.connection is connection for slot in self._all_tasks())
        ):
            self.lost.remove(connection)
            connection.notify_released()

    def _keep(self, connection: Allegiance) -> None:
        """Suspend the tasks of a connection that has failed, or is logged out for recovery. Those
        that have not been delivered, as a command before them is missing, are discarded (section
        11.14)."""
        self.discard_waiting(connection)
        for slot in self.tasks.values():
            if slot.connection is not connection:
                continue
            if slot.aborted:
                self._pause_for(slot)
                continue
            if slot.state == DEFERRED:
                self.deferred.remove(slot)
            if slot.state in (DEFERRED, FETCHING, UNSOLICITED):
                slot.losses += 1
                if slot.losses > _MOST_LOSSES:
                    # Its initiator comes and goes, and others wait for it.
                    slot.task.cancel()
                    slot.task.status = sam.TASK_ABORTED
                    slot.task.transferred = 0
                    self._task_sets.leave(slot.lun, slot)
                slot.state = COMPLETED if slot.task.status else SUSPENDED
        # Hardly more of them than the session may have connections.
        while len(self.lost) > self.parameters.max_connections:
            self.expire(self.lost[0])
        self.lost.append(connection)
        self._task_sets.enable_ready()

    def _terminate(self, connection: Allegiance) -> None:
        """End the tasks of a connection without a word; the session goes on. What they have written
        must not land behind later writes: as long as threads carry any of them out, no command
        starts."""
        self.discard_waiting(connection)
        luns = set()
        for slot in self._all_tasks():
            if slot.connection is not connection:
                continue
            if self.answered.get(slot.itt) is slot:
                del self.answered[slot.itt]  # it was carried out: nothing is cleared
                continue
            if slot.aborted:
                self._pause_for(slot)
                continue
            luns.add(slot.lun)
            slot.aborted = True
            slot.task.cancel()
            if slot.state == RUNNING:
                self._pause_for(slot)
                continue
            self._task_sets.leave(slot.lun, slot)
            if slot.state == DEFERRED:
                self.deferred.remove(slot)
            del self.tasks[slot.itt]
            self.window.ended(slot.immediate)
            callbacks, slot.on_aborted = slot.on_aborted, []
            for callback in callbacks:
                callback()
        if self.attached:
            self._device.tasks_cleared(self.nexus, luns)
        self._task_sets.enable_ready()

    def _pause_for(self, slot: TargetTask) -> None:
        """Start no command before the thread, if any, of an aborted task has ended. The answer that
        the initiator would have waited for may be lost with the connection."""
        if slot.state == RUNNING:
            self.paused += 1
            slot.on_ended.append(self.go_on)

    def _all_tasks(self) -> list[TargetTask]:
        return [*self.tasks.values(), *self.answered.values()]

    # -- driven by the owner ----------------------------------------------------------------------

    def pause(self) -> None:
        """Start no command until ``go_on``. Tasks of the session that this one reinstates still
        write, and an old write must not land after a new one."""
        self.paused += 1

    def go_on(self) -> None:
        """End a ``pause``: start the deferred commands."""
        self.paused -= 1
        if not self.paused:
            self._wake()

    def abandon(self, but: Allegiance | None = None) -> None:
        """End the session now: no command starts any more, and the peer is disconnected, except
        on the connection ``but``. The owner closes the connections later, when no task waits for
        their descriptors."""
        self.done = True
        for waiting in self._waiting.values():
            self.pool.account(-waiting.held)
        self._waiting.clear()
        self.window.waiting = 0
        self._fences.clear()
        for task in self._all_tasks():
            task.aborted = True
            task.task.cancel()
            if task.state != RUNNING:
                self._task_sets.leave(task.lun, task)
        self.answered.clear()
        # Tasks in threads stay: a PREEMPT AND ABORT, or an ORDERED task, may have to wait for them.
        for itt in [itt for itt, task in self.tasks.items() if task.state != RUNNING]:
            del self.tasks[itt]
        self.deferred.clear()
        lost, self.lost = self.lost, []
        for connection in self.connections:
            if connection is not but:
                connection.disconnect()
        for connection in lost:
            connection.notify_released()
        self._task_sets.enable_ready()
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Release all resources when nothing uses them any more."""
        if self.connections or self.lost or self._over:
            return
        self.done = True
        if self.running:
            return
        self._over = True
        self._budget.forget(self._wake)
        self.pool.close()
        for slot in self.tasks.values():
            self._task_sets.leave(slot.lun, slot)
        self._task_sets.enable_ready()
        if self.attached:
            self.attached = False
            self._device.detach(self.nexus)
        self.owner.session_over()

    # -- the order of commands --------------------------------------------------------------------

    def wait(
        self,
        cmd_sn: int,
        connection: Allegiance,
        slot: TargetTask | None,
        run: Callable[[], None],
        held: int = 0,
    ) -> None:
        """Let a PDU that ``window.may_wait`` wait for those before it. ``run`` has the window
        accept it then. ``held``: bytes of memory, beside data buffers, that it takes meanwhile."""
        self.window.note(cmd_sn)
        self._waiting[cmd_sn] = _Waiting(connection, slot, run, held)
        self.pool.account(held)

    def missing_for(self, connection: Allegiance) -> list[object]:
        """What PDUs and requests of the connection wait for: nothing, or one object, the same as
        long as it is the same command."""
        if not any(each.connection is connection for each in self._waiting.values()) and not any(
            fence.connection is connection for fence in self._fences
        ):
            return []
        if self._missing is None or self._missing.cmd_sn != self.window.exp_cmd_sn:
            self._missing = _Missing(self.window.exp_cmd_sn)
        return [self._missing]

    def fence(self, cmd_sn: int, connection: Allegiance, run: Callable[[], None]) -> bool:
        """Call ``run`` when all commands before ``cmd_sn`` have come. False: too many requests
        wait already."""
        if len(self._fences) >= _FENCES:
            return False
        self._fences.append(_Fence(connection, cmd_sn, run))
        self.window.waiting += 1
        return True

    def drain(self) -> None:
        """Deliver what has waited for the commands that have come. An error ends the connection of
        the PDU, and no other."""
        if self._draining:
            return
        self._draining = True
        try:
            others: dict[Allegiance, None] = {}
            progress = True
            while progress and not self.done:
                progress = False
                waiting = self._waiting.pop(self.window.exp_cmd_sn, None)
                if waiting is not None:
                    self.pool.account(-waiting.held)
                    self.window.forget(self.window.exp_cmd_sn)
                    progress = True
                    self._deliver(waiting.connection, waiting.run, others)
                for fence in self._fences:
                    if not serial_lt(self.window.exp_cmd_sn, fence.cmd_sn):
                        self._fences.remove(fence)
                        self.window.waiting -= 1
                        progress = True
                        self._deliver(fence.connection, fence.run, others)
                        break
        finally:
            self._draining = False
        for connection in others:
            connection.wake()

    @staticmethod
    def _deliver(
        connection: Allegiance, run: Callable[[], None], others: dict[Allegiance, None]
    ) -> None:
        if connection.done:
            return
        others[connection] = None
        try:
            run()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            connection.abandon()

    def discard(self, slot: TargetTask) -> None:
        """End a task that waits for commands before it: its CmdSN counts as received."""
        for cmd_sn, waiting in self._waiting.items():
            if waiting.slot is slot:
                del self._waiting[cmd_sn]
                self.window.forget(cmd_sn)
                self.window.skip(cmd_sn)
                break
        self.tasks.pop(slot.itt, None)
        slot.connection.recycle(slot)

    def discard_waiting(self, connection: Allegiance) -> None:
        """Forget what a connection has sent before its turn; it may come again, on another one."""
        for cmd_sn, waiting in list(self._waiting.items()):
            if waiting.connection is connection:
                del self._waiting[cmd_sn]
                self.pool.account(-waiting.held)
                self.window.forget(cmd_sn)
                if waiting.slot is not None:
                    self.tasks.pop(waiting.slot.itt, None)
                    connection.recycle(waiting.slot)
        left = [fence for fence in self._fences if fence.connection is not connection]
        self.window.waiting -= len(self._fences) - len(left)
        self._fences = left

    # -- memory for data --------------------------------------------------------------------------

    def defer(self, slot: TargetTask, first: bool) -> None:
        """Let the task wait until ``resume`` starts it. ``first``: before all others."""
        slot.state = DEFERRED
        if first:
            self.deferred.appendleft(slot)
        else:
            self.deferred.append(slot)
        if self.answered:  # their memory comes back when they are acknowledged
            for connection in self.connections:
                connection.ask_for_acknowledgement()

    def resume(self, by: Allegiance) -> None:
        """Start deferred tasks, in order, while there is room for their buffers. ``by`` sends what
        is queued afterwards."""
        while self.deferred and not self.paused:
            slot = self.deferred[0]
            if not self.has_room(slot):
                return
            self.deferred.popleft()
            connection = slot.connection
            if connection is by:
                connection.start(slot)
            else:
                self._start_elsewhere(slot, connection)

    def _start_elsewhere(self, slot: TargetTask, connection: Allegiance) -> None:
        try:
            connection.start(slot)
        except TransportError as error:
            log.info("a connection ended: %s", error)
            connection.abandon()
        connection.flush_quietly()

    def has_room(self, slot: TargetTask) -> bool:
        """Whether a task may have its buffer now, or has it. If not, ``resume`` tries again when
        buffers of this session, or of others, are given back."""
        length = slot.task.length
        if not length or (slot.buffer is not None and len(slot.buffer) >= length):
            return True
        used, budget = self.pool.used, self._budget
        # Mostly: no call.
        if used + length <= GUARANTEED and budget.used + budget.beside + length <= budget.share:
            return True
        size = size_of(length)
        if self._budget.guarantees(used, size, GUARANTEED):
            return True
        if not self._budget.admits(size, self.pool.address):
            self._budget.wait(self._wake, self.pool.address)
            return False
        return not used or used + size <= DATA_BUDGET

    def may_take(self, length: int) -> bool:
        """Whether ``length`` bytes may be taken for data that comes unasked, which cannot wait."""
        used, budget = self.pool.used, self._budget
        if used + length <= UNASKED and budget.used + budget.beside + length <= budget.share // 2:
            return True
        size = size_of(length)
        if self._budget.guarantees(self.pool.used, size, UNASKED) or self._budget.fits_unasked(
            size, self.pool.address
        ):
            return True
        self._budget.refused += 1
        return False

    def _wake(self) -> None:
        """Start deferred tasks: other sessions have given buffers back. Tasks of those sessions
        call this."""
        for connection in list(self.connections):
            connection.wake()

    # -- ending tasks -----------------------------------------------------------------------------

    def finished(self, slot: TargetTask) -> None:
        """A thread has carried out the task, or has ended it early."""
        self.running -= 1
        waiting, slot.on_ended = slot.on_ended, []
        for tell in waiting:
            tell()
        if self.done:
            self.tasks.pop(slot.itt, None)
            self._task_sets.leave(slot.lun, slot)
            self._task_sets.enable_ready()
            self._end_if_over()
        elif slot.aborted:
            slot.connection.drop(slot)
            self._task_sets.enable_ready()
        elif slot.connection.done:
            slot.state = COMPLETED  # until it is reassigned
            slot.connection.release()
            self._task_sets.leave(slot.lun, slot)
            self._task_sets.enable_ready()
        else:
            slot.connection.respond(slot)

    def enabled(self, slot: TargetTask) -> None:
        """The turn of a dormant task has come: other tasks, perhaps of other sessions, have ended.
        Raises nothing: an error of its connection ends that one only."""
        slot.connection.enabled(slot)

    def end_each(self, slots: list[TargetTask], ended: Callable[[], None], cancel: bool) -> None:
        """End tasks without a response; ``ended`` is called for each. ``cancel``: do not wait for
        data that was asked for, where the datamover can cancel that."""
        for slot in slots:
            slot.aborted = True
            slot.task.cancel()
            slot.on_aborted.append(ended)
            if slot.state != RUNNING:
                self._task_sets.leave(slot.lun, slot)
            if slot.state == DEFERRED:
                self.deferred.remove(slot)
            if slot.state in _BEGUN or (
                slot.state == FETCHING and cancel and slot.connection.cancel_data(slot)
            ):
                slot.connection.drop(slot)

    def end_tasks(self, lun: int, ended: Callable[[], None], tas: bool = True) -> int:
        """Implements NexusTasks: after a reset or PREEMPT AND ABORT by another session."""
        tasks = self.tasks_on(lun)
        running = [slot for slot in tasks if slot.state == RUNNING and slot not in self._orphans]
        for slot in running:
            slot.task.cancel()
            slot.on_ended.append(ended)
        if not tas:
            # What has been carried out, and waits for its connection, is answered all the same, as
            # is what has failed before, and waits for its data only: no unit attention tells of it,
            # and its own sense data may be one. The initiator goes on sending the data of R2Ts, as
            # it does not know.
            over = (RUNNING, COMPLETED)
            others = [slot for slot in tasks if slot.state not in over and not slot.task.status]
            self.end_each([*running, *others], _nothing, False)
            for slot in running:
                # TASK REASSIGN does not find it any more, and to a unit attention an initiator may
                # send its commands again: none must land before what a thread still writes.
                self._pause_for(slot)
            return len(running)
        for slot in tasks:
            if slot.state in (RUNNING, COMPLETED):
                continue
            slot.task.status = sam.TASK_ABORTED
            slot.task.transferred = 0
            self._task_sets.leave(lun, slot)
            if slot.state == DEFERRED:
                self.deferred.remove(slot)
            if slot.state == SUSPENDED or (slot.state == DORMANT and slot.connection.done):
                slot.state = COMPLETED
            elif slot.state in (DEFERRED, DORMANT):
                slot.connection.respond(slot)
        for connection in self.connections:
            connection.flush_quietly()
        return len(running)

    def lose_lun(self, lun: int, ended: Callable[[], None]) -> int:
        """Implements NexusTasks. For the initiator they stay tasks of that LUN: what it aborts
        of them must have ended when it is told so."""
        running = self.end_tasks(lun, ended)
        for slot in self.tasks_on(lun):
            if slot.state == RUNNING and slot not in self._orphans:
                self._orphans.add(slot)
                slot.on_ended.append(partial(self._orphans.discard, slot))
        return running

    def tasks_on(self, *luns: int) -> list[TargetTask]:
        """The tasks of these LUNs that have been delivered."""
        return [slot for slot in self.tasks.values() if slot.lun in luns and slot.state != WAITING]

    def tasks_of(self, lun: int) -> list[TargetTask]:
        """Implements NexusTasks."""
        return [
            slot
            for slot in self.tasks_on(lun)
            if (
                slot not in self._orphans
                if slot.state == RUNNING
                else not (slot.state == COMPLETED or slot.aborted or slot.task.status)
            )
        ]

    def tasks_allegiant_to(self, connection: Allegiance) -> list[TargetTask]:
        """Those that have not ended."""
        return [slot for slot in self.tasks.values() if slot.connection is connection]

    def reassignable(self, itt: int) -> TargetTask | None:
        """The task with this tag, as far as TASK REASSIGN can mean it."""
        slot = self.tasks.get(itt) or self.answered.get(itt)
        return None if slot is None or slot.aborted or slot.state == WAITING else slot

    def acknowledged(self, slot: TargetTask) -> None:
        """The initiator has the status of the task, or has used its ITT again."""
        if self.answered.get(slot.itt) is slot:
            del self.answered[slot.itt]

    def answer_again(self, slot: TargetTask) -> bool:
        """Make a task that is being reassigned one that has not ended. Whether it was answered
        before."""
        if slot.state != ENDED:
            return False
        del self.answered[slot.itt]
        self.tasks[slot.itt] = slot
        return True
