"""How a command ends when it is not carried out: exceptions inside the device server."""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.scsi import status as sam


class Ended(Exception):
    """The command ends with ``status``, nothing done. Never leaves the device server."""

    status = sam.CHECK_CONDITION
    sense = b""


class ReservationConflict(Ended):
    status = sam.RESERVATION_CONFLICT


class TaskAborted(Ended):
    status = sam.TASK_ABORTED


class CheckCondition(Ended):
    """The command ends with CHECK CONDITION; ``sense`` says why.

    ``code``: ASC << 8 | ASCQ. ``field``, ``bit``: what is wrong in the CDB (or the parameters).
    """

    def __init__(
        self,
        key: int,
        code: int,
        *,
        information: int | None = None,
        field: int | None = None,
        bit: int | None = None,
        field_in_cdb: bool = True,
    ) -> None:
        super().__init__(key, code)
        self.sense = sense.encode_fixed(
            key, code >> 8, code & 0xFF, information, field, bit, field_in_cdb
        )


def invalid_field(field: int, bit: int | None = None) -> CheckCondition:
    """Byte ``field`` of the CDB asks for what is not to be had."""
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB, field=field, bit=bit)
