"""How threads wait: for time, and for descriptors."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from iserblk.loop import blocking, clock
from iserblk.loop.blocking import Poller, any_readable, hung_up, readable, writable


@pytest.fixture
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        yield here, there


Line = tuple[socket.socket, socket.socket]


def fill(sock: socket.socket) -> None:
    try:
        while True:
            sock.send(bytes(1 << 16))
    except BlockingIOError:
        pass


def test_sleeping(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    blocking.sleep(0.25)
    assert slept == [0.25]


def test_a_look_does_not_wait(line: Line) -> None:
    here, there = line
    assert not readable(here.fileno())
    assert not readable(here.fileno(), clock.monotonic() - 1.0)
    assert writable(here.fileno())
    there.send(b"x")
    assert readable(here.fileno())
    assert readable(here.fileno(), None)
    fill(here)
    assert not writable(here.fileno())


def test_it_waits_until_a_time(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer: the limit is that of the clock that iserblk reads."""
    assert not readable(line[0].fileno(), clock.monotonic() + 0.001)
    monkeypatch.setattr(clock.sources, "monotonic", lambda: 1e9)
    assert not readable(line[0].fileno(), 1e9 + 0.001)


@pytest.mark.parametrize("until", [None, math.pi * 1e8])
def test_what_comes_ends_the_waiting(line: Line, until: float | None) -> None:
    here, there = line
    thread = threading.Thread(target=there.send, args=(b"x",))
    thread.start()
    assert readable(here.fileno(), until)
    thread.join()


def test_the_end_and_a_closed_descriptor_can_be_read_from(line: Line) -> None:
    here, there = line
    assert not hung_up(here.fileno())
    there.shutdown(socket.SHUT_WR)
    assert readable(here.fileno())
    assert not hung_up(here.fileno())  # it takes data still
    there.close()
    assert hung_up(here.fileno())
    number = os.dup(here.fileno())
    os.close(number)
    assert readable(number)


def test_the_first_of_several(line: Line) -> None:
    here, there = line
    there.send(b"x")
    assert any_readable([there.fileno(), here.fileno()]) == [here.fileno()]
    here.send(b"x")
    assert any_readable([there.fileno(), here.fileno()]) == [there.fileno(), here.fileno()]


def test_a_poller(line: Line) -> None:
    here, there = line
    poller = Poller()
    poller.add(here.fileno())
    assert not poller.wait(0.0)
    poller.watch_output(here.fileno(), True)
    assert poller.wait(1.0)
    poller.watch_output(here.fileno(), False)
    assert not poller.wait(0.001)
    there.send(b"x")
    assert poller.wait(1.0)
    poller.remove(here.fileno())
    assert not poller.wait(0.0)
    with pytest.raises(KeyError):
        poller.remove(here.fileno())
