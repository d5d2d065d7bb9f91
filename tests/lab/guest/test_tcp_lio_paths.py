"""A LUN behind two portal groups of LIO's target: both are found, one is used at a time as ALUA
says, and the LUN is reserved through it. Another LUN grows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from iserblk.errors import Busy, IserblkError, OutOfRange
from tests.cli.commands import bad, good, good_json
from tests.lab.guest import lio
from tests.support import logs
from tests.support.endurance import (
    PATIENCE_S,
    Clients,
    disk_and_session,
    fail_back_soon,
    reaches,
)
from tests.support.faces import FACES, opened, read, write
from tests.support.interop import Record
from tests.support.until import all_ended

pytestmark = pytest.mark.logs(
    logs.RECONNECTED, logs.ANOTHER_PORTAL, logs.RESERVATION, logs.LOST_POWER
)

MIB = 1 << 20
CLIENTS = 4
OPTIONS = {"header-digest": "crc32c", "data-digest": "crc32c", "io-timeout": "120"}
EXCLUSIVE = {**OPTIONS, "reserve": "exclusive"}
in_thread = trio.to_thread.run_sync

face = pytest.mark.parametrize("face", FACES)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[lio.Groups]:
    """Two portal groups without CHAP; a disk goes back to the better portal soon."""
    group = Path(os.environ["LAB_TPG"])
    (group / "attrib" / "authentication").write_text("0")
    (group / "param" / "AuthMethod").write_text("CHAP,None")
    fail_back_soon(monkeypatch)
    made = lio.Groups()
    made.make()
    yield made
    made.set_type(3)
    made.set_state(0, 0)
    made.enable(0)
    made.remove()


# shows: SYSTEM-7, SYSTEM-8
def test_discovery(groups: lio.Groups, record: Record) -> None:
    (found,) = good_json("discover", f"iscsi://{groups.portals[0]}")["targets"]
    assert [(f"{each['host']}:{each['port']}", each["group"]) for each in found["portals"]] == [
        (groups.portals[0], 1),
        (groups.portals[1], 2),
    ]
    for given in (groups.urls, (groups.urls[0], "--portals", "discover")):
        ways = good_json("info", *given)["disks"][0]["paths"]
        assert [(each["portal"], each["in_use"], each["state"]) for each in ways] == [
            (f"iscsi://{groups.portals[0]}", True, "active/optimized"),
            (f"iscsi://{groups.portals[1]}", False, None),
        ]
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP",
        ran="SendTargets with two portal groups, portals=discover; ALUA states",
    )


@face
async def test_groups_come_and_go(groups: lio.Groups, face: str, record: Record) -> None:
    """Under load the disk changes to the other portal group, and back."""
    async with disk_and_session(face, groups.urls[0], OPTIONS, groups.urls[1]) as (disk, session):
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            await in_thread(groups.disable, 0)
            await reaches(session, groups.portals[1])
            await clients.progress()
            await in_thread(groups.enable, 0)
            await reaches(session, groups.portals[0])
            await clients.progress()
        assert session.counts.reconnects == 2 and session.error is None
        await all_ended(session.queue)
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="two portal groups: the one in use is disabled under load, and enabled again: over to "
        "the other one, and back",
    )


@pytest.mark.parametrize(
    ("state", "face"), [(2, "blocking"), (3, "async")], ids=["standby", "unavailable"]
)
async def test_states_are_obeyed(groups: lio.Groups, face: str, state: int, record: Record) -> None:
    """The port in use goes into standby, and later leaves it. No connection is lost."""
    groups.set_state(1, 1)
    async with disk_and_session(face, groups.urls[0], OPTIONS, groups.urls[1]) as (disk, session):
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            await in_thread(groups.set_state, 0, state)
            await reaches(session, groups.portals[1])
            await clients.progress()
            await in_thread(groups.set_state, 0, 0)
            await reaches(session, groups.portals[0])
            await clients.progress()
        assert session.error is None
        await all_ended(session.queue)
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran=f"ALUA: under load the port in use becomes {('standby', 'unavailable')[state - 2]}, "
        "and active again: over to the other one, and back",
    )


@face
async def test_no_port_takes_it(groups: lio.Groups, face: str) -> None:
    """No port carries out commands: a request fails at its deadline, and later ones succeed."""
    options = {**OPTIONS, "io-timeout": "5", "alua": "follow"}
    async with disk_and_session(face, groups.urls[0], options, groups.urls[1]) as (disk, _):
        await write(disk, b"a" * 4096, 0)
        for number in range(2):
            groups.set_state(number, 3)
        with pytest.raises(IserblkError):
            await read(disk, 0, 4096)
        groups.set_state(1, 0)
        found = b""
        with trio.fail_after(PATIENCE_S):
            while not found:  # a login may outlast the io-timeout here
                with suppress(IserblkError):
                    found = await read(disk, 0, 4096)
        assert found == b"a" * 4096


@face
@pytest.mark.logs("the target is asked to activate it")
async def test_a_port_is_activated(groups: lio.Groups, face: str, record: Record) -> None:
    """Explicit ALUA: under load all ports go into standby, and the disk has one activated."""
    async with disk_and_session(face, groups.urls[0], OPTIONS, groups.urls[1]) as (disk, session):
        clients = Clients(disk, session, CLIENTS)
        async with clients.at_work():
            for number in (1, 0):
                await in_thread(groups.set_state, number, 2)
            await clients.progress()
        assert session.error is None
        await all_ended(session.queue)
        assert session.portal == groups.portals[activated(groups)]
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="explicit ALUA: under load all ports go into standby, and SET TARGET PORT GROUPS "
        "activates one",
    )


def activated(groups: lio.Groups) -> int:
    """The group that an initiator has activated; the other one is in standby."""
    states = [groups.state(number) for number in range(2)]
    assert (2, "Altered by Implicit ALUA") in states
    return states.index((0, "Altered by Explicit STPG"))


@face
@pytest.mark.logs("the target is asked to activate it", logs.ANOTHER_PORTAL)
async def test_a_lun_that_is_asleep_is_activated(
    groups: lio.Groups, face: str, record: Record
) -> None:
    """LIO changes its states by command alone (TPGS 2), and no port is active."""
    for number in range(2):
        groups.set_state(number, 2)
    groups.set_type(2)
    async with disk_and_session(face, groups.urls[0], OPTIONS, groups.urls[1]) as (disk, session):
        await write(disk, b"a" * 4096, 0)
        assert await read(disk, 0, 4096) == b"a" * 4096
        assert session.portal == groups.portals[activated(groups)]
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="explicit ALUA alone: all ports are in standby when the LUN is opened, and SET TARGET "
        "PORT GROUPS activates one",
    )


# -- reservations ----------------------------------------------------------------------------------


def others_do_not_get_in(url: str) -> None:
    other = f"{url}?initiator-name=iqn.2026-11.lab:other"
    assert "another initiator has reserved" in bad(28, "trim", other, "--length", "1M")


@face
async def test_reserved_through_the_group_in_use(
    groups: lio.Groups, face: str, record: Record
) -> None:
    async with disk_and_session(face, groups.urls[0], EXCLUSIVE, groups.urls[1]) as (disk, session):
        await write(disk, b"1" * 512, 0)
        first = lio.reservation()
        assert os.environ["LAB_INITIATOR"] in first
        groups.disable(0)
        await write(disk, b"2" * 512, 512)
        await reaches(session, groups.portals[1])
        assert os.environ["LAB_INITIATOR"] in lio.reservation()
        await in_thread(others_do_not_get_in, groups.urls[1])
        groups.enable(0)
        await reaches(session, groups.portals[0])
        assert await read(disk, 0, 1024) == b"1" * 512 + b"2" * 512
        await in_thread(others_do_not_get_in, groups.urls[0])
    assert "No SPC-3 Reservation holder" in lio.reservation()
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="reserve=exclusive through two portal groups: held through the one in use, others are "
        "refused; given back",
    )


HOLDER = """
import sys
from iserblk.disk.blocking import open_disks
with open_disks(sys.argv[1:], {"reserve": "exclusive"}):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def killed(groups: lio.Groups) -> None:
    """Reserve the LUN in a process, and kill the process."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, *groups.urls],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()


@pytest.mark.usefixtures("killed")
async def test_the_holder_was_killed(groups: lio.Groups, record: Record) -> None:
    """The same machine gets the LUN back through another portal; others do not get in before."""
    other = {**EXCLUSIVE, "initiator-name": "iqn.2026-11.lab:other"}
    with pytest.raises(Busy, match="reserved by"):
        async with opened("async", groups.urls[1], options=other):
            pass
    async with opened("async", groups.urls[1], options=EXCLUSIVE) as disks:
        (disk,) = disks.values()
        await write(disk, b"3" * 512, 0)
        await in_thread(others_do_not_get_in, groups.urls[0])
    assert "No SPC-3 Reservation holder" in lio.reservation()
    good("trim", f"{groups.urls[0]}?initiator-name=iqn.2026-11.lab:other", "--length", "1M")
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="reserve=exclusive: the holder is killed; it comes back through another portal group",
    )


# -- growth ----------------------------------------------------------------------------------------


@pytest.fixture
def growing(groups: lio.Groups, tmp_path: Path) -> Iterator[lio.Growing]:
    del groups  # without CHAP
    made = lio.Growing(tmp_path / "growing", MIB)
    yield made
    made.remove()


@face
async def test_a_lun_grows_in_use(growing: lio.Growing, face: str, record: Record) -> None:
    async with opened(face, growing.url, options=OPTIONS) as disks:
        (disk,) = disks.values()
        await write(disk, b"a" * 4096, MIB - 4096)
        with pytest.raises(OutOfRange):
            await write(disk, b"b" * 4096, MIB)
        growing.grow(2 * MIB)
        assert await disk.refresh() == disk.size == 2 * MIB
        await write(disk, b"b" * 4096, 2 * MIB - 4096)
        await disk.flush()
        assert await read(disk, 2 * MIB - 8192, 8192) == bytes(4096) + b"b" * 4096
    record(
        ours=f"initiator, {face} face",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran="a LUN grows while it is in use",
    )
