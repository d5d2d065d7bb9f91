"""Targets that have moved: how far they are followed, and what is remembered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from iserblk.errors import ConnectFailed, LoginError, TargetNotFound
from iserblk.initiator.connecting.redirects import MAXIMUM_HOPS, MAXIMUM_MOVES, Moves, follow
from iserblk.url import Url, parse_url
from tests.support.target import IQN

TEMPORARILY, PERMANENTLY = 0x0101, 0x0102


def url(host: str) -> Url:
    return parse_url(f"iser://{host}/{IQN}/0")


class Site:
    """Portals that redirect logins. ``hosts``: per portal the status detail and the new address,
    an error to raise, or None where it accepts the login."""

    def __init__(self, **hosts: tuple[int, str] | Exception | None) -> None:
        self.hosts = hosts
        self.asked: list[str] = []

    async def attempt(self, at: Url) -> str:
        self.asked.append(at.host)
        said = self.hosts[at.host]
        if isinstance(said, Exception):
            raise said
        if said is not None:
            raise LoginError("the target has moved", *said)
        return at.redacted()


async def test_followed() -> None:
    """A redirect changes the host and the port; the rest of the URL stays."""
    site = Site(a=(TEMPORARILY, "b:5000"), b=None)
    assert await follow(url("a"), site.attempt, Moves()) == f"iser://b:5000/{IQN}/0"


async def test_for_the_time_being() -> None:
    """After a temporary redirect the next connection begins at the original address."""
    site, moves = Site(a=(TEMPORARILY, "b"), b=None), Moves()
    for _ in range(2):
        await follow(url("a"), site.attempt, moves)
    assert site.asked == ["a", "b", "a", "b"]


async def test_for_good() -> None:
    """After permanent redirects the next connection begins at the address that the last of them
    named before a temporary one. Other targets of that portal are not redirected."""
    site = Site(a=(PERMANENTLY, "b"), b=(PERMANENTLY, "c"), c=(TEMPORARILY, "d"), d=None)
    moves = Moves()
    await follow(url("a"), site.attempt, moves)
    site.asked.clear()
    await follow(url("a"), site.attempt, moves)
    assert site.asked == ["c", "d"]
    assert moves.start(parse_url("iser://a/iqn.2026-11.example:other")).host == "a"


async def test_behind_a_temporary_one_nothing_is_for_good() -> None:
    site, moves = Site(a=(TEMPORARILY, "b"), b=(PERMANENTLY, "c"), c=None), Moves()
    await follow(url("a"), site.attempt, moves)
    assert moves.start(url("a")) == url("a")


async def test_nobody_there_any_more() -> None:
    """When the new address does not answer, the original one is asked at once."""
    site, moves = Site(a=(PERMANENTLY, "b"), b=None), Moves()
    await follow(url("a"), site.attempt, moves)
    site.hosts.update(a=None, b=ConnectFailed("nobody"))
    site.asked.clear()
    await follow(url("a"), site.attempt, moves)
    await follow(url("a"), site.attempt, moves)
    assert site.asked == ["b", "a", "a"]


async def test_moved_on() -> None:
    site, moves = Site(a=(PERMANENTLY, "b"), b=None), Moves()
    await follow(url("a"), site.attempt, moves)
    site.hosts.update(b=(PERMANENTLY, "c"), c=None)
    for _ in range(2):
        await follow(url("a"), site.attempt, moves)
    assert site.asked == ["a", "b", "b", "c", "c"]


async def test_a_failure_is_not_remembered() -> None:
    site, moves = Site(a=(PERMANENTLY, "b"), b=ConnectFailed("nobody")), Moves()
    with pytest.raises(ConnectFailed):
        await follow(url("a"), site.attempt, moves)
    assert moves.start(url("a")) == url("a")


@pytest.mark.parametrize("circle", [["a"], ["b", "a"], ["b", "c", "b"]])
async def test_circles(circle: list[str]) -> None:
    hops = dict(zip(["a", *circle[:-1]], circle, strict=True))
    site = Site(**{host: (TEMPORARILY, to) for host, to in hops.items()})
    with pytest.raises(LoginError, match="in a circle: ") as caught:
        await follow(url("a"), site.attempt, Moves())
    named = " → ".join(f"{host}:3260" for host in ["a", *circle])
    assert named in str(caught.value)


@pytest.mark.parametrize("count", [MAXIMUM_HOPS, MAXIMUM_HOPS + 1])
async def test_hops_are_bounded(count: int) -> None:
    site = Site(
        **{f"h{i}": (TEMPORARILY, f"h{i + 1}") for i in range(count)}, **{f"h{count}": None}
    )
    running: Callable[[], Awaitable[str]] = lambda: follow(url("h0"), site.attempt, Moves())  # noqa: E731
    if count == MAXIMUM_HOPS:
        assert await running() == url(f"h{count}").redacted()
        return
    with pytest.raises(LoginError, match=f"more than {MAXIMUM_HOPS} times: h0:3260 → h1"):
        await running()


@pytest.mark.parametrize(
    ("address", "words"), [("", "does not say where"), ("here:x", "the port is no number")]
)
async def test_nowhere_to_go(address: str, words: str) -> None:
    site = Site(a=(TEMPORARILY, address))
    with pytest.raises(LoginError, match=f"a:3260: the target has moved.*{words}"):
        await follow(url("a"), site.attempt, Moves())


async def test_other_refusals_are_none() -> None:
    site = Site(a=TargetNotFound("no such target", 0x0203))
    with pytest.raises(TargetNotFound):
        await follow(url("a"), site.attempt, Moves())


def test_memory_is_bounded() -> None:
    moves = Moves()
    for number in range(3 * MAXIMUM_MOVES):
        moves.learn(url(f"h{number}"), url("to"))
    known = [n for n in range(3 * MAXIMUM_MOVES) if moves.start(url(f"h{n}")).host == "to"]
    assert 0 < len(known) <= MAXIMUM_MOVES
