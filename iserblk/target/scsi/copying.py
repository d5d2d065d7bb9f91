"""EXTENDED COPY between the target's own LUNs.

The destination is the LUN that gets the command: what ends that LUN's tasks, or waits for them (a
reset, PREEMPT AND ABORT, its removal), ends or awaits the copy with them. The source may be any LUN
that there is for the initiator, as long as it is there: the copy asks before each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import sense, third_party
from iserblk.scsi.third_party import CopyStatus, Cscd, Segment
from iserblk.target.scsi.block import check_writable, is_repeated, write_durably
from iserblk.target.scsi.ended import (
    CheckCondition,
    ReservationConflict,
    TaskAborted,
    invalid_field,
)
from iserblk.target.scsi.reservations import READS
from iserblk.target.scsi.task import DeviceTask, check_wanted
from iserblk.target.scsi.unit import COPY_LIMITS, LogicalUnit
from iserblk.target.seam import DATA_OUT
from iserblk.target.store.status import StatusError

log = logging.getLogger(__name__)

_STEP = 1 << 20  # bytes copied at once


class _Piece(NamedTuple):
    """A segment, checked. Offsets and length are bytes."""

    source: LogicalUnit
    source_offset: int
    offset: int
    length: int


def begin_receive_copy_results(task: DeviceTask, unit: LogicalUnit) -> None:
    """OPERATING PARAMETERS, and COPY STATUS of a copy of this nexus, once if it has ended."""
    _, action, list_id, allocation = third_party.RESULTS_CDB.unpack_from(task.cdb)
    if action & 0x1F == third_party.OPERATING_PARAMETERS:
        task.respond(third_party.encode_operating_parameters(COPY_LIMITS), allocation)
        return
    status = unit.copies.tell(task.nexus.name, list_id)
    if status is None:
        raise invalid_field(2)
    task.respond(third_party.encode_copy_status(status), allocation)


def begin_extended_copy(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, length = third_party.COPY_CDB.unpack_from(task.cdb)
    if not length:
        return
    if not (
        third_party.HEADER_LENGTH
        <= length
        <= third_party.HEADER_LENGTH + COPY_LIMITS.descriptors_length
    ):
        raise _wrong_length()
    check_writable(unit)
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.execute = _extended_copy


def _wrong_length() -> CheckCondition:
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)


def _refused(code: int) -> CheckCondition:
    return CheckCondition(sense.ILLEGAL_REQUEST, code)


def _extended_copy(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Check all descriptors before anything is copied. The thread that begins commands does that,
    as it alone knows of reservations and of LUNs; the copy follows in another."""
    try:
        copy = third_party.decode_copy_list(buffer)
    except RemoteProtocolError:
        raise _wrong_length() from None
    if len(copy.cscds) > COPY_LIMITS.cscds:
        raise _refused(sense.TOO_MANY_TARGET_DESCRIPTORS)
    if len(copy.segments) > COPY_LIMITS.segments:
        raise _refused(sense.TOO_MANY_SEGMENT_DESCRIPTORS)
    if copy.inline:
        raise _refused(sense.INLINE_DATA_LENGTH_EXCEEDED)
    if any(each.kind != third_party.IDENTIFICATION for each in copy.cscds):
        raise _refused(sense.UNSUPPORTED_TARGET_DESCRIPTOR)
    if any(each.kind != third_party.BLOCK_TO_BLOCK for each in copy.segments):
        raise _refused(sense.UNSUPPORTED_SEGMENT_DESCRIPTOR)
    name = task.nexus.name
    list_id = None if copy.usage == third_party.NO_LIST_ID else copy.list_id
    copies = task.unit.copies
    if list_id is not None and copies.is_in_progress(name, list_id):
        raise _refused(sense.OPERATION_IN_PROGRESS)
    units = [_find(task, each) for each in copy.cscds]
    pieces = [_check(task, segment, units) for segment in copy.segments]
    if not pieces:
        if list_id is not None:
            copies.note(name, list_id, CopyStatus(third_party.COMPLETED))
        return True
    if list_id is not None:  # now: the next command may come before this one has a thread
        copies.claim(name, list_id, task)

    def run(task: DeviceTask, _buffer: memoryview, nowait: bool) -> bool:
        if nowait:
            return False
        state, done, transferred = third_party.FAILED, 0, 0
        since = task.unit.unflushed.failures
        if list_id is not None and not copies.start(name, list_id, task):
            raise TaskAborted
        try:
            for piece in pieces:
                _copy(task, piece)
                done, transferred = done + 1, transferred + piece.length
                if list_id is not None:
                    so_far = CopyStatus(third_party.IN_PROGRESS, done, transferred)
                    copies.note(name, list_id, so_far)
            task.unit.settle(task.nexus, since)
            state = third_party.COMPLETED
        finally:
            if list_id is not None:
                copies.note(name, list_id, CopyStatus(state, done, transferred))
        return True

    task.execute = run
    return run(task, buffer, nowait)


def _find(task: DeviceTask, cscd: Cscd) -> LogicalUnit:
    for unit in task.unit.server.siblings(task.nexus):
        if cscd[1:5] in unit.names and cscd.block in (0, unit.block):
            return unit
    raise CheckCondition(sense.COPY_ABORTED, sense.COPY_TARGET_NOT_REACHABLE)


def _check(task: DeviceTask, segment: Segment, units: list[LogicalUnit]) -> _Piece:
    if segment.source >= len(units) or segment.destination >= len(units):
        raise CheckCondition(sense.COPY_ABORTED, sense.UNREACHABLE_COPY_TARGET)
    source, destination = units[segment.source], units[segment.destination]
    if destination is not task.unit:
        raise CheckCondition(sense.COPY_ABORTED, sense.COPY_TARGET_NOT_REACHABLE)
    if source.reservations.present and source.reservations.conflicts(
        task.nexus.name, READS, task.cdb
    ):
        raise ReservationConflict
    block = (destination if segment.flags & third_party.DC else source).block
    length = segment.blocks * block
    if length % source.block or length % destination.block:
        raise CheckCondition(sense.COPY_ABORTED, sense.UNEXPECTED_INEXACT_SEGMENT)
    if length > COPY_LIMITS.segment_length:
        raise CheckCondition(
            sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_PARAMETER_LIST, field_in_cdb=False
        )
    for unit, lba in ((source, segment.source_lba), (destination, segment.destination_lba)):
        if lba + max(1, length // unit.block) > unit.blocks:
            raise CheckCondition(sense.COPY_ABORTED, sense.NO_ADDITIONAL_SENSE)
    return _Piece(
        source,
        segment.source_lba * source.block,
        segment.destination_lba * destination.block,
        length,
    )


def _steps(piece: _Piece, same: bool) -> Iterator[tuple[int, int]]:
    """(offset in the piece, length) of each step. Where source and destination overlap, no block is
    overwritten before it was read."""
    steps = [(at, min(_STEP, piece.length - at)) for at in range(0, piece.length, _STEP)]
    backwards = same and piece.source_offset < piece.offset
    return reversed(steps) if backwards else iter(steps)


def _copy(task: DeviceTask, piece: _Piece) -> None:
    unit, source = task.unit, piece.source
    scratch = memoryview(bytearray(min(_STEP, piece.length)))
    for at, length in _steps(piece, unit is source):
        check_wanted(task)
        if not source.server.is_there_for(task.nexus):
            log.warning("EXTENDED COPY: the initiator has no access to its source any more")
            raise CheckCondition(sense.COPY_ABORTED, sense.COPY_TARGET_NOT_REACHABLE)
        part = scratch[:length]
        try:
            source.read_for_other(part, piece.source_offset + at)
        except OSError as error:
            log.warning("EXTENDED COPY: %s", error)
            raise CheckCondition(sense.COPY_ABORTED, sense.THIRD_PARTY_DEVICE_FAILURE) from None
        offset = piece.offset + at
        span = (offset, offset + length)
        unit.guard.enter(span, False)
        try:
            if unit.write_through:
                write_durably(unit, part, offset, False)
            else:
                since = unit.unflushed.failures
                unit.store.write(part, offset, False, False)
                unit.unflushed.wrote(task.nexus, since)
        except StatusError as error:
            if not is_repeated(error):
                raise
            # A second run may read, as source, what this one has written.
            log.warning("EXTENDED COPY: a part of it may have been carried out: %s", error.strerror)
            raise CheckCondition(sense.COPY_ABORTED, sense.THIRD_PARTY_DEVICE_FAILURE) from None
        finally:
            unit.guard.leave(span)
