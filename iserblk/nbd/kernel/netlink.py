"""The kernel's NBD client by generic netlink: the family ``nbd``.

The kernel is given sockets on which the handshake is over (module ``links``), and keeps them.
Sources: include/uapi/linux/nbd-netlink.h, netlink.h and genetlink.h of Linux.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

CONNECT, DISCONNECT, RECONFIGURE = 1, 2, 3  # NBD_CMD_…
_VERSION = 1  # of the family

# NBD_ATTR_…
_INDEX, _SIZE_BYTES, _BLOCK_SIZE_BYTES, _TIMEOUT, _SERVER_FLAGS = 1, 2, 3, 4, 5
_SOCKETS, _DEAD_CONN_TIMEOUT, _BACKEND_IDENTIFIER = 7, 8, 10
_SOCK_ITEM = _SOCK_FD = 1  # NBD_SOCK_…
_NESTED = 1 << 15  # NLA_F_NESTED: the kernel's policy wants it

_GENERIC = 16  # NETLINK_GENERIC
_CONTROLLER, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2  # GENL_ID_CTRL, CTRL_…
_REQUEST, _ACK = 1, 4  # NLM_F_…
_ERROR = 2  # NLMSG_ERROR
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence number, port
_COMMAND = struct.Struct("=BBxx")  # genlmsghdr: command, version
_ATTRIBUTE = struct.Struct("=HH")  # nlattr: length, without what is added at the end; type
_CODE = struct.Struct("=i")  # nlmsgerr: an errno, negative; 0 where all is well
_U16, _U32, _U64 = struct.Struct("=H"), struct.Struct("=I"), struct.Struct("=Q")
_ROOM = 1 << 16  # bytes of an answer


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

    def attributes(self) -> bytes:
        """As attributes of a message."""
        numbers = (
            (_SIZE_BYTES, self.size),
            (_BLOCK_SIZE_BYTES, self.block_size),
            (_TIMEOUT, self.timeout),
            (_DEAD_CONN_TIMEOUT, self.dead_timeout),
            (_SERVER_FLAGS, self.flags),
        )
        found = [_attribute(kind, _U64.pack(value)) for kind, value in numbers if value is not None]
        if self.backend is not None:
            found.append(_attribute(_BACKEND_IDENTIFIER, self.backend.encode() + b"\0"))
        if self.sockets:
            items = (
                _attribute(_SOCK_ITEM | _NESTED, _attribute(_SOCK_FD, _U32.pack(number)))
                for number in self.sockets
            )
            found.append(_attribute(_SOCKETS | _NESTED, b"".join(items)))
        return b"".join(found)


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
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _GENERIC) as sock:
            sock.bind((0, 0))
            exchange(sock, family_number(sock, b"nbd"), message(command, index, settings))


def message(command: int, index: int, settings: Settings) -> bytes:
    """A request of the family, without netlink's own header."""
    device = _attribute(_INDEX, _U32.pack(index))
    return _COMMAND.pack(command, _VERSION) + device + settings.attributes()


def _attribute(kind: int, value: bytes) -> bytes:
    """With bytes up to a multiple of four."""
    header = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind)
    return header + value + bytes(-len(value) % 4)


def family_number(sock: socket.socket, name: bytes) -> int:
    """The number that the kernel has given to a family. Raises OSError: ENOENT if there is none."""
    asked = _COMMAND.pack(_GET_FAMILY, 1) + _attribute(_FAMILY_NAME, name + b"\0")
    (answer,) = exchange(sock, _CONTROLLER, asked)
    at = _COMMAND.size
    while True:
        length, kind = _ATTRIBUTE.unpack_from(answer, at)
        if kind == _FAMILY_ID:
            return int(_U16.unpack_from(answer, at + _ATTRIBUTE.size)[0])
        at += _padded(length)


def exchange(sock: socket.socket, kind: int, request: bytes) -> list[bytes]:
    """Send a request, and wait until the kernel has done it; its answers, without netlink's own
    header. Raises OSError with the kernel's reason."""
    header = _HEADER.pack(_HEADER.size + len(request), kind, _REQUEST | _ACK, 0, 0)
    sock.send(header + request)
    answers: list[bytes] = []
    while True:
        data = sock.recv(_ROOM)
        while data:
            length, kind, *_ = _HEADER.unpack_from(data)
            answer = data[_HEADER.size : length]
            if kind == _ERROR:
                (code,) = _CODE.unpack_from(answer)
                if code:
                    raise OSError(-code, os.strerror(-code))
                return answers
            answers.append(answer)
            data = data[_padded(length) :]


def _padded(length: int) -> int:
    return length + -length % 4
