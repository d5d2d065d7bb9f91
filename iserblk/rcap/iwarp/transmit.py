"""The send side of an iWARP stream: work requests in, buffers to send out. No I/O, no locks.

Batches. Frames (FPDUs) are made in batches: a batch is the list of buffers for one ``sendmsg``.
Nothing is framed ahead of the batch, so a peer that asks for 64 Reads of 1 MiB costs 64 small
objects. Payload is gathered from where it lies. It is copied only for peers that want markers.
Where TCP may cut frames anywhere, a batch is filled up when little of it is left: a send of only
the end of a batch costs a system call and wakes the receiver, for less than the socket would have
taken (1 MiB reads at MTU 1500: 0.8 of what TCP alone reaches, filled up 0.92). Larger batches, each
made at once, would instead keep the peer waiting while their CRCs are computed.

Frame size. Without CRC, and towards a peer that has declared it (``allow``), a frame may be as
large as its length field or the declaration allows, and TCP may cut it anywhere. Towards all other
peers a frame with CRC fits into one TCP segment (EMSS) and lies in one (RFC 5044 sections 4.5 and
5.1). Full frames are exactly as long as a segment, so TCP cuts a batch of them, sent by one system
call, where frames end. At the end of the peer's window TCP may still cut elsewhere: at a multiple
of four bytes, as long as segments are multiples of four. Frames are multiples of four as well, so
no CRC is split, which siw cannot take. Such a cut could still part a pad from its CRC; so a frame
with a pad is a batch of its own.

Order. Work requests start in the order they were posted. An RDMA Read that would exceed the ORD
waits, and so do all requests posted after it. Read Responses are sent in their own order, between
whole messages of ours; they never wait for the requests that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from iserblk.errors import LocalProtocolError
from iserblk.octets import is_flat
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, frames, rdmap
from iserblk.rcap.iwarp.markers import MarkerFramer
from iserblk.rcap.iwarp.reads import OutstandingRead, ReadResponse
from iserblk.rcap.stags import NOTHING, Region

# Bytes and buffers of one batch (IOV_MAX is 1024; a frame is up to four buffers).
BATCH_BYTES: Final = 1 << 20
BATCH_BUFFERS: Final = 1000
BATCH_LOW: Final = 1 << 19  # with fewer bytes left in a batch than these, it is filled up

_PADS: Final = (b"", b"\0", b"\0\0", b"\0\0\0")
_NO_CRC: Final = tuple(pad + bytes(ddp.CRC_SIZE) for pad in _PADS)

_TAGGED_CONTROL: Final = ddp.TAGGED | ddp.VERSION | rdmap.VERSION
_SEND_CONTROL: Final = ddp.VERSION | rdmap.VERSION | rdmap.SEND
_READ_CONTROL: Final = ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.READ_REQUEST
_READ_ULPDU: Final = ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE + rdmap.READ_REQUEST_SIZE

Buffer = bytes | memoryview

# Bound once, as the methods in ``ddp``.
_is_flat: Final[Callable[[memoryview, bool], bool]] = is_flat
_fill_send: Final[Callable[[memoryview, int, int, int, int, bool], None]] = frames.fill_send
_around_tagged: Final[Callable[[memoryview, int, int, int, bool], tuple[bytes, bytes]]] = (
    frames.around_tagged
)


class SlotFrame:
    """The memory around a HeaderSlot: DDP header, slot, pad and CRC, in one piece.

    The message is the first ``size`` bytes of the slot; ``fit`` changes ``size``. ``whole`` is the
    frame to send. When the message is shorter than the slot, pad and CRC overwrite up to seven
    bytes of the slot behind the message.
    """

    __slots__ = ("memory", "size", "whole")

    def __init__(self, size: int, memory: memoryview | None = None) -> None:
        """``memory``: ``room(size)`` writable bytes, all zero; None: allocate them."""
        room = self.room(size)
        self.memory = memoryview(bytearray(room)) if memory is None else memory
        self.size = size
        self.whole = self.memory

    @staticmethod
    def room(size: int) -> int:
        """Bytes that a frame around a slot of ``size`` bytes takes."""
        return ((ddp.UNTAGGED_SIZE + size + 3) & ~3) + ddp.CRC_SIZE

    def slot(self, index: int) -> seam.HeaderSlot:
        start = ddp.UNTAGGED_SIZE
        return seam.HeaderSlot(self.memory[start : start + self.size], self, index)

    def fit(self, size: int) -> None:
        """Set the message to the first ``size`` bytes of the slot; the pad follows behind them."""
        end = ddp.UNTAGGED_SIZE + size
        covered = (end + 3) & ~3
        self.size = size
        self.whole = self.memory[: covered + ddp.CRC_SIZE]
        self.memory[end:covered] = _PADS[covered - end]


class Limits:
    """What bounds a frame. ``emss``: bytes of a TCP segment. ``segments``: how many a frame may
    fill. ``peer_max``: bytes of the largest ULPDU that the peer takes wherever TCP cuts it; 0: it
    has not said so. ``records``: the LLP keeps frames apart, and ``emss`` is the limit of one
    without its trailer."""

    __slots__ = ("emss", "peer_max", "records", "segments")

    def __init__(self, emss: int, segments: int, peer_max: int, records: bool) -> None:
        self.emss = emss
        self.segments = segments
        self.peer_max = peer_max
        self.records = records


class SendCore:
    """Frames all that one stream sends.

    ``batch``: the buffers to send next, ``batch_left`` bytes of them unsent. ``build`` fills it
    when little is left, ``sent`` removes what has left. ``completions``: signaled requests that
    have left. ``reads_finished``: Read Responses that have left.
    """

    __slots__ = ("_alone", "_batch_size", "_crc", "_framer", "_leaving", "_leaving_ends",
                 "_limits", "_low", "_message", "_msn", "_next_request", "_offset", "_one_segment",
                 "_ord", "_position", "_read_msn", "_reads", "_response_ends", "_responses",
                 "_segment", "_sink_key", "_tagged_max", "_turn", "_untagged_max", "batch",
                 "batch_left", "completions", "opened", "reads_finished", "requests")  # fmt: skip

    def __init__(
        self,
        *,
        crc: bool,
        markers: bool,
        emss: int,
        ord: int,  # the standard's word
        reads: deque[OutstandingRead],
        responses: deque[ReadResponse],
        opened: bool,
        segments: int = 1,
        records: bool = False,
    ) -> None:
        """``emss``: bytes of a TCP segment. ``opened`` False: send nothing until it is set (a
        responder before the first FPDU). ``segments``: how many TCP segments a frame may fill until
        the peer allows more; it counts only with CRC and without markers. ``records``: the LLP
        keeps frames apart, without CRC; ``emss`` is the limit of a frame without its trailer."""
        self._crc = crc
        self._framer = MarkerFramer(crc=crc) if markers else None
        self._limits = Limits(emss, segments, 0 if crc else ddp.MAX_ULPDU, records)
        self._tagged_max = 0  # bytes of payload in one frame
        self._untagged_max = 0
        self._one_segment = 0  # bytes of payload in a frame that must have a pad
        self._batch_size = 0
        self._low = 1  # bytes of the batch, below which it is filled up
        self._segment = 0  # TCP cuts a batch after each so many bytes; 0: cuts do not matter
        self._alone = False  # the batch is a single frame, and takes no other
        self.set_emss(emss)
        self._ord = ord
        self._reads = reads
        self._responses = responses
        self.opened = opened
        self.requests: deque[seam.WorkRequest] = deque()
        self._next_request: Final[Callable[[], seam.WorkRequest]] = self.requests.popleft
        self._message: seam.WorkRequest | ReadResponse | None = None  # not all framed yet
        self._offset = 0  # bytes of it that are framed
        self._turn = False  # the last message was a request of ours: a Read Response is next
        self._msn = 1
        self._read_msn = 1
        self._sink_key = 0
        # One list for good: the queue pair looks at it.
        self.batch: Final[list[Buffer]] = []
        self.batch_left = 0
        # Where in the stream signaled requests and Read Responses end, exact to the byte: when the
        # last byte of a response arrives, the peer may send its next Read Request at once, and our
        # count must not be behind then.
        self._position = 0  # bytes that have left
        self._leaving: list[seam.Completion] = []  # in order, and where each ends
        self._leaving_ends: list[int] = []
        self._response_ends: deque[int] = deque()
        self.completions: list[seam.Completion] = []
        self.reads_finished = 0

    def set_emss(self, emss: int) -> None:
        """Follow TCP's segment size, which grows with the window and shrinks with the path."""
        limits = self._limits
        limits.emss = emss
        markers = self._framer is not None
        if limits.records:
            limits.peer_max = min(emss - ddp.LENGTH_SIZE, ddp.MAX_ULPDU)
        self._low = 1
        self._segment = 0
        if limits.peer_max and not markers:
            limit = limits.peer_max + ddp.LENGTH_SIZE
            self._batch_size = BATCH_BYTES
            self._low = BATCH_LOW
        else:
            limit = ddp.mulpdu(emss, crc=self._crc, markers=markers) + ddp.LENGTH_SIZE
            self._batch_size = emss
        # Multiples of four bytes, so that only the last frame of a message has a pad.
        self._tagged_max = (limit - ddp.TAGGED_SIZE) & ~3
        self._untagged_max = (limit - ddp.UNTAGGED_SIZE) & ~3
        self._one_segment = self._tagged_max
        if not markers and not limits.peer_max and limit + ddp.CRC_SIZE == emss:
            # A full frame fills its segment exactly: the next frame begins with the next segment.
            self._segment = emss
            self._batch_size = BATCH_BYTES
            most = (ddp.LENGTH_SIZE + ddp.MAX_ULPDU + ddp.CRC_SIZE) // emss
            more = (min(limits.segments, most) - 1) * emss
            self._one_segment = self._untagged_max
            self._tagged_max += more
            self._untagged_max += more

    @property
    def mulpdu(self) -> int:
        """Bytes of the largest ULPDU that is sent at present."""
        return self._tagged_max + ddp.TAGGED_SIZE - ddp.LENGTH_SIZE

    def allow(self, max_ulpdu: int) -> None:
        """The peer takes ULPDUs of up to ``max_ulpdu`` bytes, wherever TCP cuts them."""
        if self._crc:
            self._limits.peer_max = max_ulpdu
            self.set_emss(self._limits.emss)

    # --- the batch ---

    def build(self) -> bool:
        """Fill ``batch`` if little of it is left. False when there is nothing to send."""
        if self.batch_left >= self._low:
            return True
        if not self.opened:  # nothing may be framed, but a Terminate may be in the batch
            return bool(self.batch)
        requests, responses = self.requests, self._responses
        done = True
        while done:
            message = self._message
            if message is None:
                # Read Responses and our own requests take turns.
                ready = bool(requests) and (
                    len(self._reads) < self._ord or requests[0].opcode != seam.RDMA_READ
                )
                if responses and (self._turn or not ready):
                    self._turn = False
                    message = responses.popleft()
                elif ready:
                    self._turn = True
                    message = self._next_request()
                else:
                    break
                self._message = message
                self._offset = 0
            if isinstance(message, ReadResponse):
                done = self._tagged(
                    rdmap.READ_RESPONSE, message.sink_stag, message.sink_to, message.view
                )
                if done:
                    self._response_ends.append(self._position + self.batch_left)
            elif message.opcode <= seam.SEND_SE_INVALIDATE:
                done = self._send(message)
            elif message.opcode == seam.RDMA_WRITE:
                done = self._tagged(rdmap.WRITE, message.stag, message.to, _bytes_of(message.data))
                if done and message.signaled:
                    self._completes(message)
            else:
                done = self._read(message)
            if done:
                self._message = None
        return bool(self.batch)

    def limit_reads(self, ord: int) -> None:
        """Start an RDMA Read only while fewer than ``ord`` others are outstanding."""
        self._ord = ord

    def sent(self, count: int) -> bool:
        """Remove the first ``count`` bytes of the batch, which have left, and note what they
        complete. Whether there may be more to send: ``build`` says so."""
        left = self.batch_left - count
        self.batch_left = left
        self._position += count
        while self._response_ends and self._response_ends[0] <= self._position:
            self._response_ends.popleft()
            self.reads_finished += 1
        if self._leaving:
            self._complete()
        if left:
            batch = self.batch
            index = 0
            while count >= len(batch[index]):
                count -= len(batch[index])
                index += 1
            batch[index] = memoryview(batch[index])[count:]
            del batch[:index]
            return True
        self.batch.clear()
        return bool(self.requests or self._responses or self._message is not None)

    def _completes(self, request: seam.WorkRequest) -> None:
        """Complete the request when the last byte framed so far has left."""
        done = request.done
        if done is None or done.opcode != request.opcode or done.token is not request.token:
            done = request.done = seam.Completion(request.opcode, request.token)
        self._leaving.append(done)
        self._leaving_ends.append(self._position + self.batch_left)

    def _complete(self) -> None:
        """Complete the requests that have left: mostly all of a batch at once."""
        leaving, ends = self._leaving, self._leaving_ends
        count = len(ends)
        while count and ends[count - 1] > self._position:
            count -= 1
        self.completions += leaving[:count]
        del leaving[:count]
        del ends[:count]

    # --- messages: True when all of it is framed, False when the batch is full ---

    def _full(self, frame: int, odd: int = 0) -> bool:
        """Whether a frame of ``frame`` bytes has no room in the batch. ``odd``: bytes modulo 4 of
        its payload, not 0 if it has a pad. After False the caller must emit the frame."""
        batch = self.batch
        left = self.batch_left
        if self._segment:
            if not batch:
                self._alone = bool(odd)
                return False
            start = left % self._segment
            if odd or self._alone or (start and start + frame > self._segment):
                return True
        return bool(batch) and (
            left + frame > self._batch_size
            or len(batch) > BATCH_BUFFERS - 4
            or self._framer is not None  # one frame at a time: markers depend on all before
        )

    def _send(self, request: seam.WorkRequest) -> bool:
        slot, data, size = request.header, request.data, request.header_length
        frame = slot.frame if slot is not None else None
        if frame is not None and not isinstance(frame, SlotFrame):
            raise LocalProtocolError("this header slot belongs to another kind of queue pair")
        if (
            data
            or frame is None
            or size > self._untagged_max
            or (size & 3 and size > self._one_segment)
            or self._offset  # the rest of a Send whose first frames are made already
            or self._framer
        ):
            if not self._send_gathered(request, frame):
                return False
        else:
            if size != frame.size:
                frame.fit(size)
            whole = frame.whole
            length = len(whole)
            if self._full(length, size & 3):
                return False
            stag = request.stag if request.opcode & seam.SEND_INVALIDATE else 0
            control = ddp.LAST | _SEND_CONTROL + request.opcode
            ulpdu = size + ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE
            _fill_send(whole, ulpdu, control, stag, self._msn, self._crc)
            self.batch.append(whole)
            self.batch_left += length
        self._msn = (self._msn + 1) & ddp.MASK32
        if request.signaled:
            self._completes(request)
        return True

    def _send_gathered(self, request: seam.WorkRequest, frame: SlotFrame | None) -> bool:
        """Frame a Send of several pieces, or in several segments."""
        header = request.header_length
        start = ddp.UNTAGGED_SIZE
        head = frame.memory[start : start + header] if frame is not None else NOTHING
        data = _bytes_of(request.data)
        total = header + len(data)
        offset = self._offset
        stag = request.stag if request.opcode & seam.SEND_INVALIDATE else 0
        while True:
            size = min(total - offset, self._untagged_max)
            if size & 3 and size > self._one_segment:
                size &= ~3
            if self._full(ddp.fpdu_size(size + ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE), size & 3):
                self._offset = offset
                return False
            end = offset + size
            control = _SEND_CONTROL + request.opcode | (ddp.LAST if end == total else 0)
            ulpdu = size + ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE
            pieces: list[Buffer] = [
                ddp.UNTAGGED_HEADER.pack(ulpdu, control, stag, 0, self._msn, offset)
            ]
            if offset < header:
                pieces.append(head[offset:end])
            if end > header:
                pieces.append(data[max(0, offset - header) : end - header])
            self._emit(pieces, size)
            offset = end
            if offset == total:
                return True

    def _tagged(self, opcode: int, stag: int, to: int, data: memoryview) -> bool:
        """Frame an RDMA Write or Read Response; without data it takes one segment (RFC 5041
        section 5.2)."""
        total = len(data)
        offset = self._offset
        most = self._tagged_max
        control = _TAGGED_CONTROL | opcode
        while True:
            size = min(total - offset, most)
            if size & 3 and size > self._one_segment:
                size &= ~3
            ulpdu = size + ddp.TAGGED_SIZE - ddp.LENGTH_SIZE
            frame = ddp.fpdu_size(ulpdu)
            if self._full(frame, size & 3):
                self._offset = offset
                return False
            if total - offset > most and self._framer is None:
                offset = self._full_frames(control, stag, to, data, offset)
                continue
            end = offset + size
            if end == total:
                control |= ddp.LAST
            at = to + offset
            if at >> 64:  # the peer chose the TO; where it wraps, the peer finds the error
                at &= ddp.MAX_TO
            piece = data if size == total else data[offset:end]
            if self._framer is None:
                header, trailer = _around_tagged(piece, control, stag, at, self._crc)
                self.batch.append(header)
                if size:
                    self.batch.append(piece)
                self.batch.append(trailer)
                self.batch_left += frame
            else:
                self._emit([ddp.pack_tagged(ulpdu, control, stag, at), piece], size)
            offset = end
            if offset == total:
                return True

    def _full_frames(self, control: int, stag: int, to: int, data: memoryview, offset: int) -> int:
        """Frame as much of the message as the batch takes in frames of full length, all but its
        last frame. Returns the offset behind them. The caller has found that one frame fits.

        In one loop, because at 1,448 bytes a frame the work per frame is what a MiB costs."""
        batch = self.batch
        size = self._tagged_max
        frame = size + ddp.TAGGED_SIZE + ddp.CRC_SIZE
        count = min(
            (len(data) - 1 - offset) // size,
            max(1, (self._batch_size - self.batch_left) // frame),
            max(1, (BATCH_BUFFERS - len(batch)) // 3),
        )
        ulpdu = size + ddp.TAGGED_SIZE - ddp.LENGTH_SIZE
        crc = self._crc
        trailer = _NO_CRC[0]
        for start in range(offset, offset + count * size, size):
            at = to + start
            if at >> 64:
                at &= ddp.MAX_TO
            header = ddp.pack_tagged(ulpdu, control, stag, at)
            piece = data[start : start + size]
            if crc:
                trailer = ddp.pack_crc(ddp.crc_of(piece, ddp.crc_of(header)))
            batch.append(header)
            batch.append(piece)
            batch.append(trailer)
        self.batch_left += count * frame
        return offset + count * size

    def _read(self, request: seam.WorkRequest) -> bool:
        if self._full(ddp.fpdu_size(_READ_ULPDU)):
            return False
        # Index 0 of the STag table is never advertised: its keys name the sinks, which nothing
        # but the response to this very Read can reach.
        self._sink_key = self._sink_key % 255 + 1
        read = OutstandingRead(self._sink_key, _bytes_of(request.data), request.token)
        self._reads.append(read)
        self._emit(
            [
                ddp.UNTAGGED_HEADER.pack(
                    _READ_ULPDU, _READ_CONTROL, 0, ddp.QN_READ_REQUEST, self._read_msn, 0
                ),
                rdmap.READ_REQUEST_HEADER.pack(
                    read.stag, 0, read.length, request.stag, request.to & ddp.MAX_TO
                ),
            ],
            rdmap.READ_REQUEST_SIZE,
        )
        self._read_msn = (self._read_msn + 1) & ddp.MASK32
        return True

    def _emit(self, pieces: list[Buffer], size: int) -> None:
        """Add an FPDU to the batch: these pieces, pad and CRC. ``size``: bytes of payload in the
        pieces."""
        if self._framer is not None:
            fpdu = self._framer.frame(pieces)
            self.batch.append(fpdu)
            self.batch_left += len(fpdu)
            return
        crc, batch, left = self._crc, self.batch, self.batch_left
        value = 0
        for piece in pieces:
            if crc:
                value = ddp.crc_of(piece, value)
            batch.append(piece)
            left += len(piece)
        pad = -size & 3
        if not crc:
            batch.append(_NO_CRC[pad])
        elif pad:
            padding = _PADS[pad]
            batch.append(padding + ddp.pack_crc(ddp.crc_of(padding, value)))
        else:
            batch.append(ddp.pack_crc(value))
        self.batch_left = left + pad + ddp.CRC_SIZE

    # --- endings ---

    def detach(self, region: Region) -> None:
        """Let go of the memory of ``region``: bytes still to be sent from it are copied, and no
        others: what the batch has of other writes may be a MiB.

        The IRD bounds the work: one copy for each Read Response under way, of its range.
        """
        for response in list(self._responses):
            if response.region is region:
                response.detach()
        message = self._message
        if isinstance(message, ReadResponse) and message.region is region:
            message.detach()
        owner = region.view.obj  # that of every part of it, too
        batch = self.batch
        for index, piece in enumerate(batch):
            if isinstance(piece, memoryview) and piece.obj is owner:
                batch[index] = bytes(piece)

    def abort(self, terminate: bytes) -> None:
        """Drop all that is not framed; end the stream with this Terminate (b"": without any).

        With a Terminate, the frames of the present batch are copied and stay, so that the Terminate
        follows behind them. Without, or before ``opened``, the batch is dropped, too.
        """
        self.drop()
        if not terminate or not self.opened:
            self.batch.clear()
            self.batch_left = 0
            return
        self.batch[:] = [bytes(piece) for piece in self.batch]
        ulpdu = len(terminate) + ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE
        control = ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.TERMINATE
        header = ddp.UNTAGGED_HEADER.pack(ulpdu, control, 0, ddp.QN_TERMINATE, 1, 0)
        self._emit([header, terminate], len(terminate))
        self.opened = False

    def drop(self) -> None:
        """Forget every request and response. Only ``batch`` still refers to the owner's memory."""
        self.requests.clear()
        self._responses.clear()
        self._message = None
        self._leaving.clear()
        self._leaving_ends.clear()
        self._response_ends.clear()


def _bytes_of(data: memoryview | None) -> memoryview:
    if data is None:
        return NOTHING
    return data if _is_flat(data, False) else data.cast("B")
