"""Software iWARP of the kernel on a slow wire: siw tells that a Send or an RDMA Write is complete
when TCP has it, long before an RDMA Read that was posted earlier has brought its data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.rcap import seam
from tests.rcap.verbs import suite
from tests.rcap.wire import Driver, pattern, rdma_request, signaled_send
from tests.support.programs import run

SIZE = 65536


@pytest.fixture
def driver() -> Iterator[Driver]:
    """A connected pair, between whose ends everything takes a quarter of a second."""
    driver = Driver(*suite.provider("siw", "region").make())
    for pair in driver.pairs:
        pair.post_receive(8)
    run("modprobe", "sch_netem")
    # The guest reaches its own addresses through lo.
    run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "250ms")
    yield driver
    run("tc", "qdisc", "del", "dev", "lo", "root")
    for pair in driver.pairs:
        pair.close()


def test_a_read_is_complete_when_its_data_have_come(driver: Driver) -> None:
    a, b = driver.pairs
    source = pattern(SIZE, 1)
    sink = bytearray(SIZE)
    stag, base = b.advertise(memoryview(source), seam.REMOTE_READ)
    a.post(
        [
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base, "read"),
            signaled_send(a, b"behind it", "send"),
        ]
    )
    driver.run(lambda: any(event.token == "read" for event in driver.events[0]))
    assert sink == source
    assert [event.token for event in driver.events[0]] == ["send", "read"]


def test_memory_that_a_read_fills_has_no_other_use(driver: Driver) -> None:
    """Another Read, behind a Send that is complete, gets memory of its own."""
    a, b = driver.pairs
    sources = [pattern(SIZE, 1), pattern(SIZE, 2)]
    sinks = [bytearray(SIZE) for _ in sources]
    for source, sink in zip(sources, sinks, strict=True):
        stag, base = b.advertise(memoryview(source), seam.REMOTE_READ)
        a.post(
            [
                rdma_request(seam.RDMA_READ, memoryview(sink), stag, base, "read"),
                signaled_send(a, b"behind it", "send"),
            ]
        )
        before = len(driver.events[0])
        driver.run(lambda before=before: len(driver.events[0]) > before)  # type: ignore[misc]
    driver.run(lambda: len(driver.events[0]) == 4)
    assert sinks == sources
