"""The SCSI commands of one connection of the target, from the PDU to the response.

Each SCSI Command becomes a ScsiTask of the device server. Its data moves by ``put_data`` and
``get_data``. Its response carries StatSN, ExpCmdSN and MaxCmdSN (RFC 7143 sections 4.2, 11). Tasks
that may wait for a disk go to ``ConnectionOwner.offload``.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from iserblk.datamover.seam import TargetDatamover
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import FIRST_BURST
from iserblk.scsi import luns, sense
from iserblk.scsi import status as sam
from iserblk.scsi.tasks import ACA, HEAD_OF_QUEUE
from iserblk.target.iscsi.control import ControlAnswers
from iserblk.target.iscsi.numbers import Numbers
from iserblk.target.iscsi.owners import ConnectionOwner
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.acknowledgements import Acknowledgements
from iserblk.target.iscsi.tasks.slot import (
    COMPLETED,
    DORMANT,
    ENDED,
    FETCHING,
    IDLE,
    NO_TURN,
    RUNNING,
    SUSPENDED,
    UNSOLICITED,
    WAITING,
    WAITS,
    Allegiance,
    TargetTask,
    pack_response,
)
from iserblk.target.iscsi.tasks.slots import TaskSlots
from iserblk.target.seam import (
    BIDIRECTIONAL,
    DATA_IN,
    DATA_OUT,
    NO_DATA,
    DeviceServer,
    ScsiTask,
)
from iserblk.target.task_set import NEVER_DORMANT

log = logging.getLogger(__name__)

ACKNOWLEDGED: Final = 65536  # bytes of Data-In for which an acknowledgement is asked for (A-bit)
_NOT_SIMPLE: Final = 0x06  # a bit of ATTR that neither UNTAGGED nor SIMPLE has


class Commands:
    """The commands of ``connection``, which has logged in to ``session``. ``parameters``: what its
    login agreed on.

    ``recovers``: over TCP, at ErrorRecoveryLevel 1 or 2: unsolicited data may be lost on the way.
    """

    def __init__(
        self,
        connection: Allegiance,
        owner: ConnectionOwner,
        device: DeviceServer,
        session: TargetSession,
        datamover: TargetDatamover,
        slots: TaskSlots,
        answers: ControlAnswers,
        numbers: Numbers,
        acknowledgements: Acknowledgements,
        parameters: SessionParameters,
        portal: str,
        recovers: bool,
    ) -> None:
        self.parameters = parameters
        self._connection = connection
        self._owner = owner
        self._device = device
        self._task_sets = device.task_sets
        self._session = session
        # Of the session, which has them for all of its connections.
        self._window = session.window
        self._tasks = session.tasks
        self._deferred = session.deferred
        self._pool = session.pool
        self._dm = datamover
        self._slots = slots
        self._free = slots.free
        self._answers = answers
        self._numbers = numbers
        self._acknowledgements = acknowledgements
        self._keeps = acknowledgements.keeps
        self._portal = portal
        self._recovers = recovers
        self._ignored = 0  # commands outside of the window

    def take(self, message: memoryview, at: int) -> None:
        """Take a SCSI Command."""
        fields: bhs.ScsiCommandFields = bhs.unpack_scsi_command(message, at)
        first, flags, lengths, lun_field, itt, edtl, cmd_sn, cdb = fields
        if not self._session.attached:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR)
            return
        window = self._window
        if (itt in self._tasks or itt == bhs.NO_TAG) and (
            window.is_next(first, cmd_sn) or window.may_wait(cmd_sn)
        ):
            taken = itt != bhs.NO_TAG  # which is reserved (11.2.1.8)
            reason = pdu.REJECT_TASK_IN_PROGRESS if taken else pdu.REJECT_INVALID_FIELD
            self._reject(message, at, reason)
            return
        in_order = window.accept(first, cmd_sn)
        if not in_order and not window.may_wait(cmd_sn):
            self._ignore(cmd_sn)
            return
        if not self._free:
            self._slots.make_more()
        slot = self._free.pop()
        slot.itt = itt
        slot.edtl = edtl
        slot.flags = flags
        slot.immediate = first & bhs.IMMEDIATE
        slot.lun = luns.decode(lun_field)
        self._dm.map_task(slot)
        if lengths >> 24:
            cdb += bhs.extended_cdb_untrusted(message, at)
            if flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL:
                slot.read_length = bhs.bidirectional_read_length_untrusted(message, at)
        self._tasks[itt] = slot
        immediate = lengths & 0xFFFFFF
        if immediate and not self.parameters.immediate_data:
            raise RemoteProtocolError("iSCSI", f"{immediate} bytes of immediate data")
        slot.unsolicited.immediate = immediate
        more = flags & (bhs.FLAG_WRITE | bhs.FLAG_FINAL) == bhs.FLAG_WRITE
        if in_order:
            self._deliver(slot, cdb)
        else:
            slot.task = ScsiTask(cdb)  # a stand-in, until its turn comes
            slot.state = WAITING
            slot.unsolicited.more = more
            turn_comes = partial(self._turn_comes, slot, first, cmd_sn)
            self._session.wait(cmd_sn, self._connection, slot, turn_comes)
        if immediate:
            # A copy: the receive buffer is valid only until the next ``progress``.
            self._take_unsolicited(slot, bhs.data_segment_untrusted(message, at), not more)
        if not in_order:
            return
        if more and not self.parameters.initial_r2t:
            slot.state = UNSOLICITED  # more data is on its way
        else:
            self.begin(slot)

    def _reject(self, message: memoryview, at: int, reason: int) -> None:
        self._answers.reject(message, at, reason, in_place_of_a_response=True)

    def _ignore(self, cmd_sn: int) -> None:
        """Log that, as it may explain why an initiator waits; rarely, where it goes on."""
        self._ignored += 1
        if not self._ignored & (self._ignored - 1):
            words = f" ({self._ignored} so far)" if self._ignored > 1 else ""
            log.warning("%s: command with CmdSN %d ignored%s", self._portal, cmd_sn, words)

    def _deliver(self, slot: TargetTask, cdb: bytes) -> None:
        """Make the task known to SCSI: all commands before it are."""
        flags, edtl = slot.flags, slot.edtl
        task = slot.task = self._device.begin(self._session.nexus, slot.lun, cdb)
        if task.direction != DATA_IN:
            if not flags & bhs.FLAG_WRITE or task.direction == BIDIRECTIONAL:
                _check_direction(slot)
            sends = edtl if flags & bhs.FLAG_WRITE else 0
            if sends != task.length:
                slot.overflow = max(task.length - sends, 0)
                self._device.fit(task, sends)
        if (flags & _NOT_SIMPLE or self._task_sets.active) and not task.status:
            self._enter_task_set(slot)

    def _turn_comes(self, slot: TargetTask, first: int, cmd_sn: int) -> None:
        """Deliver a command that came before its turn, with the unsolicited data that has come."""
        self._window.accept(first, cmd_sn)
        slot.state = IDLE
        refused = slot.task.status
        self._deliver(slot, slot.task.cdb)
        task, buffer = slot.task, slot.buffer
        if refused and not task.status:
            _refuse_for_now(task)
        if buffer is not None:
            if not task.direction & DATA_OUT or task.status or not task.length:
                self._pool.give(buffer)
                slot.buffer = None
                slot.filled = 0
            elif len(buffer) > task.length:
                slot.buffer = buffer[: task.length]
                slot.filled = min(slot.filled, task.length)
        if slot.unsolicited.more and not self.parameters.initial_r2t:
            slot.state = UNSOLICITED
        else:
            self.begin(slot)

    def _enter_task_set(self, slot: TargetTask) -> None:
        """Let the task wait for older tasks of its LUN, as its attribute asks for."""
        task = slot.task
        attribute = slot.flags & bhs.ATTR_MASK
        if attribute == ACA:
            # There is no ACA condition, as no command may ask for one (NACA).
            _refuse(task, sense.INVALID_MESSAGE_ERROR)
        elif task.cdb[0] not in NEVER_DORMANT and not self._task_sets.enter(
            slot.lun, slot, attribute, partial(self._session.enabled, slot)
        ):
            slot.turn = WAITS

    def _begin_anew(self, slot: TargetTask) -> None:
        """Begin a task that was dormant. What it depends on (unit attentions, reservations, the
        data of its answer) may have changed: the tasks that it waited for have ended since."""
        old = slot.task
        task = slot.task = self._device.begin(self._session.nexus, slot.lun, old.cdb)
        if not task.status and task.direction != DATA_IN and task.length != old.length:
            self._device.fit(task, old.length)

    def data_out(self, message: memoryview, at: int) -> None:
        """Take unsolicited data that comes after its command (RFC 7143 section 11.7)."""
        data_out = pdu.DataOut.unpack_from(message, at)
        slot = self._tasks.get(data_out.itt)
        if slot is not None and slot.connection is not self._connection:
            slot = None  # the tag of an aborted task is in use again, on another connection
        if slot is not None and self._recovers and data_out.ttt == bhs.NO_TAG:
            if slot.state != UNSOLICITED and not (slot.state == WAITING and slot.unsolicited.more):
                return  # it was given up, and is fetched by R2Ts
            if not slot.unsolicited.is_next(data_out):
                self._miss_data_out(slot, data_out)
                return
        if data_out.ttt != bhs.NO_TAG or (
            slot is not None
            and slot.state != UNSOLICITED
            and not (slot.state == WAITING and slot.unsolicited.more)
        ):
            raise RemoteProtocolError("iSCSI", "a Data-Out that the target did not ask for")
        if slot is None:
            return  # of an aborted task
        slot.unsolicited.check(data_out)
        slot.unsolicited.data_sn += 1
        slot.unsolicited.age = 0
        last = data_out.flags & bhs.FLAG_FINAL != 0
        self._take_unsolicited(slot, bhs.data_segment_untrusted(message, at), last)
        if last:
            slot.unsolicited.more = False
            if slot.state != WAITING:
                self.begin(slot)

    def _miss_data_out(self, slot: TargetTask, data_out: pdu.DataOut) -> None:
        """Unsolicited data is missing, or lies behind what is missing: R2Ts fetch it."""
        if data_out.flags & bhs.FLAG_FINAL:
            slot.unsolicited.more = False
            if slot.state != WAITING:
                self.begin(slot)

    def discarded(self, head: memoryview) -> None:
        """Tell the initiator (RFC 7143 section 7.8). A command uses up no CmdSN: it comes again.
        Unsolicited data is fetched by an R2T when its command has sent the last of it."""
        self._reject(head, 0, pdu.REJECT_DATA_DIGEST_ERROR)
        if head[0] & bhs.OPCODE_MASK == bhs.DATA_OUT:
            data_out = pdu.DataOut.unpack_from(head)
            slot = self._tasks.get(data_out.itt)
            if (
                data_out.ttt == bhs.NO_TAG
                and slot is not None
                and slot.connection is self._connection
                and (slot.state == UNSOLICITED or (slot.state == WAITING and slot.unsolicited.more))
            ):
                self._miss_data_out(slot, data_out)

    def _take_unsolicited(self, slot: TargetTask, data: memoryview, last: bool) -> None:
        """``last``: none of it comes behind this; ``begin`` is to follow."""
        most = min(self.parameters.first_burst_length, slot.edtl)
        at = slot.unsolicited.arrived
        arrived = slot.unsolicited.arrived = at + len(data)
        if arrived > most:
            raise RemoteProtocolError(
                "iSCSI", f"{arrived} bytes of unsolicited data, of {most} at most"
            )
        task = slot.task
        length = task.length
        if task.status:
            return  # the data is not needed: the command has failed
        if slot.state == WAITING:
            length = most  # what the command takes is not known yet
        elif not task.direction & DATA_OUT:
            return
        if slot.buffer is None:
            # Only for the unsolicited data, unless the task can have a buffer of its whole length
            # now: for that it may have to wait, and the data would be copied once more.
            if length > most and not (last and self._has_turn(slot)):
                length = most
            if not self._session.may_take(length):
                _refuse_for_now(task)  # nothing can have its data wait
                return
            slot.buffer = self._pool.take(max(length, 1))
        data = data[: max(0, len(slot.buffer) - at)]  # EDTL may promise more than the CDB takes
        if data:
            slot.buffer[at : at + len(data)] = data
            slot.filled = at + len(data)

    def begin(self, slot: TargetTask) -> None:
        """Start the task, or defer it: all of its unsolicited data has arrived."""
        task = slot.task
        if slot.turn and not task.status:
            if slot.turn == WAITS:
                slot.state = DORMANT
                return
            self._begin_anew(slot)
            slot.turn = NO_TURN
            task = slot.task
        if task.status:
            self.respond(slot)
            return
        if self._has_turn(slot):
            self.start(slot)
        else:
            self._session.defer(slot, slot.flags & bhs.ATTR_MASK == HEAD_OF_QUEUE)

    def _has_turn(self, slot: TargetTask) -> bool:
        """Whether ``begin`` starts the task now, and does not defer it."""
        session = self._session
        return (
            slot.turn == NO_TURN
            and not session.paused
            and not self._deferred
            and session.has_room(slot)
        )

    def start(self, slot: TargetTask) -> None:
        """See Allegiance."""
        task = slot.task
        if task.length and (slot.buffer is None or len(slot.buffer) < task.length):
            slot.buffer = self._pool.grow(slot.buffer, slot.filled, task.length)
        if task.direction & DATA_OUT and slot.filled < task.length:
            self._fetch(slot)
        else:
            self._execute(slot)

    def _fetch(self, slot: TargetTask) -> None:
        """Fetch with R2Ts the data that did not come unsolicited. Existing initiators advertise the
        first byte that they did not send; that is TaggedBufferForSolicitedDataOnly=Yes of RFC
        7145. No: an STag begins with the first byte of all."""
        assert slot.buffer is not None
        at = slot.filled
        if slot.state != FETCHING:
            slot.state = FETCHING
            # Traditional iSCSI has no tagged buffers: offsets count from byte 0 of Data-Out.
            whole = (
                not self.parameters.rdma_extensions
                or self.parameters.tagged_buffer_for_solicited_data_only is False
            )
            # For a task that is reassigned, also what was to come unsolicited is solicited, and
            # advertised: all but the immediate data (RFC 7145 section 10.2.2).
            first = slot.unsolicited.immediate if slot.reassigned else at
            slot.advertised_from = 0 if whole else first
        # One R2T at a time asks for one burst at most (RFC 7143 section 13.13).
        slot.fetching = min(slot.task.length - at, self.parameters.max_burst_length)
        self._dm.get_data(slot, slot.buffer[at : at + slot.fetching], at - slot.advertised_from)

    def fetched(self, slot: TargetTask) -> None:
        """The data has come that ``get_data`` was to fetch."""
        if slot.aborted:
            self.drop(slot)
        elif slot.task.status:
            self.respond(slot)  # ended by another session's reset
        else:
            slot.filled += slot.fetching
            self.start(slot)

    def _execute(self, slot: TargetTask) -> None:
        task = slot.task
        if task.status:
            self.respond(slot)
        elif task.may_block or not self._device.run(task, slot.buffer, True):
            # A thread waits for the disk; the owner then calls ``finish``.
            slot.state = RUNNING
            self._session.running += 1
            self._owner.offload(slot)
        else:
            self.respond(slot)

    def respond(self, slot: TargetTask) -> None:
        """See Allegiance."""
        task = slot.task
        edtl = slot.edtl
        if slot.flags & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL:
            self._put_bidirectional(slot)
            moved = task.length if task.direction & DATA_OUT and not task.status else 0
            self._end(slot, moved)
            return
        moved = task.transferred if task.direction == DATA_IN or task.status else task.length
        if slot.acknowledged:
            pass  # its data is there, and not here any more
        elif task.direction == DATA_IN and moved and edtl:
            if slot.flags & bhs.FLAG_READ:
                assert slot.buffer is not None
                data = slot.buffer if moved == len(slot.buffer) else slot.buffer[:moved]
                self._put(slot, data if moved <= edtl else data[:edtl])
            else:
                moved = 0  # the PDU has not asked for data: the residual count tells that none came
        self._end(slot, moved)

    def _put(self, slot: TargetTask, data: memoryview) -> None:
        """Send the Data-In of a task, or what of it has not been acknowledged."""
        if not self._keeps:
            self._dm.put_data(slot, data, 0)
            return
        offset = slot.resume_at
        if offset >= len(data):
            return
        if self._dm.acknowledges and len(data) >= ACKNOWLEDGED:
            # Its memory need not be kept until the status is acknowledged.
            self._dm.put_data(slot, data[offset:], offset, False, True)
        else:
            self._dm.put_data(slot, data[offset:], offset)

    def _put_bidirectional(self, slot: TargetTask) -> None:
        """Send the Data-In of a command with both R and W: EDTL is about its Data-Out only."""
        task = slot.task
        given = min(task.transferred, slot.read_length)
        if given and task.direction & DATA_IN and not slot.acknowledged:
            assert slot.buffer is not None
            self._put(slot, slot.buffer[:given])

    def _end(self, slot: TargetTask, moved: int) -> None:
        """Send the SCSI Response. ``moved``: see ``pack_response``."""
        self._window.ended(slot.immediate)
        if self._keeps:
            self._acknowledgements.keep(slot)
        pack_response(slot, moved, self._numbers)
        del self._tasks[slot.itt]
        slot.state = ENDED
        self._dm.send_control(slot, True)
        if self._task_sets.active:
            self._task_sets.leave(slot.lun, slot)
        if slot.task.status:
            slot.task.was_answered()

    def drop(self, slot: TargetTask) -> None:
        """See Allegiance."""
        self._tasks.pop(slot.itt, None)
        self._task_sets.leave(slot.lun, slot)
        self._window.ended(slot.immediate)
        callbacks, slot.on_aborted = slot.on_aborted, []
        self._slots.recycle(slot)
        for callback in callbacks:
            callback()

    def release(self) -> None:
        """See Allegiance."""
        session = self._session
        for slot in self._slots.all:
            if slot.connection is not self._connection:
                continue
            if self._tasks.get(slot.itt) is slot:
                if slot.aborted and slot.state != RUNNING:
                    self.drop(slot)  # it waited for data
                elif slot.buffer is not None:
                    self._give_back(slot, slot.buffer)
            elif session.answered.get(slot.itt) is not slot and slot.buffer is not None:
                self._pool.give(slot.buffer)
                slot.buffer = None

    def _give_back(self, slot: TargetTask, buffer: memoryview) -> None:
        """Give back what a task that is kept can do without: the initiator may never come back, and
        R2Ts can fetch the data of a write again. Not what came unsolicited: immediate data is not
        advertised again over iSER (RFC 7145 section 10.2.2)."""
        if slot.state == COMPLETED and not slot.task.direction & DATA_IN:
            slot.filled = 0  # it is carried out
        elif slot.state in (SUSPENDED, DORMANT):
            slot.filled = min(slot.filled, FIRST_BURST)
        else:
            return
        if not slot.filled:
            self._pool.give(buffer)
            slot.buffer = None
        elif len(buffer) > slot.filled:
            slot.buffer = self._pool.grow(buffer, slot.filled, slot.filled)


def _check_direction(slot: TargetTask) -> None:
    """Refuse a command that writes, and whose PDU expects data to go the other way: none can come,
    and GOOD would say that it was written. A bidirectional CDB needs the R bit: its Data-In could
    not be sent, and no residual count could tell that; its Data-Out is for ``fit``. (What only
    reads ends with GOOD, and EDTL as its residual count, as libiscsi's tests want it.)"""
    task, flags = slot.task, slot.flags
    if task.direction == BIDIRECTIONAL:
        lacks = not flags & bhs.FLAG_READ
    else:
        lacks = slot.edtl > 0 and task.direction == DATA_OUT and not flags & bhs.FLAG_WRITE
    if lacks:
        _refuse(task, sense.INVALID_FIELD_IN_COMMAND_IU)


def _refuse_for_now(task: ScsiTask) -> None:
    """End a task that has not begun with TASK SET FULL: hosts repeat it."""
    task.status = sam.TASK_SET_FULL
    task.direction = NO_DATA
    task.length = 0


def _refuse(task: ScsiTask, code: int) -> None:
    """End a task that has not begun with CHECK CONDITION, ILLEGAL REQUEST; ``code``: ASC, ASCQ."""
    task.status = sam.CHECK_CONDITION
    task.sense = sense.encode_fixed(sense.ILLEGAL_REQUEST, code >> 8, code & 0xFF)
    task.direction = NO_DATA
    task.length = 0
