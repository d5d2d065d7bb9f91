"""Sending: slots, the queue, the command window, and CmdSN order (RFC 7143 section 4.2.2).

A slot is taken and filled without the datamover: its CDB and its data are its own. Only ``_send``
writes into the memory that the connection has for the slot, and decides whether a write carries its
data in its command, or in Data-Outs behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from iserblk.commands.command import (
    ABORTING,
    FREE,
    NOBODY,
    QUEUED,
    SENT,
    TAKEN,
    Command,
    InDoubt,
    Waiter,
    owner_of,
)
from iserblk.datamover.seam import BARE, INLINE, PduSlot
from iserblk.errors import (
    Busy,
    CommandTimeout,
    IserblkError,
    NotSupported,
    RemoteProtocolError,
    TransportError,
)
from iserblk.initiator.session.connection import FIRST_SLOTS, Connection
from iserblk.initiator.session.descriptors import Descriptors
from iserblk.initiator.session.driving import GATHER_COMMANDS, SessionDriver, Undriven
from iserblk.initiator.session.fair_queue import FairQueue
from iserblk.initiator.session.life import Life, State
from iserblk.initiator.session.slots import INDEX_BITS, INDEX_MASK, ITT_MASK, TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.serial import serial_lt, window_size
from iserblk.iscsi.unexpected import NO_LIMIT, FromInitiator
from iserblk.loop.clock import monotonic
from iserblk.scsi import opcodes
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, WRITE

log = logging.getLogger(__name__)

# Of the commands between two calls of ``flush``, this much data goes over the same connection: each
# connection that has a command takes system calls at both ends. Not more, as large requests use
# several connections at a time.
TOGETHER: Final = 64 * 1024
CONTROL_SLOTS: Final = 16  # for NOP, task management, logout: enough for a ladder on several tasks
_STEP: Final = 1 << INDEX_BITS
NO_ANSWER: Final = 0xFF  # the ``response`` of a control PDU that was rejected, or lost
MOST_AGAIN: Final = 16  # how often one PDU is sent again on its connection


class _Sent:
    """Implements Place: by CmdSN, on one connection."""

    def __init__(self, slot: TaskSlot) -> None:
        self._connection = slot.connection
        self._cmd_sn = slot.cmd_sn

    def may_overtake(self, command: Command) -> bool:
        assert isinstance(command, TaskSlot)  # as all of the session
        return command.connection is not self._connection or serial_lt(command.cmd_sn, self._cmd_sn)


class SendQueue:
    """What a session sends: task slots, from the free ones to those in flight, and control PDUs.
    Implements CommandQueue.

    ``connection``: the default connection, which is kept after its loss. ``connections``: all of
    them. ``descriptors``: of a session that may have several connections; else None. ``batch``: a
    driver sets it while more submissions are about to come, and calls ``flush`` itself, or when it
    is told that there are enough of them.
    ``gives_up``: what is submitted without a connection fails at once (see ``ending``). ``busy``:
    slots that are taken, in flight or not. ``unsent``: commands that wait for ``flush``.
    """

    def __init__(
        self,
        connection: Connection,
        slots: list[TaskSlot],
        io_timeout: float,
        life: Life,
    ) -> None:
        """``slots``: their memory is that of ``connection``; the last CONTROL_SLOTS are for control
        PDUs."""
        self.connection = connection
        # One list for good: see ``Life``'s absence.
        self.connections: Final[list[Connection]] = [connection]
        self.descriptors: Descriptors | None = None
        self.slots = slots
        self.tasks = slots[:-CONTROL_SLOTS]
        self.portal = connection.portal
        self.batch = False
        self.gives_up = False
        self.driver: SessionDriver = Undriven(self.flush)
        self.waiting: Final[FairQueue[TaskSlot]] = FairQueue()  # submitted, and QUEUED
        self.max_cmd_sn = 0
        self.busy = 0
        self.unsent = 0
        self._life = life
        self._io_timeout = io_timeout
        self._free = list(reversed(self.tasks))
        self._withheld: list[TaskSlot] = []  # not in use, because the target has no room
        self._free_controls = slots[-CONTROL_SLOTS:]
        self._again: set[TaskSlot] = set()  # waiting, and sent before on a lost connection
        # By the index of its slot: a PDU that was sent again (its ITT), and how often.
        self._repeated: Final[dict[int, tuple[int, int]]] = {}
        self._doubted: Final[set[bytes]] = set()  # LUNs that nothing is sent to
        self._takers: Final[FairQueue[Waiter]] = FairQueue()  # of slots
        # Takers that were woken, each for a slot that was given back, and have not come yet.
        self._promised: Final[set[Waiter]] = set()
        parameters = connection.parameters
        self._unexpected = FromInitiator(
            parameters.max_outstanding_unexpected_pdus if parameters.rdma_extensions else NO_LIMIT
        )
        self._cmd_sn = 0
        self._cmd_sn_seen = 0
        self._exp_cmd_sn = 0
        self._open = 0  # commands that the target's window still takes
        self._chosen = connection  # of several: where the last command went
        self._chosen_takes = -1  # bytes of further commands; below 0: choose again

    def start(self, cmd_sn: int, exp_cmd_sn: int, max_cmd_sn: int) -> None:
        """Take the numbers of the final Login Response."""
        self._cmd_sn = cmd_sn
        self._exp_cmd_sn = exp_cmd_sn
        self._open = max(0, window_size(cmd_sn, max_cmd_sn))
        self.max_cmd_sn = max_cmd_sn

    # -- submitting -------------------------------------------------------------------------------

    def take(self, waiter: Waiter) -> TaskSlot | None:
        """A free slot. None: ``waiter.pending`` was raised by one; wait and try again. Callers that
        wait have slots in the order in which they came, but owners take turns. No caller overtakes
        them.

        Raises the session's error once it has failed.
        """
        if self._life.error is not None:
            raise self.fresh_error()
        slot = None
        if not self._takers.entries and not self._promised:
            slot = self._pop_free()
        if slot is None:
            if self._life.error is not None:
                raise self.fresh_error()
            slot = self._take_or_wait(waiter)
            if slot is None:
                return None
        slot.state = TAKEN
        self.busy += 1
        return slot

    def _take_or_wait(self, waiter: Waiter) -> TaskSlot | None:
        takers, promised = self._takers, self._promised
        slot = None
        if waiter in promised:
            promised.remove(waiter)
            slot = self._pop_free()
            if slot is not None:
                return slot
            waiter.pending += 1
            takers.add_first(waiter)
        else:
            waiter.pending += 1
            takers.add(waiter, owner_of(waiter))
        if takers.head() is waiter and (not promised or len(self._free) > len(promised)):
            slot = self._pop_free()
        if slot is not None:
            takers.pop()
            waiter.pending -= 1
        return slot

    def _pop_free(self) -> TaskSlot | None:
        try:
            return self._free.pop()
        except IndexError:
            return None

    def take_now(self) -> TaskSlot | None:
        """A free slot if there is one, no caller waits for one, and the session has not ended."""
        if self._life.error is not None or self._takers.entries:
            return None
        if self._promised and len(self._free) <= len(self._promised):
            return None
        try:
            slot = self._free.pop()
        except IndexError:
            return None
        slot.state = TAKEN
        self.busy += 1
        return slot

    def forget(self, waiter: Waiter) -> None:
        """``waiter`` no longer waits for a free slot, nor comes for one."""
        if self._takers.remove(waiter):
            waiter.pending -= 1
        self._promised.discard(waiter)
        taker = self._promise()
        if taker is not None:
            taker.task_done()

    def wake_takers(self) -> None:
        """Have all callers that wait for a slot look again. They check their deadlines, too.
        Promises to callers that do not come end here."""
        self._promised.clear()
        takers = self._takers.clear()
        for taker in takers:
            taker.task_done()

    def _promise(self) -> Waiter | None:
        """The taker whose turn it is, if a slot is free for it; it is to be told.
        Until it comes, no other caller has the slot: else a client that begins a command for each
        that ends would keep out all others."""
        if not self._takers.entries or len(self._free) <= len(self._promised):
            return None
        taker = self._takers.pop()
        self._promised.add(taker)
        return taker

    def release(self, command: Command) -> None:
        """Give back a slot that was taken and is not in flight."""
        assert isinstance(command, TaskSlot)  # ``take`` has returned it
        slot = command
        slot.state = FREE
        slot.data = None
        slot.data_in = None
        slot.error = None  # with its traceback, and the buffers that this refers to
        slot.waiter = NOBODY  # and the buffers that this has
        slot.last = -1
        slot.deadline = 0.0
        self.busy -= 1
        self._free.append(slot)
        if self._takers.entries:
            taker = self._promise()
            if taker is not None:
                taker.task_done()

    def shrink(self) -> None:
        """The target had no room for a command (BUSY, TASK SET FULL), whose slot
        has been given back. Keep one command less in flight from now on, but always at least one.
        Without a free slot nothing happens: there will be another refusal."""
        if len(self.tasks) - len(self._withheld) <= 1:
            return
        try:
            self._withheld.append(self._free.pop())
        except IndexError:
            return
        count = len(self.tasks) - len(self._withheld)
        log.info("%s: the target is full: %d commands at once from now on", self.portal, count)

    def grow(self) -> None:
        """Call it about once a second: allow one command more, after ``shrink``."""
        if self._withheld:
            self._free.append(self._withheld.pop())

    def take_memory_back(self) -> None:
        """Call it about once a second: if nothing was sent since the last call, and nothing is in
        flight, slots give back the memory that many commands at once have needed."""
        quiet = self._cmd_sn == self._cmd_sn_seen
        self._cmd_sn_seen = self._cmd_sn
        if not quiet or self.busy:
            return
        lenders = [each for each in self.connections if each.lent or each.data_outs.added]
        if not lenders:
            return
        if self.sent:
            return
        if any(connection.unsent for connection in lenders):
            return
        # First these: when this is interrupted, those of the connections are lent again.
        if any(connection.lent for connection in lenders):
            for slot in self.tasks[FIRST_SLOTS:]:
                slot.drop_memory()
        for connection in lenders:
            connection.take_back(len(self.tasks))

    def place(self, command: Command) -> _Sent:
        """Implements CommandQueue."""
        assert isinstance(command, TaskSlot)
        return _Sent(command)

    def submit(self, command: Command) -> None:
        """Send the command. Queue it while the window is closed, or the session is suspended: in
        order, but owners take turns.

        ``pending`` of its waiter already counts it. Never raises: once the session has failed, the
        slot ends with its error at once, and with InDoubt while its LUN is doubted. Without a
        connection it ends at once, too, where the session gives up.
        Without a ``deadline`` it has the time for one request, from now.
        """
        assert isinstance(command, TaskSlot)  # ``take`` has returned it
        slot = command
        if not slot.deadline:
            now = monotonic()
            slot.begun = int(now * 1e9)
            slot.deadline = now + self._io_timeout
        limit = self.connection.ahs_limit
        if slot.direction == BIDIRECTIONAL and limit < bhs.BIDIRECTIONAL_AHS.size:
            text = f"{self.portal}: the target takes {limit} bytes of AHS (MaxAHSLength)"
            self.end(slot, NotSupported(f"{text}, a bidirectional command has more"))
            return
        failed = self._life.error is not None
        if self._doubted and self._is_refused(slot):
            failed = True
        # (``_open`` is 0 while the session is suspended.)
        queued = not failed and (self._open <= 0 or self.waiting.entries or not self._send(slot))
        if queued:
            slot.state = QUEUED
            self.waiting.add(slot, owner_of(slot.waiter))
        if queued:
            if not self._life.connected and self.gives_up:
                self.end_aborted(slot, self.given_up())
            elif not self._life.connected and self.driver.reconnect is not None:
                self.driver.reconnect()
        elif failed:
            self._refuse(slot)
        elif not self.batch or self.unsent >= GATHER_COMMANDS:
            self.driver.flush_soon()

    def doubt(self, lun: bytes) -> list[TaskSlot]:
        """Send no command to ``lun`` from now on, but for those that tell what it
        is. Returns those that were queued, for ``refuse``."""
        self._doubted.add(lun)
        return self._take_refused()

    def refuse(self, commands: Sequence[Command]) -> None:
        """End the commands that ``doubt`` returned with InDoubt."""
        for command in commands:
            assert isinstance(command, TaskSlot)
            self._refuse(command)

    def believe(self, lun: bytes) -> None:
        """Send commands to ``lun`` again."""
        self._doubted.discard(lun)

    def refuse_waiting(self) -> None:
        """After ``reopen``: end the commands to LUNs that are doubted, which were in flight when
        the connection was lost."""
        refused = self._take_refused() if self._doubted else []
        self.refuse(refused)

    def _take_refused(self) -> list[TaskSlot]:
        """Take out what waits and must not be sent. It is for ``refuse`` alone to
        end it, also where the session ends meanwhile."""
        refused = self.waiting.take_out(self._is_refused)
        self._again.difference_update(refused)
        for slot in refused:
            slot.state = TAKEN
        return refused

    def _is_refused(self, slot: TaskSlot) -> bool:
        """Whether the command must not be sent now."""
        return slot.lun in self._doubted and slot.cdb[0] not in opcodes.TELL_WHAT_IT_IS

    def _refuse(self, slot: TaskSlot) -> None:
        """End a command that was not sent."""
        if self._life.error is not None:
            self.end(slot, self.fresh_error())
        else:
            text = f"{self.portal}: held back: another LUN may have the number"
            self.end(slot, InDoubt(text))

    def _send(self, slot: TaskSlot, again: bool = False) -> bool:
        """Number the command and hand it to the datamover. False, and it uses no CmdSN: there is no
        memory for it, or nothing to advertise its data from, until another task ends. ``again``: it
        keeps the numbers that it has."""
        connection = self.connection
        if self.descriptors is not None:
            connection = self._choose(slot.length)
            if not connection.lend(slot):
                return False
        elif slot.bhs is BARE and not connection.lend(slot):
            return False
        if not again:
            slot.itt = (slot.itt + _STEP) & ITT_MASK
            slot.cmd_sn = self._cmd_sn
        itt = slot.itt
        length = slot.length
        immediate = 0
        flags = bhs.FLAG_FINAL | slot.attribute
        data = slot.data
        direction = slot.direction
        pieces: list[PduSlot] | None = None
        if direction == READ:
            flags |= bhs.FLAG_READ
        elif direction == WRITE and data is not None:
            flags |= bhs.FLAG_WRITE
            # The data goes along whole or not at all; then no buffer of the caller is advertised.
            if length <= connection.immediate_limit:
                slot.inline[:length] = data
                slot.inline_length = immediate = length
                slot.direction = INLINE
            elif length <= connection.data_outs.limit:
                pieces = connection.data_outs.take(length, self.busy, connection.datamover)
                if pieces:
                    immediate = connection.data_outs.immediate
                    slot.inline[:immediate] = data[:immediate]
                    slot.inline_length = immediate
                    slot.direction = INLINE
                    flags &= ~bhs.FLAG_FINAL & 0xFF
        elif direction == BIDIRECTIONAL:
            flags |= bhs.FLAG_READ | bhs.FLAG_WRITE
            read_length = 0 if slot.data_in is None else len(slot.data_in)
            ahs = bhs.pack_bidirectional_read_length(slot.inline, read_length)
            slot.inline_length = ahs
            immediate = ahs // 4 << 24  # TotalAHSLength
        elif direction != NO_DATA:
            flags |= bhs.FLAG_WRITE
        bhs.pack_scsi_command(
            slot.bhs,
            0,
            bhs.SCSI_COMMAND,
            flags,
            immediate,
            slot.lun,
            itt,
            length,
            slot.cmd_sn,
            connection.exp_stat_sn,
            slot.cdb,
        )
        where = slot.connection if again else connection
        slot.connection = connection
        before, slot.state = slot.state, SENT
        try:
            connection.datamover.send_control(slot)
        except Busy:
            slot.state = before
            slot.connection = where
            return False
        connection.begun += 1
        self.unsent += 1
        if self.descriptors is not None:
            connection.bytes_begun += length
        if pieces and data is not None:
            connection.data_outs.send(
                pieces, connection.datamover, data, itt, connection.exp_stat_sn
            )
        if not again:
            self._cmd_sn = (self._cmd_sn + 1) & 0xFFFFFFFF
            self._open -= 1
        return True

    def _choose(self, length: int) -> Connection:
        """The connection for a command that moves ``length`` bytes, of several."""
        left = self._chosen_takes - length
        chosen = self._chosen
        if left < 0 or chosen.logging_out or chosen.lost:
            chosen = self._chosen = self._least_busy()
            left = TOGETHER - length
        self._chosen_takes = left
        return chosen

    def _choose_anew(self) -> None:
        """Refer to no connection that is over."""
        self._chosen = self.connection
        self._chosen_takes = -1

    def _least_busy(self) -> Connection:
        """The connection that has the fewest commands in flight."""
        best = self.connection
        for connection in self.connections:
            if connection.in_flight < best.in_flight and not connection.logging_out:
                best = connection
        return best

    def _choose_first(self) -> None:
        """Have ``connection`` be one that stays, if any does."""
        if not self.connections:
            return
        first = self.connections[0]
        for connection in self.connections:
            if not connection.logging_out:
                first = connection
                break
        self.connection = first
        self.portal = first.portal

    def begin_logout(self, connection: Connection) -> bool:
        """Send no more commands on ``connection``. False, and nothing has changed: none would be
        left for them."""
        if not any(each is not connection and not each.logging_out for each in self.connections):
            return False
        connection.logging_out = True
        self._choose_first()
        return True

    def flush(self) -> None:
        """Send what is queued. A send that fails is found by the next ``progress``."""
        self.unsent = 0
        self._chosen_takes = -1
        descriptors = self.descriptors
        for connection in self.connections if descriptors is None else self.connections.copy():
            datamover = connection.datamover
            if not datamover.queued:
                continue
            try:
                full = datamover.flush()
            except TransportError as error:
                log.debug("%s: send failed: %s", connection.portal, error)
                continue
            if full and descriptors is not None:
                descriptors.update(connection)
            elif full:
                self.driver.blocked()

    def send_waiting(self) -> None:
        """Send commands that waited, as far as the window and the memory allow."""
        waiting = self.waiting
        while waiting.entries and self._open > 0 and self._send(waiting.head()):
            waiting.pop()
        if not self.batch:
            self.flush()

    # -- control PDUs: the runner of progress and tick --------------------------------------------

    @property
    def free_controls(self) -> int:
        """Control PDUs that may be sent now, as far as slots go."""
        return len(self._free_controls)

    @property
    def held_back(self) -> bool:
        """No control PDU may be sent now: the target takes no more unexpected PDUs, and its window
        is closed."""
        return self._unexpected.full and self._open <= 0

    @property
    def takes_immediate(self) -> bool:
        """A PDU may be sent past the window."""
        return not self._unexpected.full

    def take_control(self, connection: Connection | None = None) -> TaskSlot | None:
        """A slot for a PDU of ours that is no command, to be sent on ``connection``; None: on any.
        Returns None when all are in flight, when ``held_back``, or when there is no connection."""
        if self.held_back:
            return None
        return self.take_control_now(connection)

    def take_control_now(self, connection: Connection | None = None) -> TaskSlot | None:
        """The same for a PDU that is sent even if ``held_back``."""
        if not self._life.connected or not self._free_controls:
            return None
        slot = self._free_controls.pop()
        slot.connection = self.connection if connection is None else connection
        if self.descriptors is not None:
            slot.connection.lend(slot)  # there is memory for all of these
        slot.state = TAKEN
        slot.direction = NO_DATA
        slot.inline_length = 0
        slot.error = None
        return slot

    def send_immediate(self, slot: TaskSlot, waiter: Waiter, always: bool = False) -> None:
        """Send the PDU whose BHS is in ``slot.bhs``, as an immediate one: it uses up no CmdSN and
        passes the window. Where the target takes no more of these, it goes through the window,
        without the I bit, and its answer retires those before it (RFC 7145 section 8.1.1.3). I
        bit, ITT, CmdSN and ExpStatSN are filled in here. ``waiter`` is told of the answer, and the
        slot is given back without the caller. Without a connection the answer is NO_ANSWER, at
        once.

        ``always``: it never goes through the window, as it must not wait behind a number that is
        missing. The caller has looked at ``takes_immediate``."""
        slot.waiter = waiter
        sent = self._life.connected and not self.held_back
        if sent:
            self._send_control(slot, always)
        if sent:
            self.flush()
        else:
            slot.response = NO_ANSWER
            self.end_control(slot)

    def send_numbered_ping(self, slot: TaskSlot, cmd_sn: int, waiter: Waiter) -> None:
        """Send a ping that has the CmdSN of a PDU that was lost with its connection. It is not
        immediate, and already within the window. ``slot``, ``waiter``: as for ``send_immediate``.
        The caller calls ``flush``."""
        slot.waiter = waiter
        slot.itt = (slot.itt + _STEP) & ITT_MASK
        pdu.NopOut(
            opcode=bhs.NOP_OUT,
            lun=bytes(8),
            itt=slot.itt,
            cmd_sn=cmd_sn,
            exp_stat_sn=slot.connection.exp_stat_sn,
        ).pack_into(slot.bhs)
        slot.state = SENT
        slot.connection.datamover.send_control(slot)

    def _send_control(self, slot: TaskSlot, always: bool) -> None:
        slot.itt = itt = (slot.itt + _STEP) & ITT_MASK
        bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, itt)
        regulated = not always and self._regulated(slot)
        slot.bhs[0] = slot.bhs[0] & bhs.OPCODE_MASK | (0 if regulated else bhs.IMMEDIATE)
        connection = slot.connection
        bhs.CMD_SN_EXP_STAT_SN.pack_into(
            slot.bhs, bhs.CMD_SN_OFFSET, self._cmd_sn, connection.exp_stat_sn
        )
        slot.state = SENT
        connection.datamover.send_control(slot)
        if regulated:
            self._cmd_sn = (self._cmd_sn + 1) & 0xFFFFFFFF
            self._open -= 1
        else:
            self._unexpected.sent(self._cmd_sn)

    def _regulated(self, slot: TaskSlot) -> bool:
        """Whether the control PDU of ``slot`` is to go through the window: no more unexpected PDUs
        may be sent, or it is a ping, which can wait, and whose answer then makes room for more of
        them long before they are missed. Only where the target has declared a limit. With several
        connections a ping does not wait: on a good connection it would, behind commands that are
        lost on another one, and its connection would pass for dead."""
        unexpected = self._unexpected
        if self._open <= 0 or unexpected.limit == NO_LIMIT:
            return False
        ping = slot.bhs[0] & bhs.OPCODE_MASK == bhs.NOP_OUT
        waits = ping and self.descriptors is None
        return unexpected.full or (waits and unexpected.outstanding > 0)

    def end_control(self, slot: TaskSlot) -> None:
        slot.state = FREE
        self._free_controls.append(slot)
        slot.waiter.task_done()

    def answer_ping(self, connection: Connection, lun: bytes, ttt: int) -> None:
        """Answer a NOP-In that asks for it: echo its Target Transfer Tag (RFC 7143 section 11.18).

        The target does not answer this PDU, so its slot may be used again only when it has been
        sent. Slots take turns; while the wire is full no more pings are answered than there are
        slots to go through. Raises RemoteProtocolError when there are more than that.
        """
        full = connection.datamover.wants_write()
        connection.unsent_pongs = connection.unsent_pongs + 1 if full else 0
        # Not ``take_control``: the target expects an answer to its ping.
        room = connection.unsent_pongs < self.free_controls
        slot = self.take_control_now(connection) if room else None
        if slot is None:
            raise RemoteProtocolError("iSCSI", "flood of NOP-In pings")
        pdu.NopOut(
            lun=lun,
            itt=bhs.NO_TAG,
            ttt=ttt,
            cmd_sn=self._cmd_sn,
            exp_stat_sn=connection.exp_stat_sn,
        ).pack_into(slot.bhs)
        connection.datamover.send_control(slot)
        self.flush()
        slot.state = FREE
        self._free_controls.insert(0, slot)  # used last

    # -- what the target says: the runner of progress ---------------------------------------------

    def take_window(self, exp_cmd_sn: int, max_cmd_sn: int) -> None:
        """Take in ExpCmdSN and MaxCmdSN of a PDU (RFC 7143 section 4.2.2.1): they only move
        forward. Commands that wait and fit are sent."""
        if window_size(exp_cmd_sn, max_cmd_sn) < 0:
            return
        if serial_lt(self.max_cmd_sn, max_cmd_sn):
            self.max_cmd_sn = max_cmd_sn
            if self._life.state is State.LOGGED_IN:  # and not about to leave
                self._open = max(0, window_size(self._cmd_sn, max_cmd_sn))
        if serial_lt(self._exp_cmd_sn, exp_cmd_sn):
            self._exp_cmd_sn = exp_cmd_sn
            if self._unexpected.cmd_sns:
                self._unexpected.answered(exp_cmd_sn)
        if not self.waiting.entries or self._open <= 0:
            return
        self.send_waiting()

    def number_of(self, slot: TaskSlot) -> int | None:
        """The CmdSN that the PDU of ``slot``, which is in flight, uses up. None: it is immediate,
        and uses up none."""
        if slot.index < len(self.tasks):
            return slot.cmd_sn
        if slot.bhs[0] & bhs.IMMEDIATE:
            return None
        (cmd_sn,) = bhs.ITT.unpack_from(slot.bhs, bhs.CMD_SN_OFFSET)
        return int(cmd_sn)

    def send_again(self, slot: TaskSlot) -> None:
        """Send a command or a numbered ping once more, as it was: the target has discarded it, or
        never had it (RFC 7143 section 7.2.1). At ErrorRecoveryLevel 1 or more, over TCP. Raises
        RemoteProtocolError when the target has had it too often: it need not take what we send to
        go on like that."""
        connection = slot.connection
        cmd_sn = self.number_of(slot)
        assert cmd_sn is not None  # callers have looked
        itt, count = self._repeated.get(slot.index, (slot.itt, 0))
        count = count + 1 if itt == slot.itt else 1
        if count > MOST_AGAIN:
            raise RemoteProtocolError(
                "iSCSI", f"the target has discarded the PDU with CmdSN {cmd_sn} {count} times"
            )
        self._repeated[slot.index] = slot.itt, count
        log.info("%s: PDU with CmdSN %d is sent again", connection.portal, cmd_sn)
        bhs.CMD_SN_EXP_STAT_SN.pack_into(
            slot.bhs, bhs.CMD_SN_OFFSET, cmd_sn, connection.exp_stat_sn
        )
        connection.datamover.send_control(slot)
        self.flush()

    def plug_gap(self, ping: TaskSlot) -> None:
        """The target has answered ``ping``. A command, or a ping with a CmdSN, that was sent before
        it on its connection, and that the target still expects, is lost: send it again. Another
        ping behind it shows whether that was all. One that was sent on another connection may
        still be under way: a ping there will show it."""
        (sent,) = bhs.ITT.unpack_from(ping.bhs, bhs.CMD_SN_OFFSET)
        missing = self._exp_cmd_sn
        if not serial_lt(missing, sent):
            return
        for slot in self.slots:
            if slot.state < SENT or self.number_of(slot) != missing:
                continue
            connection = slot.connection
            if connection.lost:
                return  # its recovery sees to it
            if connection is ping.connection:
                self.send_again(slot)
            control = self.take_control(connection)
            if control is not None:
                control.bhs[:] = ping.bhs
                self.send_immediate(control, NOBODY)
            return

    def find(self, itt: int, connection: Connection) -> TaskSlot | None:
        """The slot in flight on ``connection`` that has this tag."""
        index = itt & INDEX_MASK
        if index < len(self.slots):
            slot = self.slots[index]
            if slot.itt == itt and slot.state >= SENT and slot.connection is connection:
                return slot
        return None

    def end_rejected(self, slot: TaskSlot, error: Exception) -> None:
        """The target has rejected the PDU of ``slot``, which is in flight."""
        if slot in self.tasks:
            self._deallocate(slot)
            self.end(slot, error)
        else:
            slot.response = NO_ANSWER
            self.end_control(slot)

    # -- ending -----------------------------------------------------------------------------------

    def _deallocate(self, slot: TaskSlot) -> None:
        """The task, which is in flight, ends without a response."""
        slot.connection.datamover.deallocate_task_resources(slot, 0)
        slot.connection.ended += 1

    def end(self, slot: TaskSlot, error: Exception) -> None:
        slot.error = error
        slot.state = TAKEN
        slot.waiter.task_done()

    def end_aborted(self, slot: TaskSlot, error: Exception) -> None:
        """End a task that the target has given up, or that was never sent. For ``Ladder``."""
        if slot.state == QUEUED:
            if not self.waiting.remove(slot):  # it went out a moment ago
                return
            self._again.discard(slot)
        elif slot.state in (SENT, ABORTING) and not slot.connection.lost:
            self._deallocate(slot)
        else:
            return
        self.end(slot, error)

    def given_up(self) -> CommandTimeout:
        """Why a command fails that does not wait for another connection."""
        error = CommandTimeout(
            f"{self.portal}: given up, as the end was asked for: not connected: "
            f"{self._life.absence}"
        )
        error.logged = True
        return error

    def fresh_error(self) -> IserblkError:
        """A new copy of the session's error: an exception object is raised for one request."""
        error = self._life.error
        assert error is not None  # callers have looked
        if isinstance(error, RemoteProtocolError):
            return RemoteProtocolError(
                error.layer, str(error).removeprefix(f"{error.layer}: "), error.terminate
            )
        return type(error)(str(error))

    @property
    def sent(self) -> int:
        """Commands that the target has, and has not answered."""
        return sum(slot.state >= SENT for slot in self.tasks)

    @property
    def in_flight(self) -> int:
        return sum(slot.state >= QUEUED for slot in self.tasks)

    # -- one of several connections: the runner of progress ---------------------------------------

    @property
    def cmd_sn(self) -> int:
        """CmdSN of the next command."""
        return self._cmd_sn

    def join(self, connection: Connection) -> None:
        """Commands may be sent on ``connection``, too."""
        if not self.connections:
            self.connection = connection
            self.portal = connection.portal
        self.connections.append(connection)

    def open_window(self) -> None:
        """The session goes on where it was at ``close_window``, with none of the
        connections that it had then."""
        self._unexpected.clear()
        self._open = max(0, window_size(self._cmd_sn, self.max_cmd_sn))

    def lose(self, connection: Connection) -> None:
        """``connection`` is over. Its commands stay in flight, and belong to its
        Recovery. Its datamover is to be terminated, then ``strand`` is to be called. Where it was
        the only one, ``close_window`` was called, and ``connection`` is still this one."""
        connection.lost = True
        self.connections.remove(connection)
        self._choose_first()
        self._choose_anew()
        for slot in self.slots[len(self.tasks) :]:
            if slot.state == SENT and slot.connection is connection:
                cmd_sn = self.number_of(slot)
                if cmd_sn is not None:
                    connection.control_cmd_sns.append(cmd_sn)

    def strand(self, connection: Connection) -> None:
        """After ``lose``, when the datamover is terminated: its commands have no STags any more,
        and its control PDUs will not be answered."""
        for slot in self.slots:
            if slot.state >= SENT and slot.connection is connection:
                slot.stag = slot.stag_in = 0
                if slot.index >= len(self.tasks):
                    slot.response = NO_ANSWER
                    self.end_control(slot)
                elif slot.direction == INLINE:
                    slot.direction = WRITE

    def stranded(self, connection: Connection) -> list[TaskSlot]:
        """The commands that are in flight on a lost connection, by CmdSN."""
        stranded = [
            slot for slot in self.tasks if slot.state >= SENT and slot.connection is connection
        ]
        stranded.sort(key=lambda slot: (slot.cmd_sn - self._cmd_sn) & 0xFFFFFFFF)
        return stranded

    def acknowledged(self, cmd_sn: int) -> bool:
        """Whether the target has all PDUs up to this CmdSN, in order."""
        return serial_lt(cmd_sn, self._exp_cmd_sn)

    def retry(self, slot: TaskSlot) -> bool:
        """Send a stranded command that the target has not acknowledged once more, with its ITT and
        CmdSN, on another connection. False: there is no memory for its data now, or its LUN is
        doubted. The caller calls ``flush``."""
        if self._doubted and self._is_refused(slot):
            return False
        return self._send(slot, True)

    def requeue(self, slots: list[TaskSlot]) -> None:
        """Send commands again, as new ones, before any that wait. They are at no target any
        more."""
        self.waiting.put_first(slots)
        for slot in slots:
            slot.state = QUEUED
        self.refuse_waiting()
        self.send_waiting()

    def end_stranded(self, slot: TaskSlot, error: Exception) -> None:
        """End a stranded command; it is at no target any more."""
        slot.data = slot.data_in = None
        self.end(slot, error)

    def reassign(self, slot: TaskSlot, control: TaskSlot, waiter: Waiter) -> bool:
        """Send TASK REASSIGN for a stranded command, on the connection of ``control``, to which it
        belongs from now on. ``waiter`` is told of the answer. False: nothing was sent, because
        there is no memory to advertise its data from."""
        connection = control.connection
        control.waiter = waiter
        control.itt = (control.itt + _STEP) & ITT_MASK
        pdu.TaskManagementRequest(
            function=pdu.TMF_TASK_REASSIGN,
            lun=bytes(8),
            itt=control.itt,
            referenced_task_tag=slot.itt,
            cmd_sn=self._cmd_sn,
            exp_stat_sn=connection.exp_stat_sn,
        ).pack_into(control.bhs)
        lost = slot.connection
        try:
            if not connection.lend(slot):
                raise Busy("no memory")
            bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, slot.itt)
            slot.connection = connection
            connection.datamover.reassign(slot, control, lost.datamover)
        except Busy:
            slot.connection = lost
            control.state = FREE
            self._free_controls.append(control)
            return False
        connection.begun += 1
        connection.bytes_begun += slot.length
        control.state = SENT
        self._unexpected.sent(self._cmd_sn)
        if slot.state == ABORTING:
            slot.state = SENT  # it is late: the next tick aborts it, on this connection
        self.flush()
        return True

    def take_back(self, slot: TaskSlot) -> None:
        """The target does not know the command, which is in flight: it is not any more, and keeps
        its buffers."""
        data, data_in = slot.data, slot.data_in
        self._deallocate(slot)
        slot.data, slot.data_in = data, data_in
        if slot.direction == INLINE:
            slot.direction = WRITE

    # -- from one connection to the next: the runner of progress ----------------------------------

    def close_window(self) -> None:
        """No more commands are sent on this connection."""
        self._open = 0

    def put_back(self) -> None:
        """When the connection is closed: queue again what was in flight and can be
        sent again, by CmdSN, in front of what was never sent. May be repeated after an
        interrupt."""
        self._open = 0  # an interrupt may have come before ``close_window``
        sent = [slot for slot in self.tasks if slot.state == SENT and slot.complete]
        sent.sort(key=lambda slot: (slot.cmd_sn - self._cmd_sn) & 0xFFFFFFFF)  # oldest first
        self._again.update(sent)
        self.waiting.put_first(sent)  # some may be there already, by a call that was interrupted
        for slot in sent:
            slot.stag = 0  # went with the connection
            if slot.direction == INLINE:
                slot.direction = WRITE  # the next connection may take less
            slot.state = QUEUED

    def end_sent(self, error_of: Callable[[TaskSlot], IserblkError]) -> None:
        """After ``put_back``: end the tasks that are not to be sent again with ``error_of`` them,
        and control PDUs without an answer."""
        for slot in self.slots:
            if slot.state >= SENT:
                slot.stag = slot.stag_in = 0
                slot.data = slot.data_in = None
                if slot.index < len(self.tasks):
                    self.end(slot, error_of(slot))
                else:
                    slot.response = NO_ANSWER
                    self.end_control(slot)

    def take_connection(self, fresh: SendQueue) -> None:
        """Take over the connection, the memory and the numbers of ``fresh``, which
        is idle. Nothing is sent before ``reopen``. May be repeated after an interrupt."""
        before = self.connection  # until nothing refers to it any more, as ``connections``
        for slot, other in zip(self.slots, fresh.slots, strict=True):
            slot.take_memory(other)
            slot.connection = fresh.connection  # and refers no more to the one before
        self._free_controls = [self.slots[other.index] for other in fresh._free_controls]
        self.connection = fresh.connection
        self.connections[:] = fresh.connections
        self._choose_anew()
        self.unsent = 0
        self.descriptors = fresh.descriptors
        self.portal = fresh.portal
        self.max_cmd_sn = fresh.max_cmd_sn
        self._cmd_sn = fresh._cmd_sn
        self._exp_cmd_sn = fresh._exp_cmd_sn
        self._unexpected = fresh._unexpected
        if before is not self.connection:
            before.lost = True

    def reopen(self, fresh: SendQueue) -> int:
        """After ``take_connection``: commands are sent from now on. Returns how
        many of the waiting commands are sent once more."""
        again = len(self._again)
        self._again.clear()
        self._open = fresh._open
        return again

    def close(self) -> list[Waiter]:
        """When the session ends: nothing is sent any more. Returns the waiters for
        a slot, for ``end_all``."""
        self._open = 0
        self.waiting.clear()
        self._again.clear()
        self._promised.clear()
        return self._takers.clear()

    def end_all(self, takers: list[Waiter]) -> None:
        """After ``close``, when the connection is closed: every task ends with the session's error,
        and ``takers`` are woken."""
        for slot in self.slots:
            if slot.state >= QUEUED:
                slot.stag = slot.stag_in = 0  # went with the connection
                slot.data = slot.data_in = None
                self.end(slot, self.fresh_error())
        for taker in takers:
            taker.task_done()
