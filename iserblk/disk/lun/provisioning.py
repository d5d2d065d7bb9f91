"""Operations on a LUN that move no data of the caller's: trim, zero, extents, read-ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from time import monotonic
from typing import TYPE_CHECKING

from iserblk.disk.lun import flushing
from iserblk.disk.seam import EXTENT_DATA, Extent
from iserblk.errors import NotSupported, ScsiError
from iserblk.initiator.commands import check_time, command, fill_no_data, fill_write
from iserblk.initiator.session.slots import NO_BYTES, Operation, TaskSlot, Waiter
from iserblk.scsi import cdb
from iserblk.scsi import lba as lba_data
from iserblk.scsi.sense import MEDIUM_ERROR, Sense

if TYPE_CHECKING:
    from iserblk.disk.lun.operations import DiskCore

log = logging.getLogger(__name__)

_ZEROES = memoryview(bytes(1 << 20))
PARALLEL = 16  # UNMAP or WRITE SAME commands in flight at the most


Ranges = Iterator[tuple[int, int]]  # (first block, blocks), ascending
Batch = list[tuple[int, int]]
Command = tuple[bytes, memoryview | None]  # CDB, and the data that goes with it


class _Clock:
    """Of a trim or zero. ``deadline``: when what is sent now has to be done. It is one for the
    whole request; but with ``patient`` each step has its own, so that a request takes as long as it
    needs while it goes on."""

    def __init__(self, core: DiskCore, patient: bool) -> None:
        self._core = core
        self._patient = patient
        self._deadline = core.deadline()

    @property
    def deadline(self) -> float:
        if self._patient:
            self._deadline = self._core.deadline()
        return self._deadline


def trim(core: DiskCore, offset: int, length: int, fua: bool, patient: bool) -> Operation[None]:
    """UNMAP whole granules inside the range."""
    clock = _Clock(core, patient)
    yield from core.begin_change(offset, length, 0, clock.deadline)
    if not core.info.can_trim:
        raise NotSupported(f"{core.info.name}: the LUN cannot unmap; zero the range instead")

    def unmap(lba: int, blocks: int) -> Command:
        parameters = memoryview(lba_data.unmap_parameters([(lba, blocks)]))
        return cdb.unmap(len(parameters)), parameters

    def send(batch: Batch, deadline: float) -> Operation[None]:
        # tgtd does it, and says that it took no parameters. It is only advice: no reason to fail.
        return _exclusive(core, batch, unmap, deadline, short_ok=True)

    yield from _in_batches(core, core.geometry.unmap_ranges(offset, length), send, clock)
    if fua:
        yield from core.flush(clock.deadline)


def zero(
    core: DiskCore,
    offset: int,
    length: int,
    may_trim: bool,
    fast: bool,
    fua: bool,
    patient: bool,
) -> Operation[None]:
    """WRITE SAME of zeroes for whole blocks, written zeroes for the edges."""
    clock = _Clock(core, patient)
    yield from core.begin_change(offset, length, 0, clock.deadline)
    if fast and not core.info.can_zero:
        raise NotSupported(
            f"{core.info.name}: the LUN has no WRITE SAME; write zeroes instead"
        )  # fmt: skip
    first = -(-offset // core.block)
    last = (offset + length) // core.block
    if core.info.can_zero and first < last:
        start, stop = first * core.block, last * core.block
        if offset < start:
            yield from core.write(_ZEROES[: start - offset], offset, deadline=clock.deadline)
        unmap = may_trim and core.info.zero_by_unmap

        def send(batch: Batch, deadline: float) -> Operation[None]:
            return _write_same(core, batch, unmap, deadline)

        ranges = core.geometry.write_same_ranges(first, last - first)
        yield from _in_batches(core, ranges, send, clock)
        if stop < offset + length:
            rest = _ZEROES[: offset + length - stop]
            yield from core.write(rest, stop, deadline=clock.deadline)
    else:
        position = offset
        while position < offset + length:
            step = min(len(_ZEROES), offset + length - position)
            yield from core.write(_ZEROES[:step], position, deadline=clock.deadline)
            position += step
    if fua:
        yield from core.flush(clock.deadline)


def _in_batches(
    core: DiskCore,
    ranges: Ranges,
    send: Callable[[Batch, float], Operation[None]],
    clock: _Clock,
) -> Operation[None]:
    """All ranges, a few at once. How many is found out: all of a batch have one deadline, so it is
    no larger than what the LUN has time for. The first is alone, as it may show what the LUN
    cannot do."""
    most = 1
    while batch := list(islice(ranges, most)):
        yield from flushing.make_room(core, 0, clock.deadline)  # the journal has each command
        began = monotonic()
        yield from send(batch, clock.deadline)
        took = monotonic() - began
        if took < core.session.io_timeout / 8:  # twice as many leave three quarters of the time
            most = min(2 * most, PARALLEL)
        else:
            most = max(most // 2, 1)


def _write_same(core: DiskCore, batch: Batch, unmap: bool, deadline: float) -> Operation[None]:
    """Zeroes by WRITE SAME(16): without data where the LUN takes NDOB, else one block."""

    def without_data(lba: int, blocks: int) -> Command:
        return cdb.write_same16(lba, blocks, unmap, True), None

    def with_data(lba: int, blocks: int) -> Command:
        return cdb.write_same16(lba, blocks, unmap, False), _ZEROES[: core.block]

    if core.geometry.ndob:
        try:
            yield from _exclusive(core, batch, without_data, deadline)
            return
        except ScsiError as error:
            sense = error.sense
            # tgtd does not look at the bit, and ends with MEDIUM ERROR for want of data.
            if not isinstance(sense, Sense) or not (
                sense.is_invalid_field or sense.key == MEDIUM_ERROR
            ):
                raise
    yield from _exclusive(core, batch, with_data, deadline)
    core.geometry.ndob = False  # it takes the data


def _exclusive(
    core: DiskCore,
    batch: Batch,
    make: Callable[[int, int], Command],
    deadline: float,
    short_ok: bool = False,
) -> Operation[None]:
    """Commands that change ranges without being writes, all at once: under the range lock whole."""
    waiter = core.session.new_waiter()
    first, last = batch[0][0], batch[-1][0] + batch[-1][1] - 1
    while not core.ranges.lock(first, last, waiter):
        while waiter.pending:
            yield waiter
    try:
        counts = dict(batch)

        def fill(slot: TaskSlot, lba: int, _view: memoryview, _waiter: Waiter | None) -> bool:
            blocks = counts[lba]
            command_block, data = make(lba, blocks)
            slot.cdb[:] = command_block.ljust(16, b"\0")
            if data is None:
                fill_no_data(slot, core.lun)
            else:
                fill_write(slot, core.lun, data)
            slot.first, slot.last = lba, lba + blocks - 1  # no claim is needed under the lock
            if core.durability.journal is not None:
                core.durability.journal.add(slot, data, command_block)
            return True

        # (``kept`` says that they change the LUN; commands have nothing to settle.)
        pieces = [(lba, NO_BYTES) for lba, _ in batch]
        yield from core.run_pieces(pieces, fill, deadline, kept=[], short_ok=short_ok)
    finally:
        core.ranges.unlock(first, last)


def extents(core: DiskCore, offset: int, length: int) -> Operation[list[Extent]]:
    """GET LBA STATUS, as far as one answer goes."""
    deadline = core.deadline()
    yield from core.know_size(deadline)
    core.check(offset, length)
    whole: list[Extent] = [(offset, length, EXTENT_DATA)]
    if not core.info.can_extents or not length:
        return whole
    answer = memoryview(bytearray(core.geometry.lba_status_length))
    while True:
        epoch = core.durability.epoch
        moved = yield from command(
            core.session,
            core.lun,
            cdb.get_lba_status16(offset // core.block, len(answer)),
            core.info.name,
            data_in=answer,
            short_ok=True,
            deadline=deadline,
        )
        if not core.durability.stale(epoch):
            break
        yield flushing.AGAIN_S  # holes where writes were lost, that are about to be sent again
        check_time(core.session, deadline, core.info.name)
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
