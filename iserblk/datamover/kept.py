"""What a target keeps for retransmission over TCP, at ErrorRecoveryLevel 1 or more.

Every numbered PDU is kept until the initiator has acknowledged its StatSN, and the Data-In of a
read until that, or until it is acknowledged by itself (RFC 7143 sections 4.2.2.2, 11.16). Sans-IO.

**The bound.** At most MOST_PDUS numbered PDUs are kept, with MOST_INLINE bytes of their own, and
MOST_DATA bytes of Data-In, of at most MOST_READS reads. The oldest keep their place, because what
the initiator misses is what it has not acknowledged. A read that finds no room is not kept: a SNACK
for its data is rejected.
"""

from __future__ import annotations

from typing import Final

from iserblk.datamover.seam import TargetSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt

MOST_PDUS: Final = 1024
MOST_INLINE: Final = 1 << 20
LEAST_INLINE: Final = 64 << 10  # bytes of the same that are kept where memory is wanted
MOST_DATA: Final = 32 << 20
MOST_READS: Final = 128
_MASK: Final = 0xFFFFFFFF


class KeptPdu:
    """A numbered PDU that has been sent, and the Data-In before it.

    ``header``, ``inline``: of the SCSI Response, also where the last Data-In carries the status
    (``collapsed``), or of any other PDU. ``data``: the Data-In; None: none, or not kept.
    ``offset``: of it in the task's data. ``most``: bytes in one PDU. ``first_sn``, ``end_sn``: of
    its first PDU, and behind its last. ``acknowledged``: DataSN up to which it was acknowledged.
    ``ttt``: of the A bit; NO_TAG: not asked for. ``slot``: busy as long as ``data`` is kept.
    ``tell``: Data_ACK_Notify is due."""

    __slots__ = (
        "acknowledged",
        "collapsed",
        "data",
        "end_sn",
        "first_sn",
        "header",
        "inline",
        "itt",
        "lun",
        "most",
        "offset",
        "slot",
        "tell",
        "ttt",
    )

    def __init__(self, header: bytes, inline: bytes, itt: int, lun: bytes) -> None:
        self.header = header
        self.inline = inline
        self.itt = itt
        self.lun = lun
        self.data: memoryview | None = None
        self.offset = 0
        self.most = 0
        self.first_sn = 0
        self.end_sn = 0
        self.acknowledged = 0
        self.ttt = bhs.NO_TAG
        self.slot: TargetSlot | None = None
        self.collapsed = False
        self.tell = False


class Kept:
    """The PDUs of one connection that are kept, oldest first.

    ``inline``: bytes of data in the PDUs themselves (answers to NOP and text, sense data).
    ``data``, ``reads``: bytes and number of the reads whose Data-In is kept. ``acknowledged``: the
    last ExpStatSN of the initiator."""

    __slots__ = ("_pdus", "acknowledged", "data", "inline", "reads")

    def __init__(self, exp_stat_sn: int) -> None:
        self._pdus: dict[int, KeptPdu] = {}  # by StatSN
        self.acknowledged = exp_stat_sn
        self.inline = 0
        self.data = 0
        self.reads = 0

    @property
    def oldest(self) -> int | None:
        """Its StatSN; None: nothing is kept."""
        for stat_sn in self._pdus:
            return stat_sn
        return None

    def fits(self, size: int) -> bool:
        """Whether the Data-In of one more read may be kept."""
        return self.reads < MOST_READS and self.data + size <= MOST_DATA

    @property
    def presses(self) -> bool:
        """Whether the initiator is to be asked for acknowledgements (A bit)."""
        return self.reads * 2 >= MOST_READS or self.data * 2 >= MOST_DATA

    def add(self, stat_sn: int, kept: KeptPdu) -> None:
        self._pdus[stat_sn] = kept
        if kept.inline:
            self.inline += len(kept.inline)
        if kept.data is not None:
            self.data += len(kept.data)
            self.reads += 1

    def let_go(self, kept: KeptPdu) -> TargetSlot | None:
        """Keep its Data-In no longer. Returns the slot that was busy with it."""
        slot, kept.slot = kept.slot, None
        if kept.data is not None:
            self.data -= len(kept.data)
            self.reads -= 1
            kept.data = None
        return slot

    def surplus(self, most: int = MOST_INLINE) -> KeptPdu | None:
        """Remove a PDU that finds no place: the youngest that was there before the last, and
        where there are too many bytes, more than ``most``, that has any. None: there is place."""
        full = len(self._pdus) > MOST_PDUS
        if not full and self.inline <= most:
            return None
        last = True
        for stat_sn, kept in reversed(self._pdus.items()):
            if not last and (full or kept.inline):
                del self._pdus[stat_sn]
                self.inline -= len(kept.inline)
                return kept
            last = False
        return None

    def acknowledge(self, exp_stat_sn: int) -> list[KeptPdu]:
        """Remove what an ExpStatSN acknowledges, oldest first. The caller lets their data go."""
        gone: list[KeptPdu] = []
        if serial_lt(self.acknowledged, exp_stat_sn):
            self.acknowledged = exp_stat_sn
            pdus = self._pdus
            while pdus:
                first = next(iter(pdus))
                if not serial_lt(first, exp_stat_sn):
                    break
                kept = pdus.pop(first)
                if kept.inline:
                    self.inline -= len(kept.inline)
                gone.append(kept)
        return gone

    def all(self) -> list[KeptPdu]:
        return list(self._pdus.values())

    def of_task(self, itt: int) -> tuple[int, KeptPdu] | None:
        """StatSN and PDU of the youngest SCSI Response for this tag."""
        for stat_sn in reversed(self._pdus):
            kept = self._pdus[stat_sn]
            if kept.itt == itt and kept.header[0] == bhs.SCSI_RESPONSE:
                return stat_sn, kept
        return None

    def of_tag(self, ttt: int, lun: bytes) -> KeptPdu | None:
        """The read whose last Data-In had the A bit with this Target Transfer Tag."""
        for kept in self._pdus.values():
            if kept.ttt == ttt and ttt != bhs.NO_TAG and kept.lun == lun:
                return kept
        return None

    def statuses(self, begin: int, length: int, next_sn: int) -> list[tuple[int, KeptPdu]] | int:
        """The PDUs that a Status SNACK asks for; or the reason to reject it. ``next_sn``: the
        StatSN that comes next."""
        if begin == 0 and length == 0:
            begin = self.acknowledged
        ahead = (next_sn - begin) & _MASK
        if not length:
            length = ahead
        if serial_lt(begin, self.acknowledged) or serial_lt(next_sn, begin) or length > ahead:
            return pdu.REJECT_PROTOCOL_ERROR
        found: list[tuple[int, KeptPdu]] = []
        for at in range(length):
            stat_sn = (begin + at) & _MASK
            kept = self._pdus.get(stat_sn)
            if kept is None:
                return pdu.REJECT_SNACK
            found.append((stat_sn, kept))
        return found
