"""A command that ends with GOOD and a residual count has not moved all its data: an error, whatever
the route by which it was sent."""

from __future__ import annotations

import pytest

from iserblk.errors import IserblkError, ScsiError
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs
from tests.initiator.fake import CountingWaiter, FakeDriver
from tests.initiator.peer import Peer, disk_of, linked

RESIDUALS = [
    pytest.param(bhs.RESIDUAL_UNDERFLOW, 512, "of 1024 bytes moved 512", id="under"),
    pytest.param(bhs.RESIDUAL_OVERFLOW, 512, "of 1024 bytes moved 1536", id="over"),
]


def answer(session: Session, peer: Peer, flag: int, count: int) -> None:
    peer.poll()
    heard = peer.heard.pop()
    peer.respond(heard, flags=bhs.FLAG_FINAL | flag, residual=count)
    session.progress(1.0)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("flag", "count", "said"), RESIDUALS)
def test_a_command_of_its_own(write: bool, flag: int, count: int, said: str) -> None:
    session, peer = linked()
    session.drive(FakeDriver(session))
    disk = disk_of(session)
    waiter = CountingWaiter()
    buffer = memoryview(bytearray(1024))
    slot = (disk.begin_write if write else disk.begin_read)(buffer, 0, waiter)
    assert slot is not None
    answer(session, peer, flag, count)
    assert not waiter.pending
    with pytest.raises(ScsiError, match=said):
        (disk.ended_write if write else disk.ended)(slot)
    assert session.queue.busy == 0
    session.fail(IserblkError("end of test"))
    peer.close()


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(("flag", "count", "said"), RESIDUALS)
def test_a_command_of_an_operation(write: bool, flag: int, count: int, said: str) -> None:
    session, peer = linked()
    session.drive(FakeDriver(session))
    disk = disk_of(session)
    operation = (disk.write if write else disk.read)(memoryview(bytearray(1024)), 0)
    next(operation)
    answer(session, peer, flag, count)
    with pytest.raises(ScsiError, match=said):
        while True:
            next(operation)
    assert session.queue.busy == 0
    session.fail(IserblkError("end of test"))
    peer.close()
