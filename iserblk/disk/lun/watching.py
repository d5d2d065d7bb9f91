"""Looks from time to time whether a LUN in use is still the same: not all targets tell.

A target that gives the LUN's number to another volume may tell nobody (tgtd does not). So each LUN
is asked for its identifiers and its size, whatever front-end uses it, and when nothing does: two
commands in eight seconds. If an answer is not the expected one, the LUN is in doubt, and nothing is
sent to it before it has been compared in full. An error means nothing: the next look comes soon.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

from iserblk.commands.command import Command
from iserblk.commands.running import fill_read
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.checked_identity import CheckedIdentity
from iserblk.disk.lun.identity import is_identified
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError
from iserblk.scsi import capacity, cdb, inquiry, opcodes

log = logging.getLogger(__name__)

EVERY = 8  # ticks, which come about once a second: with the answer, it takes less than ten
ALLOCATION = 512  # as when the LUN was identified


class Watched(Protocol):
    """The LUN: see DiskCore."""

    @property
    def session(self) -> CommandSession: ...

    @property
    def lun(self) -> bytes: ...

    @property
    def known(self) -> LunInfo: ...

    @property
    def info(self) -> LunInfo: ...

    @property
    def long_cdbs(self) -> bool: ...

    @property
    def identity(self) -> CheckedIdentity: ...


class LunWatch:
    """Looks at one LUN. Implements Waiter: for a free slot, then for its command."""

    def __init__(self, core: Watched) -> None:
        self.pending = 0
        self._core = core
        self._ticks = 0
        self._asks: deque[bytes] = deque()  # CDBs of this look
        self._slot: Command | None = None  # in flight
        self._answer = memoryview(b"")

    def tick(self) -> None:
        """Call it about once a second, where ``Session.progress`` runs."""
        self._ticks += 1
        session = self._core.session
        if (
            self._ticks < EVERY
            or self.pending
            or self._core.identity.in_doubt
            or session.suspended is not None
            or session.error is not None
        ):
            return
        self._ticks = 0
        self._asks.clear()
        self._asks.extend(self._questions())
        self._ask()

    def _questions(self) -> list[bytes]:
        info = self._core.info
        asks = []
        if info.identifiers:
            asks.append(cdb.inquiry(ALLOCATION, inquiry.DEVICE_IDENTIFICATION))
        if info.serial and not is_identified(info):
            asks.append(cdb.inquiry(ALLOCATION, inquiry.UNIT_SERIAL_NUMBER))
        if not asks:
            asks.append(cdb.inquiry(96))
        asks.append(cdb.read_capacity16(32) if self._core.long_cdbs else cdb.read_capacity10())
        return asks

    def _ask(self) -> None:
        """Send the next question; without a free slot, when there is one."""
        queue = self._core.session.queue
        try:
            slot = queue.take(self)
        except IserblkError:
            return
        if slot is None:
            return
        ask = self._asks.popleft()
        length = {opcodes.INQUIRY: ALLOCATION, opcodes.READ_CAPACITY_10: 8}.get(ask[0], 32)
        self._answer = memoryview(bytearray(length))
        slot.waiter = self
        slot.cdb[:] = ask.ljust(16, b"\0")
        fill_read(slot, self._core.lun, self._answer)
        self._slot = slot
        self.pending = 1
        queue.submit(slot)

    def task_done(self) -> None:
        self.pending -= 1
        slot, self._slot = self._slot, None
        if slot is None:
            if self._asks:
                self._ask()  # there may be a slot now
            return
        succeeded = slot.error is None and not slot.status and not slot.response
        answer = self._answer[: len(self._answer) - max(0, slot.residual)]
        request = bytes(slot.cdb)
        self._core.session.queue.release(slot)
        if not succeeded:
            return  # what it reports the LUN has heard
        try:
            why = self._compare(request, answer)
        except IserblkError as error:
            log.debug("%s: a look at it: %s", self._core.info.name, error)
            return
        if why:
            self._core.identity.suspect(why)
        elif self._asks:
            self._ask()

    def _compare(self, request: bytes, answer: memoryview) -> str:
        """What is different from what is known; empty: nothing is."""
        info = self._core.known
        if request[0] != opcodes.INQUIRY:
            decode = capacity.decode16 if self._core.long_cdbs else capacity.decode10
            found = decode(answer)
            if found.block_size != info.block_size:
                return f"its blocks have {found.block_size} bytes now"
            size = found.blocks * found.block_size
            return "" if size == info.size else f"it had {info.size} bytes, and has {size}"
        if not answer or answer[0] >> 5:
            return "the target has no such LUN"
        if not request[1] & 1:
            said = inquiry.decode_standard(answer)
            same = (said.vendor, said.product) == (info.vendor, info.product)
        elif request[2] == inquiry.UNIT_SERIAL_NUMBER:
            same = inquiry.decode_serial(answer) == info.serial
        else:
            same = set(inquiry.decode_identifiers(answer)) == set(info.identifiers)
        return "" if same else "it has other identifiers"
