"""What an initiator is told of an error of the remote LUN."""

from __future__ import annotations

import errno

import pytest

from iserblk.errors import (
    CommandRejected,
    CommandTimeout,
    ConnectionLost,
    IserblkError,
    LunChanged,
    NotSupported,
    OutOfRange,
    ReservationConflict,
    ReservationLost,
    ScsiError,
    WriteProtected,
    WritesLost,
)
from iserblk.gateway.statuses import status_error
from iserblk.scsi import sense
from iserblk.scsi import status as sam
from iserblk.target.store.status import LostError


@pytest.mark.parametrize(
    ("error", "key", "code"),
    [
        (OutOfRange("x"), sense.ILLEGAL_REQUEST, sense.LBA_OUT_OF_RANGE),
        (WriteProtected("x"), sense.DATA_PROTECT, sense.WRITE_PROTECTED),
        (NotSupported("x"), sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB),
        (CommandRejected("x"), sense.ABORTED_COMMAND, 0),
        (ScsiError("x", sam.TASK_ABORTED), sense.ABORTED_COMMAND, 0),
        (ConnectionLost("x"), sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE),
        (LunChanged("x"), sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE),
        (ReservationLost("x"), sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE),
        (IserblkError("odd"), sense.MEDIUM_ERROR, sense.WRITE_ERROR),
        (WritesLost("x"), sense.MEDIUM_ERROR, sense.WRITE_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_without_sense(error: IserblkError, key: int, code: int) -> None:
    told = status_error(error)
    found = sense.decode(told.sense)
    assert (told.status, found.key, found.code) == (sam.CHECK_CONDITION, key, code)
    # EIO would have a write with FUA report the writes of others as lost.
    assert told.errno in (errno.EBUSY, errno.EREMOTEIO)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CommandTimeout("the target is away"), sam.BUSY),
        (ScsiError("x", sam.BUSY), sam.BUSY),
        (ScsiError("x", sam.TASK_SET_FULL), sam.TASK_SET_FULL),
        (ReservationConflict("x", sam.RESERVATION_CONFLICT), sam.RESERVATION_CONFLICT),
    ],
)
def test_statuses_that_lose_nothing(error: IserblkError, status: int) -> None:
    told = status_error(error)
    assert (told.status, told.sense, told.errno) == (status, b"", errno.EBUSY)


@pytest.mark.parametrize("encode", [sense.encode_fixed, sense.encode_descriptor])
def test_sense_comes_through_with_its_lba(encode: object) -> None:
    raw = encode(sense.MEDIUM_ERROR, 0x11, 0x04, 0x1234)  # type: ignore[operator]
    told = status_error(ScsiError("x", sam.CHECK_CONDITION, sense.decode(raw)))
    found = sense.decode(told.sense)
    assert (found.key, found.code, found.information) == (sense.MEDIUM_ERROR, 0x1104, 0x1234)
    assert told.errno == errno.EREMOTEIO


def test_a_not_ready_lun_has_lost_nothing() -> None:
    raw = sense.encode_fixed(sense.NOT_READY, 0x04, 0x03)
    told = status_error(ScsiError("x", sam.CHECK_CONDITION, sense.decode(raw)))
    assert told.errno == errno.EBUSY and sense.decode(told.sense).code == 0x0403


def test_a_flush_that_was_carried_out_behind_a_loss() -> None:
    error = WritesLost("x")
    error.losses = 1
    told = status_error(error)
    assert isinstance(told, LostError) and sense.decode(told.sense).code == sense.WRITE_ERROR
    assert not isinstance(status_error(IserblkError("x")), LostError)


@pytest.mark.parametrize("key", [sense.ABORTED_COMMAND, sense.NOT_READY, None])
def test_a_flush_whose_failure_is_a_loss(key: int | None) -> None:
    """An initiator would send it again, and be told that all is well."""
    error: IserblkError = CommandTimeout("x")
    if key is not None:
        error = ScsiError("x", sam.CHECK_CONDITION, sense.Sense(sense.FIXED, key, 0, 0))
    assert status_error(error).errno == errno.EBUSY
    error.losses = 1
    told = status_error(error)
    assert told.errno == errno.EREMOTEIO
    assert sense.decode(told.sense).key == sense.MEDIUM_ERROR
