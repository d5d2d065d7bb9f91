"""What is done for each LUN on a fresh connection, before any waiting command is sent again.

``STEPS`` run in their order, each for one LUN, on the fresh session whose connection the long-lived
session is about to take over. When a step raises, the reconnector tries again later; LunChanged and
ReservationLost end the long-lived session for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.commands.command import Operation
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.identify import names
from iserblk.disk.lun.identity import NEVER, check_lun, check_names
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import LunInfo
from iserblk.errors import ConnectFailed, LunChanged, NoSuchLun, NotSupported, UnusableLun

Found = tuple[LunInfo, Geometry]
Step = Callable[[DiskCore, CommandSession], Operation[None]]


def check_identity(core: DiskCore, fresh: CommandSession) -> Operation[None]:
    """Check that the LUN on ``fresh`` is the one in use, and take over its data. Raises
    LunChanged."""
    core.begin_check()
    found = yield from recognise(core, fresh)
    core.checked()
    if found is not None:
        core.renew(*found)


def recognise(
    core: DiskCore, fresh: CommandSession, elsewhere: bool = False
) -> Operation[Found | None]:
    """What the LUN on ``fresh`` says of itself. None: it is the LUN in use, but a reserved LUN
    tells more only to a nexus that is registered. ``elsewhere``: ``fresh`` uses another portal than
    the session. Raises LunChanged when it is another LUN."""
    if core.reservation is None:
        return (yield from same_lun(core, fresh, elsewhere))
    known = core.info
    try:
        found = yield from names(fresh, known.lun, known.name, known.url)
    except NotSupported as error:
        raise LunChanged(f"{known.url}: {error}; {NEVER}") from None
    check_names(known, found)
    return None


def same_lun(core: DiskCore, fresh: CommandSession, elsewhere: bool = False) -> Operation[Found]:
    """All that the LUN on ``fresh`` says of itself. Raises LunChanged when it is not the LUN in
    use, or its block size is another."""
    known = core.known
    try:
        info, geometry = yield from core.look(fresh)
    except UnusableLun as error:  # it may be one that is not ready yet
        raise ConnectFailed(str(error)) from None
    except NotSupported as error:
        raise LunChanged(f"{known.url}: {error}; {NEVER}") from None
    check_lun(known, info, elsewhere or core.elsewhere)
    return info, geometry


def check_reservation(core: DiskCore, fresh: CommandSession) -> Operation[None]:
    """Take up the reservation again, if there is one. Raises ReservationLost when another initiator
    has the LUN now, or may have had it meanwhile."""
    if core.reservation is not None:
        yield from core.reservation.resume(fresh, core.lun)
        core.reserved()
        # The rest, which the LUN hides from a nexus that is not registered.
        core.renew(*(yield from same_lun(core, fresh)))


def replay_journal(core: DiskCore, fresh: CommandSession) -> Operation[None]:
    """Send again what the target has, or may have, lost with its cache."""
    yield from core.replay(fresh)


STEPS: list[Step] = [check_identity, check_reservation, replay_journal]


def listen(cores: Sequence[DiskCore], fresh: CommandSession) -> None:
    """Follow every LUN on ``fresh``. Call it before the first command on ``fresh``: the target may
    report what it has lost with that command, and with no other."""
    for core in cores:
        core.listen_resuming(fresh)


def resume(core: DiskCore, fresh: CommandSession) -> Operation[None]:
    """Run all steps for one LUN; none for a LUN that another one has replaced, nor for one that was
    gone before and still is. Nothing is sent to these, and the session's other LUNs go on. What
    they had not flushed counts as lost all the same."""
    if core.identity.is_another:
        return
    listen([core], fresh)
    try:
        for step in STEPS:
            yield from step(core, fresh)
    except NoSuchLun:
        if not core.identity.gone:
            raise
        core.missed()


def resume_all(cores: Sequence[DiskCore], fresh: CommandSession) -> Operation[None]:
    """Run all steps for every LUN of a session."""
    for core in cores:
        yield from resume(core, fresh)
