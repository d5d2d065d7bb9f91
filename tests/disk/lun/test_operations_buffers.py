"""Buffers that no disk can use: refused before anything is sent, the session goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from iserblk.commands.command import Operation
from iserblk.errors import LocalProtocolError
from iserblk.initiator.session.session import Session
from tests.initiator.fake import CountingWaiter
from tests.initiator.peer import disk_of, linked

STRIDED = memoryview(bytearray(8192))[::2]
WORDS = memoryview(bytearray(4096)).cast("I")
ROWS = memoryview(bytearray(4096 * 512)).cast("B", (4096, 512))
READ_ONLY = memoryview(bytes(4096))
NO_VIEW: Any = bytearray(4096)


def _refused(
    session: Session,
    begin: Callable[[memoryview, int, CountingWaiter], object],
    run: Callable[[memoryview, int], Operation[None]],
    buffer: memoryview,
) -> None:
    waiter = CountingWaiter()
    assert begin(buffer, 0, waiter) is None and waiter.pending == 0
    with pytest.raises(LocalProtocolError):
        next(run(buffer, 0))
    assert session.queue.busy == session.queue.unsent == 0 and session.error is None


@pytest.mark.parametrize("buffer", [STRIDED, WORDS, ROWS, READ_ONLY, NO_VIEW])
def test_reads(buffer: memoryview) -> None:
    session, peer = linked()
    disk = disk_of(session)
    _refused(session, disk.begin_read, disk.read, buffer)
    peer.close()


@pytest.mark.parametrize("buffer", [STRIDED, WORDS, ROWS, NO_VIEW])
def test_writes(buffer: memoryview) -> None:
    session, peer = linked()
    disk = disk_of(session)
    _refused(session, disk.begin_write, disk.write, buffer)
    peer.close()
