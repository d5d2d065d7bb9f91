"""Where the units of a byte stream end: chunks as they come, iSCSI PDUs, or MPA frames and FPDUs.

A framer takes bytes in any pieces and gives whole units back; it changes nothing. What it cannot
make sense of (a peer that breaks its protocol) goes on as plain bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from crc32c import crc32c

from iserblk.datamover.iser import CONTROL, HEADER_LENGTH
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, text
from iserblk.rcap.iwarp import ddp, mpa, rdmap

WRITES = (0x0A, 0x2A, 0xAA, 0x8A)  # WRITE (6), (10), (12), (16)


class Unit:
    """Whole bytes of one direction. ``bhs``: the header of the iSCSI PDU that begins in it, else
    b"". ``tagged``: the RDMAP opcode of a tagged FPDU, else None. ``due``: when it may leave."""

    __slots__ = ("bhs", "data", "due", "offset", "tagged")

    def __init__(
        self, data: bytes, offset: int, header: bytes = b"", tagged: int | None = None
    ) -> None:
        self.data = data
        self.offset = offset  # of its first byte in the stream
        self.bhs = header
        self.tagged = tagged
        self.due = 0.0

    @property
    def opcode(self) -> int | None:
        """The opcode of the PDU that begins here, or None."""
        return self.bhs[0] & bhs.OPCODE_MASK if self.bhs else None

    @property
    def cdb(self) -> bytes:
        """The CDB of the SCSI Command that begins here, else b""."""
        return self.bhs[bhs.CDB_OFFSET :] if self.opcode == bhs.SCSI_COMMAND else b""

    @property
    def itt(self) -> int:
        return int.from_bytes(self.bhs[16:20], "big") if self.bhs else bhs.NO_TAG

    @property
    def is_write_command(self) -> bool:
        return bool(self.cdb) and self.cdb[0] in WRITES

    @property
    def is_write_data(self) -> bool:
        """Whether this is data that the target asked for: a Data-Out or an RDMA Read Response."""
        return self.opcode == bhs.DATA_OUT or self.tagged == rdmap.READ_RESPONSE

    def with_data(self, data: bytes) -> Unit:
        """A unit of other bytes at the same place and time, without the header fields."""
        made = Unit(data, self.offset)
        made.due = self.due
        return made


class Framer(Protocol):
    def feed(self, data: bytes) -> list[Unit]: ...

    def rest(self) -> bytes:
        """The bytes of a unit that is not whole yet."""
        ...


class RawFramer:
    """Every chunk is a unit."""

    def __init__(self) -> None:
        self._offset = 0

    def feed(self, data: bytes) -> list[Unit]:
        unit = Unit(data, self._offset)
        self._offset += len(data)
        return [unit]

    def rest(self) -> bytes:
        return b""


class _Cutting(ABC):
    """Cuts what ``next_size`` says. ``next_size`` returns None while it cannot be told."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._offset = 0
        self._lost = False  # the stream makes no sense any more

    def feed(self, data: bytes) -> list[Unit]:
        self._held += data
        units = []
        while self._held:
            size = len(self._held) if self._lost else self.next_size()
            if size is None or size > len(self._held):
                break
            taken = bytes(self._held[:size])
            del self._held[:size]
            units.append(Unit(taken, self._offset) if self._lost else self.make_unit(taken))
            self._offset += size
        return units

    def rest(self) -> bytes:
        left = bytes(self._held)
        self._held.clear()
        return left

    @abstractmethod
    def next_size(self) -> int | None: ...

    @abstractmethod
    def make_unit(self, data: bytes) -> Unit: ...


class Agreement:
    """What the two directions of one iSCSI connection have agreed on at login."""

    def __init__(self) -> None:
        self.full_feature = False
        self.iser = False  # the connection has left the byte stream of iSCSI
        self.header_digest = False
        self.data_digest = False

    def heard(self, header: bytes, data: bytes) -> None:
        """A Login Response."""
        try:
            pairs = dict(text.decode_untrusted(data))
        except RemoteProtocolError:
            pairs = {}
        if "HeaderDigest" in pairs:
            self.header_digest = pairs["HeaderDigest"] == "CRC32C"
        if "DataDigest" in pairs:
            self.data_digest = pairs["DataDigest"] == "CRC32C"
        self.full_feature = header[1] & 0x83 == 0x83 and header[36:38] == b"\0\0"


class IwarpFramer(_Cutting):
    """The MPA Request or Reply, then FPDUs without markers (which we never ask for)."""

    def __init__(self) -> None:
        super().__init__()
        self._started = False

    def next_size(self) -> int | None:
        held = self._held
        if self._started:
            return ddp.fpdu_size(int.from_bytes(held[:2], "big")) if len(held) >= 2 else None
        if len(held) < mpa.HEADER_SIZE:
            return None
        return mpa.HEADER_SIZE + int.from_bytes(held[18:20], "big")

    def make_unit(self, data: bytes) -> Unit:
        if not self._started:
            self._started = True
            return Unit(data, self._offset)
        if len(data) < ddp.TAGGED_SIZE:
            self._lost = True
            return Unit(data, self._offset)
        opcode = data[3] & rdmap.OPCODE_MASK
        if data[2] & 0x80:
            return Unit(data, self._offset, tagged=opcode)
        start = ddp.UNTAGGED_SIZE
        header = b""
        first = data[start - 4 : start] == bytes(4)  # MO
        end = start + HEADER_LENGTH + bhs.BHS_LENGTH
        if opcode >= rdmap.SEND and first and len(data) >= end and data[start] & 0xF0 == CONTROL:
            header = data[start + HEADER_LENGTH : end]
        return Unit(data, self._offset, header)


class IscsiFramer(IwarpFramer):
    """PDUs of Traditional iSCSI; both directions share an Agreement. Where the connection becomes
    iSER behind the login, MPA start-up and FPDUs follow. The login itself does not always tell: a
    further connection of a session inherits RDMAExtensions. No PDU begins with the byte with which
    MPA start-up begins."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self._agreed = agreement

    def next_size(self) -> int | None:
        if self._agreed.full_feature and self._held[:1] == mpa.REQUEST_KEY[:1]:
            self._agreed.iser = True
        if self._agreed.iser:
            return super().next_size()
        if len(self._held) < bhs.BHS_LENGTH:
            return None
        data = int.from_bytes(self._held[5:8], "big")
        size = bhs.BHS_LENGTH + self._held[4] * 4 + (data + 3 & ~3)
        if self._agreed.full_feature:
            size += 4 * self._agreed.header_digest
            size += 4 * (self._agreed.data_digest and data > 0)
        return size

    def make_unit(self, data: bytes) -> Unit:
        if self._agreed.iser:
            return super().make_unit(data)
        header = data[: bhs.BHS_LENGTH]
        if header[0] == bhs.LOGIN_RESPONSE:
            self._agreed.heard(header, data[bhs.BHS_LENGTH :])
        return Unit(data, self._offset, header)


def framers(first: bytes, kind: str) -> tuple[Framer, Framer]:
    """Framers for both directions of a connection whose initiator's first bytes are ``first``.
    ``kind``: raw, or auto."""
    if kind == "raw":
        return RawFramer(), RawFramer()
    if first[:1] == mpa.REQUEST_KEY[:1]:
        return IwarpFramer(), IwarpFramer()
    if first[0] & bhs.OPCODE_MASK == bhs.LOGIN_REQUEST:
        agreement = Agreement()
        return IscsiFramer(agreement), IscsiFramer(agreement)
    return RawFramer(), RawFramer()


def mended(fpdu: bytes) -> bytes:
    """The FPDU with its CRC put right."""
    body = fpdu[: -ddp.CRC_SIZE]
    return body + ddp.CRC.pack(crc32c(body))
