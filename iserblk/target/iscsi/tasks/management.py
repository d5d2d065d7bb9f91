"""Task management requests of one connection of the target (RFC 7143 section 11.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from iserblk.iscsi import pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import serial_lt
from iserblk.scsi import luns
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.iscsi.logout import Logouts
from iserblk.target.iscsi.owners import ConnectionOwner
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.reassigning import Reassignments
from iserblk.target.iscsi.tasks.slot import WAITING, Allegiance, TargetTask
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.seam import DATA_IN, DeviceServer

UNANSWERED: Final = 64  # task management requests of a connection, until more are rejected
# A LUN has one task set for all sessions (TST 0 in the Control mode page).
_OF_ALL_SESSIONS: Final = (pdu.TMF_CLEAR_TASK_SET, pdu.TMF_LOGICAL_UNIT_RESET)
_OF_THE_TARGET: Final = (pdu.TMF_TARGET_WARM_RESET, pdu.TMF_TARGET_COLD_RESET)
_OF_A_LUN: Final = (pdu.TMF_ABORT_TASK_SET, *_OF_ALL_SESSIONS)


class TaskManagement:
    """The task management requests of ``connection``. ``parameters``: what its login agreed on."""

    def __init__(
        self,
        connection: Allegiance,
        owner: ConnectionOwner,
        device: DeviceServer,
        session: TargetSession,
        slots: TaskSlots,
        answers: ControlAnswers,
        reassignments: Reassignments,
        logouts: Logouts,
        parameters: SessionParameters,
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._device = device
        self._session = session
        self._window = session.window
        self._tasks = session.tasks
        self._slots = slots
        self._answers = answers
        self._reassignments = reassignments
        self._logouts = logouts
        self._parameters = parameters
        self._unanswered = 0  # requests that wait for tasks to end

    def take(self, request: pdu.TaskManagementRequest) -> None:
        session, window = self._session, self._window
        if not window.accept(request.opcode, request.cmd_sn):
            return
        if request.function == pdu.TMF_TASK_REASSIGN:
            self._reassignments.take(request)
        elif (
            request.function in _OF_A_LUN
            and (len(session.connections) > 1 or session.parameters.error_recovery_level)
            and serial_lt(window.exp_cmd_sn, request.cmd_sn)
        ):
            # It is about all commands before it: some of them are still to come (4.2.3.3).
            manage = partial(self._manage, request)
            if not session.fence(request.cmd_sn, self._connection, manage):
                self._answers.task_management(request, pdu.TMF_REJECTED)
        else:
            self._manage(request)

    def _manage(self, request: pdu.TaskManagementRequest) -> None:
        """Carry out a task management function. All tasks of the session are meant, whatever
        connection they are allegiant to."""
        session = self._session
        lun = luns.decode(request.lun)
        if self._unanswered >= UNANSWERED:
            self._answers.task_management(request, pdu.TMF_REJECTED)
        elif request.function == pdu.TMF_ABORT_TASK:
            slot = self._tasks.get(request.referenced_task_tag)
            answered = None if slot is not None else self._lost_answer(request.referenced_task_tag)
            if answered is not None:
                self._abort_answered(answered, request)
            elif slot is not None and slot.state == WAITING:
                session.discard(slot)
                self._answers.task_management(request, pdu.TMF_COMPLETE)
            elif slot is None and not self._window.give_up(request.ref_cmd_sn, request.cmd_sn):
                self._answers.task_management(request, pdu.TMF_TASK_DOES_NOT_EXIST)
            else:
                self._abort([slot] if slot else [], request)
        elif (
            request.function == pdu.TMF_TARGET_COLD_RESET
            and session.attached
            and self._device.hides_luns(session.nexus)
        ):
            # It would end sessions that use what this initiator has no access to.
            self._answers.task_management(request, pdu.TMF_NOT_AUTHORIZED)
        elif request.function in _OF_THE_TARGET and session.attached:
            everything = self._device.luns(session.nexus)
            for each in everything:
                self._device.reset_lun(each)
            self._abort(session.tasks_on(*everything), request, everything)
        elif request.function not in _OF_A_LUN or not session.attached:
            self._answers.task_management(request, pdu.TMF_NOT_SUPPORTED)
        elif not self._device.has_lun(session.nexus, lun):
            self._answers.task_management(request, pdu.TMF_LUN_DOES_NOT_EXIST)
        else:
            if request.function == pdu.TMF_LOGICAL_UNIT_RESET:
                self._device.reset_lun(lun)
            others = (lun,) if request.function in _OF_ALL_SESSIONS else ()
            self._abort(session.tasks_on(lun), request, others)

    def _lost_answer(self, itt: int) -> TargetTask | None:
        """The task with this tag, if it was answered on a connection that has been logged out for
        recovery since, and the initiator has not acknowledged the answer. Of a connection that
        works it does not exist any more: what was sent there comes, or is asked for by SNACK."""
        slot = self._session.answered.get(itt)
        return slot if slot is not None and slot.connection.recovered else None

    def _abort_answered(self, slot: TargetTask, request: pdu.TaskManagementRequest) -> None:
        """Carry out an ABORT TASK of a ``_lost_answer``: the task becomes allegiant to this
        connection, its status is sent again, and then the response (RFC 7143 section 11.5.1). Over
        iSER an ABORT TASK advertises no buffer: a read whose data may not have come ends without a
        status, as it would not be true."""
        session = self._session
        old = slot.connection
        if old in session.connections:  # as in ``Reassignments``
            self._unanswered += 1
            abort = partial(self._abort_answered_later, request)
            old.on_closed.append(partial(self._reassignments.later, abort))
            return
        reads = slot.task.direction & DATA_IN and slot.task.transferred and not slot.acknowledged
        if reads and self._parameters.rdma_extensions:
            session.acknowledged(slot)
            if slot.buffer is not None:
                session.pool.give(slot.buffer)
                slot.buffer = None
            session.let_go(old)
        elif self._slots.are_all_taken:
            self._answers.task_management(request, pdu.TMF_REJECTED)
            return
        else:
            self._reassignments.take_over(slot, self._slots.take(), 0)
        self._answers.task_management(request, pdu.TMF_COMPLETE)

    def _abort_answered_later(self, request: pdu.TaskManagementRequest) -> None:
        self._unanswered -= 1
        self._manage(request)

    def _abort(
        self,
        slots: list[TargetTask],
        request: pdu.TaskManagementRequest,
        luns_of_others: Sequence[int] = (),
    ) -> None:
        """End tasks without a response, then answer the task management function. The answer waits
        until the last task has ended: after it, none touches the initiator's buffers or the medium.
        A function other than ABORT TASK also waits for data that R2Ts have asked for, over TCP,
        too: the initiator goes on answering R2Ts (RFC 7143 section 4.2.3.3)."""
        left = 1 + len(slots)
        flush_after = False
        self._unanswered += 1

        def answer() -> None:
            self._unanswered -= 1
            if self._connection.done:
                return
            self._answers.task_management(request, pdu.TMF_COMPLETE)
            if request.function == pdu.TMF_TARGET_COLD_RESET:
                self._end_all_sessions()
            elif flush_after:
                self._connection.flush_quietly()

        def one_ended(flush: bool = False) -> None:
            nonlocal left, flush_after
            left -= 1
            flush_after |= flush
            if not left and not self._connection.done:
                if request.function == pdu.TMF_ABORT_TASK or len(self._session.connections) == 1:
                    answer()
                else:
                    flush_after = True
                    self._fence_response(answer)

        for lun in luns_of_others:
            left += self._device.end_tasks_of_others(
                lun, self._session.nexus, partial(one_ended, True)
            )
        # Except after ABORT TASK, the initiator still sends the data of R2Ts (RFC 7143, 4.2.3.3).
        self._session.end_each(slots, one_ended, cancel=request.function == pdu.TMF_ABORT_TASK)
        one_ended()

    def _fence_response(self, answer: Callable[[], None]) -> None:
        """Call ``answer`` when the initiator has acknowledged all responses on the other
        connections of the session: those of the tasks that it is about come before it (RFC 7143
        section 4.2.2.3.2)."""
        others = [each for each in self._session.connections if each is not self._connection]
        left = 1 + len(others)

        def one_acknowledged() -> None:
            nonlocal left
            left -= 1
            if not left:
                answer()

        for each in others:
            each.await_acknowledgement(one_acknowledged)
        one_acknowledged()

    def _end_all_sessions(self) -> None:
        """Finish a TARGET COLD RESET, which is a power-on event (RFC 7143 section 11.5.1): its
        response still leaves, then this session has ended as well."""
        self._owner.end_other_sessions()
        self._logouts.end_session()
