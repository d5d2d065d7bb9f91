"""Many sessions of one target: none costs more than the first, nor than it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

import trio
from trio.testing import MockClock

from iserblk.datamover.iser import HEADER_LENGTH
from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, memory_pair
from iserblk.target.attending import PING_S
from iserblk.target.iscsi.tasks.slots import BATCH_SLOTS
from iserblk.target.scsi.device import LogicalUnit
from iserblk.target.server import TargetServer
from tests.iscsi import logins
from tests.target.fake_store import FakeStore

IQN = "iqn.2026-11.example:disk"
HEAD = b"\x10" + bytes(HEADER_LENGTH - 1)
PAIRS = [("InitiatorName", "iqn.x:y"), ("TargetName", IQN), ("RDMAExtensions", "Yes")]
SESSIONS = 200
FEW = 5
PATIENCE_S = 60.0  # only a test that fails ever waits that long


@contextmanager
def counted(counts: list[int]) -> Iterator[None]:
    """Add to ``counts`` how many functions of iserblk, and built-in functions from there, are
    called."""
    calls = 0

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        if event in ("call", "c_call") and "/iserblk/" in frame.f_code.co_filename:
            calls += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        counts.append(calls)


async def answered(pair: MemoryQueuePair, opcode: int, request: tuple[bytes, bytes]) -> None:
    """Send a PDU, and wait for the answer."""
    work = seam.WorkRequest(seam.SEND_SE)
    work.data = memoryview(HEAD + request[0] + request[1])
    pair.post([work])
    while True:
        await trio.lowlevel.wait_readable(pair.fileno())
        for event in pair.progress(0.0):
            assert event.data is not None
            assert event.data[HEADER_LENGTH] & 0x3F == opcode
            return


def ping(cmd_sn: int) -> tuple[bytes, bytes]:
    return pdu.NopOut(opcode=0x40, itt=7, cmd_sn=cmd_sn, exp_stat_sn=0).pack(), b""


async def test_the_last_login_is_as_cheap_as_the_first() -> None:
    """And so is a request, whatever the number of sessions: the calls are counted."""
    server = TargetServer(IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)})
    of_logins: list[int] = []
    of_pings: list[int] = []
    ends: list[MemoryQueuePair] = []
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for number in range(SESSIONS):
                ours, theirs = memory_pair()
                ends.append(ours)
                ours.post_receive(8)
                isid = b"\x80" + number.to_bytes(5, "big")
                with counted(of_logins):
                    nursery.start_soon(server.serve_queue_pair, theirs, "10.0.0.1:3260", "peer")
                    await answered(ours, 0x23, logins.request(PAIRS, isid=isid))
                with counted(of_pings):
                    await answered(ours, 0x20, ping(100))
            assert len(server._sessions) == SESSIONS
            nursery.cancel_scope.cancel()
    for ours in ends:
        ours.close()
    for counts in (of_logins, of_pings):
        first, last = counts[1 : 1 + FEW], counts[-FEW:]
        assert max(last) < max(first) + SESSIONS // 2


async def test_a_session_that_has_become_idle_gives_memory_back(mock_clock: MockClock) -> None:
    """In the second of the looks at it: after the first it is known to have been busy."""
    mock_clock.autojump_threshold = 0.02
    server = TargetServer(IQN, {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)})
    ours, theirs = memory_pair()
    ours.post_receive(200)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            partial(server.serve_queue_pair, theirs, "10.0.0.1:3260", "peer", at_once=False)
        )
        await answered(ours, 0x23, logins.request(PAIRS))
        (connection,) = server._connections
        assert len(connection.slots.all) == BATCH_SLOTS
        for number in range(3 * BATCH_SLOTS):
            work = seam.WorkRequest(seam.SEND_SE)
            command = bhs.SCSI_COMMAND_FIELDS.pack(
                bhs.SCSI_COMMAND, 0x81, 0, bytes(8), number, 0, 100 + number, 0, bytes(16)
            )
            work.data = memoryview(HEAD + command)
            ours.post([work])
        heard = 0
        while heard < 3 * BATCH_SLOTS:
            await trio.lowlevel.wait_readable(ours.fileno())
            heard += len(ours.progress(0.0))
        assert len(connection.slots.all) == 3 * BATCH_SLOTS
        await trio.sleep(PING_S + 1)
        assert len(connection.slots.all) == 3 * BATCH_SLOTS and not connection.done
        await trio.sleep(PING_S)
        assert len(connection.slots.all) == BATCH_SLOTS
        nursery.cancel_scope.cancel()
    ours.close()
