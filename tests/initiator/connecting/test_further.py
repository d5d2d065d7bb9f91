"""Where further connections of a session go: spread over the portals of its portal group."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    LoginError,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.further import FAILED_LATELY_S, Further, Place
from iserblk.initiator.connecting.reach import complete
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.session import Session
from iserblk.iscsi import pdu
from iserblk.options import Options
from iserblk.url import Url, parse_url
from tests.initiator.several import Bench, Polled
from tests.support import clocks, logs
from tests.support.target import IQN

GROUP = 7
OTHER_GROUP = LoginError("another group", pdu.LOGIN_CANNOT_INCLUDE)


def place(host: str, scheme: str = "iser", iqn: str = IQN, **options: Any) -> Place:
    return parse_url(f"{scheme}://{host}/{iqn}/0"), Options(**options)


class Site:
    """A session whose first connection went to portal a, and what happens at the others. ``tried``:
    portals and options of all attempts."""

    def __init__(self, *others: Place, first: Place | None = None) -> None:
        self.now = 100.0
        self.errors: dict[str, IserblkError | OSError] = {}
        self.tried: list[Place] = []
        self.session: Any = SimpleNamespace(
            parameters=SimpleNamespace(target_portal_group_tag=GROUP), cids={0}, reinstating=False
        )
        self.further = Further(*(first or place("a")), self.join, lambda: self.now)
        self.further.others = lambda _session: others

    async def join(self, url: Url, options: Options, session: Any) -> Any:
        self.tried.append((url, options))
        if url.host in self.errors:
            raise self.errors[url.host]
        return SimpleNamespace(cid=max(session.cids, default=0) + 1, host=url.host)

    async def more(self) -> str:
        """The portal of one more connection."""
        made: Any = await self.further(self.session)
        self.session.cids.add(made.cid)
        return str(made.host)

    def hosts(self) -> Sequence[str]:
        tried, self.tried = self.tried, []
        return [url.host for url, _ in tried]


async def test_each_goes_where_the_session_has_the_fewest() -> None:
    site = Site(place("a"), place("b"), place("c"))
    assert [await site.more() for _ in range(5)] == ["b", "c", "a", "b", "c"]
    site.session.cids -= {3, 0}  # both of a
    assert [await site.more() for _ in range(4)] == ["a", "a", "a", "b"]


async def test_the_last_one_is_reinstated_elsewhere_first() -> None:
    """Its portal may have been the reason for its loss, and would be waited for."""
    site = Site(place("b"))
    assert await site.more() == "b"
    session = site.session
    session.reinstating, session.cids = True, set()
    for cid, host in ((0, "b"), (1, "a")):
        session.free_cid = lambda cid=cid: cid
        site.hosts()
        await site.further(session)
        assert site.hosts() == [host]


async def test_all_go_to_the_first_where_no_other_is_known() -> None:
    site = Site()
    assert [await site.more() for _ in range(3)] == ["a"] * 3


async def test_another_portal_is_tried_where_one_does_not_answer() -> None:
    """And for a while first."""
    site = Site(place("b"))
    site.errors["b"] = ConnectTimeout("b is silent")
    assert await site.more() == "a"
    assert site.hosts() == ["b", "a"]
    del site.errors["b"]
    assert [await site.more() for _ in range(2)] == ["a", "a"]
    assert site.hosts() == ["a", "a"]
    site.now += FAILED_LATELY_S
    assert [await site.more() for _ in range(2)] == ["b", "b"]


async def test_one_error_tells_of_all() -> None:
    site = Site(place("b"))
    site.errors.update(a=ConnectFailed("a: refused"), b=ConnectTimeout("b: silent"))
    with pytest.raises(ConnectTimeout, match=r"^b: silent; a: refused$"):
        await site.more()


def no_session(name: str) -> LoginError:
    return LoginError(f"{name}: the target has no such session", 0x020A)


def other_group(name: str) -> LoginError:
    return LoginError(f"{name}: another group", pdu.LOGIN_CANNOT_INCLUDE)


@pytest.mark.parametrize(
    "b, a, telling",
    [
        (ConnectFailed("b: refused"), no_session("a"), "a"),
        (no_session("b"), ConnectFailed("a: refused"), "b"),
        (OSError("b: no route"), no_session("a"), "a"),
        (ConnectTimeout("b: silent"), RemoteProtocolError("iSCSI", "a: what?"), "a"),
        (ConnectTimeout("b: silent"), ConnectionLost("a: cut"), "a"),
        (ConnectionLost("b: cut"), no_session("a"), "a"),
        (other_group("b"), ConnectFailed("a: refused"), "a"),
        (other_group("b"), ConnectionLost("a: cut"), "a"),
        (ConnectFailed("b: refused"), other_group("a"), "b"),
    ],
)
async def test_what_a_target_has_answered_is_told(
    b: IserblkError | OSError, a: IserblkError, telling: str
) -> None:
    """Not that another portal cannot be reached: after that a connection would be reinstated again
    and again, though the target has lost the session. And of the session's group, not of another:
    after that it would not be tried again, though the right portal may come back."""
    site = Site(place("b"))
    errors, words = {"a": a, "b": b}, f"{b}; {a}"
    site.errors.update(errors)
    with pytest.raises(type(errors[telling])) as raised:
        await site.more()
    assert raised.value is errors[telling] and site.hosts() == ["b", "a"]
    assert str(raised.value) == words


async def test_a_portal_of_another_group_is_asked_once() -> None:
    """For a session in that group it counts again."""
    site = Site(place("b"))
    site.errors["b"] = OTHER_GROUP
    assert [await site.more() for _ in range(2)] == ["a", "a"]
    assert site.hosts() == ["b", "a", "a"]
    site.now += FAILED_LATELY_S
    assert await site.more() == "a" and site.hosts() == ["a"]
    del site.errors["b"]
    site.session.parameters.target_portal_group_tag = GROUP + 1
    assert await site.more() == "b"


async def test_the_portal_of_the_first_connection_is_never_left_out() -> None:
    site = Site()
    site.errors["a"] = OTHER_GROUP
    for _ in range(2):
        with pytest.raises(LoginError):
            await site.more()
    assert site.hosts() == ["a", "a"]


async def test_all_connections_are_of_one_target_and_one_mode() -> None:
    """Where the first one fell back to Traditional iSCSI, so do the others, with its digests."""
    site = Site(
        place("b", iqn=f"{IQN}.other"),
        place("c", fallback="iscsi"),
        first=place("a", "iscsi", data_digest="CRC32C,None"),
    )
    assert [await site.more() for _ in range(2)] == ["c", "a"]
    url, options = site.tried[0]
    assert (url.scheme, options.fallback, options.data_digest) == ("iscsi", "none", "CRC32C,None")


@pytest.mark.logs(logs.ONE_OF_SEVERAL)
async def test_opening_ends_where_further_connections_do_not_last(clock: clocks.Clock) -> None:
    """Each is asked for once; the reconnector sees to the others."""
    bench = Bench(3)
    bench.lose(2)
    bench.lose(1)
    asked = 0

    async def more(session: Session) -> Connection:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()
        datamover = Polled()
        datamover.inbox.append(ConnectionLost("cut"))
        memory = bench.memory_for(datamover)
        return Connection(datamover, memory, session.parameters, "portal:3260", asked + 9)

    bench.session.more = more
    with trio.fail_after(5):
        await complete(bench.session, Options(connections=3))
    assert asked == 2 and bench.session.count == 1
    bench.close()
