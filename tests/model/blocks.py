"""Which contents of a disk are legal, granule by granule.

A granule is 512 bytes. Every write puts a version of its own into each, so that a read tells which
write it sees; version 0 is zeroes. Per granule there are two sets of versions:

    visible   what a read may return now
    media     what may be there once everything has lost its memory: the target's cache, and the
              client with its journal

Operations come in groups that run at the same time. An acknowledged write of a group is newer than
everything before it, so older versions leave ``visible`` for good. A failed write may have happened
or not. Once a read has shown which, that stays while the connection and the target do (after a loss
the journal may undo a write that was never acknowledged). ``epoch`` is equal for reads between
which neither was lost.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from iserblk.disk.seam import EXTENT_DATA

GRANULE = 512
_HEAD = struct.Struct(">QQ")
_REPEAT = GRANULE // _HEAD.size
ZEROES = bytes(GRANULE)


def content(version: int, granule: int) -> bytes:
    return _HEAD.pack(version, granule) * _REPEAT if version else ZEROES


def version_of(data: bytes, granule: int) -> int | None:
    """The version that the granule holds; None: bytes that no write put there."""
    version, place = _HEAD.unpack_from(data)
    if data == ZEROES:
        return 0
    return int(version) if place == granule and data == content(version, granule) else None


@dataclass(slots=True)
class _Granule:
    visible: set[int] = field(default_factory=lambda: {0})
    media: set[int] = field(default_factory=lambda: {0})
    # Versions of the group that runs, and whether each was acknowledged (None: not known yet).
    writes: dict[int, bool | None] = field(default_factory=dict)
    fua: bool = False  # one of ``writes`` had FUA and is acknowledged
    keeps: bool = False  # one of ``writes`` is a trim, which need not do anything
    naked: bool = False  # written since the write cache was switched on, and not flushed
    # Visible versions from before a loss that a naked granule may have suffered; a flush that
    # succeeds says that they are still there.
    before: set[int] | None = None
    seen: tuple[int, object] | None = None  # version, epoch: read after the last write

    def expose(self) -> None:
        """Visible versions may have been lost: those on the media may be visible now."""
        self.before = self.before or set(self.visible)
        self.visible |= self.media
        self.seen = None


class Wrong(AssertionError):
    """The disk has shown what it must not."""


class Model:
    """``durable``: the disk has no write cache, so that what is acknowledged is on the media."""

    def __init__(self, granules: int, durable: bool = False) -> None:
        self._durable = durable
        self.granules = [_Granule() for _ in range(granules)]
        # The client may have kept nothing of writes around the moment when the write cache was
        # switched on. Until a flush it can repeat nothing after a loss, and reports the loss.
        self._incomplete = False
        # Whether the write cache was switched on in the group that runs.
        self._turned = False
        self._struck = False  # the target has lost its memory, and the client had not kept all
        self._told = False  # a flush of this group has reported the loss
        self._touched: set[int] = set()
        self._next = 1

    # -- a group ---------------------------------------------------------------------------------

    def begin_write(self, granule: int, count: int, zeroes: bool = False) -> int:
        """Returns the version that the write has (0: zeroes)."""
        version = 0
        if not zeroes:
            version = self._next
            self._next += 1
        for at in range(granule, granule + count):
            self.granules[at].writes.setdefault(version, None)
            self._touched.add(at)
        return version

    def end_write(
        self,
        granule: int,
        count: int,
        version: int,
        acknowledged: bool,
        fua: bool = False,
        trim: bool = False,
    ) -> None:
        """A write of the group has ended. ``trim``: the old content may have stayed."""
        for at in range(granule, granule + count):
            each = self.granules[at]
            if each.writes.get(version) is not True:
                each.writes[version] = acknowledged and not trim
            each.keeps |= trim
            each.fua |= fua and acknowledged and not trim

    def check_read(self, granule: int, data: bytes, epoch: object = None) -> None:
        """Check what a read of this group returned, all within ``epoch`` (None: not known). Raises
        Wrong."""
        for index in range(len(data) // GRANULE):
            at = granule + index
            part = data[index * GRANULE : (index + 1) * GRANULE]
            found = version_of(part, at)
            each = self.granules[at]
            if found is None:
                raise Wrong(f"granule {at}: nobody ever wrote {part[:16].hex()}… there")
            if found not in each.visible and found not in each.writes:
                raise Wrong(
                    f"granule {at}: version {found}; legal are "
                    f"{sorted(each.visible)}, and {sorted(each.writes)} under way"
                )
            if each.writes or epoch is None:
                continue
            if each.seen is not None and each.seen[1] == epoch and each.seen[0] != found:
                raise Wrong(f"granule {at}: version {found}, and {each.seen[0]} before that")
            each.seen = (found, epoch)

    def check_extents(self, extents: list[tuple[int, int, int]]) -> None:
        """Check what an ``extents`` of this group returned. Raises Wrong."""
        for offset, length, flags in extents:
            if flags == EXTENT_DATA:
                continue
            for at in range(-(-offset // GRANULE), (offset + length) // GRANULE):
                each = self.granules[at]
                if 0 not in each.visible and 0 not in each.writes:
                    raise Wrong(f"granule {at} is said to be a hole; legal are {each.visible}")

    def end_group(self) -> None:
        for at in self._touched:
            each = self.granules[at]
            acknowledged = {version for version, done in each.writes.items() if done}
            everything = set(each.writes)
            each.media |= everything
            if acknowledged:
                each.visible = everything
                each.before = None
                if self._durable or (each.fua and len(everything) == 1 and not each.keeps):
                    each.media = set(everything)
            else:
                each.visible |= everything
                if each.before is not None:
                    each.before |= everything
            each.writes.clear()
            if self._incomplete:
                each.naked = True
            if self._struck:
                each.expose()
            if self._told:
                each.before = None
            each.fua = each.keeps = False
            each.seen = None
        self._touched.clear()
        self._struck = self._told = self._turned = False

    # -- between groups --------------------------------------------------------------------------

    def flushed(self) -> None:
        """A flush was acknowledged: visible versions are on the media. It may cover no write of the
        group that runs."""
        self._incomplete = self._turned
        for each in self.granules:
            if each.before is not None:
                each.visible, each.before = each.before, None
            each.media = set(each.visible)
            each.naked = False

    def turned(self) -> None:
        """The disk has a write cache from now on."""
        self._durable = False
        self._incomplete = self._turned = True

    @property
    def may_tell(self) -> bool:
        """Whether a flush may report a loss: a granule is naked; or a flush of this group reported
        a loss, which every flush that was under way reports."""
        return self._told or self._incomplete or any(each.naked for each in self.granules)

    @property
    def has_told(self) -> bool:
        """A flush of the group that runs has reported a loss, or may have."""
        return self._told

    def power(self) -> None:
        """The target alone loses its memory; the client sends again what it has kept."""
        for each in self.granules:
            if each.naked:
                each.expose()
        self._struck = self._incomplete

    def told(self) -> None:
        """A flush has reported a loss."""
        self._told = True
        for each in self.granules:
            each.naked = False
            each.before = None

    def perhaps_told(self) -> None:
        """A flush has failed: it has reported a loss, or not been carried out."""
        self._told = True
        for each in self.granules:
            each.before = None

    def lost(self) -> None:
        """Target and client have lost their memory."""
        self._incomplete = False
        for each in self.granules:
            each.visible = set(each.media)
            each.naked = False
            each.before = None
            each.seen = None
