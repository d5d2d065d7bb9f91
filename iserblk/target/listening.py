"""Where a target takes connections: sockets that listen."""

from __future__ import annotations

import errno
import os
import socket

import trio

from iserblk.errors import BadArgument, Busy, PermissionDenied


def name_of(address: object) -> str:
    """A socket's address, as people write it."""
    assert isinstance(address, tuple)
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def listen_tcp(listen: str) -> list[trio.SocketListener]:
    """Raises BadArgument, PermissionDenied or Busy, in the words of ``--listen``."""
    host, separator, port_text = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not port_text.isdecimal() or int(port_text) > 0xFFFF:
        raise BadArgument(f"--listen {listen}: give HOST:PORT, e.g. 127.0.0.1:3260 (port 0: any)")
    port = int(port_text)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host or None)
    except socket.gaierror as error:
        raise BadArgument(f"--listen {listen}: cannot resolve the host: {error.strerror}") from None
    except PermissionError:
        raise PermissionDenied(
            f"--listen {listen}: not permitted; use a port of 1024 or more, e.g. 3260"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE or "in use" in str(error.__cause__ or error):
            raise Busy(f"--listen {listen}: the port is in use; choose another, or 0") from None
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        text = os.strerror(cause.errno) if cause.errno else str(cause)
        raise BadArgument(f"--listen {listen}: cannot listen there: {text}") from None
    if port == 0:
        # Several addresses would get several ports: one URL can name one only.
        for extra in listeners[1:]:
            await extra.aclose()
        del listeners[1:]
    return listeners
