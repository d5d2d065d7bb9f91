"""The device server: implements ``iserblk.target.seam.DeviceServer`` over LogicalUnits.

It routes commands by LUN, and keeps unit attentions. INQUIRY, REPORT LUNS and REQUEST SENSE it
answers itself: they need no LUN, and no unit attention stops them (SAM-5, Unit attention
conditions; SPC-4). All other commands are in ``iserblk.target.scsi.commands``.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Final, NamedTuple

from mypy_extensions import mypyc_attr

from iserblk.loop.clock import monotonic
from iserblk.scsi import alua, inquiry, opcodes, sense
from iserblk.scsi import luns as lun_fields
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import DESC, EVPD
from iserblk.scsi.reservations import TransportId
from iserblk.target.ports import ONLY_PORT, AccessStates, TargetPorts
from iserblk.target.scsi.block import IN_LOOP, fit, start
from iserblk.target.scsi.commands import OF_OPCODE, check_fields, find, has, unknown_command
from iserblk.target.scsi.ended import (
    CheckCondition,
    Ended,
    ReservationConflict,
    TaskAborted,
    invalid_field,
)
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import PRODUCT, REVISION, VENDOR
from iserblk.target.scsi.unit import LogicalUnit as LogicalUnit  # noqa: PLC0414
from iserblk.target.seam import ALL_PORTS, DATA_IN, NO_DATA, Nexus, NexusName, ScsiTask
from iserblk.target.store.status import StatusError, WritebackError
from iserblk.target.store.store import is_full, is_read_only
from iserblk.target.task_set import TaskSets

log = logging.getLogger(__name__)

LOOK_S = 1.0  # at least, between two checks of the files' sizes; a command starts the check
_EMPTY: Final = memoryview(b"")
# Of a device that was removed, or a server whose file has gone: no block of it is to blame.
_GONE: Final = (errno.ENODEV, errno.ENXIO, errno.ENOMEDIUM, errno.ESTALE, errno.ESHUTDOWN)
# Bytes of sense data up to the end of its additional sense code qualifier.
_FIXED_CODE: Final = 14
_DESCRIPTOR_CODE: Final = 4
_SELECT_ALL: Final = 2  # REPORT LUNS, SELECT REPORT: 0 and 2 are all LUNs, 1 only well-known LUNs
_SELECT_WELL_KNOWN: Final = 1
# Commands that a port carries out in any state, besides the three that need no LUN (SPC-4, target
# port group states).
_IN_ANY_STATE: Final = frozenset(
    (
        opcodes.MODE_SENSE_6,
        opcodes.MODE_SENSE_10,
        opcodes.MODE_SELECT_6,
        opcodes.MODE_SELECT_10,
        opcodes.LOG_SENSE,
        opcodes.MAINTENANCE_IN,
        opcodes.MAINTENANCE_OUT,
        opcodes.PERSISTENT_RESERVE_IN,
        opcodes.PERSISTENT_RESERVE_OUT,
    )
)


Allows = Callable[[str, int], bool]


class _Seen(NamedTuple):
    """What a nexus sees: the LUNs that it has access to, and TPGS of its INQUIRY data."""

    luns: frozenset[int]
    tpgs: int


class _UnitServer:
    """Implements UnitServer and Nexuses, for the unit of one LUN."""

    def __init__(self, server: DeviceServer, lun: int) -> None:
        self._server = server
        self._lun = lun

    def renewed(self) -> None:
        self._server.renewed(self._lun)

    def end_tasks(self, names: Sequence[NexusName], ended: Callable[[], None]) -> int:
        return self._server.end_tasks(self._lun, names, ended)

    def tell_others(self, by: Nexus, code: int) -> None:
        self._server.tell_others(self._lun, by, code)

    def set_port_states(self, by: Nexus, states: Mapping[int, int]) -> None:
        self._server.set_port_states(self._lun, by, states)

    def tpgs(self, nexus: Nexus) -> int:
        return self._server.tpgs(nexus)

    def siblings(self, nexus: Nexus) -> list[LogicalUnit]:
        return self._server.siblings(nexus)

    def is_there_for(self, nexus: Nexus) -> bool:
        return self._server.has_lun(nexus, self._lun)

    def tell(self, name: NexusName, code: int) -> None:
        self._server.tell(self._lun, name, code)

    def known(self, initiator: str) -> list[TransportId]:
        return self._server.ports_of(initiator)


# Subclasses of tests: a device with troubles, or with the habits of another target.
@mypyc_attr(allow_interpreted_subclasses=True)
class DeviceServer:
    """The LUNs of one target. One thread calls all methods but ``run``, which any thread may
    call (``iserblk.target.seam``)."""

    def __init__(
        self, luns: Mapping[int, LogicalUnit], iqn: str, ports: TargetPorts | None = None
    ) -> None:
        self._units = dict(luns)
        self.ports = ports or ONLY_PORT.ports
        self._iqn = iqn
        self._pages: dict[tuple[int, int], dict[int, bytes]] = {}
        self._allows: Allows | None = None
        # The LUNs that a nexus has access to; no entries while each has access to all.
        self._views: dict[Nexus, frozenset[int]] = {}
        self._nexuses: set[Nexus] = set()
        self.task_sets = TaskSets(self._present)
        self._next_look = 0.0  # monotonic
        # (nexus, LUN) → ASC << 8 | ASCQ of each pending unit attention, oldest first. No code is
        # there twice, so the lists are short.
        self._attentions: dict[tuple[Nexus, int], list[int]] = {}
        self._attending = Lock()
        # The owner sets it: called when tasks of ``start`` have ended, several perhaps.
        self.on_batch: Callable[[], None] = _nothing
        for lun, unit in self._units.items():
            self._serve(lun, unit)

    def _serve(self, lun: int, unit: LogicalUnit) -> None:
        self._note_pages(lun, unit)
        server = _UnitServer(self, lun)
        unit.server = server
        unit.reservations.nexuses = server
        unit.reservations.ports = {port.relative for port in self.ports.by_tag.values()}
        if unit.loop is not None:
            unit.loop.batch_ended = self._batch_ended

    def _note_pages(self, lun: int, unit: LogicalUnit) -> None:
        for tag, port in self.ports.by_tag.items():
            self._pages[tag, lun] = unit.vpd_pages(self._iqn, port)

    def renewed(self, lun: int) -> None:
        """A unit says other things of itself than before."""
        unit = self._units.get(lun)
        if unit is not None:
            self._note_pages(lun, unit)
            for nexus in list(self._nexuses):
                self._attend(nexus, lun, sense.INQUIRY_DATA_CHANGED)

    def hurry(self) -> None:
        """The target ends, and sends no more answers: ``settle`` need not wait any longer."""
        for unit in self._units.values():
            if unit.loop is not None:
                unit.loop.hurry()

    def _batch_ended(self) -> None:
        self.on_batch()

    def add_luns(self, units: Mapping[int, LogicalUnit]) -> None:
        """Add LUNs, whose numbers are not in use. Initiators get a unit attention."""
        before = self._seen()
        for lun, unit in units.items():
            self._units[lun] = unit
            self._serve(lun, unit)
            for nexus in before:
                unit.unflushed.attach(nexus)
        self._luns_changed(before)

    def remove_luns(self, luns: Sequence[int], ended: Callable[[], None]) -> int:
        """Remove LUNs. Initiators get a unit attention. Tasks of these LUNs end; ``ended`` is
        called for each that a thread is running, when it has ended, and the result is their number.
        The units must not be closed before."""
        before = self._seen()
        running = 0
        for lun in luns:
            del self._units[lun]
            running += sum(nexus.tasks.lose_lun(lun, ended) for nexus in self._nexuses)
            self.task_sets.forget(lun)
            with self._attending:
                for nexus in self._nexuses:  # also where it has no access to the LUN
                    self._attentions.pop((nexus, lun), None)
        self._luns_changed(before)
        return running

    def _seen(self) -> Mapping[Nexus, _Seen]:
        return {
            nexus: _Seen(frozenset(self.luns(nexus)), self.tpgs(nexus)) for nexus in self._nexuses
        }

    def _luns_changed(self, before: Mapping[Nexus, _Seen]) -> None:
        for nexus in self._nexuses:
            self._note_view(nexus)
        self._tell_of_luns(before)

    def set_access(self, allows: Allows | None) -> None:
        """From now on ``allows(initiator name, lun)`` says which LUNs there are for whom; None: all
        are there for all. Tasks of LUNs that are taken away end; initiators get a unit
        attention."""
        before = self._seen()
        self._allows = allows
        if allows is None:
            self._views.clear()
        # Each view takes the place of the one before: a thread that looks meanwhile finds either.
        self._luns_changed(before)

    def _note_view(self, nexus: Nexus) -> None:
        allows = self._allows
        if allows is not None:
            name = nexus.name.initiator.name
            self._views[nexus] = frozenset(lun for lun in self._units if allows(name, lun))

    def _tell_of_luns(self, before: Mapping[Nexus, _Seen]) -> None:
        """Compare what each nexus has access to with what it had. What is new is as after power
        on; each LUN tells that the list has changed (SPC-4, REPORT LUNS)."""
        for nexus, (old, tpgs) in before.items():
            new = frozenset(self.luns(nexus))
            if tpgs != self.tpgs(nexus):
                for lun in new & old:
                    self._attend(nexus, lun, sense.INQUIRY_DATA_CHANGED)
            if new == old:
                continue
            with self._attending:
                for lun in old - new:
                    self._attentions.pop((nexus, lun), None)
                for lun in new - old:
                    self._greet(nexus, lun)
            for lun in old - new:
                nexus.tasks.end_tasks(lun, _nothing)
            for lun in new:
                self._attend(nexus, lun, sense.REPORTED_LUNS_CHANGED)

    def attach(self, nexus: Nexus) -> None:
        self._note_view(nexus)
        for unit in self._units.values():
            unit.reservations.lose(nexus)  # what the session that this one reinstates has reserved
            unit.unflushed.attach(nexus)
        self._nexuses.add(nexus)
        for lun in self._units:
            self._greet(nexus, lun)

    def greeting(self, _nexus: Nexus, _lun: int) -> int:
        """ASC << 8 | ASCQ of the unit attention that a nexus gets first from a LUN that is new to
        it; 0: none."""
        return sense.POWER_ON_OR_RESET

    def _greet(self, nexus: Nexus, lun: int) -> None:
        code = self.greeting(nexus, lun)
        if code:
            self._attentions[nexus, lun] = [code]
        else:
            self._attentions.pop((nexus, lun), None)

    def detach(self, nexus: Nexus) -> None:
        for unit in self._units.values():
            if unit.reservations.reserved_by is nexus:
                unit.reservations.lose(nexus)
            unit.copies.forget(nexus.name)
            unit.unflushed.detach(nexus)
        self._views.pop(nexus, None)
        with self._attending:
            self._nexuses.discard(nexus)
            for lun in self._units:
                self._attentions.pop((nexus, lun), None)

    def _present(self, lun: int) -> list[object]:
        return [task for nexus in self._nexuses for task in nexus.tasks.tasks_of(lun)]

    def has_lun(self, nexus: Nexus, lun: int) -> bool:
        view = self._views.get(nexus)
        return lun in self._units and (view is None or lun in view)

    def luns(self, nexus: Nexus) -> Sequence[int]:
        return [lun for lun in self._units if self.has_lun(nexus, lun)]

    def hides_luns(self, nexus: Nexus) -> bool:
        return len(self.luns(nexus)) < len(self._units)

    def tasks_cleared(self, nexus: Nexus, luns: Collection[int]) -> None:
        for lun in luns:
            self._attend(nexus, lun, sense.COMMANDS_CLEARED_BY_PROTOCOL)

    def reset_lun(self, lun: int) -> bool:
        unit = self._units.get(lun)
        if unit is None:
            return False
        unit.reservations.reset()
        for nexus in self._nexuses:
            # A pending POWER ON already implies a LUN reset.
            if sense.POWER_ON_OR_RESET not in self._attentions.get((nexus, lun), ()):
                self._attend(nexus, lun, sense.LUN_RESET)
        return True

    def tpgs(self, nexus: Nexus) -> int:
        """What standard INQUIRY data tells a nexus of ALUA. The states of ports are those of all
        LUNs: one that has no access to some of them sets none."""
        tpgs = self.ports.tpgs
        if tpgs & alua.TPGS_EXPLICIT and self.hides_luns(nexus):
            return alua.TPGS_IMPLICIT
        return tpgs

    def set_access_states(self, given: AccessStates) -> None:
        """Do what a file says of ALUA states. Initiators get a unit attention. Raises BadArgument
        for a group that does not exist; nothing has changed then."""
        before = self._seen()
        changed = self.ports.configure(given)
        for nexus, seen in before.items():
            told = self.tpgs(nexus) != seen.tpgs
            for lun in self._units:
                if changed:
                    self._attend(nexus, lun, alua.STATE_CHANGED)
                if told:
                    self._attend(nexus, lun, sense.INQUIRY_DATA_CHANGED)

    def set_port_states(self, lun: int, by: Nexus, states: Mapping[int, int]) -> None:
        """Set states of port groups by a command of ``by`` to ``lun``; any other nexus and LUN gets
        a unit attention."""
        if self.ports.set_by_command(states):
            for nexus in self._nexuses:
                for each in self._units:
                    if nexus is not by or each != lun:
                        self._attend(nexus, each, alua.STATE_CHANGED)

    def _look_at_files(self) -> None:
        """Let LUNs grow with their files, and see whether they occupy too much; initiators get a
        unit attention."""
        for lun, unit in self._units.items():
            try:
                grown = unit.grow()
                full = unit.passes_threshold()
            except OSError as error:
                log.debug("LUN %d: cannot look at its file: %s", lun, error)
                continue
            if full:
                log.warning("LUN %d has reached its soft threshold", lun)
                for nexus in self._nexuses:
                    self._attend(nexus, lun, sense.SOFT_THRESHOLD_REACHED)
            if grown:
                log.info("LUN %d has %d blocks now", lun, unit.blocks)
                for nexus in self._nexuses:
                    if sense.POWER_ON_OR_RESET not in self._attentions.get((nexus, lun), ()):
                        self._attend(nexus, lun, sense.CAPACITY_CHANGED)

    def _attend(self, nexus: Nexus, lun: int, code: int) -> None:
        """Set a unit attention. Any thread may call it."""
        with self._attending:
            if nexus in self._nexuses:
                pending = self._attentions.setdefault((nexus, lun), [])
                if code not in pending:
                    pending.append(code)

    def tell_others(self, lun: int, by: Nexus, code: int) -> None:
        """Set a unit attention for every nexus but ``by``. Any thread may call it."""
        for nexus in list(self._nexuses):
            if nexus is not by:
                self._attend(nexus, lun, code)

    def _next_attention(self, nexus: Nexus, lun: int, told: bool = True) -> int:
        """The oldest pending unit attention, ASC << 8 | ASCQ; 0: there is none. With ``told`` it is
        no longer pending."""
        with self._attending:
            pending = self._attentions.get((nexus, lun))
            if not pending:
                return 0
            if not told:
                return pending[0]
            code = pending.pop(0)
            if not pending:
                del self._attentions[nexus, lun]
            return code

    def _named(self, name: NexusName) -> list[Nexus]:
        return [
            nexus
            for nexus in self._nexuses
            if nexus.name.initiator == name.initiator and name.port in (ALL_PORTS, nexus.name.port)
        ]

    def _forget_attention(self, nexus: Nexus, lun: int, code: int) -> None:
        with self._attending:
            pending = self._attentions.get((nexus, lun))
            if pending and code in pending:
                pending.remove(code)
                if not pending:
                    del self._attentions[nexus, lun]

    def siblings(self, nexus: Nexus) -> list[LogicalUnit]:
        return [self._units[lun] for lun in self.luns(nexus)]

    def ports_of(self, initiator: str) -> list[TransportId]:
        """The initiator ports of an iSCSI name that have sessions."""
        return [
            each.name.initiator for each in self._nexuses if each.name.initiator[0] == initiator
        ]

    def tell(self, lun: int, name: NexusName, code: int) -> None:
        """Set a unit attention for an I_T nexus. Nothing to do if it has no session: when it
        reconnects, it gets POWER ON."""
        for nexus in self._named(name):
            self._attend(nexus, lun, code)

    def end_tasks(self, lun: int, names: Sequence[NexusName], ended: Callable[[], None]) -> int:
        """End the LUN's tasks of I_T nexuses, as ``NexusTasks.end_tasks`` does."""
        return sum(
            self._end_tasks(lun, nexus, ended) for name in names for nexus in self._named(name)
        )

    def end_tasks_of_others(self, lun: int, by: Nexus, ended: Callable[[], None]) -> int:
        """See ``iserblk.target.seam``."""
        others = [nexus for nexus in self._nexuses if nexus is not by]
        return sum(self._end_tasks(lun, nexus, ended) for nexus in others)

    def _end_tasks(self, lun: int, nexus: Nexus, ended: Callable[[], None]) -> int:
        """End the LUN's tasks of a nexus by an action of another. Without TAS a unit attention is
        all that the initiator hears of it (SAM-5, aborting commands): that of a reset, or
        COMMANDS CLEARED BY ANOTHER INITIATOR."""
        unit = self._units.get(lun)
        if unit is None or unit.tas:
            return nexus.tasks.end_tasks(lun, ended)
        if nexus.tasks.tasks_of(lun):
            pending = self._attentions.get((nexus, lun), ())
            if sense.LUN_RESET not in pending and sense.POWER_ON_OR_RESET not in pending:
                self._attend(nexus, lun, sense.COMMANDS_CLEARED)
        return nexus.tasks.end_tasks(lun, ended, False)

    def close(self) -> None:
        """Close every unit, and write back its cache. Raises the first OSError, after all units
        were closed."""
        failure: OSError | None = None
        for unit in self._units.values():
            try:
                unit.close()
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    # -- one command -------------------------------------------------------------------------------

    def begin(self, nexus: Nexus, lun: int, cdb: bytes) -> ScsiTask:
        task = DeviceTask(cdb)
        now = monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look_at_files()
        try:
            unit = self._units.get(lun)
            command = OF_OPCODE[cdb[0]] if cdb else None
            if command is None:
                command = find(cdb)
            begin = None if command is None else command.begin
            if command is not None and begin is None:
                check_fields(command, cdb)
                self._answer(task, nexus, lun)
                return task
            if unit is None or (self._views and not self.has_lun(nexus, lun)):
                raise CheckCondition(sense.ILLEGAL_REQUEST, sense.LUN_NOT_SUPPORTED)
            if self._attentions:
                attention = self._next_attention(nexus, lun)
                if attention:
                    raise CheckCondition(sense.UNIT_ATTENTION, attention)
            if command is None or begin is None:
                raise unknown_command(cdb)
            if unit.lacks and not has(unit, command):
                raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE, field=0)
            check_fields(command, cdb)
            if nexus.port.refusal and cdb[0] not in _IN_ANY_STATE:
                raise CheckCondition(sense.NOT_READY, nexus.port.refusal)
            if unit.reservations.present and unit.reservations.conflicts(
                nexus.name, command.access, cdb
            ):
                raise ReservationConflict
            task.nexus = nexus
            begin(task, unit)
            if unit.loop is not None and (task.may_block or task.execute in IN_LOOP):
                task.may_block = task.in_loop = True
        except Ended as end:
            _end(task, end.sense, end.status)
            task.direction = NO_DATA
            task.length = 0
        return task

    def run(self, task: ScsiTask, buffer: memoryview | None, nowait: bool = False) -> bool:
        assert isinstance(task, DeviceTask)
        try:
            if task.cancelled:  # perhaps while it waited for a thread
                raise TaskAborted
            return task.execute(task, _EMPTY if buffer is None else buffer, nowait)
        except Ended as end:
            _end(task, end.sense, end.status)
        except OSError as error:
            _fail(task, error)
        except MemoryError:
            # Not a status for which hosts repeat the command: it may have been carried out in part.
            log.warning("%s: the system has no memory for it", opcodes.name(task.cdb))
            failure = CheckCondition(sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
            _end(task, failure.sense)
        return True

    def start(self, task: ScsiTask, buffer: memoryview | None, ended: Callable[[], None]) -> bool:
        assert isinstance(task, DeviceTask)
        if task.cancelled:
            return False

        def done(error: OSError | None) -> None:
            if task.cancelled:
                _end(task, b"", sam.TASK_ABORTED)
                self.settle(task, ended)
                return
            if error is not None:
                _fail(task, error)
            ended()

        return start(task, _EMPTY if buffer is None else buffer, done)

    def settle(self, task: ScsiTask, ended: Callable[[], None]) -> None:
        assert isinstance(task, DeviceTask)
        loop = task.unit.loop
        if loop is None or task.direction == DATA_IN:
            ended()
        else:
            loop.settle(ended)

    def fit(self, task: ScsiTask, length: int) -> None:
        assert isinstance(task, DeviceTask)
        try:
            fit(task, length)
        except CheckCondition as condition:
            _end(task, condition.sense)

    # -- the three that need no LUN ----------------------------------------------------------------

    def _answer(self, task: DeviceTask, nexus: Nexus, lun: int) -> None:
        opcode = task.cdb[0]
        if opcode == opcodes.INQUIRY:
            self._inquiry(task, nexus, lun)
        elif opcode == opcodes.REPORT_LUNS:
            self._report_luns(task, nexus, lun)
        else:
            self._request_sense(task, nexus, lun)

    def _inquiry(self, task: DeviceTask, nexus: Nexus, lun: int) -> None:
        _, flags, page = task.cdb[:3]
        allocation = int.from_bytes(task.cdb[3:5], "big")
        exists = self.has_lun(nexus, lun)
        if not flags & EVPD:
            if page:
                raise invalid_field(2)
            peripheral = inquiry.DISK if exists else inquiry.NO_DEVICE
            traits = self._units[lun].traits if exists else None
            vendor, product, revision = VENDOR, PRODUCT, REVISION
            if traits is not None:
                vendor, product, revision = traits.vendor, traits.product, traits.revision
            answer = inquiry.encode_standard(
                peripheral, vendor, product, revision, self.tpgs(nexus), exists
            )
        elif not exists:
            raise CheckCondition(sense.ILLEGAL_REQUEST, sense.LUN_NOT_SUPPORTED)
        elif page not in (pages := self._pages[nexus.port.tag, lun]):
            raise invalid_field(2)
        else:
            answer = pages[page]
        task.respond(answer, allocation)

    def _report_luns(self, task: DeviceTask, nexus: Nexus, lun: int) -> None:
        """Answered at every LUN that exists, and at LUN 0 even if it does not exist. The initiator
        knows then that the list has changed, at all LUNs."""
        if lun and not self.has_lun(nexus, lun):
            raise CheckCondition(sense.ILLEGAL_REQUEST, sense.LUN_NOT_SUPPORTED)
        select = task.cdb[2]
        if select > _SELECT_ALL:
            raise invalid_field(2)
        found = () if select == _SELECT_WELL_KNOWN else self.luns(nexus)
        for each in found:
            self._forget_attention(nexus, each, sense.REPORTED_LUNS_CHANGED)
        task.respond(lun_fields.encode_report_luns(found), int.from_bytes(task.cdb[6:10], "big"))

    def _request_sense(self, task: DeviceTask, nexus: Nexus, lun: int) -> None:
        """Ends with GOOD, and returns the sense as data. A unit attention that is returned is no
        longer pending, unless the allocation length cuts off its code."""
        descriptors, allocation = task.cdb[1] & DESC, task.cdb[4]
        if not self.has_lun(nexus, lun):
            key, code = sense.ILLEGAL_REQUEST, sense.LUN_NOT_SUPPORTED
        else:
            code = self._next_attention(
                nexus, lun, allocation >= (_DESCRIPTOR_CODE if descriptors else _FIXED_CODE)
            )
            key = sense.UNIT_ATTENTION if code else sense.NO_SENSE
        encode = sense.encode_descriptor if descriptors else sense.encode_fixed
        task.respond(encode(key, code >> 8, code & 0xFF), allocation)


def _nothing() -> None:
    """For tasks whose end nothing waits for."""


def _end(task: DeviceTask, sense_data: bytes, status: int = sam.CHECK_CONDITION) -> None:
    task.status = status
    task.sense = sense_data
    task.transferred = 0


def _fail(task: DeviceTask, error: OSError) -> None:
    """End a task for an OSError of the store."""
    # The error is kept as long as the task, and its traceback would keep the buffer.
    task.failure = error.with_traceback(None)
    if isinstance(error, StatusError):
        log.info("%s: %s", opcodes.name(task.cdb), error)
        _end(task, error.sense, error.status)
        return
    log.warning("%s: %s", opcodes.name(task.cdb), error)
    _end(task, _sense_of(error, task.direction))


def _sense_of(error: OSError, direction: int) -> bytes:
    """The sense data for an OSError of the store; ``direction`` is that of the command."""
    if error.errno in _GONE:
        key, code = sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE
    elif direction == DATA_IN:
        key, code = sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR
    elif isinstance(error, WritebackError):  # whatever it was: it is lost, and not only for now
        key, code = sense.MEDIUM_ERROR, sense.WRITE_ERROR
    elif is_full(error):
        key, code = sense.DATA_PROTECT, sense.SPACE_ALLOCATION_FAILED
    elif is_read_only(error):
        key, code = sense.DATA_PROTECT, sense.WRITE_PROTECTED
    else:
        key, code = sense.MEDIUM_ERROR, sense.WRITE_ERROR
    return sense.encode_fixed(key, code >> 8, code & 0xFF)
