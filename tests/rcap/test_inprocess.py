"""The fault hooks of the in-process pair; its semantics are the contract suite's."""

from __future__ import annotations

import select

import pytest

from iserblk.errors import ConnectionLost, LocalProtocolError
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message, memory_pair
from tests.rcap.wire import Driver, rdma_request, send_request
from tests.support.descriptors import descriptors, descriptors_to_begin_with


def test_held_messages_arrive_later_in_order() -> None:
    a, b = memory_pair()
    driver = Driver(a, b)
    b.post_receive(2)
    b.hold = True
    a.post([send_request(a, b"one"), send_request(a, b"two")])
    driver.step(1)
    assert driver.events[1] == []
    b.hold = False
    driver.run(lambda: len(driver.events[1]) == 2)
    assert [event.data for event in driver.events[1]] == [b"one", b"two"]


def test_disconnect_ends_a_held_side_too() -> None:
    a, b = memory_pair()
    driver = Driver(a, b)
    b.hold = True
    b.disconnect()
    driver.run(lambda: None not in driver.errors)
    assert all(isinstance(error, ConnectionLost) for error in driver.errors)


def test_intercepted_messages_can_be_lost() -> None:
    a, b = memory_pair()
    driver = Driver(a, b)
    b.post_receive(3)
    seen: list[int] = []

    def every_second(message: Message) -> bool:
        seen.append(message.kind)
        return len(seen) % 2 == 1

    a.intercept = every_second
    a.post([send_request(a, bytes((n,))) for n in range(3)])
    driver.run(lambda: len(driver.events[1]) == 2)
    assert [event.data for event in driver.events[1]] == [b"\0", b"\2"]
    assert seen == [seam.SEND] * 3


def test_depths_and_private_data() -> None:
    a, b = memory_pair(ird=3, ord=9, private_data=(b"a", b"b"))
    assert (a.ird, a.ord, b.ird, b.ord) == (3, 3, 3, 3)
    assert (a.peer_private_data, b.peer_private_data) == (b"b", b"a")


def test_read_without_ord_is_a_bug_of_the_caller() -> None:
    a, _ = memory_pair(ird=0)
    with pytest.raises(LocalProtocolError):
        a.post([rdma_request(seam.RDMA_READ, memoryview(bytearray(1)), 1, 0)])


def test_descriptor_rests_when_nothing_is_to_do() -> None:
    a, b = memory_pair()
    b.post_receive(1)
    a.post([send_request(a, b"one")])
    assert select.select([b.fileno()], [], [], 0)[0]
    assert len(b.progress(0.0)) == 1
    assert not select.select([b.fileno()], [], [], 0)[0]


def test_no_descriptor_is_left() -> None:
    before = descriptors_to_begin_with()
    for _ in range(50):
        for end in memory_pair():
            end.close()
    assert descriptors() == before
