"""Several portals: a disk goes back to the better portal, and leaves a port that stops carrying out
commands. Reads and writes go on without an error."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest
import trio

from iserblk.disk.multipath import failback, policy
from iserblk.errors import ConnectFailed
from iserblk.initiator.session.session import Session
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support import until as waiting
from tests.support.cores import session_of
from tests.support.faces import FACES, opened, read, write
from tests.support.ported import Ported, both, ported_target, two_portals

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.LOST_POWER, logs.RECONNECTED)

SIZE = 1 << 20
DATA = os.urandom(65536)
PATIENCE_S = 60.0

face = pytest.mark.parametrize("face", FACES)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "FIRST_FAIL_BACK_S", 0.2)
    monkeypatch.setattr(failback, "LOOK_S", 0.02)
    monkeypatch.setattr(failback, "PROVEN_S", 0.1)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        await waiting.until(condition)


class Load:
    """Writes, reads back and compares without an end. ``done``: how often."""

    def __init__(self, disk: object) -> None:
        self.done = 0
        self._disk = disk

    async def run(self) -> None:
        number = 0
        while True:
            number += 1
            data = number.to_bytes(8, "big") * 512
            await write(self._disk, data, 4096 * (number % 64))  # type: ignore[arg-type]
            assert await read(self._disk, 4096 * (number % 64), 4096) == data  # type: ignore[arg-type]
            self.done += 1


@asynccontextmanager
async def loaded(face: str, *urls: str, **options: str) -> AsyncIterator[tuple[Load, Session]]:
    """A disk under load, and the Load."""
    given = {"io-timeout": "60", **options}
    async with opened(face, *urls, options=given) as disks, trio.open_nursery() as nursery:
        (disk,) = disks.values()
        inner = getattr(disk, "disk", disk)
        load = Load(disk)
        nursery.start_soon(load.run)
        await until(lambda: load.done > 3)
        yield load, session_of(inner)
        done = load.done
        await until(lambda: load.done > done)
        nursery.cancel_scope.cancel()


@face
@pytest.mark.parametrize("schemes", [("iscsi", "iscsi"), ("iser", "iser"), ("iser", "iscsi")])
async def test_back_to_the_preferred_portal(
    start_target: StartTarget,
    face: str,
    schemes: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = start_target(f"lun:size={SIZE}")
    with two_portals((target.port, target.port)) as (one, two):
        urls = both(
            *(
                each.through(target.url.replace("iser", scheme, 1))
                for each, scheme in zip((one, two), schemes, strict=True)
            )
        )
        async with loaded(face, *urls) as (load, session):
            one.refuse(by_reset=True)
            one.cut()
            await until(lambda: session.counts.reconnects == 1)
            assert session.portal.endswith(f":{two.port}")
            assert session.describe()["provider"] == {"iser": "iwarp", "iscsi": "tcp"}[schemes[1]]
            done = load.done
            await until(lambda: load.done > done and one.refused > 2)
            assert session.counts.reconnects == 1
            one.admit()
            await until(lambda: session.counts.reconnects == 2)
            assert session.portal.endswith(f":{one.port}")
            assert session.describe()["provider"] == {"iser": "iwarp", "iscsi": "tcp"}[schemes[0]]
            assert session.counts.replayed <= 1  # from the first change: the way back was orderly
        warnings = [each.getMessage() for each in caplog.records if each.levelno > logging.INFO]
        assert sum("is used, not" in text for text in warnings) == 2
        assert any(
            f"going over to {schemes[0]}://127.0.0.1:{one.port}" in text for text in warnings
        )


@face
async def test_every_lun_of_the_target(start_target: StartTarget, face: str) -> None:
    """All LUNs change the portal together, with their session."""
    target = start_target(f"lun:size={SIZE}", f"other:size={SIZE}:serial=OTHER")
    with two_portals((target.port, target.port)) as (one, two):
        urls = [one.through(target.url), two.through(target.url)]
        async with opened(face, *urls, options={"io-timeout": "60"}) as disks:
            assert sorted(disks) == ["lun0", "lun1"]
            session = session_of(disks["lun0"])
            for count, (dies, lives) in enumerate(((one, two), (two, one)), 1):
                lives.admit()
                dies.refuse(by_reset=True)
                dies.cut()
                for number, disk in enumerate(disks.values()):
                    await write(disk, bytes([count, number]) * 256, 0)
            await until(lambda: session.portal.endswith(f":{one.port}"))
            one.refuse(by_reset=True)
            two.admit()
            one.cut()
            await until(lambda: session.portal.endswith(f":{two.port}"))
            one.admit()
            await until(lambda: session.portal.endswith(f":{one.port}"))
            for number, disk in enumerate(disks.values()):
                assert await read(disk, 0, 512) == bytes([2, number]) * 256


@face
async def test_not_to_another_lun(start_target: StartTarget, face: str) -> None:
    target, other = start_target(f"lun:size={SIZE}"), start_target(f"x:size={SIZE}:serial=OTHER")
    with two_portals((target.port, target.port)) as (one, two):
        async with loaded(face, *both(one.through(target.url), two.through(target.url))) as (
            load,
            session,
        ):
            one.refuse(by_reset=True)
            one.cut()
            await until(lambda: session.counts.reconnects == 1)
            one.target = ("127.0.0.1", other.port)
            one.admit()
            await until(lambda: len(one.links) >= 3)  # tried twice
            done = load.done
            await until(lambda: load.done > done)
            assert session.counts.reconnects == 1


@pytest.fixture
def ported(tmp_path: Path) -> Iterator[Ported]:
    with ported_target(tmp_path) as found:
        yield found


@face
@pytest.mark.parametrize("state", ["standby", "unavailable", "transitioning"])
async def test_a_port_that_stops(ported: Ported, face: str, state: str) -> None:
    """The port in use stops: the disk leaves it, and goes back when it works again."""
    async with loaded(face, *ported.urls()) as (_, session):
        await ported.set(state, "optimized")
        await until(lambda: session.portal.endswith(f":{ported.two.port}"))
        await ported.set("optimized", "optimized")
        await until(lambda: session.portal.endswith(f":{ported.one.port}"))


@face
async def test_no_port_for_a_while(ported: Ported, face: str) -> None:
    """The disk finds the first port that carries out commands again, whichever it is."""
    async with loaded(face, *ported.urls("iscsi")) as (load, session):
        await ported.set("standby", "unavailable")
        await until(lambda: session.suspended is not None and "state" in str(session.suspended))
        done = load.done
        await ported.set("standby", "non-optimized")
        await until(lambda: load.done > done + 1)
        assert session.portal.endswith(f":{ported.two.port}")


@face
@pytest.mark.logs("the target is asked to activate it")
async def test_a_port_is_activated_where_none_is_active(ported: Ported, face: str) -> None:
    """Explicit ALUA: the disk has its port activated when all have gone into standby, whichever is
    tried last, and goes on without an error."""
    async with loaded(face, *ported.urls()) as (load, session):
        before = session.counts.reconnects
        await ported.set("standby settable", "unavailable settable")
        await until(lambda: session.counts.reconnects > before and session.suspended is None)
        done = load.done
        await until(lambda: load.done > done + 1)


@face
@pytest.mark.logs("the target is asked to activate it")
async def test_a_lun_whose_ports_are_asleep_is_opened(ported: Ported, face: str) -> None:
    await ported.set("standby settable", "standby settable")
    with pytest.raises(ConnectFailed, match="standby"):
        async with opened(face, *ported.urls(), options={"alua": "follow"}):
            pass
    async with opened(face, *ported.urls()) as disks:
        (disk,) = disks.values()
        await write(disk, DATA, 0)
        assert await read(disk, 0, len(DATA)) == DATA


@face
async def test_a_quiet_disk_leaves_too(ported: Ported, face: str) -> None:
    """An idle disk learns of the change by its next command, which goes to the other port."""
    async with opened(face, *ported.urls()) as disks:
        (disk,) = disks.values()
        await write(disk, DATA, 0)
        await ported.set("unavailable", "optimized")
        assert await read(disk, 0, len(DATA)) == DATA


@face
async def test_the_better_state_wins(ported: Ported, face: str) -> None:
    """The array has moved the LUN: the second portal is optimized now."""
    async with loaded(face, *ported.urls()) as (_, session):
        await ported.set("non-optimized", "optimized")
        await until(lambda: session.portal.endswith(f":{ported.two.port}"))


@face
async def test_transition_on_the_only_way(ported: Ported, face: str) -> None:
    """Commands wait until the transition has ended, or until their io-timeout."""
    async with opened(face, ported.urls()[0], options={"io-timeout": "60"}) as disks:
        (disk,) = disks.values()
        await ported.set("transitioning", "optimized")
        ended: list[float] = []

        async def one() -> None:
            await write(disk, DATA, 0)
            ended.append(monotonic())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await trio.sleep(0.5)
            assert not ended
            await ported.set("optimized", "optimized")
        assert await read(disk, 0, len(DATA)) == DATA


async def test_closed_while_a_way_is_tried(
    start_target: StartTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the disk does not wait for a connection attempt to the other portal."""
    monkeypatch.setattr(failback, "PROVEN_S", 1e6)
    target = start_target(f"lun:size={SIZE}")
    for face in FACES:
        with two_portals((target.port, target.port)) as (one, two):
            async with loaded(face, *both(one.through(target.url), two.through(target.url))) as (
                _,
                session,
            ):
                one.refuse(by_reset=True)
                one.cut()
                await until(lambda: session.counts.reconnects == 1)
                one.admit()
                await until(lambda: len(one.alive) == 1)
            await until(lambda: not one.alive)
