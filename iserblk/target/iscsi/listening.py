"""Listening for the target: TCP sockets, and rdma_cm on the same addresses and ports."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import trio

from iserblk.datamover.iser import ConnectionFlags
from iserblk.errors import BadArgument, Busy, NotSupported, PermissionDenied
from iserblk.rcap import verbs
from iserblk.rcap.iwarp.sctp_association import open_socket
from iserblk.rcap.seam import QueuePair
from iserblk.sockets.pacing import unpace
from iserblk.target.iscsi.accepting import RECEIVE_SIZE, reply_flags
from iserblk.target.iscsi.login import LOGIN_SLOTS

log = logging.getLogger(__name__)

SCTP_BACKLOG = 128
READ_DEPTH = 64  # RDMA Reads at a time, if the device can do so many


def name_of(address: object) -> str:
    """The text form of a socket's address, ``host:port`` or ``[host]:port``."""
    assert isinstance(address, tuple)
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_any_address(address: object) -> bool:
    """Whether the address means all addresses of the machine. A client cannot connect to such an
    address."""
    assert isinstance(address, tuple)
    return address[0] in ("0.0.0.0", "::")


async def listen_tcp(listen: str, or_another: bool = False) -> list[trio.SocketListener]:
    """Listen at ``HOST:PORT``; the caller closes the listeners. ``or_another``: while the port is
    in use, at any other port. Raises BadArgument, Busy or PermissionDenied, with texts that name
    the address."""
    if "@" in listen:
        raise BadArgument("listen: give HOST:PORT, without a user or secret")
    host, separator, port_text = listen.rpartition(":")
    if host.startswith("[") is not host.endswith("]"):
        raise BadArgument(f"listen {listen}: write an IPv6 address in brackets: [::1]:3260")
    host = host.removeprefix("[").removesuffix("]")
    number = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not separator or not number or int(port_text) > 0xFFFF:
        raise BadArgument(f"listen {listen}: give HOST:PORT, e.g. 127.0.0.1:3260 (port 0: any)")
    port = int(port_text)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host or None)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a valid host name
        words = getattr(error, "strerror", None) or error
        raise BadArgument(f"listen {listen}: cannot resolve the host: {words}") from None
    except PermissionError:
        raise PermissionDenied(
            f"listen {listen}: not permitted; use a port of 1024 or more, e.g. 3260"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE or "in use" in str(error.__cause__ or error):
            if or_another:
                log.info("%s is in use: the target listens at another port", listen)
                return await listen_tcp(f"{listen.rpartition(':')[0]}:0")
            raise Busy(f"listen {listen}: the port is in use; choose another, or 0") from None
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        text = os.strerror(cause.errno) if cause.errno else str(cause)
        if cause.errno == errno.EADDRNOTAVAIL:
            text = "this machine has no such address (`ip address` lists those that it has)"
        raise BadArgument(f"listen {listen}: cannot listen there: {text}") from None
    if port == 0:
        # Each address would get a port of its own, but the URL can name only one port.
        for extra in listeners[1:]:
            await extra.aclose()
        del listeners[1:]
    for each in listeners:
        unpace(each.socket, each.socket.getsockname())
    return listeners


def listen_sctp(address: tuple[Any, ...]) -> trio.SocketListener:
    """Listen by SCTP on a socket address; the caller closes the listener. Raises NotSupported,
    Busy or BadArgument."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        sock = open_socket(family)
    except NotSupported as error:
        raise NotSupported(f"transport=sctp: {error}; or leave out transport=sctp") from None
    except OSError as error:
        raise _cannot_listen(address, error) from None
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(SCTP_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Busy(f"transport=sctp: {name_of(address)} is in use by SCTP") from None
        raise _cannot_listen(address, error) from None
    return trio.SocketListener(trio.socket.from_stdlib_socket(sock))


def _cannot_listen(address: tuple[Any, ...], error: OSError) -> BadArgument:
    return BadArgument(f"transport=sctp: cannot listen on {name_of(address)}: {error.strerror}")


class RdmaListener(Protocol):
    """A listener of rdma_cm. No method blocks."""

    def fileno(self) -> int: ...

    def progress(self, now: float) -> Sequence[QueuePair]:
        """Process events. Returns the connections that are now established; the caller owns
        them."""
        ...

    def close(self) -> None: ...


def _listener(
    host: str,
    port: int,
    *,
    receive_size: int,
    receives: int,
    ird: int,
    reply: Callable[[bytes], bytes],
) -> RdmaListener:
    """Make a listener of the verbs provider, which is imported only when it is needed."""
    from iserblk.rcap.verbs.listening import VerbsListener  # noqa: PLC0415

    return VerbsListener(
        host, port, receive_size=receive_size, receives=receives, ird=ird, reply=reply
    )


make_listener = _listener
available = verbs.available


def listen_rdma(addresses: Sequence[Any]) -> list[RdmaListener]:
    """Listen by rdma_cm on socket addresses; the caller closes the listeners. Raises NotSupported,
    PermissionDenied, Busy or another IserblkError; no listener is left open then."""
    missing = available()
    if missing is not None:
        text = f"--rcap verbs: {missing}; or leave out --rcap verbs"
        if os.path.exists(verbs.CM_DEVICE) and not os.access(verbs.CM_DEVICE, os.R_OK | os.W_OK):
            raise PermissionDenied(text)
        raise NotSupported(text)
    listeners: list[RdmaListener] = []
    try:
        for address in addresses:
            try:
                listeners.append(
                    make_listener(
                        *address[:2],
                        receive_size=RECEIVE_SIZE,
                        receives=LOGIN_SLOTS,
                        ird=READ_DEPTH,
                        reply=_reply,
                    )
                )
            except Busy:
                raise Busy(
                    f"--rcap verbs: {name_of(address)} is in use by rdma_cm, or belongs to an"
                    " iWARP device, which shares the ports of TCP; leave out --rcap verbs:"
                    " initiators with iWARP devices do not need it"
                ) from None
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _reply(request: bytes) -> bytes:
    return reply_flags(ConnectionFlags.unpack(request)).pack()
