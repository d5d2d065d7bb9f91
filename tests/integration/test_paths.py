"""Several portals to one LUN: which portal is used, with a target that has two portal groups."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.commands.command import Command, Operation
from iserblk.commands.listeners import LunListener
from iserblk.commands.running import command
from iserblk.disk.multipath.paths import Paths, access_state, reset_lun
from iserblk.errors import AuthenticationError, ConnectFailed, TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.options import Options
from iserblk.scsi import alua, cdb, luns
from iserblk.url import Url, parse_url
from tests.cli.commands import Server, good_json, serving
from tests.support import logs
from tests.support.target import IQN
from tests.support.until import until_blocking

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL)


class Ported:
    """A target with two portals, in groups 1 and 2. ``urls``: of LUN 0 through them."""

    def __init__(self, server: Server, states: Path, scheme: str) -> None:
        self._server = server
        self._states = states
        listen = server.url.removeprefix("iser://").partition("/")[0]
        (target,) = good_json("discover", f"iscsi://{listen}")["targets"]
        self.urls = [
            f"{scheme}://{each['host']}:{each['port']}/{IQN}/0" for each in target["portals"]
        ]

    def set(self, *states: str) -> None:
        """Set the states of both groups; returns when the target has taken them over."""
        text = "".join(f"{tag} {state}\n" for tag, state in enumerate(states, 1))
        self._states.write_text(text)
        before = self._server.log.read_text().count("read again")
        self._server.process.send_signal(signal.SIGHUP)
        until_blocking(lambda: self._server.log.read_text().count("read again") != before)

    def paths(self) -> Paths:
        addresses = [(parse_url(url), Options()) for url in self.urls]
        return Paths(addresses, time.monotonic)


@pytest.fixture(params=["iscsi", "iser"])
def ported(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ported]:
    states = tmp_path / "states"
    states.write_text("")
    arguments = ["-v", "target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    for group in (1, 2):
        arguments += ["--listen", f"127.0.0.1:0,{group}"]
    arguments += ["--access-states", str(states)]
    with serving(*arguments, log=tmp_path / "log") as server:
        yield Ported(server, states, request.param)


@asynccontextmanager
async def driven(session: Session) -> AsyncIterator[TrioDriver]:
    driver = TrioDriver(session)
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        try:
            yield driver
        finally:
            with trio.CancelScope(shield=True):
                await driver.log_out()
            nursery.cancel_scope.cancel()


def steps(paths: Paths, fresh: Session) -> Operation[None]:
    yield from paths.look(0, fresh)
    yield from paths.reset(0, fresh)


def group_of(session: Session) -> int:
    return session.parameters.target_portal_group_tag


async def test_the_first_one_is_taken(ported: Ported) -> None:
    paths = ported.paths()
    session = await paths.connect()
    async with driven(session) as driver:
        await driver.run_operation(steps(paths, session))
        paths.settled(session)
        assert group_of(session) == 1
        assert paths.ways.current is paths.ways.all[0]
        assert paths.ways.current.state == alua.ACTIVE_OPTIMIZED


async def test_a_portal_that_is_down(ported: Ported) -> None:
    paths = ported.paths()
    url, options = paths.ways.all[0].address
    paths.ways.all[0].address = (parse_url(url.redacted().replace(f":{url.port}/", ":1/")), options)
    session = await paths.connect()
    async with driven(session):
        assert group_of(session) == 2
    assert "refused" in paths.ways.all[0].error


async def test_a_portal_that_refuses_our_name(
    ported: Ported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused login is an error when the disk is opened; later the disk uses the other portal."""
    refuses = parse_url(ported.urls[0]).port
    honest = connect

    async def choosy(url: Url, options: Options, isid: bytes = b"") -> Session:
        if url.port == refuses:
            raise AuthenticationError("wrong secret")
        return await honest(url, options, isid)

    monkeypatch.setattr("iserblk.disk.multipath.paths.connect", choosy)
    paths = ported.paths()
    with pytest.raises(AuthenticationError):
        await paths.connect()
    refuses = 0
    session = await paths.connect()
    async with driven(session) as driver:
        await driver.run_operation(steps(paths, session))
        paths.settled(session)
    refuses = parse_url(ported.urls[0]).port
    session = await paths.connect()
    async with driven(session):
        assert group_of(session) == 2


async def test_all_are_down() -> None:
    """One error names both portals."""
    addresses = [(parse_url(f"iscsi://127.0.0.{i}:1/{IQN}/0"), Options()) for i in (1, 2)]
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.2:1: "):
        await Paths(addresses, time.monotonic).connect()


async def test_a_port_in_standby(ported: Ported) -> None:
    """A port in standby takes logins but no commands: the next attempt uses the other port."""
    ported.set("standby", "non-optimized")
    paths = ported.paths()
    session = await paths.connect()
    async with driven(session) as driver:
        assert group_of(session) == 1
        with pytest.raises(ConnectFailed, match="in the state standby"):
            await driver.run_operation(steps(paths, session))
    session = await paths.connect()
    async with driven(session) as driver:
        assert group_of(session) == 2
        await driver.run_operation(steps(paths, session))
        paths.settled(session)
        assert paths.ways.current is paths.ways.all[1]
        assert paths.ways.current.state == alua.ACTIVE_NON_OPTIMIZED


@pytest.mark.parametrize(
    ("moves", "resets"),
    [
        ((1, 1), [0, 0]),
        ((1, 2), [0, 1]),
        ((2, 1), [0, 1]),
        ((1, -2, 1), [0, 1, 1]),
        ((1, -2, -2, 2, -2, 2), [0, 1, 0, 0, 0, 0]),
    ],
)
async def test_another_group_gets_a_reset(
    ported: Ported, moves: tuple[int, ...], resets: list[int]
) -> None:
    """A disk that changes to another portal group resets the LUN, which ends tasks that its old
    session left there. In the same group session reinstatement does that.

    Negative numbers: that connection is lost before it is used, and may have left tasks, too. A
    witness session sees the reset by its unit attention."""
    paths = ported.paths()
    witness = await ported.paths().connect()
    seen: list[int] = []

    class Codes(LunListener):
        def hear(self, slot: Command) -> None:
            seen.append(slot.sense[12] << 8 | slot.sense[13])

    witness.listeners.add(luns.encode(0), Codes())
    async with driven(witness) as watching:
        await look(watching, witness)
        for group, reset in zip(moves, resets, strict=True):
            seen.clear()
            for way in paths.ways.all:
                way.state = None if way.index == abs(group) - 1 else alua.STANDBY
                way.failed_at = None
            paths.ways.current = None
            fresh = await paths.connect()
            async with driven(fresh) as driver:
                assert group_of(fresh) == abs(group)
                await driver.run_operation(steps(paths, fresh))
                if group > 0:
                    paths.settled(fresh)
            await look(watching, witness)
            assert seen.count(0x2903) == reset


async def look(driver: TrioDriver, session: Session) -> None:
    """Send TEST UNIT READY, which takes pending unit attentions."""
    await driver.run_operation(command(session, luns.encode(0), cdb.test_unit_ready(), "LUN"))


async def test_states_and_resets_by_hand(ported: Ported) -> None:
    ported.set("unavailable", "optimized")
    session = await ported.paths().connect()
    async with driven(session) as driver:
        state = await driver.run_operation(access_state(session, 0, "LUN"))
        assert state == alua.UNAVAILABLE
        await driver.run_operation(reset_lun(session, 0))
        with pytest.raises(TransportError, match="LUN does not exist"):
            await driver.run_operation(reset_lun(session, 9))
