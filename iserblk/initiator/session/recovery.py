"""What is done about one lost connection of a session that goes on by others.

The target may still carry out what was sent on it. So a command that was in flight there waits
until the target has logged that connection out, on another one (RFC 7143 sections 7.14, 11.14):

- With ErrorRecoveryLevel 0 and 1 the logout ends its commands at the target ("close the
  connection"). They are sent again as new ones.
- With level 2 ("remove the connection for recovery") the target keeps them, and each is assigned to
  another connection (TASK REASSIGN). A command that the target does not know any more may have been
  carried out; it is sent again, as after session reinstatement.

Where no connection is left, one is reinstated first, at level 2 (section 6.3.4): its login logs the
lost connection out, for recovery. A ping then shows what the target has acknowledged: only what is
said behind the login is sure to include all that came on the lost connection.

The target may have ended such a command already, and the connection was lost with its status. A
report that comes with one status only (a unit attention that tells of a lost cache, a deferred
error) is lost then, too. So where something is not flushed, a command that the target has taken in
is not sent again, nor one that it does not know any more: the recovery is given up for session
reinstatement, after which what is not flushed counts as lost (``disk.durability.promise``).

Either way the target discards the commands that it has not acknowledged. They are sent again with
their CmdSN, so that the sequence has no holes; a ping takes the number of a PDU that is not.

Where a step fails, or is not answered, the recovery is given up: then session reinstatement ends
everything at the target.

R and M in the comments are the states and transitions of the standard's connection cleanup (section
8.2). It ends where the connection is logged out; what its tasks go through then is allegiance
reassignment (section 7.2.2).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from iserblk.commands.command import SENT
from iserblk.errors import ConnectionLost, IserblkError
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.logout import ANSWER_S, LogoutWaiter, fill_connection_logout
from iserblk.initiator.session.sending import NO_ANSWER, SendQueue
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu, reasons
from iserblk.state_tables import step

log = logging.getLogger(__name__)

PATIENCE_S: Final = 5.0  # the longest Time2Wait: commands have deadlines
STEP_S: Final = 5.0  # how long the target may take over one reassignment
SPARE_CONTROLS: Final = 4  # control slots that reassignments leave free
_UNHEARD: Final = "a status was lost with it that may have told of a loss of unflushed writes"


class Stage(StrEnum):
    LOST = "lost"  # R1 CLEANUP_WAIT: the datamover is terminated; no buffer is touched any more
    LOGGING_OUT = "logging out"  # R2 IN_CLEANUP: on another connection
    ASKING = "asking"  # R3 FREE: it is logged out; what has the target acknowledged?
    WAITING = "waiting"  # R3: Time2Wait of the Logout Response
    REASSIGNING = "reassigning"  # R3
    RECOVERED = "recovered"
    GIVEN_UP = "given up"  # session reinstatement follows


class Event(StrEnum):
    LOGOUT = "logout"  # the request has left
    LOGOUT_FAILED = "the logout has failed, and is tried again"  # see ``_take_answer``
    REINSTATED = "reinstated"  # a login has logged it out for recovery
    ANSWERED = "answered"  # it is known what the target has acknowledged
    CLOSED = "closed"  # its tasks have ended at the target
    REMOVED = "removed for recovery"  # its tasks wait for another connection
    DUE = "Time2Wait is over"
    DONE = "all tasks are reassigned"
    FAIL = "fail"


TABLE: dict[tuple[Stage, Event], Stage] = {
    (Stage.LOST, Event.LOGOUT): Stage.LOGGING_OUT,  # M2, explicit logout
    (Stage.LOGGING_OUT, Event.LOGOUT_FAILED): Stage.LOST,  # M3
    (Stage.LOGGING_OUT, Event.CLOSED): Stage.RECOVERED,  # M4
    (Stage.LOGGING_OUT, Event.REMOVED): Stage.WAITING,  # M4
    (Stage.LOST, Event.CLOSED): Stage.RECOVERED,  # T13 of section 8.1: there is no cleanup
    (Stage.LOST, Event.REINSTATED): Stage.ASKING,  # M2 and M4, implicit logout
    (Stage.LOGGING_OUT, Event.REINSTATED): Stage.ASKING,  # M3; then M2 and M4, implicit logout
    (Stage.ASKING, Event.ANSWERED): Stage.REASSIGNING,
    (Stage.WAITING, Event.DUE): Stage.REASSIGNING,
    (Stage.REASSIGNING, Event.DONE): Stage.RECOVERED,
    (Stage.LOST, Event.FAIL): Stage.GIVEN_UP,
    (Stage.LOGGING_OUT, Event.FAIL): Stage.GIVEN_UP,
    (Stage.ASKING, Event.FAIL): Stage.GIVEN_UP,
    (Stage.WAITING, Event.FAIL): Stage.GIVEN_UP,
    (Stage.REASSIGNING, Event.FAIL): Stage.GIVEN_UP,
}


class _Ping:
    """Takes the CmdSN of a PDU that was lost, and is not sent again. Implements Waiter."""

    pending = 1

    def task_done(self) -> None:
        """The target has it: there is nothing more to do."""


class _Question:
    """Waits for the answer to a ping. ``heard``: it has come."""

    def __init__(self, control: TaskSlot) -> None:
        self.pending = 1
        self.heard = False
        self._control = control

    def task_done(self) -> None:
        self.pending = 0
        control = self._control
        self.heard = control.response != NO_ANSWER and not control.connection.lost


class _Reassignment:
    """Waits for the answer to one TASK REASSIGN. The slot ``control`` of the request is in use
    again after ``task_done``, so its response is kept."""

    def __init__(self, task: TaskSlot, control: TaskSlot, until: float) -> None:
        self.task = task
        self.itt = task.itt
        self.connection = control.connection
        self.until = until
        self.response = NO_ANSWER
        self.pending = 1
        self._control = control

    def task_done(self) -> None:
        self.pending = 0
        self.response = self._control.response

    @property
    def wanted(self) -> bool:
        """Whether the task is in flight on the connection that it was assigned to."""
        task = self.task
        return task.state >= SENT and task.itt == self.itt and task.connection is self.connection


class Recovery:
    """The recovery of the connection ``lost``. All methods belong to the runner of
    ``Session.progress``. ``reassigned``, ``again``: how many tasks were reassigned, and how many
    commands were sent once more. ``not_before``: when it is GIVEN_UP, the target wants no login
    before that time."""

    def __init__(
        self,
        queue: SendQueue,
        lost: Connection,
        level: int,
        unwanted: Callable[[TaskSlot], IserblkError],
        unflushed: Callable[[bytes], bool],
        now: float,
    ) -> None:
        """``lost``: ``queue.lose`` was called, and its datamover is terminated. ``level``: the
        ErrorRecoveryLevel of the session. ``unwanted(slot)``: the error of a command that is not
        sent again. ``unflushed(lun)``: see ``LunListener.unflushed``."""
        self.stage = Stage.LOST
        self.lost = lost
        self.problem: IserblkError | None = None
        self.reassigned = 0
        self.again = 0
        self._queue = queue
        self._level = level
        self._unwanted = unwanted
        self._unflushed = unflushed
        self.not_before = 0.0
        wait = lost.time2wait
        self._at = now + wait  # of the next step
        self._until = self._at + ANSWER_S
        self._logout = LogoutWaiter(NO_ANSWER)
        self._question: _Question | None = None
        self._asked_before = False  # a logout was not answered, and may have been carried out
        self._todo: deque[TaskSlot] = deque()  # to be reassigned
        self._asked: list[_Reassignment] = []
        if wait > PATIENCE_S:
            self.not_before = self._at
            self._give_up(f"Time2Wait is {wait} s")

    def _enter(self, event: Event) -> None:
        what = f"{self.lost.portal}: connection {self.lost.cid}"
        self.stage = step(TABLE, what, self.stage, event)

    def _give_up(self, why: str) -> None:
        self.problem = ConnectionLost(f"{self.lost.portal}: connection {self.lost.cid}: {why}")
        self._enter(Event.FAIL)

    @property
    def over(self) -> bool:
        return self.stage is Stage.RECOVERED or self.stage is Stage.GIVEN_UP

    def closed(self) -> None:
        """It was logged out in order, by itself: its tasks have ended at the target."""
        self._close()

    def _close(self) -> None:
        """The tasks of the lost connection have ended at the target: send them again."""
        acknowledged = self._settle()
        if acknowledged is None:
            return
        if any(self._unflushed(slot.lun) for slot in acknowledged):
            self._give_up(_UNHEARD)
            return
        self._send_again(acknowledged, lambda slot: slot.complete)
        self._enter(Event.CLOSED)

    def reinstated(self, cid: int, now: float) -> None:
        """No connection was left, so no step could be taken; now there is one. It has logged the
        lost connection out if it has its CID. May be repeated."""
        if self.stage is Stage.LOST or self.stage is Stage.LOGGING_OUT:
            self._until = max(now, self._at) + ANSWER_S
            if cid == self.lost.cid:
                self._until = now + ANSWER_S
                self._enter(Event.REINSTATED)
        elif self.stage is Stage.ASKING:
            self._until = now + ANSWER_S

    def stalled(self, seconds: float) -> None:
        """See Session. The tasks that are to be reassigned are kept for no longer."""
        if self.stage is not Stage.WAITING and self.stage is not Stage.REASSIGNING:
            self._until += seconds

    def tick(self, now: float) -> None:
        """Take the steps that are due. Afterwards ``stage`` may be RECOVERED, or GIVEN_UP because
        of ``problem``."""
        if self.stage is Stage.LOGGING_OUT:
            self._take_answer(now)
        if self.stage is Stage.ASKING:
            self._ask(now)
        if self.stage is Stage.LOST and now >= self._at:
            self._log_out(now)
        if self.stage is Stage.WAITING and now >= self._at:
            self._enter(Event.DUE)
        if self.stage is Stage.REASSIGNING:
            self._reassign(now)

    def _log_out(self, now: float) -> None:
        control = self._queue.take_control()
        if control is None:
            if now >= self._until:
                self._give_up("no PDU can be sent that logs it out")
            return
        reason = pdu.LOGOUT_FOR_RECOVERY if self._level == 2 else pdu.LOGOUT_CLOSE_CONNECTION
        fill_connection_logout(control, reason, self.lost.cid)
        self._logout = LogoutWaiter(NO_ANSWER)
        self._enter(Event.LOGOUT)
        self._queue.send_immediate(control, self._logout)

    def _ask(self, now: float) -> None:
        question = self._question
        if question is not None and question.heard:
            self._prepare(Event.ANSWERED, now + self.lost.time2retain)
            return
        if now >= self._until:
            self._give_up("no ping is answered behind the login that reinstated it")
            return
        if question is not None and question.pending:
            return
        self._question = self._ping(always=True)

    def _ping(self, always: bool) -> _Question | None:
        """Send a ping, if possible. ``always``: see ``send_immediate``."""
        queue = self._queue
        control = queue.take_control() if queue.takes_immediate or not always else None
        if control is None:
            return None
        ping = pdu.NopOut(lun=bytes(8), itt=0, ttt=bhs.NO_TAG, cmd_sn=0, exp_stat_sn=0)
        ping.pack_into(control.bhs)
        question = _Question(control)
        queue.send_immediate(control, question, always)
        return question

    def _prepare(self, event: Event, until: float) -> None:
        """The lost connection is logged out for recovery: ``event``. Its acknowledged tasks are to
        be reassigned, ``until`` then."""
        acknowledged = self._settle()
        if acknowledged is None:
            return
        if not all(slot.whole for slot in acknowledged):
            self._give_up("a command was interrupted while its answer was taken in")
            return
        self._until = until
        self._todo.extend(acknowledged)
        self._enter(event)

    def _take_answer(self, now: float) -> None:
        logout = self._logout
        if logout.pending:
            if now >= self._until:
                self._give_up("its logout is not answered")
            return
        if logout.response == NO_ANSWER and now < self._until:
            self._asked_before = True
            self._enter(Event.LOGOUT_FAILED)
        elif logout.response == pdu.LOGOUT_NO_RECOVERY and self._level == 2:
            self._level = 1  # its tasks have to end, then
            self._wait(logout.time2wait, now)
            if not self.over:
                self._enter(Event.LOGOUT_FAILED)
        elif (
            logout.response == pdu.LOGOUT_CID_NOT_FOUND and self._asked_before and self._level == 2
        ):
            # The logout that was not answered may have kept the tasks.
            self._give_up("it was logged out already")
        elif logout.response == pdu.LOGOUT_CID_NOT_FOUND or (
            logout.response == pdu.LOGOUT_SUCCESS and (self._level < 2 or not logout.time2retain)
        ):
            self._close()
        elif logout.response == pdu.LOGOUT_SUCCESS and logout.time2wait <= PATIENCE_S:
            self._at = now + logout.time2wait
            self._prepare(Event.REMOVED, self._at + logout.time2retain)
        elif logout.response == pdu.LOGOUT_SUCCESS:
            self._wait(logout.time2wait, now)
        else:
            if logout.response == pdu.LOGOUT_CLEANUP_FAILED:
                self.not_before = now + logout.time2wait
            self._give_up(f"logout: {reasons.logout_response(logout.response)}")

    def _wait(self, time2wait: int, now: float) -> None:
        """The next step is due when ``time2wait`` is over. Gives up where that is too long."""
        self._at = now + time2wait
        self._until = self._at + ANSWER_S
        if time2wait > PATIENCE_S:
            self.not_before = self._at
            self._give_up(f"Time2Wait is {time2wait} s")

    def _settle(self) -> list[TaskSlot] | None:
        """The target has discarded the commands that it had not acknowledged: send them again, with
        their CmdSN. Returns the others, by CmdSN. None: not possible, the recovery is given up."""
        queue = self._queue
        stranded = queue.stranded(self.lost)
        numbers = [slot.cmd_sn for slot in stranded] + self.lost.control_cmd_sns
        missing = {cmd_sn for cmd_sn in numbers if not queue.acknowledged(cmd_sn)}
        acknowledged = [slot for slot in stranded if slot.cmd_sn not in missing]
        later = []
        for slot in stranded:
            if slot.cmd_sn not in missing:
                continue
            # A bidirectional command can be sent again, too: it was not carried out.
            if slot.state == SENT and slot.whole and queue.retry(slot):
                self.again += 1
                missing.remove(slot.cmd_sn)
            else:
                later.append(slot)
        for cmd_sn in missing:
            control = queue.take_control_now()
            if control is None:
                self._give_up(f"no PDU can be sent that has CmdSN {cmd_sn}")
                return None
            queue.send_numbered_ping(control, cmd_sn, _Ping())
        queue.flush()
        self._send_again(later, lambda slot: slot.whole)
        return acknowledged

    def _send_again(self, slots: list[TaskSlot], may: Callable[[TaskSlot], bool]) -> None:
        """Send those again as new commands that ``may`` be, and end the others."""
        again = [slot for slot in slots if slot.state == SENT and may(slot)]
        for slot in slots:
            if slot not in again:
                self._queue.end_stranded(slot, self._unwanted(slot))
        self.again += len(again)
        self._queue.requeue(again)

    def _reassign(self, now: float) -> None:
        queue = self._queue
        while self._todo and queue.free_controls > SPARE_CONTROLS and queue.takes_immediate:
            task = self._todo.popleft()
            control = queue.take_control()
            if control is None:
                self._todo.appendleft(task)
                break
            waiter = _Reassignment(task, control, now + STEP_S)
            if not queue.reassign(task, control, waiter):
                self._give_up("a task cannot be continued")
                return
            self._asked.append(waiter)
        question = self._question
        if self._todo and not queue.takes_immediate and (question is None or not question.pending):
            self._question = self._ping(always=False)  # retires them (RFC 7145 section 8.1.1.3)
        if self._todo and now >= self._until:
            self._give_up("Time2Retain is over")
            return
        for waiter in list(self._asked):
            if waiter.pending and now < waiter.until:
                continue
            self._asked.remove(waiter)
            if waiter.response == pdu.TMF_COMPLETE:
                self.reassigned += 1
                continue
            if not waiter.wanted or waiter.connection.lost:
                continue  # it has ended, or the recovery of that connection sees to it
            if waiter.pending:
                self._give_up("TASK REASSIGN is not answered")
                return
            self._outcome(waiter)
            if self.over:
                return
        if not self._todo and not self._asked:
            self._enter(Event.DONE)

    def _outcome(self, waiter: _Reassignment) -> None:
        task = waiter.task
        if waiter.response == pdu.TMF_TASK_DOES_NOT_EXIST:
            # It may have ended, and its status was lost.
            if self._unflushed(task.lun):
                self._give_up(_UNHEARD)
            elif task.state == SENT and task.complete:
                self.again += 1
                self._queue.take_back(task)
                self._queue.requeue([task])
            else:
                self._queue.end_aborted(task, self._unwanted(task))
        else:
            words = reasons.task_management_response(waiter.response)
            self._give_up(f"TASK REASSIGN: {words}")
