"""What lies below DDP: its Lower Layer Protocol (LLP), as a queue pair uses it.

DDP segments pass between the queue pair and its LLP as FPDUs. Over TCP these are the bytes of the
stream (``MpaLlp``); an LLP that keeps messages apart has its own form of them on the network.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Final, Protocol

from iserblk.rcap.iwarp.mpa import MpaParameters
from iserblk.sockets.wire import NO_LINGER, Wire, wire

MAX_EMSS: Final = 65483  # of loopback; FPDUs with CRC never need more
DRAIN_BYTES: Final = 1024 * 1024  # read and discarded at close, so that TCP sends no reset


class Llp(Protocol):
    """One connection of the LLP, after its start-up. It owns the socket. No method blocks.

    ``wire`` sends and receives whole FPDUs or parts of them, as the LLP has it. ``records``: the
    LLP keeps FPDUs apart, so that ``wire`` takes and gives only whole FPDUs, without CRC.
    ``symmetric``: the responder, too, may send at once.
    """

    provider: str
    wire: Wire
    records: bool
    symmetric: bool

    def emss(self) -> int:
        """Bytes that the network takes as one piece at present: of a TCP segment, or of a message.
        It changes with the path."""
        ...

    def describe(self) -> dict[str, object]:
        """What was agreed on, as ``QueuePair.describe`` has it."""
        ...

    def pending(self) -> bool:
        """Whether ``wire`` has more to receive, or an error, that the descriptor does not show.
        Asked only where ``records`` is True."""
        ...

    def discard_at_close(self) -> None:
        """Let ``close`` discard what the peer has not acknowledged."""
        ...

    def finish(self) -> None:
        """End the sending side, behind all that was sent."""
        ...

    def sever(self) -> None:
        """End both directions; the descriptor becomes readable. From any thread."""
        ...

    def close(self) -> None:
        """Close the socket. What was sent before still arrives."""
        ...


class MpaLlp:
    """Implements Llp: MPA on a TCP connection (RFC 5044)."""

    provider = "iwarp"
    records = False
    symmetric = False

    def __init__(self, sock: socket.socket, params: MpaParameters) -> None:
        self._sock = sock
        self._params = params
        self._names = names(sock)
        sock.setblocking(False)
        if _is_tcp(sock):  # RFC 5044 section 5.1
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # siw loses a CRC that is split between two TCP segments: mark where each send ends.
        self.wire = wire(sock, end_of_record=params.crc)

    def emss(self) -> int:
        if not _is_tcp(self._sock):
            return MAX_EMSS
        return min(self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG), MAX_EMSS)

    def describe(self) -> dict[str, object]:
        params = self._params
        return {
            "local": self._names[0],
            "peer": self._names[1],
            "mpa_revision": params.revision,
            "mpa_enhanced": params.enhanced,
            "mpa_crc": params.crc,
            "mpa_markers_sent": params.markers,
            "mpa_rtr": params.rtr,
        }

    def pending(self) -> bool:
        return False

    def discard_at_close(self) -> None:
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)

    def finish(self) -> None:
        shut_down(self._sock, socket.SHUT_WR)

    def sever(self) -> None:
        shut_down(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """See Llp. TCP sends a reset when a socket is closed with unread bytes, and the reset
        overtakes a Terminate. So unread bytes are read and discarded first, DRAIN_BYTES at most."""
        self.finish()
        drain(self._sock)
        self._sock.close()


def drain(sock: socket.socket) -> None:
    """Read and discard what has come, DRAIN_BYTES at most."""
    waste = bytearray(64 * 1024)
    with suppress(OSError):
        for _ in range(DRAIN_BYTES // len(waste)):
            if not sock.recv_into(waste):
                break


def shut_down(sock: socket.socket, how: int) -> None:
    with suppress(OSError):  # the connection may have ended already
        sock.shutdown(how)


def names(sock: socket.socket) -> tuple[str, str]:
    """Both ends of a connection, each ``host:port``; "" where it has ended already."""
    found: list[str] = []
    for get in (sock.getsockname, sock.getpeername):
        try:
            name = get()
        except OSError:
            name = ""
        if isinstance(name, tuple):
            host = f"[{name[0]}]" if ":" in name[0] else name[0]
            name = f"{host}:{name[1]}"
        found.append(str(name))
    return found[0], found[1]


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)
