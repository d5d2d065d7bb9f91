"""Errors of a disk as what the target answers: a SCSI status and sense data."""

from __future__ import annotations

import errno
from typing import Final

from iserblk.errors import (
    Busy,
    CommandRejected,
    CommandTimeout,
    IserblkError,
    NotSupported,
    OutOfRange,
    OutOfSpace,
    ScsiError,
    TransportError,
    WriteProtected,
    WritesLost,
)
from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.scsi.sense import Sense
from iserblk.target.store.status import LostError, StatusError

# Sense keys of a command that was not carried out: the initiator may send it again, and a flush
# that fails so has lost nothing.
_NOT_CARRIED_OUT: Final = (
    sense.NOT_READY,
    sense.ILLEGAL_REQUEST,
    sense.UNIT_ATTENTION,
    sense.ABORTED_COMMAND,
)
_CODES: Final[tuple[tuple[type[IserblkError], int, int], ...]] = (
    (OutOfRange, sense.ILLEGAL_REQUEST, sense.LBA_OUT_OF_RANGE),
    (OutOfSpace, sense.DATA_PROTECT, sense.SPACE_ALLOCATION_FAILED),
    (WriteProtected, sense.DATA_PROTECT, sense.WRITE_PROTECTED),
    (NotSupported, sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB),
    (CommandRejected, sense.ABORTED_COMMAND, sense.NO_ADDITIONAL_SENSE),
    (ScsiError, sense.ABORTED_COMMAND, sense.NO_ADDITIONAL_SENSE),  # a status with no meaning here
    # The session is over for good; no retry helps.
    (TransportError, sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE),
    (Busy, sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE),
)


def status_error(error: IserblkError) -> StatusError:
    """What an initiator is told of ``error``. Status and sense of the remote LUN are passed on. A
    deadline that has passed, as while the remote target is away, becomes BUSY: initiators wait, and
    send the command again. A write that is lost becomes MEDIUM ERROR, WRITE ERROR; so does a flush
    that has failed with a loss, however it did: initiators would send it again, and hear no more of
    the loss."""
    text = str(error)
    if error.losses and not _is_medium_error(error):
        told = _check_condition(text, sense.MEDIUM_ERROR, sense.WRITE_ERROR)
        if isinstance(error, WritesLost):
            return LostError(errno.EREMOTEIO, text, told.status, told.sense)
        return told
    if isinstance(error, CommandTimeout):
        return StatusError(errno.EBUSY, text, sam.BUSY)
    if isinstance(error, ScsiError):
        if isinstance(error.sense, Sense) and error.status == sam.CHECK_CONDITION:
            return _with_sense(text, error.sense)
        if error.status in (sam.BUSY, sam.TASK_SET_FULL, sam.RESERVATION_CONFLICT):
            return StatusError(errno.EBUSY, text, error.status)
    for kind, key, code in _CODES:
        if isinstance(error, kind):
            return _check_condition(text, key, code)
    return _check_condition(text, sense.MEDIUM_ERROR, sense.WRITE_ERROR)


def _is_medium_error(error: IserblkError) -> bool:
    if not isinstance(error, ScsiError) or not isinstance(error.sense, Sense):
        return False
    return error.sense.key == sense.MEDIUM_ERROR


def _with_sense(text: str, found: Sense) -> StatusError:
    """INFORMATION is the LBA of a medium error, which the gateway does not change. The field
    pointer is left out: the CDB was another."""
    return _check_condition(text, found.key, found.code, found.information)


def _check_condition(text: str, key: int, code: int, information: int | None = None) -> StatusError:
    number = errno.EBUSY if key in _NOT_CARRIED_OUT else errno.EREMOTEIO
    data = sense.encode_fixed(key, code >> 8, code & 0xFF, information)
    return StatusError(number, text, sam.CHECK_CONDITION, data)


def internal_error() -> StatusError:
    """For a bug."""
    return _check_condition(
        "internal error of the gateway", sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE
    )
