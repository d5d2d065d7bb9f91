"""The trio driver: operations that are interrupted, and a pump that is."""

from __future__ import annotations

import signal

import pytest
import trio
import trio.testing

from iserblk.disk.aio import Disk
from iserblk.errors import ConnectionLost
from iserblk.initiator.trio_driver import TrioDriver
from iserblk.iscsi import bhs
from tests.initiator.peer import Heard, disk_of, linked

WAIT_S = 30


@trio.lowlevel.enable_ki_protection
def _interrupt() -> None:
    """As if the user had pressed ^C while trio itself was at work: the main task is told."""
    signal.raise_signal(signal.SIGINT)


def test_interrupt_gives_the_buffer_back_first() -> None:
    """KeyboardInterrupt comes out of a read when its command was aborted, not before."""
    buffer = bytearray(b"mine" * 128)
    seen: list[int] = []

    async def main() -> None:
        session, peer = linked()

        def answer(heard: Heard) -> None:
            seen.append(heard.opcode)
            if heard.opcode == bhs.TASK_MANAGEMENT_REQUEST:
                peer.complete(heard)
            elif heard.opcode == bhs.LOGOUT_REQUEST:
                peer.goodbye(heard)
            else:
                _interrupt()

        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.run, answer)
            await nursery.start(driver.run)
            with pytest.raises(KeyboardInterrupt):
                await Disk(disk_of(session), driver).read_into(memoryview(buffer), 0)
            assert session.error is None and session.in_flight == 0
            buffer.clear()  # BufferError while anybody has a view of it
            await driver.log_out()
            peer.close()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert seen[:2] == [bhs.SCSI_COMMAND, bhs.TASK_MANAGEMENT_REQUEST]


async def test_pump_that_breaks_ends_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the pump, or ^C in the middle of it, leaves nobody waiting for ever."""
    session, peer = linked()
    driver = TrioDriver(session)

    def broken(_now: float) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "progress", broken)
    disk = Disk(disk_of(session), driver)
    buffer = bytearray(4096)
    errors: list[BaseExceptionGroup[BaseException]] = []

    async def operation() -> None:
        try:
            await disk.read_into(memoryview(buffer), 0)
        except trio.Cancelled:
            assert session.in_flight == 0
            raise

    with trio.fail_after(WAIT_S):
        try:
            async with trio.open_nursery(strict_exception_groups=True) as nursery:
                await nursery.start(driver.run)
                nursery.start_soon(operation)
                await trio.testing.wait_all_tasks_blocked()
                peer.poll()
                peer.respond(peer.heard[0])
        except BaseExceptionGroup as group:
            errors.append(group)
    assert errors[0].split(KeyboardInterrupt)[0] is not None
    assert isinstance(session.error, ConnectionLost)
    peer.close()
