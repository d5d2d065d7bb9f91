"""The places of a target: how many connections, and of which address."""

from __future__ import annotations

import logging
import resource
from collections import Counter
from typing import Final

from iserblk.errors import Busy
from iserblk.newcomers import origin_of
from iserblk.target.iscsi.tasks.slot import Allegiance

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024  # behind their login, those that are kept included
MAX_LOGINS = 512  # connections that have not logged in yet, beside these
# Places beside both: the sockets that listen take one each for the connection that they wait for,
# a login that reinstates a session takes its place when that has ended, and some have only last
# words to say.
SPARE: Final = 64
OF_ONE = 7 / 8  # of the places behind the login that one address may take
# Descriptors beside those of connections: LUNs, their state files, and what Python needs.
OTHER_DESCRIPTORS: Final = 512


class Places:
    """The connections that have a place behind the login, lost ones that are kept included.
    ``most``: how many there may be."""

    def __init__(self) -> None:
        self.most = MAX_CONNECTIONS
        self._origins: dict[Allegiance, str] = {}
        self._of: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._origins)

    def take(self, connection: Allegiance, peer: str, reinstates: bool) -> None:
        """A login is about to end. One address leaves places to the others. ``reinstates``: its
        session takes the place of another one, and so makes room. Raises Busy if there is no
        place."""
        origin = origin_of(peer)
        most = self.most
        total = len(self._origins)
        if (total >= most or self._of[origin] >= max(1, int(most * OF_ONE))) and (
            not reinstates or total >= most + SPARE // 2
        ):
            raise Busy(f"there are {total} connections, {self._of[origin]} of {origin}")
        self._origins[connection] = origin
        self._of[origin] += 1

    def leave(self, connection: Allegiance) -> None:
        """Does nothing if it has none."""
        origin = self._origins.pop(connection, None)
        if origin is None:
            return
        self._of[origin] -= 1
        if not self._of[origin]:
            del self._of[origin]

    def origin_of(self, connection: Allegiance) -> str:
        """The address of a connection, for the log."""
        return self._origins.get(connection, "an initiator that is gone")


def room() -> tuple[int, int]:
    """Places for connections behind and before their login. The process may have as many
    descriptors, if the system allows it; else there are fewer, and the log says so: without
    descriptors nobody could be accepted, no matter who has them, and no state file be written."""
    beside = SPARE + OTHER_DESCRIPTORS
    wanted = MAX_CONNECTIONS + MAX_LOGINS + beside
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not 0 <= soft < wanted:
        return MAX_CONNECTIONS, MAX_LOGINS
    share = max(0, soft - beside) / (wanted - beside)
    most, logins = max(8, int(MAX_CONNECTIONS * share)), max(4, int(MAX_LOGINS * share))
    log.warning(
        "room for %d connections, not %d: the limit of descriptors is %d; raise it to %d"
        " (LimitNOFILE=, ulimit -n)",
        most,
        MAX_CONNECTIONS,
        soft,
        wanted,
    )
    return most, logins
