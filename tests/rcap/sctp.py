"""A stand-in for the kernel's SCTP where there is none: messages between two sockets of AF_UNIX.

It has what iserblk.rcap.iwarp.sctp_association uses, as Linux 6.1 was seen to behave: messages with
a PPID, notifications, the ends of an association. It delivers messages that lie together in another
order than they were sent, as SCTP may.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Sequence
from typing import Any

NOTIFICATION = 0x8000
RCVINFO = 3
MAXSEG = 13
COMM_UP = struct.pack("=HHIHHHHi", 0x8001, 0, 20, 0, 0, 1, 1, 1)
AT_ONCE = 16  # messages that are put in another order

# One datagram of the stand-in: a kind, the PPID, the message.
HEAD = struct.Struct("=BI")
MESSAGE, NOTICE = 0, 1

Ancillary = Sequence[tuple[int, int, bytes]]


def adaptation(indication: int) -> bytes:
    return struct.pack("=HHIIi", 0x8007, 0, 16, indication, 1)


class FakeSctp(socket.socket):
    """One end. ``fragmentation_point``: bytes of a message that one packet takes."""

    rng: random.Random
    held: list[bytes]
    fragmentation_point: int

    def inject(self, ppid: int, message: bytes) -> None:
        """Send a message that the code under test would not send."""
        self.send(HEAD.pack(MESSAGE, ppid) + message)

    def notify_peer(self, notice: bytes) -> None:
        self.send(HEAD.pack(NOTICE, 0) + notice)

    def sendmsg(  # type: ignore[override]
        self, buffers: Sequence[bytes | memoryview], ancillary: Ancillary = (), flags: int = 0
    ) -> int:
        ((_, _, info),) = ancillary
        stream, how, ppid = struct.unpack_from("=HHI", info)
        assert (stream, how) == (0, 1)  # RFC 5043 section 10: always unordered
        whole = b"".join(buffers)
        assert len(whole) <= self.fragmentation_point
        super().sendmsg([HEAD.pack(MESSAGE, socket.ntohl(ppid)), whole], (), flags)
        return len(whole)

    def recvmsg_into(  # type: ignore[override]
        self, buffers: Sequence[memoryview | bytearray], size: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        if not self.held:
            self._take()
        datagram = self.held[0] if flags & socket.MSG_PEEK else self.held.pop(0)
        if not datagram:
            return 0, [], 0, None
        kind, ppid = HEAD.unpack_from(datagram)
        body = datagram[HEAD.size :]
        (room,) = buffers
        room[: len(body)] = body
        if kind == NOTICE:
            return len(body), [], NOTIFICATION | socket.MSG_EOR, None
        info = struct.pack("=HHHxxIIIIi", 0, 0, 1, socket.htonl(ppid), 0, 0, 0, 1)
        ancillary = [(socket.IPPROTO_SCTP, RCVINFO, info)]
        return len(body), ancillary, socket.MSG_EOR, None

    def recv_into(self, buffer: bytearray, *_: int) -> int:  # type: ignore[override]
        return self.recvmsg_into([buffer])[0]

    def _take(self) -> None:
        """Take what has come, and change its order. The news of the association stay in front, and
        the end stays behind."""
        first = self.recv(1 << 17, socket.MSG_DONTWAIT)
        found = [first]
        try:
            while first and first[0] == MESSAGE and len(found) < AT_ONCE and found[-1]:
                found.append(self.recv(1 << 17, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass
        end = [each for each in found if not each or each[0] != MESSAGE]
        messages = [each for each in found if each and each[0] == MESSAGE]
        self.rng.shuffle(messages)
        self.held = messages + end

    def setsockopt(self, level: int, *rest: object) -> None:
        if level != socket.IPPROTO_SCTP:
            super().setsockopt(level, *rest)  # type: ignore[call-overload]

    def getsockopt(self, level: int, *rest: int) -> Any:
        if level != socket.IPPROTO_SCTP:
            return super().getsockopt(level, *rest)
        assert rest[0] == MAXSEG
        return struct.pack("=iI", 1, self.fragmentation_point)


def fake_association(
    *,
    fragmentation_point: int = 65484,
    small_buffers: bool = False,
    indications: tuple[int | None, int | None] = (1, 1),
    seed: int = 1,
) -> tuple[FakeSctp, FakeSctp]:
    """Two connected ends. ``indications``: the Adaptation Indication of each end, None: none."""
    ends = []
    for number, plain in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)):
        end = FakeSctp(fileno=plain.detach())
        end.setblocking(False)
        end.rng = random.Random(seed + number)
        end.held = []
        end.fragmentation_point = fragmentation_point
        if small_buffers:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        ends.append(end)
    first, second = ends
    for end, of_peer in ((first, indications[1]), (second, indications[0])):
        end.held.append(HEAD.pack(NOTICE, 0) + COMM_UP)
        if of_peer is not None:
            end.held.append(HEAD.pack(NOTICE, 0) + adaptation(of_peer))
    return first, second
