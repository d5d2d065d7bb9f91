"""Running SCSI commands on a session: fill a slot, send it, wait, retry, or raise.

An **operation** is a generator that yields what it waits for: a Waiter, or seconds to sleep. The
two faces differ only in how they wait, so every operation exists once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from iserblk.datamover.seam import NO_DATA, READ, WRITE
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
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import QUEUED, TAKEN, Operation, TaskSlot, Waiter
from iserblk.iscsi import bhs, reasons
from iserblk.scsi import alua
from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

FLAGS_NO_DATA = bhs.FLAG_FINAL | bhs.ATTR_SIMPLE
FLAGS_READ = FLAGS_NO_DATA | bhs.FLAG_READ
FLAGS_WRITE = FLAGS_NO_DATA | bhs.FLAG_WRITE

ATTEMPTS = 10  # for unit attentions, aborted commands and their like, per command
BACK_OFF_S = 0.02  # first pause after BUSY; doubles
MOST_BACK_OFF_S = 1.0


class PortRefused(ScsiError):
    """The port does not carry out commands in its access state, and the session is about to go on
    through another one: the command is sent again there."""


def fill_read(slot: TaskSlot, lun: bytes, buffer: memoryview) -> None:
    """Data-In into ``buffer``; the CDB is the caller's to pack."""
    slot.lun = lun
    slot.flags = FLAGS_READ
    slot.direction = READ
    slot.data = buffer
    slot.length = len(buffer)


def fill_write(slot: TaskSlot, lun: bytes, buffer: memoryview) -> None:
    """Data-Out from ``buffer``; the CDB is the caller's to pack."""
    slot.lun = lun
    slot.flags = FLAGS_WRITE
    slot.direction = WRITE
    slot.data = buffer
    slot.length = len(buffer)


def fill_no_data(slot: TaskSlot, lun: bytes) -> None:
    slot.lun = lun
    slot.flags = FLAGS_NO_DATA
    slot.direction = NO_DATA
    slot.data = None
    slot.length = 0


def failure(slot: TaskSlot, name: str) -> IserblkError | None:
    """What went wrong with an ended command, in words; None when it is GOOD and whole."""
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
        return kind(f"{name}: {sam.words(slot.status)}", slot.status)
    sense = sense_data.decode(slot.sense)
    return _from_sense(f"{name}: command {slot.cdb[0]:#04x}: {sense}", sense)


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


def retry_delay(error: IserblkError, attempt: int) -> float | None:
    """Seconds to wait before the command may be sent again; None: do not. What ends by itself is
    waited for until the caller's deadline: room for a command, a LUN or port that gets ready."""
    if not isinstance(error, ScsiError):
        return None
    pause = min(MOST_BACK_OFF_S, BACK_OFF_S * (1 << min(attempt, 16)))
    sense = error.sense if isinstance(error.sense, Sense) else None
    if (
        isinstance(error, PortRefused)
        or no_room(error)
        or port_state(error) == alua.TRANSITIONING
        or (sense is not None and sense.is_ready_soon and not sense.is_deferred)
    ):
        return pause
    if attempt >= ATTEMPTS:
        return None
    if error.status == sam.TASK_ABORTED:
        return pause
    if sense is not None:
        if sense.is_unit_attention or sense.is_deferred:
            return 0.0  # the command was not executed
        if sense.key == sense_data.ABORTED_COMMAND:
            return pause
    return None


def no_room(error: IserblkError | None) -> bool:
    """The target has more commands than it can take. ``Submitting.shrink`` is called for each."""
    return isinstance(error, ScsiError) and error.status in (sam.BUSY, sam.TASK_SET_FULL)


def port_state(error: ScsiError) -> int | None:
    """The access state of the port for which it has refused the command, if that is why."""
    return alua.state_of_sense(error.sense) if isinstance(error.sense, Sense) else None


def check_time(session: Session, deadline: float, name: str) -> None:
    """Raises CommandTimeout when the operation has no time left to send another command."""
    if monotonic() >= deadline:
        if session.suspended:
            raise CommandTimeout(
                f"{name}: not done within {session.io_timeout:g} s: not connected: "
                f"{session.suspended}"
            )
        raise CommandTimeout(
            f"{name}: not done within {session.io_timeout:g} s, waiting included; "
            "is the target slow? raise io-timeout"
        )


def take(
    session: Session, waiter: Waiter, deadline: float = 0.0, name: str = ""
) -> Operation[TaskSlot]:
    """A free slot, waiting for one if need be. ``deadline``: raises CommandTimeout when that has
    passed (0: never)."""
    again = False
    while True:
        slot = session.queue.take(waiter, again)
        if slot is not None:
            return slot
        while waiter.pending:
            yield waiter
        again = True
        if deadline and not session.error:
            check_time(session, deadline, name)


def end(session: Session, waiter: Waiter) -> Operation[None]:
    while waiter.pending:
        yield waiter


def release_ended(session: Session, slots: list[TaskSlot]) -> None:
    """Give back those that are not in flight. (An interrupted thread may leave some: they, and
    what they refer to, stay until the session ends.)"""
    for slot in slots:
        if slot.state < QUEUED:
            session.queue.release(slot)


def command(
    session: Session,
    lun: bytes,
    cdb: bytes,
    name: str,
    data_in: memoryview | None = None,
    data_out: memoryview | None = None,
    short_ok: bool = False,
    changes: tuple[int, int] | None = None,
    on_submit: Callable[[TaskSlot], None] | None = None,
    on_end: Callable[[TaskSlot], None] | None = None,
    deadline: float = 0.0,
) -> Operation[int]:
    """Run one command with its retries; returns the bytes of Data-In (or Data-Out) that moved.

    Raises the error of ``failure``. With ``short_ok`` a residual is no error: for Data-In of
    unknown length, and for advice. ``changes``: the first and the last block that it changes.
    ``on_submit`` is called with the slot before each attempt, ``on_end`` after it, before the slot
    is given back. ``deadline``: for all attempts together; 0: the session's time for one request,
    from now.
    """
    deadline = deadline or monotonic() + session.io_timeout
    waiter = session.new_waiter()
    attempt = 0
    while True:
        slot = yield from take(session, waiter, deadline, name)
        try:
            slot.cdb[:] = cdb.ljust(16, b"\0")
            if data_in is not None:
                fill_read(slot, lun, data_in)
            elif data_out is not None:
                fill_write(slot, lun, data_out)
            else:
                fill_no_data(slot, lun)
            if changes is not None:
                slot.first, slot.last = changes
            check_time(session, deadline, name)
            slot.deadline = deadline
            slot.waiter = waiter
            waiter.pending += 1
            if on_submit is not None:
                on_submit(slot)
            session.queue.submit(slot)
            while waiter.pending:
                yield waiter
            if short_ok and slot.residual > 0 and slot.state == TAKEN:
                moved = max(0, slot.length - slot.residual)
                slot.residual = 0
            else:
                moved = slot.length
            error = failure(slot, name)
        finally:
            if on_end is not None:
                on_end(slot)
            release_ended(session, [slot])
        if error is None:
            return moved
        if no_room(error):
            session.queue.shrink()
        delay = retry_delay(error, attempt)
        if delay is None or monotonic() + delay >= deadline:
            raise error
        log.info("%s; sending it again", error)
        session.listeners.retried(lun)
        attempt += 1
        if delay:
            yield delay


def ask(
    session: Session, lun: bytes, cdb: bytes, length: int, name: str, deadline: float = 0.0
) -> Operation[memoryview]:
    """Run one command that answers with up to ``length`` bytes, the allocation length of ``cdb``;
    returns those that came, in memory of their own. Raises as ``command``."""
    answer = memoryview(bytearray(length))
    moved = yield from command(
        session, lun, cdb, name, data_in=answer, short_ok=True, deadline=deadline
    )
    return answer[:moved]
