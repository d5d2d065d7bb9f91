"""The QueuePair suite, continued: how connections end."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable

import pytest

from iserblk.errors import ConnectionLost
from iserblk.rcap import seam
from tests.contract.conftest import Provider
from tests.rcap.wire import PATIENCE_S, Driver, busy, rdma_request, send_request

Connect = Callable[..., Driver]
READ, WRITE = seam.REMOTE_READ, seam.REMOTE_WRITE


# --- the end ---


def test_close_is_seen_after_what_was_sent_before(connect: Connect) -> None:
    driver = connect()
    a, b = driver.pairs
    a.post([send_request(a, b"last words")])
    a.close()
    driver.run(lambda: driver.errors[1] is not None)
    assert [event.data for event in driver.events[1]] == [b"last words"]
    assert isinstance(driver.errors[1], ConnectionLost)
    with pytest.raises(ConnectionLost):
        b.post([send_request(b, b"too late")])
        driver.errors[1] = None
        driver.run(lambda: driver.errors[1] is not None)
        raise driver.errors[1] or AssertionError


def test_closed_pair(connect: Connect) -> None:
    # proves: ISER-4.1-12
    driver = connect()
    a, _ = driver.pairs
    memory = bytearray(64)
    stag, _ = a.advertise(memoryview(memory), WRITE)
    a.close()
    a.close()
    assert a.fileno() == -1
    assert a.wants_write() is False
    with pytest.raises(ConnectionLost):
        a.post([send_request(a, b"more")])
    with pytest.raises(ConnectionLost):
        a.progress(0.0)
    a.retire(stag)
    memory.clear()
    driver.errors[0] = ConnectionLost("closed")
    driver.run(lambda: driver.errors[1] is not None)


def test_close_lets_go_of_all_memory(connect: Connect) -> None:
    driver = connect(ird=1, ord=1)
    a, b = driver.pairs
    source, sink, waiting, opened = (bytearray(2_000_000) for _ in range(4))
    stag, base = a.advertise(memoryview(opened), READ | WRITE)
    b.post(
        [
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base),
            rdma_request(seam.RDMA_READ, memoryview(waiting), stag, base),
            rdma_request(seam.RDMA_WRITE, memoryview(source), stag, base),
        ]
    )
    driver.step(0)
    driver.step(1)
    a.close()
    b.close()
    for memory in (source, sink, waiting, opened):
        memory.clear()  # BufferError while a view is held
        assert len(memory) == 0


def test_close_with_work_under_way_never_blocks(connect: Connect, provider: Provider) -> None:
    driver = connect()
    a, b = driver.pairs
    stag, base = b.advertise(memoryview(bytearray(1 << 20)), WRITE)
    a.post([rdma_request(seam.RDMA_WRITE, bytes(1 << 20), stag, base) for _ in range(32)])
    assert a.wants_write() is provider.flow_control
    a.close()
    assert a.fileno() == -1


def test_disconnect_wakes_both_ends_and_keeps_buffers(connect: Connect) -> None:
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(64)
    stag, _ = a.advertise(memoryview(memory), WRITE)
    a.post([send_request(a, b"last words")])
    waker = threading.Thread(target=a.disconnect)
    waker.start()
    driver.run(lambda: None not in driver.errors)
    waker.join()
    assert [event.data for event in driver.events[1]] == [b"last words"]
    assert all(isinstance(error, ConnectionLost) for error in driver.errors)
    with pytest.raises(ConnectionLost):
        a.post([send_request(a, b"more")])
    assert a.retire(stag) is True
    memory.clear()
    a.disconnect()
    a.close()
    a.disconnect()
    b.disconnect()


def test_descriptor_is_readable_when_there_is_work(connect: Connect) -> None:
    driver = connect()
    a, b = driver.pairs
    driver.run(lambda: not any(busy(pair) for pair in driver.pairs))
    assert b.progress(0.0) == []
    a.post([send_request(a, b"hello")])
    assert select.select([b.fileno()], [], [], PATIENCE_S)[0]


def test_description_and_private_data(connect: Connect, provider: Provider) -> None:
    driver = connect(private_data=(b"from a", b"from b"), ird=3, ord=3)
    a, b = driver.pairs
    received = a.peer_private_data, b.peer_private_data
    if "exact private data" in provider.cannot:
        received = received[0].rstrip(b"\0"), received[1].rstrip(b"\0")
    assert received == (b"from b", b"from a")
    for pair in driver.pairs:
        description = json.loads(json.dumps(pair.describe()))
        assert description["provider"] == pair.provider
        assert provider.name.startswith(pair.provider)
        assert (pair.ird, pair.ord) == (3, 3)
        assert pair.can_receive_invalidate is ("invalidate" not in provider.cannot)
        # InfiniBand and RoCE are not to be asked for solicited events. proves: ISER-7145-1.5.2-4
        assert pair.solicits is (description.get("transport", "iWARP") == "iWARP")
