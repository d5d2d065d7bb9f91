"""What ends a connection over a device, in words, on a device without a kernel."""

from __future__ import annotations

import os

import pytest

from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.verbs import open_pairs, statuses
from tests.rcap.verbs.endings import RECEIVE, made
from tests.rcap.verbs.fake import fake_pair
from tests.rcap.wire import Driver, rdma_request, send_request


@pytest.mark.parametrize(
    ("status", "receive", "kind", "expected"),
    [
        (statuses.FLUSHED, True, RemoteProtocolError, "the peer broke a rule"),
        (1, True, RemoteProtocolError, "larger than the receive"),
        (2, True, RemoteProtocolError, "LOC_QP_OP_ERR"),
        (2, False, ConnectionLost, "could not execute"),
        (9, True, RemoteProtocolError, "REM_INV_REQ_ERR"),
        (10, False, ConnectionLost, "refused a request of ours"),
        (12, False, ConnectionLost, "no longer acknowledges"),
        (13, False, ConnectionLost, "no receive posted"),
        (6, False, ConnectionLost, "memory window could not be bound"),
        (77, False, ConnectionLost, "status 77"),
    ],
)
def test_a_completion_with_an_error(
    status: int, receive: bool, kind: type[Exception], expected: str
) -> None:
    driver, links = made()
    a, _ = driver.pairs
    links[0].break_with(RECEIVE if receive else 1, status)
    driver.run(lambda: driver.errors[0] is not None)
    assert type(driver.errors[0]) is kind
    assert expected in str(driver.errors[0])
    driver.run(lambda: driver.errors[1] is not None)
    assert "the peer closed the connection" in str(driver.errors[1])
    with pytest.raises(ConnectionLost):
        a.post([send_request(driver.pairs[1], b"more")])
    for pair in driver.pairs:
        pair.close()


@pytest.mark.parametrize("status", [9, statuses.FLUSHED])
def test_nothing_behind_a_refused_message_is_delivered(status: int) -> None:
    """A device may go on after a refused message; receives behind a flushed one stay good."""
    driver, links = made()
    _, b = driver.pairs
    b.post([send_request(b, b"before")])
    number, *_ = links[0].receives.popleft()
    links[0].push((number, status, 0, 0, 0, 0))
    b.post([send_request(b, b"behind")])
    driver.run(lambda: None not in driver.errors)
    behind = [b"behind"] if status == statuses.FLUSHED else []
    assert [one.data for one in driver.events[0]] == [b"before", *behind]
    for pair in driver.pairs:
        pair.close()


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (statuses.DISCONNECTED, "the peer closed the connection"),
        (statuses.DEVICE_REMOVAL, "the RDMA device was removed (fake0)"),
        (statuses.UNREACHABLE, "cannot be reached"),
    ],
)
def test_an_event_ends_it_after_what_has_come(event: int, expected: str) -> None:
    driver, links = made()
    a, b = driver.pairs
    b.post([send_request(b, b"last words")])
    links[0].channel.put(event)
    driver.run(lambda: driver.errors[0] is not None)
    assert [one.data for one in driver.events[0]] == [b"last words"]
    assert str(driver.errors[0]) == expected or expected in str(driver.errors[0])
    assert a.next_deadline() == 0.0
    for pair in driver.pairs:
        pair.close()


def test_an_event_that_says_nothing_new_is_ignored() -> None:
    driver, links = made()
    a, b = driver.pairs
    links[0].channel.put(statuses.TIMEWAIT_EXIT)
    assert a.progress(0.0) == []
    b.post([send_request(b, b"still here")])
    driver.run(lambda: bool(driver.events[0]))
    for pair in driver.pairs:
        pair.close()


def test_closing_waits_for_an_acknowledgement_no_longer_than_a_moment() -> None:
    driver, links = made()
    a, b = driver.pairs
    links[0].hold_signals = True
    a.post([send_request(a, b"words that nobody acknowledges")])
    a.close()
    assert a.fileno() == -1
    b.close()


def test_the_send_queue_is_freed_though_nobody_asks() -> None:
    """Many more unsignaled Sends than the device takes at a time."""
    first, second = fake_pair(False, rooms=(100, 100))
    driver = Driver(first, second)
    first.post_receive(100)
    second.post_receive(100)
    request = send_request(first, b"x")
    for number in range(1000):
        first.post([request])
        driver.run(lambda number=number: len(driver.events[1]) > number)  # type: ignore[misc]
        second.post_receive(1)
        first.progress(0.0)
    for pair in driver.pairs:
        pair.close()


def test_a_device_that_takes_few_requests() -> None:
    first, second = fake_pair(True, rooms=(4, 16))
    driver = Driver(first, second)
    second.post_receive(16)
    data = bytes(range(256))
    for _ in range(20):
        memory = bytearray(256)
        stag, base = second.advertise(memoryview(memory), seam.REMOTE_WRITE)
        first.post([rdma_request(seam.RDMA_WRITE, data, stag, base), send_request(first, b"x")])
        driver.run(lambda: bool(driver.events[1]))
        driver.events[1].clear()
        second.post_receive(1)
        second.retire(stag)
        assert memory == data
        for pair in driver.pairs:
            pair.progress(0.0)
    for pair in driver.pairs:
        pair.close()


def test_a_child_process_leaves_the_parents_connection_alone() -> None:
    driver, links = made()
    a, b = driver.pairs
    child = os.fork()
    if not child:
        open_pairs.close_all()
        os._exit(any(link.closed for link in links))
    assert os.waitpid(child, 0)[1] == 0
    a.post([send_request(a, b"still here")])
    driver.run(lambda: bool(driver.events[1]))
    for pair in (a, b):
        pair.close()


def test_receives_beyond_the_device_are_owed() -> None:
    first, second = fake_pair(False, rooms=(100, 10))
    driver = Driver(first, second)
    second.post_receive(50)
    first.post([send_request(first, bytes((n,))) for n in range(50)])
    driver.run(lambda: len(driver.events[1]) == 50)
    assert [event.data for event in driver.events[1]] == [bytes((n,)) for n in range(50)]
    for pair in driver.pairs:
        pair.close()


def test_memory_that_the_system_refuses_ends_it_with_the_remedy() -> None:
    driver = Driver(*fake_pair(False, limit=1 << 20, budget=1 << 30))
    a, b = driver.pairs
    stag, base = b.advertise(memoryview(bytearray(4096)), seam.REMOTE_WRITE)
    a.post([rdma_request(seam.RDMA_WRITE, bytes(4096), stag, base)])
    with pytest.raises(Exception, match="has ended"):
        b.advertise(memoryview(bytearray(8 << 20)), seam.REMOTE_READ)
    driver.run(lambda: driver.errors[1] is not None)
    assert "ulimit -l" in str(driver.errors[1])
    for pair in driver.pairs:
        pair.close()
