"""Connections of the target whose initiators have not logged in yet: how many there are."""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
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
    begun: Callable[[], bool]
    give_up: Callable[[], None]


class Newcomers:
    """Whoever may connect can hold such connections, before a secret has to be known. Where there
    are too many, one of the origin that has most is given up. So a flood pushes itself out, and
    initiators of other origins do not notice it.

    Of that origin it is the oldest that has sent no Login Request; but if those that have sent one
    are more than half, the oldest of them. So an initiator of the same origin has its login, too:
    peers that send nothing do not end it when it has begun, and peers that stop in the middle do
    not keep it from beginning."""

    def __init__(self) -> None:
        self._all: dict[object, _Newcomer] = {}  # oldest first
        self._of_origin: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def add(
        self,
        who: object,
        origin: str,
        begun: Callable[[], bool],
        give_up: Callable[[], None],
        most: int,
    ) -> None:
        """``begun()``: whether a Login Request has come. ``give_up``: called when there is no more
        room for ``who``, perhaps at once; then ``who`` does not count any more. ``most``: how many
        there may be, from now on."""
        self._all[who] = _Newcomer(origin, begun, give_up)
        self._of_origin[origin] += 1
        while len(self._all) > most:
            self._give_up_one()

    def remove(self, who: object) -> None:
        """It has logged in, or has ended. Does nothing if it does not count."""
        newcomer = self._all.pop(who, None)
        if newcomer is None:
            return
        self._of_origin[newcomer.origin] -= 1
        if not self._of_origin[newcomer.origin]:
            del self._of_origin[newcomer.origin]

    def give_up_all(self) -> None:
        for who in list(self._all):
            self._give_up(who)

    def _give_up_one(self) -> None:
        most = max(self._of_origin.values())
        # Of origins that have as many, whose connection is older.
        mine = [each for each, it in self._all.items() if self._of_origin[it.origin] == most]
        begun = [each for each in mine if self._all[each].begun()]
        if len(begun) > len(mine) // 2:
            who = begun[0]
        else:
            who = next(each for each in mine if not self._all[each].begun())
        log.info(
            "%s: an unfinished login is given up: %d others wait",
            self._all[who].origin,
            len(self._all) - 1,
        )
        self._give_up(who)

    def _give_up(self, who: object) -> None:
        give_up = self._all[who].give_up
        self.remove(who)
        give_up()
