"""What the sending side makes of completions on a device that tells of them as Linux siw does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from iserblk.rcap import seam
from tests.rcap.verbs.fake import FakeEnd, fake_pair, link_of
from tests.rcap.wire import Driver, pattern, rdma_request, signaled_send

SIZE = 10_000


@contextmanager
def slow_pair(**options: Any) -> Iterator[tuple[Driver, FakeEnd]]:
    """A connected pair, and the device of the first end, whose requests arrive when it is told."""
    driver = Driver(*fake_pair(False, transport="iWARP", **options))
    for pair in driver.pairs:
        pair.post_receive(32)
    link = link_of(driver.pairs[0])
    link.slow = True
    yield driver, link
    for pair in driver.pairs:
        pair.close()


def tokens(driver: Driver) -> list[object]:
    driver.step(0)
    return [event.token for event in driver.events[0]]


def test_a_read_is_complete_by_its_own_completion_alone() -> None:
    with slow_pair() as (driver, link):
        a, b = driver.pairs
        sources = [pattern(SIZE, number) for number in range(2)]
        sinks = [bytearray(SIZE) for _ in sources]
        for number, (source, sink) in enumerate(zip(sources, sinks, strict=True)):
            stag, base = b.advertise(memoryview(source), seam.REMOTE_READ)
            a.post([rdma_request(seam.RDMA_READ, memoryview(sink), stag, base, number)])
            a.post([signaled_send(a, b"words", "send")])
            assert tokens(driver) == ["send"] * (number + 1)
        link.arrive()
        assert tokens(driver) == ["send", "send", 0, 1]
        assert sinks == sources


def test_complete_data_are_overwritten_only_where_the_device_has_a_copy() -> None:
    with slow_pair() as (driver, link):
        a, b = driver.pairs
        sources = [pattern(SIZE, number) for number in range(2)]
        sinks = [bytearray(SIZE) for _ in sources]
        stags = []
        for source, sink in zip(sources, sinks, strict=True):
            stag, base = b.advertise(memoryview(sink), seam.REMOTE_WRITE)
            stags.append(stag)
            a.post(
                [
                    rdma_request(seam.RDMA_WRITE, source, stag, base),
                    signaled_send(a, b"words", "send"),
                ]
            )
            driver.step(0)
        link.arrive()
        for stag in stags:
            b.retire(stag)
        assert sinks == sources


def test_a_read_that_waits_keeps_its_place_in_the_queue_of_the_device() -> None:
    with slow_pair(rooms=(8, 64)) as (driver, link):
        a, b = driver.pairs
        sink = memoryview(bytearray(SIZE))
        stag, base = b.advertise(memoryview(bytes(SIZE)), seam.REMOTE_READ)
        a.post([rdma_request(seam.RDMA_READ, sink, stag, base, "read")])
        for _ in range(20):
            a.post([signaled_send(a, b"words", "send")])
            driver.step(0)
        assert tokens(driver) == ["send"] * 7
        link.arrive()
        driver.run(lambda: len(driver.events[0]) == 21)
        assert tokens(driver) == [*["send"] * 7, "read", *["send"] * 13]
