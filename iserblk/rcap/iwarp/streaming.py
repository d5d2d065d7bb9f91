"""A queue pair on a TCP connection that is in streaming mode, which it leaves by MPA start-up (RFC
5044 section 7.1).

iSCSI logs in on the byte stream first (RFC 7145 section 5.1). Until ``start`` the queue pair only
takes what the layer above allocates. From then on the bytes of the connection are MPA start-up
frames, and behind these FPDUs, which an ``IwarpQueuePair`` handles.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError, TransportError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp
from iserblk.rcap.iwarp.mpa import DEFAULT_DEPTH, MpaInitiator, MpaParameters, MpaResponder
from iserblk.rcap.iwarp.queuepair import INLINE_SIZE, IwarpQueuePair, header_slots

_BUFFER = 4096  # bytes received at a time; start-up frames have 532 at most


class Stream(Protocol):
    """A connected TCP socket that another protocol uses until ``start``."""

    def send(self, buffers: list[bytes | memoryview], size: int) -> int: ...

    def receive(self, buffers: list[memoryview]) -> int: ...

    def fileno(self) -> int: ...

    def disconnect(self, discard: bool = False) -> None: ...

    def close(self) -> None: ...

    def describe(self) -> dict[str, object]: ...

    def release(self) -> socket.socket:
        """Give the socket away: the stream is closed, the socket is not."""
        ...


class StreamingQueuePair:
    """Implements ``rcap.seam.StreamingPair`` by software iWARP.

    ``stream``: the layer above sends and receives on it until ``start``; from then on it belongs to
    the queue pair, which ``close`` closes in any state. ``initiator``: this end sends the MPA
    Request. ``crc``: ask for CRCs (an initiator), or insist on them (a responder). ``ird``: RDMA
    Reads that the peer may have outstanding. ``segments``, ``receive_size``: see IwarpQueuePair.

    The private data of MPA start-up is empty both ways: what connection management tells in it, the
    text keys and Hello tell here.
    """

    provider = "iwarp"
    inline_size = INLINE_SIZE
    plain_headers = True
    can_receive_invalidate = True
    solicits = True
    iwarp = True

    def __init__(
        self,
        stream: Stream,
        *,
        initiator: bool,
        crc: bool,
        receive_size: int,
        ird: int = DEFAULT_DEPTH,
        segments: int = 0,
    ) -> None:
        self.on_started: Callable[[seam.QueuePair], None] = lambda pair: None
        self.ird = ird
        self.ord = DEFAULT_DEPTH
        self.peer_private_data = b""
        self.receive_size = receive_size
        # A responder does not know yet whether there will be CRCs. Without them the declaration
        # does no harm: it tells the peer what this end takes in both cases.
        self.max_ulpdu = 0 if segments or (initiator and not crc) else ddp.MAX_ULPDU
        self._stream = stream
        self._segments = segments
        self._initiator = MpaInitiator(crc=crc, ird=ird) if initiator else None
        self._responder = None if initiator else MpaResponder(crc=crc)
        self._pair: IwarpQueuePair | None = None
        self._parameters: MpaParameters | None = None  # agreed on, but bytes wait to be sent
        self._started = False
        self._error: TransportError | None = None
        self._staged = b""  # received with the bytes of the stream
        self._out = b""
        self._receives = 0
        self._allowed = 0  # bytes of a ULPDU; 0: not declared
        self._requests: list[seam.WorkRequest] = []

    # --- the end of streaming mode ---

    def start(self, received: bytes, unsent: bytes) -> None:
        self._staged = received
        self._out = unsent
        self._started = True
        if self._initiator is not None:
            self._out += self._initiator.data_to_send()
        self._send()

    @property
    def established(self) -> bool:
        return self._pair is not None

    def _send(self) -> None:
        while self._out:
            count = self._stream.send([self._out], len(self._out))
            if count < 0:
                return
            self._out = self._out[count:]

    def _advance(self) -> None:
        """Do what can be done of MPA start-up. Raises RemoteProtocolError, ConnectionLost."""
        self._send()
        while self._parameters is None:
            data, self._staged = self._staged, b""
            if not data:
                buffer = memoryview(bytearray(_BUFFER))
                count = self._stream.receive([buffer])
                if count < 0:
                    return
                if not count:
                    raise ConnectionLost("the peer closed the connection during MPA start-up")
                data = bytes(buffer[:count])
            self._parameters = self._take(data)
            self._send()
        if not self._out:
            self._establish(self._parameters)

    def _take(self, data: bytes) -> MpaParameters | None:
        if self._initiator is not None:
            try:
                return self._initiator.receive_data(data)
            except RemoteProtocolError:
                self._out += self._initiator.data_to_send()  # a Terminate, perhaps
                self._send()
                raise
        assert self._responder is not None
        parameters = self._responder.receive_data(data)
        if parameters is not None:
            self._responder.accept()
            self._out += self._responder.data_to_send()
        return parameters

    def _establish(self, parameters: MpaParameters) -> None:
        """MPA start-up is complete: hand the socket, and what was prepared, to a queue pair."""
        sock = self._stream.release()
        try:
            pair = IwarpQueuePair(
                sock,
                parameters,
                initiator=self._initiator is not None,
                receive_size=self.receive_size,
                segments=self._segments,
            )
        except BaseException:
            sock.close()
            raise
        self._pair = pair
        self.ird, self.ord, self.max_ulpdu = pair.ird, pair.ord, pair.max_ulpdu
        self.peer_private_data = pair.peer_private_data
        if self._allowed:
            pair.allow_ulpdu(self._allowed)
        pair.post_receive(self._receives)
        requests, self._requests = self._requests, []
        self.on_started(pair)
        if requests:
            pair.post(requests)

    # --- the queue pair ---

    def describe(self) -> dict[str, object]:
        if self._pair is not None:
            return self._pair.describe()
        return {**self._stream.describe(), "provider": self.provider}

    def allow_ulpdu(self, size: int) -> None:
        if self._pair is not None:
            self._pair.allow_ulpdu(size)
        self._allowed = size

    def limit_reads(self, ird: int, ord: int) -> None:
        """See the seam. Raises LocalProtocolError before MPA start-up is complete: nothing is
        agreed on yet."""
        self._established().limit_reads(ird, ord)

    def alloc_headers(self, count: int, size: int) -> list[seam.HeaderSlot]:
        return header_slots(count, size)

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """See the seam. Raises LocalProtocolError before MPA start-up is complete: there is no
        peer yet that could use the STag."""
        return self._established().advertise(buffer, rights)

    def retire(self, stag: int) -> bool:
        return self._established().retire(stag)

    def _established(self) -> IwarpQueuePair:
        if self._pair is None:
            raise LocalProtocolError("the connection is still in streaming mode")
        return self._pair

    def post_receive(self, count: int) -> None:
        if self._pair is not None:
            self._pair.post_receive(count)
        self._receives += count

    def post(self, requests: list[seam.WorkRequest]) -> None:
        """See the seam. What is posted before MPA start-up is complete leaves behind it."""
        if self._pair is not None:
            self._pair.post(requests)
            return
        if self._error is not None:
            raise ConnectionLost(f"the connection has ended: {self._error}")
        self._requests.extend(requests)

    def progress(self, now: float) -> list[seam.Completion]:
        """See the seam. Before ``start`` it does nothing: the stream is not the queue pair's. The
        call that completes MPA start-up returns nothing: what came behind it is for the caller of
        the queue pair that follows."""
        if self._pair is None:
            if self._error is not None:
                raise self._error
            if not self._started:
                return []
            try:
                self._advance()
            except TransportError as error:
                self._error = error
                self._requests.clear()
                raise
            except OSError as error:
                self._error = ConnectionLost(f"the connection broke: {error.strerror}")
                raise self._error from None
            return []
        return self._pair.progress(now)

    def fileno(self) -> int:
        return self._stream.fileno() if self._pair is None else self._pair.fileno()

    def wants_write(self) -> bool:
        return bool(self._out) if self._pair is None else self._pair.wants_write()

    def next_deadline(self) -> float | None:
        if self._pair is not None:
            return self._pair.next_deadline()
        return 0.0 if self._started and (self._staged or self._error is not None) else None

    def disconnect(self) -> None:
        if self._pair is not None:
            self._pair.disconnect()
        else:
            self._stream.disconnect(discard=self._initiator is not None)

    def close(self) -> None:
        self._requests.clear()
        if self._pair is not None:
            self._pair.close()
            return
        if self._error is None:
            self._error = ConnectionLost("the connection is closed")
        self._stream.close()
