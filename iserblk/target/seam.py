"""The interface inside the target between the iSCSI connection and the SCSI device server.

The connection (``iserblk.target.iscsi.connection``) moves data; the device server
(``iserblk.target.scsi.device``) knows SCSI; the store (``iserblk.target.store.store``) holds bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple, Protocol

from iserblk.scsi.reservations import TransportId
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.task_set import TaskSets

NO_DATA: Final = 0
DATA_IN: Final = 1  # device to initiator
DATA_OUT: Final = 2  # initiator to device
BIDIRECTIONAL: Final = DATA_IN | DATA_OUT  # first Data-Out, then Data-In of the same length

GOOD: Final = b""  # no sense data


class ScsiTask:
    """One command being executed. ``DeviceServer.begin`` makes it, ``run`` ends it.

    ``direction``: NO_DATA, DATA_IN, DATA_OUT or BIDIRECTIONAL. ``length``: bytes of the Data-In
    buffer that ``run`` needs (an upper bound), or of the Data-Out that the caller gives to it
    (exact). Of BIDIRECTIONAL both: ``run`` replaces the Data-Out in the buffer by the Data-In.
    ``may_block``: ``run`` may wait for a disk (flush, punch, verify…), so call it in a thread.
    ``cancelled``: any thread sets it when the result is no longer wanted. ``run`` then does
    nothing, or stops early if it takes long, and ends with TASK ABORTED. ``in_loop``: of a task
    with ``may_block``: ``start`` may need no thread. After ``run``: ``status`` (SAM), ``sense``
    (SPC sense data, b"" if none), ``transferred`` (Data-In bytes that ``run`` put into the buffer).
    """

    __slots__ = ("cancelled", "cdb", "direction", "in_loop", "length", "may_block", "sense",
                 "status", "stop", "transferred")  # fmt: skip

    def __init__(self, cdb: bytes) -> None:
        self.cdb = cdb
        self.direction = NO_DATA
        self.length = 0
        self.may_block = False
        self.in_loop = False
        self.cancelled = False
        self.stop: Callable[[], None] | None = None  # ends it early, after ``start``
        self.status = 0
        self.sense = GOOD
        self.transferred = 0

    def was_answered(self) -> None:
        """Its status, which is not GOOD, has been sent to the initiator."""

    def cancel(self) -> None:
        """The result is no longer wanted. Only the thread that begins commands calls this."""
        self.cancelled = True
        if self.stop is not None:
            self.stop()


ALL_PORTS: Final = 0  # in place of a relative target port: the registration has ALL_TG_PT


class NexusName(NamedTuple):
    """The name of an I_T nexus. It is the same when the initiator reconnects to the same port."""

    initiator: TransportId
    port: int = 1  # relative target port identifier, or ALL_PORTS


class NexusTasks(Protocol):
    """The tasks of an I_T nexus, for the device server. Only the thread that begins commands calls
    the methods."""

    def end_tasks(self, lun: int, ended: Callable[[], None], tas: bool = True) -> int:
        """End the tasks of a LUN, as after a reset by another session. ``tas`` (Control mode page):
        with TASK ABORTED; False: without any response. A task that a thread is running cannot be
        ended: it completes, and ``ended`` is called then, once for each. Returns the number of
        those tasks."""
        ...

    def lose_lun(self, lun: int, ended: Callable[[], None]) -> int:
        """As ``end_tasks``, for a LUN that is gone. What it has counted is no task of another LUN
        that gets the number: neither of the other two knows it any more."""
        ...

    def tasks_of(self, lun: int) -> Sequence[object]:
        """The tasks of a LUN that have begun or may begin, for TaskSets."""
        ...


class NoTasks:
    """Of a nexus that has none. Implements NexusTasks."""

    def end_tasks(self, lun: int, ended: Callable[[], None], tas: bool = True) -> int:
        return 0

    def lose_lun(self, lun: int, ended: Callable[[], None]) -> int:
        return 0

    def tasks_of(self, lun: int) -> Sequence[object]:
        return ()


class Nexus:
    """The I_T nexus of one session. ``name``: initiator name, ISID and port; the same after a
    reconnect. The initiator name is in lower case, as case does not count in iSCSI names. ``port``:
    the target port to which the initiator connected. ``tasks``: the session's."""

    __slots__ = ("name", "port", "tasks")

    def __init__(
        self,
        initiator: str,
        isid: bytes,
        tasks: NexusTasks | None = None,
        port: TargetPort = ONLY_PORT,
    ) -> None:
        """``tasks``: None: there are none."""
        self.port = port
        self.name = NexusName(TransportId(initiator.lower(), isid), port.relative)
        self.tasks: NexusTasks = tasks or NoTasks()


class DeviceServer(Protocol):
    """The LUNs of one SCSI target port (SAM): routes by LUN, executes commands.

    ``task_sets``: of these LUNs. The connections enter and remove their tasks; whether a task is
    dormant does not matter to the methods here."""

    @property
    def task_sets(self) -> TaskSets: ...

    def attach(self, nexus: Nexus) -> None:
        """Begin a session: unit attention 29/00 (power on) is pending for it on every LUN."""
        ...

    def detach(self, nexus: Nexus) -> None: ...

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        """Parse and check the command. Never raises, whatever the bytes are. A command that is
        refused has NO_DATA and its final ``status``: CHECK CONDITION with ``sense`` (also for a
        pending unit attention), or RESERVATION CONFLICT, which has no sense.
        ``lun``: decoded (0..16383), or -1 for a LUN field that names no LUN."""
        ...

    def fit(self, task: ScsiTask, length: int) -> None:
        """Adapt the task to an initiator that sends ``length`` bytes of Data-Out, not
        ``task.length``: take fewer bytes (``task.length`` becomes less), or end the task with its
        sense."""
        ...

    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        """Execute the command. ``buffer``: ``length`` bytes, to fill (DATA_IN), or filled
        (DATA_OUT, BIDIRECTIONAL). True: ``status``, ``sense`` and ``transferred`` are final. False,
        only with ``nowait``: the command has to wait (the data is not in the page cache, or other
        tasks have to end first); call again without ``nowait``. Any thread may call it, with one
        exception: the thread that begins commands makes the first call of a task without
        ``may_block``, with ``nowait``. Errors of the file become sense data (MEDIUM ERROR, SPACE
        ALLOCATION FAILED, …), never exceptions.
        """
        ...

    def start(self, task: ScsiTask, buffer: memoryview | None, ended: Callable[[], None]) -> bool:
        """Execute a command with ``in_loop`` without a thread, if that is possible. True: ``ended``
        is called later, in the loop, when ``status``, ``sense`` and ``transferred`` are final; the
        buffer is in use until then. False: nothing was done; call ``run`` in a thread. Only the
        thread that begins commands calls it."""
        ...

    def settle(self, task: ScsiTask, ended: Callable[[], None]) -> None:
        """For a task with ``in_loop`` whose ``run`` has ended: call ``ended``, in the loop, when
        nothing of it can reach the medium any more, however it ended."""
        ...

    def has_lun(self, nexus: Nexus, lun: int) -> bool: ...

    def luns(self, nexus: Nexus) -> Sequence[int]:
        """All LUNs that there are for ``nexus``."""
        ...

    def hides_luns(self, nexus: Nexus) -> bool:
        """Whether there are LUNs for others that there are not for ``nexus``."""
        ...

    def tasks_cleared(self, nexus: Nexus, luns: Collection[int]) -> None:
        """Tasks of these LUNs have ended with the connection that they came on: unit attention
        47/7F (RFC 7143 section 11.14.5)."""
        ...

    def end_tasks_of_others(self, lun: int, by: Nexus, ended: Callable[[], None]) -> int:
        """End the LUN's tasks of every nexus but ``by``, which has asked for a reset: also those of
        old sessions that were reinstated and whose last tasks still run. Result as for
        ``NexusTasks.end_tasks``."""
        ...

    def reset_lun(self, lun: int) -> bool:
        """LOGICAL UNIT RESET: unit attention 29/03 for every nexus. False: there is no such LUN."""
        ...
