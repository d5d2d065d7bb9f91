"""Which initiator has access to which LUNs, and as which CHAP user: the file of ``--access``.

    INITIATOR LUNS [USER]         iqn.2026-11.example:host-a 0,2-4 alice
    *         LUNS                * none

``LUNS``: numbers and ranges between commas, ``all`` or ``none``. ``USER``: that initiator name
can log in only as this user of ``--chap-accounts``. ``*`` stands for all initiators that have no
line of their own; without it they have access to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from iserblk import files
from iserblk.errors import BadArgument
from iserblk.names import check_name
from iserblk.url import MAXIMUM_LUN

ANY = "*"
_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MOST_WORDS = 3


class Grant(NamedTuple):
    """One line. ``luns``: ranges (first, last). ``user`` "": any user, or none."""

    luns: tuple[tuple[int, int], ...]
    user: str = ""


@dataclass(slots=True, frozen=True)
class Access:
    """The lines of a file, by initiator name in lower case. Names are compared without regard to
    case, as iSCSI compares them."""

    grants: Mapping[str, Grant]

    @property
    def users(self) -> set[str]:
        return {grant.user for grant in self.grants.values() if grant.user}

    def _grant(self, initiator: str) -> Grant | None:
        return self.grants.get(initiator.lower()) or self.grants.get(ANY)

    def allows(self, initiator: str, lun: int) -> bool:
        """Whether ``initiator`` has access to ``lun``."""
        grant = self._grant(initiator)
        return grant is not None and any(first <= lun <= last for first, last in grant.luns)

    def initiators(self) -> list[str] | None:
        """The names that have access to any LUN; None: all have."""
        able = [name for name, grant in self.grants.items() if grant.luns]
        return None if ANY in able else able

    def may_log_in(self, initiator: str, user: str) -> bool:
        """Whether ``initiator`` may log in as ``user``, which it has proved to be; "" without
        CHAP."""
        grant = self._grant(initiator)
        return grant is None or grant.user in ("", user)


def read_access(path: Path) -> Access:
    """Read a file and parse it with ``parse_access``. Raises BadArgument, also when the file cannot
    be read."""
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise BadArgument(f"--access {path}: {words}") from None
    return parse_access(text)


def parse_access(text: str) -> Access:
    """Parse the lines of a file. Empty lines, and lines that begin with #, are ignored. Raises
    BadArgument that names the line."""
    grants: dict[str, Grant] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        what = f"access, line {number}"
        if not 2 <= len(words) <= _MOST_WORDS:
            raise BadArgument(f"{what}: write INITIATOR LUNS, or INITIATOR LUNS USER")
        name = words[0].lower()
        if name != ANY:
            check_name(words[0], f"{what}:")
        elif len(words) == _MOST_WORDS:
            raise BadArgument(f"{what}: * has no user; give each initiator a line")
        if name in grants:
            raise BadArgument(f"{what}: repeats the initiator of an earlier line")
        grants[name] = Grant(parse_luns(words[1], what), words[2] if len(words) > 2 else "")
    return Access(grants)


def parse_luns(text: str, what: str) -> tuple[tuple[int, int], ...]:
    """Ranges (first, last) of LUNs. Raises BadArgument that says ``what`` they belong to."""
    if text == "all":
        return ((0, MAXIMUM_LUN),)
    if text == "none":
        return ()
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else -1
        last = int(match[2] or match[1]) if match else -1
        if not 0 <= first <= last <= MAXIMUM_LUN:
            raise BadArgument(
                f"{what}: {part[:40]!r} is no LUN; write numbers and ranges such as 0,2-4, or all,"
                " or none"
            )
        found.append((first, last))
    return tuple(found)
