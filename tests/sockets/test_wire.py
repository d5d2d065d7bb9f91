"""System calls on the stream: both forms, the compiled one and the plain one."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterator

import pytest

from iserblk.sockets import wire
from iserblk.sockets.wire import WOULD_BLOCK, SocketWire, Wire

Make = Callable[[socket.socket], Wire]


def compiled(sock: socket.socket) -> Wire:
    syscalls = pytest.importorskip(
        "iserblk.sockets._syscalls", reason="not compiled: run scripts/setup"
    )
    made: Wire = syscalls.SyscallWire(sock.fileno(), True)
    return made


def plain(sock: socket.socket) -> Wire:
    return SocketWire(sock, True)


@pytest.fixture(params=[plain, compiled])
def make(request: pytest.FixtureRequest) -> Make:
    form: Make = request.param
    return form


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    left.setblocking(False)
    right.setblocking(False)
    with left, right:
        yield left, right


def test_buffers_of_every_kind(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    source = bytearray(b"..third..")
    pieces = [b"first ", memoryview(b"second "), memoryview(source)[2:7], b""]
    assert make(pair[0]).send(pieces, 18) == 18  # type: ignore[arg-type]
    first, second = bytearray(4), bytearray(100)
    assert make(pair[1]).receive([memoryview(first), memoryview(second)]) == 18
    assert bytes(first + second[:14]) == b"first second third"
    assert make(pair[0]).send([b"x"], 1) == 1
    assert make(pair[1]).receive([memoryview(second)[50:]]) == 1 and second[50] == ord("x")


@pytest.mark.parametrize("count", [1, 128, 129, 1024])
def test_as_many_buffers_as_the_system_takes(
    make: Make, pair: tuple[socket.socket, socket.socket], count: int
) -> None:
    pieces = [bytes((number & 255,)) * 3 for number in range(count)]
    wired = make(pair[0])
    with pytest.raises((ValueError, OSError)):
        wired.send([*pieces, *[b"x"] * 1024], 3 * count + 1024)
    assert wired.send(pieces, 3 * count) == 3 * count  # type: ignore[arg-type]
    room = bytearray(4096)
    assert make(pair[1]).receive([memoryview(room)]) == 3 * count
    assert room[: 3 * count] == b"".join(pieces)


def test_a_socket_takes_little_memory(pair: tuple[socket.socket, socket.socket]) -> None:
    assert sys.getsizeof(compiled(pair[0])) <= 128


def test_not_now(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    """Empty to receive, full to send: neither waits, neither raises."""
    assert make(pair[1]).receive([memoryview(bytearray(10))]) == WOULD_BLOCK
    sender = make(pair[0])
    chunk = bytes(100_000)
    sent = 0
    while (count := sender.send([chunk, chunk], 200_000)) != WOULD_BLOCK:
        assert count > 0
        sent += count
    received = 0
    receiver = make(pair[1])
    room = memoryview(bytearray(1 << 20))
    while (count := receiver.receive([room])) != WOULD_BLOCK:
        received += count
    assert received == sent


def test_ends(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    """End of stream is 0; a send to a closed socket raises, without a signal."""
    pair[1].close()
    assert make(pair[0]).receive([memoryview(bytearray(10))]) == 0
    with pytest.raises(BrokenPipeError):
        make(pair[0]).send([b"x"], 1)


def test_no_buffer_is_kept(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    """The caller may resize its memory at once: nothing points to it any more."""
    source, sink = bytearray(b"abc"), bytearray(10)
    wired = make(pair[0])
    wired.send([source, memoryview(source)], 6)  # type: ignore[list-item]
    source.clear()
    receiver = make(pair[1])
    receiver.receive([memoryview(sink), memoryview(sink)])
    with pytest.raises(TypeError):
        wired.send([b"ok", "not bytes"], 2)  # type: ignore[list-item]
    with pytest.raises((TypeError, BufferError)):
        receiver.receive([memoryview(b"read-only")])
    sink.clear()


def test_closed_descriptor(make: Make, pair: tuple[socket.socket, socket.socket]) -> None:
    wired = make(pair[0])
    pair[0].close()
    with pytest.raises(OSError, match="descriptor") as caught:
        wired.send([b"x"], 1)
    assert caught.value.errno == errno.EBADF


def test_the_quickest_form_is_taken(pair: tuple[socket.socket, socket.socket]) -> None:
    name = type(wire.wire(pair[0], True)).__name__
    try:
        import iserblk.sockets._syscalls  # noqa: F401, PLC0415
    except ImportError:
        assert name == "SocketWire"
    else:
        assert name == "SyscallWire"
