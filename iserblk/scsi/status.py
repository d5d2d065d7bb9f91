"""SCSI status codes (SAM-5, Status)."""

from __future__ import annotations

GOOD = 0x00
CHECK_CONDITION = 0x02
CONDITION_MET = 0x04
BUSY = 0x08
RESERVATION_CONFLICT = 0x18
TASK_SET_FULL = 0x28
ACA_ACTIVE = 0x30
TASK_ABORTED = 0x40

_WORDS = {
    GOOD: "GOOD",
    CHECK_CONDITION: "CHECK CONDITION",
    CONDITION_MET: "CONDITION MET",
    BUSY: "BUSY",
    RESERVATION_CONFLICT: "RESERVATION CONFLICT: another initiator has reserved the LUN",
    TASK_SET_FULL: "TASK SET FULL",
    ACA_ACTIVE: "ACA ACTIVE",
    TASK_ABORTED: "TASK ABORTED by another initiator",
}


def words(status: int) -> str:
    """A status byte in words. Accepts any number."""
    return _WORDS.get(status) or f"status {status:#04x}"
