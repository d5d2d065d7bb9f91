"""The receive side of an iWARP stream: bytes in, placement and completions out. No I/O, no locks.

Bytes are received in bulk into one staging buffer. Each complete FPDU is verified there, the CRC
before anything else (RFC 5044 section 6), and then placed. Tagged payload is copied once, into the
advertised memory. A Send in one segment is not copied: its completion points into staging. A Send
in several segments is assembled in a buffer. Without CRC, the rest of a large tagged segment is
received straight into its place. With CRC that would place bytes before they are verified; nor
would it be faster, because the check pulls the bytes through the cache anyway.

All bytes read here come from the network. A violation raises RemoteProtocolError. ``terminate`` is
then the payload of the Terminate Message that RFC 5040 section 7.1 demands, and the core must not
be used any more: nothing behind the bad segment is looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from mmap import MADV_DONTNEED, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Final

from iserblk.errors import RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import checks, ddp, frames, mpa, rdmap
from iserblk.rcap.iwarp.reads import RTR_TOKEN, OutstandingRead, ReadResponse
from iserblk.rcap.stags import NOTHING, Region, StagTable

STAGING_SIZE: Final = 512 * 1024
MIN_ROOM: Final = 128 * 1024  # with less room behind the staged bytes, these move to the front
KEPT_STAGING: Final = 16 * 1024  # bytes of staging that ``trim`` keeps in any case
DIRECT_MIN: Final = 16 * 1024  # a shorter rest is cheaper to copy than to receive separately

# Control words of the segments that make up nearly all traffic, compared as a whole.
_WRITE_LAST: Final = ddp.TAGGED | ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.WRITE
_LAST: Final = ddp.LAST
_SEND_LAST: Final = ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.SEND
_SEND_SE_INVALIDATE_LAST: Final = ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.SEND_SE_INVALIDATE

_TAGGED_ULPDU: Final = ddp.TAGGED_SIZE - ddp.LENGTH_SIZE
_UNTAGGED_ULPDU: Final = ddp.UNTAGGED_SIZE - ddp.LENGTH_SIZE

# Bound once, as the methods in ``ddp``.
_Look = tuple[int, int, int, int, int, bool]
_look: Final[Callable[[mmap, int, int, bool], _Look]] = frames.look
_place: Final[Callable[[memoryview, int, mmap, int, int], None]] = frames.place


class Assembly:
    """A Send whose last segment has not come. ``kind``: opcode and Invalidate STag, the same in all
    its segments. ``size``: bytes that have come."""

    __slots__ = ("data", "kind", "size")

    def __init__(self, room: int, kind: tuple[int, int]) -> None:
        self.data = bytearray(room)
        self.kind = kind
        self.size = 0


class ReceiveCore:
    """Parses one stream. ``get_buffers`` says where the next bytes go; ``received`` parses them.

    ``completions``: messages and RDMA Reads that are complete; their ``data`` is readable until the
    next ``get_buffers``. ``opened``: at least one FPDU was valid for MPA; from then on a responder
    may send (RFC 5044 section 7.1.2). ``posted``: receives posted in total, set by the owner.
    ``segments``: how many were taken; the owner sets it back. ``reads``, ``responses``: the deques
    of module ``reads``. ``reads_received``: Read Requests that the peer has sent.
    """

    __slots__ = ("_assembly", "_consumed", "_crc", "_direct", "_direct_last", "_direct_read",
                 "_direct_region", "_direct_size", "_head", "_ird", "_most", "_read_msn",
                 "_receive_size", "_rtr_send", "_send_msn", "_settle", "_skip", "_staging",
                 "_stags", "_tail", "_used", "_view", "completions", "opened", "posted", "reads",
                 "reads_received", "responses", "segments", "terminate")  # fmt: skip

    def __init__(
        self,
        stags: StagTable,
        *,
        crc: bool,
        ird: int,
        receive_size: int,
        settle: Callable[[], int],
        rtr: int = mpa.RTR_NONE,
        staging_size: int = STAGING_SIZE,
    ) -> None:
        """``settle``: returns how many of the Read Responses that the peer asked for have left.
        ``rtr``: at a responder, the RTR kinds that may come. Sizes are bytes."""
        self._stags = stags
        self._crc = crc
        self._ird = ird
        self._receive_size = receive_size
        self._settle = settle
        # Unused pages cost no memory: a peer that only connects uses one or two.
        self._staging = mmap(
            -1, max(staging_size, MIN_ROOM + ddp.MAX_FPDU), MAP_PRIVATE | MAP_ANONYMOUS
        )
        self._view = memoryview(self._staging)
        self._head = 0  # staging[_head:_tail] was received and is not parsed yet
        self._tail = 0
        self._most = 0  # bytes of staging that were in use since the last ``trim``
        self._used = 0  # bytes of staging that may have memory
        self.completions: list[seam.Completion] = []
        self.opened = False
        self.segments = 0
        self.terminate = b""
        self.posted = 0
        self._consumed = 0  # receives that messages have used
        self._send_msn = 1
        self._read_msn = 1
        self._rtr_send = bool(rtr & mpa.RTR_SEND)
        # A Send of several segments: its buffer, the next MO, what all its segments must share.
        self._assembly: Assembly | None = None
        self.responses: deque[ReadResponse] = deque()
        self.reads: deque[OutstandingRead] = deque()
        self.reads_received = 0
        # Direct placement: the rest of the payload's place, its owner, bytes of the trailer.
        self._direct = NOTHING
        self._direct_region: Region | None = None
        self._direct_read: OutstandingRead | None = None
        self._direct_size = 0
        self._direct_last = False
        self._skip = 0

    def limit_reads(self, ird: int) -> None:
        """Refuse a Read Request when ``ird`` others have no response yet."""
        self._ird = ird

    # --- bytes in ---

    def get_buffers(self) -> list[memoryview]:
        """Where to receive the next bytes: one or two buffers, in order. The ``data`` of earlier
        completions must not be read any more."""
        if self._head == self._tail:
            self._head = self._tail = 0
            if self._direct:
                return [self._direct, self._view]
            return [self._view]
        if len(self._staging) - self._tail < MIN_ROOM:
            rest = self._tail - self._head
            self._view[:rest] = self._view[self._head : self._tail]
            self._head, self._tail = 0, rest
        return [self._view[self._tail :]]

    def received(self, count: int) -> None:
        """Parse the ``count`` bytes that were put into the buffers. Raises RemoteProtocolError."""
        if self._direct:
            direct = min(count, len(self._direct))
            self._direct = self._direct[direct:]
            count -= direct
        self._tail = tail = self._tail + count
        if tail > self._most:  # noqa: PLR1730 (a call of ``max`` takes longer)
            self._most = tail
        if not self._skip or self._finish_direct():
            self._parse()

    def partial(self) -> bool:
        """Whether an FPDU has begun to arrive and is not complete."""
        return self._tail != self._head or self._skip != 0

    def trim(self) -> None:
        """Call it now and then: give back the memory of staging that was not in use since the last
        call. What is staged, and the ``data`` of completions, stays as it is."""
        most = self._most
        holds = self._tail != self._head or self.completions
        self._most = self._tail if holds else 0
        used = max(self._used, most)
        keep = (max(most, KEPT_STAGING) + PAGESIZE - 1) & -PAGESIZE
        if used > keep:
            self._staging.madvise(MADV_DONTNEED, keep, len(self._staging) - keep)
            used = keep
        self._used = used

    def divert(self, region: Region) -> None:
        """Place no more bytes into ``region``: the rest of a segment under way is discarded."""
        if self._direct_region is region:
            self._direct = memoryview(bytearray(len(self._direct)))
            self._direct_region = None

    def drop(self) -> None:
        """Let go of all memory of the owner. The core must not be given more bytes."""
        self._direct = NOTHING
        self._direct_region = None
        self._direct_read = None
        self.reads.clear()
        self.responses.clear()

    # --- the parser ---

    def _parse(self) -> None:
        staging = self._staging
        pos, tail = self._head, self._tail
        regions = self._stags.regions
        check = self._crc
        segments = self.segments
        while tail - pos >= ddp.UNTAGGED_SIZE:
            length, control, stag, to, mo, good = _look(staging, pos, tail, check)
            end = pos + ((length + 5) & ~3)  # where the CRC is: behind ULPDU_Length, ULPDU, pad
            if not good:
                if length < _TAGGED_ULPDU:
                    raise self._violation(pos, checks.TOO_SHORT)
                if tail >= end + ddp.CRC_SIZE:
                    raise self._violation(pos, checks.BAD_CRC)
                if not check and control & ddp.TAGGED and end - tail > DIRECT_MIN:
                    self._begin_direct(pos, length, control, stag, to)
                    return
                break
            self.opened = True
            if control | _LAST == _WRITE_LAST:
                size = length - _TAGGED_ULPDU
                if size:  # STag and TO of an empty segment are not checked, RFC 5041 5.2
                    index = stag >> 8
                    region = regions[index if index < len(regions) else 0]
                    if (
                        region.stag != stag
                        or not region.valid
                        or not region.rights & seam.REMOTE_WRITE
                        or to + size > region.length
                    ):
                        target = self._write_target(pos, stag, to, size)
                    else:
                        target = region.view
                    _place(target, to, staging, pos + ddp.TAGGED_SIZE, size)
            elif _SEND_LAST <= control <= _SEND_SE_INVALIDATE_LAST:
                self._send(pos, length, control, stag, to, mo)
            else:
                self._rare(pos, length, control, stag, to)
            pos = end + ddp.CRC_SIZE
            self._head = pos
            segments += 1
        self.segments = segments
        if tail - pos >= 2 and ddp.LENGTH.unpack_from(staging, pos)[0] < _TAGGED_ULPDU:
            raise self._violation(pos, checks.TOO_SHORT)

    def _send(
        self, pos: int, length: int, control: int, invalidate: int, qn_msn: int, mo: int
    ) -> None:
        """Take the last segment of a Send, which mostly is its only segment. ``qn_msn``: QN and MSN
        as one number."""
        size = length - _UNTAGGED_ULPDU
        msn = self._send_msn
        if (
            qn_msn != msn  # the QN of Sends is 0
            or mo
            or size <= 0
            or size > self._receive_size
            or self._consumed >= self.posted
            or self._assembly is not None
        ):
            self._segment(pos, length, control)
            return
        self._consumed += 1
        self._send_msn = (msn + 1) & ddp.MASK32
        start = pos + ddp.UNTAGGED_SIZE
        data = self._view[start : start + size]
        self._deliver(pos, control & rdmap.OPCODE_MASK, invalidate, data)

    def _segment(self, pos: int, length: int, control: int) -> None:
        """Take any other segment of a Send: of several, empty, or to be refused."""
        invalidate, qn, msn, mo = ddp.UNTAGGED_REST.unpack_from(self._staging, pos + 4)
        size = length - _UNTAGGED_ULPDU
        opcode = control & rdmap.OPCODE_MASK
        rtr = self._rtr_send and size == 0 and control & ddp.LAST
        receives = 1 if rtr else self.posted - self._consumed
        assembly = self._assembly
        expected = (self._send_msn, assembly.size if assembly is not None else 0)
        fault = checks.send_fault(size, self._receive_size, receives, (qn, msn, mo), expected)
        kind = (opcode, invalidate)
        if fault is None and assembly is not None and kind != assembly.kind:
            fault = "the segments of one Send differ in kind", rdmap.UNEXPECTED_OPCODE
        if fault is not None:
            raise self._violation(pos, fault)
        if assembly is None:
            assembly = self._assembly = Assembly(self._receive_size, kind)
        start = pos + ddp.UNTAGGED_SIZE
        assembly.data[mo : mo + size] = self._view[start : start + size]
        assembly.size = mo + size
        if not control & ddp.LAST:
            return
        data = memoryview(assembly.data)[: assembly.size]
        self._assembly = None
        self._send_msn = (msn + 1) & ddp.MASK32
        if rtr:
            self._rtr_send = False  # the RTR of the initiator: no message for the layer above
            return
        self._consumed += 1
        self._deliver(pos, opcode, invalidate, data)

    def _deliver(self, pos: int, opcode: int, invalidate: int, data: memoryview) -> None:
        if opcode & 1:  # plain Send and Send with SE
            invalidate = 0
        else:
            region = self._stags.find(invalidate)
            if region is None:
                text = f"Send with Invalidate of STag 0x{invalidate:08x}, which is not valid"
                raise self._violation(pos, (text, rdmap.CANNOT_INVALIDATE))
            region.valid = False
        self._rtr_send = False  # only the very first message can be the RTR
        self.completions.append(
            seam.Completion(seam.RECEIVE, None, data, invalidate, opcode >= rdmap.SEND_SE)
        )

    def _rare(self, pos: int, length: int, control: int, stag: int, to: int) -> None:
        """Take a segment of a rare kind: check the versions first, then go by the opcode."""
        fault = checks.version_fault(control)
        if fault is not None:
            raise self._violation(pos, fault)
        opcode = control & rdmap.OPCODE_MASK
        size = length - _TAGGED_ULPDU
        if control & ddp.TAGGED:
            if opcode == rdmap.READ_RESPONSE:
                read = self._expected_read(pos, size, control, stag, to)
                self._place(read.sink, pos, to, size)
                self._advance_read(read, size, bool(control & ddp.LAST))
                return
            if opcode == rdmap.WRITE:  # with reserved bits set
                self._place(self._write_target(pos, stag, to, size), pos, to, size)
                return
        elif length < _UNTAGGED_ULPDU:
            raise self._violation(pos, checks.TOO_SHORT)
        elif rdmap.SEND <= opcode <= rdmap.SEND_SE_INVALIDATE:
            self._segment(pos, length, control)
            return
        elif opcode == rdmap.READ_REQUEST:
            self._read_request(pos, length, control)
            return
        elif opcode == rdmap.TERMINATE:
            start = pos + ddp.UNTAGGED_SIZE
            payload = bytes(self._view[start : start + length - _UNTAGGED_ULPDU])
            words = rdmap.Terminate.unpack_untrusted(payload).words()
            raise RemoteProtocolError("RDMAP", f"the peer terminated the connection: {words}")
        raise self._violation(pos, checks.opcode_fault(control))

    def _write_target(self, pos: int, stag: int, to: int, size: int) -> memoryview:
        if not size:
            return NOTHING
        region = self._stags.find(stag)
        fault = checks.write_fault(region, stag, to, size)
        if fault is not None:
            raise self._violation(pos, fault)
        assert region is not None
        return region.view

    def _place(self, target: memoryview, pos: int, to: int, size: int) -> None:
        if size:
            _place(target, to, self._staging, pos + ddp.TAGGED_SIZE, size)

    # --- RDMA Read, both ways ---

    def _read_request(self, pos: int, length: int, control: int) -> None:
        """The peer reads from us: check all of the request, then queue the response for sending."""
        staging = self._staging
        _, qn, msn, mo = ddp.UNTAGGED_REST.unpack_from(staging, pos + 4)
        fault = checks.read_request_fault(length, control, qn, msn, self._read_msn, mo)
        if fault is None and self._too_many_reads():
            fault = f"more than {self._ird} RDMA Reads outstanding", ddp.NO_BUFFER
        if fault is not None:
            raise self._violation(pos, fault)
        sink_stag, sink_to, size, stag, to = rdmap.READ_REQUEST_HEADER.unpack_from(
            staging, pos + ddp.UNTAGGED_SIZE
        )
        source, region = NOTHING, None
        if size:  # a Read of zero bytes is not validated, RFC 5040 5.2.1
            region = self._stags.find(stag)
            fault = checks.source_fault(region, stag, to, size)
            if fault is None and sink_to + size - 1 > ddp.MAX_TO:
                fault = "a Read Request whose sink TO wraps", rdmap.TO_WRAP
            if fault is not None:
                raise self._violation(pos, fault)
            assert region is not None
            source = region.view[to : to + size]
        self._read_msn = (msn + 1) & ddp.MASK32
        self.responses.append(ReadResponse(sink_stag, sink_to, source, region))
        self.reads_received += 1

    def _too_many_reads(self) -> bool:
        # ``settle`` is called only when the IRD seems to be used up.
        return (
            self.reads_received >= self._ird and self.reads_received - self._settle() >= self._ird
        )

    def _expected_read(
        self, pos: int, size: int, control: int, stag: int, to: int
    ) -> OutstandingRead:
        read = self.reads[0] if self.reads else None
        fault = checks.response_fault(read, size, control, stag, to)
        if fault is not None:
            raise self._violation(pos, fault)
        assert read is not None
        return read

    def _advance_read(self, read: OutstandingRead, size: int, last: bool) -> None:
        read.placed += size
        if last:
            self.reads.popleft()
            read.sink = NOTHING
            if read.token is not RTR_TOKEN:
                self.completions.append(seam.Completion(seam.RDMA_READ, read.token))

    # --- direct placement, without CRC ---

    def _begin_direct(self, pos: int, length: int, control: int, stag: int, to: int) -> None:
        """Most of a large tagged segment is still to come: receive it straight into its place."""
        fault = checks.version_fault(control)
        opcode = control & rdmap.OPCODE_MASK
        if fault is None and opcode not in (rdmap.WRITE, rdmap.READ_RESPONSE):
            fault = checks.opcode_fault(control)
        if fault is not None:
            raise self._violation(pos, fault)
        self.opened = True
        size = length - _TAGGED_ULPDU
        if opcode == rdmap.WRITE:
            target = self._write_target(pos, stag, to, size)
            self._direct_region = self._stags.find(stag)
        else:
            self._direct_read = self._expected_read(pos, size, control, stag, to)
            target = self._direct_read.sink
        start = pos + ddp.TAGGED_SIZE
        have = self._tail - start
        target[to : to + have] = self._view[start : self._tail]
        self._direct = target[to + have : to + size]
        self._direct_size = size
        self._direct_last = bool(control & ddp.LAST)
        self._skip = (-(length + ddp.LENGTH_SIZE) & 3) + ddp.CRC_SIZE
        self._head = self._tail

    def _finish_direct(self) -> bool:
        """Finish a direct placement. True when the segment is complete, with its trailer."""
        if self._direct or self._tail - self._head < self._skip:
            return False
        self._head += self._skip
        self._skip = 0
        self._direct = NOTHING
        self._direct_region = None
        read, self._direct_read = self._direct_read, None
        if read is not None:
            self._advance_read(read, self._direct_size, self._direct_last)
        return True

    # --- errors ---

    def _violation(self, pos: int, fault: checks.Fault) -> RemoteProtocolError:
        """The error for the segment at ``pos``. Sets ``terminate``, made from its header."""
        _, code = fault
        length, control = ddp.LENGTH.unpack_from(self._staging, pos)[0], self._staging[pos + 2]
        size = _TAGGED_ULPDU if control & 0x80 else _UNTAGGED_ULPDU
        start = pos + ddp.LENGTH_SIZE
        header = bytes(self._view[start : min(start + size, self._tail)])
        request = b""
        if self._staging[pos + 3] & rdmap.OPCODE_MASK == rdmap.READ_REQUEST:
            start += size
            request = bytes(self._view[start : min(start + rdmap.READ_REQUEST_SIZE, self._tail)])
        self.terminate = rdmap.terminate_for(code, header, length, request)
        return checks.protocol_error(fault)
