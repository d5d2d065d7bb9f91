"""From a socket of trio's to a plain one."""

from __future__ import annotations

import socket

import trio

from iserblk.sockets.plain import plain
from iserblk.sockets.stream import SocketStream
from tests.simulation.network import PlainSocket
from tests.simulation.running import Simulation


def test_the_descriptor_goes_on_in_the_plain_socket() -> None:
    here, there = socket.socketpair()

    async def body() -> None:
        mine = trio.socket.from_stdlib_socket(here)
        number = mine.fileno()
        with plain(mine) as taken:
            assert (taken.fileno(), mine.fileno()) == (number, -1)
            there.sendall(b"x")
            assert taken.recv(9) == b"x"

    with there:
        trio.run(body)


def test_a_simulated_world_has_its_own() -> None:
    """And a stream takes it as it takes one of the system."""
    simulation = Simulation()
    here, there = simulation.network.pair()

    async def body() -> None:
        stream = SocketStream(here)
        assert stream.send([b"a", memoryview(b"bc")], 3) == 3
        assert stream.receive([memoryview(bytearray(9))]) == -1
        await trio.sleep(1.0)
        assert there.recv(9) == b"abc"
        there.sendall(b"defg")
        await trio.sleep(1.0)
        parts = [memoryview(bytearray(3)), memoryview(bytearray(3))]
        assert stream.receive(parts) == 4
        assert (bytes(parts[0]), bytes(parts[1])) == (b"def", b"g\0\0")
        stream.close()
        assert here.fileno() == -1

    simulation.run(body)
    assert isinstance(here, PlainSocket)
