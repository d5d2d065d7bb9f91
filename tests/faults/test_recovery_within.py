"""ErrorRecoveryLevel 1 over TCP under load: PDUs are damaged and lost, and no connection ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from iserblk.iscsi import bhs
from tests.faults.load import load
from tests.support import logs
from tests.support.faults.behaviours import Behaviour, Corrupt, Drop
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.target import TargetProcess, running_target

pytestmark = pytest.mark.logs(logs.REJECTED)

LEVEL_1 = "header-digest=crc32c&data-digest=crc32c&error-recovery-level=1"
UP = (bhs.SCSI_COMMAND, bhs.DATA_OUT)
DOWN = (bhs.DATA_IN, bhs.R2T, bhs.SCSI_RESPONSE)
HEADER = bhs.BHS_LENGTH + 4  # with its digest

Plan = Callable[[int], tuple[Sequence[Behaviour], Sequence[Behaviour]]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size=16M"], place / "target.log") as running:
        yield running


def one_of(*opcodes: int) -> Callable[[Unit], bool]:
    return lambda unit: unit.opcode in opcodes


def with_data(unit: Unit) -> bool:
    """Of full feature phase."""
    return unit.opcode in (*UP, *DOWN) and len(unit.data) > HEADER


def damage(seed: object) -> Callable[[bytearray], None]:
    """Turns one bit of the data, its padding or its digest."""
    chance = random.Random(str(seed))

    def turn(data: bytearray) -> None:
        data[chance.randrange(HEADER, len(data))] ^= 1 << chance.randrange(8)

    return turn


@pytest.mark.parametrize("seed", range(3))
async def test_damaged_data(target: TargetProcess, seed: int) -> None:
    """One PDU in twelve, both ways: Data-In, immediate data, Data-Outs, sense data."""
    hits: list[Corrupt] = []

    def plan(number: int) -> tuple[list[Behaviour], list[Behaviour]]:
        both = [
            Corrupt(with_data, None, 0.08, f"{seed}{way}", damage(f"{seed}{way}{number}"))
            for way in ("up", "down")
        ]
        hits.extend(both)
        return [both[0]], [both[1]]

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = proxy.through(f"{target.url}/0").replace("iser:", "iscsi:")
        losses = (await load(f"{url}?{LEVEL_1}", seed)).counts.losses
        assert len(proxy.links) == 1  # the session was never lost
    assert all(each.hit > 5 for each in hits), [each.hit for each in hits]
    snacks = sum(unit.opcode == bhs.SNACK_REQUEST for unit in proxy.links[0].up.units)
    assert losses.snacks == snacks > 0
    assert losses.damaged == hits[1].hit


async def test_lost_pdus(target: TargetProcess, seed: int = 0) -> None:
    """Commands, Data-Outs, Data-In, R2Ts and responses."""
    hits: list[Drop] = []

    def plan(_number: int) -> tuple[list[Drop], list[Drop]]:
        up = [Drop(one_of(opcode), None, 0.03, f"{seed}{opcode}") for opcode in UP]
        down = [Drop(one_of(opcode), None, 0.03, f"{seed}{opcode}") for opcode in DOWN]
        hits.extend((*up, *down))
        return up, down

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = proxy.through(f"{target.url}/0").replace("iser:", "iscsi:")
        await load(f"{url}?{LEVEL_1}&io-timeout=60", seed)
        assert len(proxy.links) == 1
    assert sum(each.hit for each in hits) > 8


@pytest.mark.logs(logs.RECONNECTED, logs.LOST_POWER)
async def test_at_level_0_the_connection_ends(target: TargetProcess) -> None:
    """As ever: then the session is reinstated, and the data is right all the same."""

    def plan(number: int) -> tuple[list[Behaviour], list[Behaviour]]:
        if number:
            return [], []
        return [], [Corrupt(one_of(bhs.DATA_IN), 60, change=damage(0))]

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = proxy.through(f"{target.url}/0").replace("iser:", "iscsi:")
        await load(f"{url}?header-digest=crc32c&data-digest=crc32c", 1)
        assert len(proxy.links) > 1


def test_the_log_of_the_target_names_no_bug(target: TargetProcess) -> None:
    """Runs last."""
    assert "Traceback" not in Path(target.log).read_text()
