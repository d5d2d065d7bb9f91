"""The target's inner seam: between the iSCSI connection and the SCSI device server.

The connection (``iserblk.target.connection``) moves data; the device server
(``iserblk.target.device``) knows SCSI; the store (``iserblk.target.store``) holds bytes.
"""

from __future__ import annotations

from typing import Protocol

NO_DATA = 0
DATA_IN = 1  # device to initiator
DATA_OUT = 2  # initiator to device

GOOD = b""  # no sense data


class ScsiTask:
    """One command being executed. Made by ``DeviceServer.begin``, ended by ``run``.

    ``direction``: NO_DATA, DATA_IN or DATA_OUT. ``length``: bytes of the Data-In buffer that
    ``run`` wants (an upper bound) or of Data-Out that it must be given (exact).
    ``may_block``: ``run`` may wait for a disk (flush, punching, verifying…) and belongs in a
    thread. After ``run``: ``status`` (SAM), ``sense`` (SPC sense data, b"" if none),
    ``transferred`` (Data-In bytes that were put into the buffer).
    """

    __slots__ = ("cdb", "direction", "length", "may_block", "plan", "sense", "status",
                 "transferred")  # fmt: skip

    def __init__(self, cdb: bytes) -> None:
        self.cdb = cdb
        self.direction = NO_DATA
        self.length = 0
        self.may_block = False
        self.plan: object = None  # the device server's own
        self.status = 0
        self.sense = GOOD
        self.transferred = 0


class DeviceServer(Protocol):
    """The LUNs of one SCSI target port (SAM): routes by LUN, executes commands.

    A nexus is any hashable object; the connection has one per session.
    """

    def attach(self, nexus: object) -> None:
        """A session begins: power-on unit attention (29/00) is pending on every LUN for it."""
        ...

    def detach(self, nexus: object) -> None: ...

    def begin(self, nexus: object, lun: int, cdb: bytes) -> ScsiTask:
        """Parse and check the command. Never raises for any bytes: a bad one comes back with
        NO_DATA, ``status`` CHECK CONDITION and its sense; a pending unit attention likewise.
        ``lun`` is decoded (0..16383), or -1 for a LUN field that names none."""
        ...

    def fit(self, task: ScsiTask, length: int) -> None:
        """The initiator sends ``length`` bytes of Data-Out, not ``task.length``: take what there
        is of them (``task.length`` becomes less), or end the task with its sense."""
        ...

    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        """Execute. ``buffer``: ``length`` bytes, to fill (DATA_IN) or filled (DATA_OUT). With
        ``nowait`` returns False, nothing done, where the data is not in the page cache; True:
        ``status``, ``sense`` and ``transferred`` are final. Thread-safe. Errors of the file
        become sense data (MEDIUM ERROR, SPACE ALLOCATION FAILED, …), never exceptions."""
        ...

    def reset_lun(self, lun: int) -> bool:
        """LOGICAL UNIT RESET: unit attention 29/03 for every nexus. False: no such LUN."""
        ...
