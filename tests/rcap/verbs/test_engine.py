"""Work requests through pyverbs' own objects: nothing is left of them. No device is needed."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.errors import NotSupported
from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.engine import PlainEngine
from tests.support.target import ROOT

pytest.importorskip("pyverbs", reason="python3-pyverbs is not installed")

GROWTH_KIB = 2048
ROUND = 1000


class NoDevice:
    """Takes everything; ``entry`` completes over and over."""

    def __init__(self) -> None:
        self.posted = 0
        self.entry: object = None

    def post_send(self, request: object) -> None:
        self.posted += 1

    def post_recv(self, request: object) -> None:
        self.posted += 1

    def poll(self, limit: int) -> tuple[int, list[object]]:
        made = api.pyverbs("cq").WC(wr_id=7, status=0, byte_len=76, wc_flags=1, vendor_err=0)
        return 1, [made]


def resident_kib() -> int:
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    return int(fields.split()[0])


def use(engine: PlainEngine, rounds: int) -> None:
    for _ in range(rounds):
        engine.send(1, api.WR_SEND, api.SIGNALED, 0, 0, 4096, 76, 1, 0, 0, 0)
        engine.send(2, api.WR_RDMA_WRITE, 0, 5, 8192, 4096, 76, 1, 8192, 100, 2)
        engine.send(3, api.WR_SEND_WITH_INV, 0, 5, 0, 4096, 76, 1, 0, 0, 0)
        engine.post()
        engine.receive(4, 4096, 8268, 1)
        engine.post_receives()
        assert engine.poll(16) == [(7, 0, 76, 1, 0, 0)]


@pytest.mark.parametrize(
    "uses", [50_000, pytest.param(1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_requests_and_completions_leave_nothing(uses: int) -> None:
    device = NoDevice()
    engine = PlainEngine(device, device, None, (4096, 1))
    rounds = uses // 5
    use(engine, ROUND)
    gc.collect()
    before = resident_kib()
    use(engine, rounds)
    gc.collect()
    assert device.posted == 4 * (rounds + ROUND)
    assert resident_kib() - before < GROWTH_KIB


def test_what_is_not_closed_does_leak() -> None:
    """The reason for closing: the test above can fail. In a process of its own: this one may have
    free memory enough."""
    here = "import sys; sys.path.insert(0, sys.argv[1]); from tests.rcap.verbs import test_engine; "
    done = subprocess.run(
        [sys.executable, "-c", here + "print(test_engine.leak_kib())", str(ROOT)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) > GROWTH_KIB


def leak_kib() -> int:
    wr = api.pyverbs("wr")
    before = resident_kib()
    for _ in range(100_000):
        wr.SendWR(num_sge=1, sg=[wr.SGE(4096, 76, 1)])
    return resident_kib() - before


def test_an_empty_request_has_a_piece() -> None:
    device = NoDevice()
    engine = PlainEngine(device, device, None, (4096, 1))
    engine.send(1, api.WR_RDMA_READ, api.SIGNALED, 5, 0, 0, 0, 0, 0, 0, 0)
    engine.post()
    assert device.posted == 1


def test_windows_are_refused() -> None:
    device = NoDevice()
    engine = PlainEngine(device, device, None, (4096, 1))
    with pytest.raises(NotSupported, match="scripts/setup"):
        engine.bind(1, 0, None, None, 0, 0, 0)
    with pytest.raises(NotSupported, match="scripts/setup"):
        engine.invalidate(1, 0, 5)
