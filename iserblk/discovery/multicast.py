"""Sockets for SLP's multicast: each interface of the machine is told, or listened to. No trio."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from iserblk.discovery.slp import GROUP

TTL = 255  # RFC 2608 section 6.1: the network decides how far requests go
_MREQN = struct.Struct("4s4si")  # struct ip_mreqn: group, address, index of an interface
_PKTINFO = struct.Struct("i4s4s")  # struct in_pktinfo
IP_PKTINFO = 8  # not in Python's socket module before 3.14


class Sockets(Protocol):
    """What is needed of a socket, Python's or trio's."""

    def setsockopt(self, level: int, name: int, value: int | bytes, /) -> None: ...


def interfaces() -> list[int]:
    """The indexes of all interfaces."""
    with contextlib.suppress(OSError):
        return [index for index, _ in socket.if_nameindex()]
    return []


def choose_interface(sock: Sockets, index: int) -> None:
    """Have multicast datagrams of ``sock`` leave by this interface. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, TTL)
    sock.setsockopt(
        socket.IPPROTO_IP, socket.IP_MULTICAST_IF, _MREQN.pack(bytes(4), bytes(4), index)
    )


def join(sock: Sockets, indexes: Sequence[int]) -> int:
    """Join SLP's group on these interfaces. Returns on how many; others have no IPv4."""
    joined = 0
    for index in indexes:
        membership = _MREQN.pack(socket.inet_aton(GROUP), bytes(4), index)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            joined += 1
    return joined


def tell_destinations(sock: Sockets) -> None:
    """Have ``recvmsg`` of ``sock`` say where datagrams were sent to."""
    sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)


def destination(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[str, bool] | None:
    """Our own address by which a datagram came, and whether it was multicast."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO) and len(data) >= _PKTINFO.size:
            _, here, sent_to = _PKTINFO.unpack_from(data)
            return socket.inet_ntoa(here), sent_to[0] & 0xF0 == 0xE0
    return None


def from_address(here: str) -> list[tuple[int, int, bytes]]:
    """Ancillary data for ``sendmsg``: the datagram comes from this address of ours."""
    return [(socket.IPPROTO_IP, IP_PKTINFO, _PKTINFO.pack(0, socket.inet_aton(here), bytes(4)))]
