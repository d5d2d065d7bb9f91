"""Targets with LUNs that cannot be used, or that come and go."""

from __future__ import annotations

from iserblk.commands.command import Operation
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.opening import find_disks
from iserblk.scsi.sense import (
    NOT_READY,
    UNIT_ATTENTION,
    encode_fixed,
)
from tests.disk.fake_lun import FakeLuns, T, finish

URL = "iser://portal/iqn.2026-11.example:disk"


CHANGED = encode_fixed(UNIT_ATTENTION, 0x3F, 0x0E)


NO_MEDIUM = encode_fixed(NOT_READY, 0x3A, 0x00)


class Driver:
    """Runs operations as a TrioDriver does, on a session that answers at once."""

    def __init__(self, session: FakeLuns) -> None:
        self.session = session

    async def run_operation(self, operation: Operation[T]) -> T:
        return finish(operation)[0]


async def found(session: FakeLuns, **options: str) -> list[DiskCore]:
    (address,) = settle([URL], options)
    return await find_disks(Driver(session), address)  # type: ignore[arg-type]


def numbers(cores: list[DiskCore]) -> list[int]:
    return [core.info.lun for core in cores]
