"""Ports for programs that have to be told where to listen, or that come back where they were.

A port that the kernel chooses (port 0) is one of those that it also gives to connections: as soon
as nobody listens there, any connection of the machine may take it, even one to this very port,
which then talks with itself. The ports here are below those, and each worker has its own.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
from pathlib import Path

_FIRST, _LEAST, _LAST = 10000, 12000, 30000
_WORKERS = 8
_KERNELS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_counter = itertools.count(os.getpid())  # the runs of two checkouts begin elsewhere


def free_port(address: str = "127.0.0.1") -> int:
    """A TCP port where nobody listens, and that this function does not give again soon."""
    try:
        kernels = int(_KERNELS.read_text().split()[0])
    except (OSError, ValueError):
        kernels = _LAST
    last = min(_LAST, kernels) if kernels > _LEAST else _LAST
    each = (last - _FIRST) // _WORKERS
    found = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    begin = _FIRST + each * (int(found[1]) % (_WORKERS - 1) if found else _WORKERS - 1)
    for _ in range(each):
        port = begin + next(_counter) % each
        with socket.socket() as sock:
            try:
                sock.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of the {each} ports from {begin} is free")
