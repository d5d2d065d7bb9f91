"""Checks what a disk has shown against all that was asked of it. Knows nothing of iserblk.

Each change of blocks has a version of its own, which its content tells; a change to zeroes has
version 0. A change is *done* when its success was told, and *bound* when a flush that began after
that has succeeded, or when it was written with FUA. The rules:

- A read returns, for each block, a change that began before the read ended. No change that is done
  lies between them: none that began after that one had ended, and was done before the read began.
- A block that a read has shown stays: a later read shows nothing older, as long as no connection
  and no target is lost between them, and the target's kernel drops no page that it could not write.
- When the target loses its cache, and the client keeps nothing, changes that are not bound may be
  lost. If one is, the first flush that begins after that fails, and tells of it. A client that has
  only lost a connection, while changes were not bound, cannot know better, and may tell of it, too.
- Of those who flush (``Hearer``) each is told. One that begins later is told of what nobody was
  told of; one whose answer was lost is told again. One that may be another, which comes again
  before its end is noticed, is told of what that one was not told of.
- What a target drops unnoticed, and tells of with the next flush, a client cannot know before: its
  reads show what may be left, also those of which a part may have been read meanwhile.
- Where a client has several connections, the report of a loss in place may come over one of them
  behind the answer to a read over another: until the client has heard of the loss, its reads show
  what may be left of what it has written.
- A read by another host shows what the client itself may read, or what it may read once the target
  has lost its cache: until the client has written it again.
- When target and client have lost their memory, a block has a change that nothing bound has
  followed, and keeps it.
"""

from __future__ import annotations

import math
import struct
from typing import Final

_HEAD: Final = struct.Struct(">QQ")


class Wrong(AssertionError):
    """The disk has shown what it must not."""


def content(version: int, block: int, size: int) -> bytes:
    return _HEAD.pack(version, block) * (size // _HEAD.size) if version else bytes(size)


class Change:
    """Blocks ``at`` to ``at + count``. ``keeps``: it need not do anything, as a trim."""

    __slots__ = ("at", "begun", "count", "ended", "keeps", "version")

    def __init__(self, version: int, at: int, count: int, begun: float, keeps: bool) -> None:
        self.version = version
        self.at = at
        self.count = count
        self.keeps = keeps
        self.begun = begun
        self.ended = math.inf


class _Entry:
    """A change that a block may have. ``hidden``: reads that begin later do not show it.
    ``gone``: it is not on the medium any more from then on."""

    __slots__ = ("change", "gone", "hidden")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.hidden = math.inf
        self.gone = math.inf


class Read:
    """``foreign``: by another host than the one whose history it is. ``loose``: a part of it may
    have been read when the target had lost what it had cached, and the client did not know."""

    __slots__ = ("at", "begun", "epoch", "foreign", "loose")

    def __init__(self, at: int, begun: float, epoch: int, foreign: bool, loose: bool) -> None:
        self.at = at
        self.begun = begun
        self.epoch = epoch
        self.foreign = foreign
        self.loose = loose


class Hearer:
    """Who flushes, and is told of losses. ``owed``: changes that are lost, of which it was not
    told; ``unheard``: those of them that a flush would have told of, whose answer was lost.
    ``perhaps``: a loss may be told: a connection was lost, with changes. ``told``: when it was,
    last. ``number``: later ones have greater ones. ``is_settled``: it is known to have begun."""

    __slots__ = ("is_settled", "number", "owed", "perhaps", "told", "unheard")

    def __init__(self, number: int) -> None:
        self.number = number
        self.owed: dict[Change, None] = {}
        self.unheard: dict[Change, None] = {}
        self.perhaps = False
        self.told = -math.inf
        self.is_settled = True


class History:
    """``size``: of a block. ``keeps``: the client writes again what the target has lost.
    ``hindered``: another host may not let it, or it leaves what that has written: what it is told
    of may be lost all the same.
    ``several``: the client has several connections.

    ``begin_…`` and ``end_…`` are called when a client asks, and is answered, with the time."""

    def __init__(
        self,
        blocks: int,
        size: int,
        keeps: bool = True,
        hindered: bool = False,
        several: bool = False,
    ) -> None:
        self.size = size
        self._keeps = keeps and not hindered
        self._may_keep = keeps and hindered
        self._several = several
        self._is_behind = False  # a report of a loss may be on its way
        self._is_unnoticed = False  # the target has a loss of which it tells with the next flush
        first = Change(0, 0, blocks, -math.inf, False)
        first.ended = -math.inf
        self._blocks = [[_Entry(first)] for _ in range(blocks)]
        self._seen: dict[int, tuple[Change, float, int]] = {}  # by block: when, and its epoch
        self._reads: dict[Read, None] = {}
        self._unbound: dict[Change, None] = {}  # done
        self._under_way: dict[Change, None] = {}
        self._epoch = 0
        self._next = 1
        self._struck = -math.inf  # when the target has lost its cache, last
        self._begun = 0  # hearers
        self.first = Hearer(0)
        self._hearers: dict[Hearer, None] = {self.first: None}
        self._untold: dict[Change, None] = {}  # lost, and nobody was told
        self._in_trouble = False
        self._left = False  # one has ended: others may be told of it, again
        self._debts: dict[Change, None] = {}  # that one has left: those who begin later are told
        self._debts_from = 0  # who has begun later, and is told, ends them
        self._unpromised: dict[Change, None] = {}  # done, and a flush behind them has failed
        self._line = -math.inf  # when one was lost, or made, last
        self._disturbed = -math.inf  # the same, or when a change ended that was under way then
        self._changed = -math.inf  # when a change ended that is not bound
        self._flushed = -math.inf  # when the last flush that has succeeded began
        self._bound_at = -math.inf  # when a flush that has bound changes ended
        self._died = -math.inf
        self.losses = 0  # that were told

    def candidates(self, block: int) -> int:
        """Changes that the block may have, and some that it cannot have any more."""
        return len(self._blocks[block])

    # -- changes ----------------------------------------------------------------------------------

    def begin_change(
        self, at: int, count: int, now: float, zeroes: bool = False, keeps: bool = False
    ) -> Change:
        version = 0
        if not zeroes:
            version = self._next
            self._next += 1
        change = Change(version, at, count, now, keeps)
        for block in range(at, at + count):
            self._blocks[block].append(_Entry(change))
        self._under_way[change] = None
        return change

    def data(self, change: Change) -> bytes:
        return b"".join(
            content(change.version, block, self.size)
            for block in range(change.at, change.at + change.count)
        )

    def end_change(self, change: Change, now: float, done: bool, fua: bool = False) -> None:
        if change not in self._under_way:
            return  # its client has died, and it has ended then
        change.ended = now
        del self._under_way[change]
        if not (done and fua):
            self._changed = now
        if change.begun <= self._line:
            self._disturbed = now  # a part of it may have been lost
            self._suspect()
        if not done or change.keeps:
            return
        if self._keeps or change.begun > self._struck:
            self._hide(change, now)
        if fua:
            self._bind(change, now)
            self._hide(change, now)
        else:
            self._unbound[change] = None

    def never(self, change: Change) -> None:
        """It was refused as a whole, and has ended: no read may show it."""
        for block in range(change.at, change.at + change.count):
            entries = self._blocks[block]
            entries[:] = [each for each in entries if each.change is not change]

    def _hide(self, change: Change, now: float) -> None:
        horizon = min(now, next(iter(self._reads)).begun) if self._reads else now
        for block in range(change.at, change.at + change.count):
            entries = self._blocks[block]
            for entry in entries:
                if entry.change.ended < change.begun and entry.hidden > now:
                    entry.hidden = now
            if len(entries) > 2:
                entries[:] = [each for each in entries if max(each.gone, each.hidden) >= horizon]

    def _bind(self, change: Change, now: float) -> None:
        for block in range(change.at, change.at + change.count):
            for entry in self._blocks[block]:
                if entry.change.ended < change.begun:
                    entry.gone = min(entry.gone, now)

    # -- reads ------------------------------------------------------------------------------------

    def begin_read(self, at: int, now: float, foreign: bool = False) -> Read:
        read = Read(at, now, self._epoch, foreign, self._is_behind)
        self._reads[read] = None
        return read

    def end_read(self, read: Read, data: bytes | None, now: float) -> None:
        """``data``: None when it has failed. Raises Wrong."""
        if read not in self._reads:
            return  # its client has died
        del self._reads[read]
        for index in range(0 if data is None else len(data) // self.size):
            assert data is not None
            part = data[index * self.size : (index + 1) * self.size]
            self._check(read, read.at + index, part, now)

    def _check(self, read: Read, block: int, part: bytes, now: float) -> None:
        version, place = _HEAD.unpack_from(part)
        if part != content(version, block, self.size):
            raise Wrong(
                f"block {block}: nobody has written {part[:16].hex()}… there"
                f" (version {version} of block {place}, in part)"
            )
        entries = self._blocks[block]
        loose = read.foreign or read.loose or self._is_behind
        fitting = [
            each
            for each in entries
            if each.change.version == version
            and (each.hidden >= read.begun or (loose and each.gone >= read.begun))
        ]
        if not fitting:
            legal = [
                each.change.version
                for each in entries
                if each.hidden >= read.begun or (loose and each.gone >= read.begun)
            ]
            raise Wrong(
                f"block {block}: version {version} in a read from {read.begun:.6f} to {now:.6f};"
                f" legal are {legal}"
            )
        if loose:
            return
        if version and read.epoch == self._epoch:
            change = fitting[0].change
            seen = self._seen.get(block)
            if (
                seen is not None
                and seen[2] == self._epoch
                and seen[1] < read.begun
                and seen[0].begun > change.ended
            ):
                raise Wrong(
                    f"block {block}: version {version}, and {seen[0].version}, which is newer,"
                    f" was read before"
                )
            self._seen[block] = change, now, self._epoch
        if read.begun >= self._died and all(each.change.begun < self._died for each in entries):
            entries[:] = [_Entry(fitting[0].change)]  # both have lost their memory: it stays

    def check_hole(self, at: int, count: int, begun: float) -> None:
        """The disk has said that these blocks have no data. Raises Wrong."""
        for block in range(at, at + count):
            if not any(
                each.change.version == 0
                and (each.hidden >= begun or (self._is_behind and each.gone >= begun))
                for each in self._blocks[block]
            ):
                raise Wrong(f"block {block}: is said to be a hole, and has data")

    # -- flushes ----------------------------------------------------------------------------------

    def begin_hearer(self, anew: bool = False) -> Hearer:
        """A new one, who need not be told of what another was told of. ``anew``: it may be any of
        the others, and is told of what that one was not told of; ``settle_hearer`` follows."""
        self._begun += 1
        hearer = Hearer(self._begun)
        hearer.owed = self._untold | self._debts
        hearer.perhaps = any(each.perhaps or each.owed for each in self._hearers)
        if anew:
            hearer.is_settled = False
            for each in self._owing():
                hearer.owed |= each.owed
                self._left = True
        self._hearers[hearer] = None
        return hearer

    def end_hearer(self, hearer: Hearer) -> None:
        """What it was not told of is left to others, who may be told again."""
        del self._hearers[hearer]
        if hearer.owed or hearer.perhaps:
            self._left = True
        debts = {
            each: None for each in hearer.owed if each in hearer.unheard or each not in self._untold
        }
        if debts and hearer.is_settled:  # (else it had no flush)
            self._debts |= debts
            self._debts_from = self._begun

    def settle_hearer(self, hearer: Hearer) -> None:
        """It has begun at some moment since ``begin_hearer``: what others were told of since then
        it need not be told of, but may be. To those who have ended since then it is a later one."""
        self._begun += 1
        hearer.number = self._begun
        still = self._untold | self._debts
        if not hearer.is_settled:
            for each in self._owing():
                still |= each.owed
        owed = {each: None for each in hearer.owed if each in still}
        hearer.perhaps = hearer.perhaps or len(owed) < len(hearer.owed)
        hearer.owed = owed
        hearer.is_settled = True

    def _owing(self) -> list[Hearer]:
        return [each for each in self._hearers if each.owed and each.is_settled]

    def leave(self) -> None:
        """One that was told may not have heard it, for all that the disk can know: it, and others,
        may be told again."""
        self._left = True

    def given_up(self) -> None:
        """A write with FUA, whose answer nobody has heard: it may have told of a loss."""
        self._suspect()

    def _suspect(self) -> None:
        for hearer in self._hearers:
            hearer.perhaps = True

    def end_flush(self, begun: float, now: float, hearer: Hearer | None = None) -> None:
        """One that began at ``begun`` has succeeded. Raises Wrong."""
        hearer = hearer or self.first
        covered = [each for each in self._unbound if each.ended <= begun]
        # (A flush before it may have told of it while it was under way.)
        if hearer.owed and begun > max(self._struck, hearer.told):
            raise Wrong(
                f"a flush has succeeded, and its client was not told that {len(hearer.owed)}"
                " changes may be lost"
            )
        self._flushed = max(self._flushed, begun)
        if begun > self._struck:
            # A flush waits for what is on its way.
            self._is_behind = self._is_unnoticed = False
        if begun > self._disturbed:
            hearer.perhaps = False
        if covered:
            self._bound_at = now
        for change in covered:
            del self._unbound[change]
            for each in self._hearers:
                each.owed.pop(change, None)
            self._untold.pop(change, None)
            self._debts.pop(change, None)
            self._bind(change, now)
            self._hide(change, now)  # it was not lost, or is written again

    def end_flush_with_loss(
        self,
        begun: float,
        now: float,
        failed: bool = False,
        hearer: Hearer | None = None,
        hears: bool = True,
    ) -> None:
        """One has failed, and told of a loss. ``failed``: the target has said that it could not
        write what it had cached. ``hears``: the answer has reached the client. Raises Wrong."""
        hearer = hearer or self.first
        # (One that a loss of a connection or of the cache met, and that began before another flush
        # had bound what both cover, cannot know better.)
        met = begun <= min(self._line, self._bound_at)
        may_tell = hearer.owed or hearer.perhaps or self._in_trouble or met or self._left
        may_tell = may_tell or self._may_keep
        if not failed and (self._keeps or not (may_tell or begun <= hearer.told)):
            raise Wrong("a flush tells of a loss, and nothing was lost")
        if hears:
            self.losses += 1
            hearer.told = now
            hearer.owed.clear()
            # (Where the cache was lost while it was under way, it may have told of an older loss;
            # the report of that one meets what is under way later.)
            hearer.perhaps = begun <= self._struck
            self._untold.clear()
            if hearer.number > self._debts_from:
                self._debts.clear()
        else:
            hearer.perhaps = True
            hearer.unheard |= hearer.owed
        for change in list(self._unbound):
            if change.begun <= self._struck or change.ended <= begun:
                # Nothing is promised of it any more; and who has been told is not told again, if it
                # should be lost only now.
                del self._unbound[change]
                self._unpromised[change] = None

    def is_quiet(self, since: float) -> bool:
        """Since then no connection, and no cache, was lost, and no command has ended with an error
        that has to be taken for a loss."""
        return not self._in_trouble and self._line < since

    def trouble(self) -> None:
        """From now on commands may end with errors, some of which a client without a journal has to
        take for losses."""
        self._in_trouble = True

    # -- losses -----------------------------------------------------------------------------------

    def disturbed(self, now: float) -> None:
        """A connection is lost, or made."""
        self._epoch += 1
        self._line = self._disturbed = now
        if self._unbound or self._under_way or self._changed >= self._flushed:
            self._suspect()

    def evicted(self) -> None:
        """The target shows some of what it has lost no longer: reads may show older data."""
        self._epoch += 1

    def heard(self) -> None:
        """The client has heard of all losses so far, or takes its cache for lost; but of what the
        target has dropped unnoticed, while the client wrote again what it keeps, it cannot know."""
        self._is_behind = self._is_unnoticed

    def struck(
        self,
        now: float,
        medium: bytes | bytearray,
        in_place: bool = False,
        unnoticed: bool = False,
    ) -> None:
        """The target has lost its cache; what it has still is ``medium``. ``in_place``: without a
        connection. ``unnoticed``: it tells of that with the next flush."""
        self.disturbed(now)
        self._struck = now
        # (What was unnoticed before is so until the client has heard of it.)
        self._is_behind = in_place and (self._several or unnoticed or self._is_behind)
        self._is_unnoticed = unnoticed
        if unnoticed:
            for read in self._reads:
                read.loose = True
        if self._keeps:
            return
        for change in self._unbound:
            # (What is there need not be told: a write with FUA may have been made durable by a
            # flush, which covers other changes, too.)
            if not self._may_keep and self._is_lost(change, medium):
                self._untold[change] = None
                for hearer in self._hearers:
                    hearer.owed[change] = None
        for change in (*self._unbound, *self._unpromised, *self._under_way):
            for block in range(change.at, change.at + change.count):
                for entry in self._blocks[block]:
                    if entry.gone == math.inf:
                        entry.hidden = math.inf
        self._unpromised.clear()

    def _is_lost(self, change: Change, medium: bytes | bytearray) -> bool:
        """Whether a block has nothing but older changes on the medium."""
        for block in range(change.at, change.at + change.count):
            version, _ = _HEAD.unpack_from(medium, block * self.size)
            if not any(
                each.change.version == version and each.change.ended >= change.begun
                for each in self._blocks[block]
            ):
                return True
        return False

    def died(self, now: float) -> None:
        """The client is gone, with all that it has kept; and the target has lost its cache."""
        self._epoch += 1
        self._died = self._struck = now
        self._is_behind = self._is_unnoticed = False
        self._reads.clear()
        for change in self._under_way:
            change.ended = now
        self._under_way.clear()
        self._unbound.clear()
        self._unpromised.clear()
        self.first = Hearer(self._begun)
        self._hearers = {self.first: None}
        self._untold.clear()
        self._debts.clear()
        self._in_trouble = self._left = False
        for entries in self._blocks:
            entries[:] = [each for each in entries if each.gone == math.inf]
            for entry in entries:
                entry.hidden = math.inf
