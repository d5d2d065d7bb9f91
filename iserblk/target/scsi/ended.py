"""Exceptions that end a command with an error. They never leave the device server."""

from __future__ import annotations

from iserblk.scsi import sense
from iserblk.scsi import status as sam


class Ended(Exception):
    """The command ends with ``status`` and ``sense``, and returns no data."""

    status = sam.CHECK_CONDITION
    sense = b""


class ReservationConflict(Ended):
    status = sam.RESERVATION_CONFLICT


class TaskAborted(Ended):
    status = sam.TASK_ABORTED


class CheckCondition(Ended):
    """The command ends with CHECK CONDITION; ``sense`` tells the reason.

    ``key``: sense key. ``code``: ASC << 8 | ASCQ. ``field``, ``bit``: the wrong byte and bit of the
    CDB, or of the parameter list if ``field_in_cdb`` is False.
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


def wrong_parameter(field: int, bit: int | None = None) -> CheckCondition:
    """The error for a parameter list whose byte ``field`` cannot be as it is."""
    return CheckCondition(
        sense.ILLEGAL_REQUEST,
        sense.INVALID_FIELD_IN_PARAMETER_LIST,
        field=field,
        bit=bit,
        field_in_cdb=False,
    )


def invalid_field(field: int, bit: int | None = None) -> CheckCondition:
    """The error for a CDB whose byte ``field`` asks for something that is not supported."""
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB, field=field, bit=bit)
