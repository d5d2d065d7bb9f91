"""What a server tells of its exports: one for each LUN."""

from __future__ import annotations

from typing import Protocol

from iserblk.disk.seam import DirectDisk, FlushClient
from iserblk.nbd import messages as nbd
from iserblk.nbd.long_changes import LongChanges


class Hearing(Protocol):
    """Whether the client of a connection has received what it was told of losses."""

    @property
    def client(self) -> FlushClient: ...

    def doubt(self) -> None:
        """Another connection begins, perhaps because this one is gone, and its end not noticed
        yet. What its client was not told of, or may not have received, is left to clients that
        begin from now on."""
        ...


class Export:
    """One LUN as an export. ``read_only``: writes are refused, whatever the LUN allows.
    ``only_client``: all connections are of one client, whose end is no matter of theirs.

    ``patient``: a large WRITE_ZEROES or TRIM takes as long as it makes progress (``long``). Not for
    the kernel, which gives a server up that does not answer in time: it gets WRITE_ZEROES only
    where that moves no data, and writes zeroes otherwise."""

    def __init__(
        self, name: str, disk: DirectDisk, read_only: bool = False, *, patient: bool = True
    ) -> None:
        self.name = name
        self.disk = disk
        self.patient = patient
        self.long = LongChanges()
        info = disk.info
        self._read_only = read_only
        self.only_client: FlushClient | None = None
        self._hearings: dict[Hearing, None] = {}  # those of all connections
        self.no_trims_told = False  # the log has it that the LUN refuses trims
        self.description = f"{info.vendor} {info.product}, {info.target} LUN {info.lun}"
        # Any alignment works; whole blocks of the medium work best.
        self.minimum = 1
        self.preferred = max(info.physical_block_size, nbd.PREFERRED)
        # A power of two, as the protocol wants, between 512 and the largest payload.
        if self.preferred & (self.preferred - 1) or self.preferred > nbd.MOST_PAYLOAD:
            self.preferred = nbd.PREFERRED

    @property
    def read_only(self) -> bool:
        """For clients that come now: the LUN may have become read-only, or writable."""
        return self._read_only or self.disk.info.read_only

    @property
    def size(self) -> int:
        return self.disk.size

    def new_client(self) -> FlushClient:
        """That of a connection, for its flushes; see ``connected``."""
        if self.only_client is not None:
            return self.only_client
        for each in [*self._hearings]:
            each.doubt()
        return self.disk.new_client()

    def connected(self, hearing: Hearing) -> None:
        """A connection has begun, with a ``new_client``."""
        self._hearings[hearing] = None

    def disconnected(self, hearing: Hearing) -> None:
        """The connection has ended."""
        self._hearings.pop(hearing, None)
        if hearing.client is not self.only_client:
            hearing.client.ended()

    def flags(self, structured: bool) -> int:
        """Transmission flags. All connections share the LUN's session and nothing is cached here:
        what one was answered is seen by the others, and a flush covers the writes of all."""
        info = self.disk.info
        flags = nbd.HAS_FLAGS | nbd.SEND_FLUSH | nbd.SEND_FUA | nbd.CAN_MULTI_CONN | nbd.SEND_CACHE
        if info.rotational:
            flags |= nbd.ROTATIONAL
        if structured:
            flags |= nbd.SEND_DF
        if self.read_only:
            return flags | nbd.READ_ONLY
        if self.patient or info.can_zero:
            # A fast zero that would not be fast is refused at once, as the flag promises.
            flags |= nbd.SEND_WRITE_ZEROES | nbd.SEND_FAST_ZERO
        if info.can_trim:
            flags |= nbd.SEND_TRIM
        return flags
