"""Several portals to one LUN: which is connected to, what is reset, and what makes a session leave.

``connect`` is a table of sessions and errors here; tests/integration/test_paths.py has real ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.disk.multipath import paths as paths_module
from iserblk.disk.multipath.paths import Paths
from iserblk.errors import AuthenticationError, BadArgument, ConnectFailed, IserblkError
from iserblk.initiator.commands import PortRefused
from iserblk.initiator.session.slots import Operation, TaskSlot
from iserblk.options import Options
from iserblk.scsi import alua
from iserblk.scsi.sense import NOT_READY, UNIT_ATTENTION, encode_fixed
from iserblk.url import Url
from tests.disk.fake_lun import finish

pytestmark = pytest.mark.logs(r" is used", "another portal is tried")

STANDBY = encode_fixed(NOT_READY, alua.IN_STANDBY >> 8, alua.IN_STANDBY & 0xFF)
STATES_CHANGED = encode_fixed(UNIT_ATTENTION, alua.STATE_CHANGED >> 8, alua.STATE_CHANGED & 0xFF)
LUN = bytes(8)


class Session:
    """A session through portal group ``group``. ``leaves``: what ``leave`` returns."""

    def __init__(self, host: str, group: int) -> None:
        self.portal = f"{host}:3260"
        self.parameters = SimpleNamespace(target_portal_group_tag=group)
        self.listeners = SimpleNamespace(add=lambda lun, listener: None)
        self.suspended: str | None = None
        self.leaves = True
        self.disconnected = 0

    def leave(self, reason: str, patience: float) -> bool:
        return self.leaves

    def disconnect(self) -> None:
        self.disconnected += 1


class Bench:
    """Ways to hosts a, b and c in portal groups 1, 2 and 3. ``errors``: of connecting, by host.
    ``states``: ALUA states, by host. ``tried``: hosts, in order. ``resets``: LUNs that were."""

    def __init__(self, hosts: str = "abc") -> None:
        self.now = 1000.0
        self.errors: dict[str, IserblkError] = {}
        self.states: dict[str, int] = {}
        self.tried: list[str] = []
        self.resets: list[int] = []
        addresses = [(Url("iser", host, 3260, "iqn.x", 0), Options()) for host in hosts]
        self.paths = Paths(addresses, lambda: self.now)
        self._groups = {host: number for number, host in enumerate(hosts, 1)}

    async def connect(self, url: Url, options: Options, isid: bytes = b"") -> Session:
        await trio.lowlevel.checkpoint()
        self.tried.append(url.host)
        if url.host in self.errors:
            raise self.errors[url.host]
        return Session(url.host, self._groups[url.host])

    def access_state(self, session: Session, lun: int, name: str) -> Operation[int | None]:
        yield 0.0
        return self.states.get(session.portal[0])

    def reset_lun(self, session: Session, lun: int) -> Operation[None]:
        self.resets.append(lun)
        yield 0.0

    async def session(self, settled: bool = True) -> Any:
        """The next session; ``tried`` begins anew."""
        self.tried.clear()
        made: Any = await self.paths.connect()
        if settled:
            self.paths.settled(made)
        return made

    @property
    def current(self) -> str | None:
        way = self.paths.ways.current
        return None if way is None else way.address[0].host


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    for name in ("connect", "access_state", "reset_lun"):
        monkeypatch.setattr(paths_module, name, getattr(made, name))
    return made


def refuse(bench: Bench, session: Any, sense: bytes = STANDBY) -> TaskSlot:
    """A command ends with ``sense`` on the session in use."""
    bench.paths.watch(session, LUN)
    slot = TaskSlot(0)
    slot.status, slot.sense, slot.error = 2, sense, None
    bench.paths.hear(slot)
    return slot


async def test_the_first_way_that_takes_a_login_is_used(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.errors["a"] = ConnectFailed("a: refused")
    await bench.session()
    assert bench.tried == ["a", "b"] and bench.current == "b"
    (record,) = caplog.records
    assert "a: refused" in record.getMessage()


async def test_where_all_fail_the_first_error_tells_all(bench: Bench) -> None:
    bench.errors = {host: ConnectFailed(f"{host}: down") for host in "abc"}
    with pytest.raises(ConnectFailed, match="a: down; b: down; c: down") as raised:
        await bench.session()
    assert raised.value is bench.errors["a"]


@pytest.mark.parametrize("error", [AuthenticationError("who?"), BadArgument("no such option")])
async def test_what_no_other_portal_would_take_is_raised_at_once(
    bench: Bench, error: IserblkError
) -> None:
    """But only at the start: a session that has worked tries every way."""
    bench.errors["a"] = error
    with pytest.raises(type(error)):
        await bench.session()
    assert bench.tried == ["a"]
    del bench.errors["a"]
    await bench.session()
    bench.errors = {"a": error, "b": error}
    await bench.session()
    assert bench.tried == ["b", "c"] and bench.current == "c"


async def test_a_way_that_was_lost_is_tried_last(bench: Bench) -> None:
    await bench.session()
    await bench.session()
    assert bench.tried == ["b"] and bench.current == "b"
    way = bench.paths.ways.all[0]
    assert way.failures == 1 and way.error


async def test_a_session_that_was_not_settled_counts_as_a_failure(bench: Bench) -> None:
    await bench.session(settled=False)
    await bench.session()
    assert bench.tried == ["b"]
    assert bench.paths.ways.all[0].failures == 1


async def test_going_over_takes_the_wanted_way_once(bench: Bench) -> None:
    """Nothing is wrong with the way that was left."""
    session = await bench.session()
    assert bench.paths.go_over(session, bench.paths.ways.all[2], 5.0)
    await bench.session()
    assert bench.tried == ["c"]
    assert bench.paths.ways.all[0].failures == 0
    await bench.session()
    assert bench.tried == ["a"]


async def test_a_session_that_cannot_leave_now_stays(bench: Bench) -> None:
    session = await bench.session()
    session.leaves = False
    assert not bench.paths.go_over(session, bench.paths.ways.all[2], 5.0)
    await bench.session()
    assert bench.tried == ["b"]


@pytest.mark.parametrize("state", [alua.STANDBY, alua.UNAVAILABLE, alua.TRANSITIONING])
async def test_a_port_that_carries_out_nothing_is_given_up(bench: Bench, state: int) -> None:
    bench.states["a"] = state
    fresh = await bench.session(settled=False)
    with pytest.raises(ConnectFailed) as raised:
        finish(bench.paths.look(0, fresh))
    assert "a:3260" in str(raised.value)
    assert bench.paths.ways.all[0].state == state
    await bench.session()
    assert bench.tried == ["b"]


@pytest.mark.parametrize("state", [None, alua.ACTIVE_OPTIMIZED, alua.ACTIVE_NON_OPTIMIZED])
async def test_the_state_of_the_port_in_use_is_kept(bench: Bench, state: int | None) -> None:
    if state is not None:
        bench.states["a"] = state
    fresh = await bench.session(settled=False)
    finish(bench.paths.look(0, fresh))
    bench.paths.settled(fresh)
    assert bench.current == "a" and bench.paths.ways.all[0].state == state


async def test_another_portal_group_resets_each_lun_once(bench: Bench) -> None:
    """The lost session may have left tasks there; its own group ends them at the login."""
    first = await bench.session()
    finish(bench.paths.reset(0, first))
    assert not bench.resets
    second = await bench.session()
    for lun in (0, 5):
        finish(bench.paths.reset(lun, second))
        finish(bench.paths.reset(lun, second))
    assert bench.resets == [0, 5]


async def test_the_groups_of_lost_attempts_count_as_well(bench: Bench) -> None:
    """A session may have written before it was lost, although it was never in use."""
    await bench.session()
    attempt = await bench.session(settled=False)
    finish(bench.paths.reset(0, attempt))
    bench.resets.clear()
    third = await bench.session()
    assert bench.current == "c"
    finish(bench.paths.reset(0, third))
    assert bench.resets == [0]


async def test_an_orderly_logout_leaves_nothing_to_reset(bench: Bench) -> None:
    await bench.session()
    bench.paths.left_nothing()
    finish(bench.paths.reset(0, await bench.session()))
    assert not bench.resets


async def test_a_port_that_refuses_commands_is_left(bench: Bench) -> None:
    """The command is sent again elsewhere, and the way is tried last until its state changes."""
    session = await bench.session()
    slot = refuse(bench, session)
    assert session.disconnected == 1
    assert isinstance(slot.error, PortRefused)
    bench.now += 1e6
    await bench.session()
    assert bench.tried == ["b"]
    assert bench.paths.ways.all[0].state == alua.STANDBY


async def test_a_connection_that_is_gone_is_not_cut_again(bench: Bench) -> None:
    session = await bench.session()
    session.suspended = "the connection was lost"
    assert isinstance(refuse(bench, session).error, PortRefused)
    assert not session.disconnected


async def test_other_errors_are_not_about_the_port(bench: Bench) -> None:
    session = await bench.session()
    slot = refuse(bench, session, encode_fixed(NOT_READY, 0x04, 0x01))
    assert slot.error is None and not session.disconnected
    assert not bench.paths.states_changed
    slot = refuse(bench, session, STATES_CHANGED)
    assert slot.error is None and not session.disconnected
    assert bench.paths.states_changed
