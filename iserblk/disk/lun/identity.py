"""Which LUN it is: whether two LUNs, seen before and now, or here and there, are the same.

Identifiers of VPD page 83h that are unique world-wide decide (``inquiry.is_world_wide``). All else
(T10 vendor IDs, NAA 3h, serial numbers, vendor and product) may be the same for different LUNs: two
hosts with the same program, and its defaults, have LUNs that say the same.

Over time a LUN may get another identifier, or lose one, and its maker may name the product anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from iserblk.disk.seam import LunInfo
from iserblk.errors import LunChanged
from iserblk.scsi.inquiry import is_world_wide

NEVER: Final = "nothing is sent to it; put the LUN in order, and connect anew"


class Identity(Protocol):
    """What identifies a LUN: LunInfo and Names have it."""

    @property
    def vendor(self) -> str: ...

    @property
    def product(self) -> str: ...

    @property
    def serial(self) -> str: ...

    @property
    def identifiers(self) -> tuple[str, ...]: ...


def identity_words(info: Identity) -> str:
    """All that tells one LUN from another, for messages."""
    identifiers = ", ".join(sorted(info.identifiers)) or "no identifiers"
    return f"{info.vendor} {info.product}, serial {info.serial or 'none'}, {identifiers}"


def world_wide(identifiers: Sequence[str]) -> frozenset[str]:
    """Those that no other LUN in the world has, in lower case."""
    return frozenset(each.lower() for each in identifiers if is_world_wide(each))


def is_identified(info: Identity) -> bool:
    """Whether the LUN is recognised wherever it is found."""
    return bool(world_wide(info.identifiers))


def lasting_name(identifiers: Sequence[str]) -> str:
    """A name of the LUN for what outlives an upgrade of its target: devices that are attached, and
    locks. Targets of ours had no UUIDs before, so these are left out where there are others."""
    return " ".join([each for each in identifiers if not each.startswith("uuid.")] or identifiers)


def have_common(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a world-wide identifier is common to both, and of no kind they have only different
    ones. (The name of a target, given to each of its LUNs, says nothing where their NAA identifiers
    differ.)"""
    first, second = world_wide(one), world_wide(other)
    kinds = {_kind(each) for each in first} & {_kind(each) for each in second}
    return bool(kinds) and kinds == {_kind(each) for each in first & second}


def _kind(identifier: str) -> str:
    kind, _, text = identifier.partition(".")
    return f"{kind}.{text.partition('.')[0]}" if kind == "name" else kind


def is_same(before: Identity, now: Identity) -> bool:
    """Whether a LUN, found again under its address, is the same as ``before``.

    With a common world-wide identifier, the serial numbers must not differ, if there are two; its
    maker may name the product anew. Without, vendor, product and serial number must be the same,
    too.
    """
    if have_common(before.identifiers, now.identifiers):
        return not before.serial or not now.serial or before.serial == now.serial
    return (
        set(before.identifiers) <= set(now.identifiers)
        and tells_nothing(before) <= tells_nothing(now)
        and (before.vendor, before.product, before.serial) == (now.vendor, now.product, now.serial)
    )


def tells_nothing(info: Identity) -> bool:
    """Whether the LUN has no identifier, nor a serial number: all that tells it from another is its
    size."""
    return not info.identifiers and not info.serial


def check_names(known: LunInfo, found: Identity) -> None:
    """Raises LunChanged unless ``found``, under the address of the LUN ``known``, is the same."""
    if not is_same(known, found):
        raise LunChanged(
            f"{known.url}: another LUN is there now: it was {identity_words(known)}, "
            f"it is {identity_words(found)}; {NEVER}"
        )


def check_lun(known: LunInfo, found: LunInfo, elsewhere: bool = False) -> None:
    """As ``check_names``, for all that a LUN says of itself: the size of its blocks is the same,
    too, and its size where nothing else tells it from another. ``elsewhere``: it was found through
    another portal; then a LUN without a world-wide identifier must have the same size, too."""
    check_names(known, found)
    if known.block_size != found.block_size:
        raise LunChanged(
            f"{known.url}: {identity_words(known)} had blocks of {known.block_size} bytes, "
            f"it has blocks of {found.block_size} bytes now; {NEVER}"
        )
    doubtful = tells_nothing(known) or (elsewhere and not is_identified(known))
    if doubtful and known.size != found.size:
        raise LunChanged(
            f"{known.url}: perhaps another LUN is there now: {identity_words(known)} had "
            f"{known.size} bytes, it has {found.size} bytes, and no world-wide identifier tells "
            f"that it is the same; {NEVER}"
        )
