"""Sessions of two connections under load, while one of them, both or the target are lost: nothing
that was written is lost, and nothing older comes over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from iserblk.errors import CommandTimeout
from iserblk.iscsi import bhs
from tests.faults.load import load
from tests.faults.test_recovery_within import DOWN, LEVEL_1, damage, one_of, with_data
from tests.support import logs
from tests.support.cores import session_of
from tests.support.faces import one_disk, read, write
from tests.support.faults.behaviours import FIN, RST, Behaviour, Corrupt, Cut, Drop
from tests.support.faults.proxy import FaultProxy
from tests.support.target import TargetProcess, running_target
from tests.support.transports import by
from tests.support.until import until

pytestmark = pytest.mark.logs(
    logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.LOST_POWER, logs.REJECTED, logs.DEADLINES
)

SPEC = "lun:size=16M"
DATA = os.urandom(65536)
transport = pytest.mark.parametrize("transport", ["iser", "iscsi"])
level = pytest.mark.parametrize("level", [0, 2])


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    with running_target([f"{tmp_path}/{SPEC}"], tmp_path / "target.log") as running:
        yield running
    assert "Traceback" not in (tmp_path / "target.log").read_text()


def url_of(proxy: FaultProxy, target: TargetProcess, transport: str, options: str) -> str:
    return by(transport, proxy.through(f"{target.url}/0"), f"connections=2&{options}")


@transport
@level
@pytest.mark.parametrize("how", [FIN, RST])
async def test_connections_end_anywhere(
    target: TargetProcess, transport: str, level: int, how: str
) -> None:
    """Each of the first eight, after some bytes of one direction: both may be gone at once."""

    def plan(number: int) -> tuple[list[Behaviour], list[Behaviour]]:
        if number >= 8:
            return [], []
        cut: list[Behaviour] = [Cut(100_000 + 170_001 * number, how)]
        return (cut, []) if number % 2 else ([], cut)

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        session = await load(
            url_of(proxy, target, transport, f"error-recovery-level={level}&io-timeout=60"), level
        )
    assert len(proxy.links) >= 8
    # Below level 2 statuses are lost with a connection: with unflushed writes it is reinstated.
    counts = session.counts
    assert counts.recovered if level == 2 else counts.recovered + counts.reconnects


async def test_what_is_lost_before_the_cut_comes_by_the_other(target: TargetProcess) -> None:
    """Level 2 over TCP: Data-In, R2Ts and responses are damaged and dropped, and connections end
    while some are missing."""
    hits: list[Corrupt | Drop] = []

    def plan(number: int) -> tuple[list[Behaviour], list[Behaviour]]:
        both: list[Corrupt | Drop] = [
            Corrupt(with_data, None, 0.1, f"damaged{number}", damage(number)),
            Drop(one_of(*DOWN), None, 0.02, f"lost{number}"),
        ]
        hits.extend(both)
        if number >= 8:
            return [], []
        return [], [*both, Cut(400_000 + 90_001 * number, RST)]

    options = LEVEL_1.replace("level=1", "level=2")
    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        session = await load(url_of(proxy, target, "iscsi", f"{options}&io-timeout=60"), 5)
        snacks = sum(
            unit.opcode == bhs.SNACK_REQUEST for link in proxy.links for unit in link.up.units
        )
    assert session.counts.recovered and session.counts.reassigned
    assert session.counts.losses.damaged and snacks and sum(each.hit for each in hits) > 4


@transport
@level
async def test_the_target_crashes(
    tmp_path: Path, target: TargetProcess, transport: str, level: int
) -> None:
    """Its successor knows no session: session reinstatement, and both connections come back."""
    options = f"connections=2&error-recovery-level={level}&io-timeout=60"
    places = [at * len(DATA) for at in range(9)]
    with ExitStack() as successor:
        async with one_disk("async", by(transport, f"{target.url}/0", options)) as disk:
            session = session_of(disk)
            await write(disk, DATA, places[0])
            target.kill()
            async with trio.open_nursery() as nursery:
                for place in places[1:]:
                    nursery.start_soon(write, disk, DATA, place)
                spec, log = f"{tmp_path}/{SPEC}", tmp_path / "target.log"
                successor.enter_context(running_target([spec], log, target.listen))
            for place in places:
                assert await read(disk, place, len(DATA)) == DATA
            await until(lambda: session.count == 2)
            assert session.counts.reconnects and not session.counts.recovered
            await disk.flush()


@transport
@level
async def test_an_outage_longer_than_a_request_may_take(
    target: TargetProcess, transport: str, level: int
) -> None:
    """Requests fail with a timeout, and no later than that; afterwards all is as before."""
    with FaultProxy(("127.0.0.1", target.port)) as proxy:
        url = url_of(proxy, target, transport, f"error-recovery-level={level}&io-timeout=1")
        async with one_disk("async", url) as disk:
            session = session_of(disk)
            await write(disk, DATA, 0)
            proxy.refuse()
            proxy.cut()
            with pytest.raises(CommandTimeout):
                await read(disk, 0, len(DATA))
            proxy.admit()
            await until(lambda: session.suspended is None and session.count == 2)
            assert await read(disk, 0, len(DATA)) == DATA
            await write(disk, DATA[::-1], 0)
            assert await read(disk, 0, len(DATA)) == DATA[::-1]


@pytest.mark.long
@pytest.mark.timeout(300)
@transport
@level
async def test_a_connection_falls_silent(target: TargetProcess, transport: str, level: int) -> None:
    """A ping finds it out, and what was in flight there goes on by the other: the session is not
    reconnected."""
    with FaultProxy(("127.0.0.1", target.port)) as proxy:
        url = url_of(proxy, target, transport, f"error-recovery-level={level}&io-timeout=60")
        async with one_disk("async", url) as disk:
            session = session_of(disk)
            for turn in range(2):
                await until(lambda: session.count == 2)
                silent = proxy.links[-turn]  # the first, then the newest
                for flow in (silent.up, silent.down):
                    flow.behaviours.append(Cut(flow.taken, "black hole"))
                async with trio.open_nursery() as nursery:
                    for at in range(16):
                        nursery.start_soon(write, disk, DATA, at * len(DATA))
                for at in range(16):
                    assert await read(disk, at * len(DATA), len(DATA)) == DATA
                await until(lambda turn=turn: session.counts.recovered > turn)  # type: ignore[misc]
            # The other was never lost.
            assert (session.counts.recovered, session.counts.reconnects) == (2, 0)
