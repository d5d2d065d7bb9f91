"""The places on this machine at which metrics are served, of one user or of all."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from iserblk.metrics import address as addresses
from iserblk.metrics.address import (
    Address,
    directory,
    place_of,
    root_directory,
    served,
    unit_directories,
    words,
)

log = logging.getLogger(__name__)

USERS = Path("/run/user")  # pam_systemd(8): a directory of each user who is logged in
OWN_BYTES = 256 << 20  # of the answers of all places of one source
OWN_PLACES = 1024
OTHERS_BYTES = 16 << 20
OTHERS_PLACES = 64


@dataclass(slots=True, frozen=True)
class Place:
    """``where``: the device, mount point, NBD socket or address for which it is. ``uid``: the
    owner of a socket, in decimal; "" for a port. ``named``: by the user, so it should exist."""

    where: str
    uid: str
    address: Address
    named: bool = False


@dataclass(slots=True, frozen=True)
class Source:
    """Places that share limits, so that no user can use up those of another. ``own``: they are
    those of this process's user, or named by it. ``left_out``: places beyond the limit."""

    places: tuple[Place, ...]
    own: bool
    answer_bytes: int
    left_out: int = 0


def named(addresses: Iterable[Address]) -> Source:
    found = []
    for address in addresses:
        uid = ""
        if isinstance(address, Path):
            try:
                uid = str(os.lstat(address).st_uid)
            except OSError:
                uid = str(os.geteuid())  # it is not there: to be told as such
        found.append(Place(words(address), uid, address, named=True))
    return Source(tuple(found), True, OWN_BYTES)


def directories() -> list[Path]:
    """Where the sockets are that this process can ask: for root, those of all users."""
    own = directory()
    found = [own] if own is not None else []
    if os.geteuid() == 0:
        found += sorted(USERS.glob("[0-9]*/iserblk"))
    return found + unit_directories()


def of_others() -> list[Path]:
    """Directories with sockets that belong to other users, whom alone, and root, their processes
    answer. Whether there are such directories may be hidden from this process."""
    if os.geteuid() == 0:
        return []
    own = set(directories())
    found = [root_directory()]
    found += [each for units in addresses.UNITS for each in sorted(units.glob("*"))]
    found += [each / "iserblk" for each in sorted(USERS.glob("[0-9]*"))]
    return [each for each in found if each not in own]


def in_directory(where: Path) -> Source | None:
    """The places in a directory; None: there is no such directory.

    Only sockets of the directory's owner count: a link, or a socket that another user has put
    there, could make this process speak with a server that has nothing to do with iserblk.
    """
    try:
        found = os.lstat(where)
        paths = served(where) if stat.S_ISDIR(found.st_mode) else []
    except OSError as error:
        log.debug("%s: %s", where, error)
        return None
    own = found.st_uid == os.geteuid()
    most = OWN_PLACES if own else OTHERS_PLACES
    good = [path for path in paths if _owner(path) == found.st_uid]
    places = tuple(Place(place_of(path), str(found.st_uid), path) for path in good[:most])
    return Source(places, own, OWN_BYTES if own else OTHERS_BYTES, left_out=len(good) - len(places))


def _owner(path: Path) -> int | None:
    """The owner of a socket; None: it is none, or gone."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_uid if stat.S_ISSOCK(found.st_mode) else None
