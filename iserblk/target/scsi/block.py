"""SBC commands that read, write, compare and flush blocks.

A ``begin_…`` function checks one form of a CDB, and sets in the task what has to be done. The
functions of the form (task, buffer, nowait) then do it, as ``DeviceTask.execute``.
"""

from __future__ import annotations

import errno
import logging
from typing import Final

from iserblk.scsi import capacity, opcodes, sense
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import (
    BYTCHK,
    DISABLE_WRITE,
    FUA,
    RW6,
    RW10,
    RW12,
    RW16,
    Said,
    unpack10,
    unpack16,
)
from iserblk.target.scsi.ended import CheckCondition, invalid_field
from iserblk.target.scsi.task import DeviceTask, Execute, check_wanted, nothing
from iserblk.target.scsi.unit import MAX_EXCLUSIVE_OR, MAX_PREFETCH, MAX_VERIFY, LogicalUnit
from iserblk.target.seam import BIDIRECTIONAL, DATA_IN, DATA_OUT, NO_DATA
from iserblk.target.store.status import StatusError, WritebackError
from iserblk.target.store.store import Ended, LoopStore, is_full, is_read_only

log = logging.getLogger(__name__)

_BYTCHK_FIELD: Final = 0x06
_VERIFY_STEP: Final = 1 << 20  # bytes read at once
_REPEATED: Final = (sense.NOT_READY, sense.UNIT_ATTENTION, sense.ABORTED_COMMAND)
_XOR_STEP: Final = 1 << 16  # bytes; one integer of this length is made of each operand


# The byte of the CDB where the transfer length begins, by command group (opcode bits 7-5).
_LENGTH_FIELD: Final = {0: 4, 1: 7, 2: 7, 4: 10, 5: 6}


def out_of_range() -> CheckCondition:
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.LBA_OUT_OF_RANGE)


def too_long(task: DeviceTask) -> CheckCondition:
    """The error for more blocks than VPD page B0h allows."""
    return invalid_field(_LENGTH_FIELD[task.cdb[0] >> 5])


def check_range(unit: LogicalUnit, lba: int, blocks: int) -> None:
    """Raises CheckCondition unless all blocks exist. The LBA must exist even if ``blocks`` is 0."""
    if lba + (blocks or 1) > unit.blocks:
        raise out_of_range()


def check_writable(unit: LogicalUnit) -> None:
    if unit.read_only:
        raise CheckCondition(sense.DATA_PROTECT, sense.WRITE_PROTECTED)


# -- READ, WRITE -----------------------------------------------------------------------------------


def _begin_read(task: DeviceTask, unit: LogicalUnit, flags: int, lba: int, blocks: int) -> None:
    if lba + (blocks or 1) > unit.blocks:
        raise out_of_range()
    if blocks > unit.max_transfer_blocks:
        raise too_long(task)
    if not blocks:
        return
    task.unit = unit
    task.direction = DATA_IN
    task.length = blocks * unit.block
    task.offset = lba * unit.block
    if flags & FUA and unit.must_sync:
        task.may_block = True
        task.execute = _read_from_medium
    else:
        task.execute = _EXECUTE_READ


def _read(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    if not task.unit.store.read_into(buffer, task.offset, nowait):
        return False
    task.transferred = task.length
    return True


# A constant, as compiled code looks a function that is no call up in a table.
_EXECUTE_READ: Final[Execute] = _read


def _read_from_medium(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute a READ with FUA: flush first, so that newer data in the cache is on the medium."""
    unit = task.unit
    unit.unflushed.bring_all(task.nexus, unit.store.flush)
    return _read(task, buffer, nowait)


def _begin_write(task: DeviceTask, unit: LogicalUnit, flags: int, lba: int, blocks: int) -> None:
    check_writable(unit)
    if lba + (blocks or 1) > unit.blocks:
        raise out_of_range()
    if blocks > unit.max_transfer_blocks:
        raise too_long(task)
    if not blocks:
        return
    task.unit = unit
    task.direction = DATA_OUT
    task.length = blocks * unit.block
    task.offset = lba * unit.block
    task.durable = task.may_block = bool(flags & FUA) or unit.write_through
    task.execute = _write


def _write(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    unit = task.unit
    offset = task.offset
    span = (offset, offset + task.length)
    if nowait and unit.write_through and not task.durable:
        # The cache was turned off since the command began.
        task.durable = task.may_block = True
        return False
    if not unit.guard.enter(span, nowait):
        return False
    try:
        if task.durable:
            return write_durably(unit, buffer, offset, nowait)
        since = unit.unflushed.failures
        if not unit.store.write(buffer, offset, False, nowait):
            return False
        unit.unflushed.wrote(task.nexus, since)
        if unit.write_through:
            # The same, but only now: the flush that goes with it may have come before this write.
            unit.unflushed.bring(unit.store.flush, since)
        return True
    finally:
        unit.guard.leave(span)


def write_durably(unit: LogicalUnit, data: memoryview, offset: int, nowait: bool) -> bool:
    """Write to stable storage. Raises OSError; as for a flush, data of other sessions may be lost
    then, and they will be told."""
    try:
        return unit.store.write(data, offset, True, nowait)
    except OSError as error:
        if _may_lose_more(error):
            unit.unflushed.failed(error)
        raise


def _may_lose_more(error: OSError) -> bool:
    """Whether a durable write that has failed may have been the only report of what was lost of
    other writes. Not where the store has told of that, or has had no room for this write."""
    if isinstance(error, WritebackError) or is_full(error) or is_read_only(error):
        return False
    return error.errno == errno.EIO or not isinstance(error, StatusError)


def is_repeated(error: StatusError) -> bool:
    """Whether hosts take the answer for that of a command which was not carried out, and send the
    command again by themselves (SAM-5, Status codes)."""
    if error.status == sam.CHECK_CONDITION:
        return sense.decode(error.sense).key in _REPEATED
    return error.status in (sam.BUSY, sam.TASK_SET_FULL, sam.TASK_ABORTED)


def _write_alone(task: DeviceTask, data: memoryview) -> None:
    """Write what depends on what was read, for a task in a thread that has the range for itself.

    From here on a second run of the command would find its own data, and be wrong about them: a
    COMPARE AND WRITE would miscompare, an XDWRITEREAD return zeroes. So no answer may have the
    initiator repeat it by itself.
    """
    unit = task.unit
    try:
        if task.durable:
            write_durably(unit, data, task.offset, False)
            return
        since = unit.unflushed.failures
        unit.store.write(data, task.offset, False, False)
        unit.unflushed.wrote(task.nexus, since)
        if unit.write_through:  # as in ``_write``
            unit.unflushed.bring(unit.store.flush, since)
    except StatusError as error:
        if not is_repeated(error):
            raise
        log.warning(
            "%s: it may have been carried out: %s",
            opcodes.name(task.cdb),
            error.strerror,
        )
        raise CheckCondition(sense.HARDWARE_ERROR, sense.COMMUNICATION_TIMEOUT) from None


# For these the length of Data-Out must be that of the CDB: a part of it would mean something else.
_EXACT: Final = (opcodes.COMPARE_AND_WRITE, opcodes.WRITE_SAME_10, opcodes.WRITE_SAME_16)


def fit(task: DeviceTask, length: int) -> None:
    """Implements ``DeviceServer.fit``. A write for which the initiator sends less data than the CDB
    says writes what comes, in whole blocks. The residual count of the response tells what is
    missing (RFC 7143 section 11.4.5.1)."""
    if task.status:
        return
    if length < task.length and task.execute in (_write, _write_and_verify):
        if length % task.unit.block:
            raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_COMMAND_IU)
        task.length = length
        if not length:
            task.direction = NO_DATA
            task.may_block = False
            task.execute = nothing
    elif length < task.length or task.cdb[0] in _EXACT:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_FIELD_IN_CDB)


def begin_read6(task: DeviceTask, unit: LogicalUnit) -> None:
    _, high, low, blocks, _ = RW6.unpack_from(task.cdb)
    _begin_read(task, unit, 0, high << 16 | low, blocks or 256)


def begin_read10(task: DeviceTask, unit: LogicalUnit) -> None:
    said: Said = unpack10(task.cdb, 0)
    flags, lba, blocks = said
    _begin_read(task, unit, flags, lba, blocks)


def begin_read12(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW12.unpack_from(task.cdb)
    _begin_read(task, unit, flags, lba, blocks)


def begin_read16(task: DeviceTask, unit: LogicalUnit) -> None:
    said: Said = unpack16(task.cdb, 0)
    flags, lba, blocks = said
    _begin_read(task, unit, flags, lba, blocks)


def begin_write6(task: DeviceTask, unit: LogicalUnit) -> None:
    _, high, low, blocks, _ = RW6.unpack_from(task.cdb)
    _begin_write(task, unit, 0, high << 16 | low, blocks or 256)


def begin_write10(task: DeviceTask, unit: LogicalUnit) -> None:
    said: Said = unpack10(task.cdb, 0)
    flags, lba, blocks = said
    _begin_write(task, unit, flags, lba, blocks)


def begin_write12(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW12.unpack_from(task.cdb)
    _begin_write(task, unit, flags, lba, blocks)


def begin_write16(task: DeviceTask, unit: LogicalUnit) -> None:
    said: Said = unpack16(task.cdb, 0)
    flags, lba, blocks = said
    _begin_write(task, unit, flags, lba, blocks)


# -- VERIFY, COMPARE AND WRITE ---------------------------------------------------------------------


def _first_difference(one: memoryview, other: memoryview) -> int:
    """Index of the first byte that differs; -1: all are equal. Both have the same length."""
    if one == other:
        return -1
    low, high = 0, len(one)  # one[:low] is equal, one[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _miscompare(at: int) -> CheckCondition:
    """The error for data that differs. ``at``, offset in the Data-Out buffer, is in INFORMATION."""
    return CheckCondition(sense.MISCOMPARE, sense.MISCOMPARE_DURING_VERIFY, information=at)


def _begin_verify(task: DeviceTask, unit: LogicalUnit, flags: int, lba: int, blocks: int) -> None:
    check_range(unit, lba, blocks)
    compare = flags & _BYTCHK_FIELD
    if compare not in (0, BYTCHK):
        raise invalid_field(1, 2)
    if not blocks:
        return
    task.unit = unit
    task.offset = lba * unit.block
    task.extent = blocks * unit.block
    task.may_block = True
    if compare:
        if blocks > unit.max_transfer_blocks:
            raise too_long(task)
        task.direction = DATA_OUT
        task.length = task.extent
        task.execute = _verify_compare
    else:
        # A LUN has few threads. Commands of 2 TiB would keep out for hours what waits for one.
        if task.extent > MAX_VERIFY:
            raise too_long(task)
        task.execute = _verify_medium


def begin_verify10(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    _begin_verify(task, unit, flags, lba, blocks)


def begin_verify12(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW12.unpack_from(task.cdb)
    _begin_verify(task, unit, flags, lba, blocks)


def begin_verify16(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW16.unpack_from(task.cdb)
    _begin_verify(task, unit, flags, lba, blocks)


def _read_stored(task: DeviceTask, buffer: memoryview, offset: int) -> None:
    """Read blocks for a command that returns no data. An error is reported as a read error, not as
    the write error that ``DeviceServer.run`` would make of it."""
    try:
        task.unit.store.read_into(buffer, offset, False)
    except StatusError:
        raise
    except OSError as error:
        log.warning("%s: %s", opcodes.name(task.cdb), error)
        raise CheckCondition(sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR) from None


def _verify_medium(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Verify by reading: the blocks must be readable."""
    end = task.offset + task.extent
    scratch = memoryview(bytearray(min(_VERIFY_STEP, task.extent)))
    for offset in range(task.offset, end, _VERIFY_STEP):
        check_wanted(task)
        _read_stored(task, scratch[: min(_VERIFY_STEP, end - offset)], offset)
    return True


def _verify_compare(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    # In steps: this memory is in no account.
    scratch = memoryview(bytearray(min(_VERIFY_STEP, task.extent)))
    for begin in range(0, task.extent, _VERIFY_STEP):
        check_wanted(task)
        data = buffer[begin : min(begin + _VERIFY_STEP, task.extent)]
        stored = scratch[: len(data)]
        _read_stored(task, stored, task.offset + begin)
        at = _first_difference(stored, data)
        if at >= 0:
            raise _miscompare(begin + at)
    return True


def _begin_write_and_verify(
    task: DeviceTask, unit: LogicalUnit, flags: int, lba: int, blocks: int
) -> None:
    if flags & _BYTCHK_FIELD not in (0, BYTCHK):
        raise invalid_field(1, 2)
    _begin_write(task, unit, 0, lba, blocks)
    if blocks:
        # The data must be on the medium before it is verified.
        task.durable = task.may_block = True
        task.execute = _write_and_verify


def begin_write_and_verify10(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    _begin_write_and_verify(task, unit, flags, lba, blocks)


def begin_write_and_verify12(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW12.unpack_from(task.cdb)
    _begin_write_and_verify(task, unit, flags, lba, blocks)


def begin_write_and_verify16(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW16.unpack_from(task.cdb)
    _begin_write_and_verify(task, unit, flags, lba, blocks)


def _write_and_verify(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Write, then verify; with BYTCHK, compare with Data-Out. A write of another task between the
    two steps may cause a miscompare."""
    _write(task, buffer, False)
    task.extent = task.length
    if task.cdb[1] & BYTCHK:
        return _verify_compare(task, buffer, False)
    return _verify_medium(task, buffer, False)


def begin_compare_and_write(task: DeviceTask, unit: LogicalUnit) -> None:
    flags, lba, blocks = task.cdb[1], int.from_bytes(task.cdb[2:10], "big"), task.cdb[13]
    check_writable(unit)
    check_range(unit, lba, blocks)
    if not blocks:
        return
    task.unit = unit
    task.direction = DATA_OUT
    task.offset = lba * unit.block
    task.extent = blocks * unit.block
    task.length = 2 * task.extent
    task.may_block = True
    task.durable = bool(flags & FUA) or unit.write_through
    task.execute = _compare_and_write


def _compare_and_write(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    unit = task.unit
    stored = memoryview(bytearray(task.extent))
    with unit.guard.exclusive((task.offset, task.offset + task.extent)):
        check_wanted(task)  # it may have waited for the blocks
        _read_stored(task, stored, task.offset)
        at = _first_difference(stored, buffer[: task.extent])
        if at >= 0:
            raise _miscompare(at)
        _write_alone(task, buffer[task.extent :])
    return True


# -- XDWRITEREAD ----------------------------------------------------------------------------------


def begin_xdwriteread10(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    if not flags & DISABLE_WRITE:
        check_writable(unit)
    check_range(unit, lba, blocks)
    if blocks * unit.block > MAX_EXCLUSIVE_OR:
        raise too_long(task)
    if not blocks:
        return
    task.unit = unit
    task.direction = BIDIRECTIONAL
    task.length = blocks * unit.block
    task.offset = lba * unit.block
    task.may_block = True
    task.durable = bool(flags & FUA) or unit.write_through
    task.execute = _xdwriteread


def _xdwriteread(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Write the Data-Out in ``buffer``, then put into ``buffer`` its exclusive or with what the
    blocks held before. No other task writes these blocks meanwhile: each exclusive or is that of
    two states that followed each other, as parity needs it."""
    unit = task.unit
    stored = memoryview(bytearray(task.length))
    if task.cdb[1] & DISABLE_WRITE:
        _read_stored(task, stored, task.offset)
    else:
        with unit.guard.exclusive((task.offset, task.offset + task.length)):
            check_wanted(task)
            _read_stored(task, stored, task.offset)
            _write_alone(task, buffer)
    _xor_into(buffer, stored)
    task.transferred = task.length
    return True


def _xor_into(buffer: memoryview, other: memoryview) -> None:
    for at in range(0, len(buffer), _XOR_STEP):
        one = int.from_bytes(buffer[at : at + _XOR_STEP], "little")
        two = int.from_bytes(other[at : at + _XOR_STEP], "little")
        step = min(_XOR_STEP, len(buffer) - at)
        buffer[at : at + step] = (one ^ two).to_bytes(step, "little")


# -- SYNCHRONIZE CACHE, PRE-FETCH, START STOP UNIT -------------------------------------------------


def flush(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    task.unit.flush(task.nexus, lambda: not task.cancelled)
    return True


def begin_flush(task: DeviceTask, unit: LogicalUnit) -> None:
    if unit.must_sync:
        task.unit = unit
        task.may_block = True
        task.execute = flush


def begin_synchronize_cache10(task: DeviceTask, unit: LogicalUnit) -> None:
    """Flushes the whole LUN, not only the range of the CDB."""
    _, _, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    check_range(unit, lba, blocks)
    begin_flush(task, unit)


def begin_synchronize_cache16(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, lba, blocks, _, _ = RW16.unpack_from(task.cdb)
    check_range(unit, lba, blocks)
    begin_flush(task, unit)


def _begin_pre_fetch(task: DeviceTask, unit: LogicalUnit, lba: int, blocks: int) -> None:
    """Ends with GOOD, never with CONDITION MET, as the page cache may drop the blocks at once."""
    check_range(unit, lba, blocks)
    task.unit = unit
    task.offset = lba * unit.block
    task.extent = min((blocks or unit.blocks - lba) * unit.block, MAX_PREFETCH)
    task.may_block = True
    task.execute = _pre_fetch


def begin_pre_fetch10(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    _begin_pre_fetch(task, unit, lba, blocks)


def begin_pre_fetch16(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, lba, blocks, _, _ = RW16.unpack_from(task.cdb)
    _begin_pre_fetch(task, unit, lba, blocks)


def _pre_fetch(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    task.unit.store.prefetch(task.offset, task.extent)
    return True


# -- without threads -------------------------------------------------------------------------------

IN_LOOP: Final = (_read, _write)  # beside what ``may_block`` anyway


def start(task: DeviceTask, buffer: memoryview, ended: Ended) -> bool:
    """Begin a task of a unit with a LoopStore. True: ``ended`` will be called. False: it needs a
    thread, and nothing was done."""
    loop = task.unit.loop
    assert loop is not None
    if task.execute is _read:
        operation = _start_read(task, buffer, loop, ended)
    elif task.execute is _write:
        unit = task.unit
        span = (task.offset, task.offset + task.length)
        if not unit.guard.enter(span, True):
            return False
        operation = _start_write(task, buffer, loop, ended)
    elif task.execute is flush:
        operation = _start_flush(task, loop, ended)
    else:
        return False
    task.stop = lambda: loop.give_up(operation)
    return True


def _start_read(task: DeviceTask, buffer: memoryview, loop: LoopStore, ended: Ended) -> object:
    def read(error: OSError | None) -> None:
        task.stop = None
        if error is None:
            task.transferred = task.length
        ended(error)

    return loop.begin_read(buffer[: task.length], task.offset, task.nexus, read)


def _start_write(task: DeviceTask, buffer: memoryview, loop: LoopStore, ended: Ended) -> object:
    """The caller has entered the unit's guard."""
    unit = task.unit
    durable = task.durable or unit.write_through
    since = unit.unflushed.failures

    def bring() -> None:
        begun = unit.unflushed.begin()

        def brought(error: OSError | None) -> None:
            ended(unit.unflushed.brought(begun, error, since))

        loop.begin_flush(task.nexus, brought)

    def wrote(error: OSError | None) -> None:
        task.stop = None
        unit.guard.leave((task.offset, task.offset + task.length))
        if durable:
            if error is not None and _may_lose_more(error):  # as in ``write_durably``
                unit.unflushed.failed(error)
        elif error is None:
            unit.unflushed.wrote(task.nexus, since)
            if unit.write_through:  # as in ``_write``
                bring()
                return
        ended(error)

    return loop.begin_write(buffer[: task.length], task.offset, durable, task.nexus, wrote)


def _start_flush(task: DeviceTask, loop: LoopStore, ended: Ended) -> object:
    unit, nexus = task.unit, task.nexus
    begun = unit.unflushed.begin()

    def flushed(error: OSError | None) -> None:
        task.stop = None
        ended(unit.unflushed.end(nexus, begun, error, not task.cancelled))

    return loop.begin_flush(nexus, flushed)


# -- READ CAPACITY ---------------------------------------------------------------------------------


def begin_read_capacity10(task: DeviceTask, unit: LogicalUnit) -> None:
    answer = capacity.encode10(unit.blocks, unit.block)
    task.respond(answer, len(answer))


def begin_read_capacity16(task: DeviceTask, unit: LogicalUnit) -> None:
    task.respond(capacity.encode16(unit.capacity), int.from_bytes(task.cdb[10:14], "big"))
