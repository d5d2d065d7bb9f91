"""Operations on a LUN that move no data of the caller's: trim, zero, extents, read-ahead."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from iserblk.disk.commands import check_time, command
from iserblk.disk.seam import EXTENT_DATA, Extent
from iserblk.errors import NotSupported, ScsiError
from iserblk.initiator.task import Operation, TaskSlot
from iserblk.scsi import cdb
from iserblk.scsi import lba as lba_data
from iserblk.scsi.sense import MEDIUM_ERROR, Sense

if TYPE_CHECKING:
    from iserblk.disk.core import DiskCore

log = logging.getLogger(__name__)

_ZEROES = memoryview(bytes(1 << 20))


def trim(core: DiskCore, offset: int, length: int, fua: bool) -> Operation[None]:
    """UNMAP whole granules inside the range."""
    deadline = core.deadline()
    yield from core.begin_change(offset, length, 0, deadline)
    if not core.info.can_trim:
        raise NotSupported(f"{core.info.name}: the LUN cannot unmap; zero the range instead")
    for lba, blocks in core.geometry.unmap_ranges(offset, length):
        parameters = memoryview(lba_data.unmap_parameters([(lba, blocks)]))
        block = cdb.unmap(len(parameters))
        # tgtd does it, and says that it took no parameters. It is only advice: no reason to fail.
        yield from _exclusive(core, lba, blocks, block, parameters, deadline, short_ok=True)
    if fua:
        yield from core.flush(deadline)


def zero(
    core: DiskCore, offset: int, length: int, may_trim: bool, fast: bool, fua: bool
) -> Operation[None]:
    """WRITE SAME of zeroes for whole blocks, written zeroes for the edges."""
    deadline = core.deadline()
    yield from core.begin_change(offset, length, 0, deadline)
    if fast and not core.info.can_zero:
        raise NotSupported(
            f"{core.info.name}: the LUN has no WRITE SAME; write zeroes instead"
        )  # fmt: skip
    first = -(-offset // core.block)
    last = (offset + length) // core.block
    if core.info.can_zero and first < last:
        start, stop = first * core.block, last * core.block
        if offset < start:
            yield from core.write(_ZEROES[: start - offset], offset, deadline=deadline)
        unmap = may_trim and core.info.zero_by_unmap
        for lba, blocks in core.geometry.write_same_ranges(first, last - first):
            yield from _write_same(core, lba, blocks, unmap, deadline)
        if stop < offset + length:
            yield from core.write(_ZEROES[: offset + length - stop], stop, deadline=deadline)
    else:
        position = offset
        while position < offset + length:
            step = min(len(_ZEROES), offset + length - position)
            yield from core.write(_ZEROES[:step], position, deadline=deadline)
            position += step
    if fua:
        yield from core.flush(deadline)


def _write_same(
    core: DiskCore, lba: int, blocks: int, unmap: bool, deadline: float
) -> Operation[None]:
    """Zeroes by WRITE SAME(16): without data where the LUN takes NDOB, else one block."""
    if core.geometry.ndob:
        block = cdb.write_same16(lba, blocks, unmap, True)
        try:
            yield from _exclusive(core, lba, blocks, block, None, deadline)
            return
        except ScsiError as error:
            sense = error.sense
            # tgtd does not look at the bit, and ends with MEDIUM ERROR for want of data.
            if not isinstance(sense, Sense) or not (
                sense.is_invalid_field or sense.key == MEDIUM_ERROR
            ):
                raise
    block = cdb.write_same16(lba, blocks, unmap, False)
    yield from _exclusive(core, lba, blocks, block, _ZEROES[: core.block], deadline)
    core.geometry.ndob = False  # it takes the data


def _exclusive(
    core: DiskCore,
    lba: int,
    blocks: int,
    command_block: bytes,
    data_out: memoryview | None,
    deadline: float,
    short_ok: bool = False,
) -> Operation[None]:
    """A command that changes a range without being a write: under the range lock whole."""
    waiter = core.session.new_waiter()
    last = lba + blocks - 1
    while not core.ranges.lock(lba, last, waiter):
        while waiter.pending:
            yield waiter
    try:
        check_time(core.session, deadline, core.info.name)

        def keep(slot: TaskSlot) -> None:
            if core.durability.keeper is not None:
                core.durability.keeper.add(slot, data_out, command_block)

        def end(slot: TaskSlot) -> None:
            core.note_ended(slot)

        yield from command(
            core.session,
            core.lun,
            command_block,
            core.info.name,
            data_out=data_out,
            short_ok=short_ok,
            changes=(lba, last),
            on_submit=keep,
            on_end=end,
            deadline=deadline,
        )
    finally:
        core.ranges.unlock(lba, last)


def extents(core: DiskCore, offset: int, length: int) -> Operation[list[Extent]]:
    """GET LBA STATUS, as far as one answer goes."""
    deadline = core.deadline()
    yield from core.know_size(deadline)
    core.check(offset, length)
    whole: list[Extent] = [(offset, length, EXTENT_DATA)]
    if not core.info.can_extents or not length:
        return whole
    answer = memoryview(bytearray(core.geometry.lba_status_length))
    moved = yield from command(
        core.session,
        core.lun,
        cdb.get_lba_status16(offset // core.block, len(answer)),
        core.info.name,
        data_in=answer,
        short_ok=True,
        deadline=deadline,
    )
    return core.geometry.extents_untrusted(answer[:moved], offset, length) or whole


def cache(core: DiskCore, offset: int, length: int) -> Operation[None]:
    """PRE-FETCH with IMMED; a target that cannot is no error."""
    deadline = core.deadline()
    yield from core.know_size(deadline)
    core.check(offset, length)
    if not length or not core.geometry.prefetch:
        return
    first = offset // core.block
    blocks = -(-(offset + length) // core.block) - first
    try:
        yield from command(
            core.session,
            core.lun,
            cdb.pre_fetch16(first, min(blocks, 0xFFFFFFFF)),
            core.info.name,
            deadline=deadline,
        )
    except ScsiError as error:
        log.debug("%s: no read-ahead: %s", core.info.name, error)
        core.geometry.prefetch = False
