"""The target's inner seam: between the iSCSI connection and the SCSI device server.

The connection (``iserblk.target.iscsi.connection``) moves data; the device server
(``iserblk.target.scsi.device``) knows SCSI; the store (``iserblk.target.store.store``) holds bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from iserblk.scsi.reservations import TransportId
from iserblk.target.ports import ONLY_PORT, TargetPort

NO_DATA = 0
DATA_IN = 1  # device to initiator
DATA_OUT = 2  # initiator to device

GOOD = b""  # no sense data

EndTasks = Callable[[int, Callable[[], None]], int]


class ScsiTask:
    """One command being executed. Made by ``DeviceServer.begin``, ended by ``run``.

    ``direction``: NO_DATA, DATA_IN or DATA_OUT. ``length``: bytes of the Data-In buffer that
    ``run`` wants (an upper bound) or of Data-Out that it must be given (exact).
    ``may_block``: ``run`` may wait for a disk (flush, punching, verifying…) and belongs in a
    thread. ``cancelled``: set by any thread where nobody wants the outcome any more; ``run`` does
    nothing then, or no more where it takes long, and ends with TASK ABORTED. After ``run``:
    ``status`` (SAM), ``sense`` (SPC sense data, b"" if none), ``transferred`` (Data-In bytes that
    were put into the buffer).
    """

    __slots__ = ("cancelled", "cdb", "direction", "length", "may_block", "plan", "sense", "status",
                 "transferred")  # fmt: skip

    def __init__(self, cdb: bytes) -> None:
        self.cdb = cdb
        self.direction = NO_DATA
        self.length = 0
        self.may_block = False
        self.cancelled = False
        self.plan: object = None  # the device server's own
        self.status = 0
        self.sense = GOOD
        self.transferred = 0


ALL_PORTS = 0  # as a relative target port: a registration with ALL_TG_PT


class NexusName(NamedTuple):
    """What stays the same when the initiator comes back through the same port."""

    initiator: TransportId
    port: int = 1  # relative target port identifier, or ALL_PORTS


class Nexus:
    """The I_T nexus of one session. ``name``: what stays the same when the initiator comes back,
    the initiator name (in lower case: names are compared without it), the ISID, and the port.

    ``end_tasks(lun, ended)``: end the session's tasks of a LUN, as after a reset by another one.
    Those that a thread is running cannot be: they complete, and for each ``ended`` is called then.
    Returns how many those are. Called by the one thread that begins commands. ``port``: the
    target port that the session came to.
    """

    __slots__ = ("end_tasks", "name", "port")

    def __init__(
        self,
        initiator: str,
        isid: bytes,
        end_tasks: EndTasks = lambda _lun, _ended: 0,
        port: TargetPort = ONLY_PORT,
    ) -> None:
        self.port = port
        self.name = NexusName(TransportId(initiator.lower(), isid), port.relative)
        self.end_tasks = end_tasks


class DeviceServer(Protocol):
    """The LUNs of one SCSI target port (SAM): routes by LUN, executes commands."""

    def attach(self, nexus: Nexus) -> None:
        """A session begins: power-on unit attention (29/00) is pending on every LUN for it."""
        ...

    def detach(self, nexus: Nexus) -> None: ...

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        """Parse and check the command. Never raises for any bytes: a bad one comes back with
        NO_DATA, ``status`` CHECK CONDITION and its sense; a pending unit attention likewise, and
        RESERVATION CONFLICT, which has no sense.
        ``lun`` is decoded (0..16383), or -1 for a LUN field that names none."""
        ...

    def fit(self, task: ScsiTask, length: int) -> None:
        """The initiator sends ``length`` bytes of Data-Out, not ``task.length``: take what there
        is of them (``task.length`` becomes less), or end the task with its sense."""
        ...

    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        """Execute. ``buffer``: ``length`` bytes, to fill (DATA_IN) or filled (DATA_OUT). With
        ``nowait`` returns False where it has to wait (the data is not in the page cache, other
        tasks have to end): then it is to be called again without. True: ``status``, ``sense``
        and ``transferred`` are final. Thread-safe, but for the first call of a task that has not
        ``may_block``: that is made with ``nowait`` by the thread that begins commands. Errors of
        the file become sense data (MEDIUM ERROR, SPACE ALLOCATION FAILED, …), never exceptions.
        """
        ...

    def has_lun(self, lun: int) -> bool: ...

    def reset_lun(self, lun: int) -> bool:
        """LOGICAL UNIT RESET: unit attention 29/03 for every nexus. False: no such LUN."""
        ...
