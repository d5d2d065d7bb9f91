"""Sessions of several connections with LIO, at each ErrorRecoveryLevel; and at level 1 what LIO
sends again, or asks for again, of what is damaged or lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs
from tests.faults.test_recovery_within import HEADER, damage
from tests.support import logs
from tests.support.endurance import Clients, disk_and_session
from tests.support.faces import read, write
from tests.support.faults.behaviours import Corrupt, Drop
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.interop import Record
from tests.support.until import all_ended, until

# What a kernel does with the tasks of a connection that is gone may leave it unusable.
LAB_LAST = True

pytestmark = pytest.mark.logs(
    logs.ONE_OF_SEVERAL,
    logs.RECONNECTED,
    logs.LOST_POWER,
    logs.DEADLINES,
    logs.ASYNC_MESSAGE,
    logs.REJECTED,
)

CLIENTS = 8
CUTS = (2, 2, 0)  # by level
_ALL_END = (
    "one is cut, and LIO ends the others, too, unless the lost one was logged out before: the "
    "session is reinstated, and all connections come back"
)
OUTCOMES = (
    _ALL_END,
    _ALL_END,
    "none is cut: LIO's kernel crashes at a logout for recovery "
    "(iscsit_discard_cr_cmds_by_expstatsn)",
)
OPTIONS = {
    "error-recovery-level": "1",
    "header-digest": "crc32c",
    "data-digest": "crc32c",
    "io-timeout": "120",
}
STATUS_FLAG = 0x01  # S bit of a Data-In
PATIENCE_S = 120.0  # the machine is emulated
DEFAULTS = {
    "authentication": "1",
    "AuthMethod": "CHAP",
    "MaxConnections": "1",
    "ErrorRecoveryLevel": "0",
}


def put(**values: str) -> None:
    """Set parameters of LIO's portal group, for the logins that follow. LIO takes the level from an
    attribute of the initiator, not from the group's parameter."""
    group = Path(os.environ["LAB_TPG"])
    if level := values.pop("ErrorRecoveryLevel", ""):
        known = group / "acls" / os.environ["LAB_INITIATOR"] / "attrib"
        (known / "default_erl").write_text(level)
    for name, value in values.items():
        folder = "attrib" if name.islower() else "param"
        (group / folder / name).write_text(value)


def lio() -> tuple[str, int]:
    """Its portal."""
    return os.environ["LAB_ADDRESS"], int(os.environ["LAB_PORT"])


@pytest.fixture(autouse=True)
def plain_group() -> Iterator[None]:
    put(authentication="0", AuthMethod="CHAP,None")
    yield
    put(**DEFAULTS)


# shows: SYSTEM-30
@pytest.mark.parametrize(("count", "level"), [(2, 0), (2, 1), (2, 2), (4, 1)])
async def test_several_connections(count: int, level: int, record: Record) -> None:
    """All connections carry commands, and below level 2 the busiest is cut, twice. At level 2 none
    is cut: the kernel of Linux 6.1 crashes when LIO is asked to log out a lost connection for
    recovery (a null pointer in iscsit_discard_cr_cmds_by_expstatsn)."""
    put(MaxConnections=str(count), ErrorRecoveryLevel=str(level))
    options = {**OPTIONS, "connections": str(count), "error-recovery-level": str(level)}
    async with disk_and_session("async", os.environ["LAB_URL"], options) as (disk, session):

        async def all_there() -> None:
            with trio.fail_after(PATIENCE_S):
                await until(lambda: session.count == count and session.life.connected)

        def busiest() -> Connection:
            return max(session.queue.connections.copy(), key=lambda each: each.in_flight)

        await all_there()
        described = session.describe()
        agreed = described["connections"], described.get("error_recovery_level", 0)
        assert agreed == (count, level)
        clients = Clients(disk, session, CLIENTS)
        counts = session.counts
        async with clients.at_work():
            for cuts in range(1, CUTS[level] + 1):
                await all_there()
                with trio.fail_after(PATIENCE_S):
                    await until(lambda: busiest().in_flight > 1)
                    busiest().datamover.disconnect()
                    await until(lambda: counts.recovered + counts.reconnects >= cuts)  # noqa: B023
                await clients.progress()
            await all_there()
            with trio.fail_after(PATIENCE_S):
                await until(lambda: all(each.ended for each in session.queue.connections.copy()))
        assert session.error is None
        await all_ended(session.queue)
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran=f"{count} connections, ErrorRecoveryLevel={level}: all carry commands; "
        f"{OUTCOMES[level]}",
    )


class Harm(NamedTuple):
    """What happens to PDUs of one kind. ``up``: sent by the initiator. ``lost``: taken away, not
    damaged. ``ran``: what came of it."""

    picks: Callable[[Unit], bool]
    up: bool
    lost: bool
    ran: str


def data_in(last: bool) -> Callable[[Unit], bool]:
    """LIO's last Data-In of a command carries its status."""
    return lambda unit: (
        unit.opcode == bhs.DATA_IN
        and len(unit.data) > HEADER
        and bool(unit.bhs[1] & STATUS_FLAG) is last
    )


def with_data(opcode: int) -> Callable[[Unit], bool]:
    return lambda unit: unit.opcode == opcode and len(unit.data) > HEADER


def response(unit: Unit) -> bool:
    return unit.opcode == bhs.SCSI_RESPONSE


def r2t(unit: Unit) -> bool:
    return unit.opcode == bhs.R2T


WITHIN = {
    "Data-In": Harm(data_in(last=False), False, False, "damaged Data-In, sent again after a SNACK"),
    "last Data-In": Harm(
        data_in(last=True),
        False,
        False,
        "damaged last Data-In of a command, sent again with its status after a SNACK",
    ),
    "R2T": Harm(r2t, False, True, "lost R2Ts, sent again after a SNACK"),
    "SCSI Response": Harm(response, False, True, "lost statuses, sent again after a SNACK"),
    "command": Harm(
        with_data(bhs.SCSI_COMMAND),
        True,
        False,
        "damaged immediate data; the command is sent again",
    ),
}
BLOCK = 300 << 10  # a read has two Data-In: more than MaxBurstLength
BLOCKS = 6


async def harmed(harm: Harm, seed: str) -> tuple[Session, int, list[int | None]]:
    """Write, read and compare, while the first, third and fifth of those PDUs are harmed. Returns
    the session, which has ended, the number of connections, and what the initiator sent."""
    put(ErrorRecoveryLevel="1")
    made: list[Corrupt | Drop] = [
        Drop(harm.picks, nth) if harm.lost else Corrupt(harm.picks, nth, change=damage(f"{nth}"))
        for nth in (0, 2, 4)
    ]
    with FaultProxy(lio()) as proxy:
        url = proxy.through(os.environ["LAB_URL"])
        async with disk_and_session("async", url, OPTIONS) as (disk, session):
            assert session.describe()["error_recovery_level"] == 1
            for each in made:
                proxy.stack(harm.up, lambda _flow, each=each: each)  # type: ignore[misc]
            chance = random.Random(seed)
            blocks = [chance.randbytes(BLOCK) for _ in range(BLOCKS)]
            with trio.fail_after(PATIENCE_S):
                for at, block in enumerate(blocks):
                    await write(disk, block, at * BLOCK)
                for at, block in enumerate(blocks):
                    assert await read(disk, at * BLOCK, BLOCK) == block
            assert session.error is None
        assert any(each.hit for each in made)
        return session, len(proxy.links), [unit.opcode for unit in proxy.seen()]


@pytest.mark.parametrize("name", WITHIN)
async def test_harm_within_a_connection(name: str, record: Record) -> None:
    """ErrorRecoveryLevel 1: no connection ends."""
    harm = WITHIN[name]
    session, connections, sent = await harmed(harm, name)
    assert connections == 1 and not session.counts.reconnects
    if not harm.up:
        assert bhs.SNACK_REQUEST in sent
    record(
        ours="initiator",
        peer="LIO",
        transport="TCP, CRC32C digests",
        ran=f"ErrorRecoveryLevel=1: {harm.ran}; no connection ends",
    )
