"""reserve=exclusive with two portals in two portal groups: the reservation is held through the
portal in use, and writes that were delayed on the way through the other are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from iserblk.disk.multipath import failback, policy
from iserblk.scsi import reservations as pr
from tests.support import logs
from tests.support.cores import session_of
from tests.support.faces import FACES, opened, read, write
from tests.support.faults.behaviours import Hold
from tests.support.ported import ported_target
from tests.support.sessions import host_of
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.LOST_POWER, logs.RECONNECTED)

KIB = 1024
WRITES = 3  # the first late write meets the unit attention of the reset in any case
SETTLE_S = 0.3
EXCLUSIVE = {
    "reserve": "exclusive",
    "initiator-name": "iqn.2026-11.example:ways",
    "io-timeout": "60",
}

face = pytest.mark.parametrize("face", FACES)


async def holders(url: str) -> list[tuple[bool, int]]:
    """Per registration: whether it holds the LUN, and its relative target port."""
    async with host_of(url, "iqn.2026-11.a:b") as host:
        answer = await host.ask(pr.READ_FULL_STATUS)
    return [(each.holder, each.port) for each in pr.decode_full_status(answer)[1]]


@face
async def test_held_through_the_portal_in_use(
    tmp_path: Path, face: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "FIRST_FAIL_BACK_S", 0.5)
    monkeypatch.setattr(failback, "LOOK_S", 0.02)
    monkeypatch.setattr(failback, "PROVEN_S", 0.1)
    with ported_target(tmp_path) as ported:
        urls = ported.urls()
        async with opened(face, *urls, options=EXCLUSIVE) as disks:
            (disk,) = disks.values()
            session = session_of(disk)
            await write(disk, b"1" * 512, 0)
            assert await holders(urls[1]) == [(True, 1)]
            ported.one.refuse(by_reset=True)
            ported.one.cut()
            await write(disk, b"2" * 512, 512)
            assert await holders(urls[1]) == [(True, 2)]
            ported.one.admit()
            with trio.fail_after(60):
                await until(lambda: session.counts.reconnects >= 2)
            assert await read(disk, 0, 1024) == b"1" * 512 + b"2" * 512
            assert await holders(urls[1]) == [(True, 1)]
        assert await holders(urls[1]) == []


@face
@pytest.mark.parametrize("size", [8 * KIB, 256 * KIB], ids=["with its command", "asked for"])
async def test_a_delayed_write_through_the_other_group(
    tmp_path: Path, face: str, size: int
) -> None:
    """The target does not know that a connection is lost, and still serves it: a write that arrives
    there after the LUN was used through the other portal is refused."""
    hold = Hold(lambda unit: unit.is_write_command)
    with ported_target(
        tmp_path, lambda number: ([hold] if number == 0 else [], []), "auto"
    ) as ported:
        async with opened(face, *ported.urls(), options=EXCLUSIVE) as disks:
            (disk,) = disks.values()
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    for number in range(WRITES):
                        nursery.start_soon(write, disk, b"o" * size, number * size)
                    await until(lambda: hold.holding)
                    ported.one.refuse(by_reset=True)
                    assert ported.one.abandon() == 1
                await write(disk, b"n" * size * WRITES, 0)
                assert ported.one.release(hold) >= 48
                await trio.sleep(SETTLE_S)
                assert await read(disk, 0, size * WRITES) == b"n" * size * WRITES
