"""Opens the first session with a LUN that has several portals. Runs in trio."""

from __future__ import annotations

import trio

from iserblk.disk.multipath.paths import Paths
from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.drivers.tasks import TrioDriver


async def open_path(paths: Paths, lun: int | None) -> TrioDriver:
    """Open a session by the first way whose port carries out commands. The caller starts the
    driver's ``run``. ``lun`` None: ALUA states are not asked for. Raises why no way can be used;
    then no session is left."""
    first: IserblkError | None = None
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
                    problem = error  # raised below, not inside the nursery's exception group
                nursery.cancel_scope.cancel()
        if problem is None:
            paths.settled(session)
            return driver
        session.fail(ConnectionLost(f"{session.portal}: given up"))
        if not isinstance(problem, IserblkError):
            raise problem
        first = first or problem
    assert first is not None  # there is a way
    raise paths.tell_all(first)
