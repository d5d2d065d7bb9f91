"""What a new nexus hears first from a LUN: unit attentions, as any initiator would be told them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from iserblk.commands.command import Operation
from iserblk.commands.running import failure, fill_no_data, take
from iserblk.errors import IserblkError, ScsiError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.options import Options
from iserblk.scsi import cdb, luns
from iserblk.scsi.sense import Sense
from iserblk.url import parse_url
from tests.support.sessions import Host

NAME = "iqn.2026-11.example:another-host"
_MOST = 8


def _ready(session: Session, lun: bytes) -> Operation[IserblkError | None]:
    """TEST UNIT READY, which is not sent again, whatever it is answered; its error."""
    waiter = session.new_waiter()
    slot = yield from take(session, waiter)
    slot.waiter = waiter
    slot.cdb[:] = cdb.test_unit_ready().ljust(16, b"\0")
    fill_no_data(slot, lun)
    waiter.pending = 1
    session.queue.submit(slot)
    while waiter.pending:
        yield waiter
    problem = failure(slot, "the LUN")
    session.queue.release(slot)
    return problem


@asynccontextmanager
async def new_nexus(url: str, name: str = NAME, **options: object) -> AsyncIterator[Host]:
    """A session of another initiator, which has sent no command. It logs out at the end."""
    parsed = parse_url(url)
    chosen = Options(initiator_name=name, **options)  # type: ignore[arg-type]
    driver = TrioDriver(await connect(parsed, chosen))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        try:
            yield Host(driver, luns.encode(parsed.lun or 0))
        finally:
            with trio.CancelScope(shield=True):
                await driver.log_out()
            nursery.cancel_scope.cancel()


async def attentions(host: Host) -> list[str]:
    """TEST UNIT READY until it is GOOD; the unit attentions before, as ``29/00``."""
    heard: list[str] = []
    for _ in range(_MOST):
        problem = await host.run(_ready(host.session, host.lun))
        if problem is None:
            return heard
        sense = problem.sense if isinstance(problem, ScsiError) else None
        assert isinstance(sense, Sense) and sense.is_unit_attention, problem
        heard.append(f"{sense.asc:02X}/{sense.ascq:02X}")
    raise AssertionError(f"still not ready: {heard}")


async def greeting(url: str, name: str = NAME, **options: object) -> list[str]:
    """What a new nexus hears first."""
    async with new_nexus(url, name, **options) as host:
        return await attentions(host)
