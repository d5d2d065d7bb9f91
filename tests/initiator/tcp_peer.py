"""The far end of a session over TCP, as ``tests.initiator.peer`` is over iSER: a test plays the
target, byte by byte. What is an STag there is the ITT of a command here."""

from __future__ import annotations

import os
import socket

from iserblk.crc import crc32c
from iserblk.datamover.iser import ControlHeader
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_stream import PduReceiver
from iserblk.errors import ConnectionLost, TransportError
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.sockets.stream import SocketStream
from tests.initiator.peer import INLINE, Heard, Peer

MOST = 8192  # MaxRecvDataSegmentLength of both
_NUMBERS = {"stat_sn": 0, "exp_cmd_sn": 1, "max_cmd_sn": 1 << 20}


class _Socket:
    """What a Peer does to its queue pair, on the target's end of a TCP stream."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def disconnect(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class TcpPeer(Peer):
    """``sent``: the bytes of all Data-Outs that came. ``reads``: False: the test takes nothing from
    the socket."""

    def __init__(self, sock: socket.socket, parameters: SessionParameters) -> None:
        sock.setblocking(False)
        self.pair = _Socket(sock)  # type: ignore[assignment]
        self.heard: list[Heard] = []
        self.completed: list[object] = []
        self.error: TransportError | None = None
        self.closed = False
        self.sent = bytearray()
        self._stat_sn = -1
        self._stream = SocketStream(sock)
        self._data_sn: dict[int, int] = {}
        self._r2t_sn: dict[int, int] = {}
        self._digests = parameters.data_digest != "None"
        self._rx = PduReceiver(lambda _message, _at: None, self._deliver)
        self._rx.full_feature_phase(1 << 20, parameters.header_digest != "None", self._digests)

    def poll(self) -> None:
        try:
            self._rx.receive_from(self._stream, "the initiator")
        except TransportError as error:
            self.error = error

    def _deliver(self, message: memoryview, _placed: bool) -> None:
        header, data = bytes(message[: bhs.BHS_LENGTH]), bytes(bhs.data_segment_untrusted(message))
        opcode = header[0] & bhs.OPCODE_MASK
        if opcode == bhs.DATA_OUT:
            self.sent += data
            return
        itt = int.from_bytes(header[16:20], "big")
        write = header[1] & bhs.FLAG_WRITE if opcode == bhs.SCSI_COMMAND else 0
        self.heard.append(Heard(ControlHeader(0, itt if write else 0, 0, 0, itt), header, data))

    def send(self, message: bytes, invalidate: int = 0) -> None:
        """Bytes as they are."""
        try:
            os.write(self.pair.fileno(), message)
        except BlockingIOError:
            pass  # what the initiator does not take is lost
        except OSError as error:
            self.error = ConnectionLost(str(error))

    def say(self, unit: pdu.Pdu, data: bytes = b"", invalidate: int = 0) -> None:
        padded = data + bytes(-len(data) & 3)
        if data and self._digests:
            padded += crc32c(padded).to_bytes(4, "little")
        self.send(unit.pack() + padded)

    def write(self, stag: int, to: int, data: bytes) -> None:
        """A Data-In in its turn."""
        number = self._data_sn.get(stag, 0)
        self._data_sn[stag] = number + 1
        self.say(
            pdu.DataIn(
                flags=0,
                data_length=len(data),
                lun=bytes(8),
                itt=stag,
                data_sn=number,
                buffer_offset=to & 0xFFFFFFFF,
                **_NUMBERS,
            ),
            data,
        )

    def read(self, stag: int, to: int, sink: bytearray) -> None:
        """An R2T in its turn. What comes is in ``sent``, not in ``sink``."""
        number = self._r2t_sn.get(stag, 0)
        self._r2t_sn[stag] = number + 1
        self.say(
            pdu.ReadyToTransfer(
                lun=bytes(8),
                itt=stag,
                ttt=number,
                r2t_sn=number,
                buffer_offset=to & 0xFFFFFFFF,
                desired_length=len(sink),
                **_NUMBERS,
            )
        )


def linked_tcp(
    level: int = 0, depth: int = 4, io_timeout: float = 30.0, window: int = 1 << 16, **keys: object
) -> tuple[Session, TcpPeer]:
    """As ``linked``, over TCP: a session in full feature phase, and its far end."""
    ours, theirs = socket.socketpair()
    values = {
        "immediate_data": False,
        "max_recv_data_segment_length": MOST,
        "error_recovery_level": level,
        **keys,
    }
    parameters = SessionParameters(**values)  # type: ignore[arg-type]
    datamover = TcpInitiator(SocketStream(ours), INLINE, 1 << 20)
    slots = [TaskSlot(index) for index in range(depth + CONTROL_SLOTS)]
    datamover.allocate_connection_resources(list(slots), UNEXPECTED)
    session = Session(datamover, slots, parameters, "portal:3260", io_timeout)
    session.start(1, 1, window, 0)
    return session, TcpPeer(theirs, parameters)
