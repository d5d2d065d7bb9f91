"""Command and status numbering, as both ends keep it (RFC 7143 sections 4.2.2.1, 4.2.2.2).

    ExpCmdSN ... CmdSN ... MaxCmdSN
       |           |          the last number that the target takes now
       |           the next number that the initiator gives out
       the first number that the target has not seen

Immediate commands carry CmdSN and use none up. The window is closed when MaxCmdSN = CmdSN - 1.
"""

from __future__ import annotations

from iserblk.errors import LocalProtocolError
from iserblk.iscsi.serial import MASK32, serial_lt, window_size


class CommandWindow:
    """The initiator's view: what it may send, and what it has been told."""

    __slots__ = ("cmd_sn", "exp_cmd_sn", "exp_stat_sn", "max_cmd_sn")

    def __init__(self, cmd_sn: int, exp_stat_sn: int = 0) -> None:
        """``cmd_sn``: the number of the first command. Closed until the first ``update``."""
        self.cmd_sn = cmd_sn & MASK32
        self.exp_cmd_sn = self.cmd_sn
        self.max_cmd_sn = (cmd_sn - 1) & MASK32
        self.exp_stat_sn = exp_stat_sn

    def open_slots(self) -> int:
        """Commands that may be sent now; 0 when closed."""
        return max(0, window_size(self.cmd_sn, self.max_cmd_sn))

    def take(self) -> int:
        """The CmdSN of one non-immediate command. Raises LocalProtocolError when closed."""
        if not self.open_slots():
            raise LocalProtocolError("the command window is closed")
        cmd_sn = self.cmd_sn
        self.cmd_sn = (cmd_sn + 1) & MASK32
        return cmd_sn

    def update(self, exp_cmd_sn: int, max_cmd_sn: int) -> None:
        """Numbers of a PDU from the target. They only ever move forward; a MaxCmdSN below
        ExpCmdSN - 1 makes both void."""
        if serial_lt(max_cmd_sn, (exp_cmd_sn - 1) & MASK32):
            return
        if serial_lt(self.max_cmd_sn, max_cmd_sn):
            self.max_cmd_sn = max_cmd_sn
        if serial_lt(self.exp_cmd_sn, exp_cmd_sn):
            self.exp_cmd_sn = exp_cmd_sn

    def status(self, stat_sn: int) -> None:
        """A PDU that carries a StatSN of its own came: it is acknowledged from now on."""
        self.exp_stat_sn = (stat_sn + 1) & MASK32


class TargetWindow:
    """The target's view: which command comes next, how many may be outstanding."""

    __slots__ = ("exp_cmd_sn", "max_cmd_sn", "stat_sn")

    def __init__(self, cmd_sn: int, queue_depth: int, stat_sn: int = 0) -> None:
        """``cmd_sn``: of the leading Login Request. ``queue_depth``: commands taken at once."""
        self.exp_cmd_sn = cmd_sn
        self.max_cmd_sn = (cmd_sn + queue_depth - 1) & MASK32
        self.stat_sn = stat_sn

    def accept(self, cmd_sn: int) -> bool:
        """A non-immediate command came. False: a duplicate, or outside of the window, to be
        ignored. On one connection commands come in order, so only the expected one is good."""
        if cmd_sn != self.exp_cmd_sn or serial_lt(self.max_cmd_sn, cmd_sn):
            return False
        self.exp_cmd_sn = (cmd_sn + 1) & MASK32
        return True

    def release(self) -> None:
        """A command has ended: there is room for one more."""
        self.max_cmd_sn = (self.max_cmd_sn + 1) & MASK32

    def next_stat_sn(self) -> int:
        """The StatSN of a response that is about to be sent."""
        stat_sn = self.stat_sn
        self.stat_sn = (stat_sn + 1) & MASK32
        return stat_sn
