"""Connections within the machine are not paced.

Some systems use BBR for all of TCP. It spreads what is sent over time, by a timer for every two
segments, as a network needs it. The loopback device has no queue that could overflow: there the
timers cost the sender a quarter of its time for a MiB, hold data back until the send buffer is
full, and wake the receiver for each small piece (1 MiB reads at depth 8: 0.6 of the rate without).
"""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Protocol

_PLAIN = b"reno"  # in every kernel, and allowed to every user


class Settable(Protocol):
    def setsockopt(self, level: int, optname: int, value: bytes, /) -> None: ...


def unpace(sock: Settable, address: object) -> None:
    """``sock`` is TCP, and about to connect to ``address``, or listens there; the connections that
    a listener takes from now on have its algorithm. Not for a connection that there is: it would
    stay paced. Does nothing if ``address``, as Python's sockets have it, is not one of the
    loopback device; raises nothing."""
    assert isinstance(address, tuple)
    with suppress(ValueError):  # a name
        if ip_address(address[0]).is_loopback:
            with suppress(OSError):  # an administrator has forbidden it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _PLAIN)
