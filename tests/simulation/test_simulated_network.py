"""TCP as the simulated world has it: what the kernel does, and the faults."""

from __future__ import annotations

import errno
import fcntl
import socket
import termios
from array import array

import pytest
import trio

from tests.simulation.network import ROOM, End, ListeningSocket, PlainSocket
from tests.simulation.running import Simulation

LONG_S = 10.0  # in which all arrives that was sent
TARGET = ("10.0.0.2", 3260)


async def _all(sock: PlainSocket) -> bytes:
    """What can be read now."""
    found = b""
    while True:
        try:
            part = sock.recv(4096)
        except BlockingIOError:
            return found
        if not part:
            return found + b"|"  # the end
        found += part


def _broken(sock: PlainSocket) -> int:
    """Which error a read and a write meet."""
    with pytest.raises(OSError) as caught:
        sock.recv(1)
    with pytest.raises(BrokenPipeError):
        sock.send(b"x")
    assert caught.value.errno is not None
    return caught.value.errno


def test_bytes_come_in_order_and_in_pieces() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        sizes: set[int] = set()
        sent = received = b""
        for number in range(200):
            data = bytes([number]) * (number + 1)
            here.sendall(data)
            sent += data
            await simulation.loop.until_readable(there)
            part = there.recv(4096)
            sizes.add(len(part))
            received += part
        await trio.sleep(LONG_S)
        assert received + await _all(there) == sent
        assert sizes - set(range(1, 201)) or len(sizes) < 200  # not what was sent at a time

    simulation.run(body)


def test_a_send_takes_what_there_is_room_for() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        assert here.send(bytes(ROOM + 1)) == ROOM
        with pytest.raises(BlockingIOError):
            here.send(b"x")
        assert not here.end.writable()
        with trio.move_on_after(LONG_S) as scope:
            await simulation.loop.until_writable(here)
        assert scope.cancelled_caught
        assert len(there.recv(100)) == 100
        await simulation.loop.until_writable(here)
        assert here.send(bytes(ROOM)) == 100

    simulation.run(body)


def test_an_end_and_what_is_sent_after_it() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        here.sendall(b"last")
        here.shutdown(socket.SHUT_WR)
        await trio.sleep(LONG_S)
        assert await _all(there) == b"last|"
        there.sendall(b"answer")
        await trio.sleep(LONG_S)
        assert await _all(here) == b"answer"
        there.close()
        await trio.sleep(LONG_S)
        assert await _all(here) == b"|"
        assert simulation.loop.open == 1

    simulation.run(body)


@pytest.mark.parametrize("discards", [False, True])
def test_a_close_with_bytes_that_nobody_has_read_resets(discards: bool) -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> int:
        if discards:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"")
        else:
            there.sendall(b"x")
        await trio.sleep(LONG_S)
        here.close()
        await trio.sleep(LONG_S)
        return _broken(there)

    assert simulation.run(body) == errno.ECONNRESET


def test_what_comes_to_a_closed_socket_resets() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> int:
        here.close()
        await trio.sleep(LONG_S)
        there.sendall(b"x")
        await trio.sleep(LONG_S)
        return _broken(there)

    assert simulation.run(body) == errno.ECONNRESET


def test_a_line_that_is_cut_tells_both_and_loses_what_is_on_its_way() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> list[int]:
        here.sendall(b"lost")
        simulation.network.cut(here.end)
        await trio.sleep(LONG_S)
        return [_broken(here), _broken(there)]

    assert simulation.run(body) == [errno.ECONNRESET] * 2


def test_half_a_line_is_told_when_it_sends() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        simulation.network.halve(here.end)
        await trio.sleep(LONG_S)
        assert _broken(here) == errno.ECONNRESET
        assert await _all(there) == b""
        there.sendall(b"is anybody there?")
        await trio.sleep(LONG_S)
        assert _broken(there) == errno.ECONNRESET

    simulation.run(body)


def test_a_hole_tells_nobody() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        simulation.network.lose(here.end)
        here.sendall(b"x")
        here.close()
        await trio.sleep(LONG_S)
        assert await _all(there) == b""

    simulation.run(body)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_line_that_is_cut_in_the_middle_of_a_message(size: int) -> None:
    simulation = Simulation(size)
    here, there = simulation.network.pair()

    async def body() -> None:
        simulation.network.limit(there.end, size)
        here.sendall(b"abcdefgh")
        await trio.sleep(LONG_S)
        assert there.recv(size) == b"abcdefgh"[:size]
        assert _broken(there) == errno.ECONNRESET
        assert _broken(here) == errno.ECONNRESET

    simulation.run(body)


def test_sockets_of_trio() -> None:
    """Listening, accepting, peeking, and the plain socket that goes on."""
    simulation = Simulation()
    network = simulation.network

    async def body() -> None:
        with (
            trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as refused,
            pytest.raises(ConnectionRefusedError),
        ):
            await refused.connect(TARGET)
        (listener,) = await trio.open_tcp_listeners(TARGET[1], host=TARGET[0])
        with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
            await client.connect(TARGET)
            stream = await listener.accept()
            await client.send(b"hello")
            assert await stream.socket.recv(3, socket.MSG_PEEK) != b""
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 5)
            await simulation.loop.until_readable(stream.socket)
            plain = network.plain(stream.socket)
            assert plain.recv(9) == b"hello"
            assert stream.socket.fileno() == -1
            assert plain.getpeername() == client.getsockname()
            network.dark.add(TARGET)
            with trio.move_on_after(LONG_S) as scope:
                with trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as other:
                    await other.connect(TARGET)
            assert scope.cancelled_caught
        plain.close()
        await listener.aclose()
        assert simulation.loop.open == 0
        assert network.alive() == []

    simulation.run(body)


def test_the_lowest_number_that_is_free_is_given_again() -> None:
    network = Simulation().network
    ends = [End(network, TARGET, TARGET) for _ in range(3)]
    ends[1].close()
    assert End(network, TARGET, TARGET).number == ends[1].number


def _counts(sock: PlainSocket) -> tuple[int, int]:
    """Bytes that the other end has not read, and that are to be read here, as a program asks."""
    found: list[int] = []
    for which in (termios.TIOCOUTQ, termios.FIONREAD):
        count = array("i", [0])
        fcntl.ioctl(sock, which, count)
        found += count
    return found[0], found[1]


def test_what_the_other_end_has_not_read_is_counted() -> None:
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        here.sendall(b"four")
        assert _counts(here) == (4, 0)
        await trio.sleep(LONG_S)
        assert (_counts(here), _counts(there)) == ((4, 0), (0, 4))
        assert len(there.recv(3)) == 3
        assert (_counts(here), _counts(there)) == ((1, 0), (0, 1))
        there.close()  # with a byte unread
        await trio.sleep(LONG_S)
        assert _counts(here) == (0, 0)
        errors = [here.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for _ in range(2)]
        assert errors == [errno.ECONNRESET, 0]  # told once
        here.close()

    simulation.run(body)


def test_a_plain_socket_that_listens() -> None:
    simulation = Simulation()
    network = simulation.network
    closed: list[str] = []

    async def body() -> None:
        with ListeningSocket(network, TARGET) as listening:
            listening.setblocking(False)
            with pytest.raises(BlockingIOError):
                listening.accept()
            end = await network.connect(TARGET)
            await simulation.loop.until_readable(listening)
            sock, (_, port) = listening.accept()
            assert sock.getpeername()[1] == port == end.local[1]
            end.on_close = lambda: closed.append("here")
            for _ in range(2):
                end.close()
            assert closed == ["here"]  # once
            sock.close()
        with pytest.raises(ConnectionRefusedError):
            await network.connect(TARGET)

    simulation.run(body)
    assert simulation.loop.open == 0
