"""Where the further connections of a session go: to portals of one target portal group.

A session may have connections to all portals of a portal group, and to no others (RFC 7143 sections
2.1, 4.4.1). A new connection goes to the portal that has the fewest of the session, and to the next
one where that does not answer. Where it is to reinstate the last connection of the session, the
portal of that one comes last. A portal that turns out to be of another group (login status 0208) is
not asked again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    LoginError,
)
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.session import Session
from iserblk.iscsi import pdu
from iserblk.loop.clock import monotonic
from iserblk.options import Options
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)

FAILED_LATELY_S = 30.0  # a portal that failed within this time is tried after the others

Place = tuple[Url, Options]


class Further:
    """Logs in further connections of one session. Belongs to the thread of the reconnector.

    ``others(session)``: portals of the target that may be of the session's group, beside the one of
    its first connection. ``apart``: portals that are not, by name and the tag of the group; may be
    shared with those of later sessions."""

    def __init__(
        self,
        url: Url,
        options: Options,
        join: Callable[[Url, Options, Session], Awaitable[Connection]],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``url``, ``options``: of the first connection. ``join``: logs in at such a place."""
        self.others: Callable[[Session], Sequence[Place]] = _none
        self.apart: set[tuple[str, int]] = set()
        self._first = url, options
        self._join = join
        self._clock = clock
        self._names: dict[int, str] = {}  # of the portals of connections, by CID
        self._failed: dict[str, float] = {}  # when, by the portal's name

    async def __call__(self, session: Session) -> Connection:
        """One more connection, to be offered to ``session``, which is not changed. Raises the error
        that tells most about the session, with those of the other portals in its text."""
        group = session.parameters.target_portal_group_tag
        errors: list[IserblkError | OSError] = []
        for url, options in self._order(session, group):
            name = _name(url)
            try:
                connection = await self._join(url, options, session)
            except (IserblkError, OSError) as error:
                if isinstance(error, LoginError) and error.status == pdu.LOGIN_CANNOT_INCLUDE:
                    log.info("%s: takes no connection of portal group %d", name, group)
                    self.apart.add((name, group))
                self._failed[name] = self._clock()
                errors.append(error)
                continue
            self._failed.pop(name, None)
            self._names[connection.cid] = name
            return connection
        telling = max(errors, key=_weight)  # the first of several that weigh the same
        if len(errors) > 1:
            telling.args = ("; ".join(map(str, errors)),)
        raise telling

    def _order(self, session: Session, group: int) -> list[Place]:
        """The portals, in the order in which to try them."""
        first, like = self._first
        places = {_name(first): self._first}  # that one is of the group
        for url, options in self.others(session):
            if url.iqn.lower() != first.iqn.lower() or (_name(url), group) in self.apart:
                continue
            if url.scheme == first.scheme:
                place = url, replace(options, fallback="none")
            else:  # all are of one mode (RFC 7145 section 5.1)
                place = (
                    replace(url, scheme=first.scheme),
                    replace(
                        options,
                        fallback="none",
                        header_digest=like.header_digest,
                        data_digest=like.data_digest,
                    ),
                )
            places.setdefault(_name(url), place)
        known = next(iter(places))
        used = Counter(self._names.get(cid, known) for cid in session.cids)
        # Where none is left, the portal of the last one may have been the reason.
        lost = self._names.get(session.free_cid(), known) if session.reinstating else ""
        now = self._clock()

        def rank(name: str) -> tuple[bool, bool, int]:
            failed = self._failed.get(name)
            lately = failed is not None and now - failed < FAILED_LATELY_S
            return lately, name == lost, used[name]

        return [places[name] for name in sorted(places, key=rank)]


def _weight(error: IserblkError | OSError) -> int:
    """How much an error tells about whether another attempt makes sense. A portal that cannot be
    reached may come back; what the target has answered counts more: it may have lost the session.
    A portal of another group has not been asked about it."""
    if isinstance(error, LoginError) and error.status == pdu.LOGIN_CANNOT_INCLUDE:
        return 0
    if isinstance(error, ConnectFailed | ConnectTimeout | HostNotFound | OSError):
        return 1
    return 2 if isinstance(error, ConnectionLost) else 3


def _none(_session: Session) -> Sequence[Place]:
    return ()


def _name(url: Url) -> str:
    return name_portal(url.host, url.port)
