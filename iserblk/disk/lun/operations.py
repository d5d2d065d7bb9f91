"""The operations of a LUN: read, write, flush, trim, zero, extents, read-ahead. They split and
align requests, and keep the journal.

All operations run in the thread of the loop that has the session. Between two ``yield`` nothing
else changes what they use.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final, TypeVar

from iserblk.commands.command import QUEUED, SENT, TAKEN, Command, EndedByReset, Operation, Waiter
from iserblk.commands.running import (
    AGAIN_S,
    ONCE,
    PARALLEL,
    Work,
    check_time,
    command,
    failure,
    fill_no_data,
    fill_read,
    fill_write,
    ignored_ndob,
    is_refusal,
    is_unfit,
    is_unknown,
    no_room,
    retry_delay,
    run,
)
from iserblk.commands.session import CommandSession, Place
from iserblk.disk.durability.journal import MemoryJournal
from iserblk.disk.durability.promise import Durability, Flushed, FlushToken, is_unheard
from iserblk.disk.durability.replay import LEAST_WRITE_SAME, ZEROES, replay
from iserblk.disk.lun import refusals
from iserblk.disk.lun.checked_identity import CheckedIdentity, Found
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.identify import identify
from iserblk.disk.lun.inventory import Inventory
from iserblk.disk.lun.refusals import Refusals, words
from iserblk.disk.lun.reservation import Reservation
from iserblk.disk.lun.sizing import Sizing
from iserblk.disk.lun.watching import LunWatch
from iserblk.disk.ranges import RangeLock
from iserblk.disk.seam import EXTENT_DATA, NO_CLIENT, Extent, FlushClient, LunInfo, Rest
from iserblk.errors import (
    IserblkError,
    LocalProtocolError,
    NotSupported,
    OutOfRange,
    RemoteProtocolError,
    ScsiError,
    WriteProtected,
    WritesLost,
)
from iserblk.loop.clock import monotonic
from iserblk.metrics.counting import LunMetrics
from iserblk.octets import is_flat
from iserblk.scsi import cdb
from iserblk.scsi import lba as lba_data
from iserblk.scsi import status as sam
from iserblk.scsi.limits import MAXIMUM_BLOCKS
from iserblk.scsi.sense import ABORTED_COMMAND, Sense, decode
from iserblk.scsi.tasks import READ, SIMPLE

log = logging.getLogger(__name__)

P = TypeVar("P")
_is_flat: Final[Callable[[memoryview, bool], bool]] = is_flat  # bound once: it is not compiled
_SOON_S: Final = 0.0005  # between two looks whether commands that are under way have ended

Piece = tuple[int, memoryview]  # first block, whole blocks from there
Ranges = Iterator[tuple[int, int]]  # first block, blocks; ascending
Range = tuple[int, int]  # first block, blocks
Batch = list[Range]
CdbAndData = tuple[bytes, memoryview | None]  # what goes with it


def check_buffer(buffer: object) -> None:
    """Raises LocalProtocolError unless it is a memoryview of contiguous bytes: a buffer that cannot
    be advertised would leave a hole in the order of commands."""
    if not isinstance(buffer, memoryview):
        what = f"memoryview(buffer), not a {type(buffer).__name__}"
        raise LocalProtocolError(f"a buffer must be a memoryview: give {what}")
    if not _is_flat(buffer, False):
        raise LocalProtocolError("a buffer must be contiguous bytes; cast it")


class _Clock:
    """The time for a trim or zero. ``deadline``: when what is sent now has to be done. It is the
    same for the whole request; with ``patient`` each step has its own, so that a request takes as
    long as it needs while it makes progress."""

    def __init__(self, core: DiskCore, patient: bool) -> None:
        self._core = core
        self._patient = patient
        self._deadline = core.deadline()

    @property
    def deadline(self) -> float:
        if self._patient:
            self._deadline = self._core.deadline()
        return self._deadline


class _Asking(Work[P]):
    """Sends commands that the LUN may refuse. ``refused``: the pieces whose commands were refused,
    and how: nothing was done for them, and no error raised. The caller sends them in another
    form."""

    durable = False  # what they write needs no flush

    def __init__(self, core: DiskCore, deadline: float) -> None:
        super().__init__(core.session, core.lun, core.info.name, deadline)
        self._core = core
        self.refused: list[tuple[P, IserblkError]] = []

    def outcome(self, slot: Command, piece: P) -> IserblkError | None:
        problem = super().outcome(slot, piece)
        if problem is not None and (is_refusal(problem) or ignored_ndob(problem, slot.cdb)):
            self.refused.append((piece, problem))
            return None
        return problem


class _Reading(_Asking[Piece]):
    """Sends READs into their pieces. Sends a READ again that may have read what was there before a
    write that was lost."""

    def __init__(self, core: DiskCore, deadline: float) -> None:
        super().__init__(core, deadline)
        self._epoch = 0

    def fill(self, slot: Command, piece: Piece, waiter: Waiter | None) -> bool:
        core = self._core
        lba, view = piece
        fill_read(slot, core.lun, view)
        core.pack_read(slot.cdb, lba, len(view) // core.block, 0)
        return True

    def begun(self) -> None:
        self._epoch = self._core.durability.epoch

    def stale(self) -> bool:
        return self._core.durability.stale(self._epoch)


class _ReadingBack(_Reading):
    """Sends one READ. ``place``: of the READ, once it has an answer."""

    def __init__(self, core: DiskCore, deadline: float) -> None:
        super().__init__(core, deadline)
        self.place: Place | None = None

    def outcome(self, slot: Command, piece: Piece) -> IserblkError | None:
        if slot.error is None:  # else it may never have been sent
            self.place = self.session.queue.place(slot)
        return super().outcome(slot, piece)


class _Changing(_Asking[P]):
    """Sends commands that change the LUN. ``kept``: the journal's numbers of their changes."""

    def __init__(self, core: DiskCore, deadline: float) -> None:
        super().__init__(core, deadline)
        self.kept: list[int] = []

    def ended(self, slots: list[Command]) -> None:
        note = self._core.note_ended
        self.kept += [note(slot, self.durable, copy=False) for slot in slots]

    def released(self) -> None:
        self._core.ranges.changed()


class _Writing(_Changing[Piece]):
    """Sends WRITEs of their pieces. ``durable``: with FUA. ``claims`` False: the caller holds the
    lock of their blocks."""

    def __init__(self, core: DiskCore, deadline: float, durable: bool) -> None:
        super().__init__(core, deadline)
        self.durable = durable
        self.claims = True
        self._tags: dict[int, int] = {}  # with FUA: of commands before they were sent

    def fill(self, slot: Command, piece: Piece, waiter: Waiter | None) -> bool:
        core = self._core
        lba, view = piece
        blocks = len(view) // core.block
        if not self.claims:
            slot.first, slot.last = lba, lba + blocks - 1
        elif not core.ranges.claim(slot, lba, lba + blocks - 1, waiter):
            return False
        fill_write(slot, core.lun, view)
        core.pack_write(slot.cdb, lba, blocks, cdb.FUA if self.durable else 0)
        if self.durable:
            self._tags[slot.index] = slot.tag
        journal = core.durability.journal
        # With FUA it is durable by itself. But where an older write, which is not, is sent again,
        # this one must be sent again after it.
        if journal is not None and (not self.durable or journal.active):
            journal.add(slot, view)
        if self.durable:
            core.durability.begin_wait(slot)
        return True

    def ended(self, slots: list[Command]) -> None:
        if self.durable:
            self._doubt_unheard(slots)
        super().ended(slots)

    def _doubt_unheard(self, slots: list[Command]) -> None:
        for slot in slots:
            self._core.durability.end_wait(slot)
            if slot.tag != self._tags[slot.index]:  # else it was never sent
                self._core.doubt_unheard(slot, "a write with FUA that was not answered")


class _Exclusive(_Changing[Range]):
    """Sends the commands that ``form`` makes for ranges of blocks. The caller holds the lock of all
    these blocks."""

    def __init__(self, core: DiskCore, deadline: float, form: _Form) -> None:
        super().__init__(core, deadline)
        self._form = form

    def fill(self, slot: Command, piece: Range, waiter: Waiter | None) -> bool:
        core = self._core
        lba, blocks = piece
        command_block, data = self._form.make(lba, blocks)
        slot.cdb[:] = command_block.ljust(16, b"\0")
        if data is None:
            fill_no_data(slot, core.lun)
        else:
            fill_write(slot, core.lun, data)
        slot.first, slot.last = lba, lba + blocks - 1
        if core.durability.journal is not None:
            core.durability.journal.add(slot, data, command_block)
        return True

    def outcome(self, slot: Command, piece: Range) -> IserblkError | None:
        if self._form.short_ok and slot.residual > 0:
            slot.residual = 0
        return super().outcome(slot, piece)


class _Form(ABC):
    """How a range of blocks is changed without its data: by which command, and by how many blocks
    at once. ``over``: the LUN takes no command of this kind.

    ``most``: blocks of one command; less than the LUN says, where it has refused more. A smaller
    number is tried for this operation only, and remembered when it was taken: a refusal alone does
    not tell what is wrong.
    """

    short_ok = False  # a residual is no error

    def __init__(self, core: DiskCore) -> None:
        self.core = core
        self.most = MAXIMUM_BLOCKS
        self.over = False

    @abstractmethod
    def cut(self, first: int, blocks: int) -> Ranges:
        """The range as the LUN takes it."""

    @abstractmethod
    def make(self, lba: int, blocks: int) -> CdbAndData: ...

    @abstractmethod
    def send(self, batch: Batch, deadline: float) -> Operation[Batch]:
        """Send a batch; returns what of it was refused, and is to be sent as ``cut`` says now. Each
        refusal leaves less to try."""


class _Unmapping(_Form):
    """``why``: the refusal that says most, once it is ``over``."""

    why = ""
    # tgtd does the UNMAP, and reports a residual as if it had taken no parameters. UNMAP is only
    # advice: no reason to fail.
    short_ok = True

    def cut(self, first: int, blocks: int) -> Ranges:
        return self.core.geometry.unmap_ranges(first, blocks, self.most)

    def make(self, lba: int, blocks: int) -> CdbAndData:
        parameters = memoryview(lba_data.unmap_parameters([(lba, blocks)]))
        return cdb.unmap(len(parameters)), parameters

    def send(self, batch: Batch, deadline: float) -> Operation[Batch]:
        core = self.core
        refused = yield from core.exclusive(batch, deadline, self)
        if not refused:
            if self.most < MAXIMUM_BLOCKS:
                core.refusals.limit_unmap(self.most)
                core.narrow()
            return []
        error = _decisive(refused)
        longest = min(max(count for (_, count), _ in refused), self.most)
        half = core.geometry.half(longest)
        granule = max(core.geometry.unmap_granularity, 1)
        # A maximum of 0 means that there is no UNMAP (SBC-4); where both are 0, the LUN may just
        # not have told them.
        blocks, descriptors = core.geometry.max_unmap_blocks, core.geometry.max_unmap_descriptors
        none = bool(blocks) is not bool(descriptors)
        if is_unknown(error) or none or half < granule:
            self.over = True
            self.why = words(error)
            text = f"no trims: the LUN refuses UNMAP ({self.why})"
            core.refusals.lacks(refusals.UNMAP, text, logging.INFO)
            core.narrow()
        elif self.most > half:
            self.most = half
        return [piece for piece, _ in refused]


class _Zeroing(_Form):
    """``unmap``: the LUN may deallocate the blocks."""

    def __init__(self, core: DiskCore, unmap: bool) -> None:
        super().__init__(core)
        self._unmap = unmap
        self._wanted = unmap  # until the LUN refused it
        self._ndob = False

    def cut(self, first: int, blocks: int) -> Ranges:
        return self.core.geometry.write_same_ranges(first, blocks, self.most)

    def make(self, lba: int, blocks: int) -> CdbAndData:
        data = None if self._ndob else ZEROES[: self.core.block]
        return cdb.write_same16(lba, blocks, self._unmap, self._ndob), data

    def send(self, batch: Batch, deadline: float) -> Operation[Batch]:
        """Without data where the LUN takes NDOB, else with one block."""
        core = self.core
        refused: list[tuple[Range, IserblkError]] = []
        left = batch
        self._ndob = core.geometry.ndob
        if self._ndob:
            refused = yield from core.exclusive(batch, deadline, self)
            left = [piece for piece, _ in refused]
            self._ndob = False
        if left and not (refused and is_unknown(_decisive(refused))):
            refused = yield from core.exclusive(left, deadline, self)
            if len(refused) < len(left):
                core.geometry.ndob = False  # the LUN takes it with data
        if refused:
            self._give_way(refused)
            return [piece for piece, _ in refused]
        if self.most < MAXIMUM_BLOCKS:
            core.refusals.limit_write_same(self.most)
        if self._wanted and not self._unmap:
            core.refusals.lacks(
                refusals.DEALLOCATION,
                "the LUN says that WRITE SAME can deallocate blocks, and refuses to; zeroes are "
                "written",
            )
        if self.most < MAXIMUM_BLOCKS or self._wanted is not self._unmap:
            core.narrow()
        return []

    def _give_way(self, refused: list[tuple[Range, IserblkError]]) -> None:
        core = self.core
        error = _decisive(refused)
        longest = min(max(count for (_, count), _ in refused), self.most)
        half = core.geometry.half(longest)
        if is_unfit(error) and half * core.block >= LEAST_WRITE_SAME:
            self.most = half
        elif is_unfit(error) and self._unmap:
            self._unmap = False
            self.most = MAXIMUM_BLOCKS
        else:
            self.over = True
            core.refusals.lacks(
                refusals.WRITE_SAME,
                f"the LUN says that it has WRITE SAME, and refuses it ({words(error)}); zeroes are "
                "written",
            )
            core.narrow()


def _split(lba: int, view: memoryview, most: int, block: int) -> list[Piece]:
    """The piece in pieces of at most ``most`` bytes, whole blocks."""
    return [(lba + at // block, view[at : at + most]) for at in range(0, len(view), most)]


def _joined(ranges: list[Range]) -> list[Range]:
    """Ranges that have no block in common, ascending, and with no other behind them."""
    found: list[Range] = []
    for first, blocks in sorted(ranges):
        if found and found[-1][0] + found[-1][1] == first:
            found[-1] = (found[-1][0], found[-1][1] + blocks)
        else:
            found.append((first, blocks))
    return found


def _decisive(refused: list[tuple[P, IserblkError]]) -> IserblkError:
    """The refusal that says most: that the LUN does not know the command at all."""
    return next((error for _, error in refused if is_unknown(error)), refused[0][1])


def _proves_nothing(problem: IserblkError) -> bool:
    """Whether a SYNCHRONIZE CACHE that failed so might succeed when it is sent again, and yet cover
    nothing (see ``disk.durability.promise``)."""
    sense = problem.sense if isinstance(problem, ScsiError) else None
    return is_unheard(problem) or (isinstance(sense, Sense) and sense.key == ABORTED_COMMAND)


def _is_foreign(problem: BaseException) -> bool:
    """Whether a command ended with TASK ABORTED: that tells of another initiator, and neither of a
    failure nor of a loss. (What a reset of our own has ended was left unanswered.)"""
    return (
        isinstance(problem, ScsiError)
        and problem.status == sam.TASK_ABORTED
        and not isinstance(problem, EndedByReset)
    )


class _Synchronizing(Work[bytes]):
    """Sends a SYNCHRONIZE CACHE; its CDB is the only piece. ``unheard``: the target may have it, or
    have had it, and its status is not known."""

    def __init__(self, core: DiskCore, deadline: float) -> None:
        super().__init__(core.session, core.lun, core.info.name, deadline)
        self.unheard = False
        self.place: Place | None = None  # once it has an answer
        self._tag = 0  # of the command before it was sent

    def fill(self, slot: Command, piece: bytes, waiter: Waiter | None) -> bool:
        slot.cdb[:] = piece.ljust(16, b"\0")
        fill_no_data(slot, self.lun)
        self._tag = slot.tag
        return True

    def ended(self, slots: list[Command]) -> None:
        # (A command that was never sent has no new tag.)
        self.unheard = any(slot.tag != self._tag and self._is_unheard(slot) for slot in slots)

    def _is_unheard(self, slot: Command) -> bool:
        problem = failure(slot, self.name) if slot.state < QUEUED else None
        return slot.state >= QUEUED or (problem is not None and is_unheard(problem))

    def outcome(self, slot: Command, piece: bytes) -> IserblkError | None:
        if slot.error is None:  # else it may never have been sent
            self.place = self.session.queue.place(slot)
        return super().outcome(slot, piece)

    def may_repeat(self, problem: IserblkError) -> bool:
        return not _proves_nothing(problem)


def _under_way(commands: list[tuple[Command, int]]) -> bool:
    """Whether one of the commands, each with the tag that it had, has no answer yet. (QUEUED: its
    connection was lost, and another is to come.)"""
    return any(
        slot.tag == tag and (slot.state >= QUEUED or _is_not_looked_at(slot))
        for slot, tag in commands
    )


def _is_not_looked_at(slot: Command) -> bool:
    """Whether a command has ended without an answer, and who sent it has yet to see why."""
    return slot.state == TAKEN and slot.error is not None


class _Resuming:
    """Implements LunListener: follows the LUN of ``core`` on a fresh connection that is not in use
    yet. ``fresh``: its session. ``certain``: it was found there, and compared. ``reserved``: the
    reservation was found to be ours there."""

    def __init__(self, core: DiskCore) -> None:
        self._core = core
        self.fresh: CommandSession | None = None
        self.certain = False
        self.reserved = False

    def hear(self, slot: Command) -> None:
        self._core.sizing.hear(slot)
        self._core.durability.hear_resuming(slot)
        sense = decode(slot.sense)
        # The next attempt looks anew. (A first report comes before that, and is usual.)
        if self.fresh is not None and (
            (self.certain and sense.is_perhaps_another) or (self.reserved and self._is_taken(sense))
        ):
            self.certain = self.reserved = False
            self.fresh.disconnect()

    def _is_taken(self, sense: Sense) -> bool:
        reservation = self._core.reservation
        return reservation is not None and reservation.is_doubted_by(sense)

    def doubt(self) -> None:
        """All LUNs are compared."""

    def reassure(self, _deadline: float) -> Operation[None]:
        yield from ()

    def retried(self) -> None:
        """It is not in use yet."""

    def tick(self) -> None:
        """The same."""

    def unflushed(self) -> bool:
        """Implements LunListener; it has one connection."""
        return False

    def before_logout(self) -> Operation[None]:
        yield from ()


class DiskCore:
    """One LUN of a session; implements LunListener. ``info`` and ``geometry`` come from
    ``iserblk.disk.lun.identify``."""

    def __init__(
        self, session: CommandSession, lun: bytes, info: LunInfo, geometry: Geometry
    ) -> None:
        self.session = session
        self.queue = session.queue
        self.lun = lun
        self.info = info
        self.geometry = geometry
        self.refusals = Refusals(info.name)
        self.sizing = Sizing(info.name, info.size)
        self.size = info.size
        self.block = info.block_size
        self.max_transfer = info.max_transfer
        self._paused = 0  # no change is begun
        self._most_written = info.max_transfer  # by ``begin_write``; 0 while it is paused
        self.ranges = RangeLock(session.queue.tasks, lun)
        self.pack_read = cdb.pack_read16 if geometry.long_cdbs else cdb.pack_read10
        self.pack_write = cdb.pack_write16 if geometry.long_cdbs else cdb.pack_write10
        self.metrics = LunMetrics()
        self.durability = Durability(info.name, info.write_cache, self.ranges)
        self.client = self.durability.losses.new_client()  # who has no client of its own
        session.listeners.add(lun, self)
        self.reservation: Reservation | None = None  # with reserve=exclusive
        self.inventory: Inventory | None = None  # of a URL without a LUN; all its disks share it
        self.elsewhere = False  # a fresh session uses another portal than before
        self._resuming = _Resuming(self)
        self.identity = CheckedIdentity(self)
        self._watch = LunWatch(self)
        # By the index of its slot, when each read began: see ``Durability.stale``; and how many
        # losses there were when each write did: see ``_wholly``.
        self._epochs = [0] * len(session.queue.tasks)

        # What the LUN says of itself, on the session given.
        self.look: Callable[[CommandSession], Operation[Found]] = self._look

    def _look(self, session: CommandSession) -> Operation[Found]:
        known = self.info
        return (yield from identify(session, known.lun, known.name, known.url, known.target))

    def rename(self, name: str) -> None:
        self.info = replace(self.info, name=name)
        self.durability.name = self.sizing.name = self.refusals.name = name

    def limit_transfer(self, size: int) -> None:
        """Send no READ or WRITE of more than ``size`` bytes (0: than the LUN says), and none of
        less than a block."""
        self.refusals.most_transfer = size
        self.narrow()

    def narrow(self) -> None:
        """Take out of ``info`` and ``geometry`` what the LUN has refused."""
        self.info = self.refusals.narrow(self.info, self.geometry)
        self._take_limit()

    def _take_limit(self) -> None:
        """Behind each change of ``info``, or of what pauses changes."""
        self.max_transfer = self.info.max_transfer
        self._most_written = 0 if self._paused else self.max_transfer

    def pause_changes(self, pause: bool) -> None:
        """Begin no change any more, until it is called with False. Calls nest."""
        self._paused += 1 if pause else -1
        self._take_limit()

    def settle(self, deadline: float) -> Operation[None]:
        """While changes are paused: wait for those that are under way, and flush. Nothing is
        unflushed when it returns. Raises as ``flush``."""
        while self.durability.unflushed:
            while self.ranges.changing(None):
                check_time(self.session, deadline, self.info.name)
                yield AGAIN_S
            yield from self.flush(deadline, NO_CLIENT)

    def wait_for_pause(self, deadline: float) -> Operation[None]:
        """Before a change: wait while changes are paused."""
        while self._paused:
            check_time(self.session, deadline, self.info.name)
            yield AGAIN_S

    def _choose_cdbs(self) -> None:
        short = self._is_short
        self.pack_read = cdb.pack_read10 if short else cdb.pack_read16
        self.pack_write = cdb.pack_write10 if short else cdb.pack_write16

    @property
    def _is_short(self) -> bool:
        """READ(10) and WRITE(10) are sent, which reach 2^32 blocks."""
        return not self.geometry.long_cdbs or self.refusals.refused(refusals.LONG_TRANSFERS)

    def keep_journal(self, limit: int, shared: bool = False) -> None:
        """From now on keep what is acknowledged and not flushed, up to ``limit`` bytes. Only where
        the session's connection is replaced when it is lost. ``shared``: another host writes to
        the LUN, too."""
        self.durability.assign(MemoryJournal(limit, self.block, self.queue.tasks), shared)

    def deadline(self) -> float:
        """The deadline of a request that begins now (monotonic seconds)."""
        return monotonic() + self.session.io_timeout

    # -- what the target reports, and a new connection --------------------------------------------

    def hear(self, slot: Command) -> None:
        """Implements LunListener."""
        self.sizing.hear(slot)
        if self.durability.hear(slot):
            self.session.disconnect()  # it is compared on the next connection, before a replay
            return
        self.identity.hear(decode(slot.sense))

    def doubt(self) -> None:
        """Implements LunListener."""
        self.identity.doubt_by_list()

    def reassure(self, deadline: float) -> Operation[None]:
        """Implements LunListener."""
        return self.identity.reassure(deadline)

    @property
    def known(self) -> LunInfo:
        """What the LUN has said of itself, to compare it with: its size is the size that it told,
        of which not all may be used."""
        return replace(self.info, size=self.sizing.told)

    @property
    def long_cdbs(self) -> bool:
        """Whether the LUN has READ CAPACITY(16)."""
        return self.geometry.long_cdbs

    def begin_check(self) -> None:
        """The LUN is about to be compared on the fresh session of ``listen_resuming``."""
        self._resuming.certain = self._resuming.reserved = False

    def reserved(self) -> None:
        """The reservation is ours, as that session has found."""
        self._resuming.reserved = True

    def checked(self) -> None:
        """It is the LUN in use. The session has no connection; commands go out on the next."""
        self._resuming.certain = True
        self.identity.checked()

    def retried(self) -> None:
        """Implements LunListener."""
        self.metrics.retried()

    def tick(self) -> None:
        """Implements LunListener: what waits for a range, or for another operation to compare the
        LUN, looks again, and checks its deadline. Who does that may have far more time."""
        self.ranges.changed()
        self.identity.tick()
        self._watch.tick()

    def unflushed(self) -> bool:
        """Implements LunListener."""
        return self.durability.unflushed

    def before_logout(self) -> Operation[None]:
        """Implements LunListener."""
        yield from ()

    def listen_resuming(self, fresh: CommandSession) -> None:
        """Follow the LUN on ``fresh``, whose connection is to take the place of the session's. Call
        it before the first command on ``fresh``."""
        self._resuming.fresh = fresh
        self._resuming.certain = self._resuming.reserved = False
        fresh.listeners.add(self.lun, self._resuming)
        if self.inventory is not None:
            fresh.listeners.add(self.lun, self.inventory)

    def renew(self, info: LunInfo, geometry: Geometry) -> None:
        """Take over what the LUN, found again on a new connection, says of itself. The caller has
        checked that it is the same LUN, with blocks of the same size. What it has refused before is
        not believed again."""
        known = self.geometry
        geometry.ndob, geometry.prefetch = known.ndob, known.prefetch
        mine = self.info
        if known.tells_cache and mine.write_cache:
            geometry.tells_cache = True  # it has said that it has one
        fresh = replace(info, name=mine.name, url=mine.url, paths=mine.paths)
        self.geometry = geometry
        self.info = self.refusals.narrow(fresh, geometry)
        self._take_limit()
        self._choose_cdbs()
        if self.info.write_cache:
            self.durability.turn_volatile()
        self._take_size(info.size)

    def _take_size(self, told: int) -> None:
        size, most = told, self.block << 32
        if told > most and self._is_short:
            self.refusals.lacks(
                refusals.FAR_BLOCKS,
                f"the LUN has grown to {told} bytes, of which READ(10) and WRITE(10) reach {most}: "
                "no more is used, as it has refused READ(16) or WRITE(16)",
            )
            size = most
        self.sizing.told = told
        self.sizing.take(size)
        self.size = size
        self.info = replace(self.info, size=size)

    def replay(self, session: CommandSession) -> Operation[None]:
        """Send again, on the fresh ``session``, all that was acknowledged and not flushed, where
        the target has, or may have, lost its cache; where the LUN is shared, compare it. Nothing is
        in flight when it ends.

        Raises TransportError, CommandTimeout or ScsiError (busy): the caller may try again. What
        the LUN refuses for good is lost, and the next flush fails.
        """
        self.durability.reinstated(self.session.suspended_at)
        yield from replay(
            session,
            self.lun,
            self.info,
            self.geometry,
            self.durability,
            self.pack_write,
            self.pack_read,
        )

    def missed(self) -> None:
        """The session was reinstated while the target had no such LUN, so nothing could be sent
        again. If it comes back, ``reassure`` has the connection replaced, for ``replay``."""
        self.durability.reinstated(self.session.suspended_at)

    def know_size(self, deadline: float) -> Operation[None]:
        """Have the LUN compared if it is in doubt. Send READ CAPACITY if the capacity may have
        changed, and REPORT LUNS if the target has reported that its list changed."""
        if self.inventory is not None and self.inventory.changed:
            yield from self.inventory.look_again(self.session, deadline)
        if self.identity.in_doubt:
            yield from self.identity.reassure(deadline)
        if self.sizing.changed:
            yield from self.refresh(deadline)

    def refresh(self, deadline: float = 0.0) -> Operation[int]:
        """Send READ CAPACITY; sets ``size`` (bytes) and returns it. A LUN of another size may be
        another LUN: then it is compared. Raises as ``reassure``, too."""
        deadline = deadline or self.deadline()
        if self.identity.in_doubt:
            yield from self.identity.reassure(deadline)
        size = yield from self.sizing.ask(
            self.session, self.lun, self.block, self.geometry.long_cdbs, deadline
        )
        if size != self.sizing.told:
            self.identity.suspect(f"it had {self.sizing.told} bytes, and has {size}")
        if self.identity.in_doubt:
            yield from self.identity.reassure(deadline)
        return self.size

    # -- checks -----------------------------------------------------------------------------------

    def check(self, offset: int, length: int) -> None:
        """Raises OutOfRange unless the range lies on the disk."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise OutOfRange(
                f"{self.info.name}: {length} bytes at offset {offset} leave the disk, "
                f"which has {self.sizing.words()}"
            )

    def check_write(self, offset: int, length: int) -> None:
        """Raises WriteProtected or OutOfRange."""
        if self.info.read_only:
            raise WriteProtected(
                f"{self.info.name}: the LUN is read-only; allow writing at the target"
            )
        self.check(offset, length)

    # -- the common case: one command for whole blocks ------------------------------------------

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        """Send the one READ that fills ``buffer``, if one READ can and a slot is free.

        Returns its slot: wait for ``waiter``, then call ``ended``. None: nothing was done; run
        ``read``.
        """
        if not _is_flat(buffer, True):
            return None
        length = len(buffer)
        block = self.block
        if (
            not 0 < length <= self.max_transfer
            or offset % block
            or length % block
            or not 0 <= offset <= self.size - length
        ):
            return None
        slot = self.queue.take_now()
        if slot is None:
            return None
        slot.waiter = waiter
        slot.lun = self.lun  # as ``fill_read``, without its call
        slot.attribute = SIMPLE
        slot.direction = READ
        slot.data = buffer
        slot.length = length
        self.pack_read(slot.cdb, offset // block, length // block, 0)
        self._epochs[slot.index] = self.durability.epoch
        waiter.pending = 1
        self.queue.submit(slot)
        return slot

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        """As ``begin_read``, for a write without FUA. Then call ``ended_write``, or run
        ``write``."""
        if not _is_flat(buffer, False):
            return None
        length = len(buffer)
        block = self.block
        durability = self.durability
        journal = durability.journal
        if (
            not 0 < length <= self._most_written
            or offset % block
            or length % block
            or not 0 <= offset <= self.size - length
            or self.info.read_only
            or (journal is not None and not journal.has_room(length))
        ):
            return None
        slot = self.queue.take_now()
        if slot is None:
            return None
        slot.waiter = waiter  # as in ``begin_read``
        lba = offset // block
        blocks = length // block
        if not self.ranges.claim(slot, lba, lba + blocks - 1, None):
            self.queue.release(slot)
            return None
        fill_write(slot, self.lun, buffer)
        self.pack_write(slot.cdb, lba, blocks, 0)
        journal = durability.journal  # after the claim: see ``disk.durability.promise``
        if journal is not None:
            journal.add(slot, buffer)
        self._epochs[slot.index] = durability.losses.count
        waiter.pending = 1
        self.queue.submit(slot)
        return slot

    def ended(self, slot: Command) -> Rest | None:
        """Give the slot of a read back. Returns None: done; else ``read`` may try again, until the
        deadline. Raises the command's error where another try would be of no use."""
        durability = self.durability
        if (
            slot.error is None
            and not slot.status
            and not slot.residual
            and not slot.response
            and not durability.replay_needed  # as ``stale``, without its call
            and self._epochs[slot.index] == durability.epoch
        ):
            self.queue.release(slot)
            return None
        return self._failed(slot, durability.stale(self._epochs[slot.index]))

    def ended_write(self, slot: Command) -> Rest | None:
        """As ``ended``, for a write. A write that succeeded is not durable yet. It is done again
        where a loss was heard of meanwhile (see ``_wholly``). Also raises IserblkError where the
        journal has no memory for it."""
        durability = self.durability
        durability.wrote()
        try:
            if (
                slot.error is None
                and not slot.status
                and not slot.residual
                and not slot.response
            ):  # fmt: skip
                journal = durability.journal
                if journal is not None:
                    try:
                        journal.keep(slot)
                    except (MemoryError, OSError):
                        self.queue.release(slot)
                        raise self._not_kept() from None
                rest = self._rest(slot) if self._may_be_lost(slot) else None
                self.queue.release(slot)
                return rest
            if durability.journal is not None:
                durability.journal.ended(slot)
            return self._failed(slot, False)
        finally:
            self.ranges.changed()

    def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
        """Before ``ended_write``: have the journal keep ``buffer``, in which the data of the write
        is, in place of a copy. Returns another buffer of the same size in its place. None: the
        caller still has ``buffer``."""
        durability = self.durability
        journal = durability.journal
        if journal is None or self._may_be_lost(slot):
            return None
        durability.wrote()
        return journal.take_over(slot, buffer)

    def _may_be_lost(self, slot: Command) -> bool:
        """Whether a loss was heard of since the write of ``slot`` began."""
        return self._epochs[slot.index] != self.durability.losses.count

    def _not_kept(self) -> IserblkError:
        return IserblkError(
            f"{self.info.name}: there is no memory to keep a write until the next flush; a smaller"
            " journal= flushes earlier"
        )

    def _failed(self, slot: Command, again: bool) -> Rest | None:
        problem = failure(slot, self.info.name)
        rest, late = self._rest(slot), monotonic() >= slot.deadline
        self.queue.release(slot)
        if problem is not None:
            if no_room(problem):
                self.queue.shrink()
            # What was refused, shorter commands may do.
            refused = is_refusal(problem)
            if (retry_delay(problem, ONCE) is None and not refused) or late:
                raise problem
            self.metrics.retried()
        return rest if again or problem is not None else None

    def _rest(self, slot: Command) -> Rest:
        """With the deadline that the request had at its begin. That of the slot may be later, where
        this process did not run, which counts for the request anyway (``Session.extended``); and
        none where the command is being aborted, for a request that then began anew."""
        return Rest(slot.begun, slot.begun / 1e9 + self.session.io_timeout)

    def dropped(self, slot: Command) -> None:
        """Give back the slot of a command whose outcome no caller waits for any more."""
        if slot.last >= slot.first:
            with contextlib.suppress(MemoryError, OSError):
                self.note_ended(slot)  # what is not acknowledged need not be kept
        self.queue.release(slot)
        self.ranges.changed()

    def doubt_unheard(self, slot: Command, what: str) -> None:
        """Before the slot of a command that waits for the medium is given back, once it was sent:
        where its status was not learned, it may have been the only report of a loss. ``what`` it
        is, for the log."""
        problem = failure(slot, self.info.name) if slot.state < QUEUED else None
        if slot.state >= QUEUED or (problem is not None and is_unheard(problem)):
            tell = problem is None or not _is_foreign(problem)
            self.durability.doubt(slot, f"may have failed {what}", tell)

    def note_ended(self, slot: Command, durable: bool = False, copy: bool = True) -> int:
        """Note that the command of ``slot`` may have changed the LUN. ``durable``: what it changed
        needs no flush. ``copy`` and the result: see ``Journal.ended``."""
        if not durable:
            self.durability.wrote()
        journal = self.durability.journal
        if journal is None or slot.state >= QUEUED:
            return 0
        return journal.ended(slot, copy=copy)

    # -- reading ----------------------------------------------------------------------------------

    def read(self, buffer: memoryview, offset: int, deadline: float = 0.0) -> Operation[None]:
        """Fill ``buffer``; any alignment. ``deadline``: of all its commands; 0: the time for one
        request, from now."""
        check_buffer(buffer)
        if buffer.readonly:
            raise LocalProtocolError("a buffer to read into must be writable")
        deadline = deadline or self.deadline()
        yield from self.know_size(deadline)
        self.check(offset, len(buffer))
        pieces, edges = self._cut(buffer, offset)
        bounces = [memoryview(bytearray(self.block)) for _ in edges]
        pieces += [(edge[0], bounce) for edge, bounce in zip(edges, bounces, strict=True)]
        if pieces:
            yield from self._transfer(_Reading(self, deadline), pieces)
        for (_, start, part), bounce in zip(edges, bounces, strict=True):
            part[:] = bounce[start : start + len(part)]

    def _cut(
        self, buffer: memoryview, offset: int
    ) -> tuple[list[Piece], list[tuple[int, int, memoryview]]]:
        """Cut the request into whole blocks, in pieces of at most ``max_transfer`` bytes, and
        edges: (block, offset in it, part of the buffer)."""
        block = self.block
        end = offset + len(buffer)
        edges: list[tuple[int, int, memoryview]] = []
        position = offset
        if position % block and position < end:
            stop = min(end, position - position % block + block)
            edges.append((position // block, position % block, buffer[: stop - offset]))
            position = stop
        whole_end = end - end % block
        pieces: list[Piece] = []
        step = self.max_transfer
        while position < whole_end:
            stop = min(whole_end, position + step)
            pieces.append((position // block, buffer[position - offset : stop - offset]))
            position = stop
        if position < end:
            edges.append((position // block, 0, buffer[position - offset :]))
        return pieces, edges

    def _transfer(self, work: _Asking[Piece], pieces: list[Piece]) -> Operation[None]:
        """Run ``work``. What the LUN refuses is sent in another form: with CDBs of 10 bytes,
        without FUA (``work.durable`` is False then), or in shorter pieces, down to one block. The
        form that was taken is remembered."""
        most = self.max_transfer
        shorter = dropped_fua = False
        while True:
            yield from run(work, pieces)
            if not work.refused:
                break
            refused, work.refused = work.refused, []
            pieces = [piece for piece, _ in refused]
            error = _decisive(refused)
            longest = max(len(view) for _, view in pieces)
            if is_unknown(error):
                if not self._go_short(error):
                    raise error
            elif work.durable:
                work.durable, dropped_fua = False, True
            elif longest <= self.block:
                raise error
            else:
                most = longest // 2 - longest // 2 % self.block
                pieces = [
                    part for lba, view in pieces for part in _split(lba, view, most, self.block)
                ]
                shorter = True
        if shorter:
            self.refusals.limit_transfer(most)
        elif dropped_fua:
            self.refusals.lacks(
                refusals.FUA,
                "the LUN says that it knows FUA, and refuses it; flushes take its place",
            )
        if shorter or dropped_fua:
            self.narrow()

    def _go_short(self, error: IserblkError) -> bool:
        """Send READ(10) and WRITE(10) from now on, if they reach all blocks and were not used
        before."""
        if self._is_short or self.size > self.block << 32:
            return False
        self.refusals.lacks(
            refusals.LONG_TRANSFERS,
            f"the LUN refuses READ(16) or WRITE(16) ({words(error)}); READ(10) and WRITE(10) are "
            "sent from now on",
        )
        self._choose_cdbs()
        return True

    # -- writing ----------------------------------------------------------------------------------

    def _begin_change(
        self, offset: int, length: int, data: int, deadline: float
    ) -> Operation[None]:
        """Before a range is changed with ``data`` bytes of data: check it, as ``check_write``, and
        flush first when the journal is full."""
        yield from self.know_size(deadline)
        self.check_write(offset, length)
        yield from self._make_room(data, deadline)

    def write(
        self, buffer: memoryview, offset: int, fua: bool = False, deadline: float = 0.0
    ) -> Operation[None]:
        """Write ``buffer``; any alignment. Blocks that are covered in part are read, changed and
        written back. ``deadline``: as in ``read``. Raises WritesLost where ``fua`` cannot be
        kept."""
        deadline = deadline or self.deadline()
        if not fua:
            return self._wholly(lambda: self._write(buffer, offset, False, deadline))
        return self._durably(lambda: self._write(buffer, offset, True, deadline))

    def _wholly(self, change: Callable[[], Operation[None]]) -> Operation[None]:
        """Carry out a change, and again where a loss was heard of meanwhile: it may have been
        that of commands of the change that the target had carried out, whether their answers came
        before the report of the loss or behind it. A flush may tell of that loss before the change
        ends; a later one would succeed, and nobody would take the change for lost."""
        losses = self.durability.losses
        while True:
            before = losses.count
            yield from change()
            if losses.count == before:
                return

    def _durably(self, change: Callable[[], Operation[None]]) -> Operation[None]:
        """Carry out a change that ends with a flush, and once more where a loss was heard of
        meanwhile, which may have been that of this change. Losses of other changes are no fault of
        this one: the flushes of clients tell of them."""
        losses = self.durability.losses
        for _ in range(2):
            before = losses.count
            yield from change()
            if losses.count == before:
                return
        raise WritesLost(
            f"{self.info.name}: the target has lost this write, twice; its log may say why"
        )

    def _write(
        self, buffer: memoryview, offset: int, fua: bool, deadline: float
    ) -> Operation[None]:
        check_buffer(buffer)
        deadline = deadline or self.deadline()
        yield from self._begin_change(offset, len(buffer), len(buffer), deadline)
        pieces, edges = self._cut(buffer, offset)
        journal = self.durability.journal
        use_fua = fua and self.info.fua and self.info.write_cache
        if journal is not None and journal.active:
            # A replay puts an older write over this one in the target's cache. If the cache is lost
            # once more, the older one may be all that is left: so a flush covers both instead.
            use_fua = False
        work = _Writing(self, deadline, use_fua)
        try:
            if pieces:
                yield from self._transfer(work, pieces)
            work.claims = False
            for lba, start, part in edges:
                yield from self._modify(lba, start, part, work)
            journal = self.durability.journal  # the cache may have turned volatile meanwhile
            # A write larger than the journal stays in the caller's buffer, and is flushed now.
            if (fua and not work.durable) or (journal is not None and len(buffer) > journal.limit):
                yield from self.flush(deadline, NO_CLIENT)
            if journal is not None:
                try:
                    journal.settle(work.kept)
                except (MemoryError, OSError):
                    raise self._not_kept() from None
        except BaseException:
            # It was not acknowledged: it need not be kept, and could not always be.
            journal = self.durability.journal
            if journal is not None:
                journal.forget(work.kept)
            raise

    def _modify(self, lba: int, start: int, part: memoryview, work: _Writing) -> Operation[None]:
        """Change part of one block, under its range lock, by ``work``, which makes no claims."""
        waiter = self.session.new_waiter()
        while not self.ranges.lock(lba, lba, waiter):
            while waiter.pending:
                yield waiter
            check_time(self.session, work.deadline, self.info.name)
        try:
            while not self.ranges.quiet(lba, lba, waiter):
                while waiter.pending:
                    yield waiter
                check_time(self.session, work.deadline, self.info.name)
            content = memoryview(bytearray(self.block))
            yield from self._read_back(lba, content, work.deadline)
            content[start : start + len(part)] = part
            yield from self._transfer(work, [(lba, content)])
        finally:
            self.ranges.unlock(lba, lba)

    def _read_back(self, lba: int, content: memoryview, deadline: float) -> Operation[None]:
        """Read a block of which a part is to be changed. Where the target has lost its cache, the
        report of that may be on its way, on another connection or with the end of a flush, or may
        be lost itself: it is heard first, or what is in doubt sent again, and the block read again.
        Else the write, sent behind the replay, would bring back what the block had been before.

        A target may show what a block was before a write that it could not keep, and say so with
        the next flush. So where the block is not as the journal has it, a flush comes first."""
        durability = self.durability
        failed = False
        while True:
            self._renew()
            work = _ReadingBack(self, deadline)
            epoch = durability.epoch
            yield from self._transfer(work, [(lba, content)])
            yield from self._hear_out(durability.flushes_under_way(), work.place, deadline)
            if durability.stale(epoch) or durability.doubted:
                continue
            if durability.shows(lba, content):
                return
            try:
                yield from self.flush(deadline, NO_CLIENT)
            except IserblkError:
                # The block is as it was written last, once the journal has been sent again.
                if failed or not (durability.replay_needed or durability.doubted):
                    raise
                failed = True

    def _renew(self) -> None:
        """Have what is in doubt sent again. (Not while there is no connection: the next one may
        have been prepared already, and nothing would cut it.)"""
        durability = self.durability
        if durability.doubted and not self.session.suspended and durability.renew():
            self.session.disconnect()

    def flush(self, deadline: float = 0.0, client: FlushClient | None = None) -> Operation[None]:
        """Send SYNCHRONIZE CACHE for the whole LUN, where it has a write cache. Raises WritesLost
        where ``client`` was not told of each loss; the flush was carried out then. The caller tells
        ``client``. None: ``self.client``, which is told at once. NO_CLIENT: no client has asked for
        this flush."""
        own = client is None
        on_behalf = self.client if client is None else client
        deadline = deadline or self.deadline()
        try:
            yield from self._flush(on_behalf, deadline)
        except IserblkError as error:
            if own:
                on_behalf.told(error.losses)
            raise

    def _flush(self, client: FlushClient, deadline: float) -> Operation[None]:
        durability = self.durability
        losses = durability.losses
        tried = ONCE
        while True:
            self._renew()
            token = durability.begin_flush()
            error = yield from self._flush_once(token, deadline)
            if error is not None:
                lost = losses.count != token.losses
                if lost:  # so the error tells of a loss
                    error.losses = losses.count
                # What allows a retry (ABORTED COMMAND) is sent again, behind what it was to cover.
                # A loss is told by the error; NO_CLIENT is told of none, and a change of which the
                # flush is a part is carried out again behind it.
                pause = retry_delay(error, tried)
                tells = lost and client is not NO_CLIENT and not _is_foreign(error)
                if tells or pause is None or not _proves_nothing(error):
                    raise error
                tried = tried.after(error)
                yield max(pause, AGAIN_S)
                check_time(self.session, deadline, self.info.name)
                continue
            outcome = durability.end_flush(token, True)
            if outcome is Flushed.AGAIN:
                yield AGAIN_S  # until the loss of the connection is found; then a new one is made
                check_time(self.session, deadline, self.info.name)
                continue
            if client.owed or (outcome is Flushed.LOST and client is not NO_CLIENT):
                told = WritesLost(
                    f"{self.info.name}: writes since the last flush were lost at the target; "
                    "its log may say why"
                )
                told.losses = losses.count
                raise told
            # A program that only reads, writes and flushes would not ask for the size before it
            # reaches the old end. The flush has succeeded, whatever the answer is.
            if self.sizing.changed:
                with contextlib.suppress(IserblkError):
                    yield from self.know_size(deadline)
            return

    def _flush_once(self, token: FlushToken, deadline: float) -> Operation[IserblkError | None]:
        """Returns what has failed: then the flush has ended. Otherwise the caller ends it."""
        try:
            # (A LUN that is read-only now may have unflushed writes from before.)
            if self.durability.volatile and (token.needed or not self.info.read_only):
                yield from self._synchronize(token, deadline)
        except BaseException as error:
            self.durability.end_flush(token, False)
            if isinstance(error, IserblkError):
                return error
            raise
        return None

    def _synchronize(self, token: FlushToken, deadline: float) -> Operation[None]:
        """Send SYNCHRONIZE CACHE for the whole LUN; of 10 bytes where the LUN does not know that of
        16. Where it knows none, and does not say that it has a write cache, it counts as a LUN
        without one."""
        forms = [cdb.synchronize_cache10]
        if self.geometry.long_cdbs and not self.refusals.refused(refusals.LONG_FLUSH):
            forms.insert(0, cdb.synchronize_cache16)
        for pack in forms:
            try:
                yield from self._await_flush(token, pack(0, 0), deadline)
            except ScsiError as error:
                if not is_unknown(error):
                    raise
                problem = error
            else:
                if pack is not forms[0]:
                    self.refusals.lacks(
                        refusals.LONG_FLUSH,
                        "the LUN does not know SYNCHRONIZE CACHE(16); "
                        "SYNCHRONIZE CACHE(10) is sent from now on",
                    )
                return
        if self.geometry.tells_cache:
            raise ScsiError(
                f"{self.info.name}: the LUN says that it has a write cache, and does not know "
                f"SYNCHRONIZE CACHE ({words(problem)}): nothing that was written is safe; turn its "
                "write cache off (WCE)",
                problem.status,
                problem.sense,
            )
        self.refusals.lacks(
            refusals.FLUSH,
            "the LUN does not know SYNCHRONIZE CACHE, and has no caching page that tells of a "
            "write cache: it counts as a LUN without one",
        )
        self.narrow()
        self.durability.turn_write_through()

    def _await_flush(self, token: FlushToken, block: bytes, deadline: float) -> Operation[None]:
        """Send SYNCHRONIZE CACHE. GOOD counts when all has been heard that the target may have said
        before it: what it has told with the end of an older command, of one on another connection,
        or of another flush, may be still under way."""
        durability = self.durability
        work = _Synchronizing(self, deadline)
        try:
            yield from run(work, [block])
        except BaseException as error:
            if work.unheard:
                what = f"({error})" if isinstance(error, IserblkError) else "that was given up"
                tell = not _is_foreign(error)
                durability.doubt(None, f"may have failed a flush {what}", tell)
            raise
        yield from self._hear_out(durability.answered(token), work.place, deadline)

    def _hear_out(
        self, flushes: frozenset[int], place: Place | None, deadline: float
    ) -> Operation[None]:
        """Wait until the target has answered ``flushes``, and what it may have answered before the
        command at ``place``."""
        commands, pause = self._older(place), _SOON_S
        while self.durability.unanswered(flushes) or _under_way(commands):
            yield pause
            pause = min(2 * pause, AGAIN_S)
            check_time(self.session, deadline, self.info.name)

    def _older(self, place: Place | None) -> list[tuple[Command, int]]:
        """Commands, with their tags, that the target may have answered before the one at ``place``,
        and whose answers may come behind its answer. None: that one may have been anywhere."""
        return [
            (slot, slot.tag)
            for slot in self.queue.tasks
            if (slot.state >= SENT or _is_not_looked_at(slot))
            and slot.lun == self.lun
            and (place is None or place.may_overtake(slot))
        ]

    def _make_room(self, length: int, deadline: float) -> Operation[None]:
        """Flush when the journal has no room for a write of ``length`` bytes. One operation
        flushes, the others wait for it; none holds a slot or a range meanwhile. Nor does one that
        waits because changes are paused."""
        yield from self.wait_for_pause(deadline)
        journal = self.durability.journal
        while journal is not None and journal.full(length):
            waiter = self.session.new_waiter()
            check_time(self.session, deadline, self.info.name)
            making_room = self.durability.making_room
            if making_room.begin(waiter):
                try:
                    yield from self.flush(deadline, NO_CLIENT)
                finally:
                    making_room.end()
            while waiter.pending:
                yield waiter

    # -- what moves no data -----------------------------------------------------------------------

    def trim(
        self, offset: int, length: int, fua: bool = False, patient: bool = False
    ) -> Operation[None]:
        """Send UNMAP for the whole granules inside the range. Raises NotSupported where the LUN has
        none. ``fua``: as in ``write``."""
        clock = _Clock(self, patient)
        if not fua:
            return self._trim(offset, length, clock)
        return self._durably(lambda: self._flushed(self._trim(offset, length, clock), clock))

    def _flushed(self, change: Operation[None], clock: _Clock) -> Operation[None]:
        yield from change
        yield from self.flush(clock.deadline, NO_CLIENT)

    def _trim(self, offset: int, length: int, clock: _Clock) -> Operation[None]:
        yield from self._begin_change(offset, length, 0, clock.deadline)
        if not self.info.can_trim:
            raise NotSupported(f"{self.info.name}: the LUN cannot unmap; zero the range instead")

        first = -(-offset // self.block)
        form = _Unmapping(self)
        last = (offset + length) // self.block
        yield from self._in_batches(first, last - first, form, clock)
        if form.over:
            raise NotSupported(
                f"{self.info.name}: the LUN says that it can unmap, and refuses to; zero the range "
                f"instead ({form.why})"
            )

    def zero(
        self,
        offset: int,
        length: int,
        may_trim: bool,
        fast: bool,
        fua: bool,
        patient: bool = False,
    ) -> Operation[None]:
        """Send WRITE SAME of zeroes for whole blocks, and write zeroes for the edges; write zeroes
        for all where the LUN has no WRITE SAME. Raises NotSupported then with ``fast``. ``fua``: as
        in ``write``."""
        clock = _Clock(self, patient)
        if not fua:
            return self._wholly(lambda: self._zero(offset, length, may_trim, fast, clock))
        return self._durably(
            lambda: self._flushed(self._zero(offset, length, may_trim, fast, clock), clock)
        )

    def _zero(
        self, offset: int, length: int, may_trim: bool, fast: bool, clock: _Clock
    ) -> Operation[None]:
        yield from self._begin_change(offset, length, 0, clock.deadline)
        if fast and not self.info.can_zero:
            raise NotSupported(
                f"{self.info.name}: the LUN has no WRITE SAME; write zeroes instead"
            )  # fmt: skip
        first = -(-offset // self.block)
        last = (offset + length) // self.block
        if self.info.can_zero and first < last:
            form = _Zeroing(self, may_trim and self.info.zero_by_unmap)
            left = yield from self._in_batches(first, last - first, form, clock)
            if left and fast:
                raise NotSupported(
                    f"{self.info.name}: the LUN has no WRITE SAME, whatever it says; write zeroes "
                    "instead"
                )
            start, stop = first * self.block, last * self.block
            yield from self._write_zeroes(offset, start - offset, clock)
            for lba, blocks in left:
                yield from self._write_zeroes(lba * self.block, blocks * self.block, clock)
            yield from self._write_zeroes(stop, offset + length - stop, clock)
        else:
            yield from self._write_zeroes(offset, length, clock)

    def _write_zeroes(self, offset: int, length: int, clock: _Clock) -> Operation[None]:
        end = offset + length
        while offset < end:
            step = min(len(ZEROES), end - offset)
            yield from self.write(ZEROES[:step], offset, deadline=clock.deadline)
            offset += step

    def _in_batches(
        self, first: int, blocks: int, form: _Form, clock: _Clock
    ) -> Operation[list[Range]]:
        """Send the range in commands of ``form``, a few at once. How many is found out: all
        commands of a batch have one deadline, so a batch is no larger than what the LUN has time
        for. The first batch is one command, as it may show what the LUN cannot do. Returns what is
        left where it turns out that the LUN takes no such command."""
        most = 1
        todo = [(first, blocks)]  # the last is next
        while todo and not form.over:
            first, blocks = todo.pop()
            ranges = form.cut(first, blocks)
            while batch := list(islice(ranges, most)):
                yield from self._make_room(0, clock.deadline)  # the journal keeps each command
                began = monotonic()
                refused = yield from form.send(batch, clock.deadline)
                if refused:
                    done = batch[-1][0] + batch[-1][1] - first
                    if done < blocks:
                        todo.append((first + done, blocks - done))
                    todo = _joined([*reversed(todo), *refused])[::-1]
                    most = 1
                    break
                took = monotonic() - began
                if took < self.session.command_timeout / 8:  # twice as many leave three quarters
                    most = min(2 * most, PARALLEL)
                else:
                    most = max(most // 2, 1)
        return todo

    def exclusive(
        self, batch: Batch, deadline: float, form: _Form
    ) -> Operation[list[tuple[Range, IserblkError]]]:
        """Send, all at once and under the range lock, the commands of ``form`` for these ranges.
        Returns those that were refused."""
        waiter = self.session.new_waiter()
        first = min(lba for lba, _ in batch)
        last = max(lba + blocks - 1 for lba, blocks in batch)
        while not self.ranges.lock(first, last, waiter):
            while waiter.pending:
                yield waiter
            check_time(self.session, deadline, self.info.name)
        work = _Exclusive(self, deadline, form)
        try:
            yield from run(work, batch)
        finally:
            self.ranges.unlock(first, last)
        return work.refused

    def extents(self, offset: int, length: int) -> Operation[list[Extent]]:
        """Send GET LBA STATUS; returns what one answer has. Where the LUN refuses to tell, or tells
        what cannot be, the range counts as data."""
        deadline = self.deadline()
        yield from self.know_size(deadline)
        self.check(offset, length)
        whole: list[Extent] = [(offset, length, EXTENT_DATA)]
        lba = offset // self.block
        if not self.info.can_extents or not length or not self.refusals.tells_status_of(lba):
            return whole
        answer = memoryview(bytearray(self.geometry.lba_status_length))
        while True:
            epoch = self.durability.epoch
            problem: ScsiError | None = None
            moved = 0
            try:
                moved = yield from command(
                    self.session,
                    self.lun,
                    cdb.get_lba_status16(lba, len(answer)),
                    self.info.name,
                    data_in=answer,
                    short_ok=True,
                    deadline=deadline,
                )
            except ScsiError as error:
                problem = error
            if problem is not None:
                if isinstance(problem, OutOfRange):
                    # It is in range, unless the LUN has shrunk: that may count in other blocks.
                    if offset + length > (yield from self.refresh(deadline)):
                        raise problem
                elif not is_refusal(problem):
                    raise problem
                self.refusals.limit_status(lba, problem)
                return whole
            if not self.durability.stale(epoch):
                break
            yield AGAIN_S  # there may be holes where lost writes are about to be sent again
            check_time(self.session, deadline, self.info.name)
            yield from self.know_size(deadline)  # and it may have been another LUN's
        geometry, blocks = self.geometry, self.sizing.told // self.block
        try:
            return geometry.extents_untrusted(answer[:moved], offset, length, blocks)
        except RemoteProtocolError as error:
            faulty = str(error)
        yield from self.refresh(deadline)
        if self.sizing.told // self.block <= blocks:
            # (Where it has grown, the LUN is perhaps right.)
            self.refusals.lacks(
                refusals.LBA_STATUS, f"{faulty}; all of the LUN counts as data from now on"
            )
            self.narrow()
        return whole

    def cache(self, offset: int, length: int) -> Operation[None]:
        """Send PRE-FETCH with IMMED; a target that cannot do it is no error."""
        deadline = self.deadline()
        yield from self.know_size(deadline)
        self.check(offset, length)
        if not length or not self.geometry.prefetch:
            return
        first = offset // self.block
        blocks = -(-(offset + length) // self.block) - first
        try:
            yield from command(
                self.session,
                self.lun,
                cdb.pre_fetch16(first, min(blocks, 0xFFFFFFFF)),
                self.info.name,
                deadline=deadline,
            )
        except ScsiError as error:
            log.debug("%s: no read-ahead: %s", self.info.name, error)
            self.geometry.prefetch = False
