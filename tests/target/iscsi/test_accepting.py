"""The first bytes of a TCP connection, however they come."""

from __future__ import annotations

import socket

import pytest
import trio
import trio.testing

from iserblk.errors import RemoteProtocolError
from iserblk.rcap.iwarp.mpa import REQUEST_KEY
from iserblk.target.iscsi import accepting


class Counting:
    """A trio socket that counts how often it is looked into."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.sock = sock
        self.looks = 0

    async def recv(self, size: int, flags: int) -> bytes:
        self.looks += 1
        return await self.sock.recv(size, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self.sock, name)


async def pair() -> tuple[trio.SocketStream, Counting]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    theirs = await trio.open_tcp_stream(*listener.socket.getsockname()[:2])
    ours = await listener.accept()
    await listener.aclose()
    return theirs, Counting(ours.socket)


async def test_part_of_a_key_is_not_looked_at_again_and_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A peer that sends half a key and no more costs no processor time, nor do many such peers."""
    theirs, ours = await pair()
    found: list[bool | None] = []

    async def look() -> None:
        found.append(await accepting.is_iwarp(ours))  # type: ignore[arg-type]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for count, at in enumerate(range(0, 16, 4), 1):
            await theirs.send_all(REQUEST_KEY[at : at + 4])
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(10)  # of the mock clock: nothing may happen meanwhile
            assert ours.looks == count
    assert found == [True]
    assert ours.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    await theirs.aclose()
    ours.close()  # type: ignore[operator]


@pytest.mark.parametrize("sent", [b"", b"M", REQUEST_KEY[:15]])
async def test_a_peer_that_goes_away_with_part_of_a_key(sent: bytes) -> None:
    theirs, ours = await pair()
    if sent:
        await theirs.send_all(sent)
    await theirs.aclose()
    with trio.fail_after(20):
        assert await accepting.is_iwarp(ours) is None  # type: ignore[arg-type]
    ours.close()  # type: ignore[operator]


async def test_other_bytes_behind_part_of_a_key() -> None:
    theirs, ours = await pair()
    await theirs.send_all(b"MPA")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(theirs.send_all, b"?" * 16)
        with pytest.raises(RemoteProtocolError, match="neither iSER"):
            await accepting.is_iwarp(ours)  # type: ignore[arg-type]
    await theirs.aclose()
    ours.close()  # type: ignore[operator]
