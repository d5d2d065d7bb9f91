"""LUNs that answer what is asked after login, each command at once, and with the errors that a test
puts there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from iserblk.commands.command import TAKEN, Command, Operation
from iserblk.disk.lun.identify import identify
from iserblk.disk.lun.operations import DiskCore
from iserblk.scsi import capacity, inquiry, lba, luns, mode, opcodes
from iserblk.scsi.sense import encode_fixed
from tests.disk.fake_target import FakeSession

T = TypeVar("T")


@dataclass
class FakeLun:
    """``errors``: by what is asked ("VPD 83", "READ CAPACITY(16)", …), sense data; those of a list
    go one by one, an int is a status without sense data."""

    serial: str = "S1"
    blocks: int = 2048
    block: int = 512
    vendor: str = "Vendor"
    naa: bytes = bytes(8)
    specific: int = 0  # the device-specific parameter of MODE SENSE
    errors: dict[str, bytes | int | list[bytes | int]] = field(default_factory=dict)

    def answer(self, cdb: bytearray) -> tuple[str, bytes]:
        """What is asked, and what to answer."""
        operation = cdb[0]
        if operation == opcodes.INQUIRY and not cdb[1] & 1:
            return "INQUIRY", inquiry.encode_standard(0, self.vendor, "Product", "1")
        if operation == opcodes.INQUIRY:
            pages = {
                0x00: inquiry.encode_supported_pages([0, 0x80, 0x83]),
                0x80: inquiry.encode_serial(self.serial),
                0x83: inquiry.encode_identifiers([inquiry.Designator(0, 3, 1, self.naa)]),
            }
            return f"VPD {cdb[2]:02x}", pages[cdb[2]]
        if operation == opcodes.TEST_UNIT_READY:
            return "TEST UNIT READY", b""
        if operation == opcodes.READ_CAPACITY_10:
            return "READ CAPACITY(10)", capacity.encode10(self.blocks, self.block)
        if operation == opcodes.MODE_SENSE_6:
            page = mode.caching_page(write_cache=False)
            return "MODE SENSE", mode.encode_sense6(self.specific, b"", page)
        assert operation == opcodes.SERVICE_ACTION_IN_16, (
            f"FakeLun.answer has no answer to {opcodes.name(bytes(cdb))}"
        )
        if cdb[1] & 0x1F == opcodes.SA_GET_LBA_STATUS:
            first = int.from_bytes(cdb[2:10], "big")
            count = min(self.blocks - first, 0xFFFFFFFF)
            return "GET LBA STATUS", lba.encode_lba_status([(first, count, 0)])
        size = capacity.Capacity(self.blocks, self.block, self.block, lbpme=True)
        return "READ CAPACITY(16)", capacity.encode16(size)

    def error(self, what: str) -> bytes | int:
        error = self.errors.get(what, 0)
        if isinstance(error, list):
            return error.pop(0) if error else 0
        return error


class FakeLuns(FakeSession):
    """A session with LUN 0 behind it. ``asked``: (LUN, what), in order."""

    def __init__(self, lun: FakeLun | None = None) -> None:
        super().__init__()
        self.luns = {0: lun or FakeLun()}
        self.asked: list[tuple[int, str]] = []
        self.error = None
        self.can_reconnect = False

    def describe(self) -> dict[str, object]:
        return {}

    def answer_luns(self) -> bytes:
        return luns.encode_report_luns(self.luns)

    def submit(self, slot: Command) -> None:
        super().submit(slot)
        assert slot.error is None, (
            f"{opcodes.name(bytes(slot.cdb))} is held back while the LUN is in doubt: a command "
            "that tells what a LUN is belongs into TELL_WHAT_IT_IS of iserblk/scsi/opcodes.py"
        )
        number = luns.decode(slot.lun)
        if slot.cdb[0] == opcodes.REPORT_LUNS:
            what, data, error = "REPORT LUNS", self.answer_luns(), self.luns[0].error("REPORT LUNS")
        else:
            lun = self.luns.get(number)
            if lun is None:
                self.end(slot, sense=encode_fixed(5, 0x25, 0x00))
                return
            what, data = lun.answer(slot.cdb)
            error = lun.error(what)
        self.asked.append((number, what))
        if isinstance(error, bytes):
            self.end(slot, sense=error)
        elif error:
            self.end(slot, status=error)
        else:
            self.flight.remove(slot)
            slot.status = slot.response = 0
            slot.sense, slot.error = b"", None
            if slot.data is not None:
                slot.data[: len(data)] = data[: len(slot.data)]
            slot.residual = max(0, slot.length - len(data))
            slot.state = TAKEN
            slot.waiter.task_done()


def finish(operation: Operation[T]) -> tuple[T, list[float]]:
    """Run the operation to its end: (what it returns, seconds that it would have slept)."""
    pauses: list[float] = []
    while True:
        try:
            step = next(operation)
        except StopIteration as stop:
            return stop.value, pauses
        assert isinstance(step, float), "it waits for what has ended"
        pauses.append(step)


def known(session: FakeLuns, lun: int = 0) -> DiskCore:
    """A DiskCore of the LUN behind ``session``, as identified after login."""
    steps = identify(session, lun, f"lun{lun}", f"iser://portal/iqn/{lun}", "iqn")  # type: ignore[arg-type]
    (info, geometry), _ = finish(steps)
    return DiskCore(session, luns.encode(lun), info, geometry)  # type: ignore[arg-type]
