"""From a socket of an event loop to a plain one: the loop has connected it, or accepted it, and
what follows is done without the loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol


class LoopSocket(Protocol):
    """A socket of trio's."""

    def detach(self) -> int: ...


def _of_descriptor(sock: LoopSocket) -> socket.socket:
    return socket.socket(fileno=sock.detach())


source: Callable[[LoopSocket], socket.socket] = _of_descriptor
"""What ``plain`` asks. A simulated world, whose descriptors the system does not know, sets it."""


def plain(sock: LoopSocket) -> socket.socket:
    """The plain socket with the descriptor of ``sock``, which has none from now on. The caller owns
    it. Raises OSError."""
    return source(sock)
