"""What a user can do about a SCSI status or sense data that ends a request.

Only where that is obvious. Each remedy follows the words of ``status`` or ``sense_words`` in one
line; what ends by itself, and what iserblk handles, has none.
"""

from __future__ import annotations

from iserblk.scsi import sense as sense_data
from iserblk.scsi import status as sam
from iserblk.scsi.sense import Sense

_MEDIUM = "look at the target's log and disks; what the message names has to be written anew"
_INSIDE = "look at the target's log: its own disk or service has failed"
_ONLINE = "bring the LUN online at the target"
_PATH = "add the URL of another portal, or give portals=discover"
_ROOM = "make room in the pool behind the LUN at the target, or trim what is not used"
_PROTECTED = "allow writing at the target, or use the LUN read-only"
_REGISTRATIONS = "remove registrations of hosts that are gone, at the target"

# Statuses other than CHECK CONDITION.
_STATUS = {
    sam.BUSY: (
        "the target has too much to do: look at its load, lower queue-depth, or raise io-timeout"
    ),
    sam.TASK_SET_FULL: (
        "the target takes no more commands at once: lower queue-depth, here or on other hosts"
    ),
    sam.RESERVATION_CONFLICT: (
        "have that host release it, or ask its administrator; a host that is gone has left it"
        " behind"
    ),
    sam.TASK_ABORTED: "another host resets the LUN or takes it over: see what runs there",
}

# ASC << 8 | ASCQ
_SENSE = {
    0x0402: f"{_ONLINE} (START UNIT)",
    0x0403: f"{_ONLINE}: it waits for its operator",
    0x0404: "wait until it is formatted",
    0x040B: _PATH,
    0x040C: _PATH,
    0x0412: _ONLINE,
    0x0800: _INSIDE,
    0x0801: _INSIDE,
    0x0C00: _MEDIUM,
    0x0C02: _MEDIUM,
    0x1100: _MEDIUM,
    0x1101: _MEDIUM,
    0x1104: _MEDIUM,
    0x2002: "give this initiator name access to the LUN at the target",
    0x2500: (
        "correct the LUN's number (`iserblk info` without /LUN lists all), or give this initiator"
        " name access at the target"
    ),
    0x2700: _PROTECTED,
    0x2701: _PROTECTED,
    0x2702: _PROTECTED,
    sense_data.SPACE_ALLOCATION_FAILED: _ROOM,
    0x3100: "format the LUN at the target",
    0x3200: _MEDIUM,
    0x3802: _ROOM,
    sense_data.SOFT_THRESHOLD_REACHED: _ROOM,
    0x3A00: f"{_ONLINE}: nothing is behind it",
    0x3E01: _INSIDE,
    0x3E02: _INSIDE,
    0x4400: _INSIDE,
    0x5502: _REGISTRATIONS,
    0x5504: _REGISTRATIONS,
    0x5D00: "replace the disk behind the LUN",
}
_KEYS = {
    sense_data.MEDIUM_ERROR: _MEDIUM,
    sense_data.HARDWARE_ERROR: _INSIDE,
    sense_data.DATA_PROTECT: _PROTECTED,
}


def of_status(status: int) -> str:
    """The remedy for a status that ended a request, as text to append; "" for none."""
    return _appended(_STATUS.get(status, ""))


def of_sense(sense: Sense) -> str:
    """The remedy for sense data that ended a request, as text to append; "" for none."""
    if sense.is_ready_soon:
        return _appended("where that takes longer than io-timeout, raise it")
    return _appended(_SENSE.get(sense.code) or _KEYS.get(sense.key, ""))


def table() -> dict[int, str]:
    """The remedies by additional sense code, ASC << 8 | ASCQ."""
    return dict(_SENSE)


def _appended(remedy: str) -> str:
    return remedy and f"; {remedy}"
