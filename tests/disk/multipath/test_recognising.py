"""LUNs of different targets that are one: what joins them, and what is refused."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import trio

from iserblk.disk.lun.identify import Names
from iserblk.disk.multipath import recognising
from iserblk.disk.multipath.addresses import Address, settle
from iserblk.disk.multipath.recognising import join_same_luns
from iserblk.errors import BadArgument, ConnectFailed, ConnectionLost, IserblkError
from iserblk.url import Url

A, B, C = (f"iscsi://{host}/iqn.2026-11.example:{host}/0" for host in "abc")
NAA, EUI = "naa.6001405", "eui.0001"


def names(*identifiers: str, serial: str = "1") -> Names:
    return Names("vendor", "product", "1.0", serial, identifiers, (), ())


class Session:
    """``ended``: by what."""

    def __init__(self, host: str) -> None:
        self.portal = host
        self.ended: IserblkError | None = None

    def fail(self, error: IserblkError) -> None:
        self.ended = error


class Luns:
    """What each host answers: ``Names``, or what is raised by the login (``unreached``) or by the
    question. ``asked``: hosts that were logged in to. Stands in for all that has a network."""

    def __init__(self) -> None:
        self.said: dict[str, Names | Exception] = {}
        self.unreached: set[str] = set()
        self.asked: list[str] = []
        self.sessions: list[Session] = []
        self.logged_out: list[str] = []

    async def connect(self, url: Url, options: object) -> Session:
        await trio.lowlevel.checkpoint()
        self.asked.append(url.host)
        if url.host in self.unreached:
            raise ConnectFailed(f"{url.host}: refused")
        self.sessions.append(Session(url.host))
        return self.sessions[-1]

    def names(self, session: Session, *_: object) -> Generator[None, None, Names]:
        yield
        said = self.said[session.portal]
        if isinstance(said, Exception):
            raise said
        return said

    def driver(self, session: Session) -> Driver:
        return Driver(self, session)


class Driver:
    """Stands in for TrioDriver."""

    def __init__(self, luns: Luns, session: Session) -> None:
        self._luns = luns
        self._session = session

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def run_operation(self, operation: Generator[None, None, Names]) -> Names:
        while True:
            try:
                next(operation)
            except StopIteration as end:
                found: Names = end.value
                return found
            await trio.lowlevel.checkpoint()

    async def log_out(self) -> None:
        await trio.lowlevel.checkpoint()
        self._luns.logged_out.append(self._session.portal)


@pytest.fixture
def luns(monkeypatch: pytest.MonkeyPatch) -> Luns:
    made = Luns()
    monkeypatch.setattr(recognising, "connect", made.connect)
    monkeypatch.setattr(recognising, "names", made.names)
    monkeypatch.setattr(recognising, "TrioDriver", made.driver)
    return made


def ways(address: Address) -> list[str]:
    """The hosts that lead to its LUN, the preferred one first."""
    if address.paths is None:
        return [address.url.host]
    return [way.address[0].host for way in address.paths.ways.all]


async def joined(*urls: str) -> list[list[str]]:
    return [ways(each) for each in await join_same_luns(settle(urls, {}))]


async def test_luns_with_a_common_identifier_are_one(luns: Luns) -> None:
    luns.said = {"a": names(NAA, EUI), "b": names("naa.other"), "c": names(EUI, NAA)}
    assert await joined(A, B, C) == [["a", "c"], ["b"]]
    assert sorted(luns.logged_out) == ["a", "b", "c"]
    assert all(isinstance(each.ended, ConnectionLost) for each in luns.sessions)


@pytest.mark.parametrize(
    "urls", [[A], [A, A.replace("/0", "/1")], [A, B.removesuffix("/0")]], ids=len
)
async def test_one_target_is_not_asked(luns: Luns, urls: list[str]) -> None:
    """Nor are LUNs that the URLs do not name. One target tells its LUNs apart by their numbers."""
    assert await joined(*urls) == [[each.partition("//")[2][0]] for each in urls]
    assert not luns.asked


async def test_names_of_targets_are_compared_in_any_case(luns: Luns) -> None:
    upper = A.replace("example:a", "EXAMPLE:A").replace("//a", "//b").replace("/0", "/1")
    assert await joined(A, upper) == [["a"], ["b"]]
    assert not luns.asked


async def test_a_lun_without_identifiers_stays_alone(luns: Luns) -> None:
    """The same serial number proves nothing: some targets give the same to each LUN."""
    luns.said = {"a": names(), "b": names()}
    assert await joined(A, B) == [["a"], ["b"]]


async def test_all_ways_of_a_group_are_kept_in_order(luns: Luns) -> None:
    """The first address has two portals already."""
    second = A.replace("//a", "//d")
    luns.said = {"a": names(NAA), "b": names(NAA)}
    assert await joined(A, second, B) == [["a", "d", "b"]]
    assert luns.asked.count("d") == 0, "the first way that tells is enough"


async def test_the_next_way_is_asked_where_one_does_not_tell(luns: Luns) -> None:
    second = A.replace("//a", "//d")
    luns.unreached = {"a"}
    luns.said = {"d": names(NAA), "b": names(NAA)}
    assert await joined(A, second, B) == [["a", "d", "b"]]


async def test_a_lun_that_cannot_be_asked_stays_alone(luns: Luns) -> None:
    """Its own login tells why, later. The session that failed is ended."""
    luns.unreached = {"a"}
    luns.said = {"b": IserblkError("b: no such page"), "c": names(NAA)}
    assert await joined(A, B, C) == [["a"], ["b"], ["c"]]
    assert luns.logged_out == ["c"]
    assert all(each.ended is not None for each in luns.sessions)


async def test_one_lun_with_different_numbers_is_refused(luns: Luns) -> None:
    luns.said = {"a": names(NAA), "b": names(NAA)}
    with pytest.raises(BadArgument, match="are the same LUN, but have different numbers"):
        await joined(A, B.replace("/0", "/1"))


async def test_one_lun_that_is_told_of_differently_is_refused(luns: Luns) -> None:
    """After a reconnection through the other target it would be taken for another LUN."""
    luns.said = {"a": names(NAA), "b": names(NAA, serial="2")}
    with pytest.raises(BadArgument, match="but tell of it differently"):
        await joined(A, B)


async def test_a_bug_is_not_taken_for_an_answer(luns: Luns) -> None:
    luns.said = {"a": ZeroDivisionError("bug"), "b": names(NAA)}
    with pytest.raises(BaseExceptionGroup) as raised:
        await joined(A, B)
    (bug,) = raised.value.exceptions
    assert isinstance(bug, ZeroDivisionError)
    assert all(each.ended is not None for each in luns.sessions)
