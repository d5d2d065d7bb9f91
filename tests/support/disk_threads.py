"""Disks of threads over a session that a test has made, whose target it plays."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import trio

from iserblk.disk.aio import TrioDisk, TrioDiskSet
from iserblk.disk.blocking import ThreadDisk, ThreadDiskSet
from iserblk.disk.ending import EndOfUse
from iserblk.disk.lun.operations import DiskCore
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session


@asynccontextmanager
async def opened(
    core: DiskCore, reconnects: bool = False, busy_poll_us: int = 0
) -> AsyncIterator[TrioDiskSet]:
    """``reconnects``: a lost connection suspends the session, until the test brings another one."""
    session = core.session
    assert isinstance(session, Session)
    driver = TrioDriver(session)
    if reconnects:
        driver.reconnect = lambda: None
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        try:
            yield TrioDiskSet(
                {"lun0": TrioDisk(core, driver)},
                lambda: None,
                ending=EndOfUse([session]),
                busy_poll_us=busy_poll_us,
            )
        finally:
            with trio.CancelScope(shield=True):
                driver.reconnect = None
                await driver.log_out()
            nursery.cancel_scope.cancel()


def disks_of(core: DiskCore, *, reconnects: bool = False, busy_poll_us: int = 0) -> ThreadDiskSet:
    return ThreadDiskSet(partial(opened, core, reconnects, busy_poll_us))


@contextmanager
def thread_disk(core: DiskCore, *, reconnects: bool = False) -> Iterator[ThreadDisk]:
    with disks_of(core, reconnects=reconnects) as disks:
        disk = disks.disks["lun0"]
        assert isinstance(disk, ThreadDisk)
        yield disk
