"""Unsolicited data over iSER: Data-Outs behind a write (RFC 7143 4.2.5.2, 11.7; RFC 7145 7.3.4).

A write that is longer than its command may carry, and no longer than FirstBurstLength, travels
whole: the first part in the command, the rest in SCSI Data-Outs, each in a Send of its own. Nothing
is advertised then, and the target reads nothing from our memory. A write is never sent in part: it
is unclear between implementations what the Write Base Offset counts from then, and Linux siw
misplaces what is read behind it.

Traditional iSCSI's unsolicited data is the work of its datamover, and needs none of this.
"""

from __future__ import annotations

from typing import Final

from iserblk.datamover.seam import UNSOLICITED, InitiatorDatamover, PduSlot
from iserblk.errors import TransportError
from iserblk.iscsi import bhs
from iserblk.iscsi.keys import SessionParameters

# Slots for Data-Outs on their way to the network. A slot is free again when its Send has left, so
# that a few times what TCP takes at once are enough. A write that finds too few is advertised.
DATA_OUT_SLOTS: Final = 64
_LEAST_DATA_OUTS: Final = 8  # allocated later, where need be: a write of 64 KiB has so many
# Commands in flight, this write included, up to which it is faster to send 64 KiB unasked. With
# more, the target has other work during the round trip that this saves, and Data-Outs cost us a
# copy: over loopback a write at depth 1 takes 0.8 of the time, at depth 4 the same, at depth 8 1.1
# times as long (docs/rdma-internals.md).
FEW: Final = 2
_NONE: Final[list[PduSlot]] = []


class DataOuts:
    """The slots for unsolicited Data-Outs of one connection, and how a write is cut.

    ``limit``: bytes of the longest write that travels whole; 0: none does. ``most_busy``: it does
    while no more commands than that are in flight, itself included, and were lately: of those that
    follow a batch of answers, the first find few others in flight. ``immediate``: bytes of it that
    its command carries, where Data-Outs follow. That is a whole segment or nothing: all PDUs but
    the last must have the same length (RFC 7145 section 7.3.1). Nothing, too, where the write may
    be reassigned: it is unclear between implementations whether the buffer that TASK REASSIGN
    advertises (section 10.2.2) begins with the immediate data or behind it. ``added``: slots that
    were allocated when they were needed.
    """

    __slots__ = (
        "_free",
        "_lately",
        "_more",
        "_segment",
        "added",
        "immediate",
        "limit",
        "most_busy",
    )

    def __init__(
        self,
        slots: list[PduSlot],
        parameters: SessionParameters,
        immediate_limit: int,
        most_busy: int,
        more: int = 0,
    ) -> None:
        """``slots``: from ``allocate_data_outs``. ``immediate_limit``: bytes that a command may
        carry. ``more``: slots that may be allocated yet, which only connections that send such
        writes pay for."""
        self.most_busy = most_busy
        self._more = more
        self.added = 0
        self._lately = 0  # commands in flight; one less with each write that could travel whole
        self._free = slots
        self._segment = parameters.target_recv_data_segment_length
        self.limit = parameters.first_burst_length if slots or more else 0
        carries = immediate_limit >= self._segment and parameters.error_recovery_level < 2
        self.immediate = self._segment if carries else 0

    def take(self, length: int, busy: int, datamover: InitiatorDatamover) -> list[PduSlot]:
        """The slots for a write of ``length`` bytes, in order, with ``busy`` commands in flight. An
        empty list: it is to be advertised. ``datamover``: of the connection."""
        if length > self.limit:
            return _NONE
        self._lately = max(busy, self._lately - 1)
        if self._lately > self.most_busy:
            return _NONE
        free = self._free
        count = -((self.immediate - length) // self._segment)
        if count > len(free) and self._more:
            self._allocate(count, datamover)
        if count > len(free):
            return _NONE
        return [free.pop() for _ in range(count)]

    def _allocate(self, count: int, datamover: InitiatorDatamover) -> None:
        """Allocate ``count`` slots, or somewhat more, as far as there may be more."""
        count = min(max(count, _LEAST_DATA_OUTS), self._more)
        try:
            slots = datamover.allocate_data_outs(count, min(self._segment, self.limit))
        except (OSError, MemoryError, TransportError):
            return  # writes are advertised, as with too few
        self._more -= count
        self.added += count
        self._free.extend(slots)

    def take_back(self) -> None:
        """Let go of slots that were allocated when they were needed, if none is in use."""
        if self.added and len(self._free) == self.added:
            self._free.clear()
            self._more += self.added
            self.added = 0

    def send(
        self,
        pieces: list[PduSlot],
        datamover: InitiatorDatamover,
        data: memoryview,
        itt: int,
        exp_stat_sn: int,
    ) -> None:
        """Queue the Data-Outs of the write with this ITT, behind its command. ``pieces``: from
        ``take``. The ``data`` is copied: it may be used again on return."""
        at = self.immediate
        end = len(data)
        segment = self._segment
        for number, piece in enumerate(pieces):
            size = min(segment, end - at)
            piece.inline[:size] = data[at : at + size]
            piece.inline_length = size
            bhs.DATA_OUT_FIELDS.pack_into(
                piece.bhs,
                0,
                bhs.DATA_OUT,
                bhs.FLAG_FINAL if at + size == end else 0,
                size,
                bhs.NO_LUN,
                itt,
                bhs.NO_TAG,
                exp_stat_sn,
                number,
                at,
            )
            piece.direction = UNSOLICITED
            datamover.send_control(piece)
            at += size

    def give_back(self, slot: PduSlot) -> None:
        """The Send of ``slot`` has left."""
        self._free.append(slot)
