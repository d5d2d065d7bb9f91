"""One target name at two portals, and a LUN that does not tell which it is."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import Found, FoundTarget
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.multipath import discovering, proving
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.multipath.paths import Paths
from iserblk.disk.multipath.proving import NotProven, prove_ways
from iserblk.disk.seam import LunInfo
from iserblk.errors import ConnectFailed, IserblkError
from iserblk.initiator.connecting.iwarp import Address as SocketAddress
from iserblk.iscsi.send_targets import Portal
from iserblk.options import Options
from iserblk.url import Url
from tests.disk.fake_lun import FakeLuns, known

IQN = "iqn.2026-11.example:disk"
A, B = "192.0.2.1", "192.0.2.2"
T10, NAA = "t10.IET     00010001", "naa.5000c500aabb0001"


class World:
    """``lists``: by portal, the portals that it tells of the target. ``away``: those that do not
    answer. ``there``: what the LUN says at each."""

    def __init__(self) -> None:
        self.lists = {A: [A, B], B: [A, B]}
        self.away: set[str] = set()
        self.there: dict[str, LunInfo] = {}
        self.asked: list[str] = []
        self.info = replace(known(FakeLuns()).info, identifiers=(T10,))

    async def find_targets(self, url: Url, _options: Options, probe: bool) -> Found:
        await trio.lowlevel.checkpoint()
        assert not probe and url.iqn == IQN
        self.asked.append(url.host)
        if url.host in self.away:
            raise ConnectFailed(f"{url.host}: refused")
        ways = [Candidate(Portal(host, 3260, 1), None) for host in self.lists[url.host]]
        other = [Candidate(Portal(B, 3260, 1), None)]  # it has another target at both
        targets = [FoundTarget(IQN.upper(), ways), FoundTarget(f"{IQN}-other", other)]
        return Found("source", url.scheme, targets, [])

    async def resolve(self, host: str, port: int) -> list[SocketAddress]:
        await trio.lowlevel.checkpoint()
        return [SocketAddress(2, ({"name.example": B}.get(host, host), port))]

    async def connect(self, url: Url, _options: object) -> Any:
        await trio.lowlevel.checkpoint()
        if url.host in self.away:
            raise ConnectFailed(f"{url.host}: refused")
        return SimpleNamespace(portal=url.host, fail=lambda error: None)

    def identify(self, session: Any, *_: object) -> Generator[float, None, Any]:
        yield 0.0
        return self.there.get(session.portal, self.info), Geometry(block=512, long_cdbs=True)

    def driver(self, _session: Any) -> Any:
        return Driver()

    def paths(self, *hosts: str) -> Paths:
        (address,) = settle([f"iscsi://{host}/{IQN}/0" for host in hosts], {})
        assert address.paths is not None
        address.paths.ways.current = address.paths.ways.all[0]
        return address.paths

    async def prove(self, paths: Paths) -> None:
        core: Any = SimpleNamespace(info=self.info)
        await prove_ways(paths, [core])


class Driver:
    """Stands in for TrioDriver."""

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def run_operation(self, operation: Generator[float, None, None]) -> None:
        for _ in operation:
            await trio.lowlevel.checkpoint()

    async def log_out(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(discovering, "resolve", made.resolve)
    monkeypatch.setattr(proving, "find_targets", made.find_targets)
    monkeypatch.setattr(proving, "connect", made.connect)
    monkeypatch.setattr(proving, "identify", made.identify)
    monkeypatch.setattr(proving, "TrioDriver", made.driver)
    return made


async def test_portals_that_list_each_other(world: World) -> None:
    for other in (B, "name.example"):
        world.lists = {A: [A, B], B: [A, B], "name.example": [A]}
        paths = world.paths(A, other)
        await world.prove(paths)
        assert paths.proof is not None
        for way in paths.ways.all:
            await paths.proof(*way.address)


@pytest.mark.parametrize(("one", "two"), [([A], [B]), ([A, B], [B]), ([A], [A, B]), ([], [])])
async def test_portals_that_do_not(world: World, one: list[str], two: list[str]) -> None:
    """Two hosts with a configuration that was copied."""
    world.lists = {A: one, B: two}
    with pytest.raises(NotProven, match=r"192\.0\.2\.2:3260.*give the URL of one portal only"):
        await world.prove(world.paths(A, B))


async def test_an_identifier_is_enough(world: World) -> None:
    world.info = replace(world.info, identifiers=(NAA,))
    paths = world.paths(A, B)
    await world.prove(paths)
    assert not world.asked and paths.proof is None


async def test_without_a_serial_number_nothing_tells(world: World) -> None:
    world.info = replace(world.info, serial="")
    with pytest.raises(NotProven, match="no serial number"):
        await world.prove(world.paths(A, B))


@pytest.mark.parametrize("other", [{"size": 4096}, {"serial": "S2"}, {"product": "another"}])
async def test_another_size_or_serial_number(world: World, other: dict[str, Any]) -> None:
    world.there[B] = replace(world.info, **other)
    with pytest.raises(NotProven, match="another LUN is there now"):
        await world.prove(world.paths(A, B))


async def test_a_portal_that_is_away_is_asked_when_it_comes_into_use(world: World) -> None:
    world.away = {B}
    paths = world.paths(A, B)
    await world.prove(paths)
    assert paths.proof is not None
    way = paths.ways.all[1]
    with pytest.raises(ConnectFailed):
        await paths.proof(*way.address)
    world.away = {A}  # what it lists is known already
    await paths.proof(*way.address)
    world.lists[B] = [B]
    await paths.proof(*way.address)  # proven once


async def test_a_portal_that_does_not_list_the_first_is_not_used(world: World) -> None:
    world.away = {B}
    paths = world.paths(A, B)
    await world.prove(paths)
    world.away = {A}
    world.lists[B] = [B]
    assert paths.proof is not None
    with pytest.raises(NotProven):
        await paths.proof(*paths.ways.all[1].address)


@pytest.mark.logs("192.0.2.2:3260 is not used: ")
async def test_a_portal_that_was_found_is_left_out(world: World) -> None:
    """``portals=discover``: no URL was given for it."""
    world.lists[B] = [B]
    paths = world.paths(A, B)
    paths.given = 1
    await world.prove(paths)
    assert paths.proof is not None
    with pytest.raises(NotProven):
        await paths.proof(*paths.ways.all[1].address)


@pytest.mark.logs("192.0.2.1:3260 does not tell its portals")
async def test_a_portal_in_use_that_does_not_tell(world: World) -> None:
    world.away = {A}
    with pytest.raises(NotProven):
        await world.prove(world.paths(A, B))


async def test_a_way_whose_proof_fails_is_not_connected_to(world: World) -> None:
    paths = world.paths(A, B)

    async def proof(url: Url, _options: Options) -> None:
        await trio.lowlevel.checkpoint()
        raise NotProven(f"{url.host}: not proven")

    paths.proof = proof
    with pytest.raises(IserblkError, match="not proven"):
        await paths.connect()
