"""Which LUNs a target reports: for URLs without a LUN, when they are opened and later.

The set of disks of an open URL does not change: front-ends have passed on the names of the disks. A
LUN that appears later is found when the URL is opened again. For a LUN that is gone the target
fails each command. Both changes are logged.
"""

from __future__ import annotations

import logging

from iserblk.commands.command import Command, Operation
from iserblk.commands.listeners import LunListener
from iserblk.commands.running import ask
from iserblk.commands.session import CommandSession
from iserblk.errors import CommandError, TransportError
from iserblk.scsi import cdb, luns
from iserblk.scsi import sense as sense_data

log = logging.getLogger(__name__)

FIRST_ALLOCATION = 16384  # bytes: 2,047 LUNs
MOST_ALLOCATION = 1 << 20
TOLD = 16  # LUNs that are logged one by one, of one change
REREADS = 3  # how often a list is read at most, when it changes meanwhile


def report_luns(session: CommandSession, deadline: float = 0.0) -> Operation[list[int]]:
    """The LUNs of the target, ascending: all that fit into MOST_ALLOCATION bytes. ``deadline``: as
    of ``command``."""
    length = FIRST_ALLOCATION
    while True:
        report_luns = cdb.report_luns(length)
        answer = yield from ask(session, bytes(8), report_luns, length, session.portal, deadline)
        found = sorted(set(luns.decode_report_luns(answer)))
        whole = luns.length_of_report(answer)
        if whole <= length:
            return found
        if length == MOST_ALLOCATION:
            log.warning(
                "%s: the target reports LUNs in %d bytes; only the first %d are looked at",
                session.portal,
                whole,
                length,
            )
            return found
        length = min(whole, MOST_ALLOCATION)


class Inventory(LunListener):
    """The LUNs of one session's target. ``changed``: the target has reported a change, and the list
    was not read since."""

    def __init__(self) -> None:
        self.changed = False
        self._known: list[int] = []

    def hear(self, slot: Command) -> None:
        """A command of any LUN ended with ``slot.sense``."""
        sense = sense_data.decode(slot.sense)
        if sense.is_unit_attention and sense.code == sense_data.REPORTED_LUNS_CHANGED:
            self.changed = True

    def read(self, session: CommandSession, deadline: float = 0.0) -> Operation[list[int]]:
        """Read the present list. Raises as ``command``."""
        for _ in range(REREADS):
            self.changed = False
            self._known = yield from report_luns(session, deadline)
            if not self.changed:
                break
        return self._known

    def look_again(self, session: CommandSession, deadline: float) -> Operation[None]:
        """Read the list again, and log which LUNs are new or gone. An error is only logged, too:
        where the connection is lost, the next request finds that."""
        before = set(self._known)
        try:
            now = set((yield from self.read(session, deadline)))
        except (CommandError, TransportError) as error:
            log.warning("%s: the target's LUNs have changed: %s", session.portal, error)
            return
        new = "is new at the target: open the URL again to have it"
        self._tell(session, sorted(now - before), new)
        self._tell(session, sorted(before - now), "is gone from the target")

    def _tell(self, session: CommandSession, changed: list[int], how: str) -> None:
        """Log what has become of LUNs, a few of them one by one: there may be thousands, each time
        that the target says so."""
        for lun in changed[:TOLD]:
            log.warning("%s: LUN %d %s", session.portal, lun, how)
        more = len(changed) - TOLD
        if more > 0:
            log.warning("%s: each of %d more LUNs %s", session.portal, more, how)
