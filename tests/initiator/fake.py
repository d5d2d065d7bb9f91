"""A datamover that sends nothing: tests see what was queued, and make the answers."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from iserblk.datamover.seam import InitiatorUser, Losses, PduSlot, not_told
from iserblk.errors import IserblkError
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters


class FakeDatamover:
    """Implements InitiatorDatamover. ``sent``: (slot, BHS as it was sent), oldest first."""

    user: InitiatorUser

    def __init__(self) -> None:
        self.queued: deque[PduSlot] = deque()
        self.sent: list[tuple[PduSlot, bytes]] = []
        self.ended: list[tuple[PduSlot, int]] = []
        self.reassigned: list[PduSlot] = []
        self.inbox: deque[bytes | IserblkError] = deque()
        self.greeted = True
        self.adds_resources = False
        self.losses = Losses()
        self.on_unfinished: Callable[[], None] = not_told
        self.disconnected = False
        self.ticks = 0
        self.tick_error: Exception | None = None
        self.terminated = False
        self.full = False

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        for slot in slots:
            memory = memoryview(bytearray(48 + 8192))
            slot.bhs, slot.inline = memory[:48], memory[48:]

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        self.allocate_connection_resources(slots, 0)

    def allocate_data_outs(self, count: int, size: int) -> list[PduSlot]:
        slots = [PduSlot(index) for index in range(count)]
        for slot in slots:
            memory = memoryview(bytearray(48 + size))
            slot.bhs, slot.inline = memory[:48], memory[48:]
        return slots

    def notice_key_values(self, parameters: object) -> None: ...

    def enable_datamover(self) -> FakeDatamover:
        return self

    def send_control(self, slot: PduSlot) -> None:
        self.queued.append(slot)

    def reassign(self, slot: PduSlot, control: PduSlot, before: object) -> None:
        self.reassigned.append(slot)
        self.queued.append(control)

    def flush(self) -> bool:
        while self.queued:
            slot = self.queued.popleft()
            self.sent.append((slot, bytes(slot.bhs)))
        return self.full

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        slot.data = None
        self.ended.append((slot, invalidated))

    def progress(self, now: float) -> int:
        count = 0
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, IserblkError):
                raise item
            count += 1
            self.user.control_notify(memoryview(item), 0, 0)
        return count

    def disconnect(self) -> None:
        self.disconnected = True

    def connection_terminate(self) -> None:
        self.terminated = True

    def tick(self) -> None:
        self.ticks += 1
        if self.tick_error is not None:
            raise self.tick_error

    def describe(self) -> dict[str, object]:
        return {}

    def fileno(self) -> int:
        return 0

    def wants_write(self) -> bool:
        return self.full


class CountingWaiter:
    """Implements Waiter; ``woken`` counts."""

    def __init__(self) -> None:
        self.pending = 0
        self.woken = 0

    def task_done(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.woken += 1


class FakeDriver:
    """Implements SessionDriver; tests replace single methods. ``blocks``, ``changes`` and
    ``agains``: how often the session called them. ``closed``: descriptors that it closed."""

    def __init__(self, made: Session) -> None:
        self.reconnect: Callable[[], None] | None = None
        self.flush_soon = made.queue.flush
        self.closed: list[int] = []
        self.blocks = 0
        self.changes = 0
        self.agains = 0

    def new_waiter(self) -> CountingWaiter:
        return CountingWaiter()

    def blocked(self) -> None:
        self.blocks += 1

    def closing(self, fd: int) -> None:
        self.closed.append(fd)

    def changed(self) -> None:
        self.changes += 1

    def again(self) -> None:
        self.agains += 1


def driver_of(made: Session) -> FakeDriver:
    """The FakeDriver of a session that ``session`` made."""
    driver = made.queue.driver
    assert isinstance(driver, FakeDriver)
    return driver


def session(
    depth: int = 4,
    window: int = 32,
    cmd_sn: int = 1,
    datamover: FakeDatamover | None = None,
    **parameters: object,
) -> tuple[Session, FakeDatamover]:
    """A session in full feature phase whose target takes ``window`` commands."""
    if datamover is None:
        datamover = FakeDatamover()
    slots = [TaskSlot(index) for index in range(depth + CONTROL_SLOTS)]
    datamover.allocate_connection_resources(list(slots), 0)
    made = Session(
        datamover,
        slots,
        SessionParameters(**parameters),  # type: ignore[arg-type]
        "portal:3260",
        30.0,
    )
    made.start(cmd_sn, cmd_sn, (cmd_sn + window - 1) & 0xFFFFFFFF, 100)
    made.drive(FakeDriver(made))
    return made, datamover


def command(made: Session, waiter: CountingWaiter) -> TaskSlot:
    """Take a slot and submit a TEST UNIT READY with it."""
    slot = made.queue.take_now()
    assert slot is not None
    slot.cdb[:] = bytes(16)
    slot.direction = 0
    slot.waiter = waiter
    waiter.pending += 1
    made.queue.submit(slot)
    return slot


def cmd_sn_of(sent: tuple[PduSlot, bytes]) -> int:
    number: int = struct.unpack_from(">I", sent[1], bhs.CMD_SN_OFFSET)[0]
    return number


def itt_of(sent: tuple[PduSlot, bytes]) -> int:
    number: int = struct.unpack_from(">I", sent[1], bhs.ITT_OFFSET)[0]
    return number


def response(
    itt: int, stat_sn: int = 100, max_cmd_sn: int = 32, sense: bytes = b"", **fields: int
) -> bytes:
    """A SCSI Response, ready for the inbox."""
    data = len(sense).to_bytes(2, "big") + sense if sense else b""
    values = {"exp_cmd_sn": 1, "status": 0, **fields}
    head = pdu.ScsiResponse(
        itt=itt, stat_sn=stat_sn, max_cmd_sn=max_cmd_sn, data_length=len(data), **values
    )
    return head.pack() + data
