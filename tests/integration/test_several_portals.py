"""One LUN through two portals: what happens to a disk in use when portals come and go."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, LunChanged, TransportError
from tests.cli.commands import good_json, serving
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, opened, read, write
from tests.support.ported import both, two_portals
from tests.support.target import IQN
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.LOST_POWER, logs.RECONNECTED)

SIZE = 1 << 20
DATA = os.urandom(65536)


@pytest.mark.logs(logs.ONE_OF_SEVERAL)
@pytest.mark.parametrize("level", ["0", "2"])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("schemes", [("iscsi", "iscsi"), ("iser", "iser"), ("iser", "iscsi")])
async def test_a_portal_dies(
    start_target: StartTarget, face: str, schemes: tuple[str, str], level: str
) -> None:
    """The other portal takes over, whatever its transport; when it dies, the first one does. At
    ErrorRecoveryLevel 2 the connection is reinstated there, where the target allows that."""
    target = start_target(f"lun:size={SIZE}")
    with two_portals((target.port, target.port)) as portals:
        urls = both(
            *(
                portal.through(target.url.replace("iser", scheme, 1))
                for portal, scheme in zip(portals, schemes, strict=True)
            )
        )
        async with opened(face, *urls, options={"error-recovery-level": level}) as disks:
            (disk,) = disks.values()
            await write(disk, DATA, 0)
            for number, (dies, lives) in enumerate((portals, portals[::-1]), 1):
                lives.admit()
                dies.refuse(by_reset=True)
                dies.cut()
                assert await read(disk, 0, len(DATA)) == DATA
                at = number * len(DATA)
                await write(disk, DATA[::-1], at)
                await disk.flush()
                assert await read(disk, at, len(DATA)) == DATA[::-1]


@pytest.mark.parametrize("face", FACES)
async def test_a_portal_of_another_group(tmp_path: Path, face: str) -> None:
    """In another portal group no session is reinstated: a reset of the LUN ends the lost session's
    tasks. Then the new port goes into standby, and the disk goes back."""
    states = tmp_path / "states"
    states.write_text("2 non-optimized\n")
    arguments = ["-v", "target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    arguments += ["--listen", "127.0.0.1:0,1", "--listen", "127.0.0.1:0,2"]
    log = tmp_path / "log"
    with serving(*arguments, "--access-states", states, log=log) as server:
        listen = server.url.removeprefix("iser://").partition("/")[0]
        (found,) = good_json("discover", f"iscsi://{listen}")["targets"]
        ports = [each["port"] for each in found["portals"]]
        with two_portals((ports[0], ports[1])) as (one, two):
            urls = both(one.through(server.url), two.through(server.url))
            async with opened(face, *urls) as disks:
                (disk,) = disks.values()
                await write(disk, DATA, 0)
                one.refuse(by_reset=True)
                one.cut()
                assert await read(disk, 0, len(DATA)) == DATA
                await write(disk, DATA[::-1], 0)
                assert two.alive and not one.alive
                one.admit()
                states.write_text("2 standby\n")
                os.kill(server.process.pid, signal.SIGHUP)
                await until(lambda: "read again" in log.read_text())
                two.cut()
                assert await read(disk, 0, len(DATA)) == DATA[::-1]
                assert one.alive


@pytest.mark.parametrize("face", FACES)
async def test_the_cache_is_lost(start_target: StartTarget, face: str) -> None:
    """Writes that were not flushed are sent again, whichever command on the new connection gets the
    unit attention."""
    spec = f"lun:size={SIZE}:volatile-cache=1M"
    target = start_target(spec)
    with two_portals((target.port, target.port)) as (one, two):
        async with opened(face, *both(one.through(target.url), two.through(target.url))) as disks:
            (disk,) = disks.values()
            await write(disk, DATA, 0)
            target.kill()
            start_target(spec, listen=target.listen)
            assert await read(disk, 0, len(DATA)) == DATA


async def test_the_first_one_is_down_at_the_start(start_target: StartTarget) -> None:
    target = start_target(f"lun:size={SIZE}")
    dead = target.url.replace(f":{target.port}/", ":1/")
    async with opened("async", *both(dead, target.url)) as disks:
        assert await read(disks["lun0"], 0, 512) == bytes(512)


async def test_all_are_down() -> None:
    urls = both(*(f"iscsi://127.0.0.{i}:1/{IQN}" for i in (1, 2)))
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:1: .*127\.0\.0\.2:1: "):
        async with opened("async", *urls):
            pass


async def test_another_lun_behind_the_other_portal(start_target: StartTarget) -> None:
    """The other portal has the same target name, but another LUN: no command is sent there."""
    one, two = start_target(f"lun:size={SIZE}"), start_target(f"other:size={SIZE}:serial=OTHER")
    async with opened("async", *both(one.url, two.url)) as disks:
        one.kill()
        with pytest.raises(LunChanged):
            await read(disks["lun0"], 0, 512)


async def test_the_same_portal_twice(start_target: StartTarget) -> None:
    target = start_target(f"lun:size={SIZE}")
    with pytest.raises(BadArgument, match="given twice"):
        async with opened("async", *both(target.url, target.url)):
            pass
