"""The adaptation of DDP to SCTP, without I/O: messages, their order, how a session begins.

    DDP segment       DDP-SSN 2 | DDP segment                        PPID 16, RFC 5043 section 5.2.2
    session control   DDP-SSN 2 | Function Code 2 | private data     PPID 17, RFC 5043 section 5.2.3

SCTP delivers the messages unordered. The DDP-SSN numbers those of each direction from 0, and
``Arrivals`` gives them back in this order.

The initiator asks for a DDP Stream Session with the enhanced Initiate of RFC 6581 section 7, whose
private data begins with IRD and ORD as in MPA. The responder takes the Initiate of RFC 5043, too.
All that is read here comes from the network; it causes no exception but RemoteProtocolError.
"""

from __future__ import annotations

from struct import Struct
from threading import Lock
from typing import Final

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.rcap.iwarp import ddp, mpa

ADAPTATION: Final = 1  # the Adaptation Indication of DDP
PPID_SEGMENT: Final = 16
PPID_CONTROL: Final = 17

INITIATE: Final = 1
ACCEPT: Final = 2
REJECT: Final = 3
TERMINATE: Final = 4
ENHANCED_INITIATE: Final = 5
ENHANCED_ACCEPT: Final = 6
ENHANCED_REJECT: Final = 7

SSN: Final = Struct(">H")
CONTROL: Final = Struct(">HH")  # DDP-SSN, Function Code
SSN_SIZE: Final = 2
MAX_PRIVATE_DATA: Final = 512
MAX_MESSAGE: Final = SSN_SIZE + ddp.MAX_ULPDU
LEAST_SEGMENT: Final = 516  # bytes of the largest DDP segment, whatever the network takes
# Left in a packet for chunks that SCTP bundles: a SACK with four gap blocks.
BUNDLING_ROOM: Final = 32

# Messages that overtake others are kept. A DDP-SSN tells the order of so many.
SSN_WINDOW: Final = 32768
MAX_EARLY_BYTES: Final = 16 * 1024 * 1024
# All associations of the process together keep so much beside what each may always keep: a peer may
# have many of them, and for this it need not have logged in.
MAX_EARLY_BYTES_IN_ALL: Final = 64 * 1024 * 1024
EARLY_BYTES_OF_EACH: Final = 64 * 1024
_EARLY_OVERHEAD: Final = 256  # bytes of a kept message beside its own


def message_size(fragmentation_point: int) -> int:
    """Bytes of the largest message with a DDP segment, its DDP-SSN included, where SCTP puts
    ``fragmentation_point`` bytes of a message into one packet (RFC 5043 section 9)."""
    return min(max(fragmentation_point - BUNDLING_ROOM, SSN_SIZE + LEAST_SEGMENT), MAX_MESSAGE)


def pack_control(ssn: int, function: int, private_data: bytes = b"") -> bytes:
    return CONTROL.pack(ssn, function) + private_data


def unpack_control_untrusted(message: bytes) -> tuple[int, bytes]:
    """The Function Code and private data of a session control message."""
    if len(message) < CONTROL.size:
        raise _error(f"a session control message of {len(message)} bytes")
    private_data = message[CONTROL.size :]
    if len(private_data) > MAX_PRIVATE_DATA:
        raise _error(f"{len(private_data)} bytes of private data, {MAX_PRIVATE_DATA} allowed")
    return CONTROL.unpack_from(message)[1], private_data


class EarlyMessages:
    """How much memory the early messages of several associations take, in bytes. Associations may
    belong to several threads."""

    __slots__ = ("_lock", "bytes")

    def __init__(self) -> None:
        self._lock = Lock()
        self.bytes = 0

    def grow(self, size: int) -> int:
        """Count ``size`` bytes more; fewer, if it is negative. Returns how many there are now."""
        with self._lock:
            self.bytes += size
            return self.bytes


EARLY: Final = EarlyMessages()


class Arrivals:
    """Puts the messages of one direction in the order of their DDP-SSNs.

    The usual message is the next one: ``is_next`` tells, and it need not be copied. Any other
    goes to ``keep``. ``pop`` returns one that was kept, when its turn has come. ``discard`` at the
    end gives back what is kept, and its share of ``EARLY``.
    """

    __slots__ = ("_early", "_early_bytes", "_expected")

    def __init__(self) -> None:
        self._expected = 0
        self._early: dict[int, tuple[int, bytes]] = {}
        self._early_bytes = 0

    def is_next(self, ssn: int) -> bool:
        """Whether a message is the next one; then the one behind it is expected."""
        if ssn != self._expected:
            return False
        self._expected = (ssn + 1) & 0xFFFF
        return True

    def keep(self, ppid: int, message: bytes) -> None:
        """Keep a message that has overtaken another. Raises RemoteProtocolError if it cannot have
        done that, or if too much is kept already."""
        (ssn,) = SSN.unpack_from(message)
        ahead = (ssn - self._expected) & 0xFFFF
        if ahead >= SSN_WINDOW or ssn in self._early:
            raise _error(f"DDP-SSN {ssn} a second time, {self._expected} is the next")
        self._early[ssn] = ppid, message
        size = len(message) + _EARLY_OVERHEAD
        self._early_bytes += size
        in_all = EARLY.grow(size)
        if self._early_bytes > MAX_EARLY_BYTES:
            raise _error(f"the message with DDP-SSN {self._expected} does not come")
        if in_all > MAX_EARLY_BYTES_IN_ALL and self._early_bytes > EARLY_BYTES_OF_EACH:
            raise _error(
                f"the message with DDP-SSN {self._expected} does not come, and associations keep"
                f" {in_all} bytes behind such messages"
            )

    def is_ready(self) -> bool:
        """Whether ``pop`` has a message."""
        return self._expected in self._early

    def pop(self) -> tuple[int, bytes] | None:
        """The next message as (PPID, message), if it was kept."""
        if not self._early:
            return None
        found = self._early.pop(self._expected, None)
        if found is not None:
            self._expected = (self._expected + 1) & 0xFFFF
            size = len(found[1]) + _EARLY_OVERHEAD
            self._early_bytes -= size
            EARLY.grow(-size)
        return found

    def discard(self) -> None:
        """Forget what is kept."""
        self._early.clear()
        EARLY.grow(-self._early_bytes)
        self._early_bytes = 0


class SessionInitiator:
    """The side that asks for the session. ``request``: Function Code and private data to send."""

    def __init__(
        self,
        *,
        private_data: bytes = b"",
        ird: int = mpa.DEFAULT_DEPTH,
        ord: int = mpa.DEFAULT_DEPTH,  # the standard's word
    ) -> None:
        _check(private_data, ird, ord, mpa.ENHANCED_SIZE)
        self._ird = ird
        self._ord = ord
        self.request = ENHANCED_INITIATE, mpa.enhanced_words(ird, ord, mpa.RTR_NONE) + private_data

    def receive(self, function: int, private_data: bytes) -> mpa.MpaParameters:
        """Take the answer. Raises RemoteProtocolError if the session is refused."""
        if function in (REJECT, ENHANCED_REJECT):
            said = f" (private data {private_data.hex(' ')})" if private_data else ""
            raise _error(f"the responder rejected the session{said}")
        if function == TERMINATE:
            raise _error("the responder takes no session now, or none with IRD and ORD (RFC 6581)")
        if function not in (ACCEPT, ENHANCED_ACCEPT):
            raise _error(f"Function Code {function} in answer to an Initiate")
        result = _parameters(function == ENHANCED_ACCEPT, self._ird, self._ord)
        _take_words(result, private_data)
        if result.peer_ord is not None and result.peer_ord > self._ird:
            raise _error(
                f"the responder wants {result.peer_ord} RDMA Reads at a time, we offered"
                f" {self._ird}"
            )
        if result.peer_ird is not None:
            result.ord = min(self._ord, result.peer_ird)
        return result


class SessionResponder:
    """The side that is asked. After ``receive``, send what ``accept`` or ``reject`` returns."""

    def __init__(
        self,
        *,
        ird: int = mpa.DEFAULT_DEPTH,
        ord: int = mpa.DEFAULT_DEPTH,  # the standard's word
    ) -> None:
        _check(b"", ird, ord, mpa.ENHANCED_SIZE)
        self._ird = ird
        self._ord = ord
        self._result: mpa.MpaParameters | None = None
        self._kinds = mpa.RTR_NONE

    def receive(self, function: int, private_data: bytes) -> mpa.MpaParameters:
        """Take the Initiate. Raises RemoteProtocolError for anything else."""
        if function not in (INITIATE, ENHANCED_INITIATE):
            raise _error(f"Function Code {function} where a session is to begin")
        result = _parameters(function == ENHANCED_INITIATE, self._ird, self._ord)
        self._kinds = result.rtr = _take_words(result, private_data)
        if result.peer_ord is not None:
            result.ird = min(self._ird, result.peer_ord)
        if result.peer_ird is not None:
            result.ord = min(self._ord, result.peer_ird)
        if self._kinds & mpa.RTR_READ:
            result.ird = max(result.ird, 1)  # the RTR Read counts (RFC 6581 section 9.1)
        self._result = result
        return result

    def accept(self, private_data: bytes = b"") -> tuple[int, bytes]:
        """Function Code and private data of the answer."""
        return self._answer(ACCEPT, ENHANCED_ACCEPT, private_data)

    def reject(self, private_data: bytes = b"") -> tuple[int, bytes]:
        """Function Code and private data of the answer."""
        return self._answer(REJECT, ENHANCED_REJECT, private_data)

    def _answer(self, plain: int, enhanced: int, private_data: bytes) -> tuple[int, bytes]:
        result = self._result
        if result is None:
            raise LocalProtocolError("an answer to an Initiate that has not come")
        _check(private_data, 0, 0, mpa.ENHANCED_SIZE if result.enhanced else 0)
        if not result.enhanced:
            return plain, private_data
        ird = mpa.NOT_NEGOTIATED if result.peer_ord is None else result.ird
        ord_ = mpa.NOT_NEGOTIATED if result.peer_ird is None else result.ord
        return enhanced, mpa.enhanced_words(ird, ord_, self._kinds) + private_data


def _parameters(enhanced: bool, ird: int, ord_: int) -> mpa.MpaParameters:
    """Without CRC, which SCTP has itself, and without markers."""
    return mpa.MpaParameters(
        revision=0,
        enhanced=enhanced,
        crc=False,
        markers=False,
        ird=ird,
        ord=min(ord_, mpa.UNDECLARED_ORD),
        peer_ird=None,
        peer_ord=None,
        rtr=mpa.RTR_NONE,
        private_data=b"",
    )


def _take_words(result: mpa.MpaParameters, private_data: bytes) -> int:
    """Take IRD, ORD and private data of the peer, where it has declared them. Returns the RTR kinds
    that it names."""
    if not result.enhanced:
        result.private_data = private_data
        return mpa.RTR_NONE
    if len(private_data) < mpa.ENHANCED_SIZE:
        raise _error("the enhanced message lacks its IRD and ORD")
    word_ird, word_ord = mpa.ENHANCED.unpack_from(private_data)
    result.private_data = private_data[mpa.ENHANCED_SIZE :]
    ird, ord_ = word_ird & mpa.DEPTH_MASK, word_ord & mpa.DEPTH_MASK
    result.peer_ird = None if ird == mpa.NOT_NEGOTIATED else ird
    result.peer_ord = None if ord_ == mpa.NOT_NEGOTIATED else ord_
    return mpa.rtr_kinds(word_ird, word_ord)


def _check(private_data: bytes, ird: int, ord_: int, before: int) -> None:
    if not (0 <= ird < mpa.NOT_NEGOTIATED and 0 <= ord_ < mpa.NOT_NEGOTIATED):
        raise LocalProtocolError(f"IRD {ird} and ORD {ord_} must be 0..{mpa.NOT_NEGOTIATED - 1}")
    most = MAX_PRIVATE_DATA - before
    if len(private_data) > most:
        raise LocalProtocolError(f"{len(private_data)} bytes of private data: {most} at most")


def _error(text: str) -> RemoteProtocolError:
    return RemoteProtocolError("DDP over SCTP", text)
