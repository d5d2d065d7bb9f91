"""Device servers that refuse commands which their LUNs say that they have: the base of profiles
(tests/support/profiles)."""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import Nexus, ScsiTask

UNKNOWN = sense.INVALID_OPERATION_CODE
INVALID = sense.INVALID_FIELD_IN_CDB


def blocks_of(cdb: bytes) -> int:
    """The blocks of a READ, WRITE, or WRITE SAME of 10 or 16 bytes."""
    if cdb[0] >> 5 == 4:
        return int.from_bytes(cdb[10:14], "big")
    return int.from_bytes(cdb[7:9], "big")


class Refusing(DeviceServer):
    """``refusal`` says what is refused, and how: nothing, until a profile says more. ``refused``:
    the CDBs that were. Unit attentions, and all that our own target refuses, come first."""

    refused: tuple[bytes, ...] = ()

    def refusal(self, _cdb: bytes, _unit: LogicalUnit) -> int:
        """ASC << 8 | ASCQ of an ILLEGAL REQUEST; 0: the command is carried out."""
        return 0

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = super().begin(nexus, lun, cdb)
        unit = self._units.get(lun)
        if task.status or unit is None or not isinstance(task, DeviceTask):
            return task
        code = self.refusal(bytes(cdb), unit)
        if not code:
            return self.other(task)
        self.refused += (bytes(cdb),)
        refused = DeviceTask(cdb)
        refused.status = 2
        refused.sense = sense.encode_fixed(sense.ILLEGAL_REQUEST, code >> 8, code & 0xFF)
        return refused

    def other(self, task: DeviceTask) -> ScsiTask:
        """A task that is carried out, perhaps in another way."""
        return task
