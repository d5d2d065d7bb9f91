"""A connected socket as a byte stream."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from iserblk.errors import ConnectionLost
from iserblk.sockets.stream import SocketStream

Pair = tuple[SocketStream, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    yield stream, theirs
    stream.close()
    theirs.close()


def test_several_buffers_leave_at_once(pair: Pair) -> None:
    stream, theirs = pair
    assert stream.send([b"head", memoryview(b"data")], 8) == 8
    assert theirs.recv(100) == b"headdata"


def test_several_buffers_are_filled_at_once(pair: Pair) -> None:
    stream, theirs = pair
    theirs.sendall(b"abcdef")
    one, two = bytearray(4), bytearray(4)
    assert stream.receive([memoryview(one), memoryview(two)]) == 6
    assert bytes(one) == b"abcd" and bytes(two[:2]) == b"ef"


def test_it_never_waits(pair: Pair) -> None:
    stream, _ = pair
    assert stream.receive([memoryview(bytearray(1))]) < 0
    sent = 0
    while (count := stream.send([bytes(1 << 20)], 1 << 20)) > 0:
        sent += count
    assert sent > 0  # as much as the socket takes, and no more


def test_the_end_of_the_stream_is_no_bytes(pair: Pair) -> None:
    stream, theirs = pair
    theirs.shutdown(socket.SHUT_WR)
    assert stream.receive([memoryview(bytearray(1))]) == 0


def test_a_peer_that_is_gone_is_a_lost_connection(pair: Pair) -> None:
    stream, theirs = pair
    theirs.close()
    with pytest.raises(ConnectionLost, match="Broken pipe"):
        stream.send([b"x"], 1)


def test_disconnecting_is_found_by_receiving(pair: Pair) -> None:
    stream, theirs = pair
    stream.disconnect()
    stream.disconnect()
    assert stream.receive([memoryview(bytearray(1))]) == 0
    assert theirs.recv(1) == b""


def test_closed(pair: Pair) -> None:
    stream, _ = pair
    stream.close()
    assert stream.fileno() == -1
    stream.disconnect()
    with pytest.raises(ConnectionLost, match="closed"):
        stream.send([b"x"], 1)
    with pytest.raises(ConnectionLost, match="closed"):
        stream.receive([memoryview(bytearray(1))])


@pytest.mark.parametrize(
    ("family", "host", "text"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1:{}"), (socket.AF_INET6, "::1", "[::1]:{}")],
)
def test_it_names_both_ends(family: int, host: str, text: str) -> None:
    with socket.create_server((host, 0), family=socket.AddressFamily(family)) as listener:
        port = listener.getsockname()[1]
        stream = SocketStream(socket.create_connection((host, port)))
        accepted, _ = listener.accept()
        try:
            about = stream.describe()
            assert about["peer"] == text.format(port)
            assert about["local"] == text.format(accepted.getpeername()[1])
        finally:
            stream.close()
            accepted.close()
