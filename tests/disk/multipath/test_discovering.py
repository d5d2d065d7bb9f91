"""``portals=discover``: which portals are added to the given ones, in which order and how."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import Found, FoundTarget
from iserblk.disk.multipath import discovering
from iserblk.disk.multipath.addresses import Address, settle, with_paths
from iserblk.disk.multipath.discovering import FIND_S, MOST_FOUND, discover_ways
from iserblk.errors import BadArgument, ConnectFailed, HostNotFound
from iserblk.initiator.connecting.iwarp import Address as SocketAddress
from iserblk.iscsi.send_targets import Portal
from iserblk.options import PORTAL, Options
from iserblk.url import Url
from tests.support import clocks, logs

IQN = "iqn.2026-11.example:disk"
OPTIONS = Options(discover=PORTAL, rcap="verbs", header_digest="CRC32C")


class World:
    """``portals``: (host, takes iSER) as SendTargets reports them. ``tcp``, ``iser``: hosts that
    take a connection. ``names``: addresses of host names. ``asked``: portals that were asked;
    ``wanted``: for which target."""

    def __init__(self) -> None:
        self.portals: list[tuple[str, bool | None]] = []
        self.of = IQN
        self.tcp = {f"192.0.2.{number}" for number in range(10)}
        self.iser: set[str] = set()
        self.names: dict[str, list[str]] = {}
        self.refusing: set[str] = set()
        self.left_out: list[str] = []
        self.asked: list[str] = []
        self.wanted: list[str] = []

    async def find_targets(self, url: Url, options: Options, probe: bool) -> Found:
        await trio.lowlevel.checkpoint()
        assert not probe
        self.asked.append(url.host)
        self.wanted.append(url.iqn)
        if url.host in self.refusing:
            raise ConnectFailed(f"{url.host}: refused")
        ways = [Candidate(Portal(host, 3260, 1), iser) for host, iser in self.portals]
        other = FoundTarget(f"{IQN}-other", [Candidate(Portal("192.0.2.9", 3260, 1), True)])
        targets = [other, FoundTarget(self.of, ways)]
        return Found("source", url.scheme, targets, self.left_out)

    async def resolve(self, host: str, port: int) -> list[SocketAddress]:
        await trio.lowlevel.checkpoint()
        if host.startswith("no"):
            raise HostNotFound(host)
        addresses = self.names.get(host, [host])
        return [SocketAddress(socket.AF_INET, (each, port)) for each in addresses]

    async def connect_tcp(
        self, addresses: Sequence[SocketAddress], name: str, seconds: float
    ) -> socket.socket:
        await trio.lowlevel.checkpoint()
        if addresses[0].sockaddr[0] not in self.tcp:
            raise ConnectFailed(f"{name}: refused")
        return socket.socket()

    async def takes_iser(self, portal: Portal, options: Options) -> bool:
        await trio.lowlevel.checkpoint()
        return portal.host in self.iser


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    for name in ("find_targets", "resolve", "connect_tcp", "takes_iser"):
        monkeypatch.setattr(discovering, name, getattr(made, name))
    return made


def given(host: str = "192.0.2.1", scheme: str = "iser", options: Options = OPTIONS) -> Address:
    return Address(Url(scheme, host, 3260, IQN, 0), options)


def ways_of(address: Address) -> list[tuple[str, str]]:
    """(scheme, host) of each way."""
    if address.paths is None:
        return [(address.url.scheme, address.url.host)]
    return [(way.address[0].scheme, way.address[0].host) for way in address.paths.ways.all]


async def discovered(*addresses: Address) -> list[list[tuple[str, str]]]:
    return [ways_of(each) for each in await discover_ways(addresses)]


async def test_found_portals_follow_the_given_one(world: World) -> None:
    """Each is reached as it was reported; portals of other targets are left out."""
    world.portals = [("192.0.2.1", True), ("192.0.2.2", True), ("192.0.2.3", False)]
    assert await discovered(given()) == [
        [("iser", "192.0.2.1"), ("iser", "192.0.2.2"), ("iscsi", "192.0.2.3")]
    ]


async def test_a_portal_whose_interface_is_not_known_is_left_out(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, as is what the target says and cannot be read."""
    world.portals = [("fe80::1", True), ("192.0.2.2", True)]
    world.left_out = [f"address {number}" for number in range(20)]
    assert await discovered(given()) == [[("iser", "192.0.2.1"), ("iser", "192.0.2.2")]]
    *listed, last = [record.getMessage() for record in caplog.records]
    assert listed[0] == "source: left out: address 0"
    assert listed[-1] == "source: left out: 12 more"
    assert last.startswith("[fe80::1]:3260: found, and left out") and "%INTERFACE" in last


async def test_portals_beyond_a_bound_are_not_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A target may name any number of any hosts: each costs a look-up and a connection."""
    world.portals = [(f"198.51.100.{number}", True) for number in range(200)]
    world.tcp.update(host for host, _ in world.portals)
    looked: set[str] = set()

    async def count(addresses: Sequence[SocketAddress], name: str, seconds: float) -> socket.socket:
        looked.add(name)
        return await world.connect_tcp(addresses, name, seconds)

    monkeypatch.setattr(discovering, "connect_tcp", count)
    ((given_way, *found),) = await discovered(given())
    assert given_way == ("iser", "192.0.2.1") and len(found) == len(looked) == MOST_FOUND
    assert f"only {MOST_FOUND} of 200 portals are looked at" in caplog.text


async def test_names_that_are_not_found_out_do_not_hold_an_opening_up(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world.portals = [(f"slow{number}", True) for number in range(50)]
    resolve = world.resolve

    async def slowly(host: str, port: int) -> list[SocketAddress]:
        if host.startswith("slow"):
            await trio.sleep(10)
        return await resolve(host, port)

    monkeypatch.setattr(discovering, "resolve", slowly)
    with trio.fail_after(FIND_S + 1):
        assert await discovered(given()) == [[("iser", "192.0.2.1")]]
    assert "other portals are not used" in caplog.text


async def test_only_addresses_that_ask_for_it_get_more_ways(world: World) -> None:
    world.portals = [("192.0.2.2", True)]
    plain = given(options=Options())
    found = await discover_ways([plain, given("192.0.2.4")])
    assert found[0] is plain and len(ways_of(found[1])) == 2
    assert world.asked == ["192.0.2.4"]


async def test_nothing_found_leaves_one_way(world: World) -> None:
    world.portals = [("192.0.2.1", True)]
    assert await discovered(given()) == [[("iser", "192.0.2.1")]]


async def test_names_of_targets_are_compared_without_case(world: World) -> None:
    world.of = IQN.upper()
    world.portals = [("192.0.2.2", True)]
    assert len((await discovered(given()))[0]) == 2


async def test_a_portal_under_another_name_is_the_same(world: World) -> None:
    world.names = {"array": ["192.0.2.1", "192.0.2.2"], "also": ["192.0.2.3"]}
    world.portals = [("192.0.2.2", True), ("also", True), ("192.0.2.3", True), ("nowhere", True)]
    world.iser = {"nowhere"}
    with_names = await discovered(given("array"))
    assert with_names == [[("iser", "array"), ("iser", "also"), ("iser", "nowhere")]]


@pytest.mark.logs("does not answer: left out")
async def test_a_portal_that_does_not_answer_is_left_out(world: World) -> None:
    """It may still listen by rdma_cm alone, where it was reported to take iSER."""
    world.tcp = {"192.0.2.1"}
    world.iser = {"192.0.2.3", "192.0.2.4"}
    world.portals = [("192.0.2.2", True), ("192.0.2.3", True), ("192.0.2.4", False)]
    assert await discovered(given()) == [[("iser", "192.0.2.1"), ("iser", "192.0.2.3")]]


@pytest.mark.logs("does not tell of other portals")
async def test_given_portals_are_asked_until_one_answers(world: World) -> None:
    world.portals = [("192.0.2.5", True), ("192.0.2.7", True)]
    (joined,) = await discover_ways([given()])
    world.asked.clear()
    world.refusing = {"192.0.2.1"}
    world.portals = [("192.0.2.6", True)]
    assert await discovered(joined) == [[("iser", f"192.0.2.{number}") for number in (1, 5, 7, 6)]]
    assert world.asked == ["192.0.2.1", "192.0.2.5"]


@pytest.mark.logs("does not tell of other portals")
async def test_where_no_portal_answers_the_given_ones_are_used(world: World) -> None:
    world.refusing = {"192.0.2.1"}
    assert await discovered(given()) == [[("iser", "192.0.2.1")]]


DIRECTORY = Options(discover="isns://name-server", io_timeout=7.0)


async def test_an_isns_server_is_asked_in_place_of_the_portal(world: World) -> None:
    """For this target; what it does not know of a portal is as in the URL given."""
    world.portals = [("192.0.2.2", None), ("192.0.2.3", False)]
    address = given(options=DIRECTORY)
    assert await discovered(address) == [
        [("iser", "192.0.2.1"), ("iser", "192.0.2.2"), ("iscsi", "192.0.2.3")]
    ]
    assert world.asked == ["name-server"] and world.wanted == [IQN]
    world.asked.clear()
    slp = given(options=Options(discover="slp://?scope=lab"))
    assert len((await discovered(slp))[0]) == 3
    assert world.asked == [""]


@pytest.mark.logs("isns://name-server:3205 does not tell of other portals")
async def test_a_server_that_does_not_answer_is_asked_once(world: World) -> None:
    world.refusing = {"name-server"}
    two = with_paths([given(options=DIRECTORY), given("192.0.2.2", options=DIRECTORY)])
    assert await discovered(two) == [[("iser", "192.0.2.1"), ("iser", "192.0.2.2")]]
    assert world.asked == ["name-server"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("isns://", "no host"),
        ("isns://host:0", "port"),
        (f"isns://host/{IQN}", "leave out its name"),
        ("slp://host:x", "port"),
    ],
)
def test_a_place_that_is_none(value: str, words: str) -> None:
    with pytest.raises(BadArgument, match=f"portals.*{words}"):
        settle([f"iser://h/{IQN}/0"], {"portals": value})


# -- found again -----------------------------------------------------------------------------------


@pytest.mark.logs("does not answer: left out", logs.ANOTHER_PORTAL)
async def test_a_target_that_has_moved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no way leads to the target, the server is asked again; a portal that did not answer
    before, or is new, is tried in the same attempt. Later attempts do not ask as long."""
    clock = 100.0
    clocks.give(monkeypatch, lambda: clock)
    world.tcp = {"192.0.2.1"}
    world.portals = [("192.0.2.1", True), ("192.0.2.2", True)]
    (address,) = await discover_ways([given(options=DIRECTORY)])
    paths = address.paths
    assert paths is not None and ways_of(address) == [("iser", "192.0.2.1")]
    tried: list[tuple[str, float]] = []
    alive = {"192.0.2.1"}

    async def connect(url: Url, options: Options, isid: bytes) -> object:
        await trio.lowlevel.checkpoint()
        tried.append((url.host, options.io_timeout))
        if url.host not in alive:
            raise ConnectFailed(f"{url.host}: refused")
        return Fresh()

    monkeypatch.setattr("iserblk.disk.multipath.paths.connect", connect)
    paths.settled(await paths.connect())
    alive.clear()
    world.asked.clear()
    with pytest.raises(ConnectFailed):
        await paths.connect()
    assert world.asked == ["name-server"] and len(tried) == 2
    world.tcp.add("192.0.2.3")
    alive.add("192.0.2.3")
    world.portals.append(("192.0.2.3", True))
    with pytest.raises(ConnectFailed):
        await paths.connect()  # too early to ask again
    assert world.asked == ["name-server"]
    clock += discovering.AGAIN_S
    paths.settled(await paths.connect())
    assert tried[-1] == ("192.0.2.3", 7.0)
    assert ways_of(address) == [("iser", "192.0.2.1"), ("iser", "192.0.2.3")]


class Fresh:
    """As much of a session as is needed here."""

    class parameters:
        target_portal_group_tag = 1


async def test_a_server_that_says_nothing_does_not_hold_a_session_up(
    world: World, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    (address,) = await discover_ways([given(options=DIRECTORY)])

    async def silent(url: Url, options: Options, probe: bool) -> Found:
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(discovering, "find_targets", silent)
    assert address.paths is not None and address.paths.find_more is not None
    began = trio.current_time()
    assert await address.paths.find_more() == []
    assert trio.current_time() - began == pytest.approx(discovering.AGAIN_S)


async def test_options_fit_the_scheme_of_each_way(world: World) -> None:
    """iSER has no digests, and Traditional iSCSI no provider to choose."""
    world.portals = [("192.0.2.2", True), ("192.0.2.3", False)]
    (found,) = await discover_ways([given("192.0.2.1", "iscsi")])
    assert found.paths is not None
    _, iser, iscsi = (way.address[1] for way in found.paths.ways.all)
    assert (iser.rcap, iser.header_digest) == ("verbs", "None")
    assert (iscsi.rcap, iscsi.header_digest) == ("auto", "CRC32C")
