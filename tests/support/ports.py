"""Ports for programs that have to be told where to listen, or that come back where they were.

A port that the kernel chooses (port 0) is one of those that it also gives to connections: as soon
as nobody listens there, any connection of the machine may take it, even one to this very port,
which then talks with itself. The ports here are below those, and each process that runs tests has
its own: those of a target that a test has killed, which is to come back there, are no other's,
also where tests of several checkouts run on one machine.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from pathlib import Path

_FIRST, _LEAST, _LAST = 10000, 12000, 30000
_EACH = 200  # a process
_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Share:
    """Ports of this process. It has a Unix socket with an abstract name, which ends with it; so
    the share is free again, however the process ends."""

    def __init__(self) -> None:
        try:
            kernels = int(_KERNELS.read_text().split()[0])
        except (OSError, ValueError):
            kernels = _LAST
        last = min(_LAST, kernels) if kernels > _LEAST else _LAST
        count = (last - _FIRST) // _EACH
        self._mark = socket.socket(socket.AF_UNIX)
        for number in range(count):
            self._begin = _FIRST + (os.getpid() + number) % count * _EACH
            try:
                self._mark.bind(f"\0iserblk tests: ports from {self._begin} on")
            except OSError:
                continue
            break
        else:
            raise OSError(f"{count} processes run tests: no ports are left for this one")
        self._next = itertools.count()

    def free_port(self, address: str = "127.0.0.1") -> int:
        for _ in range(_EACH):
            port = self._begin + next(self._next) % _EACH
            with socket.socket() as sock:
                try:
                    sock.bind((address, port))
                except OSError:
                    continue
                return port
        raise OSError(f"none of the {_EACH} ports from {self._begin} on is free")

    def close(self) -> None:
        self._mark.close()


@functools.cache
def _ours() -> Share:
    return Share()


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port where nobody listens, and that this function does not give again soon."""
    return _ours().free_port(address)
