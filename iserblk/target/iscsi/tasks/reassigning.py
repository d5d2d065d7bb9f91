"""Tasks that become allegiant to one connection of the target (RFC 7143 section 7.2.2)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from iserblk.datamover.seam import Resumption, TargetDatamover
from iserblk.errors import TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import luns
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.acknowledgements import Acknowledgements
from iserblk.target.iscsi.tasks.commands import Commands
from iserblk.target.iscsi.tasks.slot import COMPLETED, SUSPENDED, Allegiance, TargetTask
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.seam import DATA_IN

log = logging.getLogger(__name__)


class Reassignments:
    """Makes tasks of connections that are lost tasks of ``connection``."""

    def __init__(
        self,
        connection: Allegiance,
        session: TargetSession,
        datamover: TargetDatamover,
        slots: TaskSlots,
        answers: ControlAnswers,
        acknowledgements: Acknowledgements,
        commands: Commands,
    ) -> None:
        self._connection = connection
        self._session = session
        self._dm = datamover
        self._slots = slots
        self._answers = answers
        self._acknowledgements = acknowledgements
        self._commands = commands

    def take(self, request: pdu.TaskManagementRequest) -> None:
        """Take a TASK REASSIGN: the buffers that it advertises, then carry it out. It has to be
        immediate (RFC 7143 section 11.5.1): of one that has waited for its turn it is not known any
        more what it advertised."""
        if not request.opcode & bhs.IMMEDIATE:
            self._answers.task_management(request, pdu.TMF_REJECTED)
            return
        fresh = self._slots.take()
        self._dm.map_task(fresh)
        self._reassign(request, fresh)

    def _reassign(self, request: pdu.TaskManagementRequest, fresh: TargetTask) -> None:
        """Make a task allegiant to this connection, and go on with it (RFC 7143 section 7.2.2).
        ``fresh``: a slot with the buffers that the initiator advertises."""
        session = self._session
        slot = session.reassignable(request.referenced_task_tag)
        response = pdu.TMF_COMPLETE
        if not self._acknowledgements.keeps:
            response = pdu.TMF_REASSIGN_NOT_SUPPORTED
        elif slot is None:
            response = pdu.TMF_TASK_DOES_NOT_EXIST
        elif not slot.connection.recovered:
            response = pdu.TMF_STILL_ALLEGIANT
        elif slot.connection in session.connections:
            # It is logged out, but its buffers may be in use until it is closed.
            reassign = partial(self._reassign, request, fresh)
            slot.connection.on_closed.append(partial(self.later, reassign))
            return
        self._answers.task_management(request, response)
        if slot is None or response:
            self._slots.recycle(fresh)
            return
        self.take_over(slot, fresh, request.exp_data_sn)

    def take_over(self, slot: TargetTask, fresh: TargetTask, exp_data_sn: int) -> None:
        """Make a task of a connection that is closed one of this connection, with the memory of
        ``fresh``, and go on with it, or answer it again."""
        session = self._session
        old = slot.connection
        answered = session.answer_again(slot)
        both = slot.flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL
        sent = 0
        if answered and slot.task.direction & DATA_IN and not slot.acknowledged:
            sent = min(slot.task.transferred, slot.read_length if both else slot.edtl)
        slot.resume_at = self._dm.reassign_task(
            slot,
            fresh,
            Resumption(
                luns.encode(slot.lun) if slot.lun >= 0 else bytes(8),
                slot.itt,
                both,
                exp_data_sn,
                sent,
                slot.resume_at,
            ),
        )
        slot.adopt(fresh, self._connection)
        self._slots.replace(fresh, slot)
        session.let_go(old)
        if slot.state == SUSPENDED:
            self._commands.begin(slot)
        elif answered or slot.state == COMPLETED:
            if answered:
                slot.immediate = bhs.IMMEDIATE  # its CmdSN has moved the window already
            self._commands.respond(slot)

    def later(self, run: Callable[[], None]) -> None:
        """Call ``run``: the old connection of a task is closed."""
        if self._connection.done:
            return
        try:
            run()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            self._connection.abandon()
        self._connection.flush_quietly()
