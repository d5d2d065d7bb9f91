"""A session whose target answers when the test says so: what waits for it takes turns."""

from __future__ import annotations

from time import monotonic

import trio
import trio.testing

from iserblk.disk.aio import TrioDisk
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.operations import DiskCore
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.iscsi import bhs, pdu
from iserblk.loop import strands
from iserblk.scsi import luns
from tests.initiator.fake import response, session
from tests.support.fake_disk import lun_info

BLOCK = 512
DEPTH = 32


class Disk(TrioDisk):
    """It does not ask the target for its size."""

    async def refresh(self) -> int:
        return self.core.size


class Answering:
    """A session of DEPTH slots, and a target whose window has ``window`` commands."""

    def __init__(self, window: int = DEPTH) -> None:
        self.session, self.datamover = session(DEPTH, window)
        self._window = window
        self._answered = 0
        self.driver = TrioDriver(self.session)

    def disk(self, number: int) -> Disk:
        info = lun_info(number, size=1 << 20, block_size=BLOCK, physical_block_size=BLOCK)
        core = DiskCore(self.session, luns.encode(number), info, Geometry(BLOCK, True))
        return Disk(core, self.driver)

    async def answer(self, settle: bool = True) -> bool:
        """The target answers what it was sent first. False: it has answered everything."""
        sent = self.datamover.sent
        if self._answered == len(sent):
            return False
        _, message = sent[self._answered]
        self._answered += 1
        (itt,) = bhs.ITT.unpack_from(message, bhs.ITT_OFFSET)
        window = self._answered + self._window
        if message[0] & bhs.OPCODE_MASK == bhs.SCSI_COMMAND:
            answer = response(itt, max_cmd_sn=window)
        else:
            answer = pdu.TaskManagementResponse(
                response=pdu.TMF_COMPLETE, itt=itt, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=window
            ).pack()
        self.datamover.inbox.append(answer)
        self.session.progress(monotonic())
        if settle:
            await self.settle()
        return True

    async def answer_all_sent(self) -> None:
        for _ in range(len(self.datamover.sent) - self._answered):
            assert await self.answer()

    async def answer_while_it_ends(self) -> None:
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            while await self.answer():
                pass

    async def settle(self) -> None:
        """Until nothing can go on without another answer."""
        strands.here().run()
        await trio.testing.wait_all_tasks_blocked()
        self.session.queue.flush()

    def was_sent(self, lba: int) -> bool:
        sent = self.datamover.sent
        return any(int.from_bytes(message[34:42], "big") == lba for _, message in sent)

    async def answers_until_sent(self, lba: int) -> int:
        """How many answers come before the command for ``lba`` is sent."""
        count = 0
        while not self.was_sent(lba):
            assert await self.answer()
            count += 1
        return count
