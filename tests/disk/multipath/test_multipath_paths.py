"""Several portals to one LUN: which is connected to, what is reset, and what makes a session leave.

``connect`` is a table of sessions and errors here; tests/integration/test_paths.py has real ones.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.commands.command import Command, Operation, PlainCommand
from iserblk.commands.running import PortRefused
from iserblk.disk.multipath import paths as paths_module
from iserblk.disk.multipath.paths import Access, Paths
from iserblk.disk.multipath.policy import FIRST_ASK_S, LAST_ASK_S
from iserblk.errors import (
    AuthenticationError,
    BadArgument,
    ConnectFailed,
    ConnectionLost,
    IserblkError,
    ScsiError,
)
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
    """A session through portal group ``group``. ``leaves``: what ``log_out`` returns."""

    def __init__(self, host: str, group: int) -> None:
        self.portal = f"{host}:3260"
        self.parameters = SimpleNamespace(target_portal_group_tag=group)
        self.listeners = SimpleNamespace(add=lambda lun, listener: None)
        self.suspended: str | None = None
        self.leaves = True
        self.disconnected = 0

    def log_out(self, reason: str, patience: float) -> bool:
        return self.leaves

    def disconnect(self) -> None:
        self.disconnected += 1


class Bench:
    """Ways to hosts a, b and c in portal groups 1, 2 and 3: ``groups``, by host. ``errors``: of
    connecting, by host. ``states``: ALUA states, by host. ``tried``: hosts, in order. ``resets``:
    LUNs that were; ``reset_error``: of the next ones. ``tpgs``, ``names``: what the LUN says.
    ``asked``: (host, states that were asked for). ``refusal``: of such requests."""

    def __init__(self, hosts: str = "abc", options: Options | None = None) -> None:
        self.now = 1000.0
        self.errors: dict[str, IserblkError] = {}
        self.states: dict[str, int] = {}
        self.tried: list[str] = []
        self.resets: list[int] = []
        self.tpgs = alua.TPGS_BOTH
        self.names: tuple[str, ...] = ("naa.6001",)
        self.asked: list[tuple[str, list[tuple[int, int]]]] = []
        self.refusal: ScsiError | None = None
        self.reset_error: IserblkError | None = None
        self.options = options or Options()
        addresses = [(Url("iser", host, 3260, "iqn.x", 0), self.options) for host in hosts]
        self.paths = Paths(addresses, lambda: self.now)
        self.groups = {host: number for number, host in enumerate(hosts, 1)}

    async def connect(self, url: Url, options: Options, isid: bytes = b"") -> Session:
        await trio.lowlevel.checkpoint()
        self.tried.append(url.host)
        if url.host in self.errors:
            raise self.errors[url.host]
        return Session(url.host, self.groups[url.host])

    def access(self, session: Session, lun: int, name: str) -> Operation[Access | None]:
        yield 0.0
        host = session.portal[0]
        if host not in self.states:
            return None
        optimized = alua.ACTIVE_OPTIMIZED in self.states.values()
        return Access(self.states[host], self.groups[host], self.tpgs, optimized, self.names)

    def command(
        self, session: Session, lun: bytes, request: bytes, name: str, data_out: memoryview
    ) -> Operation[int]:
        assert request == alua.set_target_port_groups(len(data_out))
        host, wanted = session.portal[0], alua.decode_set(data_out)
        self.asked.append((host, wanted))
        yield 0.0
        if self.refusal is not None:
            raise self.refusal
        for group, state in wanted:
            self.states[next(each for each in "abc" if self.groups[each] == group)] = state
        return len(data_out)

    def reset_lun(self, session: Session, lun: int) -> Operation[None]:
        self.resets.append(lun)
        yield 0.0
        if self.reset_error is not None:
            raise self.reset_error

    async def session(self, settled: bool = True) -> Any:
        """The next session; ``tried`` begins anew."""
        self.tried.clear()
        made: Any = await self.paths.connect()
        if settled:
            self.paths.settled(made)
        return made

    def replace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("connect", "access", "command", "reset_lun"):
            monkeypatch.setattr(paths_module, name, getattr(self, name))

    async def comes_up(self) -> str:
        """The host of the session that comes into use, after as many attempts as there are ways.
        Raises what the last attempt has failed with."""
        for left in reversed(range(3)):
            fresh = await self.session(settled=False)
            try:
                finish(self.paths.look(0, fresh))
            except ConnectFailed:
                if not left:
                    raise
                continue
            break
        self.paths.settled(fresh)
        assert self.current is not None
        return self.current

    @property
    def current(self) -> str | None:
        way = self.paths.ways.current
        return None if way is None else way.address[0].host


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench()
    made.replace(monkeypatch)
    return made


def refuse(bench: Bench, session: Any, sense: bytes = STANDBY) -> Command:
    """A command ends with ``sense`` on the session in use."""
    bench.paths.watch(session, LUN)
    slot = PlainCommand(0)
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
    """In one line, and each with its portal, whether the error itself names that or not."""
    bench.errors = {
        "a": ConnectFailed("cannot connect to a:3260: down"),
        "b": IserblkError("no\nsuch device"),
        "c": ConnectFailed("c:3260: gone"),
    }
    with pytest.raises(ConnectFailed) as raised:
        await bench.session()
    assert raised.value is bench.errors["a"]
    assert str(raised.value) == (
        "cannot connect to a:3260: down; iser://b:3260: no such device; c:3260: gone"
    )


async def test_an_error_at_once_tells_of_the_ways_before_it(bench: Bench) -> None:
    bench.errors = {"a": ConnectFailed("a:3260: down"), "b": AuthenticationError("b:3260: who?")}
    with pytest.raises(AuthenticationError) as raised:
        await bench.session()
    assert str(raised.value) == "a:3260: down; b:3260: who?"


async def test_ports_that_carry_out_nothing_and_portals_that_are_down(bench: Bench) -> None:
    """The error has both, each once, however often it was tried."""
    bench.errors["b"] = ConnectFailed("b:3260: down")
    bench.states = {"a": ASLEEP, "c": ASLEEP}
    bench.tpgs = alua.TPGS_IMPLICIT
    for _ in range(3):
        with pytest.raises(ConnectFailed) as raised:
            await bench.comes_up()
    words = str(bench.paths.tell_all(raised.value)).split("; ")
    assert [word.partition(":3260: ")[0] for word in words] == ["iser://a", "b", "iser://c"]
    assert words[0].endswith("in the state standby")


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


@pytest.mark.parametrize(
    "known, waits",
    [
        ({"a": 1, "b": 2, "c": 3}, ["b", "c", "respite", "a"]),
        ({"a": 1, "b": 1, "c": 3}, ["respite", "b", "c", "respite", "a"]),
        ({"a": 1, "c": 3}, ["respite", "b", "c", "respite", "a"]),
    ],
)
async def test_time2wait_is_for_the_portal_group_that_was_lost(
    bench: Bench, known: dict[str, int], waits: list[str]
) -> None:
    """Through another group a login ends nothing at the target, and may come at once. A group that
    is not known may be the same."""
    await bench.session()
    bench.paths.groups = {f"{host}:3260": group for host, group in known.items()}
    bench.errors = {host: ConnectFailed(f"{host}: down") for host in "abc"}
    bench.tried.clear()

    async def respite() -> None:
        bench.tried.append("respite")

    with pytest.raises(ConnectFailed):
        await bench.paths.connect(b"", respite)
    assert bench.tried == waits


async def test_time2wait_is_for_groups_that_were_lost_before_they_were_in_use(
    bench: Bench,
) -> None:
    """What was sent through one of them may be at the target still, until a reset."""
    await bench.session()
    bench.paths.groups = {f"{host}:3260": group for host, group in bench.groups.items()}
    fresh = await bench.session(settled=False)
    finish(bench.paths.reset(0, fresh))
    assert bench.tried == ["b"] and bench.resets == [0]
    bench.errors = {host: ConnectFailed(f"{host}: down") for host in "abc"}
    bench.tried.clear()

    async def respite() -> None:
        bench.tried.append("respite")

    with pytest.raises(ConnectFailed):
        await bench.paths.connect(b"", respite)
    assert sorted(bench.tried) == ["a", "b", "c", "respite", "respite"]
    assert bench.tried[bench.tried.index("c") - 1] != "respite"


async def test_an_opening_waits_for_nothing(bench: Bench) -> None:
    """There is no session yet."""

    async def respite() -> None:
        raise AssertionError

    await bench.paths.connect(b"", respite)
    assert bench.tried == ["a"]


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


# -- explicit ALUA ---------------------------------------------------------------------------------

ACTIVE, SLOW, ASLEEP = alua.ACTIVE_OPTIMIZED, alua.ACTIVE_NON_OPTIMIZED, alua.STANDBY
asking = pytest.mark.logs("the target is asked to activate it", "the target does not do so")


@asking
@pytest.mark.parametrize("asleep", [alua.STANDBY, alua.UNAVAILABLE])
@pytest.mark.parametrize("tpgs", [alua.TPGS_EXPLICIT, alua.TPGS_BOTH])
async def test_where_no_port_carries_out_commands_one_is_activated(
    bench: Bench, tpgs: int, asleep: int
) -> None:
    """The last one that is tried: only then it is known that all others do not."""
    bench.tpgs = tpgs
    bench.states = dict.fromkeys("abc", asleep)
    assert await bench.comes_up() == "c"
    assert bench.asked == [("c", [(3, ACTIVE)])]


@pytest.mark.parametrize("tpgs", [alua.TPGS_NONE, alua.TPGS_IMPLICIT])
async def test_a_target_that_sets_its_states_itself_is_not_asked(bench: Bench, tpgs: int) -> None:
    bench.tpgs = tpgs
    bench.states = dict.fromkeys("abc", ASLEEP)
    with pytest.raises(ConnectFailed, match="in the state standby"):
        await bench.comes_up()
    assert not bench.asked


async def test_nothing_is_asked_where_the_user_does_not_want_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(options=Options(alua="follow"))
    bench.replace(monkeypatch)
    bench.states = dict.fromkeys("abc", ASLEEP)
    with pytest.raises(ConnectFailed):
        await bench.comes_up()
    assert not bench.asked


@pytest.mark.parametrize("other", [ACTIVE, SLOW])
async def test_a_port_that_works_is_taken_instead(bench: Bench, other: int) -> None:
    bench.states = {"a": ASLEEP, "b": other, "c": ASLEEP}
    assert await bench.comes_up() == "b"
    assert not bench.asked


@asking
async def test_a_short_interruption_moves_nothing(bench: Bench) -> None:
    """The portal in use is lost, and the others are asleep. Only when it fails again, another is
    activated."""
    bench.states = {"a": ACTIVE, "b": ASLEEP, "c": ASLEEP}
    assert await bench.comes_up() == "a"
    for _ in range(2):  # b and c: a has failed lately
        fresh = await bench.session(settled=False)
        with pytest.raises(ConnectFailed):
            finish(bench.paths.look(0, fresh))
    assert not bench.asked
    assert await bench.comes_up() == "a"
    bench.errors["a"] = ConnectFailed("a: refused")
    assert await bench.comes_up() in "bc"
    assert len(bench.asked) == 1


@asking
async def test_hosts_do_not_take_the_lun_from_each_other_again_and_again(bench: Bench) -> None:
    """Another host takes the LUN to a port that we cannot reach. We ask once, and then rarely."""
    step_s = 10.0
    bench.states = {"a": ACTIVE, "b": ASLEEP, "c": ASLEEP}
    bench.errors["a"] = ConnectFailed("a: refused")
    asked_at: list[float] = []
    begun = bench.now
    while bench.now < begun + 20_000:
        try:
            await bench.comes_up()
        except ConnectFailed:
            pass
        else:
            bench.states = {"a": ACTIVE, "b": ASLEEP, "c": ASLEEP}  # the other host
        if len(bench.asked) > len(asked_at):
            asked_at.append(bench.now)
        bench.now += step_s
    gaps = [after - before for before, after in pairwise(asked_at)]
    assert gaps[0] >= FIRST_ASK_S
    assert all(after >= min(LAST_ASK_S, 2 * (before - step_s)) for before, after in pairwise(gaps))
    assert len(gaps) < 10


@asking
async def test_a_target_that_refuses_is_not_asked_at_once_again(bench: Bench) -> None:
    bench.states = dict.fromkeys("abc", ASLEEP)
    bench.refusal = ScsiError("conflict", 0x18)
    for _ in range(5):
        with pytest.raises(ConnectFailed, match="standby"):
            await bench.comes_up()
    assert len(bench.asked) == 1
    bench.now += FIRST_ASK_S
    bench.refusal = None
    assert await bench.comes_up() in "abc"


@asking
@pytest.mark.parametrize(
    ("states", "tpgs", "asked"),
    [
        ({"a": SLOW, "b": SLOW, "c": SLOW}, alua.TPGS_EXPLICIT, True),
        ({"a": SLOW, "b": SLOW, "c": SLOW}, alua.TPGS_BOTH, False),  # it moves by itself
        ({"a": SLOW, "b": ACTIVE, "c": SLOW}, alua.TPGS_EXPLICIT, False),  # another host's
    ],
)
async def test_a_port_that_is_slow(
    bench: Bench, states: dict[str, int], tpgs: int, asked: bool
) -> None:
    bench.tpgs, bench.states = tpgs, states
    assert await bench.comes_up() == "a"
    assert bool(bench.asked) == asked


@asking
@pytest.mark.parametrize("names", [("naa.6002",), ()])
async def test_another_lun_is_not_touched(bench: Bench, names: tuple[str, ...]) -> None:
    """The states of another LUN, that is behind the portal now, are none of our business."""
    bench.states = dict.fromkeys("abc", ACTIVE)
    await bench.comes_up()
    bench.states = dict.fromkeys("abc", ASLEEP)
    bench.names = names
    with pytest.raises(ConnectFailed):
        await bench.comes_up()
    assert not bench.asked
    bench.names = ("naa.6001",)
    await bench.comes_up()
    assert len(bench.asked) == 1


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


async def test_a_reset_that_fails_is_sent_again_at_the_next_attempt(bench: Bench) -> None:
    """Though its portal group has been used by then: what the first group was given may still be
    carried out."""
    finish(bench.paths.reset(0, await bench.session()))
    bench.errors = {host: ConnectFailed(f"{host}: down") for host in "ac"}
    bench.reset_error = ConnectionLost("cut off")
    for times in (1, 2):
        second = await bench.session(settled=False)
        with pytest.raises(ConnectionLost):
            finish(bench.paths.reset(0, second))
        assert bench.resets == [0] * times
    bench.reset_error = None
    finish(bench.paths.reset(0, await bench.session()))
    assert bench.resets == [0] * 3
    finish(bench.paths.reset(0, await bench.session()))
    assert bench.resets == [0] * 3


@pytest.mark.parametrize(("second", "resets"), [("iqn.y", [0]), ("IQN.X", [])])
async def test_groups_belong_to_a_target(second: str, resets: list[int], bench: Bench) -> None:
    """The same tag behind another target's name is another group; case does not count in names."""
    addresses = [
        (Url("iser", host, 3260, name, 0), bench.options)
        for host, name in (("a", "iqn.x"), ("b", second))
    ]
    bench.paths = Paths(addresses, lambda: bench.now)
    bench.groups = {"a": 1, "b": 1}
    finish(bench.paths.reset(0, await bench.session()))
    other = await bench.session()
    assert bench.current == "b"
    finish(bench.paths.reset(0, other))
    assert bench.resets == resets


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
