"""A target that takes over another configuration, under sessions that are logged in."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from iserblk.errors import BadArgument
from iserblk.scsi import sense
from iserblk.target.access import Access, Grant
from iserblk.target.config import TargetConfig
from iserblk.target.lunlist import LunList
from iserblk.target.lunspec import LunSpec, remote_spec
from iserblk.target.ports import AccessStates, Listen, TargetPorts
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.server import TargetServer
from iserblk.url import parse_url
from tests.support.until import until
from tests.target.iser_client import rw10
from tests.target.scsi.test_loop import LoopFake
from tests.target.scsi_client import GOOD, IQN, NO_SUCH_LUN, POWER_ON, Client

MIB = 1 << 20
CHANGED = (sense.UNIT_ATTENTION, sense.REPORTED_LUNS_CHANGED)
READY = bytes(6)  # TEST UNIT READY
A, B = (f"iqn.2026-11.example:host-{letter}" for letter in "ab")


def spec(path: Path, **values: object) -> LunSpec:
    return LunSpec(str(path), size=MIB, **values)  # type: ignore[arg-type]


class Held(Client):
    """``tell_ended`` is what a LUN's removal waits for, not what comes after it."""

    def end_tasks(self, lun: int, ended: Callable[[], None], tas: bool = True) -> int:
        first = not self.ended_tasks
        told = None if first else self.tell_ended
        running = super().end_tasks(lun, ended)
        self.tell_ended = told or ended
        return running


class Bench:
    """A server, whose LUNs are files of ``folder``: their names are the keys of ``change``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.luns = LunList(IQN)
        self.nursery: trio.Nursery | None = None  # for what a change need not wait for
        self.server = TargetServer(IQN, {}, ports=TargetPorts([1, 2]))

    async def change(
        self,
        access: Access | None = None,
        states: AccessStates | None = None,
        **names: LunSpec | None,
    ) -> None:
        """``names``: LUNs as ``n3="file"``, their files or specifications."""
        luns = {int(name[1:]): given for name, given in names.items() if given is not None}
        config = TargetConfig(
            IQN,
            [Listen("h:1"), Listen("h:2", 2)],
            luns=luns,
            access=access,
            states=states or AccessStates({}),
        )
        async with trio.open_nursery() as nursery:
            await self.server.reconfigure(config, self.luns, self.nursery or nursery)

    def client(self, lun: int, name: str = A) -> Held:
        return Held(self.server.device, lun, ready=False, name=name)

    def spec(self, name: str, **values: object) -> LunSpec:
        return spec(self.folder / name, **values)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.luns.close_all() == []


async def test_luns_come_and_go(bench: Bench) -> None:
    """Each LUN of the session tells that the list has changed; a new one is as after power on."""
    zero, one = bench.spec("zero"), bench.spec("one")
    await bench.change(n0=zero, n1=one)
    client = bench.client(0)
    assert client.code(READY) == POWER_ON and client.code(READY) == GOOD
    await bench.change(n0=zero, n2=bench.spec("two"))
    assert client.code(READY) == CHANGED and client.code(READY) == GOOD
    client.lun = 1
    assert client.code(READY) == NO_SUCH_LUN
    client.lun = 2
    assert [client.code(READY) for _ in range(3)] == [POWER_ON, CHANGED, GOOD]
    # The same again is no change: nothing is told, nothing is closed.
    units = dict(bench.luns.units)
    await bench.change(n0=zero, n2=bench.spec("two"))
    assert client.code(READY) == GOOD and bench.luns.units == units


async def test_what_was_acknowledged_is_in_the_file(bench: Bench) -> None:
    """Also what nobody has flushed: a LUN that goes writes its cache back."""
    await bench.change(n0=bench.spec("zero", volatile_cache=MIB))
    client = bench.client(0)
    client.code(READY)
    assert client.code(rw10(0x2A, 512, 3), b"\x5a" * 512) == GOOD
    assert not any((bench.folder / "zero").read_bytes())
    await bench.change(n1=bench.spec("one"))
    assert (bench.folder / "zero").read_bytes()[1536:2048] == b"\x5a" * 512


async def test_commands_end_before_the_file_is_closed(bench: Bench) -> None:
    """A LUN whose values change is closed when what threads carry out has ended, and is there again
    after that."""
    await bench.change(n0=bench.spec("zero"))
    old = bench.luns.units[0]
    client = bench.client(0)
    client.running = 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: bench.change(n0=bench.spec("zero", serial="NEW")))
        await trio.testing.wait_all_tasks_blocked()
        assert client.ended_tasks == [0, 0]
        assert client.code(READY) == NO_SUCH_LUN
        client.tell_ended()
        await trio.testing.wait_all_tasks_blocked()
        assert not bench.luns.units and [each.unit for each in bench.luns.leaving] == [old]
        client.running = 0
        client.tell_ended()
    assert bench.luns.units[0] is not old and not bench.luns.leaving
    assert client.code(READY) == POWER_ON


async def test_no_lun_is_there_by_the_rules_for_another(bench: Bench) -> None:
    """LUN 3 was A's, and is another one now, which is B's: neither sees the other's, not even while
    the old one is still being closed."""
    await bench.change(access=Access({A: Grant(((3, 3),))}), n3=bench.spec("of-a"))
    a, b = bench.client(3, A), bench.client(3, B)
    assert a.code(READY) == POWER_ON and b.code(READY) == NO_SUCH_LUN
    a.running = 1
    async with trio.open_nursery() as nursery:
        access = Access({B: Grant(((3, 3),))})
        nursery.start_soon(lambda: bench.change(access=access, n3=bench.spec("of-b")))
        await trio.testing.wait_all_tasks_blocked()
        assert a.code(READY) == b.code(READY) == NO_SUCH_LUN
        a.tell_ended()
    assert a.code(READY) == NO_SUCH_LUN and b.code(READY) == POWER_ON
    # Without rules each has access to all.
    await bench.change(n3=bench.spec("of-b"))
    assert a.code(READY) == POWER_ON


@pytest.mark.logs("LUN 1 is left out")
async def test_a_lun_that_cannot_be_opened_is_left_out(bench: Bench) -> None:
    missing = LunSpec(str(bench.folder / "missing"))
    await bench.change(n0=bench.spec("zero"), n1=missing)
    assert list(bench.luns.units) == [0]
    (bench.folder / "missing").write_bytes(bytes(MIB))
    await bench.change(n0=bench.spec("zero"), n1=missing)
    assert list(bench.luns.units) == [0, 1]


@pytest.mark.plain("replaces a method")
@pytest.mark.logs("LUN 0: .*zero: bad block: what its cache held is lost")
async def test_a_lun_that_cannot_be_flushed_is_told_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others come all the same."""
    close = LogicalUnit.close

    def fail(unit: LogicalUnit) -> None:
        close(unit)
        raise OSError(5, "bad block")

    await bench.change(n0=bench.spec("zero"))
    with monkeypatch.context() as patched:
        patched.setattr(LogicalUnit, "close", fail)
        await bench.change(n1=bench.spec("one"))
    assert list(bench.luns.units) == [1]


async def test_states_of_groups(bench: Bench) -> None:
    await bench.change(n0=bench.spec("zero"))
    client = bench.client(0)
    client.code(READY)
    await bench.change(states=AccessStates({1: 2}), n0=bench.spec("zero"))
    assert client.code(READY)[0] == sense.UNIT_ATTENTION
    assert bench.server.device.ports.by_tag[1].state == 2


# -- LUNs of other targets -------------------------------------------------------------------------


class Others:
    """Other targets. That called "away" does not answer before ``back``; ``deaf``: nor is it given
    up before that. ``asked``: the names of those that were asked for a LUN, in order. ``stuck``:
    closing a unit waits until it is set. ``closed``: the names of units that were."""

    def __init__(self, bench: Bench) -> None:
        self.back = trio.Event()
        self.deaf = False
        self.asked: list[str] = []
        self.stuck = threading.Event()
        self.stuck.set()
        self.closed: list[str] = []
        bench.luns.open_remote = self.open

    @staticmethod
    def spec(name: str, lun: int = 0) -> LunSpec:
        return remote_spec([f"iser://{name}/iqn.2026-11.example:{name}/{lun}"], False)

    async def _answer(self, name: str) -> None:
        self.asked.append(name)
        if name == "away":
            with trio.CancelScope(shield=self.deaf):
                await self.back.wait()

    def open(self, urls: tuple[str, ...], read_only: bool) -> LogicalUnit:
        name = parse_url(urls[0]).host
        trio.from_thread.run(self._answer, name)
        store = Remote(self, name)
        return LogicalUnit(store, serial=name, read_only=read_only, loop=store)


class Remote(LoopFake):
    """A LUN of ``others``."""

    def __init__(self, others: Others, name: str) -> None:
        super().__init__(MIB)
        self._others = others
        self._name = name

    def close(self) -> None:
        self._others.stuck.wait()
        self._others.closed.append(self._name)


@pytest.fixture
async def others(bench: Bench, nursery: trio.Nursery) -> AsyncIterator[Others]:
    """What a change does not wait for goes on behind it."""
    bench.nursery = nursery
    others = Others(bench)
    yield others
    others.stuck.set()


async def test_a_target_that_is_away_keeps_no_other_lun_waiting(
    bench: Bench, others: Others
) -> None:
    """Neither a LUN of a file, nor one of another target; nor the next change, which tries
    again."""
    away, near, file = others.spec("away"), others.spec("near"), bench.spec("file")
    await bench.change(n1=away, n2=near, n3=file)
    assert list(bench.luns.units) == [3]
    await until(lambda: list(bench.luns.units) == [3, 2])
    client = bench.client(2)
    assert client.code(READY) == POWER_ON
    await until(lambda: "away" in others.asked)
    await bench.change(n1=away, n2=near, n4=bench.spec("other"))
    assert list(bench.luns.units) == [2, 4]
    await until(lambda: others.asked.count("away") == 2)
    others.back.set()
    await until(lambda: list(bench.luns.units) == [2, 4, 1])
    client.lun = 1
    assert client.code(READY) == POWER_ON
    assert others.asked.count("near") == 1 and not others.closed


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_lun_is_given_up_that_is_not_wanted_any_more(
    bench: Bench, others: Others, deaf: bool
) -> None:
    """Its number is another LUN's then. It is closed where its target answers all the same; a LUN
    of that target comes behind that."""
    others.deaf = deaf
    await bench.change(n1=others.spec("away"))
    await until(lambda: others.asked == ["away"])
    await bench.change(n1=bench.spec("file"), n2=others.spec("near"))
    file = bench.luns.units[1]
    if deaf:
        await trio.testing.wait_all_tasks_blocked()
        assert others.asked == ["away"]
        others.back.set()
    await until(lambda: list(bench.luns.units) == [1, 2])
    assert bench.luns.units[1] is file
    assert others.closed == ["away"] * deaf


async def test_a_lun_that_is_being_closed_keeps_only_luns_of_its_target_waiting(
    bench: Bench, others: Others
) -> None:
    """Until it has logged out, its session has the name that the next one would have."""
    await bench.change(n1=others.spec("one"), n2=others.spec("two"))
    await until(lambda: len(bench.luns.units) == 2)
    others.stuck.clear()
    await bench.change(n1=others.spec("one", 7), n2=others.spec("two"), n3=others.spec("three"))
    await until(lambda: sorted(bench.luns.units) == [2, 3])
    await bench.change(n1=others.spec("one", 7), n2=others.spec("two"), n4=bench.spec("four"))
    assert sorted(bench.luns.units) == [2, 4]
    assert others.asked.count("one") == 1 and not others.closed
    others.stuck.set()
    await until(lambda: sorted(bench.luns.units) == [1, 2, 4] and not bench.luns.leaving)
    assert others.asked.count("one") == 2


async def test_a_lun_waits_for_no_threads_of_the_one_before_it(
    bench: Bench, others: Others
) -> None:
    """All threads of LUN 1 may wait for its target, which is away; then a file has that number."""
    await bench.change(n1=others.spec("one"))
    await until(lambda: bench.luns.units)
    client = bench.client(1)
    client.running = 1
    limits = bench.server.offloading.limits
    limits[1].busy = limits[1].most
    await bench.change(n1=bench.spec("file"))
    assert list(bench.luns.units) == [1] and bench.luns.leaving
    assert not limits[1].busy
    client.tell_ended()
    await until(lambda: not bench.luns.leaving)


async def test_the_end_of_the_target_waits_for_no_lun_that_is_away(
    bench: Bench, others: Others
) -> None:
    """What has ended of its commands waits for an answer of its target, also when the LUN is gone
    already. (When the process ends that cannot be waited for.)"""
    one, two = others.spec("one"), others.spec("two")
    await bench.change(n1=one, n2=two)
    await until(lambda: len(bench.luns.units) == 2)
    units = [bench.luns.units[1], bench.luns.units[2]]
    client = bench.client(1)
    client.running = 1
    await bench.change(n1=others.spec("three"), n2=two)
    await until(lambda: len(bench.luns.units) == 2)
    units.append(bench.luns.units[1])
    bench.server.end()
    stores = [unit.loop for unit in units]
    hurried = [isinstance(each, Remote) and ("hurry",) in each.calls for each in stores]
    client.tell_ended()
    await until(lambda: not bench.luns.leaving)
    assert hurried == [True, True, True]


@pytest.mark.logs("LUN 1 is left out: there is no such LUN")
async def test_one_that_cannot_be_opened_is_left_out(bench: Bench, others: Others) -> None:
    open_remote = others.open

    def fail(urls: tuple[str, ...], read_only: bool) -> LogicalUnit:
        if "gone" in urls[0]:
            raise BadArgument("there is no such LUN")
        return open_remote(urls, read_only)

    bench.luns.open_remote = fail
    await bench.change(n1=others.spec("gone"), n2=others.spec("near"))
    await until(lambda: list(bench.luns.units) == [2])
    await trio.testing.wait_all_tasks_blocked()
    assert list(bench.luns.units) == [2]
