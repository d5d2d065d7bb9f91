"""PDUs on a byte stream: framing, padding, digests (RFC 7143 sections 11.2, 13.1). Sans-IO.

    BHS 48 · AHS · [header digest 4] · data segment · padding to 4 · [data digest 4]

Digests are CRC32C, least significant byte first. The data digest covers the padding, and is absent
where there is no data. ``PduReceiver`` says where the next bytes must land, so that the data of a
large PDU is received straight into the buffer of its task. ``PduSender`` sends the data of a task
from the task's buffer.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final, Protocol

from iserblk.crc import crc32c
from iserblk.errors import ConnectionLost, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs

LOGIN_DATA: Final = 8192  # data bytes of one PDU, until login has declared another length
NOWHERE: Final = memoryview(b"")  # returned by ``place``: drop the data, its task has ended

_DIGEST: Final = struct.Struct("<I")
_PADS: Final = (b"", b"\0", b"\0\0", b"\0\0\0")
_LARGEST_HEADER: Final = bhs.BHS_LENGTH + 255 * 4 + _DIGEST.size
_READ_AHEAD: Final = 65536  # bytes that are received before it is known where they belong
_SHORT_AHEAD: Final = 1024  # the same behind large data: its end and the next header
_SCRATCH: Final = 65536
_MOST_BUFFERS: Final = 256  # of one send
# PDUs of one turn: with short segments they cost more than the sending of their bytes.
_MOST_SENT: Final = 1024
_MOST_BYTES_SENT: Final = 8 << 20  # in one turn
_MOST_BYTES: Final = 1 << 20
_MOST_RECEIVED: Final = 1 << 20  # by one call
_MOST_ORPHANS: Final = 1 << 12  # PDUs without an owner that wait: commands, of 1,024 slots
_MOST_COPIED: Final = 16 << 20  # bytes of them that had one


class ByteStream(Protocol):
    """A connected stream socket. ``send`` and ``receive`` raise ConnectionLost when it failed."""

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        """Send the ``buffers``, ``size`` bytes in all. Returns how many bytes left, or -1 when the
        socket takes none now."""
        ...

    def receive(self, buffers: list[memoryview]) -> int:
        """Fill one or two buffers in order. Returns the bytes received, 0 at the end of the stream,
        or -1 when there are none now."""
        ...

    def fileno(self) -> int: ...

    def disconnect(self, discard: bool = False) -> None:
        """End the stream, from any thread: ``receive`` then finds its end. ``discard``: bytes that
        the peer has not acknowledged are not sent again once the stream is closed."""
        ...

    def close(self) -> None: ...

    def describe(self) -> dict[str, object]: ...


class PduReceiver:
    """Parses received PDUs. In a loop: call ``buffers``, fill them in order, call ``received``.

    ``place(message, at)`` is called when the header of a PDU with data has come; it starts at
    ``message[at]``. It returns a writable view of exactly DataSegmentLength bytes to receive the
    data into; or NOWHERE to drop the data; or None to get the data in the message.

    ``deliver(message, placed)`` is called when a PDU is complete and its digests are right. The
    message starts with the BHS. AHS and data follow without digests, unless the data was
    ``placed``: then the message is the BHS alone. It is readable until the next ``buffers``.

    Exceptions of the callbacks are passed on. Raises RemoteProtocolError for what the standard
    forbids, and for a wrong digest; then the stream must not be used any more. After ``recover`` a
    wrong data digest loses its PDU only.
    """

    def __init__(
        self,
        place: Callable[[memoryview, int], memoryview | None],
        deliver: Callable[[memoryview, bool], None],
    ) -> None:
        self._place = place
        self._deliver = deliver
        self._discarded: Callable[[memoryview], None] | None = None
        self._delivered = 0  # PDUs delivered since ``receive_from`` was called
        self._most = LOGIN_DATA
        self._header_digest = 0  # its length: 0 or 4
        self._data_digest = 0
        self._stepwise = True
        self._staging = memoryview(bytearray(_LARGEST_HEADER + LOGIN_DATA + 8))
        self._start = 0
        self._end = 0
        self._need = bhs.BHS_LENGTH  # bytes needed from ``_start`` on for the next step
        # The PDU whose data is being placed; ``_head`` is None when there is none.
        self._head: memoryview | None = None
        self._where = NOWHERE
        self._at = 0
        self._rest = 0
        self._pad = 0
        self._crc = 0
        self._direct = 0  # bytes of the buffer offered in front of the staging memory
        self._scratch = NOWHERE

    def full_feature_phase(self, most_data: int, header_digest: bool, data_digest: bool) -> None:
        """Login is complete: the next PDU may have ``most_data`` bytes of data, and has these
        digests.

        Before this call ``received`` stops behind each PDU, because other rules may hold for the
        next PDU. ``parse`` goes on with the bytes that have come already.
        """
        self._most = most_data
        self._header_digest = _DIGEST.size if header_digest else 0
        self._data_digest = _DIGEST.size if data_digest else 0
        self._stepwise = False
        held = self._staging[self._start : self._end]
        size = max(_LARGEST_HEADER + most_data + 8, _READ_AHEAD)
        # There is room for the largest PDU, but few are staged whole: pages that no PDU has filled
        # cost no memory.
        self._staging = memoryview(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS))
        self._staging[: len(held)] = held
        self._start, self._end = 0, len(held)

    def recover(
        self,
        place: Callable[[memoryview, int], memoryview | None],
        deliver: Callable[[memoryview, bool], None],
        discarded: Callable[[memoryview], None],
    ) -> None:
        """ErrorRecoveryLevel 1 or more: use these callbacks from the next PDU on.

        ``discarded(head)`` is called in place of ``deliver`` when the data digest of a PDU is wrong
        (RFC 7143 section 7.8); ``head`` is its BHS. Bytes of it may be where ``place`` had said. A
        wrong header digest still raises: without its length the next PDU cannot be found."""
        self._place = place
        self._deliver = deliver
        self._discarded = discarded

    def take_staged(self) -> bytes:
        """Take the bytes behind the last PDU away: another protocol begins with them. No PDU comes
        any more; the memory for them would be kept as long as the connection."""
        staged = bytes(self._staging[self._start : self._end])
        self._staging = NOWHERE
        self._start = self._end = 0
        return staged

    @property
    def staged(self) -> int:
        """Bytes that were received and are not parsed yet."""
        return self._end - self._start

    def receive_from(self, stream: ByteStream, peer: str) -> int:
        """Receive until a PDU was delivered, or the stream has no more bytes now. Messages stay
        readable until the next call. Returns the number of PDUs, but at least 1 when bytes came.

        Raises as ``received``; and ConnectionLost at the end of the stream. ``peer``: its name in
        that text."""
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
            # Not too far ahead: large data is received into its own place.
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
        """Parse ``count`` bytes (at least 1) that were put into what ``buffers`` returned."""
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
        """Deliver the PDUs that are complete; before full feature phase, one PDU at most."""
        while self._step() and not self._stepwise:
            pass

    def _step(self) -> bool:
        """Go on to the end of one PDU. False when more bytes are needed."""
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
            # The header is checked before any of its fields is used, the data length included.
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
        if where is not None and not self._data_digest:
            data = start + head
            end = data + ((size + 3) & ~3)
            if end <= self._end:  # all of it has come
                if where is not NOWHERE:
                    where[:] = staging[data : data + size]
                self._start = end
                self._delivered += 1
                self._deliver(staging[start : start + bhs.BHS_LENGTH], True)
                return True
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
                self._start = start + total
                self._discard(staging[start : start + bhs.BHS_LENGTH])
                return True
        at = start + self._header_digest
        if at != start:
            staging[at : at + header] = staging[start : start + header]
        self._start = start + total
        self._delivered += 1
        self._deliver(staging[at : data + padded], False)
        return True

    def _finish_placed(self, head: memoryview) -> bool:
        """Place the data that is staged; deliver the PDU when its data is complete."""
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
        right = True
        if self._data_digest:
            pad = staging[start : start + self._pad]
            (digest,) = _DIGEST.unpack_from(staging, start + self._pad)
            right = crc32c(pad, self._crc) == digest
        self._start = start + tail
        self._head = None
        self._where = NOWHERE
        self._need = bhs.BHS_LENGTH
        if not right:
            self._discard(head)
            return True
        self._delivered += 1
        self._deliver(head, True)
        return True

    def _discard(self, head: memoryview) -> None:
        """The data digest of the PDU with this BHS is wrong."""
        if self._discarded is None:
            raise RemoteProtocolError("iSCSI", "data digest error")
        self._delivered += 1
        self._discarded(head)

    def divert(self) -> None:
        """Drop the rest of the data that is being placed: after this its buffer is not touched."""
        self._where = NOWHERE


class Rest(Protocol):
    """What follows a PDU, and is made when that has left: so a peer that takes small PDUs only, and
    does not take those, makes us hold few of them."""

    def following(self) -> list[OutPdu]:
        """The next PDUs, at least one; the last of them may have a rest, too."""
        ...


class OutPdu:
    """A PDU to send. ``owner``: the object whose memory is among the buffers; None: they are all
    copies. ``token``: added to ``PduSender.sent`` when the PDU has left, unless it is None.
    ``rest``: what of its owner is to be sent right behind it."""

    __slots__ = ("buffers", "owner", "rest", "size", "token")

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
        self.rest: Rest | None = None


class PduSender:
    """Sends PDUs. What ``frame`` returns is appended to ``queued``; ``flush`` sends it.

    ``sent``: the tokens of PDUs that have left, for the owner to pop. ``blocked``: PDUs wait until
    the socket takes more, or for the next turn. ``orphaned``: so many wait whose owner has gone,
    or that have none, that the peer cannot be one that takes what it answers.
    """

    def __init__(self, stream: ByteStream) -> None:
        self.orphaned = False
        self._copied = 0  # bytes whose owner had gone before they left, since none waited
        self._orphans = 0  # PDUs of ``_wire`` without an owner
        self._begun = False  # part of the first PDU of ``_wire`` has left
        self._stream = stream
        self._wire: deque[OutPdu] = deque()
        self.queued: deque[OutPdu] = deque()
        self.sent: deque[object] = deque()
        self.blocked = False
        self._header_digest = False
        self._data_digest = False

    def full_feature_phase(self, header_digest: bool, data_digest: bool) -> None:
        """Add these digests from the next ``frame`` on."""
        self._header_digest = header_digest
        self._data_digest = data_digest

    def frame(
        self, header: bytes, data: memoryview | None, owner: object = None, token: object = None
    ) -> OutPdu:
        """Lay out a PDU. ``header``: its BHS, lengths included, and AHS. ``data`` is copied where
        ``owner`` is None; otherwise it stays in use until the PDU has left, or until ``disown``."""
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

    def flush(self) -> None:
        """Send what can be sent. Raises ConnectionLost."""
        if self.queued:
            self._send()

    def resume(self) -> None:
        """Send on: the socket may take more again."""
        if self.blocked or self.queued:
            self._send()

    def _send(self) -> None:
        """Send until the socket is full, or for a turn."""
        wire, queued = self._wire, self.queued
        sent = 0
        end = _MOST_BYTES_SENT
        try:
            while True:
                while queued:
                    pdu = queued.popleft()
                    if pdu.owner is None:
                        self._orphans += 1
                    wire.append(pdu)
                if not wire:
                    self.blocked = False
                    self._copied = 0
                    return
                if sent > _MOST_SENT or end <= 0:
                    self.blocked = True  # the socket takes more, which its descriptor shows
                    return
                buffers: list[bytes | memoryview] = []
                size = 0
                for pdu in wire:
                    buffers += pdu.buffers
                    size += pdu.size
                    if len(buffers) > _MOST_BUFFERS or size > _MOST_BYTES or pdu.rest is not None:
                        break
                left = self._stream.send(buffers, size)
                if left < 0:
                    self.blocked = True
                    # (Honest peers answer what they have taken: so what waits belongs to what is
                    # not answered.)
                    self.orphaned = self._copied > _MOST_COPIED or self._orphans > _MOST_ORPHANS
                    return
                sent += self._took(left)
                end -= left
        except TransportError:
            wire.clear()  # none of it will leave; let go of the memory of all owners
            self._orphans = 0
            raise

    def _took(self, count: int) -> int:
        """Remove ``count`` bytes that have left. Returns how many PDUs have left whole."""
        wire = self._wire
        whole = 0
        while wire and wire[0].size <= count:
            pdu = wire.popleft()
            count -= pdu.size
            whole += 1
            if pdu.owner is None:
                self._orphans -= 1
            if pdu.token is not None:
                self.sent.append(pdu.token)
            if pdu.rest is not None:  # it was the last of what was sent at once
                following = pdu.rest.following()
                for each in following:
                    each.owner = pdu.owner
                wire.extendleft(reversed(following))
        self._begun = count > 0
        if not count:
            return whole
        pdu = wire[0]
        pdu.size -= count
        while len(pdu.buffers[0]) <= count:
            count -= len(pdu.buffers.pop(0))
        if count:
            pdu.buffers[0] = memoryview(pdu.buffers[0])[count:]
        return whole

    def take_unsent(self) -> bytes:
        """Take away what is still to be sent, for the caller to send: it counts as sent."""
        pdus = [*self._wire, *self.queued]
        self._wire.clear()
        self._orphans = 0
        self.queued.clear()
        self.blocked = False
        self.sent.extend(pdu.token for pdu in pdus if pdu.token is not None)
        return b"".join(piece for pdu in pdus for piece in pdu.buffers)

    def disown(self, owner: object) -> None:
        """On return the memory of ``owner`` is not touched: of what is still to be sent from it,
        data PDUs that have not begun to leave are dropped, as no peer waits for them any more, and
        the rest is copied."""
        begun = self._wire[0] if self._begun and self._wire else None
        for pdus in (self._wire, self.queued):
            for pdu in list(pdus):
                if pdu.owner is not owner:
                    continue
                pdu.rest = None
                if pdu is not begun and pdu.buffers[0][0] & bhs.OPCODE_MASK == bhs.DATA_OUT:
                    pdus.remove(pdu)
                    if pdu.token is not None:
                        self.sent.append(pdu.token)
                    continue
                pdu.buffers = [b"".join(pdu.buffers)]
                pdu.owner = None
                self._copied += pdu.size
                if pdus is self._wire:
                    self._orphans += 1

    def hand_over(self, owner: object, to: object) -> None:
        """What is still to be sent from memory of ``owner`` is that of ``to`` from now on."""
        for pdus in (self._wire, self.queued):
            for pdu in list(pdus):
                if pdu.owner is owner:
                    pdu.owner = to

    def close(self) -> None:
        """Close the stream and drop all PDUs."""
        self._stream.close()
        self._wire.clear()
        self.queued.clear()
        self.blocked = False
