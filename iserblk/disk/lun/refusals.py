"""What a LUN has refused in use, although it says that it can.

A refusal is ILLEGAL REQUEST with INVALID COMMAND OPERATION CODE (5/20/00: the LUN does not know the
command), INVALID FIELD IN CDB (5/24/00) or an invalid field in the parameter list (5/26/xx: it
knows the command, but not in this form, or not so much at once); see ``is_refusal`` of
``iserblk.commands.running``.

What was refused is remembered for the session, also on later connections: a LUN that begins to take
what it has refused gains nothing worth a command that fails in front of others. One line is logged
for each.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError, ScsiError
from iserblk.scsi.limits import MAXIMUM_BLOCKS

log = logging.getLogger(__name__)

# What a LUN may turn out not to have.
UNMAP: Final = "UNMAP"
WRITE_SAME: Final = "WRITE SAME"
DEALLOCATION: Final = "WRITE SAME with the UNMAP bit"
LBA_STATUS: Final = "GET LBA STATUS"
FUA: Final = "FUA"
LONG_TRANSFERS: Final = "READ(16) and WRITE(16)"
FAR_BLOCKS: Final = "blocks from 2^32 on"
LONG_FLUSH: Final = "SYNCHRONIZE CACHE(16)"
FLUSH: Final = "SYNCHRONIZE CACHE"


def words(error: IserblkError) -> str:
    """The sense data of a refusal, for messages that name the LUN and the command themselves."""
    return str(error.sense) if isinstance(error, ScsiError) and error.sense else str(error)


class Refusals:
    """What one LUN has refused in this session. ``name``: for logs.

    ``most_transfer``: bytes of the largest READ or WRITE that may be sent; 0: as the LUN says.
    """

    def __init__(self, name: str, most_transfer: int = 0) -> None:
        self.name = name
        self.most_transfer = most_transfer
        self._write_same_blocks = 0  # of the largest that it takes; 0: as it says
        self._unmap_blocks = 0
        self._status_from = -1  # the first block whose status it refuses
        self._without: set[str] = set()  # what it does not have, whatever it says

    def narrow(self, info: LunInfo, geometry: Geometry) -> LunInfo:
        """``info``, which the LUN has told, without what it has refused. Changes ``geometry``
        likewise."""
        block, without = info.block_size, self._without
        most = info.max_transfer
        if self.most_transfer:
            most = min(most, max(self.most_transfer - self.most_transfer % block, block))
        geometry.max_write_same_blocks = _least(
            geometry.max_write_same_blocks, self._write_same_blocks
        )
        geometry.max_unmap_blocks = _least(geometry.max_unmap_blocks, self._unmap_blocks)
        write_cache = info.write_cache
        if FLUSH in without and not geometry.tells_cache:
            write_cache = False
        return replace(
            info,
            max_transfer=most,
            write_cache=write_cache,
            fua=info.fua and FUA not in without,
            can_trim=info.can_trim and UNMAP not in without,
            can_zero=info.can_zero and WRITE_SAME not in without,
            zero_by_unmap=info.zero_by_unmap and not without & {WRITE_SAME, DEALLOCATION},
            can_extents=info.can_extents and LBA_STATUS not in without,
        )

    def refused(self, what: str) -> bool:
        """Whether ``what`` was refused for good."""
        return what in self._without

    def tells_status_of(self, lba: int) -> bool:
        """Whether GET LBA STATUS may be asked for a block. (Callers know that the LUN has it.)"""
        return self._status_from < 0 or lba < self._status_from

    def lacks(self, what: str, text: str, level: int = logging.WARNING) -> None:
        """The LUN does not have ``what``; ``text`` says so in the log, the first time. ``level``:
        INFO where an error tells the caller the same."""
        if what in self._without:
            return
        self._without.add(what)
        log.log(level, "%s: %s", self.name, text)

    def limit_transfer(self, size: int) -> None:
        """READ and WRITE of ``size`` bytes are taken, and such of twice as many are refused."""
        if 0 < self.most_transfer <= size:
            return
        self.most_transfer = size
        log.warning(
            "%s: the LUN refuses transfers that it should take; %d bytes are moved by one command "
            "from now on (max-transfer=%d has the same effect from the start)",
            self.name,
            size,
            size,
        )

    def limit_write_same(self, blocks: int) -> None:
        if 0 < self._write_same_blocks <= blocks:
            return
        self._write_same_blocks = blocks
        self._tell_limit(WRITE_SAME, blocks)

    def limit_unmap(self, blocks: int) -> None:
        if 0 < self._unmap_blocks <= blocks:
            return
        self._unmap_blocks = blocks
        self._tell_limit(UNMAP, blocks)

    def _tell_limit(self, command: str, blocks: int) -> None:
        log.warning(
            "%s: the LUN refuses %s of as many blocks as it says; %d are sent at once from now on",
            self.name,
            command,
            blocks,
        )

    def limit_status(self, lba: int, error: IserblkError) -> None:
        """GET LBA STATUS for block ``lba`` was refused; taken to be so for all behind it."""
        if 0 <= self._status_from <= lba:
            return
        self._status_from, first = lba, self._status_from < 0
        if first:
            log.warning(
                "%s: the LUN refuses GET LBA STATUS from LBA %d on (%s); that counts as data",
                self.name,
                lba,
                words(error),
            )


def _least(told: int, found: int) -> int:
    """The smaller of two limits, of which 0 is none."""
    return min(told or MAXIMUM_BLOCKS, found) if found else told
