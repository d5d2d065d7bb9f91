"""What is lost on one connection of the target, over TCP at ErrorRecoveryLevel 1 or 2."""

from __future__ import annotations

from typing import Final

from iserblk.datamover.seam import TargetDatamover
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.commands import Commands
from iserblk.target.iscsi.tasks.slot import UNSOLICITED, Allegiance, TargetTask

PATIENCE: Final = 3  # ticks, after which unsolicited data counts as lost


class Losses:
    """Asks for what was lost on ``connection``, tick by tick."""

    def __init__(
        self,
        connection: Allegiance,
        session: TargetSession,
        datamover: TargetDatamover,
        commands: Commands,
        answers: ControlAnswers,
        budget: DataBudget,
    ) -> None:
        self._connection = connection
        self._session = session
        self._dm = datamover
        self._commands = commands
        self._answers = answers
        self._budget = budget
        # At the last tick: the oldest status that was kept, and the first task that waited.
        self._unacknowledged: int | None = None
        self._waited: TargetTask | None = None

    def ask_again(self) -> None:
        """Ask for the data that was lost. Raises as ``TargetConnection.tick``."""
        self._dm.tick()
        for slot in list(self._session.tasks.values()):
            if slot.state == UNSOLICITED and slot.connection is self._connection:
                slot.unsolicited.age += 1
                if slot.unsolicited.age >= PATIENCE:
                    self._commands.begin(slot)  # the rest is fetched by R2Ts

    def show(self) -> None:
        """If a status is not acknowledged for two ticks, show the initiator that there is one. If a
        task waits so long for memory, what is kept for retransmission gives way."""
        oldest = self._dm.unacknowledged
        if oldest is not None and oldest == self._unacknowledged:
            self._answers.ping()
        self._unacknowledged = oldest
        session = self._session
        waits = session.deferred[0] if session.deferred and not session.paused else None
        if waits is not None and waits is self._waited:
            self._budget.press()
        self._waited = waits
