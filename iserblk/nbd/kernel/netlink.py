"""The kernel's NBD client by generic netlink: the family ``nbd``.

The kernel is given sockets on which the handshake is over (module ``links``), and keeps them.
Source: include/uapi/linux/nbd-netlink.h of Linux.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3  # NBD_CMD_…


@dataclass(slots=True, frozen=True)
class Settings:
    """What a device is given. None: as it is; for a new device, the kernel's default.

    ``size``, ``block_size``: bytes. ``flags``: NBD's transmission flags. ``timeout``: seconds after
    which the kernel gives up a request, and its connection. ``dead_timeout``: seconds for which
    requests wait when no connection is left. ``backend``: names the LUN; a device that has a name
    can be reconfigured only under the same name. ``sockets``: descriptors.
    """

    size: int | None = None
    block_size: int | None = None
    flags: int | None = None
    timeout: int | None = None
    dead_timeout: int | None = None
    backend: str | None = None
    sockets: Sequence[int] = ()

    def attributes(self) -> list[tuple[str, Any]]:
        """As attributes of a message."""
        numbers = (
            ("SIZE_BYTES", self.size),
            ("BLOCK_SIZE_BYTES", self.block_size),
            ("TIMEOUT", self.timeout),
            ("DEAD_CONN_TIMEOUT", self.dead_timeout),
            ("SERVER_FLAGS", self.flags),
            ("BACKEND_IDENTIFIER", self.backend),
        )
        found: list[tuple[str, Any]] = [
            (f"NBD_ATTR_{name}", value) for name, value in numbers if value is not None
        ]
        if self.sockets:
            items = [
                ("NBD_SOCK_ITEM", {"attrs": [("NBD_SOCK_FD", number)]}) for number in self.sockets
            ]
            found.append(("NBD_ATTR_SOCKETS", {"attrs": items}))
        return found


class KernelClient(Protocol):
    """Connects the kernel's devices. ``index``: N of /dev/nbdN. All methods raise OSError with the
    kernel's reason; nothing has changed then, unless a method says otherwise."""

    def connect(self, index: int, settings: Settings) -> None:
        """Connect a device that is not connected. EBUSY: it is."""
        ...

    def reconfigure(self, index: int, settings: Settings) -> None:
        """Change a connected device. A socket takes the place of a dead one; a socket for which no
        dead one is left is ignored, without an error. EINVAL: not connected, or another backend."""
        ...

    def disconnect(self, index: int) -> None:
        """Close the connections. Requests that wait in the kernel fail. Without an error when the
        device is not connected."""
        ...


class Netlink:
    """Implements KernelClient: this kernel's."""

    def connect(self, index: int, settings: Settings) -> None:
        self._ask(CONNECT, index, settings)

    def reconfigure(self, index: int, settings: Settings) -> None:
        self._ask(RECONFIGURE, index, settings)

    def disconnect(self, index: int) -> None:
        self._ask(DISCONNECT, index, Settings())

    def _ask(self, command: int, index: int, settings: Settings) -> None:
        # Loaded here, because it takes as long as the rest of the command.
        from iserblk.nbd.kernel.netlink_messages import send  # noqa: PLC0415

        send(command, [("NBD_ATTR_INDEX", index), *settings.attributes()])


def load() -> None:
    """Load what the first message would load. A process that runs for long does this early: its
    first message may be due when iserblk has been removed, or is another version."""
    importlib.import_module("iserblk.nbd.kernel.netlink_messages")
