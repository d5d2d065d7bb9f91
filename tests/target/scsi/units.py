"""Units and clients for tests of the device server."""

from __future__ import annotations

from iserblk.scsi import cdb
from iserblk.target.scsi.commands import COMMANDS

SIZE = 1 << 20


TEST_UNIT_READY = cdb.test_unit_ready()


KNOWN = {each.usage[0] for each in COMMANDS.values()}


def supported(option: int, opcode: int = 0, action: int = 0, allocation: int = 4096) -> bytes:
    return (
        bytes((0xA3, 0x0C, option, opcode))
        + action.to_bytes(2, "big")
        + allocation.to_bytes(4, "big")
        + bytes(2)
    )
