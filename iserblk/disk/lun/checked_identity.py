"""The identity of a LUN in use: in doubt after each report that another LUN may have its number,
until the LUN has been compared."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from iserblk.commands.command import Operation, Waiter
from iserblk.commands.running import AGAIN_S, ATTEMPTS, check_time
from iserblk.commands.session import CommandSession
from iserblk.disk.durability.promise import Durability
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.identity import NEVER, check_lun
from iserblk.disk.lun.sizing import Sizing
from iserblk.disk.seam import LunInfo
from iserblk.errors import (
    IserblkError,
    LunChanged,
    NoSuchLun,
    NotSupported,
    UnusableLun,
    without_frames,
)
from iserblk.scsi.sense import REPORTED_LUNS_CHANGED, Sense

log = logging.getLogger(__name__)

Found = tuple[LunInfo, Geometry]


class Identified(Protocol):
    """The LUN: see DiskCore."""

    @property
    def session(self) -> CommandSession: ...

    @property
    def lun(self) -> bytes: ...

    @property
    def known(self) -> LunInfo: ...

    @property
    def info(self) -> LunInfo: ...

    @property
    def durability(self) -> Durability: ...

    @property
    def sizing(self) -> Sizing: ...

    def look(self, session: CommandSession, /) -> Operation[Found]: ...

    def renew(self, info: LunInfo, geometry: Geometry) -> None: ...


class CheckedIdentity:
    """Whether the LUN is the one that was opened. While that is in doubt, nothing is sent to the
    LUN but what tells which it is; operations have it compared (``reassure``)."""

    def __init__(self, of: Identified) -> None:
        self._of = of
        # Reports that another LUN may have the number, and up to which of them it was compared.
        self._reports = 0
        self._compared = 0
        self._since_list = False  # the first was that of another LUN: the list has changed
        self._comparing = False  # an operation does; others wait for it
        self._waiters: Final[list[Waiter]] = []  # of these
        self._gone = False  # when it was looked at last, the target had no such LUN
        self._another: LunChanged | None = None  # nothing is sent to the LUN any more

    @property
    def in_doubt(self) -> bool:
        """Whether another LUN may have the number."""
        return self._reports != self._compared

    @property
    def gone(self) -> bool:
        """Whether the target had no such LUN when it was looked at last."""
        return self._gone and self.in_doubt

    @property
    def is_another(self) -> bool:
        """Whether another LUN has taken its place. That is for good."""
        return self._another is not None

    # -- reports ----------------------------------------------------------------------------------

    def hear(self, report: Sense) -> None:
        """A command of the LUN ended with ``report``."""
        if not report.is_perhaps_another:
            return
        ours = self._since_list  # the report of the same change; each LUN has its own
        self.suspect(str(report))
        if report.is_unit_attention and report.code == REPORTED_LUNS_CHANGED and not ours:
            self._of.session.listeners.doubt()

    def doubt_by_list(self) -> None:
        """Another LUN of the target has told that the list of LUNs has changed."""
        if not self.in_doubt:
            self.suspect("the target's LUNs have changed")
            self._since_list = True

    def suspect(self, why: str) -> None:
        """Send nothing to the LUN before it has been compared. What is queued ends, and what is
        being read is read again; the operations have the LUN compared, and go on. ``why``: for the
        log."""
        first = not self.in_doubt
        self._reports += 1
        self._since_list = False
        queue = self._of.session.queue
        refused = queue.doubt(self._of.lun)
        self._of.durability.doubt_reads()
        if first:
            log.info("%s: %s; which LUN it is has to be looked up", self._of.info.name, why)
        queue.refuse(refused)

    # -- comparing --------------------------------------------------------------------------------

    def reassure(self, deadline: float) -> Operation[None]:
        """See LunListener. One operation compares, the others wait for it. Raises LunChanged or
        NoSuchLun, or why the LUN does not tell: then the next operation asks again."""
        while self.in_doubt:
            if self._another is not None:
                raise LunChanged(str(self._another))
            check_time(self._of.session, deadline, self._of.info.name)
            waiter = self._of.session.new_waiter()
            compares = not self._comparing
            self._comparing = True
            if not compares:
                waiter.pending += 1
                self._waiters.append(waiter)
                while waiter.pending:
                    yield waiter
                continue
            try:
                yield from self._compare()
            finally:
                self._comparing = False
                self.tick()
            if self.in_doubt:
                yield AGAIN_S  # until the connection is lost that is about to be replaced

    def tick(self) -> None:
        """Have the operations that wait for a comparison look again."""
        waiters = self._waiters.copy()
        self._waiters.clear()
        for waiter in waiters:
            waiter.task_done()

    def _compare(self) -> Operation[None]:
        of = self._of
        known = of.known
        for _ in range(ATTEMPTS):
            reports = self._reports
            try:
                info, geometry = yield from of.look(of.session)
                check_lun(known, info)
            except NoSuchLun:
                self._gone = True
                raise
            except UnusableLun:  # it may be one that is not ready yet
                raise
            except NotSupported as error:  # it is no disk any more
                self._another = LunChanged(f"{known.url}: {error}; {NEVER}")
            except LunChanged as error:
                self._another = without_frames(error)
            if self._another is not None:
                log.error("%s", self._another)
                raise LunChanged(str(self._another))
            # (The first command takes away what the target had to report; then it is asked again.)
            if reports == self._reports:
                if of.durability.replay_needed:
                    of.session.disconnect()  # the next one begins with that (``DiskCore.missed``)
                    return
                of.renew(info, geometry)
                of.sizing.changed = False
                self._believe(reports)
                return
        raise IserblkError(f"{known.name}: the LUN has changed each time it was looked at")

    def _believe(self, reports: int) -> None:
        """After ``reports`` the LUN was found to be the one in use: send commands to it, unless
        there were others."""
        if reports != self._reports:
            return
        self._compared = reports
        self._gone = self._since_list = False
        self._of.session.queue.believe(self._of.lun)
        log.info("%s: it is the same LUN", self._of.info.name)

    def checked(self) -> None:
        """It was found to be the LUN in use, on a connection that takes the place of the
        session's."""
        if self.in_doubt:
            self._believe(self._reports)
