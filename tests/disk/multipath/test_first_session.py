"""The first session with a LUN: which way is taken, and what is raised when none will do."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import trio

from iserblk.disk.multipath import first_session
from iserblk.disk.multipath.first_session import open_path
from iserblk.errors import ConnectFailed, ConnectionLost, IserblkError


class Session:
    """One connection. ``problem``: what a look at the state of its port raises."""

    def __init__(self, portal: str, problem: Exception | None = None) -> None:
        self.portal = portal
        self.problem = problem
        self.error: IserblkError | None = None

    def fail(self, error: IserblkError) -> None:
        assert not Driver.running, "it is failed while its driver runs"
        self.error = error


class Driver:
    """Stands in for TrioDriver. ``running``: how many are in ``run``."""

    running = 0

    def __init__(self, session: Session) -> None:
        self.session = session

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        Driver.running += 1
        try:
            task_status.started()
            await trio.sleep_forever()
        finally:
            Driver.running -= 1

    async def run_operation(self, operation: Generator[object, None, None]) -> None:
        assert Driver.running, "an operation needs the running driver"
        await trio.lowlevel.checkpoint()
        for _ in operation:
            pass


class Paths:
    """Hands out ``sessions`` one by one. ``looked``: (LUN, portal). ``told``: errors that
    ``tell_all`` got."""

    def __init__(self, *sessions: Session) -> None:
        self.ways = self
        self.all = list(sessions)
        self._next = iter(sessions)
        self.looked: list[tuple[int, str]] = []
        self.in_use: Session | None = None
        self.told: list[IserblkError] = []

    def tell_all(self, error: IserblkError) -> IserblkError:
        self.told.append(error)
        return error

    async def connect(self) -> Session:
        await trio.lowlevel.checkpoint()
        return next(self._next)

    def look(self, lun: int, session: Session) -> Generator[object, None, None]:
        self.looked.append((lun, session.portal))
        yield None
        if session.problem is not None:
            raise session.problem

    def settled(self, session: Session) -> None:
        self.in_use = session


@pytest.fixture(autouse=True)
def _drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_session, "TrioDriver", Driver)


async def opened(paths: Paths, lun: int | None = 3) -> Any:
    return await open_path(paths, lun)  # type: ignore[arg-type]


# shows: SYSTEM-23
async def test_the_first_way_that_carries_out_commands_is_taken() -> None:
    standby = Session("a:1", ConnectFailed("a: standby"))
    good, other = Session("b:1"), Session("c:1")
    paths = Paths(standby, good, other)
    driver = await opened(paths)
    assert driver.session is good and paths.in_use is good
    assert paths.looked == [(3, "a:1"), (3, "b:1")]
    assert not Driver.running, "the caller starts the driver that it gets"
    assert isinstance(standby.error, ConnectionLost) and "a:1" in str(standby.error)
    assert good.error is other.error is None


async def test_without_a_lun_no_state_is_asked_for() -> None:
    paths = Paths(Session("a:1", ConnectFailed("not asked")))
    assert (await opened(paths, None)).session is paths.in_use is paths.all[0]
    assert not paths.looked


async def test_where_none_will_do_all_reasons_are_told() -> None:
    errors = [ConnectFailed("a: standby"), ConnectionLost("b: reset"), ConnectFailed("c: offline")]
    paths = Paths(*(Session("portal", error) for error in errors))
    with pytest.raises(ConnectFailed) as raised:
        await opened(paths)
    assert raised.value is errors[0] and paths.told == [errors[0]]
    assert paths.in_use is None
    assert all(session.error is not None for session in paths.all)


async def test_a_bug_is_raised_as_it_is() -> None:
    """It is not wrapped in a group of exceptions, no other way is tried, and the session ends."""
    paths = Paths(Session("a:1", ZeroDivisionError("bug")), Session("b:1"))
    with pytest.raises(ZeroDivisionError, match="bug"):
        await opened(paths)
    assert paths.all[0].error is not None and paths.looked == [(3, "a:1")]
    assert not Driver.running
