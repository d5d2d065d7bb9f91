"""Sending: slots, the queue, the command window, and CmdSN order (RFC 7143 section 4.2.2).

``Submitting`` is the half of a session that any thread may call; ``Session`` completes it.

A slot is asked for and filled without the datamover: its CDB and its data are its own. Only
``_send``, under the session's lock, writes into the memory that the datamover gave it, and decides
whether a write travels in its command.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from iserblk.datamover.seam import INLINE, NO_DATA, WRITE, InitiatorDatamover
from iserblk.errors import Busy, IserblkError, RemoteProtocolError, TransportError
from iserblk.initiator.session.listeners import LunListeners
from iserblk.initiator.session.slots import (
    ABORTING,
    FREE,
    INDEX_BITS,
    ITT_MASK,
    QUEUED,
    SENT,
    TAKEN,
    TaskSlot,
    Waiter,
)
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters

log = logging.getLogger(__name__)

CONTROL_SLOTS = 16  # for NOP, task management and logout: enough for a ladder on several tasks
_STEP = 1 << INDEX_BITS
NO_ANSWER = 0xFF  # the ``response`` of a control PDU that was rejected, or lost
_NO_TAG = 0xFFFFFFFF


def _nothing() -> None:
    pass


def ignore_closing(_fd: int) -> None:
    """For drivers whose waits end by themselves when their descriptor is closed."""


class Submitting:
    """What ``Session`` says of its attributes holds here, too."""

    def __init__(
        self,
        datamover: InitiatorDatamover,
        slots: list[TaskSlot],
        parameters: SessionParameters,
        portal: str,
        io_timeout: float,
    ) -> None:
        """``slots``: allocated by the datamover; the last CONTROL_SLOTS are for control PDUs."""
        self._dm = datamover
        self._table = slots
        self.tasks = slots[:-CONTROL_SLOTS]
        self._free = list(reversed(self.tasks))
        self._withheld: list[TaskSlot] = []  # not in use, because the target has no room
        self._in_play = len(self.tasks)  # the others
        self._free_controls = slots[-CONTROL_SLOTS:]
        self.parameters = parameters
        self.portal = portal
        self.listeners = LunListeners()
        self.io_timeout = io_timeout
        self.provider_reason = ""  # why the connection is by the provider that it has
        self.corked = False
        self.error: IserblkError | None = None
        self.isid = b""  # the login's; a reconnection uses it again
        # While there is no connection: why, by the last that was heard of it; since when; and
        # before when the target does not want to see us again.
        self.suspended: IserblkError | None = None
        self.suspended_at = 0.0
        self.reconnect_at = 0.0
        self.reconnects = 0
        self.replayed = 0  # commands that were sent once more
        # What the log has of commands that were carried out with sense data: (LUN field, code).
        self._recovered_told: set[tuple[bytes, int]] = set()
        self.last_heard = monotonic()
        self.new_waiter: Callable[[], Waiter]  # set by the driver
        # What a write may carry in its command; 0 where immediate data was not negotiated.
        self.immediate_limit = (
            min(
                parameters.first_burst_length,
                parameters.target_recv_data_segment_length,
                len(slots[0].inline),
            )
            if parameters.immediate_data
            else 0
        )
        self._lock = threading.Lock()
        self._flush_lock = threading.Lock()
        self._queued: deque[TaskSlot] = deque()  # submitted, behind a closed window
        self._again: set[TaskSlot] = set()  # of these: were sent on a connection that is lost
        self._live = True  # there is a connection: neither failed nor suspended
        self._takers: deque[Waiter] = deque()
        self.unsent_pongs = 0  # answers to pings since the wire was last seen free
        self._cmd_sn = 0
        self._exp_cmd_sn = 0
        self._open = 0  # commands that the target's window still takes
        self._exp_stat_sn = 0
        # What ``submit`` calls when its command is to leave; a driver may gather a few.
        self.flush_soon: Callable[[], None] = self.flush
        self.on_blocked: Callable[[], None] = _nothing  # the socket is full: wait for it, driver
        self.on_closing: Callable[[int], None] = (
            ignore_closing  # the descriptor is about to be closed
        )
        # Whoever gives the session another connection is told that it is lost, or wanted: from any
        # thread. None: a session whose connection is lost has failed.
        self.on_loss: Callable[[], None] | None = None
        # For the driver: a suspended session is about to go on with another descriptor, or failed.
        self.on_change: Callable[[], None] = _nothing

    # -- submitting: any thread -------------------------------------------------------------------

    def take(self, waiter: Waiter, again: bool = False) -> TaskSlot | None:
        """A free slot, or None: then ``waiter.pending`` was raised by one; wait and try again.
        ``again``: it has waited, and a slot that another one has taken meanwhile costs it no place
        in the queue. Nobody passes those who wait.

        Raises the session's error once it has failed.
        """
        if self.error is not None:
            raise self._ended()
        slot = None
        if again or not self._takers:
            slot = self._pop_free()
        if slot is None:
            with self._lock:
                if self.error is not None:
                    raise self._ended()
                # Known as waiting before looking again: who gives a slot back meanwhile sees it.
                waiter.pending += 1
                if again:
                    self._takers.appendleft(waiter)
                else:
                    self._takers.append(waiter)
                if self._takers[0] is waiter:
                    slot = self._pop_free()
                if slot is None:
                    return None
                self._takers.popleft()
                waiter.pending -= 1
        slot.state = TAKEN
        return slot

    def _pop_free(self) -> TaskSlot | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def take_now(self) -> TaskSlot | None:
        """A free slot if there is one, nobody waits for one, and the session lives."""
        if self.error is not None or self._takers:
            return None
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        slot.state = TAKEN
        return slot

    def forget(self, waiter: Waiter) -> None:
        """``waiter`` no longer waits for a free slot."""
        with self._lock:
            if waiter in self._takers:
                self._takers.remove(waiter)
                waiter.pending -= 1

    def wake_takers(self) -> None:
        """Have all who wait for a slot look again: at the clock, too, as a slot that was given back
        may be taken by one who has come just now."""
        with self._lock:
            takers = list(self._takers)
            self._takers.clear()
        for taker in takers:
            taker.task_done()

    def release(self, slot: TaskSlot) -> None:
        """Give back a slot that was taken and is not in flight."""
        slot.state = FREE
        slot.data = None
        slot.error = None  # with its traceback, and the buffers that are named there
        slot.last = -1
        slot.deadline = 0.0
        self._free.append(slot)
        if self._takers:
            with self._lock:
                taker = self._takers.popleft() if self._takers else None
            if taker is not None:
                taker.task_done()

    def shrink(self) -> None:
        """From any thread: the target had no room for a command (BUSY, TASK SET FULL), whose slot
        has been given back. Keep one less in flight from now on, but always one. Without a free
        slot nothing happens: there will be another refusal."""
        with self._lock:
            if self._in_play <= 1:
                return
            try:
                self._withheld.append(self._free.pop())
            except IndexError:
                return
            self._in_play -= 1
            count = self._in_play
        log.info("%s: the target is full: %d commands at once from now on", self.portal, count)

    def grow(self) -> None:
        """About once a second: try one more command than the target had room for lately."""
        if self._withheld:
            with self._lock:
                self._in_play += 1
                self._free.append(self._withheld.pop())

    def submit(self, slot: TaskSlot) -> None:
        """Send the command of ``slot``, or queue it in order while the window is closed, or the
        session is suspended.

        ``slot.waiter.pending`` already counts it. Never raises: a failed session ends the slot
        with its error at once. Its deadline is ``slot.deadline``; 0: the time for one request, from
        now.
        """
        if not slot.deadline:
            slot.deadline = monotonic() + self.io_timeout
        with self._lock:
            failed = self.error is not None
            # (``_open`` is 0 while the session is suspended.)
            queued = not failed and (self._open <= 0 or self._queued or not self._send(slot))
            if queued:
                slot.state = QUEUED
                self._queued.append(slot)
        if queued:
            wanted = self.on_loss
            if self.suspended is not None and wanted is not None:
                wanted()
        elif failed:
            self._end(slot, self._ended())
        elif not self.corked:
            # If the session fails from here on, ``fail`` ends the slot: it is in flight.
            self.flush_soon()

    def _send(self, slot: TaskSlot) -> bool:
        """Number the command and hand it down. False, and nothing has changed: there is nothing to
        advertise its data from until another task ends. Under the lock."""
        slot.itt = itt = (slot.itt + _STEP) & ITT_MASK
        length = slot.length
        immediate = 0
        if slot.direction == WRITE and length <= self.immediate_limit and slot.data is not None:
            # It goes along whole or not at all; then nothing of the caller's is advertised.
            slot.inline[:length] = slot.data
            slot.inline_length = immediate = length
            slot.direction = INLINE
        bhs.SCSI_COMMAND_FIELDS.pack_into(
            slot.bhs,
            0,
            bhs.SCSI_COMMAND,
            slot.flags,
            immediate,
            slot.lun,
            itt,
            length,
            self._cmd_sn,
            self._exp_stat_sn,
            slot.cdb,
        )
        slot.cmd_sn = self._cmd_sn
        before, slot.state = slot.state, SENT
        try:
            self._dm.send_control(slot)
        except Busy:
            slot.state = before
            return False
        self._cmd_sn = (self._cmd_sn + 1) & 0xFFFFFFFF
        self._open -= 1
        return True

    def flush(self) -> None:
        """Send what is queued. Whoever is at it takes along what others queued meanwhile."""
        dm = self._dm
        while dm.queued:
            if not self._flush_lock.acquire(blocking=False):
                return
            failed = taken_along = False
            try:
                taken_along = not dm.flush()
            except TransportError as error:
                log.debug("%s: send failed: %s", self.portal, error)
                failed = True
            finally:
                self._flush_lock.release()
            before, dm = dm, self._dm  # another connection: who queued there found the lock taken
            if dm is not before:
                continue
            if failed or taken_along:
                return
            if dm.wants_write():
                self.on_blocked()

    def _send_queued(self) -> None:
        """Commands that waited, as far as the window and the memory allow."""
        with self._lock:
            while self._queued and self._open > 0 and self._send(self._queued[0]):
                self._queued.popleft()
        if not self.corked:
            self.flush()

    # -- control PDUs: the runner of progress and tick --------------------------------------------

    @property
    def free_controls(self) -> int:
        return len(self._free_controls)

    def take_control(self) -> TaskSlot | None:
        """A slot for an immediate PDU of ours; None when all are in flight."""
        if not self._live or not self._free_controls:
            return None
        slot = self._free_controls.pop()
        slot.state = TAKEN
        slot.direction = NO_DATA
        slot.inline_length = 0
        slot.error = None
        return slot

    def send_immediate(self, slot: TaskSlot, waiter: Waiter) -> None:
        """Send the PDU whose BHS is in ``slot.bhs``, as an immediate one: it uses up no CmdSN and
        passes the window. ITT, CmdSN and ExpStatSN are filled in here; ``slot.waiter`` hears of
        the answer, and the slot goes back by itself."""
        slot.waiter = waiter
        with self._lock:
            live = self._live
            if live:
                self._send_control(slot)
        if live:
            self.flush()
        else:
            slot.response = NO_ANSWER
            self._end_control(slot)

    def _send_control(self, slot: TaskSlot) -> None:
        """Under the lock."""
        slot.itt = itt = (slot.itt + _STEP) & ITT_MASK
        bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, itt)
        bhs.CMD_SN_EXP_STAT_SN.pack_into(
            slot.bhs, bhs.CMD_SN_OFFSET, self._cmd_sn, self._exp_stat_sn
        )
        slot.state = SENT
        self._dm.send_control(slot)

    def _end_control(self, slot: TaskSlot) -> None:
        slot.state = FREE
        self._free_controls.append(slot)
        slot.waiter.task_done()

    def send_pong(self, slot: TaskSlot, lun: bytes, ttt: int) -> None:
        """Send a NOP-Out that nothing answers. The slot goes back at once, to the far end."""
        with self._lock:
            pdu.NopOut(
                lun=lun, itt=_NO_TAG, ttt=ttt, cmd_sn=self._cmd_sn, exp_stat_sn=self._exp_stat_sn
            ).pack_into(slot.bhs)
            self._dm.send_control(slot)
        self.flush()
        slot.state = FREE
        self._free_controls.insert(0, slot)

    # -- ending -----------------------------------------------------------------------------------

    def _end(self, slot: TaskSlot, error: Exception) -> None:
        slot.error = error
        slot.state = TAKEN
        slot.waiter.task_done()

    def end_aborted(self, slot: TaskSlot, error: Exception) -> None:
        """End a task that the target has given up, or that never went out. For the ladder."""
        if slot.state == QUEUED:
            with self._lock:
                if slot not in self._queued:  # it went out a moment ago
                    return
                self._queued.remove(slot)
                self._again.discard(slot)
        elif slot.state in (SENT, ABORTING):
            self._dm.deallocate_task_resources(slot, 0)
        else:
            return
        self._end(slot, error)

    def _ended(self) -> IserblkError:
        """The session's error, fresh: one exception object must not be raised in many threads."""
        error = self.error
        assert error is not None  # callers have looked
        if isinstance(error, RemoteProtocolError):
            return RemoteProtocolError(
                error.layer, str(error).removeprefix(f"{error.layer}: "), error.terminate
            )
        return type(error)(str(error))

    def disconnect(self) -> None:
        """Ask for the end from any thread: the next ``progress`` finds the connection lost."""
        self._dm.disconnect()

    @property
    def unsent(self) -> int:
        """PDUs that wait for ``flush``."""
        return len(self._dm.queued)

    @property
    def busy(self) -> int:
        """Slots that are taken, in flight or not: cheap, for heuristics."""
        return self._in_play - len(self._free)

    @property
    def sent(self) -> int:
        """Commands that the target has, and has not answered."""
        return sum(slot.state >= SENT for slot in self.tasks)

    def hold(self) -> None:
        """Send no more commands on this connection."""
        with self._lock:
            self._open = 0

    @property
    def in_flight(self) -> int:
        return sum(slot.state >= QUEUED for slot in self.tasks)

    def describe(self) -> dict[str, object]:
        return {**self._dm.describe(), "provider_reason": self.provider_reason}

    def fileno(self) -> int:
        return self._dm.fileno()

    def wants_write(self) -> bool:
        return self._dm.wants_write()
