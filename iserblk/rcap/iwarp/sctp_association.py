"""An SCTP association as the LLP of DDP (RFC 5043), with the kernel's SCTP.

One association carries one DDP Stream Session, on its only pair of streams. To the queue pair it
looks like a stream of FPDUs without CRC, each of which comes and goes whole: on the network the
DDP-SSN stands where an FPDU has its ULPDU_Length, and the CRC is SCTP's own.

A message is sent in one packet; SCTP fragments it only if the path has become narrower since the
queue pair last asked for its limit. The send buffer of the socket holds far fewer messages than
the DDP-SSN can put in order.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from struct import Struct
from typing import Final

from iserblk.errors import ConnectionLost, NotSupported, RemoteProtocolError, without_frames
from iserblk.rcap.iwarp import ddp, sctp
from iserblk.rcap.iwarp.llp import drain, names, shut_down
from iserblk.rcap.iwarp.mpa import MpaParameters
from iserblk.rcap.iwarp.queuepair import DEFAULT_RECEIVE_SIZE, IwarpQueuePair
from iserblk.sockets.wire import NO_LINGER, SEND_FLAGS, WOULD_BLOCK, Wire

# linux/sctp.h: options of a socket, notifications, ancillary data.
_INITMSG: Final = 2
_NODELAY: Final = 3
_ADAPTATION_LAYER: Final = 7
_MAXSEG: Final = 13
_DELAYED_SACK: Final = 16
_RECVRCVINFO: Final = 32
_EVENT: Final = 127
_ASSOC_CHANGE: Final = 0x8001
_SHUTDOWN_EVENT: Final = 0x8005
_ADAPTATION_INDICATION: Final = 0x8007
_COMM_UP: Final = 0
_SHUTDOWN_COMPLETE: Final = 3
_SNDINFO: Final = 2
_RCVINFO: Final = 3
_UNORDERED: Final = 1
_NOTIFICATION: Final = 0x8000  # MSG_NOTIFICATION

_INIT_STREAMS: Final = Struct("=HHHH")  # out, in, attempts, timeout
_SACK: Final = Struct("=iII")  # association, delay in milliseconds, packets
_ON: Final = Struct("=iHBx")  # association, event, on
_SENT: Final = Struct("=HHIIi")  # stream, flags, PPID in network order, context, association
_RECEIVED: Final = Struct("=HHHxxIIIIi")  # stream, SSN, flags, PPID, TSN, cumulative, context, …
_VALUE: Final = Struct("=iI")  # association, value
_NOTICE: Final = Struct("=HHI")  # type, flags, length
_WORD: Final = Struct("=I")
_CHANGE: Final = Struct("=H")  # state

_ANCILLARY: Final = 128  # bytes for the ancillary data of one message
_ROOM: Final = 65544  # of a buffer in which one FPDU may land

# A peer whose send buffer holds a single message waits for its SACK. The kernel's default is 200.
SACK_DELAY_MS: Final = 10

NO_SCTP: Final = "this kernel has no SCTP; load it with `modprobe sctp` (as root)"

_IPPROTO: Final = socket.IPPROTO_SCTP


def _ancillary(ppid: int) -> list[tuple[int, int, bytes]]:
    return [(_IPPROTO, _SNDINFO, _SENT.pack(0, _UNORDERED, socket.htonl(ppid), 0, 0))]


_SEGMENT: Final = _ancillary(sctp.PPID_SEGMENT)
_CONTROL: Final = _ancillary(sctp.PPID_CONTROL)


def available() -> str | None:
    """None when the kernel has SCTP, else why not, in one line with the remedy. None, too, when no
    socket can be had now: what needs one tells why."""
    try:
        open_socket(socket.AF_INET).close()
    except NotSupported as error:
        return str(error)
    except OSError:
        return None
    return None


def open_socket(family: int) -> socket.socket:
    """A non-blocking socket that announces DDP; to connect or to listen with. It has one pair of
    streams. Raises NotSupported where the kernel has no SCTP, and OSError when there is no socket
    to be had: of that family, or at all."""
    try:
        sock = socket.socket(family, socket.SOCK_STREAM, _IPPROTO)
    except OSError as error:
        if error.errno in (errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT):
            raise NotSupported(NO_SCTP) from None
        raise
    try:
        sock.setblocking(False)
        sock.setsockopt(_IPPROTO, _ADAPTATION_LAYER, _WORD.pack(sctp.ADAPTATION))
        sock.setsockopt(_IPPROTO, _INITMSG, _INIT_STREAMS.pack(1, 1, 0, 0))
        sock.setsockopt(_IPPROTO, _NODELAY, 1)
        sock.setsockopt(_IPPROTO, _DELAYED_SACK, _SACK.pack(0, SACK_DELAY_MS, 2))
        sock.setsockopt(_IPPROTO, _RECVRCVINFO, 1)
        for event in (_ASSOC_CHANGE, _SHUTDOWN_EVENT, _ADAPTATION_INDICATION):
            sock.setsockopt(_IPPROTO, _EVENT, _ON.pack(0, event, 1))
    except OSError as error:
        sock.close()
        raise NotSupported(f"SCTP of this kernel is too old: {error.strerror}") from None
    return sock


class _Ended(Exception):
    """The peer sends no more."""


class Association:
    """Implements Llp and Wire. Owns ``sock``, made by ``open_socket`` and connected, or accepted by
    such a socket. Before ``queue_pair`` only ``send_control`` and ``receive_control`` are used."""

    provider = "iwarp-sctp"
    records = True
    symmetric = True
    end_of_record = False

    def __init__(self, sock: socket.socket) -> None:
        self.wire: Wire = self
        self._sock = sock
        self._names = names(sock)
        self._arrivals = sctp.Arrivals()
        self._ssn = 0  # of the next message that we send
        self._adapted = False  # the peer has announced DDP
        self._begun = bytearray()  # a message of which the kernel has given only the start
        self._open = False  # the DDP Stream Session has begun, or was asked for
        self._enhanced = False
        self._over = False
        self._finished = False
        self._problem: Exception | None = None  # raised by the next ``receive``
        self._message_size = sctp.SSN_SIZE + sctp.LEAST_SEGMENT

    # --- the start of the session ---

    def fileno(self) -> int:
        return self._sock.fileno()

    def is_adapted(self) -> bool:
        """Whether the peer has announced DDP; False: its answer has not come. At the side that
        connected. Raises RemoteProtocolError if the peer has announced something else, or
        nothing, and ConnectionLost."""
        room = bytearray(_ROOM)
        while not self._adapted:
            try:
                count, _, flags, _ = self._sock.recvmsg_into([room], _ANCILLARY, SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                return False
            if not flags & _NOTIFICATION:
                if count:
                    raise _not_ddp()
                raise ConnectionLost("the peer closed the association")
            try:
                self._notified(memoryview(room)[:count])
            except _Ended:
                raise ConnectionLost("the peer closed the association") from None
            if _NOTICE.unpack_from(room)[0] == _ASSOC_CHANGE and not self._announced(room):
                raise _not_ddp()
        return True

    def _announced(self, room: bytearray) -> bool:
        """Whether an announcement lies behind the news that the association is there: the kernel
        queues both at once."""
        try:
            flags = self._sock.recvmsg_into([room], _ANCILLARY, SEND_FLAGS | socket.MSG_PEEK)[2]
        except (BlockingIOError, InterruptedError):
            return False
        return bool(flags & _NOTIFICATION) and _NOTICE.unpack_from(room)[0] in (
            _ADAPTATION_INDICATION,
            _ASSOC_CHANGE,
            _SHUTDOWN_EVENT,
        )

    def send_control(self, function: int, private_data: bytes = b"") -> None:
        """Send a session control message. Raises OSError."""
        message = sctp.pack_control(self._ssn, function, private_data)
        self._sock.sendmsg([message], _CONTROL, SEND_FLAGS)
        self._open = True
        self._ssn = (self._ssn + 1) & 0xFFFF

    def receive_control(self) -> tuple[int, bytes] | None:
        """The Function Code and private data of the first message; None: it has not come. Raises
        RemoteProtocolError, ConnectionLost, OSError."""
        room = memoryview(bytearray(_ROOM))
        try:
            got = self._next(room)
        except _Ended:
            raise ConnectionLost("the peer closed the association") from None
        if got is None:
            return None
        ppid, size = got
        if ppid != sctp.PPID_CONTROL:
            raise RemoteProtocolError("DDP over SCTP", "a DDP segment before the session")
        self._open = True
        return sctp.unpack_control_untrusted(bytes(room[:size]))

    def queue_pair(
        self,
        params: MpaParameters,
        *,
        initiator: bool,
        receive_size: int = DEFAULT_RECEIVE_SIZE,
    ) -> IwarpQueuePair:
        """The queue pair of a session that was agreed on. It owns this object and the socket."""
        self._enhanced = params.enhanced
        return IwarpQueuePair(
            self._sock, params, initiator=initiator, receive_size=receive_size, llp=self
        )

    # --- Wire ---

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        """See Wire. ``buffers`` are whole FPDUs, each in one or more buffers of its own."""
        sent = 0
        index = 0
        while index < len(buffers):
            first = memoryview(buffers[index])
            (ulpdu,) = ddp.LENGTH.unpack_from(first)
            whole = ddp.fpdu_size(ulpdu)
            pieces: list[bytes | memoryview] = [sctp.SSN.pack(self._ssn)]
            left, gathered = ulpdu, -ddp.LENGTH_SIZE
            while gathered + ddp.LENGTH_SIZE < whole:
                piece = memoryview(buffers[index])
                if gathered < 0:
                    piece = piece[ddp.LENGTH_SIZE :]
                    gathered = 0
                gathered += len(piece)
                if left:
                    pieces.append(piece[:left])
                    left -= len(pieces[-1])
                index += 1
            try:
                self._sock.sendmsg(pieces, _SEGMENT, SEND_FLAGS)
            except (BlockingIOError, InterruptedError):
                return sent or WOULD_BLOCK
            self._ssn = (self._ssn + 1) & 0xFFFF
            sent += whole
        return sent

    def receive(self, buffers: list[memoryview]) -> int:
        """See Wire. Fills the first of the ``buffers`` with whole FPDUs."""
        if self._problem is not None:
            raise self._problem
        if self._over:
            return 0
        view = buffers[0]
        total = 0
        try:
            while total + _ROOM <= len(view):
                got = self._next(view[total : total + _ROOM])
                if got is None:
                    break
                ppid, size = got
                if ppid == sctp.PPID_CONTROL:
                    self._control(bytes(view[total : total + size]))
                    continue
                ulpdu = size - sctp.SSN_SIZE
                ddp.LENGTH.pack_into(view, total, ulpdu)
                total += ddp.fpdu_size(ulpdu)
        except _Ended:
            self._over = True
        except (RemoteProtocolError, ConnectionLost, OSError) as error:
            if not total:
                raise
            self._problem = without_frames(error)
        if total:
            return total
        return 0 if self._over else WOULD_BLOCK

    def _control(self, message: bytes) -> None:
        function, _ = sctp.unpack_control_untrusted(message)
        if function != sctp.TERMINATE:
            raise RemoteProtocolError(
                "DDP over SCTP", f"Function Code {function} in the middle of a session"
            )
        raise _Ended

    def _next(self, view: memoryview) -> tuple[int, int] | None:
        """Put the next message into ``view``, of _ROOM bytes. Returns its PPID, and its size in
        bytes with the DDP-SSN; None: there is none yet. Raises _Ended, RemoteProtocolError,
        ConnectionLost, OSError."""
        while True:
            kept = self._arrivals.pop()
            if kept is not None:
                ppid, message = kept
                view[: len(message)] = message
                return ppid, len(message)
            try:
                count, ancillary, flags, _ = self._sock.recvmsg_into(
                    [view], _ANCILLARY, socket.MSG_DONTWAIT
                )
            except (BlockingIOError, InterruptedError):
                return None
            if flags & _NOTIFICATION:
                self._notified(view[:count])
                continue
            if not count and not ancillary:
                raise _Ended
            if not self._adapted:
                raise _not_ddp()
            if self._begun or not flags & socket.MSG_EOR:
                self._begun += view[:count]
                if len(self._begun) <= sctp.MAX_MESSAGE and not flags & socket.MSG_EOR:
                    continue
                count = len(self._begun)
                if count <= sctp.MAX_MESSAGE:
                    view[:count] = self._begun
                self._begun = bytearray()
            ppid = _ppid(ancillary)
            if ppid not in (sctp.PPID_SEGMENT, sctp.PPID_CONTROL):
                raise RemoteProtocolError("DDP over SCTP", f"a message with PPID {ppid}")
            if not sctp.SSN_SIZE <= count <= sctp.MAX_MESSAGE:
                raise RemoteProtocolError("DDP over SCTP", f"a message of {count} bytes")
            if self._arrivals.is_next(sctp.SSN.unpack_from(view)[0]):
                return ppid, count
            if not self._open:  # nothing overtakes the Initiate, whose answer its sender awaits
                raise RemoteProtocolError("DDP over SCTP", "a message before the session")
            self._arrivals.keep(ppid, bytes(view[:count]))

    def _notified(self, notice: memoryview) -> None:
        kind = _NOTICE.unpack_from(notice)[0] if len(notice) >= _NOTICE.size else 0
        body = notice[_NOTICE.size :]
        if kind == _ADAPTATION_INDICATION:
            if _WORD.unpack_from(body)[0] != sctp.ADAPTATION:
                raise _not_ddp()
            self._adapted = True
        elif kind == _SHUTDOWN_EVENT:
            raise _Ended
        elif kind == _ASSOC_CHANGE:
            (state,) = _CHANGE.unpack_from(body)
            if state == _SHUTDOWN_COMPLETE:
                raise _Ended
            if state != _COMM_UP:  # lost, aborted, or begun anew by the peer
                raise ConnectionLost("the SCTP association was lost")

    # --- Llp ---

    def emss(self) -> int:
        with suppress(OSError):  # it has ended; ``progress`` finds that out
            value = self._sock.getsockopt(_IPPROTO, _MAXSEG, _VALUE.size)
            size = sctp.message_size(_VALUE.unpack(value)[1])
            # The kernel takes no message that its send buffer cannot hold.
            room = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2
            self._message_size = min(size, max(room, sctp.SSN_SIZE + sctp.LEAST_SEGMENT))
        return self._message_size

    def pending(self) -> bool:
        return self._over or self._problem is not None or self._arrivals.is_ready()

    def describe(self) -> dict[str, object]:
        return {
            "local": self._names[0],
            "peer": self._names[1],
            "session_enhanced": self._enhanced,
        }

    def discard_at_close(self) -> None:
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)

    def finish(self) -> None:
        """See Llp. The session ends with a Terminate, then the association ends."""
        self._terminate()
        shut_down(self._sock, socket.SHUT_WR)

    def sever(self) -> None:
        """See Llp, and ``finish``."""
        self._terminate()
        shut_down(self._sock, socket.SHUT_RDWR)

    def _terminate(self) -> None:
        if self._open and not self._finished:
            self._finished = True
            with suppress(OSError):  # it has ended already; or the end of SCTP's is all there is
                self.send_control(sctp.TERMINATE)

    def close(self) -> None:
        self._arrivals.discard()
        self.finish()
        drain(self._sock)  # with unread bytes SCTP would abort, and lose what is under way
        self._sock.close()


def _ppid(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if level == _IPPROTO and kind == _RCVINFO and len(data) >= _RECEIVED.size:
            return socket.ntohl(_RECEIVED.unpack_from(data)[3])
    return 0


def _not_ddp() -> RemoteProtocolError:
    return RemoteProtocolError(
        "DDP over SCTP", "the peer does not announce DDP (Adaptation Indication 1)"
    )
