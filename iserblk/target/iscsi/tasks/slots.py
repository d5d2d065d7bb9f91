"""The slots of a connection: memory for its tasks, and for their responses."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from iserblk.datamover.seam import TargetDatamover
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi.serial import MASK32
from iserblk.target.iscsi.buffers import BufferPool
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.iscsi.tasks.slot import IDLE, NO_TURN, Allegiance, TargetTask

QUEUE_DEPTH: Final = 128  # commands that an initiator may have outstanding
# Of one connection: a slot is free only when the datamover reports its response as sent.
TASK_SLOTS: Final = 2 * QUEUE_DEPTH
BATCH_SLOTS: Final = 16  # that are made at a time
# Bytes that are set aside for the slots that are still to be made. They take 0.6 MiB, and Python
# takes memory from the system by the MiB.
RESERVE: Final = 1 << 20
FEW_COMMANDS: Final = 16  # between two calls of ``trim``: the session is idle
SENSE_INLINE: Final = 256


class TaskSlots:
    """The slots of one connection: ``all``, and those that are ``free``.

    ``datamover``, ``pool``: of the connection and of its session; the connection sets others at the
    end of its login. ``in_use``: the connection has ended, and is not closed: nothing is recycled,
    as its buffers may be in use still.
    """

    def __init__(
        self,
        connection: Allegiance,
        datamover: TargetDatamover,
        pool: BufferPool,
        answers: ControlAnswers,
        at_once: bool,
    ) -> None:
        """``at_once``: see TargetConnection."""
        self.datamover = datamover
        self.pool = pool
        self.in_use = False
        self.free: list[TargetTask] = []
        self.all: list[TargetTask] = []
        self._connection = connection
        self._answers = answers
        self._at_once = at_once
        self._reserve: mmap | None = None
        self._looked = 0  # ExpCmdSN at the last ``trim``

    def allocate(self) -> None:
        """Allocate what a login promises. Raises as ``add_resources``.

        Where slots are made later, their memory is promised nevertheless: a mapping as large as all
        of them is made now. The system counts it against every limit that could refuse memory to
        this process (address space, data, commit limit), though pages that nothing touches take no
        memory. So the login fails where it always did. Should memory be refused later, the mapping
        is given up and all slots are made in its place."""
        if not self._at_once:
            self._reserve = _set_aside_memory()
        self.make(TASK_SLOTS if self._at_once else BATCH_SLOTS, QUEUE_DEPTH)

    def make(self, count: int, receives: int = 0) -> None:
        """Add ``count`` slots. Raises as ``add_resources``; then nothing has changed."""
        made = len(self.all)
        fresh = [TargetTask(index) for index in range(made, made + count)]
        for slot in fresh:
            slot.connection = self._connection
        self.datamover.add_resources(fresh, SENSE_INLINE, receives)
        self.all += fresh
        self.free += fresh

    def take(self) -> TargetTask:
        """A free slot, which is made if there is none. Raises as ``make_more``."""
        if not self.free:
            self.make_more()
        return self.free.pop()

    def replace(self, fresh: TargetTask, slot: TargetTask) -> None:
        """``slot`` has the memory of ``fresh`` from now on: see ``TargetTask.adopt``."""
        self.all[self.all.index(fresh)] = slot

    @property
    def are_all_taken(self) -> bool:
        """Whether ``take`` would refuse."""
        return not self.free and len(self.all) >= TASK_SLOTS

    def make_more(self) -> None:
        """Make slots when none is free. Raises RemoteProtocolError when the initiator has begun
        more than it may; and ConnectionLost when there is no memory after all, because another
        thread has taken what the reserve had held."""
        left = TASK_SLOTS - len(self.all)
        if left <= 0:
            raise RemoteProtocolError("iSCSI", "more commands than MaxCmdSN allows")
        try:
            try:
                self.make(min(left, BATCH_SLOTS))
            except (OSError, MemoryError):
                self.give_up_reserve()
                self.make(left)
        except (OSError, MemoryError):
            raise ConnectionLost("there is no memory for the commands of the session") from None
        if len(self.all) >= TASK_SLOTS:
            self.give_up_reserve()

    def give_up_reserve(self) -> None:
        reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()

    def trim(self, exp_cmd_sn: int) -> None:
        """See ``TargetConnection.trim``. ``exp_cmd_sn``: of the session."""
        before, self._looked = self._looked, exp_cmd_sn
        if (self._looked - before) & MASK32 > FEW_COMMANDS:
            return
        self.pool.trim()
        free = self.free
        if self._at_once or len(free) <= BATCH_SLOTS or len(free) < len(self.all):
            return
        if any(slot.busy for slot in free):
            return
        if self._reserve is None:
            try:
                self._reserve = _set_aside_memory()
            except OSError:
                return  # what login has promised stays where it is
        for slot in self.all[BATCH_SLOTS:]:
            for request in (slot.request, slot.transfer):
                request.token = request.done = None  # else each slot would refer to itself
        del self.all[BATCH_SLOTS:]
        self.free[:] = self.all

    def recycle(self, slot: TargetTask) -> None:
        """See Allegiance."""
        if self.in_use:
            return  # its buffer may be in use still; ``release`` gives it back
        if slot.buffer is not None:
            self.pool.give(slot.buffer)
            slot.buffer = None
        self.datamover.deallocate_task_resources(slot)
        slot.state = IDLE
        slot.filled = 0
        unsolicited = slot.unsolicited
        unsolicited.arrived = 0
        unsolicited.data_sn = 0
        unsolicited.age = 0
        slot.overflow = 0
        slot.read_length = 0
        slot.reassigned = False
        slot.losses = 0
        slot.acknowledged = False
        slot.resume_at = 0
        slot.turn = NO_TURN
        slot.aborted = False
        if slot.control:
            self._answers.give_back(slot)
        else:
            self.free.append(slot)

    @property
    def kept_data(self) -> int:
        """Bytes of data of the tasks that are allegiant to this connection."""
        return sum(
            len(slot.buffer)
            for slot in self.all
            if slot.connection is self._connection and slot.buffer is not None
        )


def _set_aside_memory() -> mmap:
    """Raises OSError when the system has not that much."""
    return mmap(-1, RESERVE, MAP_PRIVATE | MAP_ANONYMOUS)
