"""A session with several connections, one after the other or at the same time, to fake
datamovers."""

from __future__ import annotations

import os
from typing import Any

from iserblk.datamover.seam import PduSlot
from iserblk.errors import ConnectionLost
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA
from tests.initiator.fake import CountingWaiter, FakeDatamover, FakeDriver
from tests.support import clocks

MOST = 1 << 16  # of the window


class Polled(FakeDatamover):
    """A FakeDatamover with a descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def connection_terminate(self) -> None:
        super().connection_terminate()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def opcodes(self) -> list[int]:
        """Of what was sent."""
        return [sent[0] & bhs.OPCODE_MASK for _, sent in self.sent]


class Bench:
    """A session with ``count`` connections. ``dms``: their datamovers, by CID."""

    def __init__(self, count: int, depth: int = 8, **parameters: Any) -> None:
        agreed = SessionParameters(max_connections=count, **parameters)
        first = Polled()
        slots = [TaskSlot(index) for index in range(depth + CONTROL_SLOTS)]
        first.allocate_connection_resources(list(slots), 0)
        self.session = Session(first, slots, agreed, "portal:3260", 30.0)
        self.session.start(1, 1, MOST, 100)
        self.driver = FakeDriver(self.session)
        self.calls = 0
        self.session.drive(self.driver)
        self.dms = [first]
        self.waiter = CountingWaiter()
        self._clock = clocks.given()
        for cid in range(1, count):
            self.add(cid)

    @property
    def now(self) -> float:
        return self._clock.now

    @now.setter
    def now(self, now: float) -> None:
        self._clock.now = now

    def reconnectable(self) -> None:
        self.driver.reconnect = self._reconnect

    def _reconnect(self) -> None:
        self.calls += 1

    def add(self, cid: int) -> Polled:
        datamover = self.offer(cid)
        self.progress()
        return datamover

    def offer(self, cid: int) -> Polled:
        datamover = Polled()
        memory = self.memory_for(datamover)
        made = Connection(datamover, memory, self.session.parameters, "portal:3260", cid)
        made.exp_stat_sn = 100
        self.session.offer_connection(made)
        if cid < len(self.dms):
            self.dms[cid] = datamover
        else:
            self.dms.append(datamover)
        return datamover

    def memory_for(self, datamover: FakeDatamover) -> list[PduSlot]:
        memory = [PduSlot(index) for index in range(len(self.session.queue.slots))]
        datamover.allocate_connection_resources(memory, 0)
        return memory

    def progress(self, after: float = 0.0) -> None:
        self.now += after
        self.session.progress(self.now)

    def submit(self, direction: int = NO_DATA, size: int = 512) -> TaskSlot:
        slot = self.session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes(16)
        slot.lun = bytes(8)
        slot.direction = direction
        slot.deadline = self.now + 30.0
        slot.data = None if direction == NO_DATA else memoryview(bytearray(size))
        slot.data_in = memoryview(bytearray(size)) if direction == BIDIRECTIONAL else None
        slot.length = 0 if direction == NO_DATA else size
        slot.waiter = self.waiter
        self.waiter.pending += 1
        self.session.queue.submit(slot)
        return slot

    def lose(self, cid: int) -> None:
        self.dms[cid].inbox.append(ConnectionLost("portal:3260: connection lost: gone"))
        self.progress()

    def receive(self, cid: int, message: pdu.Pdu | bytes) -> None:
        raw = message if isinstance(message, bytes) else message.pack()
        self.dms[cid].inbox.append(raw)
        self.progress()

    def logged_out(
        self,
        cid: int,
        request: bytes,
        code: int = 0,
        exp_cmd_sn: int = 1,
        wait: int = 0,
        retain: int = 20,
    ) -> None:
        self.receive(
            cid,
            pdu.LogoutResponse(
                response=code,
                itt=bhs.ITT.unpack_from(request, bhs.ITT_OFFSET)[0],
                stat_sn=100,
                exp_cmd_sn=exp_cmd_sn,
                max_cmd_sn=MOST,
                time2wait=wait,
                time2retain=retain,
            ),
        )

    def answered(self, cid: int, request: bytes, code: int) -> None:
        """The answer to a task management request."""
        self.receive(
            cid,
            pdu.TaskManagementResponse(
                response=code,
                itt=bhs.ITT.unpack_from(request, bhs.ITT_OFFSET)[0],
                stat_sn=100,
                exp_cmd_sn=1,
                max_cmd_sn=MOST,
            ),
        )

    def close(self) -> None:
        self.session.fail(ConnectionLost("closing"))


def logout_of(dm: Polled) -> bytes:
    """The Logout Request that was sent last."""
    found = [sent for _, sent in dm.sent if sent[0] & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST]
    return found[-1]


def patient(bench: Bench) -> Bench:
    """DefaultTime2Wait is 2 s by default: wait for it."""
    bench.progress(bench.session.parameters.default_time2wait)
    return bench


def announced(event: int, **parameters: int) -> pdu.AsyncMessage:
    return pdu.AsyncMessage(
        lun=bytes(8), event=event, stat_sn=1, exp_cmd_sn=1, max_cmd_sn=MOST, **parameters
    )
