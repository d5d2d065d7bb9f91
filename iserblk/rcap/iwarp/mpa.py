"""MPA start-up, both roles, without I/O (RFC 5044 section 7.1, RFC 6581 sections 6 to 9).

    key 16 | M 0x80, C 0x40, R 0x20, S 0x10 | revision 1 | PD_Length 2 | private data

    S (revision 2): the private data starts with
        A 0x8000, B 0x4000, IRD 14 bits | C 0x8000, D 0x4000, ORD 14 bits
        A: peer-to-peer; B, C, D: a zero-length Send, RDMA Write, RDMA Read as RTR; 0x3fff: "no
        negotiation"; the private data of the ULP follows.

The initiator sends the Request at once, and has its ``MpaParameters`` when the Reply is complete.
The responder has its parameters when the Request is complete; its caller looks at the private data
and calls ``accept`` or ``reject``. All that is read here comes from the network; it causes no
exception but RemoteProtocolError. After that error the initiator may have a Terminate to send: the
caller sends ``data_to_send``, then closes the connection.

We never ask for markers. CRCs are used when either side asks (RFC 5044 section 7.1.1, C).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.rcap.iwarp import ddp, rdmap
from iserblk.rcap.iwarp.markers import MarkerFramer

REQUEST_KEY: Final = b"MPA ID Req Frame"
REPLY_KEY: Final = b"MPA ID Rep Frame"
HEADER: Final = Struct(">16sBBH")
HEADER_SIZE: Final = 20
ENHANCED: Final = Struct(">HH")
ENHANCED_SIZE: Final = 4
MAX_PRIVATE_DATA: Final = 512

MARKERS: Final = 0x80
CRC: Final = 0x40
REJECT: Final = 0x20
ENHANCED_CONNECTION: Final = 0x10

PEER_TO_PEER: Final = 0x8000  # with the IRD
RTR_SEND_FLAG: Final = 0x4000  # with the IRD
RTR_WRITE_FLAG: Final = 0x8000  # with the ORD
RTR_READ_FLAG: Final = 0x4000  # with the ORD
DEPTH_MASK: Final = 0x3FFF
NOT_NEGOTIATED: Final = 0x3FFF

# Ready To Receive: kinds of the first frame in peer-to-peer mode, a bit set.
RTR_NONE: Final = 0
RTR_SEND: Final = 1
RTR_WRITE: Final = 2
RTR_READ: Final = 4
RTR_ALL: Final = RTR_SEND | RTR_WRITE | RTR_READ

DEFAULT_DEPTH: Final = 64
# The RDMA Reads that we send at a time when the peer declares no IRD; RFC 5044 has no field for it.
UNDECLARED_ORD: Final = 1


@dataclass(slots=True)
class MpaParameters:
    """What MPA start-up agreed on, seen from this side. Over SCTP: what the start of the DDP Stream
    Session did; ``revision`` is 0 then."""

    revision: int
    enhanced: bool
    crc: bool  # CRCs are generated and checked, both ways
    markers: bool  # we must insert markers; we never receive any
    ird: int  # RDMA Reads that we accept at a time
    ord: int  # RDMA Reads that we may have outstanding
    peer_ird: int | None  # as the peer declared it; None: it did not
    peer_ord: int | None
    rtr: int  # initiator: the kind to send; responder: kinds that may come; 0: none
    private_data: bytes  # of the peer's ULP
    leftover: bytes = field(default=b"", repr=False)  # bytes behind the frame: FPDUs already


def looks_like_mpa(prefix: bytes) -> bool | None:
    """Whether a connection whose first bytes are ``prefix`` starts with an MPA Request.

    None: too few bytes to tell. (iSCSI starts with a Login Request, byte 0x43: one byte decides.)
    """
    head = bytes(prefix[: len(REQUEST_KEY)])
    if not REQUEST_KEY.startswith(head):
        return False
    return True if len(head) == len(REQUEST_KEY) else None


def _frame(key: bytes, flags: int, revision: int, private_data: bytes) -> bytes:
    return HEADER.pack(key, flags, revision, len(private_data)) + private_data


def _check_options(ird: int, ord_: int, private_data: bytes, enhanced: bool) -> None:
    if not (0 <= ird < NOT_NEGOTIATED and 0 <= ord_ < NOT_NEGOTIATED):
        raise LocalProtocolError(f"IRD {ird} and ORD {ord_} must be 0..{NOT_NEGOTIATED - 1}")
    _check_private_data(private_data, enhanced)


def _check_private_data(private_data: bytes, enhanced: bool) -> None:
    limit = MAX_PRIVATE_DATA - (ENHANCED_SIZE if enhanced else 0)
    if len(private_data) > limit:
        raise LocalProtocolError(f"{len(private_data)} bytes of MPA private data: {limit} at most")


class _Frame:
    """A start-up frame that is being received. ``feed`` returns True when it is complete."""

    __slots__ = ("_data", "_key", "enhanced", "flags", "leftover", "peer_ird", "peer_ord",
                 "private_data", "revision", "word_ird", "word_ord")  # fmt: skip

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._data = bytearray()
        self.flags = 0
        self.revision = 0
        self.enhanced = False
        self.word_ird = 0
        self.word_ord = 0
        self.peer_ird: int | None = None
        self.peer_ord: int | None = None
        self.private_data = b""
        self.leftover = b""

    def feed(self, data: bytes) -> bool:
        self._data += data
        buffer = self._data
        # A wrong key may show in its first byte: do not wait for more from another protocol.
        if not self._key.startswith(bytes(buffer[: len(self._key)])):
            raise RemoteProtocolError("MPA", self._wrong_key(bytes(buffer[:16])))
        if len(buffer) < HEADER_SIZE:
            return False
        _, self.flags, self.revision, length = HEADER.unpack_from(buffer)
        if self.revision not in (1, 2):
            raise RemoteProtocolError(
                "MPA", f"the peer speaks MPA revision {self.revision}; 1 and 2 are known here"
            )
        if length > MAX_PRIVATE_DATA:
            raise RemoteProtocolError(
                "MPA", f"{length} bytes of private data announced, {MAX_PRIVATE_DATA} allowed"
            )
        end = HEADER_SIZE + length
        if len(buffer) < end:
            return False
        self.private_data = bytes(buffer[HEADER_SIZE:end])
        self.leftover = bytes(buffer[end:])
        self.enhanced = self.revision == 2 and bool(self.flags & ENHANCED_CONNECTION)
        if self.enhanced:
            if length < ENHANCED_SIZE:
                raise RemoteProtocolError("MPA", "the enhanced frame lacks its IRD and ORD")
            self.word_ird, self.word_ord = ENHANCED.unpack_from(self.private_data)
            self.private_data = self.private_data[ENHANCED_SIZE:]
            self.peer_ird = self.word_ird & DEPTH_MASK
            self.peer_ord = self.word_ord & DEPTH_MASK
        return True

    def rtr(self) -> int:
        return rtr_kinds(self.word_ird, self.word_ord)

    def _wrong_key(self, start: bytes) -> str:
        if start in (REQUEST_KEY, REPLY_KEY):
            role = "initiator" if start == REQUEST_KEY else "responder"
            return f"the peer acts as an MPA {role}, like us"
        return f"no MPA frame, but bytes that start with {start.hex(' ')}"


def rtr_kinds(word_ird: int, word_ord: int) -> int:
    """The RTR kinds that the words of IRD and ORD name; none without the peer-to-peer flag (RFC
    6581 section 9.2)."""
    if not word_ird & PEER_TO_PEER:
        return RTR_NONE
    kinds = RTR_SEND if word_ird & RTR_SEND_FLAG else 0
    kinds |= RTR_WRITE if word_ord & RTR_WRITE_FLAG else 0
    return kinds | (RTR_READ if word_ord & RTR_READ_FLAG else 0)


def enhanced_words(ird: int, ord_: int, rtr: int) -> bytes:
    """The start of the private data: IRD, ORD and RTR kinds (RFC 6581 section 9)."""
    word_ird = ird | (RTR_SEND_FLAG if rtr & RTR_SEND else 0) | (PEER_TO_PEER if rtr else 0)
    word_ord = ord_ | (RTR_WRITE_FLAG if rtr & RTR_WRITE else 0)
    return ENHANCED.pack(word_ird, word_ord | (RTR_READ_FLAG if rtr & RTR_READ else 0))


class MpaInitiator:
    """The side that sends the MPA Request. ``data_to_send`` has the Request from the start.

    ``rtr``: kinds of RTR frame to offer, in peer-to-peer mode; RTR_NONE asks for client-server
    mode. The default offers Write and Read: some RNICs refuse a Request without these, and siw
    accepts them too. ``revision`` 1 sends the Request of RFC 5044, for responders that close the
    connection on an enhanced Request.
    """

    def __init__(
        self,
        *,
        private_data: bytes = b"",
        crc: bool = True,
        ird: int = DEFAULT_DEPTH,
        ord: int = DEFAULT_DEPTH,  # the standard's word
        rtr: int = RTR_WRITE | RTR_READ,
        revision: int = 2,
    ) -> None:
        if revision not in (1, 2):
            raise LocalProtocolError(f"MPA revision {revision}: 1 or 2")
        _check_options(ird, ord, private_data, revision == 2)
        self._crc = crc
        self._ird = ird
        self._ord = ord
        self._rtr = rtr & RTR_ALL if revision == 2 else RTR_NONE
        self._reply = _Frame(REPLY_KEY)
        flags = CRC if crc else 0
        if revision == 2:
            flags |= ENHANCED_CONNECTION
            private_data = enhanced_words(ird, ord, self._rtr) + private_data
        self._out = _frame(REQUEST_KEY, flags, revision, private_data)

    def data_to_send(self) -> bytes:
        """Bytes to send now; each byte is returned once."""
        out, self._out = self._out, b""
        return out

    def receive_data(self, data: bytes) -> MpaParameters | None:
        """Take bytes from the peer; None until the Reply is complete.

        Raises RemoteProtocolError for a bad or rejecting Reply; ``data_to_send`` may then hold a
        Terminate (RFC 6581 sections 9.1 and 9.2).
        """
        reply = self._reply
        if not reply.feed(data):
            return None
        if reply.flags & REJECT:
            raise RemoteProtocolError("MPA", self._rejection(reply))
        result = MpaParameters(
            revision=reply.revision,
            enhanced=reply.enhanced,
            crc=self._crc or bool(reply.flags & CRC),
            markers=bool(reply.flags & MARKERS),
            ird=self._ird,
            ord=min(self._ord, UNDECLARED_ORD),
            peer_ird=reply.peer_ird,
            peer_ord=reply.peer_ord,
            rtr=RTR_NONE,
            private_data=reply.private_data,
            leftover=reply.leftover,
        )
        if reply.enhanced:
            self._negotiate(reply, result)
        return result

    def _negotiate(self, reply: _Frame, result: MpaParameters) -> None:
        peer_ird, peer_ord = reply.word_ird & DEPTH_MASK, reply.word_ord & DEPTH_MASK
        result.ord = self._ord if peer_ird == NOT_NEGOTIATED else min(self._ord, peer_ird)
        if peer_ord != NOT_NEGOTIATED and peer_ord > self._ird:
            raise self._terminate(
                result,
                ddp.MPA_IRD,
                f"the responder wants {peer_ord} RDMA Reads at a time, we offered {self._ird}",
            )
        if not reply.word_ird & PEER_TO_PEER:
            return
        if not self._rtr:
            raise self._terminate(
                result, ddp.MPA_RTR, "the responder wants peer-to-peer mode, which we did not offer"
            )
        common = self._rtr & reply.rtr()
        # A Write costs nothing at either end; a Read counts against the responder's IRD.
        for kind in (RTR_WRITE, RTR_SEND, RTR_READ):
            if common & kind:
                result.rtr = kind
                return
        raise self._terminate(
            result, ddp.MPA_RTR, "the responder supports none of the RTR frames that we offered"
        )

    def _terminate(
        self, result: MpaParameters, code: tuple[int, int, int], text: str
    ) -> RemoteProtocolError:
        payload = rdmap.terminate_for(code)
        header = ddp.UntaggedHeader(
            18 + len(payload),
            ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.TERMINATE,
            0,
            ddp.QN_TERMINATE,
            1,
            0,
        )
        if result.markers:
            self._out = MarkerFramer(crc=result.crc).frame([header.pack(), payload])
        else:
            self._out = ddp.encode_fpdu(header, payload, crc=result.crc)
        return RemoteProtocolError("MPA", text, code)

    def _rejection(self, reply: _Frame) -> str:
        text = "the responder rejected the connection"
        if reply.enhanced and (reply.word_ord & DEPTH_MASK) > self._ird:
            wanted = reply.word_ord & DEPTH_MASK
            text += f": it needs {wanted} RDMA Reads at a time, we offered {self._ird}"
        if reply.private_data:
            text += f" (private data {reply.private_data.hex(' ')})"
        return text


class MpaResponder:
    """The side that waits for the MPA Request.

    ``ird``, ``ord``: the most that we accept and want; the values in the Request may lower them.
    ``rtr``: kinds of RTR frame that we accept. Call ``receive_data`` until it returns the
    parameters, then ``accept`` or ``reject``, then send ``data_to_send``.
    """

    def __init__(
        self,
        *,
        crc: bool = True,
        ird: int = DEFAULT_DEPTH,
        ord: int = DEFAULT_DEPTH,  # the standard's word
        rtr: int = RTR_ALL,
    ) -> None:
        _check_options(ird, ord, b"", True)
        if not rtr & RTR_ALL:
            raise LocalProtocolError("a responder must take at least one kind of RTR (RFC 6581)")
        self._crc = crc
        self._ird = ird
        self._ord = ord
        self._rtr = rtr & RTR_ALL
        self._reply_rtr = RTR_NONE
        self._request = _Frame(REQUEST_KEY)
        self._result: MpaParameters | None = None
        self._out = b""

    def data_to_send(self) -> bytes:
        """Bytes to send now; each byte is returned once."""
        out, self._out = self._out, b""
        return out

    def receive_data(self, data: bytes) -> MpaParameters | None:
        """Take bytes from the peer; None until the Request is complete.

        Raises RemoteProtocolError for a bad Request, and for bytes behind it: an initiator must
        wait for our Reply.
        """
        request = self._request
        if self._result is not None:
            if data:
                raise RemoteProtocolError("MPA", "the initiator did not wait for our reply")
            return self._result
        if not request.feed(data):
            return None
        if request.leftover:
            raise RemoteProtocolError("MPA", "the initiator did not wait for our reply")
        result = MpaParameters(
            revision=request.revision,
            enhanced=request.enhanced,
            crc=self._crc or bool(request.flags & CRC),
            markers=bool(request.flags & MARKERS),
            ird=self._ird,
            ord=min(self._ord, UNDECLARED_ORD),
            peer_ird=request.peer_ird,
            peer_ord=request.peer_ord,
            rtr=RTR_NONE,
            private_data=request.private_data,
        )
        if request.enhanced:
            self._negotiate(request, result)
        self._result = result
        return result

    def _negotiate(self, request: _Frame, result: MpaParameters) -> None:
        peer_ird, peer_ord = request.word_ird & DEPTH_MASK, request.word_ord & DEPTH_MASK
        result.ord = self._ord if peer_ird == NOT_NEGOTIATED else min(self._ord, peer_ird)
        if peer_ord != NOT_NEGOTIATED:
            result.ird = min(self._ird, peer_ord)
        if not request.word_ird & PEER_TO_PEER:
            return
        common = request.rtr() & self._rtr
        # Without a common kind we name our own kinds; the initiator then gives up (9.2).
        self._reply_rtr = common or self._rtr
        result.rtr = self._reply_rtr
        if self._reply_rtr & RTR_READ:
            # The RTR Read counts, even where the ULP wants no Reads (RFC 6581 section 9.1).
            result.ird = max(result.ird, 1)

    def accept(self, private_data: bytes = b"") -> None:
        """Prepare a Reply that accepts. Make the QueuePair once ``data_to_send`` has been sent."""
        self._reply(0, private_data)

    def reject(self, private_data: bytes = b"") -> None:
        """Prepare a Reply that rejects. Close once ``data_to_send`` has been sent."""
        self._reply(REJECT, private_data)

    def _reply(self, flags: int, private_data: bytes) -> None:
        result, request = self._result, self._request
        if result is None or self._out:
            raise LocalProtocolError("an MPA Reply answers one complete Request, once")
        _check_private_data(private_data, result.enhanced)
        flags |= CRC if result.crc else 0
        if result.enhanced:
            flags |= ENHANCED_CONNECTION
            ird = NOT_NEGOTIATED if request.peer_ord == NOT_NEGOTIATED else result.ird
            ord_ = NOT_NEGOTIATED if request.peer_ird == NOT_NEGOTIATED else result.ord
            private_data = enhanced_words(ird, ord_, self._reply_rtr) + private_data
        self._out = _frame(REPLY_KEY, flags, result.revision, private_data)
