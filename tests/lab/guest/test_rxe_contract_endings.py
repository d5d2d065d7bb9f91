"""How connections over Soft-RoCE fail to open, and how they end: with an error that says why, in
time, and with nothing left behind."""

from __future__ import annotations

import gc
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from time import monotonic

import pytest

from iserblk.errors import (
    Busy,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    LocalProtocolError,
    NotSupported,
    TransportError,
)
from iserblk.rcap import seam
from iserblk.rcap.verbs.connecting import RouteProbe, VerbsConnector, VerbsListener
from iserblk.rcap.verbs.engine import PlainEngine
from iserblk.rcap.verbs.queuepair import VerbsQueuePair
from tests.rcap.verbs.pairs import verbs_pair
from tests.rcap.verbs.suite import lab_address
from tests.rcap.wire import Driver, pattern, rdma_request, send_request
from tests.support import logs
from tests.support.descriptors import descriptors, descriptors_to_begin_with

pytestmark = pytest.mark.logs(logs.DEVICE)

STALL_S = 1.0  # most time of a single call, with kernel work under emulation


def connector(port: int, host: str | None = None, timeout: float = 20.0) -> VerbsConnector:
    return VerbsConnector(
        host or lab_address(),
        port,
        private_data=b"\xc0\0\0\0",
        receive_size=8268,
        receives=4,
        ird=16,
        timeout=timeout,
    )


def listener(reply: Callable[[bytes], bytes] = lambda data: data) -> VerbsListener:
    return VerbsListener(lab_address(), 0, receive_size=8268, receives=4, ird=16, reply=reply)


def outcome(connecting: VerbsConnector, beside: VerbsListener | None = None) -> VerbsQueuePair:
    """Drive the connector to its end, and check that no call takes long; its result."""
    while True:
        before = monotonic()
        qp = connecting.progress(before)
        assert monotonic() - before < STALL_S
        if qp is not None:
            return qp
        waiting = [connecting, beside] if beside is not None else [connecting]
        select.select(waiting, [], [], 0.2)  # type: ignore[type-var]
        if beside is not None:
            beside.progress(monotonic())


def resources() -> str:
    """RDMA objects of this process, as the kernel counts them."""
    shown = subprocess.check_output(["rdma", "resource", "show"], text=True)
    return shown.strip()


@pytest.fixture(autouse=True)
def nothing_left() -> object:
    # librdmacm keeps the device's context open after its first use.
    probe = RouteProbe(lab_address(), 1)
    while probe.progress(monotonic()) is None:
        select.select([probe], [], [], 1)
    probe.close()
    before = descriptors_to_begin_with(), resources()
    yield
    gc.collect()
    assert (descriptors(), resources()) == before


# --- connecting ---


def test_a_port_that_nobody_listens_on() -> None:
    with pytest.raises(ConnectFailed, match=r"rejected.*no program listens on that port"):
        outcome(connector(4999))


def test_an_address_that_no_device_leads_to() -> None:
    with pytest.raises(ConnectFailed, match="no RDMA device leads"):
        outcome(connector(3260, "127.0.0.1"))


def test_an_address_that_nobody_has() -> None:
    host = lab_address().rsplit(".", 1)[0] + ".77"
    started = monotonic()
    with pytest.raises((ConnectFailed, ConnectTimeout), match=r"\.77"):
        outcome(connector(3260, host, timeout=6.0))
    assert monotonic() - started < 12


def test_a_peer_that_never_answers() -> None:
    silent = listener()
    connecting = connector(silent.port, timeout=2.0)
    with pytest.raises(ConnectTimeout, match="did not answer by rdma_cm within 2 s"):
        outcome(connecting)
    assert connecting.fileno() == -1
    silent.close()


def test_a_peer_that_refuses(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_data: bytes) -> bytes:
        raise Busy("no room in the inn")

    refusing = listener(refuse)
    with pytest.raises(ConnectFailed, match="rejected the connection: refused by the target"):
        outcome(connector(refusing.port), refusing)
    assert "no room in the inn" in caplog.text
    refusing.close()


def test_giving_up_at_every_step() -> None:
    """A connector can be closed at every step at which it waits."""
    serving = listener()
    for steps in range(6):
        connecting = connector(serving.port)
        for _ in range(steps):
            select.select([connecting], [], [], 1)
            qp = connecting.progress(monotonic())
            if qp is not None:
                qp.close()
                break
        connecting.close()
        assert connecting.fileno() == -1
    serving.close()


def test_a_listener_closes_what_is_not_established() -> None:
    serving = listener()
    connecting = connector(serving.port)
    for _ in range(3):
        select.select([connecting], [], [], 1)
        assert connecting.progress(monotonic()) is None
        if select.select([serving], [], [], 0.5)[0]:
            assert serving.progress(monotonic()) == []
            break
    serving.close()
    assert serving.fileno() == -1
    connecting.close()


def test_a_listening_port_is_in_use() -> None:
    first = listener()
    with pytest.raises(Busy, match="in use by rdma_cm"):
        VerbsListener(lab_address(), first.port, receive_size=100, receives=1, ird=1, reply=bytes)
    first.close()


def test_listening_where_there_is_no_device() -> None:
    with pytest.raises(IserblkError, match="no RDMA device has this address"):
        VerbsListener("127.0.0.1", 0, receive_size=100, receives=1, ird=1, reply=bytes)


def test_probing() -> None:
    for host, expected in ((lab_address(), True), ("127.0.0.1", False)):
        probe = RouteProbe(host, 3260)
        while (answer := probe.progress(monotonic())) is None:
            select.select([probe], [], [], 1)
        assert answer[0] is expected
        assert ("rxe0" if expected else "no RDMA device") in answer[1]
        probe.close()


def test_windows_are_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iserblk.rcap.verbs.api._modules", {"_gaps": None})
    connecting = VerbsConnector(
        lab_address(), 3260, private_data=b"", receive_size=100, receives=1, ird=1,
        mode="window", timeout=5,
    )  # fmt: skip
    with pytest.raises(NotSupported, match="compiled module is missing"):
        outcome(connecting)


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connecting side through plain pyverbs: region mode has all operations."""
    serving = listener()
    connecting = connector(serving.port)
    a: VerbsQueuePair | None = None
    pairs: list[VerbsQueuePair] = []
    while a is None or not pairs:
        select.select([connecting, serving] if a is None else [serving], [], [], 1)  # type: ignore[type-var]
        with monkeypatch.context() as plain:
            plain.setattr("iserblk.rcap.verbs.api.gaps", lambda: None)
            a = a or connecting.progress(monotonic())
        pairs += serving.progress(monotonic())
    connecting.close()
    serving.close()
    b = pairs[0]
    assert a.mode == "region" and isinstance(a._engine, PlainEngine)
    driver = Driver(a, b)
    for pair in driver.pairs:
        pair.post_receive(200)
    into, source, sink = bytearray(100_000), pattern(100_000, 3), bytearray(100_000)
    stag, base = a.advertise(memoryview(into), seam.REMOTE_WRITE)
    other, start = a.advertise(memoryview(source), seam.REMOTE_READ)
    for number in range(100):
        a.post([send_request(a, b"command", pattern(number))])
    b.post([rdma_request(seam.RDMA_WRITE, source, stag, base), send_request(b, b"written")])
    b.post([rdma_request(seam.RDMA_READ, memoryview(sink), other, start)])
    driver.run(lambda: len(driver.events[1]) == 101 and bool(driver.events[0]))
    assert (a.retire(stag), a.retire(other)) == (True, True)
    assert into == sink == source
    stag, base = b.advertise(memoryview(into), seam.REMOTE_WRITE | seam.REMOTE_READ)
    fresh = pattern(3_000_000, 9)
    again = bytearray(3_000_000)
    large = bytearray(3_000_000)
    b.retire(stag)
    stag, base = b.advertise(memoryview(large), seam.REMOTE_WRITE | seam.REMOTE_READ)
    a.post([rdma_request(seam.RDMA_WRITE, fresh, stag, base)])
    a.post([rdma_request(seam.RDMA_READ, memoryview(again), stag, base)])
    driver.run(lambda: len(driver.events[0]) == 2)
    assert again == fresh
    b.close()
    driver.errors[1] = ConnectionLost("closed here")
    driver.run(lambda: driver.errors[0] is not None)
    a.close()


# --- the limit on locked memory ---

SMALL = """
import ctypes, resource, select, sys
from time import monotonic
from iserblk.errors import NotSupported
from iserblk.rcap.verbs.connecting import VerbsConnector
# A process without CAP_IPC_LOCK, as most are.
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF & ~(1 << 14), 0xFFFFFFFF & ~(1 << 14), 0,
                               0x1FF, 0x1FF, 0])
assert ctypes.CDLL(None, use_errno=True).capset(header, data) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
connector = VerbsConnector(sys.argv[1], 4999, private_data=b"", receive_size=8268, receives=4,
                           ird=1, timeout=5)
try:
    while connector.progress(monotonic()) is None:
        select.select([connector], [], [], 1)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_the_limit_on_locked_memory_is_looked_at_first() -> None:
    answers = {}
    for limit in (1 << 20, 32 << 20):
        answers[limit] = subprocess.check_output(
            [sys.executable, "-c", SMALL, lab_address(), str(limit)], text=True, timeout=60
        )
    assert "NotSupported the locked-memory limit is too small" in answers[1 << 20]
    assert "LimitMEMLOCK" in answers[1 << 20]
    assert "rejected" in answers[32 << 20], "enough for a connection: and then no program listens"


@pytest.mark.parametrize("mode", ["region", "window"])
def test_a_pool_that_is_used_up(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr("iserblk.rcap.verbs.queuepair.POOL_BYTES", 1 << 20)
    driver = Driver(*verbs_pair(lab_address(), mode))
    a, b = driver.pairs
    for pair in driver.pairs:
        pair.post_receive(64)
    memory = [bytearray(256 << 10) for _ in range(5)]
    stags = [a.advertise(memoryview(buffer), seam.REMOTE_WRITE) for buffer in memory[:4]]
    with pytest.raises(Busy):
        a.advertise(memoryview(memory[4]), seam.REMOTE_WRITE)
    assert a.advertise(memoryview(bytearray(4096)), seam.REMOTE_READ), "another pool"
    a.retire(stags[2][0])
    if mode == "region":
        stag, base = a.advertise(memoryview(memory[4]), seam.REMOTE_WRITE)
    else:
        driver.run(lambda: True)
        stag, base = a.advertise(memoryview(memory[4]), seam.REMOTE_WRITE)
    data = pattern(256 << 10)
    b.post([rdma_request(seam.RDMA_WRITE, data, stag, base), send_request(b, b"done")])
    driver.run(lambda: bool(driver.events[0]))
    a.retire(stag)
    assert memory[4] == data
    # Sources beyond the pool wait in order, instead.
    targets = [(*b.advertise(memoryview(bytearray(256 << 10)), seam.REMOTE_WRITE),)] * 8
    a.post([rdma_request(seam.RDMA_WRITE, data, *target) for target in targets])
    a.post([send_request(a, b"behind them")])
    driver.run(lambda: bool(driver.events[1]))
    for pair in driver.pairs:
        pair.close()


def test_a_transfer_larger_than_the_pool_ends_the_connection_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("iserblk.rcap.verbs.queuepair.POOL_BYTES", 1 << 20)
    driver = Driver(*verbs_pair(lab_address(), "region"))
    a, _ = driver.pairs
    with pytest.raises(Busy):
        a.advertise(memoryview(bytearray(2 << 20)), seam.REMOTE_WRITE)
    driver.run(lambda: None not in driver.errors)
    assert "LimitMEMLOCK" in str(driver.errors[0])
    for pair in driver.pairs:
        pair.close()


# --- ending ---

VICTIM = """
import os, select, sys
from time import monotonic
from iserblk.rcap import seam
from iserblk.rcap.verbs.connecting import VerbsConnector
connector = VerbsConnector(sys.argv[1], int(sys.argv[2]), private_data=b"", receive_size=8268,
                           receives=16, ird=16, timeout=20)
while (qp := connector.progress(monotonic())) is None:
    select.select([connector], [], [], 1)
memory = bytearray(1 << 20)
stag, base = qp.advertise(memoryview(memory), seam.REMOTE_WRITE | seam.REMOTE_READ)
request = seam.WorkRequest(seam.SEND)
request.header = qp.alloc_headers(1, 16)[0]
request.header.view[:] = stag.to_bytes(8, "big") + base.to_bytes(8, "big")
request.header_length = 16
qp.post([request])
sys.stdin.read()  # and then it ends without closing anything
"""


@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_a_peer_dies_in_mid_transfer(how: str) -> None:
    serving = listener()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, lab_address(), str(serving.port)], stdin=subprocess.PIPE
    )
    pairs: list[VerbsQueuePair] = []
    while not pairs:
        assert select.select([serving], [], [], 60)[0]
        pairs = serving.progress(monotonic())
    serving.close()
    driver = Driver(pairs[0])
    driver.run(lambda: bool(driver.events[0]))
    message = driver.events[0][0].data
    stag, base = int.from_bytes(message[:8], "big"), int.from_bytes(message[8:], "big")
    data = pattern(1 << 20)
    pairs[0].post([rdma_request(seam.RDMA_WRITE, data, stag, base) for _ in range(20)])
    if how == "killed":
        victim.kill()
    else:
        assert victim.stdin is not None
        victim.stdin.close()
    started = monotonic()
    driver.run(lambda: driver.errors[0] is not None)
    assert isinstance(driver.errors[0], TransportError)
    before = monotonic()
    pairs[0].close()
    assert monotonic() - before < STALL_S
    assert monotonic() - started < 30
    assert victim.stdin is not None
    victim.stdin.close()
    assert victim.wait(30) == (-9 if how == "killed" else 0)


def test_work_after_the_end() -> None:
    a, b = verbs_pair(lab_address(), "window")
    stag, _ = a.advertise(memoryview(bytearray(100)), seam.REMOTE_WRITE)
    b.close()
    driver = Driver(a)
    driver.run(lambda: driver.errors[0] is not None)
    assert "the peer closed the connection" in str(driver.errors[0])
    with pytest.raises(Busy):
        a.advertise(memoryview(bytearray(100)), seam.REMOTE_WRITE)
    with pytest.raises(ConnectionLost):
        a.alloc_headers(1, 10)
    a.post_receive(1)
    assert a.retire(stag) is True
    with pytest.raises(LocalProtocolError):
        a.retire(stag)
    a.close()


# --- leaks ---


def memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("mode", ["region", "window"])
def test_connections_and_transfers_leave_nothing(mode: str, request: pytest.FixtureRequest) -> None:
    """200 connections, 20,000 transfers; a tenth of both unless --long."""
    scale = 1 if request.config.getoption("--long") else 10
    for _ in range(20):
        for pair in verbs_pair(lab_address(), mode):
            pair.close()
    before = descriptors_to_begin_with(), resources(), memory_kib()
    for _ in range(200 // scale):
        for pair in verbs_pair(lab_address(), mode):
            pair.close()
    assert (descriptors(), resources()) == before[:2]
    driver = Driver(*verbs_pair(lab_address(), mode))
    a, b = driver.pairs
    for pair in driver.pairs:  # type: ignore[assignment]
        pair.post_receive(64)
    memory, data = bytearray(4096), pattern(4096)
    command, answer = send_request(a, b"c" * 76), send_request(b, b"a" * 76)
    for number in range(20_000 // scale):
        stag, base = a.advertise(memoryview(memory), seam.REMOTE_WRITE)
        a.post([command])
        driver.run(lambda: bool(driver.events[1]))
        driver.events[1].clear()
        b.post_receive(1)
        answer.opcode = seam.SEND_INVALIDATE if mode == "window" and number % 3 else seam.SEND
        answer.stag = stag
        b.post([rdma_request(seam.RDMA_WRITE, data, stag, base), answer])
        driver.run(lambda: bool(driver.events[0]))
        driver.events[0].clear()
        a.post_receive(1)
        a.retire(stag)
        if number == 500:
            settled = memory_kib()
    assert memory == data
    assert memory_kib() - settled < 2048
    for pair in driver.pairs:  # type: ignore[assignment]
        pair.close()
    assert (descriptors(), resources()) == before[:2]
    assert memory_kib() - before[2] < 16384
