"""Two network namespaces joined by a veth pair: an ordinary network on one machine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from itertools import count

from benchlib.servers import Absent, run

TARGET_ADDRESS = "192.0.2.1"  # RFC 5737: nobody's; and only the two namespaces have it
_CLIENT_ADDRESS = "192.0.2.2"

_numbers = count()


class Network:
    """``target`` and ``client``: what to put before a command that is to run at that end. Its links
    have ``mtu``. Both are removed when ``stack`` ends; nothing else of the machine is touched."""

    def __init__(self, stack: ExitStack, mtu: int) -> None:
        """Raises Absent where namespaces cannot be made."""
        if os.geteuid():
            raise Absent("needs root, to make network namespaces")
        name = f"iserblk-bench-{os.getpid()}-{next(_numbers)}"
        ends = ((f"{name}t", "veth0", TARGET_ADDRESS), (f"{name}c", "veth1", _CLIENT_ADDRESS))
        for end, _, _ in ends:
            _ip("netns", "add", end)
            stack.callback(_remove, end)
        (one, here, _), (other, there, _) = ends
        veth = ["type", "veth", "peer", "name", there, "mtu", str(mtu), "netns", other]
        _ip("link", "add", here, "mtu", str(mtu), "netns", one, *veth)
        for end, link, address in ends:
            _ip("-netns", end, "address", "add", f"{address}/24", "dev", link)
            _ip("-netns", end, "link", "set", link, "up")
            _ip("-netns", end, "link", "set", "lo", "up")
        self.target, self.client = (
            ["nsenter", f"--net=/run/netns/{end}", "--"] for end, _, _ in ends
        )


def _ip(*arguments: str) -> None:
    run("ip", ["ip", *arguments])


def _remove(name: str) -> None:
    """With its end of the pair, which takes the other along."""
    try:
        _ip("netns", "delete", name)
    except Absent as error:  # it has gone already: nothing to stop for
        print(f"bench: {error}")
