"""Two queue pairs joined inside one process: the semantics of ``rcap.seam`` without a network.

For tests of everything above the RCaP, and the reference for the contract suite. All checks are
made as over a wire: STags, bounds, rights, receive credits, message sizes, ORD. A message is copied
when it is posted and takes effect in the receiver's ``progress``. So the two ends may belong to two
threads. ``fileno`` is a real descriptor.

Faults: while ``hold`` is True, what arrives at this end is not delivered. ``intercept`` is called
with each message that leaves this end; when it returns False, the message is lost.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock

from iserblk.errors import (
    ConnectionLost,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
    without_frames,
)
from iserblk.rcap import seam
from iserblk.rcap.iwarp import checks, rdmap
from iserblk.rcap.iwarp.reads import OutstandingRead
from iserblk.rcap.stags import NOTHING, StagTable

# Kinds of message beyond the work requests' opcodes.
READ_RESPONSE = 16
TERMINATE = 17
CLOSED = 18

_EMPTY = b""


class Message:
    """One message on its way to the peer.

    ``kind``: the opcode of a work request, or READ_RESPONSE, TERMINATE, CLOSED. ``stag``, ``to``,
    ``size``: as the opcode defines them. ``code``: (layer, error type, error code) of a Terminate.
    """

    __slots__ = ("code", "data", "kind", "size", "stag", "to")

    def __init__(self, kind: int, data: bytes = _EMPTY, stag: int = 0, to: int = 0) -> None:
        self.kind = kind
        self.data = data
        self.stag = stag
        self.to = to
        self.size = len(data)
        self.code = (0, 0, 0)


class MemoryQueuePair:
    """One end of a pair; implements ``seam.QueuePair``. ``memory_pair`` makes both ends."""

    provider = "memory"
    iwarp = False
    can_receive_invalidate = True
    max_ulpdu = 0
    inline_size = 8192
    plain_headers = True

    def __init__(
        self, *, ird: int, ord: int, private_data: bytes, receive_size: int, solicits: bool
    ) -> None:
        self.solicits = solicits
        self.ird = ird
        self.ord = ord
        self.peer_private_data = private_data
        self.receive_size = receive_size
        self.intercept: Callable[[Message], bool] | None = None
        self._hold = False
        self.peer: MemoryQueuePair | None = None
        self.inbox: deque[Message] = deque()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Also where nobody calls ``close``: unlike a socket, a number is not closed when it goes.
        self._close_bell = weakref.finalize(self, os.close, self._bell)
        self._bell_lock = Lock()  # the other end rings, too, and may belong to another thread
        self.stags = StagTable()
        self._requests: deque[seam.WorkRequest] = deque()
        self._reads: deque[OutstandingRead] = deque()
        self._left: deque[seam.Completion] = deque()  # signaled requests
        self.posted = 0
        self.consumed = 0
        self._closed = False
        self._disconnected = False
        self._error: TransportError | None = None

    def describe(self) -> dict[str, object]:
        return {
            "provider": self.provider,
            "ird": self.ird,
            "ord": self.ord,
            "receive_size": self.receive_size,
            "receive_invalidate": self.can_receive_invalidate,
        }

    @property
    def hold(self) -> bool:
        return self._hold

    @hold.setter
    def hold(self, value: bool) -> None:
        self._hold = value
        self._ring()

    def allow_ulpdu(self, size: int) -> None:
        """Does nothing: messages are not cut into segments."""

    def limit_reads(self, ird: int, ord: int) -> None:
        if ird > self.ird or ord > self.ord:
            raise LocalProtocolError(f"IRD {ird} and ORD {ord} are more than was agreed on")
        self.ird, self.ord = ird, ord

    # --- memory ---

    def alloc_headers(self, count: int, size: int) -> list[seam.HeaderSlot]:
        return [seam.HeaderSlot(memoryview(bytearray(size)), self, index) for index in range(count)]

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """See the seam. The Base Offset is always 0. Raises ConnectionLost after ``close``."""
        if self._closed:
            raise ConnectionLost("the connection is closed")
        return self.stags.advertise(buffer, rights), 0

    def retire(self, stag: int) -> bool:
        region = self.stags.owned(stag)
        valid = region.valid
        region.valid = False
        self.stags.release(region)
        return valid

    # --- work ---

    def post_receive(self, count: int) -> None:
        self.posted += count

    def post(self, requests: list[seam.WorkRequest]) -> None:
        if self._error is not None or self._disconnected or self._closed:
            raise ConnectionLost(f"the connection has ended: {self._error or 'closed'}")
        if not self.ord and any(request.opcode == seam.RDMA_READ for request in requests):
            raise LocalProtocolError("an RDMA Read, but the ORD of the connection is 0")
        self._requests.extend(requests)
        self._start()

    def progress(self, now: float) -> list[seam.Completion]:
        completions: list[seam.Completion] = []
        self._quiet()
        try:
            while self.inbox and self._error is None and not (self._hold or self._closed):
                self._take(self.inbox.popleft(), completions)
        except RemoteProtocolError as error:
            self._error = without_frames(error)  # which would keep the caller's frames
            if error.terminate is not None:
                goodbye = Message(TERMINATE)
                goodbye.code = error.terminate
                self._transmit(goodbye)
        except ConnectionLost as error:
            self._error = without_frames(error)
        if self._error is None and self._disconnected:
            self._error = ConnectionLost("the connection was ended by this side")
        if self._error is None and not self._closed:
            self._start()
        left = list(self._left)
        self._left.clear()
        completions = left + completions
        if self._error is not None:
            self._ring()  # the error, or completions before it, are still to be picked up
        if completions:
            return completions
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ConnectionLost("the connection is closed")
        return []

    def fileno(self) -> int:
        return self._bell

    def wants_write(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        return None

    def disconnect(self) -> None:
        if not (self._disconnected or self._closed):
            self._disconnected = True
            self._transmit(Message(CLOSED))
            self._ring()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._requests.clear()
        self._reads.clear()
        self.inbox.clear()
        self.stags.clear()
        self._transmit(Message(CLOSED))
        with self._bell_lock:
            self._close_bell()
            self._bell = -1

    # --- sending ---

    def _start(self) -> None:
        """Copy and send requests in order, as far as the ORD allows."""
        while self._requests:
            request = self._requests[0]
            opcode = request.opcode
            data = NOTHING if request.data is None else request.data
            if opcode == seam.RDMA_READ:
                if len(self._reads) >= self.ord:
                    return
                self._reads.append(OutstandingRead(1, data, request.token))
                message = Message(opcode, _EMPTY, request.stag, request.to)
                message.size = len(data)
            else:
                head = NOTHING
                if request.header is not None and opcode != seam.RDMA_WRITE:
                    head = request.header.view[: request.header_length]
                message = Message(opcode, bytes(head) + bytes(data), request.stag, request.to)
                if request.signaled:
                    self._left.append(seam.Completion(opcode, request.token))
                    self._ring()
            self._requests.popleft()
            self._transmit(message)

    def _transmit(self, message: Message) -> None:
        if self.intercept is not None and not self.intercept(message):
            return
        peer = self.peer
        if peer is not None and not peer._closed:
            peer.inbox.append(message)
            peer._ring()

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def _quiet(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                try:
                    os.eventfd_read(self._bell)
                except BlockingIOError:
                    return

    # --- receiving ---

    def _take(self, message: Message, completions: list[seam.Completion]) -> None:
        """Let one message take effect."""
        kind = message.kind
        fault: checks.Fault | None = None
        if kind <= seam.SEND_SE_INVALIDATE:
            fault = self._deliver(message, completions)
        elif kind == seam.RDMA_WRITE:
            if message.size:
                region = self.stags.find(message.stag)
                fault = checks.write_fault(region, message.stag, message.to, message.size)
                if fault is None and region is not None:
                    region.view[message.to : message.to + message.size] = message.data
        elif kind == seam.RDMA_READ:
            fault = self._answer(message)
        elif kind == READ_RESPONSE:
            read = self._reads.popleft()
            if message.size:
                read.sink[:] = message.data
            completions.append(seam.Completion(seam.RDMA_READ, read.token))
        elif kind == TERMINATE:
            words = rdmap.terminate_words(*message.code)
            raise RemoteProtocolError("RDMAP", f"the peer terminated the connection: {words}")
        else:
            raise ConnectionLost("the peer closed the connection")
        if fault is not None:
            raise checks.protocol_error(fault)

    def _deliver(self, message: Message, completions: list[seam.Completion]) -> checks.Fault | None:
        receives = self.posted - self.consumed
        fault = checks.send_fault(message.size, self.receive_size, receives, (0, 0, 0), (0, 0))
        if fault is not None:
            return fault
        invalidated = 0
        if message.kind & seam.SEND_INVALIDATE:
            invalidated = message.stag
            region = self.stags.find(invalidated)
            if region is None:
                text = f"Send with Invalidate of STag 0x{invalidated:08x}, which is not valid"
                return text, rdmap.CANNOT_INVALIDATE
            region.valid = False
        self.consumed += 1
        solicited = message.kind >= seam.SEND_SE
        completions.append(
            seam.Completion(seam.RECEIVE, None, memoryview(message.data), invalidated, solicited)
        )
        return None

    def _answer(self, message: Message) -> checks.Fault | None:
        data = _EMPTY
        if message.size:
            region = self.stags.find(message.stag)
            fault = checks.source_fault(region, message.stag, message.to, message.size)
            if fault is not None or region is None:
                return fault
            data = bytes(region.view[message.to : message.to + message.size])
        self._transmit(Message(READ_RESPONSE, data))
        return None


def memory_pair(
    *,
    ird: int = 64,
    ord: int = 64,
    private_data: tuple[bytes, bytes] = (b"", b""),
    receive_size: int = 8268,
    solicits: bool = True,
) -> tuple[MemoryQueuePair, MemoryQueuePair]:
    """Make two connected ends; ``ird``, ``ord`` and ``solicits`` hold for both.

    ``private_data``: what the first end and what the second end sent in connection management. Each
    end finds that of its peer in ``peer_private_data``.
    """
    depth = min(ird, ord)
    first, second = (
        MemoryQueuePair(
            ird=ird,
            ord=depth,
            private_data=said_by_peer,
            receive_size=receive_size,
            solicits=solicits,
        )
        for said_by_peer in reversed(private_data)
    )
    first.peer, second.peer = second, first
    return first, second
