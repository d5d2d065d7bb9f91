"""The RCaP seam: what the iSER layer asks of an RDMA-Capable Protocol.

Shaped like verbs, so that the same iSER code runs over the software iWARP (``iserblk.rcap.iwarp``),
over an in-process pair (``iserblk.rcap.inprocess``) and over real devices. No trio, no clock: the
driver that waits is the caller's (see ``docs/architecture.md``).

Threads: ``post``, ``post_receive``, ``advertise`` and ``retire`` may be called from any thread at
any time. ``progress`` may be called from any thread, by one at a time (the drivers see to that).

Sources: RFC 5040, RFC 5041 (DDP/RDMAP semantics), RFC 7145 section 2.1 (terms).
"""

from __future__ import annotations

from typing import Protocol

# Work request and completion opcodes; the Send family is RFC 5040's. Plain ints, compared by ==.
SEND = 0
SEND_INVALIDATE = 1
SEND_SE = 2
SEND_SE_INVALIDATE = 3
RDMA_WRITE = 4
RDMA_READ = 5
RECEIVE = 6

# Rights that ``advertise`` gives to the peer.
REMOTE_READ = 1
REMOTE_WRITE = 2


class HeaderSlot:
    """Memory for the head of one Send, allocated by a QueuePair.

    ``view`` is a writable memoryview of ``size`` bytes, contiguous with headroom that belongs to
    the provider, so that its own framing lies beside the payload and one buffer goes out.
    The owner patches ``view``; from ``post`` until the Send is known to have left (its own
    completion when signaled, or the peer's answer to it) it must not be touched.
    """

    __slots__ = ("frame", "index", "view")

    def __init__(self, view: memoryview, frame: object, index: int) -> None:
        self.view = view
        self.frame = frame  # the provider's own: headroom + view + tailroom
        self.index = index


class WorkRequest:
    """One work request; preallocated and reused by its owner, never by the provider.

    | opcode | header, header_length | data | stag, to |
    | SEND, SEND_SE | first bytes of the message | optional rest (readable) | - |
    | SEND_INVALIDATE, SEND_SE_INVALIDATE | same | same | stag: the peer's STag to invalidate |
    | RDMA_WRITE | - | source (readable, may be empty) | the peer's STag and Tagged Offset |
    | RDMA_READ | - | sink (writable, may be empty) | the peer's STag and Tagged Offset |

    ``data`` stays with the provider until the request completes, until a later signaled request
    of the same queue pair completes (requests complete in order, RDMA_READ excepted), or until
    ``close`` returned. RDMA_READ always completes with a Completion, the others only when
    ``signaled``. ``token`` comes back in the Completion, untouched.
    """

    __slots__ = ("data", "header", "header_length", "opcode", "signaled", "stag", "to", "token")

    def __init__(self, opcode: int = SEND, token: object = None) -> None:
        self.opcode = opcode
        self.header: HeaderSlot | None = None
        self.header_length = 0
        self.data: memoryview | None = None
        self.stag = 0
        self.to = 0
        self.signaled = False
        self.token = token


class Completion:
    """What happened. Only successes complete; an error ends the whole connection (``progress``).

    ``opcode`` RECEIVE: ``data`` is the whole message, readable until the next call of
    ``progress``, ``solicited`` the SE bit, ``invalidated`` the STag of ours that the message
    invalidated (0: none; a STag 0 is never handed out). Others: ``token`` of the work request.
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
    """One connected RCaP stream."""

    provider: str  # "iwarp", "memory", "verbs"
    ird: int  # RDMA Reads the peer may have outstanding towards us
    ord: int  # RDMA Reads we may have outstanding; more are queued by the provider, in order
    peer_private_data: bytes  # what the peer's ULP sent in connection management
    receive_size: int  # bytes of the largest message that a posted receive takes
    can_receive_invalidate: bool  # the peer may use SEND_INVALIDATE towards us
    # Bytes of the largest ULPDU that this end takes wherever TCP cuts it up, for the peer to know;
    # 0: there is nothing to say (a device makes its own segments, or they are as large already).
    max_ulpdu: int
    # Bytes of data that go best behind the BHS of a command, in the memory of its header slot; more
    # is advertised. A device's slots are registered memory, of which there is little.
    inline_size: int

    def describe(self) -> dict[str, object]:
        """What was negotiated, for ``iserblk info`` and logs: JSON-ready names and values."""
        ...

    def allow_ulpdu(self, size: int) -> None:
        """The peer's ``max_ulpdu``, from now on: its own word for it, learned while logging in.
        Without it a ULPDU is kept to one TCP segment (RFC 5044 section 5.1). Nothing happens where
        the own one is 0."""
        ...

    def alloc_headers(self, count: int, size: int) -> list[HeaderSlot]: ...

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """Open ``buffer`` (contiguous bytes) to the peer; returns (STag, Base Offset).

        The peer can use it from the next ``post`` on, and what it writes is in ``buffer`` when
        ``retire`` has returned. Raises Busy when there is no memory for it until another STag is
        retired, or because the connection has failed, as ``progress`` is about to say.

        The buffer belongs to the provider until ``retire`` returned, until a completion reported
        the STag as invalidated **and** ``retire`` was called, or until ``close`` returned.
        """
        ...

    def retire(self, stag: int) -> bool:
        """Invalidate an STag of ours. On return neither the peer nor the provider touches the
        buffer again: placement under way is diverted, unsent bytes are copied or dropped.

        Returns True when it was still valid, False when the peer's Send with Invalidate came
        first. Raises LocalProtocolError for an STag that was never handed out, or retired twice.
        """
        ...

    def post_receive(self, count: int) -> None:
        """Add ``count`` receive buffers of ``receive_size`` bytes. A message that finds none, or
        is larger, ends the connection."""
        ...

    def post(self, requests: list[WorkRequest]) -> None:
        """Queue the requests in order and send what can be sent now, without blocking.

        The list itself is not kept. Raises ConnectionLost once the connection has ended; then
        none of the requests is kept.
        """
        ...

    def progress(self, now: float) -> list[Completion]:
        """Receive and send what can be done without blocking; returns completions in order.

        Raises RemoteProtocolError (a Terminate was sent if the standard asks for one) or
        ConnectionLost, after all completions before it were returned by an earlier call. Then
        the connection is over: nothing more completes; only ``retire`` and ``close`` are useful.
        """
        ...

    def fileno(self) -> int:
        """Readable when ``progress`` has something to do; -1 after ``close``."""
        ...

    def wants_write(self) -> bool:
        """True while bytes wait for the descriptor to become writable."""
        ...

    def next_deadline(self) -> float | None:
        """When ``progress`` wants to be called even if nothing happens; None: never."""
        ...

    def disconnect(self) -> None:
        """Ask for the end from any thread: the descriptor becomes readable, and ``progress``
        raises ConnectionLost. Buffers stay in use until ``close``."""
        ...

    def close(self) -> None:
        """End the connection now. Never blocks. Idempotent. On return no buffer is touched."""
        ...
