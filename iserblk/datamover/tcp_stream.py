"""PDUs on a byte stream: framing, padding, digests (RFC 7143 sections 11.2, 13.1). Sans-IO.

    BHS 48 · AHS · [header digest 4] · data segment · padding to 4 · [data digest 4]

Digests are CRC32C, least significant byte first; the data digest covers the padding, and is absent
where there is no data. ``PduReceiver`` says where the next bytes must land, so that the data of a
large PDU is received straight into the buffer of its task. ``PduSender`` gathers.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Protocol

from iserblk.crc import crc32c
from iserblk.errors import ConnectionLost, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs

LOGIN_DATA = 8192  # data bytes of one PDU, until login has declared something else
NOWHERE = memoryview(b"")  # what ``place`` answers where the data is for nobody any more

_DIGEST = struct.Struct("<I")
_PADS = (b"", b"\0", b"\0\0", b"\0\0\0")
_LARGEST_HEADER = bhs.BHS_LENGTH + 255 * 4 + _DIGEST.size
_READ_AHEAD = 65536  # bytes that are taken in without knowing where they belong
_SHORT_AHEAD = 1024  # behind large data: its end and the next header
_SCRATCH = 65536
_MOST_BUFFERS = 256  # of one send
_MOST_BYTES = 1 << 20
_MOST_RECEIVED = 1 << 20  # by one call


class ByteStream(Protocol):
    """A connected stream socket. Raises ConnectionLost where it has failed."""

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        """Send the ``buffers``, ``size`` bytes in all; returns how many left, -1: not now."""
        ...

    def receive(self, buffers: list[memoryview]) -> int:
        """Fill one or two buffers in order; returns the bytes, 0 at the end, -1: not now."""
        ...

    def fileno(self) -> int: ...

    def disconnect(self, discard: bool = False) -> None:
        """From any thread: ``receive`` finds the end. ``discard``: what the peer has not taken yet
        does not reach it any more, once the stream is closed."""
        ...

    def close(self) -> None: ...

    def describe(self) -> dict[str, object]: ...


class PduReceiver:
    """Call ``buffers``, fill them in order, say how much with ``received``; again.

    ``place(message, at)``: asked once the header of a PDU with data is there (it starts at
    ``message[at]``): a writable view of exactly its DataSegmentLength, NOWHERE to drop the data,
    or None to have it in the message. ``deliver(message, placed)``: a PDU is complete, its digests
    are right. The BHS starts the message; AHS and data follow it without digests, unless the data
    was ``placed``. It stays readable until the next ``buffers``. What either raises comes out.

    Raises RemoteProtocolError for whatever the standard forbids; then the stream is of no use.
    """

    def __init__(
        self,
        place: Callable[[memoryview, int], memoryview | None],
        deliver: Callable[[memoryview, bool], None],
    ) -> None:
        self._place = place
        self._deliver = deliver
        self._delivered = 0  # PDUs, by ``receive_from``
        self._most = LOGIN_DATA
        self._header_digest = 0  # its length: 0 or 4
        self._data_digest = 0
        self._stepwise = True
        self._staging = memoryview(bytearray(_LARGEST_HEADER + LOGIN_DATA + 8))
        self._start = 0
        self._end = 0
        self._need = bhs.BHS_LENGTH  # bytes from ``_start`` on, before anything can be done
        # The PDU whose data is being placed; ``_head`` is None when there is none.
        self._head: memoryview | None = None
        self._where = NOWHERE
        self._at = 0
        self._rest = 0
        self._pad = 0
        self._crc = 0
        self._direct = 0  # bytes offered outside of the staging memory
        self._scratch = NOWHERE

    def full_feature_phase(self, most_data: int, header_digest: bool, data_digest: bool) -> None:
        """Login is complete: from the next PDU on ``most_data`` bytes of data and these digests.

        Until then ``received`` stops behind each PDU: the one behind it may follow other rules.
        ``parse`` goes on with what has come already.
        """
        self._most = most_data
        self._header_digest = _DIGEST.size if header_digest else 0
        self._data_digest = _DIGEST.size if data_digest else 0
        self._stepwise = False
        held = self._staging[self._start : self._end]
        size = max(_LARGEST_HEADER + most_data + 8, _READ_AHEAD)
        self._staging = memoryview(bytearray(size))
        self._staging[: len(held)] = held
        self._start, self._end = 0, len(held)

    @property
    def staged(self) -> int:
        """Bytes that have come and are not used yet."""
        return self._end - self._start

    def receive_from(self, stream: ByteStream, peer: str) -> int:
        """Take what is there, until something was delivered: messages stay readable until the next
        call. Returns how many PDUs, and at least 1 when any bytes have come.

        Raises ConnectionLost at the stream's end, too."""
        self._delivered = 0
        if self._end > self._start:
            self.parse()
        total = 0
        while not self._delivered and total < _MOST_RECEIVED:
            count = stream.receive(self.buffers())
            if count < 0:
                break
            if not count:
                raise ConnectionLost(f"{peer} closed the connection")
            total += count
            self.received(count)
        return self._delivered or (1 if total else 0)

    def buffers(self) -> list[memoryview]:
        """Where the next bytes must land: one or two writable views, in order."""
        staging, start, end = self._staging, self._start, self._end
        if start == end:
            self._start = self._end = start = end = 0
        elif start and len(staging) - start < max(self._need, _READ_AHEAD):
            staging[: end - start] = staging[start:end]
            self._start, self._end = 0, end - start
            end -= start
        if self._head is None or not self._rest:
            self._direct = 0
            # No more than is known to be wanted, or may be small: large data lands elsewhere.
            limit = max(self._start + self._need, end + _READ_AHEAD)
            return [staging[end:limit]]
        ahead = _SHORT_AHEAD if self._rest >= _READ_AHEAD else _READ_AHEAD
        if self._where is NOWHERE:
            if self._scratch is NOWHERE:
                self._scratch = memoryview(bytearray(_SCRATCH))
            direct = self._scratch[: self._rest]
        else:
            direct = self._where[self._at : self._at + self._rest]
        self._direct = len(direct)
        return [direct, staging[end : end + ahead]]

    def received(self, count: int) -> None:
        """``count`` bytes (at least 1) are in what ``buffers`` returned."""
        direct = min(count, self._direct)
        if direct:
            if self._data_digest:
                into = self._scratch if self._where is NOWHERE else self._where[self._at :]
                self._crc = crc32c(into[:direct], self._crc)
            self._at += direct
            self._rest -= direct
            self._direct = 0
        self._end += count - direct
        self.parse()

    def parse(self) -> None:
        """Deliver what is complete."""
        while self._step() and not self._stepwise:
            pass

    def _step(self) -> bool:
        """One PDU further; False when more bytes are needed."""
        if self._head is not None:
            return self._finish_placed(self._head)
        staging, start = self._staging, self._start
        available = self._end - start
        self._need = bhs.BHS_LENGTH
        if available < bhs.BHS_LENGTH:
            return False
        (lengths,) = bhs.LENGTHS.unpack_from(staging, start + bhs.LENGTHS_OFFSET)
        header = bhs.BHS_LENGTH + (lengths >> 24) * 4
        size = lengths & 0xFFFFFF
        head = header + self._header_digest
        if self._header_digest:
            # Before anything in it is believed, its lengths included.
            if available < head:
                self._need = head
                return False
            (digest,) = _DIGEST.unpack_from(staging, start + header)
            if crc32c(staging[start : start + header]) != digest:
                raise RemoteProtocolError("iSCSI", "header digest error")
        if size > self._most:
            raise RemoteProtocolError(
                "iSCSI", f"PDU with {size} bytes of data; {self._most} at most were declared"
            )
        if available < head:
            self._need = head
            return False
        where = self._place(staging, start) if size else None
        if where is not None:
            self._head = memoryview(bytearray(staging[start : start + bhs.BHS_LENGTH]))
            self._where, self._at, self._rest = where, 0, size
            self._pad, self._crc = -size & 3, 0
            self._start = start + head
            return self._finish_placed(self._head)
        padded = (size + 3) & ~3
        total = head + padded + (self._data_digest if size else 0)
        if available < total:
            self._need = total
            return False
        data = start + head
        if size and self._data_digest:
            (digest,) = _DIGEST.unpack_from(staging, data + padded)
            if crc32c(staging[data : data + padded]) != digest:
                raise RemoteProtocolError("iSCSI", "data digest error")
        at = start + self._header_digest
        if at != start:
            staging[at : at + header] = staging[start : start + header]
        self._start = start + total
        self._delivered += 1
        self._deliver(staging[at : data + padded], False)
        return True

    def _finish_placed(self, head: memoryview) -> bool:
        """Place what is staged of the data; deliver when it is whole."""
        staging, start = self._staging, self._start
        count = min(self._rest, self._end - start)
        if count:
            piece = staging[start : start + count]
            if self._data_digest:
                self._crc = crc32c(piece, self._crc)
            if self._where is not NOWHERE:
                self._where[self._at : self._at + count] = piece
            self._at += count
            self._rest -= count
            self._start = start = start + count
        tail = self._pad + self._data_digest
        self._need = tail
        if self._rest or self._end - start < tail:
            return False
        if self._data_digest:
            pad = staging[start : start + self._pad]
            (digest,) = _DIGEST.unpack_from(staging, start + self._pad)
            if crc32c(pad, self._crc) != digest:
                raise RemoteProtocolError("iSCSI", "data digest error")
        self._start = start + tail
        self._head = None
        self._where = NOWHERE
        self._need = bhs.BHS_LENGTH
        self._delivered += 1
        self._deliver(head, True)
        return True

    def divert(self) -> None:
        """Drop the rest of the data that is being placed: on return its buffer is not touched."""
        self._where = NOWHERE


class OutPdu:
    """A PDU on its way out. ``owner``: whose memory is among the buffers, None: nobody's.
    ``token``: comes back when it has left, unless it is None."""

    __slots__ = ("buffers", "owner", "size", "token")

    def __init__(
        self,
        buffers: list[bytes | memoryview],
        size: int,
        owner: object = None,
        token: object = None,
    ) -> None:
        self.buffers = buffers
        self.size = size
        self.owner = owner
        self.token = token


class PduSender:
    """What goes out. ``queued`` is appended to by ``add``, from any thread; ``flush`` sends it.

    ``sent``: the tokens of what has left, to be taken by the owner. ``blocked``: the socket is
    full, and something waits for it.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._lock = Lock()
        self._wire: deque[OutPdu] = deque()
        self.queued: deque[OutPdu] = deque()
        self.sent: deque[object] = deque()
        self.blocked = False
        self._sending = False
        self._header_digest = False
        self._data_digest = False

    def full_feature_phase(self, header_digest: bool, data_digest: bool) -> None:
        """From the next ``frame`` on."""
        self._header_digest = header_digest
        self._data_digest = data_digest

    def frame(
        self, header: bytes, data: memoryview | None, owner: object = None, token: object = None
    ) -> OutPdu:
        """Lay out a PDU: ``header`` is its BHS, lengths included, and AHS. Data that nobody owns is
        copied."""
        if self._header_digest:
            header += _DIGEST.pack(crc32c(header))
        if not data:
            return OutPdu([header], len(header), None, token)
        tail = _PADS[-len(data) & 3]
        if self._data_digest:
            tail += _DIGEST.pack(crc32c(tail, crc32c(data)))
        size = len(header) + len(data) + len(tail)
        if owner is None:
            return OutPdu([b"".join((header, data, tail))], size, None, token)
        buffers: list[bytes | memoryview] = [header, data]
        if tail:
            buffers.append(tail)
        return OutPdu(buffers, size, owner, token)

    def flush(self) -> bool:
        """Send what can be sent. False: another thread is at it, and takes along what was queued
        meanwhile."""
        while self.queued:
            if not self._lock.acquire(blocking=False):
                if self._sending:  # and will look at the queue once more
                    return False
                self._lock.acquire()  # for something else, which takes a moment
            try:
                self._send()
            finally:
                self._lock.release()
        return True

    def resume(self) -> None:
        """The socket may take more again, of what waits for that."""
        if self.blocked:
            with self._lock:
                self._send()
        self.flush()

    def _send(self) -> None:
        """Under the lock. Its caller looks at ``queued`` again when the lock is free."""
        wire, queued = self._wire, self.queued
        self._sending = True
        try:
            while True:
                while queued:
                    wire.append(queued.popleft())
                if not wire:
                    self.blocked = False
                    return
                buffers: list[bytes | memoryview] = []
                size = 0
                for pdu in wire:
                    buffers += pdu.buffers
                    size += pdu.size
                    if len(buffers) > _MOST_BUFFERS or size > _MOST_BYTES:
                        break
                left = self._stream.send(buffers, size)
                if left < 0:
                    self.blocked = True
                    return
                self._took(left)
        except TransportError:
            wire.clear()  # nothing of it will leave; nobody's memory is kept
            raise
        finally:
            self._sending = False

    def _took(self, count: int) -> None:
        """``count`` bytes have left."""
        wire = self._wire
        while wire and wire[0].size <= count:
            pdu = wire.popleft()
            count -= pdu.size
            if pdu.token is not None:
                self.sent.append(pdu.token)
        if not count:
            return
        pdu = wire[0]
        pdu.size -= count
        while len(pdu.buffers[0]) <= count:
            count -= len(pdu.buffers.pop(0))
        if count:
            pdu.buffers[0] = memoryview(pdu.buffers[0])[count:]

    def settle(self) -> None:
        """On return ``sent`` tells of all that has left, by other threads, too."""
        with self._lock:
            pass

    def disown(self, owner: object) -> None:
        """On return the memory of ``owner`` is not touched: what still has to leave is copied."""
        with self._lock:
            for pdus in (self._wire, self.queued):
                for pdu in list(pdus):
                    if pdu.owner is owner:
                        pdu.buffers = [b"".join(pdu.buffers)]
                        pdu.owner = None

    def close(self) -> None:
        """Nothing is sent any more, and nothing kept; the stream is closed."""
        with self._lock:
            self._stream.close()
            self._wire.clear()
            self.queued.clear()
            self.blocked = False
