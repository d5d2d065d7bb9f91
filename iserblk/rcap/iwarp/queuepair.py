"""A queue pair over software iWARP: what moves bytes, and how a connection ends.

The protocol is in ``receive`` and ``transmit``. This module moves bytes between them and the LLP
(``llp``): mostly a non-blocking TCP socket, after MPA start-up (``mpa``).

Endings. When the peer breaks a rule, a Terminate is sent behind the frames that were begun, the
sending side of the connection is closed, and ``progress`` raises. Nothing is retried here.
"""

from __future__ import annotations

import socket
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from iserblk.errors import (
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    without_frames,
)
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa
from iserblk.rcap.iwarp.llp import Llp, MpaLlp
from iserblk.rcap.iwarp.reads import RTR_TOKEN
from iserblk.rcap.iwarp.receive import ReceiveCore
from iserblk.rcap.iwarp.transmit import SendCore, SlotFrame
from iserblk.rcap.stags import StagTable
from iserblk.sockets.wire import WOULD_BLOCK

DEFAULT_RECEIVE_SIZE: Final = 8268  # iSER header 28, BHS 48, 8192 of data: what LIO and ib_iser use
# One call of ``progress`` reads this many times at most, and again only after a large read.
READ_ROUNDS: Final = 16
LARGE_READ: Final = 16 * 1024
# Nor after so many segments: of small ones it is not the bytes that cost time.
MOST_SEGMENTS: Final = 8192
EMSS_PERIOD: Final = 65536  # bytes sent after which the LLP's segment size is looked up again
TRIM_S: Final = 10.0  # staging that was not in use for so long gives its memory back
SMALL_HEADERS: Final = 8192  # bytes of header slots that are allocated at once
# Bytes that are sent in one turn: a peer that takes all at once, and has asked for much (IRD Reads
# of a MiB each), does not keep the event loop from others.
TURN_BYTES: Final = 8 << 20
MOST_REQUESTS: Final = 1 << 16  # that wait: far more than the tasks of a connection have
INLINE_SIZE: Final = 16384  # a copy of 1 µs saves a round trip: two thirds more 16 KiB writes


class IwarpQueuePair:
    """``iserblk.rcap.seam.QueuePair`` over a connected socket, after the start-up of its LLP.

    Owns ``sock`` from construction on. ``initiator``: we sent the MPA Request; a responder sends
    nothing until the first FPDU has come. ``emss`` overrides the TCP segment size, in bytes, that
    the kernel reports. ``segments``: how many TCP segments an FPDU with CRC may fill; 0: one, until
    the peer declares that it takes more (``allow_ulpdu``). ``llp``: what lies below DDP; None: MPA
    on TCP.

    Memory: 512 KiB of staging, of which only pages cost memory that were used in the last
    ``TRIM_S`` seconds of traffic, and one buffer of ``receive_size`` bytes while a message arrives
    in several segments.
    """

    iwarp = True
    inline_size = INLINE_SIZE
    plain_headers = True
    can_receive_invalidate = True
    solicits = True  # RFC 5040 section 5.3 leaves no receiver the choice

    def __init__(
        self,
        sock: socket.socket,
        params: mpa.MpaParameters,
        *,
        initiator: bool,
        receive_size: int = DEFAULT_RECEIVE_SIZE,
        emss: int | None = None,
        segments: int = 0,
        llp: Llp | None = None,
    ) -> None:
        self._sock = sock
        self._params = params
        lower = MpaLlp(sock, params) if llp is None else llp
        self._llp = lower
        self.provider = lower.provider
        self._initiator = initiator
        self.ird = params.ird
        self.ord = params.ord
        self.peer_private_data = params.private_data
        self.receive_size = receive_size
        self.max_ulpdu = ddp.MAX_ULPDU if params.crc and not segments else 0  # for TCP alone
        follows = params.crc or params.markers or lower.records
        self._emss_fixed = emss is not None or not follows
        self._emss = lower.emss() if emss is None else emss
        self._since_emss = 0  # bytes sent since the look-up
        self._stags = StagTable()
        self._rx = ReceiveCore(
            self._stags,
            crc=params.crc,
            ird=params.ird,
            receive_size=receive_size,
            settle=self._reads_finished,
            rtr=mpa.RTR_NONE if initiator else params.rtr,
        )
        self._tx = SendCore(
            crc=params.crc,
            markers=params.markers,
            emss=self._emss,
            ord=max(params.ord, 1) if params.rtr == mpa.RTR_READ else params.ord,
            reads=self._rx.reads,
            responses=self._rx.responses,
            opened=initiator or lower.symmetric,
            segments=max(segments, 1),
            records=lower.records,
        )
        self._wire = lower.wire
        self._leftover = params.leftover
        self._records = lower.records
        self._trim_at = 0.0  # on the clock of ``progress``
        self._pending = False  # the LLP has more, or an error, that no descriptor shows
        self._blocked = False  # the kernel takes no more for now
        self._closed = False
        self._disconnected = False
        self._error: TransportError | None = None  # ``progress`` raises it
        self._broken: TransportError | None = None  # sending failed; ``progress`` finds out why
        self._over = False  # nothing is sent any more: closed, or one of both errors
        if initiator and params.rtr:
            self.post([_rtr_request(params.rtr)])

    def describe(self) -> dict[str, object]:
        return {
            "provider": self.provider,
            **self._llp.describe(),
            "ird": self.ird,
            "ord": self.ord,
            "emss": self._emss,
            "mulpdu": self._tx.mulpdu,
            "receive_size": self.receive_size,
            "receive_invalidate": self.can_receive_invalidate,
        }

    def allow_ulpdu(self, size: int) -> None:
        if self.max_ulpdu and not self._params.markers:
            self._emss_fixed = True  # the segment size no longer matters
            self._tx.allow(size)
            self._wire.end_of_record = False

    def limit_reads(self, ird: int, ord: int) -> None:
        if ird > self.ird or ord > self.ord:
            raise LocalProtocolError(f"IRD {ird} and ORD {ord} are more than was agreed on")
        self.ird = ird
        self.ord = ord
        self._rx.limit_reads(ird)
        self._tx.limit_reads(ord)

    # --- memory ---

    def alloc_headers(self, count: int, size: int) -> list[seam.HeaderSlot]:
        return header_slots(count, size)

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """See the seam. The Base Offset is always 0. Raises ConnectionLost after ``close``."""
        if self._closed:
            raise ConnectionLost("the connection is closed")
        return self._stags.advertise(buffer, rights), 0

    def retire(self, stag: int) -> bool:
        region = self._stags.owned(stag)
        valid = region.valid
        if valid:
            region.valid = False
            self._rx.divert(region)
        # The STag is invalid, so no new Read Response can use the memory.
        if self._rx.reads_received != self._tx.reads_finished:
            self._tx.detach(region)
        self._stags.release(region)
        return valid

    # --- work ---

    def post_receive(self, count: int) -> None:
        self._rx.posted += count

    def post(self, requests: list[seam.WorkRequest]) -> None:
        """See the seam. RDMA Reads beyond the ORD wait; so do all requests posted after them."""
        if self._over:
            raise ConnectionLost(f"the connection has ended: {self._reason()}")
        if not self.ord:
            for request in requests:
                if request.opcode == seam.RDMA_READ and request.token is not RTR_TOKEN:
                    raise LocalProtocolError("an RDMA Read, but the ORD of the connection is 0")
        self._tx.requests.extend(requests)
        if not self._push():
            raise ConnectionLost(f"the connection has ended: {self._reason()}")

    def progress(self, now: float) -> list[seam.Completion]:
        if self._error is None and not self._closed:
            if now >= self._trim_at:
                self._trim_at = now + TRIM_S
                self._rx.trim()
            error = self._receive()
            tx = self._tx
            if self._rx.opened:
                tx.opened = True
            if error is not None:
                self._end(error)
            elif not self._over and (
                tx.batch or tx.requests or self._rx.responses or self._blocked
            ):
                self._push()
        completions = self._rx.completions
        if completions:
            self._rx.completions = []
        if self._tx.completions:
            completions = self._tx.completions + completions
            self._tx.completions = []
        if completions:
            return completions
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ConnectionLost("the connection is closed")
        return []

    def fileno(self) -> int:
        return self._sock.fileno()

    def wants_write(self) -> bool:
        return self._blocked

    def next_deadline(self) -> float | None:
        """0.0, which means at once, while completions or an error wait to be picked up."""
        if self._tx.completions or self._rx.completions or self._leftover or self._pending:
            return 0.0
        return None if self._error is None else 0.0

    def disconnect(self) -> None:
        """See the seam. The LLP is shut down, and ``progress`` finds the end of the stream.

        At an initiator, ``close`` then discards bytes that the target has not acknowledged. The LLP
        would go on sending them for minutes, and an old write could arrive after a newer write.
        """
        self._disconnected = True
        if not self._closed:
            if self._initiator:
                self._llp.discard_at_close()
            self._llp.sever()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = self._over = True
        self._rx.drop()
        if self._error is not None:
            self._push()  # what is left of a Terminate
        self._tx.abort(b"")
        self._stags.clear()
        self._blocked = False
        self._llp.close()

    def _reason(self) -> str:
        return str(self._error or self._broken or "it was closed")

    # --- receiving ---

    def _receive(self) -> TransportError | None:
        """Read what has come, until something completes. Returns why the connection has ended, if
        it has."""
        rx = self._rx
        if rx.completions:
            return None
        try:
            if self._leftover:
                self._take_leftover()
                if rx.completions:
                    return None
            self._pending = False
            rx.segments = 0
            for _ in range(READ_ROUNDS):
                buffers = rx.get_buffers()
                count = self._wire.receive(buffers)
                if count <= 0:
                    return None if count == WOULD_BLOCK else ConnectionLost(self._end_words())
                rx.received(count)
                if self._records:
                    self._pending = self._llp.pending()
                if rx.completions or count < LARGE_READ or rx.segments > MOST_SEGMENTS:
                    return None
        except RemoteProtocolError as error:
            return without_frames(error)  # which would keep the caller's frames
        except OSError as error:
            return ConnectionLost(f"the connection broke: {error.strerror}")
        return None

    def _end_words(self) -> str:
        if self._disconnected:
            return "the connection was ended by this side"
        if self._rx.partial():
            return "the peer closed the connection in the middle of a message"
        return "the peer closed the connection"

    def _take_leftover(self) -> None:
        """Take in the FPDUs that came together with the MPA Reply."""
        while self._leftover:
            buffer = self._rx.get_buffers()[0]
            count = min(len(buffer), len(self._leftover))
            buffer[:count] = self._leftover[:count]
            self._leftover = self._leftover[count:]
            self._rx.received(count)
            if self._rx.completions:
                return

    # --- sending ---

    def _push(self) -> bool:
        """Give batches to the kernel until it takes no more or none is left, TURN_BYTES at most.
        False: sending has failed."""
        tx, wire = self._tx, self._wire
        end = TURN_BYTES
        try:
            more = tx.build()
            while more:
                count = wire.send(tx.batch, tx.batch_left)
                if count == WOULD_BLOCK:
                    self._blocked = True
                    if len(tx.requests) > MOST_REQUESTS:
                        self._give_up("the peer answers, and takes nothing of what is sent")
                        return False
                    return True
                waits = tx.sent(count)
                self._since_emss += count
                if self._since_emss >= EMSS_PERIOD and not self._emss_fixed:
                    self._follow_emss()
                end -= count
                if end <= 0:  # the socket is writable at once: then comes the next turn
                    self._blocked = True
                    return True
                more = waits and tx.build()
            self._blocked = False
        except OSError as error:
            self._give_up(f"the connection broke: {error.strerror}")
            return False
        return True

    def _give_up(self, why: str) -> None:
        """Send nothing more. Bytes before the end are still to be read; ``progress`` then finds the
        end itself."""
        self._blocked = False
        self._over = True
        self._broken = ConnectionLost(why)
        self._tx.abort(b"")
        self._llp.sever()

    def _follow_emss(self) -> None:
        """Ask the LLP for its segment size, which changes with the path, for the next batches."""
        self._since_emss = 0
        emss = self._llp.emss()
        if emss != self._emss:
            self._emss = emss
            self._tx.set_emss(emss)

    def _reads_finished(self) -> int:
        return self._tx.reads_finished

    def _end(self, error: TransportError) -> None:
        """Send the Terminate that belongs to ``error``, and nothing after it."""
        self._error = error
        self._over = True
        self._tx.abort(self._rx.terminate)
        self._push()
        if not self._blocked:
            self._llp.finish()


def header_slots(count: int, size: int) -> list[seam.HeaderSlot]:
    """See ``QueuePair.alloc_headers``. They belong to no connection: a queue pair that is still to
    come may use them."""
    step = SlotFrame.room(size)
    total = max(count, 1) * step
    # Of a mapping, pages that no message has filled cost nothing; but a process may have only so
    # many mappings (vm.max_map_count).
    small = total <= SMALL_HEADERS
    memory = memoryview(bytearray(total) if small else mmap(-1, total, MAP_PRIVATE | MAP_ANONYMOUS))
    places = range(0, count * step, step)
    return [SlotFrame(size, memory[at : at + step]).slot(index) for index, at in enumerate(places)]


def _rtr_request(kind: int) -> seam.WorkRequest:
    """The empty message that opens a peer-to-peer connection (RFC 6581 section 9.2)."""
    opcodes = {
        mpa.RTR_SEND: seam.SEND,
        mpa.RTR_WRITE: seam.RDMA_WRITE,
        mpa.RTR_READ: seam.RDMA_READ,
    }
    request = seam.WorkRequest(opcodes[kind], RTR_TOKEN)
    request.stag = 1  # no peer checks it, but some devices refuse 0
    return request
