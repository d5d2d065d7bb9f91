"""The Data-In PDUs of one task at a target over TCP (RFC 7143 section 11.7)."""

from __future__ import annotations

from typing import Final

from iserblk.datamover.seam import TargetSlot
from iserblk.datamover.tcp_stream import OutPdu, PduSender
from iserblk.iscsi import bhs

_BATCH: Final = 64  # PDUs that are laid out at a time


def pdus_of(size: int, most: int, burst: int) -> int:
    """Into how many PDUs ``size`` bytes are cut: each has ``most`` bytes, or ends a burst."""
    whole, rest = divmod(size, burst)
    return whole * -(-burst // most) + -(-rest // most)


def offset_of(number: int, most: int, burst: int) -> int:
    """Where the PDU with this number, from 0 on, begins. ``most``, ``burst``: as above."""
    bursts, more = divmod(number, -(-burst // most))
    return bursts * burst + more * most


class DataIns:
    """Data-In of a task, laid out when the PDUs before have left: a segment may be as short as 512
    bytes, and a read as long as 16 MiB, which are 32,768 PDUs. Implements Rest.

    ``data``: all Data-In of the task, in the memory of ``owner``. ``most``, ``burst``: bytes of a
    PDU, and of a burst. ``offset``: of ``data`` in the task's data. ``first_sn``: DataSN of its
    first PDU. ``token``: comes back when the last has left. What is left out is 0, or NO_TAG:
    ``residual``; ``status``: the S bit with the flags of the residual count, and ``stat_sn``, of
    the last of all; ``ttt``, ``lun``: of the last of all, where it has the A bit."""

    __slots__ = (
        "_at",
        "_end",
        "_next",
        "_sender",
        "burst",
        "data",
        "exp_cmd_sn",
        "first_sn",
        "itt",
        "lun",
        "max_cmd_sn",
        "most",
        "offset",
        "owner",
        "residual",
        "stat_sn",
        "status",
        "token",
        "ttt",
    )

    def __init__(
        self,
        sender: PduSender,
        owner: TargetSlot,
        data: memoryview,
        most: int,
        burst: int,
        begin: int = 0,
        end: int = -1,
    ) -> None:
        """``begin``, ``end``: of which PDUs, counted from 0 on, up to ``end`` (-1: all)."""
        self._sender = sender
        self.owner = owner
        self.data = data
        self.most = most
        self.burst = burst
        self._next = begin
        self._at = offset_of(begin, most, burst)
        self._end = pdus_of(len(data), most, burst) if end < 0 else end
        self.token: object = None
        self.offset = 0
        self.first_sn = 0
        self.itt = bhs.NO_TAG
        self.lun = bhs.NO_LUN
        self.ttt: int = bhs.NO_TAG
        self.stat_sn = 0
        self.status = 0
        self.residual = 0
        self.exp_cmd_sn = 0
        self.max_cmd_sn = 0

    @property
    def end_sn(self) -> int:
        """DataSN behind the last PDU of all."""
        return self.first_sn + pdus_of(len(self.data), self.most, self.burst)

    def following(self) -> list[OutPdu]:
        """See Rest. Empty if there is no PDU at all."""
        pdus: list[OutPdu] = []
        while self._next < self._end and len(pdus) < _BATCH:
            pdus.append(self._next_pdu())
        if self._next < self._end:
            pdus[-1].rest = self
        return pdus

    def _next_pdu(self) -> OutPdu:
        at, size, number = self._at, len(self.data), self._next
        left = self.burst - at % self.burst
        count = min(self.most, left, size - at)
        last = at + count == size
        flags = bhs.FLAG_FINAL if last or count == left else 0
        asks = last and self.ttt != bhs.NO_TAG
        status = last and self.status != 0
        if asks:
            flags |= bhs.DATA_IN_ACKNOWLEDGE
        if status:
            flags |= self.status
        header = bhs.DATA_IN_FIELDS.pack(
            bhs.DATA_IN,
            flags,
            0,
            count,
            self.lun if asks else bhs.NO_LUN,
            self.itt,
            self.ttt if asks else bhs.NO_TAG,
            self.stat_sn if status else 0,
            self.exp_cmd_sn,
            self.max_cmd_sn,
            self.first_sn + number & 0xFFFFFFFF,
            self.offset + at,
            self.residual if status else 0,
        )
        self._next = number + 1
        self._at = at + count
        token = self.token if self._next == self._end else None
        return self._sender.frame(header, self.data[at : at + count], self.owner, token)
