"""A command that ends with GOOD and a residual count has not moved all its data: an error, whatever
the route by which it was sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.errors import IserblkError, ScsiError
from iserblk.iscsi import bhs
from tests.initiator.fake import CountingWaiter, FakeDriver
from tests.initiator.peer import disk_of, linked

RESIDUALS = [
    pytest.param(bhs.RESIDUAL_UNDERFLOW, 512, "of 1024 bytes moved 512", id="under"),
    pytest.param(bhs.RESIDUAL_OVERFLOW, 512, "of 1024 bytes moved 1536", id="over"),
]


class Bench:
    """A disk whose target the test plays."""

    def __init__(self) -> None:
        self.session, self.peer = linked()
        self.session.drive(FakeDriver(self.session))
        self.disk = disk_of(self.session)

    def answer(self, flag: int, count: int) -> None:
        self.peer.poll()
        heard = self.peer.heard.pop()
        self.peer.respond(heard, flags=bhs.FLAG_FINAL | flag, residual=count)
        self.session.progress(1.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    assert made.session.queue.busy == 0
    made.session.fail(IserblkError("end of test"))
    made.peer.close()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("flag", "count", "said"), RESIDUALS)
def test_a_command_of_its_own(bench: Bench, write: bool, flag: int, count: int, said: str) -> None:
    disk = bench.disk
    waiter = CountingWaiter()
    buffer = memoryview(bytearray(1024))
    slot = (disk.begin_write if write else disk.begin_read)(buffer, 0, waiter)
    assert slot is not None
    bench.answer(flag, count)
    assert not waiter.pending
    with pytest.raises(ScsiError, match=said):
        (disk.ended_write if write else disk.ended)(slot)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("flag", "count", "said"), RESIDUALS)
def test_a_command_of_an_operation(
    bench: Bench, write: bool, flag: int, count: int, said: str
) -> None:
    operation = (bench.disk.write if write else bench.disk.read)(memoryview(bytearray(1024)), 0)
    next(operation)
    bench.answer(flag, count)
    with pytest.raises(ScsiError, match=said):
        while True:
            next(operation)
