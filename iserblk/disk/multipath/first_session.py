"""The first session with a LUN that has several portals. Runs in trio."""

from __future__ import annotations

import trio

from iserblk.disk.multipath.paths import Paths
from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.drivers.tasks import TrioDriver


async def open_path(paths: Paths, lun: int | None) -> TrioDriver:
    """A session by the first way whose port carries out commands; its driver's ``run`` is the
    caller's to start. ``lun`` None: ALUA states are not asked for. Raises what the ways were in the
    way of."""
    errors: list[IserblkError] = []
    for _ in paths.ways.all:
        session = await paths.connect()
        driver = TrioDriver(session)
        problem: Exception | None = None
        if lun is not None:
            async with trio.open_nursery() as nursery:
                await nursery.start(driver.run)
                try:
                    await driver.run_operation(paths.look(lun, session))
                except Exception as error:
                    problem = error  # not as a group of the pump's
                nursery.cancel_scope.cancel()
        if problem is None:
            paths.settled(session)
            return driver
        session.fail(ConnectionLost(f"{session.portal}: given up"))
        if not isinstance(problem, IserblkError):
            raise problem
        errors.append(problem)
    first = errors[0]
    first.args = ("; ".join(map(str, errors)),)
    raise first
