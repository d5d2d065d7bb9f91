"""Runs SCSI commands on a session: fill a slot, send it, wait, retry, or raise.

An **operation** is a generator that yields what it waits for: a Waiter, or seconds to sleep. The
driver waits in tasks and in strands, so every operation exists once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import Final, Generic, NamedTuple, TypeVar

from iserblk.commands.command import QUEUED, Command, InDoubt, Operation, Unanswered, Waiter
from iserblk.commands.session import CommandSession
from iserblk.errors import (
    CommandTimeout,
    IserblkError,
    NoSuchLun,
    OutOfRange,
    OutOfSpace,
    ReservationConflict,
    ScsiError,
    WriteProtected,
)
from iserblk.iscsi import reasons
from iserblk.loop.clock import monotonic
from iserblk.scsi import alua, opcodes, remedies
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import NDOB
from iserblk.scsi.sense import Sense
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, SIMPLE, WRITE

log = logging.getLogger(__name__)

P = TypeVar("P")

PARALLEL: Final = 16  # commands that one work has in flight at most
AGAIN_S: Final = 0.02  # between two looks whether a connection to be replaced has ended
ATTEMPTS: Final = 10  # for unit attentions, aborted commands and their like, per command
BACK_OFF_S = 0.02  # first pause after BUSY; doubles
MOST_BACK_OFF_S: Final = 1.0


class PortRefused(ScsiError):
    """The port does not carry out commands in its access state. The session is about to go on
    through another port, and the command is sent again there."""


def fill_read(slot: Command, lun: bytes, buffer: memoryview) -> None:
    """Fill ``slot`` for Data-In into ``buffer``; the caller packs the CDB."""
    slot.lun = lun
    slot.attribute = SIMPLE
    slot.direction = READ
    slot.data = buffer
    slot.length = len(buffer)


def fill_write(slot: Command, lun: bytes, buffer: memoryview) -> None:
    """Fill ``slot`` for Data-Out from ``buffer``; the caller packs the CDB."""
    slot.lun = lun
    slot.attribute = SIMPLE
    slot.direction = WRITE
    slot.data = buffer
    slot.length = len(buffer)


def fill_bidirectional(
    slot: Command, lun: bytes, data_out: memoryview, data_in: memoryview
) -> None:
    """Fill ``slot`` for Data-Out from one buffer and Data-In into another; the caller packs the
    CDB."""
    slot.lun = lun
    slot.attribute = SIMPLE
    slot.direction = BIDIRECTIONAL
    slot.data = data_out
    slot.length = len(data_out)
    slot.data_in = data_in
    slot.residual_in = 0


def fill_no_data(slot: Command, lun: bytes) -> None:
    slot.lun = lun
    slot.attribute = SIMPLE
    slot.direction = NO_DATA
    slot.data = None
    slot.length = 0


def failure(slot: Command, name: str) -> IserblkError | None:
    """The error of a command that has ended; None when it is GOOD and moved all its data."""
    if slot.error is not None:
        error = slot.error
        return error if isinstance(error, IserblkError) else IserblkError(str(error))
    if slot.response:
        return ScsiError(f"{name}: {reasons.scsi_response(slot.response)}")
    if slot.status in (sam.GOOD, sam.CONDITION_MET):  # the latter from PRE-FETCH
        if slot.residual:
            return ScsiError(
                f"{name}: command {slot.cdb[0]:#04x} of {slot.length} bytes moved "
                f"{slot.length - slot.residual}",
            )
        return None
    if slot.status != sam.CHECK_CONDITION:
        kind = ReservationConflict if slot.status == sam.RESERVATION_CONFLICT else ScsiError
        text = f"{name}: {sam.words(slot.status)}{remedies.of_status(slot.status)}"
        return kind(text, slot.status)
    sense = sense_data.decode(slot.sense)
    text = f"{name}: command {slot.cdb[0]:#04x}: {sense}{remedies.of_sense(sense)}"
    return _from_sense(text, sense)


def _from_sense(text: str, sense: Sense) -> ScsiError:
    kinds: dict[tuple[int, int], type[ScsiError]] = {
        (0x25, 0x00): NoSuchLun,
        (0x21, 0x00): OutOfRange,
    }
    kind = kinds.get((sense.asc, sense.ascq), ScsiError)
    if sense.key == sense_data.DATA_PROTECT:
        full = sense.code == sense_data.SPACE_ALLOCATION_FAILED
        kind = OutOfSpace if full else WriteProtected
    return kind(text, sam.CHECK_CONDITION, sense)


class Tried(NamedTuple):
    """How often a command was sent again: ``waited`` times behind a condition that ends by itself,
    and ``failed`` times behind others, of which there may be ATTEMPTS. An array that starts says
    BUSY any number of times, and then that it was reset."""

    waited: int = 0
    failed: int = 0

    def after(self, error: IserblkError) -> Tried:
        """Once more, behind ``error``."""
        if isinstance(error, Unanswered | InDoubt) or _ends_by_itself(error):
            return Tried(self.waited + 1, self.failed)
        return Tried(self.waited, self.failed + 1)


ONCE: Final = Tried()  # it was sent, and never again


def _ends_by_itself(error: IserblkError) -> bool:
    """Whether the command finds room, or a LUN or port that is ready, some time later."""
    if not isinstance(error, ScsiError):
        return False
    sense = error.sense if isinstance(error.sense, Sense) else None
    return (
        isinstance(error, PortRefused)
        or no_room(error)
        or port_state(error) == alua.TRANSITIONING
        or (sense is not None and sense.is_ready_soon and not sense.is_deferred)
    )


def retry_delay(error: IserblkError, tried: Tried) -> float | None:
    """Seconds to wait before the command may be sent again; None: it may not. A condition that ends
    by itself is waited for until the caller's deadline."""
    if isinstance(error, Unanswered | InDoubt):
        return 0.0
    if not isinstance(error, ScsiError):
        return None
    pause = min(MOST_BACK_OFF_S, BACK_OFF_S * (1 << min(tried.waited + tried.failed, 16)))
    if _ends_by_itself(error):
        return pause
    if tried.failed >= ATTEMPTS:
        return None
    sense = error.sense if isinstance(error.sense, Sense) else None
    if error.status == sam.TASK_ABORTED:
        return pause
    if sense is not None:
        if sense.is_unit_attention or sense.is_deferred:
            return 0.0  # the command was not executed
        if sense.key == sense_data.ABORTED_COMMAND:
            return pause
    return None


def was_not_begun(error: IserblkError) -> bool:
    """Whether the target certainly did nothing of a command that failed so, and will take it."""
    if not isinstance(error, ScsiError):
        return False
    sense = error.sense if isinstance(error.sense, Sense) else None
    return no_room(error) or (sense is not None and sense.is_unit_attention)


def no_room(error: IserblkError | None) -> bool:
    """Whether the target has more commands than it can take. ``SendQueue.shrink`` is called for
    each."""
    return isinstance(error, ScsiError) and error.status in (sam.BUSY, sam.TASK_SET_FULL)


def port_state(error: ScsiError) -> int | None:
    """The access state for which the port refused the command; None: it failed for another
    reason."""
    return alua.state_of_sense(error.sense) if isinstance(error.sense, Sense) else None


def is_unknown(error: IserblkError | None) -> bool:
    """Whether the LUN does not know the command that ended so: INVALID COMMAND OPERATION CODE.
    Nothing was done."""
    return (
        isinstance(error, ScsiError)
        and isinstance(error.sense, Sense)
        and error.sense.is_unknown_command
    )


def is_unfit(error: IserblkError | None) -> bool:
    """Whether the LUN knows the command that ended so, but not in this form, or not so much at
    once: INVALID FIELD IN CDB, or in the parameter list. Nothing was done."""
    return (
        isinstance(error, ScsiError)
        and isinstance(error.sense, Sense)
        and error.sense.is_invalid_field
    )


def is_refusal(error: IserblkError | None) -> bool:
    """Whether another command may do what the one that ended so was to do. An address out of range,
    write protection, a medium error and all else are no refusals: they would end it as well."""
    return is_unknown(error) or is_unfit(error)


def ignored_ndob(error: IserblkError, cdb: bytes | bytearray | memoryview) -> bool:
    """Whether a WRITE SAME without data may have ended so because the LUN waited for data. (tgtd
    ignores the NDOB bit, gets no data, and reports MEDIUM ERROR.)"""
    return (
        cdb[0] == opcodes.WRITE_SAME_16
        and cdb[1] & NDOB != 0
        and isinstance(error, ScsiError)
        and isinstance(error.sense, Sense)
        and error.sense.key == sense_data.MEDIUM_ERROR
    )


def check_time(session: CommandSession, deadline: float, name: str) -> None:
    """Raises CommandTimeout when the operation has no time left to send another command, or the
    session gives up."""
    if session.gives_up:
        raise CommandTimeout(
            f"{name}: given up, as the end was asked for: not connected: {session.suspended}"
        )
    if monotonic() >= deadline and monotonic() >= session.extended(deadline):
        raise _too_late(session, name)


def _too_late(session: CommandSession, name: str) -> CommandTimeout:
    text = f"{name}: not done within {session.patience:g} s"
    if session.suspended:
        return CommandTimeout(f"{text}: not connected: {session.suspended}")
    return CommandTimeout(f"{text}, waiting included; is the target slow? raise io-timeout")


def take(
    session: CommandSession, waiter: Waiter, deadline: float = 0.0, name: str = ""
) -> Operation[Command]:
    """Take a free slot, and wait for it if need be. Raises CommandTimeout when ``deadline`` has
    passed (0: never)."""
    while True:
        slot = session.queue.take(waiter)
        if slot is not None:
            return slot
        while waiter.pending:
            yield waiter
        if deadline and not session.error:
            check_time(session, deadline, name)


def release_ended(session: CommandSession, slots: list[Command]) -> None:
    """Give back the slots that are not in flight. (A task that was cancelled may leave some in
    flight: they, and what they refer to, stay until the session ends.)"""
    for slot in slots:
        if slot.state < QUEUED:
            session.queue.release(slot)


class Work(ABC, Generic[P]):
    """What ``run`` does to pieces of one kind, with one command for each piece. ``name``: of the
    LUN, for messages. ``deadline``: of all commands with their retries (monotonic seconds)."""

    def __init__(self, session: CommandSession, lun: bytes, name: str, deadline: float) -> None:
        self.session = session
        self.lun = lun
        self.name = name
        self.deadline = deadline

    @abstractmethod
    def fill(self, slot: Command, piece: P, waiter: Waiter | None) -> bool:
        """Write the command of ``piece`` into ``slot``. False: its blocks are locked, and
        ``waiter`` is told of a change. ``waiter`` is None while commands of the same work run: a
        work that holds claims must not wait for a lock whose holder waits for them."""

    def begun(self) -> None:
        """Called when commands are about to be submitted."""

    def outcome(self, slot: Command, piece: P) -> IserblkError | None:
        """The error of a command that has ended; None: it succeeded."""
        return failure(slot, self.name)

    def may_repeat(self, problem: IserblkError) -> bool:
        """Whether a command that failed so may be sent again, if ``retry_delay`` says so, too."""
        return True

    def stale(self) -> bool:
        """Called when all commands have ended: whether those that succeeded have to be sent
        again."""
        return False

    def gives_up(self, piece: P, problem: IserblkError) -> IserblkError | None:
        """``problem`` of ``piece`` allows no retry. Returns the error that ends the work; None: the
        work goes on without that piece."""
        return problem

    def ended(self, slots: list[Command]) -> None:
        """Called before slots are given back, for a last look at them. Where a task was
        cancelled, some may be in flight, and are not given back."""

    def released(self) -> None:
        """Called after slots were given back."""


def _fill(
    work: Work[P],
    todo: deque[tuple[P, Tried]],
    running: list[tuple[Command, P, Tried]],
    taken: Command,
    waiter: Waiter,
    deadline: float,
) -> None:
    """Move pieces, and how often each was tried, from ``todo`` to ``running``: the first to
    ``taken``, more to the slots that are free."""
    queue = work.session.queue
    slot: Command | None = taken
    while slot is not None:
        piece, tried = todo[0]
        slot.waiter = waiter
        slot.deadline = deadline
        if monotonic() >= deadline or not work.fill(slot, piece, None if running else waiter):
            queue.release(slot)
            break
        running.append((slot, piece, tried))
        todo.popleft()
        if not todo or len(running) == PARALLEL:
            break
        slot = queue.take_now()


def run(work: Work[P], pieces: Iterable[P]) -> Operation[None]:
    """Run one command for each piece, as many at once as slots allow, and at most PARALLEL. Each is
    sent again where that is legal.

    Raises the first error when all that was sent has ended; the other pieces were not sent then.
    Raises CommandTimeout when the deadline has passed before all were sent, and why nothing may be
    sent to the LUN any more.
    """
    session, name = work.session, work.name
    queue = session.queue
    waiter = session.new_waiter()
    todo = deque((piece, ONCE) for piece in pieces)
    error: IserblkError | None = None
    while todo and error is None:
        running: list[tuple[Command, P, Tried]] = []
        pause = 0.0
        refused = 0
        doubted = False
        deadline = session.extended(work.deadline)
        taken = yield from take(session, waiter, deadline, name)
        try:
            _fill(work, todo, running, taken, waiter, deadline)
            if running:
                work.begun()
                # (A work with claims waits for no lock.)
                waiter.pending = len(running)
                for slot, _, _ in running:
                    queue.submit(slot)
            else:
                # It waits for a lock; who unlocks calls ``waiter.task_done``.
                check_time(session, deadline, name)
            while waiter.pending:
                yield waiter
            stale = work.stale()
            for slot, piece, tried in running:
                problem = work.outcome(slot, piece)
                if problem is None:
                    if stale:
                        pause = max(pause, AGAIN_S)
                        todo.append((piece, tried))
                    continue
                if isinstance(problem, InDoubt) and monotonic() < deadline:
                    doubted = True
                    todo.append((piece, tried))
                    continue
                refused += no_room(problem)
                delay = retry_delay(problem, tried) if work.may_repeat(problem) else None
                late = delay is not None and monotonic() + delay >= session.extended(work.deadline)
                if late and isinstance(problem, Unanswered):
                    problem = _too_late(session, name)
                if delay is None or late:
                    ends = work.gives_up(piece, problem)  # of each, also behind an error
                    error = error or ends
                else:
                    log.info("%s; sending it again", problem)
                    session.listeners.retried(work.lun)
                    pause = max(pause, delay)
                    todo.append((piece, tried.after(problem)))
        finally:
            slots = [slot for slot, _, _ in running]
            if slots:
                work.ended(slots)
                release_ended(session, slots)
                work.released()
        for _ in range(refused):
            queue.shrink()
        if doubted and error is None:
            yield from session.listeners.reassure(work.lun, deadline)
        if pause and error is None:
            yield pause
    if error is not None:
        raise error


class _Command(Work[bytes]):
    """One command; its CDB is the only piece. ``moved``: bytes of data, once it has ended; of a
    bidirectional command, of Data-In."""

    def __init__(
        self,
        session: CommandSession,
        lun: bytes,
        name: str,
        deadline: float,
        data_in: memoryview | None,
        data_out: memoryview | None,
        short_ok: bool,
        attribute: int,
    ) -> None:
        super().__init__(session, lun, name, deadline)
        self._data_in = data_in
        self._data_out = data_out
        self._short_ok = short_ok
        self._task_attribute = attribute
        self.moved = 0

    def fill(self, slot: Command, piece: bytes, waiter: Waiter | None) -> bool:
        slot.cdb[:] = piece.ljust(16, b"\0")
        if self._data_in is not None and self._data_out is not None:
            fill_bidirectional(slot, self.lun, self._data_out, self._data_in)
        elif self._data_in is not None:
            fill_read(slot, self.lun, self._data_in)
        elif self._data_out is not None:
            fill_write(slot, self.lun, self._data_out)
        else:
            fill_no_data(slot, self.lun)
        slot.attribute = self._task_attribute
        return True

    def outcome(self, slot: Command, piece: bytes) -> IserblkError | None:
        self.moved = slot.length
        if self._short_ok and slot.residual > 0:
            self.moved = max(0, slot.length - slot.residual)
            slot.residual = 0
        problem = failure(slot, self.name)
        if self._data_in is not None and self._data_out is not None:
            length, missing = len(self._data_in), slot.residual_in
            self.moved = min(length, length - missing)
            if problem is None and missing and not self._short_ok:
                return ScsiError(
                    f"{self.name}: command {slot.cdb[0]:#04x} with {length} bytes of Data-In "
                    f"moved {length - missing}"
                )
        return problem

    def may_repeat(self, problem: IserblkError) -> bool:
        both = self._data_in is not None and self._data_out is not None
        return not both or was_not_begun(problem)


def command(
    session: CommandSession,
    lun: bytes,
    cdb: bytes,
    name: str,
    data_in: memoryview | None = None,
    data_out: memoryview | None = None,
    short_ok: bool = False,
    deadline: float = 0.0,
    attribute: int = SIMPLE,
) -> Operation[int]:
    """Run one command with its retries; returns the bytes of Data-In (or Data-Out) that moved.

    With ``data_in`` and ``data_out`` the command is bidirectional, and its result is about Data-In.
    Such a command is sent again only where the target has certainly not begun it, and never on
    another connection (ConnectionLost): its Data-In may depend on whether it was carried out.

    Raises the error of ``failure``. With ``short_ok`` a residual is no error: for Data-In of
    unknown length, and for commands that are only advice. ``deadline``: for all attempts together;
    0: the session's ``patience``, from now. ``attribute``: SIMPLE, ORDERED or HEAD_OF_QUEUE of
    ``iserblk.scsi.tasks``; a command that is sent again is a new task to the
    target, younger than those that it was sent before.
    """
    deadline = deadline or monotonic() + session.patience
    work = _Command(session, lun, name, deadline, data_in, data_out, short_ok, attribute)
    yield from run(work, [cdb])
    return work.moved


def ask(
    session: CommandSession, lun: bytes, cdb: bytes, length: int, name: str, deadline: float = 0.0
) -> Operation[memoryview]:
    """Run one command that returns up to ``length`` bytes, the allocation length of ``cdb``;
    returns the bytes that came, in memory of their own. Raises as ``command``."""
    answer = memoryview(bytearray(length))
    moved = yield from command(
        session, lun, cdb, name, data_in=answer, short_ok=True, deadline=deadline
    )
    return answer[:moved]
