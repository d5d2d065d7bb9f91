"""One connection to an iSNS server, for initiators and targets. Runs in trio."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from iserblk.discovery import isns
from iserblk.errors import ConnectionLost, IserblkError, PermissionDenied

_REFUSALS = (6, 8)  # status: the source is unknown, or not authorized


class IsnsConnection:
    """One request at a time. ``name``: of the server, for errors. The caller owns ``stream``."""

    def __init__(self, stream: trio.abc.Stream, name: str) -> None:
        self.name = name
        self._stream = stream
        self._reader = isns.MessageReader()
        self._transaction = 0

    def refused(self, status: int) -> IserblkError:
        words = f"{self.name}: the iSNS server refuses: {isns.status_words(status)}"
        if status in _REFUSALS:
            return PermissionDenied(f"{words}; admit this node's name on the server")
        return IserblkError(words)

    async def ask(
        self, function: int, attributes: Sequence[isns.Attribute], flags: int = 0
    ) -> tuple[int, list[isns.Attribute]]:
        """Send a request, and wait for its response. Returns its status and attributes. Raises
        ConnectionLost, RemoteProtocolError; the connection is to be closed then."""
        self._transaction += 1
        try:
            await self._stream.send_all(
                isns.encode_request(function, self._transaction, attributes, flags)
            )
            while True:
                for message in self._reader.feed(await self._receive()):
                    if message.function == function | isns.RESPONSE and (
                        message.transaction == self._transaction
                    ):
                        return isns.response_untrusted(message)
                    # Any other message is unsolicited, and ignored.
        except trio.BrokenResourceError as error:
            cause = error.__cause__
            words = cause.strerror if isinstance(cause, OSError) else "closed by the server"
            raise ConnectionLost(
                f"{self.name}: connection lost ({words}); is this an iSNS server?"
            ) from None

    async def _receive(self) -> bytes:
        data = await self._stream.receive_some(65536)
        if not data:
            raise ConnectionLost(f"{self.name} closed the connection; is this an iSNS server?")
        return bytes(data)
