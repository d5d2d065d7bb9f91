"""A connection that is lost between MPA start-up and the first message."""

from __future__ import annotations

import gc
import socket

import pytest
import trio

from iserblk.errors import TransportError
from iserblk.initiator.connecting import iwarp
from iserblk.rcap.iwarp import queuepair


@pytest.mark.plain("derives from a compiled class")
def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is reset before the initiator's first FPDU: the socket is closed."""
    made: list[socket.socket] = []

    class Broken(queuepair.IwarpQueuePair):
        def __init__(self, sock: socket.socket, *_arguments: object, **_options: object) -> None:
            made.append(sock)
            raise TransportError("reset")

    async def start(*_arguments: object) -> None: ...

    monkeypatch.setattr(iwarp, "IwarpQueuePair", Broken)
    monkeypatch.setattr(iwarp, "start_mpa", start)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = iwarp.Address(socket.AF_INET, server.getsockname())
            with pytest.raises(TransportError, match="reset"):
                await iwarp.connect_iwarp(
                    [address], "portal", 5.0, 5.0, private_data=b"", crc=True, segments=0, ird=1
                )

    trio.run(main)
    gc.collect()
    assert [sock.fileno() for sock in made] == [-1]
