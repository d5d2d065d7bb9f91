"""What every provider of the QueuePair seam does, seen through the seam alone."""

from __future__ import annotations

import random
import select
from collections.abc import Callable

import pytest

from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError, TransportError
from iserblk.rcap import seam
from tests.contract.conftest import Provider
from tests.rcap.wire import PATIENCE_S, Driver, busy, pattern, rdma_request, send_request

Connect = Callable[..., Driver]
READ, WRITE = seam.REMOTE_READ, seam.REMOTE_WRITE
TOP = 2**64


# --- Sends ---


@pytest.mark.parametrize(
    ("opcode", "solicited"),
    [
        (seam.SEND, False),
        (seam.SEND_SE, True),
        (seam.SEND_INVALIDATE, False),
        (seam.SEND_SE_INVALIDATE, True),
    ],
)
def test_each_kind_of_send(
    connect: Connect, provider: Provider, opcode: int, solicited: bool
) -> None:
    # proves: ISER-GEN-2.1.1-1, ISER-4.1-1, ISER-4.1-5, ISER-4.1-8, ISER-4.1-9, ISER-7145-1.5.2-1
    with_invalidate = opcode in (seam.SEND_INVALIDATE, seam.SEND_SE_INVALIDATE)
    if with_invalidate:
        provider.needs("invalidate")
    driver = connect()
    a, b = driver.pairs
    stag, _ = b.advertise(memoryview(bytearray(16)), WRITE)
    a.post([send_request(a, b"header", opcode=opcode, stag=stag)])
    driver.run(lambda: bool(driver.events[1]))
    (event,) = driver.events[1]
    assert event.opcode == seam.RECEIVE
    assert event.data == b"header"
    assert event.solicited is solicited or "solicited" in provider.cannot
    assert event.invalidated == (stag if with_invalidate else 0)
    assert b.retire(stag) is not with_invalidate


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 76, 1424, 1425, 4096, 8191, 8192, 8268])
@pytest.mark.parametrize("header", [0, 1, 76, 2000])
def test_send_arrives_whole(connect: Connect, size: int, header: int) -> None:
    # proves: ISER-4.1-4, ISER-4.1-7
    header = min(header, size)
    driver = connect()
    for index in (0, 1):
        pair = driver.pairs[index]
        message = pattern(size, index)
        pair.post([send_request(pair, message[:header], message[header:])])
        driver.run(lambda index=index: bool(driver.events[1 - index]))  # type: ignore[misc]
        assert driver.events[1 - index][0].data == message


@pytest.mark.parametrize("lengths", [[20, 20], [20, 40, 1, 39, 0, 20]])
def test_part_of_a_slot_is_sent(connect: Connect, lengths: list[int]) -> None:
    """Bytes behind the message in its slot are not sent, and may be overwritten."""
    driver = connect()
    a, _ = driver.pairs
    request = send_request(a, b"", slot_size=40)
    assert request.header is not None
    for count, length in enumerate(lengths, 1):
        request.header.view[:] = b"r" * 40
        request.header.view[:length] = pattern(length, count)
        request.header_length = length
        a.post([request])
        driver.run(lambda count=count: len(driver.events[1]) == count)  # type: ignore[misc]
    expected = [pattern(length, count) for count, length in enumerate(lengths, 1)]
    assert [event.data for event in driver.events[1]] == expected


def test_a_slot_is_used_again(connect: Connect) -> None:
    driver = connect()
    a, _ = driver.pairs
    request = send_request(a, b"first one")
    a.post([request])
    driver.run(lambda: len(driver.events[1]) == 1)
    assert request.header is not None
    request.header.view[:] = b"secondone"
    a.post([request])
    driver.run(lambda: len(driver.events[1]) == 2)
    assert [event.data for event in driver.events[1]] == [b"first one", b"secondone"]


def test_messages_arrive_in_order(connect: Connect) -> None:
    # proves: ISER-4.1-2, ISER-IB00-3.1.6-1
    driver = connect(receives=400)
    rng = random.Random(1)
    sizes = [rng.choice([1, 40, 76, 500, 5000]) for _ in range(300)]
    for index in (0, 1):
        pair = driver.pairs[index]
        pair.post([send_request(pair, pattern(size, n)) for n, size in enumerate(sizes)])
    driver.run(lambda: all(len(events) == len(sizes) for events in driver.events))
    for events in driver.events:
        assert [event.data for event in events] == [pattern(s, n) for n, s in enumerate(sizes)]


def test_signaled_requests_complete_in_order_and_others_do_not(connect: Connect) -> None:
    driver = connect()
    a, b = driver.pairs
    stag, base = b.advertise(memoryview(bytearray(8)), WRITE)
    requests = [
        send_request(a, b"one"),
        rdma_request(seam.RDMA_WRITE, b"12345678", stag, base, "write"),
        send_request(a, b"two"),
        send_request(a, b"three"),
    ]
    requests[1].signaled = True
    requests[3].signaled = True
    requests[3].token = "send"
    a.post(requests)
    driver.run(lambda: len(driver.events[1]) == 3 and len(driver.events[0]) == 2)
    assert [(event.opcode, event.token) for event in driver.events[0]] == [
        (seam.RDMA_WRITE, "write"),
        (seam.SEND, "send"),
    ]


# --- RDMA ---


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 4096, 65536, 65521, 1 << 20])
@pytest.mark.parametrize("offset", [0, 5])
def test_rdma_write_is_placed_before_the_send_behind_it(
    connect: Connect, size: int, offset: int
) -> None:
    # proves: ISER-2.2-2, ISER-4.1-1, ISER-4.1-2, ISER-4.1-6, ISER-IB00-3.1.6-1
    driver = connect()
    a, b = driver.pairs
    target = bytearray(b"\xee" * (size + 16))
    stag, base = b.advertise(memoryview(target), WRITE)
    data = pattern(size)
    a.post([rdma_request(seam.RDMA_WRITE, data, stag, base + offset), send_request(a, b"done")])
    driver.run(lambda: bool(driver.events[1]))
    assert b.retire(stag) is True  # from here on what was written is there, with every provider
    assert bytes(target) == b"\xee" * offset + data + b"\xee" * (16 - offset)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 511, 4096, 65536, 65521, 1 << 20])
@pytest.mark.parametrize("offset", [0, 5])
def test_rdma_read(connect: Connect, size: int, offset: int) -> None:
    # proves: ISER-4.1-1, ISER-4.1-6, ISER-2.4.4-2
    driver = connect()
    a, b = driver.pairs
    source = pattern(size + 16)
    stag, base = a.advertise(memoryview(source), READ)
    sink = bytearray(b"\xee" * (size + 2))
    request = rdma_request(
        seam.RDMA_READ, memoryview(sink)[1 : 1 + size], stag, base + offset, "read"
    )
    b.post([request])
    driver.run(lambda: bool(driver.events[1]))
    assert [(event.opcode, event.token) for event in driver.events[1]] == [(seam.RDMA_READ, "read")]
    assert bytes(sink) == b"\xee" + source[offset : offset + size] + b"\xee"
    assert a.retire(stag) is True


def test_a_read_behind_a_write_sees_its_data(connect: Connect) -> None:
    # proves: ISER-4.1-3
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(300_000)
    stag, base = b.advertise(memoryview(memory), READ | WRITE)
    data, sink = pattern(300_000), bytearray(300_000)
    a.post(
        [
            rdma_request(seam.RDMA_WRITE, data, stag, base),
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base),
        ]
    )
    driver.run(lambda: bool(driver.events[0]))
    assert sink == data


# shows: SYSTEM-35
def test_reads_beyond_the_ord_wait_in_order(connect: Connect) -> None:
    # proves: ISER-7.3.6-8, ISER-8.2-2
    driver = connect(ird=2, ord=2)
    a, b = driver.pairs
    assert b.ord == 2
    source = pattern(200_000)
    stag, base = a.advertise(memoryview(source), READ)
    sinks = [bytearray(20_000) for _ in range(10)]
    requests = [
        rdma_request(seam.RDMA_READ, memoryview(sink), stag, base + 20_000 * n, n)
        for n, sink in enumerate(sinks)
    ]
    last = send_request(b, b"behind them")
    b.post([*requests, last])
    driver.run(lambda: len(driver.events[1]) == 10 and bool(driver.events[0]))
    assert [event.token for event in driver.events[1]] == list(range(10))
    assert b"".join(sinks) == source
    assert driver.events[0][0].data == b"behind them"


# shows: SYSTEM-35
def test_reads_that_the_ulps_have_limited(connect: Connect) -> None:
    """Both ends keep to the lower depths: none of them sees one Read too many.

    proves: ISER-5.1.3-5, ISER-5.1.3-7, ISER-8.2-1
    """
    driver = connect(ird=4, ord=4)
    a, b = driver.pairs
    a.limit_reads(1, 4)
    b.limit_reads(4, 1)
    assert (a.ird, a.ord, b.ird, b.ord) == (1, 4, 4, 1)
    assert (a.describe()["ird"], b.describe()["ord"]) == (1, 1)
    source = pattern(200_000)
    stag, base = a.advertise(memoryview(source), READ)
    sinks = [bytearray(20_000) for _ in range(10)]
    b.post(
        [
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base + 20_000 * n, n)
            for n, sink in enumerate(sinks)
        ]
    )
    driver.run(lambda: len(driver.events[1]) == 10)
    assert b"".join(sinks) == source
    for ird, ord in ((2, 4), (1, 5)):
        with pytest.raises(LocalProtocolError, match="more than"):
            a.limit_reads(ird, ord)
    assert (a.ird, a.ord) == (1, 4)


def test_no_reads_at_all(connect: Connect) -> None:
    driver = connect(ird=4, ord=4)
    a, b = driver.pairs
    b.limit_reads(4, 0)
    stag, base = a.advertise(memoryview(bytearray(8)), READ)
    with pytest.raises(LocalProtocolError, match="ORD of the connection is 0"):
        b.post([rdma_request(seam.RDMA_READ, memoryview(bytearray(8)), stag, base)])


def test_reads_and_writes_both_ways_at_once(connect: Connect) -> None:
    driver = connect(ird=4, ord=4, receives=1000)
    size, count = 100_000, 12
    expected = []
    sinks: list[bytearray] = []
    targets: list[bytearray] = []
    keep = []
    written = []
    for index in (0, 1):
        pair, other = driver.pairs[index], driver.pairs[1 - index]
        for n in range(count):
            source = pattern(size, 10 * index + n)
            stag, base = other.advertise(memoryview(source), READ)
            sinks.append(bytearray(size))
            targets.append(bytearray(size))
            to_stag, to_base = other.advertise(memoryview(targets[-1]), WRITE)
            written.append((other, to_stag))
            expected.append(source)
            keep.append(source)
            pair.post(
                [
                    rdma_request(seam.RDMA_READ, memoryview(sinks[-1]), stag, base),
                    rdma_request(seam.RDMA_WRITE, source, to_stag, to_base),
                    send_request(pair, b"message"),
                ]
            )
    driver.run(lambda: all(len(events) == 2 * count for events in driver.events))
    for pair, stag in written:
        pair.retire(stag)
    for found in (sinks, targets):
        assert not [
            where_they_differ(number, each, source)
            for number, (each, source) in enumerate(zip(found, expected, strict=True))
            if each != source
        ]


def where_they_differ(number: int, found: bytearray, expected: bytes) -> str:
    """pytest would compare them for ten minutes."""
    wrong = [
        at for at, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other
    ]
    zeroes = sum(not found[at] for at in wrong)
    return f"{number}: {len(wrong)} bytes from {wrong[0]} to {wrong[-1]}, {zeroes} of them 0"


# --- memory ---


def test_stags_are_not_zero_differ_and_rest_before_they_come_again(
    connect: Connect, provider: Provider
) -> None:
    provider.needs("fresh stags")
    a, _ = connect().pairs
    buffer = memoryview(bytearray(64))
    seen = []
    for _ in range(200):
        stag, _ = a.advertise(buffer, WRITE)
        assert a.retire(stag) is True
        seen.append(stag)
    assert 0 not in seen
    assert len(set(seen)) == len(seen)


def test_retire_of_what_was_never_handed_out_or_is_retired(connect: Connect) -> None:
    a, _ = connect().pairs
    stag, _ = a.advertise(memoryview(bytearray(64)), WRITE)
    assert a.retire(stag) is True
    for number in (stag, 0, stag ^ 1, 0xFFFFFFFF):
        with pytest.raises(LocalProtocolError):
            a.retire(number)


def test_read_only_memory_is_not_opened_for_writing(connect: Connect) -> None:
    a, _ = connect().pairs
    with pytest.raises(LocalProtocolError):
        a.advertise(memoryview(b"constant"), WRITE)


def _reach(name: str, b: seam.QueuePair) -> tuple[int, int]:
    """An STag and offset for the violation ``name``, of 100 bytes at b."""
    rights = {"write-only": WRITE, "read-only": READ}.get(name, READ | WRITE)
    stag, base = b.advertise(memoryview(bytearray(100)), rights)
    if name == "unknown":
        return stag + 256, base
    if name == "retired":
        b.retire(stag)
    offsets = {"beyond": 85, "far": 1 << 40, "wrap": TOP - 8 - base}
    return stag, base + offsets.get(name, 0)


# shows: SYSTEM-17
@pytest.mark.parametrize(
    ("opcode", "name", "codes"),
    [
        (seam.RDMA_WRITE, "unknown", {(1, 1, 0)}),
        (seam.RDMA_WRITE, "retired", {(1, 1, 0)}),
        (seam.RDMA_WRITE, "beyond", {(1, 1, 1)}),
        (seam.RDMA_WRITE, "far", {(1, 1, 1)}),
        (seam.RDMA_WRITE, "wrap", {(1, 1, 3)}),
        (seam.RDMA_WRITE, "read-only", {(0, 1, 2)}),
        (seam.RDMA_READ, "unknown", {(0, 1, 0)}),
        (seam.RDMA_READ, "retired", {(0, 1, 0)}),
        (seam.RDMA_READ, "beyond", {(0, 1, 1)}),
        (seam.RDMA_READ, "far", {(0, 1, 1)}),
        (seam.RDMA_READ, "wrap", {(0, 1, 4)}),
        (seam.RDMA_READ, "write-only", {(0, 1, 2)}),
        (seam.SEND_INVALIDATE, "unknown", {(0, 1, 9)}),
        (seam.SEND_SE_INVALIDATE, "retired", {(0, 1, 9)}),
    ],
)
def test_violation_ends_the_connection(
    connect: Connect, provider: Provider, opcode: int, name: str, codes: set[tuple[int, int, int]]
) -> None:
    # proves: ISER-4.1-10, ISER-4.1-12, ISER-10.1.2-1, ISER-11-1
    tagged = opcode in (seam.RDMA_WRITE, seam.RDMA_READ)
    if tagged:
        asked = {"retired": "fresh stags", "beyond": "exact bounds", "write-only": "read rights"}
        provider.needs(asked.get(name, ""))
    driver = connect()
    a, b = driver.pairs
    stag, to = _reach(name, b)
    if tagged:
        request = rdma_request(opcode, memoryview(bytearray(16)), stag, to)
    else:
        request = send_request(a, b"header", opcode=opcode, stag=stag)
    a.post([send_request(a, b"before"), request, send_request(a, b"after")])
    driver.run(lambda: None not in driver.errors)
    ours, theirs = driver.errors
    assert isinstance(theirs, TransportError)
    if "blame" not in provider.cannot:
        assert isinstance(theirs, RemoteProtocolError)
    if provider.codes:
        assert isinstance(theirs, RemoteProtocolError)
        assert theirs.terminate in codes
        assert "terminated" in str(ours)
    assert isinstance(ours, TransportError)
    # What came before is delivered, what came behind is not.
    possible = [[b"before"]]
    if opcode == seam.RDMA_READ and "reads in turn" in provider.cannot:
        possible.append([b"before", b"after"])
    assert [event.data for event in driver.events[1]] in possible
    for pair in driver.pairs:
        with pytest.raises(TransportError):
            pair.progress(0.0)
        with pytest.raises(ConnectionLost):
            pair.post([send_request(pair, b"more")])


# shows: SYSTEM-17
@pytest.mark.parametrize("offset", [84, 0])
def test_access_up_to_the_last_byte(connect: Connect, offset: int) -> None:
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(100)
    stag, base = b.advertise(memoryview(memory), READ | WRITE)
    sink = bytearray(16)
    a.post(
        [
            rdma_request(seam.RDMA_WRITE, b"0123456789abcdef", stag, base + offset),
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base + offset),
        ]
    )
    driver.run(lambda: bool(driver.events[0]))
    assert sink == b"0123456789abcdef"


@pytest.mark.parametrize("opcode", [seam.RDMA_WRITE, seam.RDMA_READ])
def test_transfer_of_nothing_is_not_checked(connect: Connect, opcode: int) -> None:
    driver = connect()
    a, _ = driver.pairs
    a.post([rdma_request(opcode, None, 0xDEAD00, TOP - 1, "token"), send_request(a, b"behind")])
    driver.run(lambda: bool(driver.events[1]))
    if opcode == seam.RDMA_READ:
        driver.run(lambda: bool(driver.events[0]))
        assert driver.events[0][0].token == "token"
    assert driver.errors == [None, None]


def test_message_without_receive(connect: Connect, provider: Provider) -> None:
    provider.needs("missing receive")
    driver = connect(receives=2)
    a, b = driver.pairs
    a.post([send_request(a, b"one"), send_request(a, b"two")])
    driver.run(lambda: len(driver.events[1]) == 2)
    b.post_receive(1)
    a.post([send_request(a, b"three"), send_request(a, b"four")])
    driver.run(lambda: driver.errors[1] is not None)
    assert [event.data for event in driver.events[1]] == [b"one", b"two", b"three"]
    error = driver.errors[1]
    assert isinstance(error, RemoteProtocolError)
    if provider.codes:
        assert error.terminate == (1, 2, 2)


def test_message_larger_than_a_receive(connect: Connect, provider: Provider) -> None:
    driver = connect(receive_size=1000)
    a, b = driver.pairs
    assert b.receive_size == 1000
    a.post([send_request(a, pattern(1000)), send_request(a, pattern(600), pattern(401))])
    driver.run(lambda: driver.errors[1] is not None)
    assert [len(event.data) for event in driver.events[1]] == [1000]
    error = driver.errors[1]
    assert isinstance(error, RemoteProtocolError)
    if provider.codes:
        assert error.terminate == (1, 2, 5)


# shows: SYSTEM-50
def test_second_invalidation_of_one_stag(connect: Connect, provider: Provider) -> None:
    provider.needs("invalidate", "second invalidation")
    driver = connect()
    a, b = driver.pairs
    stag, _ = b.advertise(memoryview(bytearray(16)), WRITE)
    invalidate = [
        send_request(a, b"one", opcode=seam.SEND_INVALIDATE, stag=stag),
        send_request(a, b"two", opcode=seam.SEND_INVALIDATE, stag=stag),
    ]
    a.post(invalidate)
    driver.run(lambda: driver.errors[1] is not None)
    assert [event.invalidated for event in driver.events[1]] == [stag]
    assert b.retire(stag) is False


# shows: SYSTEM-17
def test_invalidated_memory_is_out_of_reach_before_the_completion(
    connect: Connect, provider: Provider
) -> None:
    # proves: ISER-7145-11-4
    provider.needs("invalidate")
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(16)
    stag, base = b.advertise(memoryview(memory), WRITE)
    a.post(
        [
            send_request(a, b"response", opcode=seam.SEND_INVALIDATE, stag=stag),
            rdma_request(seam.RDMA_WRITE, b"x" * 16, stag, base),
        ]
    )
    driver.run(lambda: driver.errors[1] is not None)
    assert memory == bytes(16)


# shows: SYSTEM-50
def test_memory_is_untouched_after_retire(connect: Connect) -> None:
    """Placement under way is diverted: the caller's memory is its own when retire returns."""
    # proves: ISER-7145-11-4
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(1 << 20)
    stag, base = b.advertise(memoryview(memory), WRITE)
    data = b"\x55" * (1 << 20)
    a.post([rdma_request(seam.RDMA_WRITE, data, stag, base) for _ in range(4)])
    for _ in range(3):  # somewhere in the middle, where there is a middle
        driver.step(0)
        driver.step(1)
    b.retire(stag)
    memory[:] = bytes(len(memory))
    driver.run(lambda: driver.errors[1] is not None or not any(map(busy, driver.pairs)))
    assert memory == bytes(len(memory))


def test_data_of_a_read_survives_retire_at_its_source(connect: Connect, provider: Provider) -> None:
    """A Read that came before the retire is answered from a copy, never from freed memory."""
    provider.needs("seen reads")
    driver = connect()
    a, b = driver.pairs
    original = pattern(1 << 20)
    memory = bytearray(original)
    stag, base = a.advertise(memoryview(memory), READ)
    sink = bytearray(1 << 20)
    b.post([rdma_request(seam.RDMA_READ, memoryview(sink), stag, base)])
    while not busy(a):
        assert select.select([a.fileno(), b.fileno()], [], [], PATIENCE_S)[0]
        if not busy(a):
            driver.step(1)
    driver.step(0)
    a.retire(stag)
    memory[:] = bytes(len(memory))
    driver.run(lambda: bool(driver.events[1]) or driver.errors[1] is not None)
    assert sink == original


def test_retired_memory_can_be_released(connect: Connect) -> None:
    """No view of the buffer is left behind: a bytearray that is still exported cannot shrink."""
    driver = connect()
    a, b = driver.pairs
    memory = bytearray(100_000)
    view = memoryview(memory)
    stag, base = b.advertise(view, READ | WRITE)
    sink = bytearray(100_000)
    a.post(
        [
            rdma_request(seam.RDMA_WRITE, pattern(100_000), stag, base),
            rdma_request(seam.RDMA_READ, memoryview(sink), stag, base),
        ]
    )
    driver.run(lambda: bool(driver.events[0]))
    b.retire(stag)
    view.release()
    memory.clear()
    assert sink == pattern(100_000)
