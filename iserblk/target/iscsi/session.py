"""A session of the target: what its connections share. No trio, no socket.

CmdSN and the command window, the I_T nexus, the tasks by their ITT, and the memory for their data
(RFC 7143 sections 4.2.2.1, 4.4.3). A task is allegiant to one connection, which moves its data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from iserblk.scsi import status as sam
from iserblk.target.iscsi.buffers import GUARANTEED, BufferPool, DataBudget
from iserblk.target.iscsi.numbers import CommandWindow
from iserblk.target.iscsi.slot import (
    DEFERRED,
    DORMANT,
    FETCHING,
    RUNNING,
    UNSOLICITED,
    Allegiance,
    TargetTask,
)
from iserblk.target.ports import TargetPort
from iserblk.target.seam import DeviceServer, Nexus

DATA_BUDGET = 64 << 20  # bytes of buffers in use, above which commands wait
_BEGUN: Final = (DEFERRED, DORMANT, UNSOLICITED)  # states in which a task can be ended at once


class TargetSession:
    """``tasks``: by ITT, those that have not ended. ``deferred``: those of them that wait for
    buffers, in their order. ``running``: how many are in threads. ``connections``: those that are
    open. ``done``: no command starts any more. ``attached``: the device server knows ``nexus``."""

    def __init__(self, device: DeviceServer, budget: DataBudget) -> None:
        self._device = device
        self._task_sets = device.task_sets
        self._budget = budget
        self.pool = BufferPool(budget)
        self.window = CommandWindow()
        self.tasks: dict[int, TargetTask] = {}
        self.deferred: deque[TargetTask] = deque()
        self.running = 0
        self.connections: list[Allegiance] = []
        self.nexus: Nexus  # while ``attached``, and afterwards
        self.attached = False
        self.held = False
        self.done = False

    def attach(self, initiator: str, isid: bytes, port: TargetPort) -> None:
        """Begin full feature phase of a normal session."""
        self.nexus = Nexus(initiator, isid, self.end_tasks, port, self._tasks_of)
        self._device.attach(self.nexus)
        self.attached = True

    # -- driven by the owner ----------------------------------------------------------------------

    def hold(self) -> None:
        """Start no command until ``unhold``. Tasks of the session that this one reinstates still
        write, and an old write must not land after a new one."""
        self.held = True

    def unhold(self) -> None:
        """End a ``hold``: start the deferred commands."""
        self.held = False
        self._wake()

    def abandon(self) -> None:
        """End the session now: no command starts any more, and the peer is disconnected. The owner
        closes the connections later, when no task waits for their descriptors."""
        self.done = True
        for task in self.tasks.values():
            task.aborted = True
            task.task.cancel()
            if task.state != RUNNING:
                self._task_sets.leave(task.lun, task)
        # Tasks in threads stay: a PREEMPT AND ABORT, or an ORDERED task, may have to wait for them.
        for itt in [itt for itt, task in self.tasks.items() if task.state != RUNNING]:
            del self.tasks[itt]
        self.deferred.clear()
        for connection in self.connections:
            connection.disconnect()
        self._task_sets.enable_ready()

    def leave(self, connection: Allegiance) -> None:
        """A connection is closed. With the last one the session ends, and releases all resources:
        no thread may be running a task of it."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        if self.connections:
            return
        self.done = True
        self._budget.forget(self._wake)
        self.pool.close()
        for slot in self.tasks.values():
            self._task_sets.leave(slot.lun, slot)
        self._task_sets.enable_ready()
        if self.attached:
            self.attached = False
            self._device.detach(self.nexus)

    # -- memory for data --------------------------------------------------------------------------

    def defer(self, slot: TargetTask, first: bool) -> None:
        """Let the task wait until ``resume`` starts it. ``first``: before all others."""
        slot.state = DEFERRED
        if first:
            self.deferred.appendleft(slot)
        else:
            self.deferred.append(slot)

    def resume(self) -> None:
        """Start deferred tasks, in order, while there is room for their buffers."""
        while self.deferred and not self.held:
            slot = self.deferred[0]
            if not self.has_room(slot.task.length):
                return
            self.deferred.popleft()
            slot.connection.start(slot)

    def has_room(self, length: int) -> bool:
        """Whether a task may have its buffer now. If not, ``resume`` tries again when buffers of
        this session, or of others, are given back."""
        used = self.pool.used
        if used + length <= GUARANTEED:
            return True
        if not self._budget.fits(length):
            self._budget.press()
            if not self._budget.fits(length):
                self._budget.wait(self._wake)
                return False
        return not used or used + length <= DATA_BUDGET

    def _wake(self) -> None:
        """Start deferred tasks: other sessions have given buffers back. Tasks of those sessions
        call this."""
        for connection in list(self.connections):
            connection.wake()

    # -- ending tasks -----------------------------------------------------------------------------

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

    def end_tasks(self, lun: int, ended: Callable[[], None]) -> int:
        """Implements Nexus.end_tasks: after a reset or PREEMPT AND ABORT by another session."""
        tasks = [slot for slot in self.tasks.values() if slot.lun == lun]
        running = [slot for slot in tasks if slot.state == RUNNING]
        for slot in running:
            slot.task.cancel()
            slot.on_ended.append(ended)
        for slot in tasks:
            if slot.state != RUNNING:
                slot.task.status = sam.TASK_ABORTED
                slot.task.transferred = 0
                self._task_sets.leave(lun, slot)
            if slot.state == DEFERRED:
                self.deferred.remove(slot)
                slot.connection.respond(slot)
            elif slot.state == DORMANT:
                slot.connection.respond(slot)
        for connection in self.connections:
            connection.flush_quietly()
        return len(running)

    def _tasks_of(self, lun: int) -> list[TargetTask]:
        """Implements Nexus.tasks_of."""
        return [
            slot
            for slot in self.tasks.values()
            if slot.lun == lun and (slot.state == RUNNING or not (slot.aborted or slot.task.status))
        ]
