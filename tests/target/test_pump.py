"""What comes on a connection of the target is handled as it comes, until the connection ends."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio

from iserblk.errors import ConnectionLost
from iserblk.target.iscsi.owners import ConnectionDriver, Undriven
from iserblk.target.pump import Pump
from tests.support.until import until

pytestmark = pytest.mark.plain("stands in for a connection of the target")


class Connection:
    """What the pump needs of a TargetConnection. ``unfinished``: how often ``progress`` leaves
    something for another turn. ``order``: what each of them has heard."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.heard = b""
        self.done = False
        self.silent = 1
        self.answered = 0
        self.parameters: object = None
        self.output = False
        self.fails: Exception | None = None
        self.driver: ConnectionDriver = Undriven()
        self.unfinished = 0
        self.order: list[str] = []

    def fileno(self) -> int:
        return self.sock.fileno()

    def progress(self, _now: float) -> None:
        heard = b""
        try:
            heard = self.sock.recv(100)
        except BlockingIOError:
            self.output = False  # called because the socket takes more
        self.heard += heard
        self.order.append(heard.decode())
        if self.unfinished:
            self.unfinished -= 1
            self.driver.unfinished()
        if self.fails is not None:
            raise self.fails

    def wants_write(self) -> bool:
        return self.output


class Bench:
    def __init__(self) -> None:
        here, self.there = socket.socketpair()
        here.setblocking(False)
        self.connection = Connection(here)
        self.calls: list[str] = []
        given: Any = self.connection
        self.pump = Pump(
            given, 0, lambda: self.calls.append("logged in"), lambda: self.calls.append("over")
        )
        self.pump.begin()

    def end(self) -> None:
        self.pump.end()
        self.connection.sock.close()
        self.there.close()


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    made.end()


async def test_login_ends_once(bench: Bench) -> None:
    connection = bench.connection
    bench.there.send(b"1")
    await until(lambda: connection.heard == b"1")
    assert not connection.silent and bench.calls == []
    connection.parameters = object()
    for number in (b"2", b"3"):
        bench.there.send(number)
        await until(lambda number=number: connection.heard.endswith(number))  # type: ignore[misc]
    assert bench.calls == ["logged in"]


async def test_what_progress_raises_ends_the_connection(bench: Bench) -> None:
    bench.connection.fails = ConnectionLost("gone")
    bench.there.send(b"1")
    await until(lambda: bool(bench.calls))
    assert bench.calls == ["over"] and bench.pump.problem is bench.connection.fails
    bench.there.send(b"2")
    other = Bench()
    other.there.send(b"3")
    await until(lambda: other.connection.heard)  # by then it is known that 2 has come, too
    other.end()
    assert bench.connection.heard == b"1"  # nothing more is taken in


async def test_a_connection_that_is_done_is_over(bench: Bench) -> None:
    bench.connection.done = True
    bench.there.send(b"1")
    await until(lambda: bool(bench.calls))
    assert bench.calls == ["over"] and bench.pump.problem is None


async def test_output_that_waits_leaves_when_the_socket_takes_more(bench: Bench) -> None:
    connection = bench.connection
    connection.output = True
    connection.driver.output_waits()
    await until(lambda: not connection.output)
    assert connection.heard == b"" and bench.calls == []


async def test_the_end_of_the_connection_is_told_by_it(bench: Bench) -> None:
    bench.connection.driver.ended()
    assert bench.calls == ["over"]


async def test_the_rest_of_what_has_come_is_for_another_turn(bench: Bench) -> None:
    """Also where no descriptor shows that there is more. Others go first."""
    connection, other = bench.connection, Bench()
    order = other.connection.order = connection.order
    connection.unfinished = 3
    bench.there.send(b"1")
    other.there.send(b"2")
    await until(lambda: order.count("") == 3)
    other.end()
    assert order[-1] == "" and not connection.unfinished
    assert sorted(order[:2]) == ["1", "2"]  # both had come


async def test_a_connection_that_has_ended_does_not_go_on(bench: Bench) -> None:
    connection = bench.connection
    connection.unfinished = 1
    connection.done = True
    bench.there.send(b"1")
    await until(lambda: bool(bench.calls))
    for _ in range(3):
        await trio.lowlevel.checkpoint()
    assert connection.order == ["1"]
