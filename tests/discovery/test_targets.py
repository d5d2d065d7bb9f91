"""Finding targets: which source is asked, what is known of each portal, and the probes."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple

import pytest
import trio
import trio.testing

from iserblk.discovery import targets
from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import Found, FoundTarget, find_targets, takes_iser
from iserblk.errors import ConnectFailed, ConnectionLost
from iserblk.iscsi.send_targets import INFINIBAND, Portal, TargetRecord, Told
from iserblk.options import Options
from iserblk.url import Url, parse_place

IQN = "iqn.2026-11.example:disk"
NEAR, FAR = Portal("10.1.0.1", 3260, 1), Portal("192.0.2.1", 860, 2)
DEVICE = Portal("192.0.2.2", 3260, 3, INFINIBAND)


class Answer(NamedTuple):
    """As ``send_targets`` returns it."""

    portal: Portal
    scheme: str
    targets: list[TargetRecord]
    left_out: list[str]


def ask_at(host: str, scheme: str = "iser", port: int = 3260) -> Url:
    return Url(scheme=scheme, host=host, port=port, iqn="", lun=None)


class World:
    """What the network answers. ``probed``: portals that were asked for iSER, in order."""

    def __init__(self) -> None:
        self.answer = Answer(NEAR, "iser", [TargetRecord(IQN, (FAR, NEAR))], [])
        self.records: list[TargetRecord] = []
        self.iser: set[Portal] = set()
        self.probed: list[Portal] = []
        self.at_once = 0
        self.most_at_once = 0

    async def send_targets(self, url: Url, options: Options) -> Answer:
        await trio.lowlevel.checkpoint()
        return self.answer

    async def ask_isns(self, url: Url, options: Options) -> Told:
        await trio.lowlevel.checkpoint()
        return Told(self.records, ["a node"])

    async def takes_iser(self, portal: Portal, options: Options) -> bool:
        self.probed.append(portal)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await trio.testing.wait_all_tasks_blocked()
        self.at_once -= 1
        return any((portal.host, portal.port) == (each.host, each.port) for each in self.iser)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for name in ("send_targets", "ask_isns", "takes_iser"):
        monkeypatch.setattr(targets, name, getattr(made, name))
    monkeypatch.setattr(targets, "local_networks", lambda: [ipaddress.ip_network("10.1.0.0/16")])
    return made


async def test_the_portal_that_answered_over_iser_is_known_to_take_it(world: World) -> None:
    found = await find_targets(ask_at("10.1.0.1"), Options(), probe=False)
    assert (found.source, found.scheme) == ("iser://10.1.0.1:3260", "iser")
    (target,) = found.targets
    assert target == FoundTarget(IQN, [Candidate(NEAR, True, True), Candidate(FAR, None, False)])
    assert not world.probed


async def test_a_byte_stream_does_not_tell_who_takes_iser(world: World) -> None:
    found = await find_targets(ask_at("10.1.0.1"), Options(style="stream"), probe=False)
    (target,) = found.targets
    assert [way.iser for way in target.ways] == [None, None]
    assert found.url(target, target.ways[0]) == f"iser://10.1.0.1:3260/{IQN}"


async def test_over_tcp_nothing_is_known_of_any_portal(world: World) -> None:
    world.answer = world.answer._replace(scheme="iscsi")
    found = await find_targets(ask_at("10.1.0.1", "iscsi"), Options(), probe=False)
    assert found.source == "iscsi://10.1.0.1:3260"
    assert [way.iser for way in found.targets[0].ways] == [None, None]
    assert [way.portal for way in found.targets[0].ways] == [NEAR, FAR]


# shows: SYSTEM-22
async def test_a_portal_group_may_say_that_it_takes_iser(world: World) -> None:
    world.answer = Answer(NEAR, "iscsi", [TargetRecord(IQN, (FAR, DEVICE))], [])
    found = await find_targets(ask_at("10.1.0.1", "iscsi"), Options(), probe=False)
    assert [way.iser for way in found.targets[0].ways] == [True, None]


# shows: SYSTEM-23
async def test_a_probe_asks_each_portal_once_and_not_the_known_one(world: World) -> None:
    """What a probe finds out counts more than the subnet, and than the portal group's type."""
    world.answer = Answer(
        NEAR,
        "iser",
        [TargetRecord(IQN, (NEAR, FAR, DEVICE)), TargetRecord(f"{IQN}2", (FAR,))],
        [],
    )
    world.iser = {FAR}
    found = await find_targets(ask_at("10.1.0.1"), Options(), probe=True)
    assert sorted((each.host, each.port) for each in world.probed) == [
        ("192.0.2.1", 860),
        ("192.0.2.2", 3260),
    ]
    ways = {way.portal: way.iser for way in found.targets[0].ways}
    assert ways == {NEAR: True, FAR: True, DEVICE: False}
    assert found.targets[0].ways[-1].portal == DEVICE
    assert found.targets[1].ways == [Candidate(FAR, True, False)]


# shows: SYSTEM-23
async def test_only_so_many_portals_are_probed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "PROBES_AT_A_TIME", 3)
    portals = tuple(Portal(f"192.0.2.{number}", 3260, 1) for number in range(8))
    world.answer = Answer(NEAR, "iser", [TargetRecord(IQN, portals)], [])
    await find_targets(ask_at("10.1.0.1"), Options(), probe=True)
    assert len(world.probed) == 8 and world.most_at_once == 3


async def test_only_so_many_portals_are_probed_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "PROBES", 3)
    portals = tuple(Portal(f"192.0.2.{number}", 3260, 1) for number in range(8))
    world.answer = Answer(FAR, "iscsi", [TargetRecord(IQN, portals)], [])
    found = await find_targets(ask_at("10.1.0.1"), Options(), probe=True)
    assert len(world.probed) == 3 and len(found.targets[0].ways) == 8
    assert found.left_out == ["8 portals to be probed: 3 of them are"]


async def test_what_cannot_be_reached_is_not_probed(world: World) -> None:
    lost = Portal("fe80::1", 3260, 1)
    world.answer = Answer(FAR, "iscsi", [TargetRecord(IQN, (lost, NEAR))], ["an address"])
    found = await find_targets(ask_at("10.1.0.1"), Options(), probe=True)
    assert [way.portal for way in found.targets[0].ways] == [NEAR, lost]
    assert [each.host for each in world.probed] == [NEAR.host]
    assert found.left_out == ["an address"]


def test_only_so_many_lines_about_what_is_left_out() -> None:
    assert targets.shortened(["a", "b"]) == ["a", "b"]
    said = targets.shortened([str(number) for number in range(1000)])
    assert (said[0], said[-1], len(said)) == ("0", "992 more", 9)


async def test_an_isns_server_does_not_say_who_takes_iser(world: World) -> None:
    world.records = [TargetRecord(IQN, (FAR,))]
    url = ask_at("2001:db8::1", "isns", 3205)
    found = await find_targets(url, Options(), probe=False)
    assert (found.source, found.scheme) == ("isns://[2001:db8::1]:3205", "iscsi")
    assert found.targets == [FoundTarget(IQN, [Candidate(FAR, None, False)])]
    assert found.left_out == ["a node"]
    assert not world.probed


@pytest.mark.parametrize(
    ("iser", "asked", "scheme"),
    [
        (True, "iscsi", "iser"),
        (False, "iser", "iscsi"),
        (None, "iser", "iser"),
        (None, "iscsi", "iscsi"),
    ],
)
def test_urls(iser: bool | None, asked: str, scheme: str) -> None:
    """What is known of a portal decides; else it is reached as the source was."""
    way = Candidate(Portal("2001:db8::1", 860, 1), iser)
    target = FoundTarget(IQN, [way])
    found = Found("source", asked, [target])
    assert found.url(target, way) == f"{scheme}://[2001:db8::1]:860/{IQN}"


@pytest.mark.parametrize("name", ["iqn.2026-11.example:a?b=c#d%41&e", "eui.0123456789abcdef", IQN])
def test_the_url_of_any_name_means_that_name(name: str) -> None:
    """A user copies it. The name chooses no LUN, and no option."""
    way = Candidate(Portal("192.0.2.1", 860, 1), False)
    target = FoundTarget(name, [way])
    url = parse_place(Found("source", "iscsi", [target]).url(target, way))
    assert (url.iqn, url.lun, url.options) == (name, None, {})


class Connection:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Connection:
    """``choose`` finds this connection; it must wait for an MPA Reply only shortly."""
    made = Connection()

    async def resolve(host: str, port: int) -> list[object]:
        await trio.lowlevel.checkpoint()
        return [(host, port)]

    async def choose(addresses: object, options: Options, name: str) -> tuple[Connection, str]:
        await trio.lowlevel.checkpoint()
        assert addresses == [("192.0.2.1", 860)] and name == "192.0.2.1:860"
        assert (options.fallback, options.rcap) == ("iscsi", "iwarp")
        return made, "iwarp"

    monkeypatch.setattr(targets, "resolve", resolve)
    monkeypatch.setattr(targets, "choose", choose)
    return made


async def test_a_probe_closes_its_connection(connection: Connection) -> None:
    assert await takes_iser(FAR, Options(rcap="iwarp"))
    assert connection.closed


@pytest.mark.parametrize("error", [ConnectFailed("no MPA Reply"), ConnectionLost("reset")])
async def test_an_error_means_no_iser(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> list[object]:
        await trio.lowlevel.checkpoint()
        raise error

    monkeypatch.setattr(targets, "resolve", resolve)
    assert not await takes_iser(FAR, Options())


async def test_a_probe_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def resolve(host: str, port: int) -> list[object]:
        await trio.sleep_forever()
        return []

    monkeypatch.setattr(targets, "resolve", resolve)
    began = trio.current_time()
    assert not await takes_iser(FAR, Options())
    assert trio.current_time() - began == pytest.approx(targets.PROBE_TIMEOUT_S)
