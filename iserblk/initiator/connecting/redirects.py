"""Follows targets that have moved: login status 0101 and 0102 with a TargetAddress (RFC 7143
11.13.5).

A redirect is followed within the login, up to MAXIMUM_HOPS in a row, and never in a circle. A
temporary redirect holds for that login only: the next connection begins at the original address. A
permanent one is remembered, for as long as a target answers at the new address.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from iserblk.errors import LoginError, RemoteProtocolError, TransportError
from iserblk.iscsi.send_targets import portal_untrusted
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)
T = TypeVar("T")

MAXIMUM_HOPS = 4
MAXIMUM_MOVES = 256  # how many are remembered
REDIRECTION = 1  # the Status-Class
MOVED_PERMANENTLY = 0x0102

_Key = tuple[str, int, str]


class Moves:
    """Where targets have moved for good, as far as we were told."""

    def __init__(self) -> None:
        self._moved: dict[_Key, tuple[str, int]] = {}

    @staticmethod
    def _key(url: Url) -> _Key:
        return (url.host, url.port, url.iqn)

    def start(self, url: Url) -> Url:
        """Where to begin: ``url`` itself, or the address that it has moved to."""
        found = self._moved.get(self._key(url))
        return url if found is None else replace(url, host=found[0], port=found[1])

    def learn(self, url: Url, to: Url) -> None:
        if len(self._moved) >= MAXIMUM_MOVES:
            self._moved.clear()
        self._moved[self._key(url)] = (to.host, to.port)

    def forget(self, url: Url) -> None:
        self._moved.pop(self._key(url), None)


MOVES = Moves()  # of this process


def new_address(url: Url, error: LoginError) -> Url:
    """``url`` with the host and port that the target has named. Raises LoginError when it named
    none that can be used."""
    portal = name_portal(url.host, url.port)
    if not error.address:
        raise LoginError(f"{portal}: the target has moved, and does not say where", error.status)
    try:
        there = portal_untrusted(error.address)
    except RemoteProtocolError as problem:
        raise LoginError(f"{portal}: the target has moved, but: {problem}", error.status) from None
    return replace(url, host=there.host, port=there.port)


async def follow(url: Url, attempt: Callable[[Url], Awaitable[T]], moves: Moves | None = None) -> T:
    """Run ``attempt`` at the address that accepts us; returns its result. Raises as ``attempt``,
    and LoginError for redirects without end."""
    moves = MOVES if moves is None else moves
    start = moves.start(url)
    if start is not url:
        try:
            return await _follow(url, start, True, attempt, moves)
        except TransportError as error:
            moves.forget(url)
            log.info("%s, where it had moved to; the first address is asked again", error)
    return await _follow(url, url, False, attempt, moves)


async def _follow(
    url: Url, start: Url, moved: bool, attempt: Callable[[Url], Awaitable[T]], moves: Moves
) -> T:
    """``moved``: ``start`` is where ``url`` has moved for good."""
    here = home = start
    for_good = True
    way = [(start.host, start.port)]
    while True:
        try:
            result = await attempt(here)
        except LoginError as error:
            if error.status >> 8 != REDIRECTION:
                raise
            there = new_address(here, error)
            _check_way(way, there, error.status)
            for_good = for_good and error.status == MOVED_PERMANENTLY
            log.info("%s: %s", name_portal(here.host, here.port), error)
            here = there
            if for_good:
                home, moved = there, True
            continue
        if moved:
            moves.learn(url, home)
        return result


def _check_way(way: list[tuple[str, int]], there: Url, status: int) -> None:
    """Add a hop. Raises LoginError when it closes a circle, or is one too many."""
    step = (there.host, there.port)
    circle = step in way
    way.append(step)
    names = " → ".join(name_portal(*each) for each in way)
    if circle:
        raise LoginError(f"redirected in a circle: {names}; look at the target's setup", status)
    if len(way) > MAXIMUM_HOPS + 1:
        raise LoginError(f"redirected more than {MAXIMUM_HOPS} times: {names}", status)
