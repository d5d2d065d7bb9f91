"""One request to an SLP agent by TCP, for initiators and targets. Runs in trio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio

from iserblk.discovery import slp
from iserblk.errors import ConnectionLost, RemoteProtocolError


async def ask_by_stream(
    stream: trio.abc.Stream, name: str, request: bytes, expected: int
) -> slp.Message:
    """Send a request; returns the answer, which has the function ``expected``. ``name``: of the
    agent, for errors. The caller owns ``stream``. Raises ConnectionLost, RemoteProtocolError."""
    try:
        await stream.send_all(request)
        data = b""
        with named(name):
            while (length := slp.length_untrusted(data)) is None or len(data) < length:
                more = await stream.receive_some(65536)
                if not more:
                    raise ConnectionLost(f"{name} closed the connection; is this an SLP agent?")
                data += more
            message = slp.message_untrusted(data)
            if not answers(message, request, expected):
                raise RemoteProtocolError("SLP", "an answer to another request")
            return message
    except trio.BrokenResourceError as error:
        cause = error.__cause__
        words = cause.strerror if isinstance(cause, OSError) else "closed by the agent"
        raise ConnectionLost(f"{name}: connection lost ({words})") from None


def answers(message: slp.Message, request: bytes, expected: int) -> bool:
    """Whether ``message`` is the answer to ``request``."""
    return message.function == expected and message.xid == int.from_bytes(request[10:12], "big")


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the agent in errors about what it sent."""
    try:
        yield
    except RemoteProtocolError as error:
        text = str(error).removeprefix(f"{error.layer}: ")
        raise RemoteProtocolError(error.layer, f"{name}: {text}") from None
