"""ORDERED and HEAD OF QUEUE between our two ends, over iSER and TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.commands.command import Command
from iserblk.commands.running import fill_read, fill_write
from iserblk.disk.aio import TrioDisk, open_disks
from iserblk.scsi import cdb, tasks
from tests.support.target import TargetProcess, running_target

SIZE = 1 << 20
ROUNDS = 20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size={SIZE}"], place / "target.log") as running:
        yield running


class Burst:
    """Commands that leave in this order, without one waiting for another."""

    def __init__(self, disk: TrioDisk) -> None:
        self._disk = disk
        self._waiter = disk.driver.new_waiter()
        self._slots: list[Command] = []

    def _take(self) -> Command:
        slot = self._disk.core.queue.take_now()
        assert slot is not None
        slot.waiter = self._waiter
        self._slots.append(slot)
        return slot

    def write(self, data: bytes, attribute: int = tasks.SIMPLE, fua: bool = False) -> None:
        slot = self._take()
        fill_write(slot, self._disk.core.lun, memoryview(data))
        cdb.pack_write16(slot.cdb, 0, len(data) // 512, cdb.FUA if fua else 0)
        slot.attribute = attribute

    def read(self, buffer: bytearray, attribute: int = tasks.SIMPLE) -> None:
        slot = self._take()
        fill_read(slot, self._disk.core.lun, memoryview(buffer))
        cdb.pack_read16(slot.cdb, 0, len(buffer) // 512, 0)
        slot.attribute = attribute

    async def run(self) -> None:
        """Send them, and wait for all answers: each is GOOD."""
        self._waiter.pending += len(self._slots)
        queue = self._disk.core.queue
        for slot in self._slots:
            queue.submit(slot)
        await self._disk.driver.wait(self._waiter)
        for slot in self._slots:
            assert slot.error is None and slot.status == 0, slot.error
            queue.release(slot)


@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_an_ordered_write_comes_between_its_neighbours(
    target: TargetProcess, scheme: str
) -> None:
    """A SIMPLE write that waits for the disk is overtaken by one that need not; an ORDERED one
    does not overtake it, and the reads behind it do not overtake the ORDERED one."""
    url = f"{target.url.replace('iser:', scheme + ':')}/0"
    async with open_disks([url], {}) as disks:
        disk = disks.disks[disks.default]
        assert isinstance(disk, TrioDisk)
        for number in range(ROUNDS):
            old, new = (bytes((2 * number + each,)) * 65536 for each in (1, 2))
            found = [bytearray(65536) for _ in range(4)]
            burst = Burst(disk)
            for _ in range(4):
                burst.write(old, fua=True)
            burst.write(new, tasks.ORDERED)
            for buffer in found:
                burst.read(buffer)
            await burst.run()
            assert all(buffer == new for buffer in found)


async def test_a_head_of_queue_read_waits_for_nothing(target: TargetProcess) -> None:
    """Between commands that wait for each other, and they all end."""
    async with open_disks([f"{target.url}/0"], {}) as disks:
        disk = disks.disks[disks.default]
        assert isinstance(disk, TrioDisk)
        data, buffer = b"h" * 4096, bytearray(4096)
        for _ in range(ROUNDS):
            burst = Burst(disk)
            for _ in range(3):
                burst.write(data, fua=True)
                burst.write(data, tasks.ORDERED, fua=True)
                burst.read(buffer, tasks.HEAD_OF_QUEUE)
            await burst.run()
        assert buffer == data
