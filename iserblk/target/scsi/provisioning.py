"""SBC commands of thin provisioning: UNMAP, WRITE SAME, GET LBA STATUS."""

from __future__ import annotations

import errno
from collections.abc import Callable

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import lba as lba_data
from iserblk.scsi import limits, sense
from iserblk.scsi.cdb import NDOB, RW10, RW16, UNMAP
from iserblk.target.scsi.block import check_range, check_writable, out_of_range, too_long
from iserblk.target.scsi.ended import CheckCondition
from iserblk.target.scsi.task import DeviceTask, check_wanted
from iserblk.target.scsi.unit import MAX_UNMAP_DESCRIPTORS, MAX_WRITE_SAME, LogicalUnit
from iserblk.target.seam import DATA_IN, DATA_OUT
from iserblk.target.store.store import Extent

CLEAR_STEP = 64 << 20  # bytes that are unmapped or zeroed at once
_TILE = 1 << 20  # bytes of a repeated pattern that are written at once
_STATUS_DESCRIPTORS = 1024
_MOST_BLOCKS = 0xFFFFFFFF  # in one descriptor


def begin_unmap(task: DeviceTask, unit: LogicalUnit) -> None:
    length = int.from_bytes(task.cdb[7:9], "big")
    check_writable(unit)
    if not length:
        return
    if length < lba_data.UNMAP_HEADER:
        raise _wrong_length()
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.may_block = True
    task.execute = _unmap


def _wrong_length() -> CheckCondition:
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)


def _unmap(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute UNMAP. All ranges are checked before the first is changed."""
    unit = task.unit
    try:
        ranges = lba_data.decode_unmap_parameters(buffer)
    except RemoteProtocolError:
        raise _wrong_length() from None
    if any(lba + blocks > unit.blocks for lba, blocks in ranges):
        raise out_of_range()
    total = sum(blocks for _, blocks in ranges)
    if len(ranges) > MAX_UNMAP_DESCRIPTORS or total > unit.limits.max_unmap_lba_count:
        raise CheckCondition(
            sense.ILLEGAL_REQUEST,
            sense.INVALID_FIELD_IN_PARAMETER_LIST,
            field=2,
            field_in_cdb=False,
        )
    since = unit.unflushed.failures
    for lba, blocks in ranges:
        if blocks:
            _clear(task, unit.store.unmap, lba * unit.block, blocks * unit.block)
    unit.settle(task.nexus, since)
    return True


def _clear(task: DeviceTask, clear: Callable[[int, int], None], offset: int, length: int) -> None:
    """Call ``clear``, a method of the unit's store, for the range: in steps, as it may have to
    write all of the zeroes. They end at multiples of a step, so that no granule is cut."""
    guard = task.unit.guard
    end = offset + length
    span = (offset, end)
    guard.enter(span, False)
    try:
        while offset < end:
            check_wanted(task)
            stop = min(end, offset - offset % CLEAR_STEP + CLEAR_STEP)
            clear(offset, stop - offset)
            offset = stop
    finally:
        guard.leave(span)


# -- WRITE SAME ------------------------------------------------------------------------------------


def _begin_write_same(
    task: DeviceTask, unit: LogicalUnit, flags: int, lba: int, blocks: int
) -> None:
    check_writable(unit)
    check_range(unit, lba, blocks)
    length = (blocks or unit.blocks - lba) * unit.block
    if length > MAX_WRITE_SAME:
        raise too_long(task)
    task.unit = unit
    task.offset = lba * unit.block
    task.extent = length
    task.may_block = True
    task.execute = _write_same
    if not flags & NDOB:
        task.direction = DATA_OUT
        task.length = unit.block


def begin_write_same10(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, _, blocks, _ = RW10.unpack_from(task.cdb)
    _begin_write_same(task, unit, flags, lba, blocks)


def begin_write_same16(task: DeviceTask, unit: LogicalUnit) -> None:
    _, flags, lba, blocks, _, _ = RW16.unpack_from(task.cdb)
    _begin_write_same(task, unit, flags, lba, blocks)


def _write_same(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute WRITE SAME. ``buffer``: one block, or empty, which means zeroes."""
    unit = task.unit
    since = unit.unflushed.failures
    pattern = bytes(buffer[: task.length])
    if pattern.count(0) == len(pattern):
        clear = unit.store.punch if task.cdb[1] & UNMAP else unit.store.zero
        _clear(task, clear, task.offset, task.extent)
    else:
        _repeat(task, pattern)
    unit.settle(task.nexus, since)
    return True


def _repeat(task: DeviceTask, pattern: bytes) -> None:
    unit, offset, length = task.unit, task.offset, task.extent
    tile = memoryview(pattern * (min(_TILE, length) // len(pattern)))
    span = (offset, offset + length)
    unit.guard.enter(span, False)
    try:
        for start, count in limits.split_blocks(offset, length, len(tile)):
            check_wanted(task)
            unit.store.write(tile[:count], start, False, False)
    finally:
        unit.guard.leave(span)


# -- GET LBA STATUS --------------------------------------------------------------------------------


def begin_get_lba_status(task: DeviceTask, unit: LogicalUnit) -> None:
    lba = int.from_bytes(task.cdb[2:10], "big")
    allocation = int.from_bytes(task.cdb[10:14], "big")
    check_range(unit, lba, 0)
    if not allocation:
        return
    task.unit = unit
    task.direction = DATA_IN
    task.offset = lba * unit.block
    task.length = min(
        allocation,
        lba_data.LBA_STATUS_HEADER + _STATUS_DESCRIPTORS * lba_data.LBA_STATUS_DESCRIPTOR,
    )
    task.may_block = True
    task.execute = _get_lba_status


def _get_lba_status(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    unit = task.unit
    extents = unit.store.extents(
        task.offset, unit.blocks * unit.block - task.offset, _STATUS_DESCRIPTORS
    )
    ranges = block_ranges(extents, unit.block)
    if not ranges:  # a file that was made smaller ends within the first block
        block = task.offset // unit.block
        raise OSError(errno.EIO, f"the file was made smaller: it ends within block {block}")
    # At least one descriptor, even where the allocation length cuts it.
    room = max(1, (task.length - lba_data.LBA_STATUS_HEADER) // lba_data.LBA_STATUS_DESCRIPTOR)
    answer = lba_data.encode_lba_status(ranges[:room])
    task.transferred = min(len(answer), task.length)
    buffer[: task.transferred] = answer[: task.transferred]
    return True


def block_ranges(extents: list[Extent], block: int) -> list[tuple[int, int, int]]:
    """Convert byte extents to (first block, blocks, provisioning status).

    A block is deallocated only when all of its bytes are. A block that is cut off at the end is
    left out.
    """
    found: list[tuple[int, int, int]] = []
    position = extents[0][0] // block
    end = (extents[-1][0] + extents[-1][1]) // block
    holes = [
        (-(-offset // block), (offset + length) // block)
        for offset, length, is_data in extents
        if not is_data
    ]
    for start, stop in [*holes, (end, end)]:
        if start > stop:
            continue
        for first, last, status in (
            (position, start, lba_data.MAPPED),
            (start, stop, lba_data.DEALLOCATED),
        ):
            pieces = limits.split_blocks(first, last - first, _MOST_BLOCKS)
            found += [(piece, blocks, status) for piece, blocks in pieces]
        position = stop
    return found
