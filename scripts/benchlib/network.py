"""Two network namespaces joined by a veth pair: an ordinary network on one machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from benchlib.servers import Absent, run

TARGET_ADDRESS = "192.0.2.1"  # for documentation (RFC 5737); only the two namespaces have it
_CLIENT_ADDRESS = "192.0.2.2"

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_numbers = count()


class Network:
    """The two namespaces. ``target`` and ``client``: words to put before a command that is to run
    at that end. The links have ``mtu``. Both namespaces are removed when ``stack`` ends; nothing
    else of the machine is touched."""

    def __init__(self, stack: ExitStack, mtu: int) -> None:
        """Raises Absent if namespaces cannot be made."""
        if os.geteuid():
            raise Absent("needs root, to make network namespaces")
        name = f"iserblk-bench-{os.getpid()}-{next(_numbers)}"
        ends = ((f"{name}t", "veth0", TARGET_ADDRESS), (f"{name}c", "veth1", _CLIENT_ADDRESS))
        for end, _, _ in ends:
            with _signals_wait():
                ip_command("netns", "add", end)
                stack.callback(_remove, end)
        (one, here, _), (other, there, _) = ends
        veth = ["type", "veth", "peer", "name", there, "mtu", str(mtu), "netns", other]
        ip_command("link", "add", here, "mtu", str(mtu), "netns", one, *veth)
        for end, link, address in ends:
            ip_command("-netns", end, "address", "add", f"{address}/24", "dev", link)
            ip_command("-netns", end, "link", "set", link, "up")
            ip_command("-netns", end, "link", "set", "lo", "up")
        self.target, self.client = (
            ["nsenter", f"--net=/run/netns/{end}", "--"] for end, _, _ in ends
        )


def ip_command(*arguments: str) -> None:
    run("ip", ["ip", *arguments])


def _remove(name: str) -> None:
    """Remove a namespace with its end of the veth pair; that removes the other end, too."""
    try:
        with _signals_wait():
            ip_command("netns", "delete", name)
    except Absent as error:  # it is gone already: no reason to fail
        print(f"bench: {error}")


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delays signals that end the bench to the end of the block. A namespace outlives the bench, so
    none may be made without its removal being registered."""
    came: list[int] = []
    handlers = {}
    # `ip` inherits the mask, because Ctrl-C goes to all processes of the terminal. For the bench
    # itself the mask is not enough: its other threads do not have it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        for each in _ENDING:
            handlers[each] = signal.signal(each, lambda number, _frame: came.append(number))
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        if came:
            signal.raise_signal(came[0])
