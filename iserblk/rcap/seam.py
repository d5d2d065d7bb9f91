"""The RCaP seam: the interface that the iSER layer needs of an RDMA-Capable Protocol.

It is shaped like verbs, so that the same iSER code runs over software iWARP
(``iserblk.rcap.iwarp``), over an in-process pair (``iserblk.rcap.inprocess``) and over RDMA devices
(``iserblk.rcap.verbs``). It uses no trio and no clock: a driver of the caller does the waiting (see
``docs/front-ends.md``).

A queue pair belongs to one thread, that of the loop which waits for it. Only ``disconnect`` may be
called from others.

Sources: RFC 5040, RFC 5041 (DDP/RDMAP semantics), RFC 7145 section 2.1 (terms).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

# Work request and completion opcodes; the Send family is RFC 5040's. Plain ints, compared by ==.
SEND: Final = 0
SEND_INVALIDATE: Final = 1
SEND_SE: Final = 2
SEND_SE_INVALIDATE: Final = 3
RDMA_WRITE: Final = 4
RDMA_READ: Final = 5
RECEIVE: Final = 6

# Rights that ``advertise`` gives to the peer.
REMOTE_READ: Final = 1
REMOTE_WRITE: Final = 2


class HeaderSlot:
    """Memory for the head of one Send, allocated by a QueuePair.

    ``view`` is a writable memoryview of the ``size`` that ``alloc_headers`` was given. In front of
    it lies headroom of the provider, so that its framing and the payload go out as one buffer.
    The owner of the slot patches ``view``. It must not touch it from ``post`` until the Send is
    known to have left: by its completion when signaled, or by the peer's answer to it.
    """

    __slots__ = ("frame", "index", "view")

    def __init__(self, view: memoryview, frame: object, index: int) -> None:
        self.view = view
        self.frame = frame  # for the provider alone: headroom + view + tailroom
        self.index = index


class WorkRequest:
    """One work request. Its owner allocates it once and reuses it; the provider never does.

    | opcode | header, header_length | data | stag, to |
    | SEND, SEND_SE | first bytes of the message | optional rest (readable) | - |
    | SEND_INVALIDATE, SEND_SE_INVALIDATE | same | same | stag: the peer's STag to invalidate |
    | RDMA_WRITE | - | source (readable, may be empty) | the peer's STag and Tagged Offset |
    | RDMA_READ | - | sink (writable, may be empty) | the peer's STag and Tagged Offset |

    The provider uses ``data`` until the first of these: the request completes; a later signaled
    request of the same queue pair completes (requests complete in order, except RDMA_READ);
    ``close`` has returned. RDMA_READ always gives a Completion, other opcodes only when
    ``signaled``. The Completion carries the same ``token``. ``done`` is the provider's: a
    Completion that it has given for this request, and may give again.
    """

    __slots__ = (
        *("data", "done", "header", "header_length", "opcode", "signaled", "stag", "to", "token"),
    )

    def __init__(self, opcode: int = SEND, token: object = None) -> None:
        self.opcode = opcode
        self.header: HeaderSlot | None = None
        self.header_length = 0
        self.data: memoryview | None = None
        self.stag = 0
        self.to = 0
        self.signaled = False
        self.token = token
        self.done: Completion | None = None


class Completion:
    """A message that was received, or a work request that succeeded.

    There are no failed completions: an error ends the connection, and ``progress`` raises it.
    Nobody changes a Completion: that of a work request may be given again when the request, posted
    again, succeeds again.

    ``opcode`` RECEIVE: ``data`` is the whole message, readable until the next call of
    ``progress``; ``solicited`` is the SE bit; ``invalidated`` is the STag of ours that the message
    invalidated (0: none, as no STag is 0). Other opcodes: ``token`` is that of the work request.
    """

    __slots__ = ("data", "invalidated", "opcode", "solicited", "token")

    def __init__(
        self,
        opcode: int,
        token: object = None,
        data: memoryview | None = None,
        invalidated: int = 0,
        solicited: bool = False,
    ) -> None:
        self.opcode = opcode
        self.token = token
        self.data = data
        self.invalidated = invalidated
        self.solicited = solicited


class QueuePair(Protocol):
    """One connected RCaP stream: memory that the peer may use, work requests, completions."""

    provider: str  # "iwarp", "iwarp-sctp", "memory", "verbs"
    iwarp: bool  # the RCaP is iWARP, so that the peer may be Linux siw
    ird: int  # RDMA Reads the peer may have outstanding towards us
    ord: int  # RDMA Reads we may have outstanding; more are queued by the provider, in order
    peer_private_data: bytes  # what the peer's ULP sent in connection management
    receive_size: int  # bytes of the largest message that a posted receive takes
    can_receive_invalidate: bool  # the peer may use SEND_INVALIDATE towards us
    # Every implementation of this RCaP takes Sends with a solicited event, and peers of RFC 5046
    # wait for them. False: SEND and SEND_INVALIDATE are to be used (RFC 7145 section 1.5.2).
    solicits: bool
    # Bytes of the largest ULPDU that this end takes however TCP cuts it into segments; login
    # declares it to the peer. 0: nothing to declare, because a device makes its own segments, or
    # because ULPDUs may have full size already.
    max_ulpdu: int
    # Bytes of data up to which it is faster to send the data behind the BHS of its command, in the
    # memory of the header slot; more is advertised. The slots of a device are registered memory,
    # of which there is little.
    inline_size: int
    # Header slots are ordinary memory, of which any thread may allocate more at any time. False:
    # they are registered with a device, and all of them are to be allocated before login ends.
    plain_headers: bool

    def describe(self) -> dict[str, object]:
        """What was negotiated, for ``iserblk info`` and logs: JSON-ready names and values."""
        ...

    def allow_ulpdu(self, size: int) -> None:
        """Send ULPDUs of up to ``size`` bytes from now on: the peer has declared that as its
        ``max_ulpdu`` during login.

        Without this call a ULPDU is kept to one TCP segment (RFC 5044 section 5.1). The call does
        nothing where ``max_ulpdu`` of this end is 0.
        """
        ...

    def limit_reads(self, ird: int, ord: int) -> None:
        """Lower ``ird`` and ``ord`` to these: the two ULPs have agreed on less than connection
        management has. Requests that are posted afterwards keep to it, and a peer that does not is
        refused, where the provider can tell.

        Raises LocalProtocolError for more than there was; then nothing is changed.
        """
        ...

    def alloc_headers(self, count: int, size: int) -> list[HeaderSlot]:
        """Allocate ``count`` header slots of ``size`` bytes each, for use until ``close``."""
        ...

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """Open ``buffer`` (contiguous bytes) to the peer; returns (STag, Base Offset).

        The peer can use it from the next ``post`` on. What the peer writes is in ``buffer`` when
        ``retire`` has returned. Raises Busy when there is no memory for it until another STag is
        retired; and when the connection has failed, which the next ``progress`` raises.

        The buffer belongs to the provider until one of these: ``retire`` has returned; a completion
        reported the STag as invalidated **and** ``retire`` was called; ``close`` has returned.
        """
        ...

    def retire(self, stag: int) -> bool:
        """Invalidate an STag of ours. On return neither the peer nor the provider touches the
        buffer again: placement under way is diverted, unsent bytes are copied or dropped.

        Returns True when the STag was still valid, False when the peer's Send with Invalidate came
        first. Raises LocalProtocolError for an STag that was never handed out, or retired twice.
        """
        ...

    def post_receive(self, count: int) -> None:
        """Add ``count`` receive buffers of ``receive_size`` bytes. The connection ends when a
        message arrives and no receive is posted, or when the message is larger than its receive."""
        ...

    def post(self, requests: list[WorkRequest]) -> None:
        """Queue the requests in order and send what can be sent now, without blocking.

        The list itself is not kept. Raises ConnectionLost once the connection has ended; then
        none of the requests is kept.
        """
        ...

    def progress(self, now: float) -> list[Completion]:
        """Receive and send what can be done without blocking; returns completions in order.

        Raises RemoteProtocolError (a Terminate was sent if the standard asks for it) or
        ConnectionLost, but only after earlier calls have returned all completions before the error.
        Then the connection is over: nothing more completes; only ``retire`` and ``close`` are
        useful.
        """
        ...

    def fileno(self) -> int:
        """The descriptor to wait for. Readable when ``progress`` has something to do; -1 after
        ``close``."""
        ...

    def wants_write(self) -> bool:
        """True while bytes wait for the descriptor to become writable."""
        ...

    def next_deadline(self) -> float | None:
        """The time, on the clock of ``progress``'s ``now``, at which ``progress`` is to be called
        even if nothing has come. None: never."""
        ...

    def disconnect(self) -> None:
        """Ask for the end of the connection, from any thread: the descriptor becomes readable, and
        ``progress`` raises ConnectionLost. Buffers stay in use until ``close``."""
        ...

    def close(self) -> None:
        """End the connection now. Idempotent. On return no buffer is touched.

        It does not wait for the peer; over a device it waits up to 20 ms for posted requests."""
        ...


class StreamingPair(QueuePair, Protocol):
    """A queue pair on a connection that is a byte stream until ``start``.

    Before that, only these calls have an effect: ``alloc_headers``, ``post_receive``, ``post``
    (which queues), ``allow_ulpdu``, ``disconnect`` and ``close``.
    """

    on_started: Callable[[QueuePair], None]
    """Called once, by ``progress``, with the queue pair that takes the place of this one. What was
    allocated and posted here belongs to it."""

    @property
    def established(self) -> bool:
        """``on_started`` has been called."""
        ...

    def start(self, received: bytes, unsent: bytes) -> None:
        """The layer above uses the stream no more: the RCaP is enabled on it, which ``progress``
        completes. ``received``: bytes that it has received beyond its own. ``unsent``: bytes that
        it has still to send; they leave first. Raises ConnectionLost."""
        ...
