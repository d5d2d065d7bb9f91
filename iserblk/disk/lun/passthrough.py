"""SCSI commands whose CDB the caller has made: ``BlockingLun.command`` and ``AsyncLun.command``.

The command is sent once, and its answer is the result, whatever it says. What the rest of the disk
relies on is kept:

- A command that may change the LUN runs alone: other changes wait, as for a write of part of a
  block. The journal does not get it, as its effect is not known. So what the journal has is flushed
  before: a replay would put older data over it. Until the next flush has succeeded, a loss of the
  target's cache makes that flush fail, in place of a replay.
- REQUEST SENSE brings a unit attention as its data, and no other command brings it then. It runs
  alone, too, behind a flush: nothing is left that the target could have lost. The rest of the disk
  hears what it brought.
- A command that may change the LUN is not sent again on another connection, nor after it was left
  unanswered and aborted, because the target may have carried it out. A command that changes nothing
  is.
- A SYNCHRONIZE CACHE, or a WRITE with FUA, of which no answer comes, may have been told what the
  target could not keep of other writes: what is not flushed is in doubt then, as behind a flush of
  the disk's own.
- Data that was read from a target that had lost what was written before, and was not given it again
  yet, is read again.
"""

from __future__ import annotations

from iserblk.commands.command import ANYTHING, Command, InDoubt, Operation, Unanswered, Waiter
from iserblk.commands.running import (
    AGAIN_S,
    check_time,
    fill_bidirectional,
    fill_no_data,
    fill_read,
    fill_write,
    release_ended,
    take,
)
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import NO_CLIENT, CommandResult
from iserblk.errors import BadArgument, CommandTimeout, IserblkError, NotSupported, ScsiError
from iserblk.iscsi import reasons
from iserblk.loop.clock import monotonic
from iserblk.scsi import opcodes
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import waits_for_medium

# Bytes of a CDB by the group code of its operation code (SPC-4, Operation code). Groups 3, 6 and 7
# have commands of several lengths.
_LENGTHS = {0: 6, 1: 10, 2: 10, 4: 16, 5: 12}
_LONGEST = 16  # bytes; more need an additional header segment
MOST_DATA = 1 << 20  # bytes, as the largest READ that the disk itself sends


def check_cdb(cdb: bytes) -> None:
    """Raises BadArgument or NotSupported unless a CDB of this length can be sent."""
    if not cdb:
        raise BadArgument("an empty CDB: its first byte is the operation code")
    if len(cdb) > _LONGEST:
        raise NotSupported(f"a CDB of {len(cdb)} bytes: at most {_LONGEST} are supported")
    length = _LENGTHS.get(cdb[0] >> 5)
    if length is not None and len(cdb) != length:
        raise BadArgument(
            f"{opcodes.name(cdb)}: its CDB has {length} bytes, not {len(cdb)} "
            f"(operation code {cdb[0]:#04x})"
        )


def _view(
    buffer: bytes | bytearray | memoryview | None, name: str, writable: bool
) -> memoryview | None:
    """``buffer`` as bytes; None where it is empty."""
    if buffer is None:
        return None
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise BadArgument(f"{name}: the buffer must be contiguous")
    if not view.nbytes:
        return None
    if view.nbytes > MOST_DATA:
        raise BadArgument(f"{name}: {view.nbytes} bytes: one command moves at most {MOST_DATA}")
    if writable and view.readonly:
        raise BadArgument(f"{name}: the buffer must be writable: give a bytearray")
    return view.cast("B")


def send(
    core: DiskCore,
    cdb: bytes,
    data_in: bytearray | memoryview | None,
    data_out: bytes | bytearray | memoryview | None,
    timeout_s: float | None,
) -> Operation[CommandResult]:
    """Send one command; see ``BlockingLun.command``."""
    cdb = bytes(cdb)
    check_cdb(cdb)
    into = _view(data_in, "data_in", True)
    out = _view(data_out, "data_out", False)
    if timeout_s is not None and not timeout_s > 0:
        raise BadArgument(f"timeout_s={timeout_s}: give seconds, or None for io-timeout")
    if timeout_s is None:
        return (yield from _send(core, cdb, into, out, core.deadline()))
    try:
        return (yield from _send(core, cdb, into, out, monotonic() + timeout_s))
    except CommandTimeout as error:  # it speaks of io-timeout
        away = core.session.suspended
        raise CommandTimeout(
            f"{core.info.name}: {opcodes.name(cdb)}: not done within timeout_s={timeout_s:g}, "
            f"waiting included{f': not connected: {away}' if away else ''}"
        ) from error


def _send(
    core: DiskCore, cdb: bytes, into: memoryview | None, out: memoryview | None, deadline: float
) -> Operation[CommandResult]:
    if cdb[0] in opcodes.CHANGE_NOTHING:
        while True:
            epoch = core.durability.epoch
            result = yield from _surely(core, cdb, into, out, deadline, 0, -1)
            if result.status != sam.GOOD or not core.durability.stale(epoch):
                return result
            yield AGAIN_S
            check_time(core.session, deadline, core.info.name)
    yield from core.wait_for_pause(deadline)
    waiter = core.session.new_waiter()
    while not core.ranges.lock(0, ANYTHING, waiter):
        yield from _patiently(core, waiter, deadline)
    try:
        while not core.ranges.quiet(0, ANYTHING, waiter):
            yield from _patiently(core, waiter, deadline)
        journal = core.durability.journal
        asks = cdb[0] == opcodes.REQUEST_SENSE and core.durability.wants_flush(NO_CLIENT)
        if asks or (journal is not None and journal.active):
            yield from core.flush(deadline, NO_CLIENT)
        try:
            return (yield from _surely(core, cdb, into, out, deadline, 0, ANYTHING))
        finally:
            _may_differ(core, cdb)
    finally:
        core.ranges.unlock(0, ANYTHING)


def _patiently(core: DiskCore, waiter: Waiter, deadline: float) -> Operation[None]:
    while waiter.pending:
        yield waiter
    check_time(core.session, deadline, core.info.name)


def _may_differ(core: DiskCore, cdb: bytes) -> None:
    """What the initiator knows of the LUN may not hold any more; its target tells other initiators
    of it, but not the one whose command it was (SPC-4, Unit attention conditions)."""
    if cdb[0] in (opcodes.MODE_SELECT_6, opcodes.MODE_SELECT_10):
        core.durability.turn_volatile()
    if cdb[0] in (opcodes.MODE_SELECT_6, opcodes.MODE_SELECT_10, opcodes.FORMAT_UNIT):
        core.sizing.changed = True


def _surely(
    core: DiskCore,
    cdb: bytes,
    into: memoryview | None,
    out: memoryview | None,
    deadline: float,
    first: int,
    last: int,
) -> Operation[CommandResult]:
    """As ``_once``, but no command that may do harm is sent while it is in doubt which LUN it
    is; and one that changes nothing is sent again when the target has left it unanswered."""
    while True:
        try:
            return (yield from _once(core, cdb, into, out, deadline, first, last))
        except Unanswered:
            if last >= first:
                raise
            check_time(core.session, deadline, core.info.name)
        except InDoubt:
            yield from core.identity.reassure(deadline)
            check_time(core.session, deadline, core.info.name)


def _once(
    core: DiskCore,
    cdb: bytes,
    into: memoryview | None,
    out: memoryview | None,
    deadline: float,
    first: int,
    last: int,
) -> Operation[CommandResult]:
    """``first``, ``last``: the blocks that it may change, whose lock the caller holds."""
    session = core.session
    waiter = session.new_waiter()
    changes = last >= first and cdb[0] != opcodes.REQUEST_SENSE
    waits = waits_for_medium(cdb)
    slot = yield from take(session, waiter, deadline, core.info.name)
    tag = slot.tag
    try:
        slot.waiter = waiter
        slot.deadline = deadline
        slot.cdb[:] = cdb.ljust(_LONGEST, b"\0")
        if into is not None and out is not None:
            fill_bidirectional(slot, core.lun, out, into)
        elif into is not None:
            fill_read(slot, core.lun, into)
        elif out is not None:
            fill_write(slot, core.lun, out)
        else:
            fill_no_data(slot, core.lun)
        slot.sense = b""  # GOOD leaves it as it was
        slot.first, slot.last = first, last
        if changes:
            core.durability.bypass()
        if waits:
            core.durability.begin_wait(slot)
        waiter.pending = 1
        session.queue.submit(slot)
        while waiter.pending:
            yield waiter
        result = _result(slot, core, into is not None and out is not None)
        if cdb[0] == opcodes.REQUEST_SENSE and result.status == sam.GOOD and into is not None:
            slot.sense = bytes(into[: len(into) - max(0, result.residual)])
            session.listeners.hear(slot)
        return result
    finally:
        core.durability.end_wait(slot)
        if waits and slot.tag != tag:
            core.doubt_unheard(slot, f"{opcodes.name(cdb)}, which was not answered")
        if changes:
            core.durability.wrote()
        release_ended(session, [slot])
        core.ranges.changed()


def _result(slot: Command, core: DiskCore, both: bool) -> CommandResult:
    """Raises what kept the command from having a status. ``both``: it is bidirectional."""
    if slot.error is not None:
        error = slot.error
        raise error if isinstance(error, IserblkError) else IserblkError(str(error))
    if slot.response:
        command = opcodes.name(memoryview(slot.cdb))
        raise ScsiError(f"{core.info.name}: {command}: {reasons.scsi_response(slot.response)}")
    residual_in = slot.residual_in if both else 0
    return CommandResult(slot.status, bytes(slot.sense), slot.residual, residual_in)
