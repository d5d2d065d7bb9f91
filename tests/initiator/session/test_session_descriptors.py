"""The descriptors of several connections as one: when it is readable, and what it forgets."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.descriptors import Descriptors
from iserblk.iscsi.keys import SessionParameters
from tests.initiator.fake import FakeDatamover


class OnSocket(FakeDatamover):
    """A FakeDatamover with a socket, whose other end is ``peer``."""

    def __init__(self) -> None:
        super().__init__()
        self.sock, self.peer = socket.socketpair()

    def fileno(self) -> int:
        return self.sock.fileno()

    def wants_write(self) -> bool:
        return self.full

    def close(self) -> None:
        self.sock.close()
        self.peer.close()


class Bench:
    def __init__(self) -> None:
        self.descriptors = Descriptors()
        self.dms = [OnSocket(), OnSocket()]
        self.connections = [self._connection(dm) for dm in self.dms]

    def _connection(self, dm: OnSocket) -> Connection:
        parameters = SessionParameters(immediate_data=False)
        return Connection(dm, [], parameters, "portal:3260")

    def ready(self) -> bool:
        return bool(select.select([self.descriptors], [], [], 0)[0])

    def close(self) -> None:
        self.descriptors.close()
        for dm in self.dms:
            dm.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    for connection in made.connections:
        made.descriptors.add(connection)
    yield made
    made.close()


@pytest.mark.parametrize("which", [0, 1])
def test_any_connection_that_has_heard_something_makes_it_readable(
    bench: Bench, which: int
) -> None:
    assert not bench.ready()
    bench.dms[which].peer.send(b"x")
    assert bench.ready()
    bench.dms[which].sock.recv(1)
    assert not bench.ready()


def test_room_in_the_socket_matters_only_while_bytes_wait(bench: Bench) -> None:
    """Otherwise a driver would never sleep: there is room nearly always."""
    dm, connection = bench.dms[1], bench.connections[1]
    dm.full = True
    bench.descriptors.update(connection)
    assert bench.ready()
    dm.full = False
    bench.descriptors.update(connection)
    assert not bench.ready()
    dm.peer.send(b"x")
    assert bench.ready()  # it is listened to as before


def test_bytes_wait_already_when_a_connection_is_added(bench: Bench) -> None:
    dm, connection = bench.dms[0], bench.connections[0]
    bench.descriptors.remove(connection)
    dm.full = True
    bench.descriptors.add(connection)
    assert bench.ready()


def test_a_connection_that_is_removed_is_not_heard_any_more(bench: Bench) -> None:
    """Nor is it after ``update``, which another thread may call a moment later."""
    dm, connection = bench.dms[0], bench.connections[0]
    dm.peer.send(b"x")
    bench.descriptors.remove(connection)
    dm.full = True
    bench.descriptors.update(connection)
    bench.descriptors.remove(connection)
    assert not bench.ready()
    bench.dms[1].peer.send(b"x")
    assert bench.ready()


def test_a_second_add_changes_nothing(bench: Bench) -> None:
    dm, connection = bench.dms[0], bench.connections[0]
    dm.full = True
    bench.descriptors.update(connection)
    bench.descriptors.add(connection)
    assert bench.ready()
    dm.full = False
    bench.descriptors.update(connection)
    assert not bench.ready()


def test_a_connection_without_a_descriptor_is_left_out(bench: Bench) -> None:
    """Its datamover has ended before the session took it."""
    ended = bench.dms[0]
    bench.descriptors.remove(bench.connections[0])
    ended.sock.close()
    bench.descriptors.add(bench.connections[0])
    bench.descriptors.remove(bench.connections[0])
    bench.dms[1].peer.send(b"x")
    assert bench.ready()


def test_after_the_end_there_is_no_descriptor_and_no_error(bench: Bench) -> None:
    """Other threads may still call ``update``, and a connection may be on its way in."""
    assert bench.descriptors.fileno() >= 0
    bench.descriptors.close()
    assert bench.descriptors.fileno() == -1
    bench.dms[0].full = True
    bench.descriptors.update(bench.connections[0])
    bench.descriptors.add(bench.connections[0])
    bench.descriptors.remove(bench.connections[0])
    bench.descriptors.close()
    assert bench.descriptors.fileno() == -1
