"""Connections of a server whose peers have not logged in yet, or not agreed on anything: how many
there are."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)


def origin_of(peer: str) -> str:
    """Whose connections count together: the host of ``host:port``, of IPv6 its network of 64 bits,
    all addresses of which one machine may use."""
    host = peer.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # of a provider that has other names
        return host or peer
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


class _Newcomer(NamedTuple):
    origin: str
    give_up: Callable[[], None]


class _Origin:
    """Newcomers of one origin, oldest first. ``begun``: those that have sent something that makes
    sense (a Login Request)."""

    __slots__ = ("begun", "silent")

    def __init__(self) -> None:
        self.silent: dict[object, None] = {}
        self.begun: dict[object, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.begun)


class Newcomers:
    """Every peer that may connect can hold such connections, before a secret has to be known. Where
    there are too many, one of the origin that has most is given up. So a flood pushes itself out,
    and peers of other origins do not notice it.

    Of that origin it is the oldest that has not begun; but if those that have begun are more than
    half, the oldest of them. So an honest peer of the same origin has its login, too: peers that
    send nothing do not end it when it has begun, and peers that stop in the middle do not keep it
    from beginning.

    ``given_up``: how many were, in all."""

    def __init__(self) -> None:
        self.given_up = 0
        self._all: dict[object, _Newcomer] = {}
        self._origins: dict[str, _Origin] = {}

    def __len__(self) -> int:
        return len(self._all)

    def add(self, who: object, origin: str, give_up: Callable[[], None], most: int) -> None:
        """``give_up``: called when there is no more room for ``who``, perhaps at once; then ``who``
        does not count any more. ``most``: how many there may be, from now on."""
        self._all[who] = _Newcomer(origin, give_up)
        self._origins.setdefault(origin, _Origin()).silent[who] = None
        while len(self._all) > most:
            self._give_up_one()

    def begins(self, who: object) -> None:
        """A message has come (a Login Request). All but the first do nothing: who goes on talking
        does not get younger by that. Does nothing if ``who`` does not count."""
        newcomer = self._all.get(who)
        if newcomer is not None:
            origin = self._origins[newcomer.origin]
            if who in origin.silent:
                del origin.silent[who]
                origin.begun[who] = None

    def remove(self, who: object) -> None:
        """It has logged in, or has ended. Does nothing if it does not count."""
        newcomer = self._all.pop(who, None)
        if newcomer is None:
            return
        origin = self._origins[newcomer.origin]
        origin.silent.pop(who, None)
        origin.begun.pop(who, None)
        if not len(origin):
            del self._origins[newcomer.origin]

    def give_up_all(self) -> None:
        for who in list(self._all):
            self._give_up(who)

    def _give_up_one(self) -> None:
        name, origin = max(self._origins.items(), key=lambda each: len(each[1]))
        there = origin.begun if len(origin.begun) > len(origin.silent) else origin.silent
        log.info("%s: an unfinished login or handshake is given up: too many", name)
        self.given_up += 1
        self._give_up(next(iter(there)))

    def _give_up(self, who: object) -> None:
        give_up = self._all[who].give_up
        self.remove(who)
        give_up()
