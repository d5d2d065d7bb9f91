"""What is done for each LUN on a fresh connection, before any waiting command is sent again.

``STEPS`` run in their order, each for one LUN, on the fresh session whose connection the long-lived
session is about to take over. When a step raises, the reconnector tries again later; LunChanged and
ReservationLost end the long-lived session for good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.identify import Names, identify, names
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import LunInfo
from iserblk.errors import ConnectFailed, LunChanged, NotSupported, UnusableLun
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import Operation

Found = tuple[LunInfo, Geometry]
Step = Callable[[DiskCore, Session], Operation[None]]
_Known = TypeVar("_Known", LunInfo, Names)


def check_identity(core: DiskCore, fresh: Session) -> Operation[None]:
    """Check that the LUN on ``fresh`` is the one in use, and take over its data. Raises
    LunChanged."""
    found = yield from recognise(core, fresh)
    if found is not None:
        core.renew(*found)


def recognise(core: DiskCore, fresh: Session) -> Operation[Found | None]:
    """What the LUN on ``fresh`` says of itself. None: it is the LUN in use, but a reserved LUN
    tells more only to a nexus that is registered. Raises LunChanged when it is another LUN."""
    if core.reservation is None:
        return (yield from same_lun(core, fresh))
    yield from _same(core, names(fresh, core.info.lun, core.info.name, core.info.url))
    return None


def same_lun(core: DiskCore, fresh: Session) -> Operation[Found]:
    """All that the LUN on ``fresh`` says of itself. Raises LunChanged when it is not the LUN in
    use, or its block size is another."""
    known = core.info
    geometries: list[Geometry] = []

    def look() -> Operation[LunInfo]:
        try:
            info, geometry = yield from identify(
                fresh, known.lun, known.name, known.url, known.target
            )
        except UnusableLun as error:  # it may be one that is not ready yet
            raise ConnectFailed(str(error)) from None
        geometries.append(geometry)
        return info

    info = yield from _same(core, look())
    if known.block_size != info.block_size:
        raise LunChanged(
            f"{known.url}: {identity_words(known)} had blocks of {known.block_size} bytes, "
            f"it has blocks of {info.block_size} bytes now; {_NEVER}"
        )
    return info, geometries[0]


def _same(core: DiskCore, look: Operation[_Known]) -> Operation[_Known]:
    known = core.info
    try:
        found = yield from look
    except NotSupported as error:
        raise LunChanged(f"{known.url}: {error}; {_NEVER}") from None
    before, now = identity_words(known), identity_words(found)
    if before != now:
        raise LunChanged(
            f"{known.url}: another LUN is there now: it was {before}, it is {now}; {_NEVER}"
        )
    return found


def check_reservation(core: DiskCore, fresh: Session) -> Operation[None]:
    """Take up the reservation again, if there is one. Raises ReservationLost when another initiator
    has the LUN now, or may have had it meanwhile."""
    if core.reservation is not None:
        yield from core.reservation.resume(fresh, core.lun)
        # The rest, which the LUN hides from a nexus that is not registered.
        core.renew(*(yield from same_lun(core, fresh)))


def replay_journal(core: DiskCore, fresh: Session) -> Operation[None]:
    """Send again what the target has, or may have, lost with its cache."""
    yield from core.replay(fresh)


_NEVER = "nothing is sent to it; put the LUN in order, and connect anew"


def identity_words(info: LunInfo | Names) -> str:
    """All that tells one LUN from another, for messages and comparison."""
    identifiers = ", ".join(sorted(info.identifiers)) or "no identifiers"
    return f"{info.vendor} {info.product}, serial {info.serial or 'none'}, {identifiers}"


STEPS: list[Step] = [check_identity, check_reservation, replay_journal]


def listen(cores: Sequence[DiskCore], fresh: Session) -> None:
    """Follow every LUN on ``fresh``. Call it before the first command on ``fresh``: the target may
    report what it has lost with that command, and with no other."""
    for core in cores:
        core.listen_resuming(fresh)


def resume(core: DiskCore, fresh: Session) -> Operation[None]:
    """Run all steps for one LUN."""
    listen([core], fresh)
    for step in STEPS:
        yield from step(core, fresh)


def resume_all(cores: Sequence[DiskCore], fresh: Session) -> Operation[None]:
    """Run all steps for every LUN of a session."""
    for core in cores:
        yield from resume(core, fresh)
