"""Flow control of unexpected control-type PDUs (RFC 7145 sections 6.7, 8.1).

A PDU that neither the command window nor an earlier PDU announces needs a receive of its own at the
peer. MaxOutstandingUnexpectedPDUs says how many of them the peer has. Each sender counts its own
from when they leave until they are retired. Traditional iSCSI has no such limit.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from iserblk.iscsi import bhs
from iserblk.iscsi.serial import serial_lt

# What announces a control-type PDU of an initiator (8.1.1).
REGULATED: Final = "regulated"  # the command window
EXPECTED: Final = "expected"  # the command that it belongs to, or the ping that it answers
UNEXPECTED: Final = "unexpected"  # nothing

NO_LIMIT: Final = 0  # of MaxOutstandingUnexpectedPDUs
# Of a target, and counted: that an initiator declares a larger number costs the target no memory.
MOST_TOLD: Final = 64


def category(opcode: int, ttt: int) -> str:
    """The category of a PDU from an initiator. ``opcode``: byte 0, with its I bit. ``ttt``: the
    Target Transfer Tag of a NOP-Out."""
    operation = opcode & bhs.OPCODE_MASK
    if operation == bhs.DATA_OUT or (operation == bhs.NOP_OUT and ttt != bhs.NO_TAG):
        return EXPECTED
    return UNEXPECTED if opcode & bhs.IMMEDIATE else REGULATED


class FromInitiator:
    """The unexpected PDUs of an initiator that are outstanding at its target. ``limit``: what the
    target declared. ``cmd_sns``: of those outstanding, oldest first.

    A PDU with CmdSN x is retired when a PDU without the I bit has left behind it, with CmdSN y, and
    the target has answered with an ExpCmdSN of y + 1 or more (8.1.1.3). x is the number of the next
    PDU without the I bit, so y is x, and an ExpCmdSN behind x retires it.
    """

    __slots__ = ("cmd_sns", "limit")

    def __init__(self, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self.cmd_sns: deque[int] = deque()

    @property
    def outstanding(self) -> int:
        return len(self.cmd_sns)

    @property
    def full(self) -> bool:
        """No unexpected PDU may be sent."""
        return self.limit != NO_LIMIT and len(self.cmd_sns) >= self.limit

    def sent(self, cmd_sn: int) -> None:
        if self.limit != NO_LIMIT:
            self.cmd_sns.append(cmd_sn)

    def clear(self) -> None:
        """All connections that carried any are over, and with them what the target had for these
        PDUs."""
        self.cmd_sns.clear()

    def answered(self, exp_cmd_sn: int) -> None:
        """A PDU of the target has come, with this ExpCmdSN."""
        cmd_sns = self.cmd_sns
        while cmd_sns and serial_lt(cmd_sns[0], exp_cmd_sn):
            cmd_sns.popleft()


class FromTarget:
    """The unexpected PDUs of a target that are outstanding at its initiator: Asynchronous Messages,
    Rejects that stand for no response, and one NOP-In that asks for an answer. ``limit``: what the
    initiator declared. ``outstanding``: how many there are that count; without a limit only a
    NOP-In does.

    A PDU with StatSN x is retired when the initiator has sent an ExpStatSN of x + 1 or more; a ping
    also by its answer (8.1.2). The last place is for a ping, whose answer retires the others.
    """

    __slots__ = ("_ping", "_ping_sn", "_stat_sns", "limit", "outstanding")

    def __init__(self, limit: int = NO_LIMIT) -> None:
        self.limit = limit
        self.outstanding = 0
        self._stat_sns: deque[int] = deque()  # of those outstanding that are no ping, oldest first
        self._ping = bhs.NO_TAG  # Target Transfer Tag of the one outstanding; NO_TAG: there is none
        self._ping_sn = 0  # its StatSN

    @property
    def full(self) -> bool:
        """No unexpected PDU but a ping may be sent."""
        if self.limit == NO_LIMIT:
            return False
        return self.outstanding >= self.limit - 1 or self.outstanding >= MOST_TOLD

    @property
    def ping_allowed(self) -> bool:
        return self.limit == NO_LIMIT or self.outstanding < self.limit

    @property
    def asked(self) -> bool:
        """A ping is outstanding. No other one may be sent."""
        return self._ping != bhs.NO_TAG

    def sent(self, stat_sn: int, ttt: int = bhs.NO_TAG) -> None:
        """A PDU was queued. ``stat_sn``: its StatSN field. ``ttt``: of a ping."""
        if ttt != bhs.NO_TAG:
            self._ping = ttt
            self._ping_sn = stat_sn
            self.outstanding += 1
        elif self.limit != NO_LIMIT:
            self._stat_sns.append(stat_sn)
            self.outstanding += 1

    def heard(self, exp_stat_sn: int, ttt: int = bhs.NO_TAG) -> None:
        """A PDU of the initiator has come. ``ttt``: of a NOP-Out that answers a ping."""
        stat_sns = self._stat_sns
        while stat_sns and serial_lt(stat_sns[0], exp_stat_sn):
            stat_sns.popleft()
        ping = self._ping
        if ping != bhs.NO_TAG and (ping == ttt or serial_lt(self._ping_sn, exp_stat_sn)):
            self._ping = bhs.NO_TAG
        self.outstanding = len(stat_sns) + (self._ping != bhs.NO_TAG)
