"""Packets between two servers of one device, and the sockets beside them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.nbd.kernel.channel import PacketSocket, check_peer, connected
from tests.support.descriptors import descriptors, descriptors_to_begin_with

Ends = tuple[PacketSocket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A channel, and the other end of it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = PacketSocket(here)
    with there:
        yield channel, there
        channel.close()


async def test_a_packet_takes_a_socket_with_it(ends: Ends) -> None:
    """The receiver has one of its own: the sender may close what it has sent."""
    channel, there = ends
    other = PacketSocket(there)
    mine, theirs = socket.socketpair()
    with mine:
        with theirs:
            await channel.send(b"with", theirs)
        await channel.send(b"without")
        channel.send_at_once(b"at once")
        packet, (arrived,) = await other.receive_with_sockets()
        assert packet == b"with" and arrived.type == socket.SOCK_STREAM
        with arrived:
            mine.sendall(b"through it")
            assert arrived.recv(100) == b"through it"
    await other.until_received()
    assert await other.receive_with_sockets() == (b"without", [])
    assert await other.receive() == b"at once"
    channel.close()
    assert await other.receive() == b""
    other.close()


async def test_what_comes_beside_a_packet_that_has_none_is_closed(ends: Ends) -> None:
    channel, there = ends
    before = descriptors_to_begin_with()
    socket.send_fds(there, [b"packet"], [there.fileno()])
    assert await channel.receive() == b"packet"
    assert descriptors() == before


@pytest.mark.parametrize("count", [5, 30])
async def test_more_sockets_than_there_is_room_for(ends: Ends, count: int) -> None:
    channel, there = ends
    before = descriptors_to_begin_with()
    socket.send_fds(there, [b"packet"], [there.fileno()] * count)
    with pytest.raises(RemoteProtocolError, match="more descriptors than belong to a message"):
        await channel.receive_with_sockets()
    assert descriptors() == before


async def test_a_descriptor_that_is_no_socket(ends: Ends) -> None:
    channel, there = ends
    before = descriptors_to_begin_with()
    null = os.open(os.devnull, os.O_RDONLY)
    socket.send_fds(there, [b"packet"], [there.fileno(), null, there.fileno()])
    os.close(null)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)):
        await channel.receive_with_sockets()
    assert descriptors() == before


async def test_nothing_comes_behind_the_last_packet(ends: Ends) -> None:
    channel, there = ends
    there.send(b"there")
    assert channel.receive_last() == b"there"
    with pytest.raises(BrokenPipeError):
        there.send(b"late")


async def test_what_is_there_at_once(ends: Ends) -> None:
    """The other end does not notice."""
    channel, there = ends
    with pytest.raises(BlockingIOError):
        channel.receive_at_once()
    there.send(b"one")
    there.send(b"two")
    assert [channel.receive_at_once(), channel.receive_at_once()] == [b"one", b"two"]
    there.send(b"last")
    there.send(b"and more")
    assert [channel.receive_last(), channel.receive_at_once()] == [b"last", b"and more"]
    assert channel.receive_at_once() == b""


async def test_there_is_no_last_packet(ends: Ends) -> None:
    """Nor does one come later."""
    channel, there = ends
    assert channel.receive_last() == b""
    with pytest.raises(BrokenPipeError):
        there.send(b"late")


async def test_where_nobody_listens(tmp_path: Path) -> None:
    before = descriptors_to_begin_with()
    with pytest.raises(FileNotFoundError):
        connected(tmp_path / "nobody")
    assert descriptors() == before


def test_a_peer_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        check_peer(here)
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        with pytest.raises(RemoteProtocolError, match=f"of user {mine}"):
            check_peer(here)
