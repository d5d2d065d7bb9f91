"""Texts for the response, reason and status codes of iSCSI (RFC 7143 section 11)."""

from __future__ import annotations

_SCSI_RESPONSE = {
    0x00: "command completed at the target",
    0x01: "target failure: the command could not be completed",
}
_TASK_MANAGEMENT = {
    0: "function complete",
    1: "task does not exist",
    2: "LUN does not exist",
    3: "task still allegiant",
    4: "task allegiance reassignment not supported",
    5: "function not supported",
    6: "function authorization failed",
    255: "function rejected",
}
_REJECT = {
    0x01: "reserved",
    0x02: "data digest error",
    0x03: "SNACK reject",
    0x04: "protocol error",
    0x05: "command not supported",
    0x06: "immediate command reject: too many immediate commands",
    0x07: "task in progress",
    0x08: "invalid data acknowledgement",
    0x09: "invalid PDU field",
    0x0A: "long operation reject: cannot generate Target Transfer Tag",
    0x0B: "negotiation reset",
    0x0C: "waiting for logout",
}
_ASYNC = {
    0: "SCSI asynchronous event",
    1: "the target asks for a logout",
    2: "the target will drop this connection",
    3: "the target will drop all connections of this session",
    4: "the target asks for negotiation of parameters",
    5: "all active tasks of a LUN are being terminated",
    255: "vendor-specific event",
}
_LOGIN = {
    0x0000: "success",
    0x0101: "the target has moved temporarily",
    0x0102: "the target has moved permanently",
    0x0200: "the target found an error in the login",
    0x0201: "authentication failed",
    0x0202: "not authorized: the target's access rules do not admit this initiator name",
    0x0203: "the target does not have this target name; `iserblk discover HOST` lists its names",
    0x0204: "the target was removed",
    0x0205: "the target supports no common version",
    0x0206: "too many connections",
    0x0207: "the target misses a parameter",
    0x0208: "the target cannot include this connection in the session",
    0x0209: "the target does not support this session type",
    0x020A: "the session does not exist",
    0x020B: "the target refuses a request during login",
    0x0300: "the target has an internal error; look at its log",
    0x0301: "the target's service is unavailable; try again later",
    0x0302: "the target is out of resources; try again later",
}


_LOGOUT_RESPONSES = {
    1: "the target does not know the connection",
    2: "the target does not support connection recovery",
    3: "the target could not clean up",
}


def _words(table: dict[int, str], value: int, kind: str) -> str:
    return table.get(value, f"{kind} {value:#04x}")


def scsi_response(value: int) -> str:
    """The Response field of a SCSI Response (11.4.3)."""
    return _words(_SCSI_RESPONSE, value, "SCSI Response")


def task_management_response(value: int) -> str:
    """The Response field of a Task Management Function Response (11.6.1)."""
    return _words(_TASK_MANAGEMENT, value, "task management response")


def reject_reason(value: int) -> str:
    """The Reason field of a Reject (11.17.1)."""
    return _words(_REJECT, value, "reason")


def logout_response(value: int) -> str:
    """A response other than 0 of a Logout Response."""
    return _words(_LOGOUT_RESPONSES, value, "logout response")


def async_event(value: int) -> str:
    """The AsyncEvent field of an Asynchronous Message (11.9.1)."""
    return _words(_ASYNC, value, "event")


def login_status(status: int) -> str:
    """A login status, Status-Class << 8 | Status-Detail (11.13.5). An unknown detail gives the text
    of its class."""
    known = _LOGIN.get(status)
    if known is not None:
        return known
    kinds = {1: "redirection", 2: "initiator error", 3: "target error"}
    return f"{kinds.get(status >> 8, 'status')} {status >> 8:02x} {status & 0xFF:02x}"
