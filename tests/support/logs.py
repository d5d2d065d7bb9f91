"""What tests may log as warnings, for ``pytest.mark.logs``: patterns that are searched for."""

from __future__ import annotations

RECONNECTED = r"connection lost: |connected again after |: not connected|cannot re(connect|instate)"
ONE_OF_SEVERAL = (
    r": connection \d+ (lost|logged out): |recovered from the loss of connection "
    r"|: one connection less: |: \d+ connections so far: "
    r"|the target takes \d+ connections of a session|the target agrees to error recovery level "
)
ANOTHER_PORTAL = (
    r" is used, not |going over to |another portal is tried| is used: cannot connect to "
)
DEADLINES = (
    r"exceeded its deadline; sending ABORT TASK|no answer to ABORT TASK; LOGICAL UNIT RESET"
    r"|no answer to (LOGICAL UNIT RESET|NOP-Out); disconnecting|task management: "
    r"|is unanswered for \d+ s; sending ABORT TASK|: the target answers again, after "
    r"|: command 0x[0-9a-f]+ (is given up|did not end within)"
    r"|takes no (PDU that could abort a command|NOP-Out); disconnecting"
)
GIVEN_UP = r": the end was asked for \d+ s ago, and the target is away: it is not waited for "
LOST_POWER = (
    r"the target (was reset|may have|did not end a (flush|write with FUA) well) .*;"
    r" what was not flushed is "
)
LOST_WRITES = r"; the next flush fails$"
RESERVATION = (
    r"the reservation may be lost|our reservation; it is taken again"
    r"|the reservation was another's already|no PREEMPT AND ABORT"
)
FILE_ERRORS = r"^WARNING [A-Z ]+(\(\d+\))?: \[Errno "  # of the target's files
CARRIED_OUT = r"was carried out, and the LUN says: "
ASYNC_MESSAGE = r": asynchronous message: "
REJECTED = r": target rejected a PDU: "
FALLBACK = r": Traditional iSCSI is used: fallback=iscsi"
LEFT_OUT = r" is left out: "
SHRUNK = r": the LUN has SHRUNK "
IGNORED = r": command with CmdSN \d+ ignored"
DEVICE = r"RDMA device |memory windows are not used: |connection (refused|not established): "
# What a LUN refuses in use.
REFUSED = (
    r": the LUN (refuses |says that |does not know )"
    r"|GET LBA STATUS described .* all of the LUN counts as data"
)
