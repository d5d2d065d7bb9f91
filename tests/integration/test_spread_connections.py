"""Connections of one session go to all portals of a portal group, and to no other."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from iserblk.disk.seam import AsyncDisk
from iserblk.initiator.session.session import Session
from tests.cli.commands import good_json, serving
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.cores import session_of
from tests.support.faces import one_disk, opened, read, write
from tests.support.faults.proxy import FaultProxy
from tests.support.ported import both, ported_target, two_portals
from tests.support.target import IQN
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.LOST_POWER)

DATA = os.urandom(65536)
scheme = pytest.mark.parametrize("scheme", ["iser", "iscsi"])
level = pytest.mark.parametrize("level", [0, 2])


def portals(session: Session) -> Counter[str]:
    """How many connections there are, by portal."""
    return Counter(connection.portal for connection in session.queue.connections.copy())


async def check(disk: AsyncDisk) -> None:
    await write(disk, DATA, 0)
    assert await read(disk, 0, len(DATA)) == DATA


# shows: SYSTEM-30
@scheme
async def test_the_portals_that_the_target_tells(tmp_path: Path, scheme: str) -> None:
    """Those of its group; SendTargets tells the tags."""
    arguments = ["-v", "target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M"]
    for tag in (1, 1, 2):
        arguments += ["--listen", f"127.0.0.1:0,{tag}"]
    with serving(*arguments, log=tmp_path / "log") as server:
        url = server.url.replace("iser", scheme, 1)
        (found,) = good_json("discover", url)["targets"]
        group = {f"127.0.0.1:{each['port']}" for each in found["portals"] if each["group"] == 1}
        options = {"portals": "discover", "connections": "4"}
        async with one_disk("async", f"{url}/0", options) as disk:
            assert portals(session_of(disk)) == dict.fromkeys(group, 2)
            await check(disk)
    assert "cannot include" not in (tmp_path / "log").read_text()


@scheme
@level
async def test_a_portal_of_the_group_dies(
    start_target: StartTarget, scheme: str, level: int
) -> None:
    """The session goes on by the others, also when it had begun there; the missing connection is
    made at one that answers."""
    target = start_target("lun:size=1M:wce=0")
    url = target.url.replace("iser", scheme, 1)
    options = {"connections": "2", "error-recovery-level": str(level)}
    with two_portals((target.port, target.port)) as (one, two):
        names = [f"127.0.0.1:{each.port}" for each in (one, two)]

        async def kill(dies: FaultProxy, lives: str) -> None:
            dies.refuse(by_reset=True)
            dies.cut()
            await check(disk)
            await until(lambda: portals(session) == {lives: 2})
            dies.admit()

        async with opened("async", *both(one.through(url), two.through(url)), options=options) as (
            disks
        ):
            (disk,) = disks.values()
            session = session_of(disk)
            assert portals(session) == dict.fromkeys(names, 1)
            await kill(two, names[0])
            one.refuse(by_reset=True)
            session.queue.connections[0].datamover.disconnect()
            await until(lambda: portals(session) == dict.fromkeys(names, 1))
            one.admit()
            await kill(one, names[1])
            assert session.portal == names[1]
            await check(disk)
            assert session.counts.recovered == 3 and not session.counts.reconnects


@scheme
async def test_no_connection_goes_to_another_group(tmp_path: Path, scheme: str) -> None:
    """The target refuses it, and is not asked again (RFC 7143 section 11.13.5, status 0208)."""
    with ported_target(tmp_path) as ported:
        async with opened("async", *ported.urls(scheme), options={"connections": "3"}) as disks:
            (disk,) = disks.values()
            session = session_of(disk)
            assert portals(session) == {f"127.0.0.1:{ported.one.port}": 3}
            assert len(ported.two.links) == 1
            await check(disk)
            session.queue.connections[1].datamover.disconnect()
            await until(lambda: session.counts.recovered == 1 and session.count == 3)
            assert len(ported.two.links) == 1
