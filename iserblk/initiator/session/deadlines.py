"""Deadlines: what is done, step by step, about a command that does not end (design section 7).

There are two limits: the deadline of the request that a command belongs to (``io-timeout``), and
how long the target may leave a command unanswered on a living connection (``command_timeout``).

First ABORT TASK is sent, then LOGICAL UNIT RESET, then the connection is cut: the next login ends
at the target what was left of the old connection. Until one of these has succeeded the target may
use the command's buffer, and its waiter is not told. The command itself ends with CommandTimeout;
while its request has time left, with Unanswered, and then those that sent it may send it again:
they know which commands may be carried out twice, and what a flush means that was aborted. Other
commands that were in flight are sent again.

A command that the target may have ended without a status (``Session.perhaps_ended``) is aborted,
too, and then sent again: all of them together, in the order in which they were sent, when it is
known of each that it is at the target no more. One that waits for the medium ends with TASK
ABORTED: its caller may have to do more than to send it again.

A target that is silent for a while gets a NOP-Out, which asks for a sign of life. So commands that
are lost on a dead connection need not wait for their deadlines. Any PDU counts as a sign of life.

All of it runs in ``tick``, which the thread that runs ``Session.progress`` calls about once a
second.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Final

from iserblk.commands.command import ABORTING, QUEUED, SENT, EndedByReset
from iserblk.errors import CommandTimeout, ScsiError
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.sending import NO_ANSWER
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.silence import DEADLINE, UNANSWERED
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu, reasons
from iserblk.iscsi.serial import serial_lt
from iserblk.loop.clock import monotonic
from iserblk.scsi import opcodes
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import waits_for_medium
from iserblk.scsi.tasks import NO_DATA

log = logging.getLogger(__name__)

STEP_S = 5.0  # how long the target may take over one task management function
OVERTAKEN_S: Final = 2.0  # how much later a response may come than the answer "no such task"
LATE_S: Final = 1.0  # for a new command when the connection is gone for longer than io-timeout
IDLE_S: Final = 10.0  # silence after which the target is asked for a sign of life
# The same with commands in flight, at ErrorRecoveryLevel 1 or more: the answer shows what was lost.
SOON_S: Final = 2.0
# The time that these take does not depend on what a command says: they have twice the limit.
LONG: Final = frozenset(
    (
        opcodes.SYNCHRONIZE_CACHE_10,
        opcodes.SYNCHRONIZE_CACHE_16,
        opcodes.UNMAP,
        opcodes.WRITE_SAME_10,
        opcodes.WRITE_SAME_16,
    )
)
MOST_GROWTH: Final = 8.0  # of the limit for a command
WAITS_S: Final = 5.0  # without a connection, after which the log tells that requests wait
SPARE_CONTROLS: Final = 4  # control slots that aborts leave free, for pings, resets and logout


class _Step:
    """Waits for one task management response, on behalf of one task: the task that had ``itt`` in
    slot ``task``. The slot may long hold another task when the response comes. ``again``: the task
    is to be sent again afterwards."""

    __slots__ = (
        "again",
        "control",
        "function",
        "gone",
        "itt",
        "ladder",
        "pending",
        "task",
        "until",
    )

    def __init__(
        self,
        ladder: Ladder,
        task: TaskSlot,
        function: int,
        control: TaskSlot,
        until: float,
        again: bool,
    ) -> None:
        self.ladder = ladder
        self.task = task
        self.itt = task.itt
        self.function = function
        self.control = control
        self.until = until
        self.again = again
        self.gone = False
        self.pending = 1

    def task_done(self) -> None:
        self.pending = 0
        self.ladder.answered(self)

    @property
    def wanted(self) -> bool:
        """Whether the task has not ended by itself meanwhile."""
        return self.task.state == (SENT if self.again else ABORTING) and self.task.itt == self.itt


class _Ping:
    """Waits for one NOP-In."""

    __slots__ = ("pending", "until")

    def __init__(self, until: float) -> None:
        self.pending = 1
        self.until = until

    def task_done(self) -> None:
        self.pending = 0


class Ladder:
    def __init__(self, session: Session) -> None:
        self.session = session
        self._steps: dict[TaskSlot, _Step] = {}
        # To be aborted, but no control slot was free to say so: (task, its ITT, whether it is to be
        # sent again), oldest first. The others are ABORTING.
        self._waiting: deque[tuple[TaskSlot, int, bool]] = deque()
        self._gone: list[_Step] = []  # whose tasks are to be sent again together
        self._now = 0.0  # of the last call that had it as an argument
        self._held_back = 0.0  # since when aborts wait for the target to take a PDU; 0: they do not
        self._pings: dict[Connection, _Ping] = {}
        # By the index of a slot: the task (its ITT) that was seen in flight there, and since when
        # it is unanswered. Looking once a second costs the commands nothing.
        self._seen = [-1] * len(session.queue.tasks)
        self._since = [0.0] * len(session.queue.tasks)
        # By how much the limit is longer now, where requests have none; and when it has grown.
        self._growth = 1.0
        self._grown_at = 0.0
        self._told_absence = 0.0  # when that began of which the log has told that requests wait
        self.aborted = 0  # for statistics: commands that missed a limit
        self.resets = 0

    def tick(self, now: float) -> None:
        session = self.session
        if session.error is not None:
            return
        limits = session.command_timeout < session.io_timeout
        limit = self._limit(now) if limits else 0.0
        for task in session.queue.tasks:
            if task.state == SENT and now >= task.deadline:
                if not task.connection.lost:  # else its recovery comes first
                    self.abort(task, now)
            elif task.state == SENT:
                if limits and self._is_unanswered(task, limit, now):
                    self.abort(task, now, unanswered=now - self._since[task.index])
            elif task.state == QUEUED and now >= self._patience(task):
                error = self._timeout(task)
                text = str(error).removeprefix(f"{session.portal}: ")
                self._tell(text, DEADLINE, session.queue.connection, now)
                session.queue.end_aborted(task, error)
        for step in list(self._steps.values()):
            if now >= step.until:
                self._climb(step, now)
        self._end(now)
        session.queue.grow()
        session.queue.take_memory_back()
        session.queue.wake_takers()
        session.listeners.tick()
        perhaps, session.perhaps_ended = session.perhaps_ended, []
        waiting = set(self._waiting)
        self._waiting += [
            (task, itt, True)
            for task, itt in perhaps
            if (task, itt, True) not in waiting and not self._asks_about(task, itt)
        ]
        self._abort_waiting(now)
        self._renew(now)
        if session.suspended is None:
            session.ask_again(now)
        else:
            self._tell_of_waiting()
        session.recover(now)
        if session.logout is not None:
            session.logout.tick(now)
        if session.silence.since:
            self._notice_answers(now)
        if session.suspended is None:
            for connection in session.queue.connections.copy():
                self._keep_alive(connection, now)
        for connection in list(self._pings):
            if connection not in session.queue.connections:
                del self._pings[connection]

    def _end(self, now: float) -> None:
        """Where the end was asked for and the target is away for too long: end all that waits."""
        session = self.session
        queue = session.queue
        absent = session.suspended is not None
        heard = 0.0 if absent or not queue.connections else session.last_heard
        over = session.ending.look(now, absent, heard)
        if over and not queue.gives_up:
            log.warning(
                "%s: the end was asked for %.0f s ago, and the target is away: it is not waited "
                "for any more",
                session.portal,
                now - session.ending.asked,
            )
        queue.gives_up = over
        if not over:
            return
        if session.reinstating:
            session.disconnect()  # commands that a target may have kept are given up as well
        for task in queue.tasks:
            if task.state == QUEUED:
                queue.end_aborted(task, queue.given_up())

    def stalled(self, seconds: float, now: float) -> None:
        """This process did not run for ``seconds``, until now. The target could not be heard
        meanwhile, and did not get what it waited for: no deadline comes nearer by that. Call it
        before ``progress`` takes in what has come, or at least before ``tick``."""
        session = self.session
        log.info("%s: this process did not run for %.1f s", session.portal, seconds)
        self._now = now  # an answer that is taken in before the next tick counts from now
        latest = now + session.io_timeout  # of a command that was submitted just now
        for task in session.queue.tasks:
            if task.state >= QUEUED and task.deadline:
                task.deadline = max(task.deadline, min(task.deadline + seconds, latest))
        for index in range(len(self._since)):
            self._since[index] += seconds
        for step in self._steps.values():
            step.until += seconds
        for ping in self._pings.values():
            ping.until += seconds
        if self._held_back:
            self._held_back += seconds
        session.stalled(seconds, now)

    def _tell_of_waiting(self) -> None:
        """Once for each absence of the target, and not for each request. It goes on where an
        attempt to connect again has found a reason of its own."""
        session = self.session
        away = monotonic() - session.suspended_at
        if (
            away < WAITS_S
            or self._told_absence == session.suspended_at
            or not any(task.state == QUEUED for task in session.queue.tasks)
        ):
            return
        self._told_absence = session.suspended_at
        limit = session.io_timeout
        log.warning(
            "%s: not connected for %.0f s: %s; requests wait, each for %s",
            session.portal,
            away,
            session.suspended,
            f"{limit:g} s at most (io-timeout)" if limit < math.inf else "as long as it takes",
        )

    def _limit(self, now: float) -> float:
        """How long a command may be unanswered now. Where nothing else ends a request, a target
        that needs longer would never finish one: so the limit doubles each time, and is what it was
        when no command has missed it for a while. No end of the use waits for that."""
        if self.session.ending.overdue(now):
            return self.session.command_timeout
        limit = self.session.command_timeout * self._growth
        if self._growth > 1.0 and now >= self._grown_at + 2 * limit:
            self._growth = 1.0
            return self.session.command_timeout
        return limit

    def _grow(self, now: float) -> None:
        if self.session.io_timeout < math.inf:
            return
        if now >= self._grown_at + self.session.command_timeout * self._growth:
            self._growth = min(2 * self._growth, MOST_GROWTH)
            self._grown_at = now  # for all that miss it together

    def _is_unanswered(self, task: TaskSlot, limit: float, now: float) -> bool:
        """Whether the target has left ``task``, which is in flight and has time left, unanswered
        for too long. A command that must not be carried out twice has all the time that its caller
        gives it, if that is not for ever."""
        index = task.index
        if self._seen[index] != task.itt or task.connection.lost:
            self._seen[index] = task.itt
            self._since[index] = now  # a lost connection is the matter of its recovery
            return False
        if task.once and task.deadline < math.inf:
            return False
        if task.cdb[0] in LONG and not self.session.ending.overdue(now):
            limit *= 2
        return now - self._since[index] >= limit

    def _patience(self, task: TaskSlot) -> float:
        """When ``task``, which is queued, is given up. A command that is submitted when the target
        has been away for longer than a request may take does not wait for as long again: else a
        device with a queue would need hours to give its requests up."""
        session = self.session
        if session.suspended is None:
            return task.deadline
        away = session.extended(session.suspended_at + session.io_timeout)
        return min(task.deadline, max(away, task.deadline - session.io_timeout + LATE_S))

    def cancel(self, task: TaskSlot, now: float) -> None:
        """End ``task`` as soon as possible: no caller wants its outcome any more."""
        if task.state == SENT:
            task.deadline = 0.0  # where its connection is lost, it is aborted on the next
        if task.state == SENT and task.connection.lost and self.session.reinstating:
            self.session.recover(now)  # no connection is waited for any more
        if task.state == QUEUED:
            self.session.queue.end_aborted(task, self._timeout(task))
        elif task.state == SENT and not task.connection.lost:
            log.debug("%s: task %#x cancelled; ABORT TASK", self.session.portal, task.itt)
            task.state = ABORTING
            self._waiting.append((task, task.itt, False))
            self._abort_waiting(now)

    def abort(self, task: TaskSlot, now: float, unanswered: float = 0.0) -> None:
        """Abort a command that is in flight; its waiter is told at the end. ``unanswered``: seconds
        for which the target has left it so, where its request has time left."""
        if task.state != SENT:
            return
        kind, what = DEADLINE, "exceeded its deadline"
        if unanswered:
            what = f"is unanswered for {unanswered:.0f} s"
            # Long after the end of the session's use was asked for, this is the end of its request:
            # a target that is there, and forgets commands, would keep it up for ever.
            if not task.once and not self.session.ending.overdue(now):
                kind = UNANSWERED
                self.session.note_unanswered(task)
                self._grow(now)
        self._tell(
            f"command {task.cdb[0]:#x} (task {task.itt:#x}) {what}; sending ABORT TASK",
            kind,
            task.connection,
            now,
        )
        self.aborted += 1
        task.state = ABORTING
        self._waiting.append((task, task.itt, False))
        self._abort_waiting(now)

    def _tell(self, text: str, kind: str, connection: Connection, now: float) -> None:
        self.session.silence.tell(self.session.portal, text, kind, now, connection.last_heard)

    def _notice_answers(self, now: float) -> None:
        """End the silence that was told of, when nothing is owed any more."""
        session = self.session
        silence = session.silence
        if self._steps or self._waiting or session.suspended is not None:
            return
        connections = session.queue.connections
        if any(connection.last_heard < silence.since for connection in connections):
            return
        if not any(task.state == ABORTING for task in session.queue.tasks):
            log.log(silence.level, "%s: %s", session.portal, silence.end(now))

    def _asks_about(self, task: TaskSlot, itt: int) -> bool:
        """Whether the target has been asked already whether this task has ended."""
        step = self._steps.get(task)
        return step is not None and step.itt == itt

    def _abort_waiting(self, now: float) -> None:
        """Send ABORT TASK for those that wait for it, as far as control slots go."""
        self._now = now
        waiting = self._waiting
        queue = self.session.queue
        while waiting and queue.free_controls > SPARE_CONTROLS and not queue.held_back:
            task, itt, again = waiting.popleft()
            state = SENT if again else ABORTING
            if task.state == state and task.itt == itt and not task.connection.lost:
                self._request(task, pdu.TMF_ABORT_TASK, now, again)
        if not waiting or not queue.held_back:
            self._held_back = 0.0
        elif not self._held_back:
            self._held_back = now
        elif now >= self._held_back + STEP_S:
            log.error(
                "%s: the target takes no PDU that could abort a command; disconnecting",
                self.session.portal,
            )
            self.session.disconnect()

    def _request(self, task: TaskSlot, function: int, now: float, again: bool = False) -> None:
        session = self.session
        connection = None if task.connection.lost else task.connection
        control = session.queue.take_control(connection)
        if control is None:
            # All control slots wait for an answer, or the target takes no more PDUs: it is gone.
            session.disconnect()
            return
        pdu.TaskManagementRequest(
            function=function,
            lun=task.lun,
            itt=0,
            referenced_task_tag=task.itt if function == pdu.TMF_ABORT_TASK else bhs.NO_TAG,
            cmd_sn=0,
            exp_stat_sn=0,
            ref_cmd_sn=task.cmd_sn if function == pdu.TMF_ABORT_TASK else 0,
        ).pack_into(control.bhs)
        control.direction = NO_DATA
        step = self._steps[task] = _Step(self, task, function, control, now + STEP_S, again)
        session.queue.send_immediate(control, step)

    def _climb(self, step: _Step, now: float) -> None:
        """Take the next rung: the answer to ``step`` did not come, or was a refusal."""
        del self._steps[step.task]
        if not step.wanted or step.task.connection.lost:
            return
        if step.gone and step.again:
            self._gone.append(step)
        elif step.gone:
            # No response came before that answer, nor after it: the target never had the command,
            # or lost it.
            self.session.queue.end_aborted(step.task, self._timeout(step.task))
        elif step.again:
            text = "no answer to ABORT TASK; disconnecting"
            self._tell(text, "again", step.task.connection, now)
            self.session.disconnect()
        elif step.function == pdu.TMF_ABORT_TASK:
            text = "no answer to ABORT TASK; LOGICAL UNIT RESET"
            self._tell(text, "abort", step.task.connection, now)
            self.resets += 1
            self._request(step.task, pdu.TMF_LOGICAL_UNIT_RESET, now)
        else:
            text = "no answer to LOGICAL UNIT RESET; disconnecting"
            self._tell(text, "reset", step.task.connection, now)
            self.session.disconnect()

    def answered(self, step: _Step) -> None:
        if self._steps.get(step.task) is not step:
            return  # too late: the next rung is under way
        if self.session.error is not None or self.session.suspended is not None:
            del self._steps[step.task]  # the task has ended with the connection
            return
        response = step.control.response
        if response == NO_ANSWER and step.control.connection.lost:
            del self._steps[step.task]
            # A task on the same connection is the matter of its recovery; a reset is repeated.
            if step.wanted and not step.task.connection.lost:
                self._request(step.task, step.function, self._now, step.again)
            return
        gone = response == pdu.TMF_TASK_DOES_NOT_EXIST and step.function == pdu.TMF_ABORT_TASK
        if gone and step.wanted:
            # LIO says so also of a command whose response it is about to send.
            step.gone = True
            step.until = self._now + OVERTAKEN_S
        elif response in (pdu.TMF_COMPLETE, pdu.TMF_TASK_DOES_NOT_EXIST):
            del self._steps[step.task]
            if step.again:
                self._gone.append(step)
                self._renew(self._now)
            elif step.wanted:
                self.session.queue.end_aborted(step.task, self._timeout(step.task))
            if step.function == pdu.TMF_LOGICAL_UNIT_RESET:
                self._end_reset(step)
        else:
            log.warning(
                "%s: task management: %s",
                self.session.portal,
                reasons.task_management_response(response),
            )
            step.until = 0.0  # the next tick climbs
        self._abort_waiting(self._now)

    def _renew(self, now: float) -> None:
        """Send again the commands that are at the target no more, when that is known of all that
        may be so."""
        if (
            not self._gone
            or any(step.again for step in self._steps.values())
            or any(again for _, _, again in self._waiting)
        ):
            return
        queue = self.session.queue
        tasks = [step.task for step in self._gone if step.wanted and not step.task.connection.lost]
        self._gone.clear()
        tasks.sort(key=lambda task: (task.cmd_sn - queue.cmd_sn) & 0xFFFFFFFF)  # oldest first
        again = [
            task
            for task in tasks
            if task.complete and now < task.deadline and not waits_for_medium(task.cdb)
        ]
        for task in tasks:
            if task in again:
                queue.take_back(task)
            elif not task.complete:
                error = ScsiError(
                    f"{self.session.portal}: the target has ended command {task.cdb[0]:#04x} "
                    "without a status; it may have been carried out, and is not sent again"
                )
                queue.end_aborted(task, error)
            elif now < task.deadline:
                # It may have been told what the medium could not keep: that is for its caller.
                error = ScsiError(
                    f"{self.session.portal}: the target has ended command {task.cdb[0]:#04x} "
                    "without a status",
                    sam.TASK_ABORTED,
                )
                queue.end_aborted(task, error)
            else:
                queue.end_aborted(task, self._timeout(task))
        self.session.counts.replayed += len(again)
        queue.requeue(again)

    def _end_reset(self, step: _Step) -> None:
        """A reset ended every task of the LUN that was sent before it, and no response will come
        for them: end them here. Those that had time left are sent again by their callers."""
        session = self.session
        lun = step.task.lun
        (reset_sn,) = bhs.ITT.unpack_from(step.control.bhs, bhs.CMD_SN_OFFSET)
        for task in session.queue.tasks:
            if (
                task.lun == lun
                and task.state in (SENT, ABORTING)
                and serial_lt(task.cmd_sn, reset_sn)
            ):
                session.queue.end_aborted(
                    task,
                    EndedByReset(
                        f"{session.portal}: command {task.cdb[0]:#04x} was ended by a LUN reset",
                        sam.TASK_ABORTED,
                    ),
                )

    def _timeout(self, task: TaskSlot) -> CommandTimeout:
        """The error of a task that is aborted, or was never sent."""
        session = self.session
        if task.state == ABORTING and session.is_unanswered(task):
            return session.unanswered(task, "and was aborted")
        error = self._why_late(task)
        error.logged = True
        return error

    def _why_late(self, task: TaskSlot) -> CommandTimeout:
        session = self.session
        if session.suspended is not None:
            now = monotonic()
            late = now < task.deadline
            return CommandTimeout(
                f"{session.portal}: command {task.cdb[0]:#04x} "
                + ("is given up" if late else f"did not end within {session.time_words}")
                + f": not connected for {now - session.suspended_at:.0f} s: {session.suspended}"
            )
        return CommandTimeout(
            f"{self.session.portal}: command {task.cdb[0]:#04x} did not end within "
            f"{session.time_words} and was aborted; is the target slow? raise io-timeout"
        )

    def _keep_alive(self, connection: Connection, now: float) -> None:
        session = self.session
        recovers = bool(session.parameters.error_recovery_level and connection.in_flight)
        silence = now - connection.last_heard
        if silence < (SOON_S if recovers else IDLE_S) or self._steps:
            self._pings.pop(connection, None)  # a sign of life, or another answer is waited for
            return
        ping = self._pings.get(connection)
        if ping is not None and ping.pending:
            if now < ping.until:
                return
            if not recovers or silence >= IDLE_S + STEP_S:
                if session.count == 1:
                    self._tell("no answer to NOP-Out; disconnecting", "ping", connection, now)
                else:  # the others answer
                    log.warning("%s: no answer to NOP-Out; disconnecting", connection.portal)
                connection.datamover.disconnect()
                return
        control = session.queue.take_control(connection)
        if control is None:
            if session.queue.held_back and now - connection.last_heard >= IDLE_S + STEP_S:
                log.error("%s: silent, and takes no NOP-Out; disconnecting", connection.portal)
                connection.datamover.disconnect()
            return
        question = pdu.NopOut(lun=bytes(8), itt=0, ttt=bhs.NO_TAG, cmd_sn=0, exp_stat_sn=0)
        question.pack_into(control.bhs)
        self._pings[connection] = ping = _Ping(now + (SOON_S if recovers else STEP_S))
        session.queue.send_immediate(control, ping)
