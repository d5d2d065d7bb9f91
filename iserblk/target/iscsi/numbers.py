"""Sequence numbers of a session and of its connections at the target (RFC 7143 section 4.2.2)."""

from __future__ import annotations

from typing import Final

from iserblk.iscsi import bhs
from iserblk.iscsi.serial import serial_lt

_MASK: Final = 0xFFFFFFFF


class CommandWindow:
    """ExpCmdSN and MaxCmdSN of a session.

    The window is as wide as the queue is deep: it moves on by one with each command that ends. A
    session with several connections gets its commands in any order, and one with
    ErrorRecoveryLevel 1 or 2 may lose some: a command that is early waits for those before it.
    ``waiting``: how much waits, in the session. ``first_cmd_sn``: the first of the session.
    """

    __slots__ = ("_early", "_given_up", "exp_cmd_sn", "first_cmd_sn", "max_cmd_sn", "waiting")

    def __init__(self) -> None:
        self._early: set[int] = set()  # CmdSNs that have come, and wait
        self.waiting = 0
        self._given_up: set[int] = set()  # CmdSNs that never came, and count as received
        self.first_cmd_sn = 0
        self.exp_cmd_sn = 0
        self.max_cmd_sn = 0

    @property
    def received(self) -> int:
        """How many PDUs have come that use up a CmdSN; of each 2^32 the rest."""
        return (self.exp_cmd_sn - self.first_cmd_sn) & _MASK

    def is_next(self, first: int, cmd_sn: int) -> bool:
        """Whether ``accept`` would accept this PDU; nothing changes. For PDUs that may be rejected:
        a rejected PDU does not count as received, and its number comes again (7.3)."""
        return bool(first & bhs.IMMEDIATE) or (
            cmd_sn == self.exp_cmd_sn and not serial_lt(self.max_cmd_sn, cmd_sn)
        )

    def accept(self, first: int, cmd_sn: int) -> bool:
        """Count the PDU whose byte 0 is ``first``; False: it is a duplicate, or outside of the
        window, and to be ignored (4.2.2.1), unless ``may_wait``."""
        if first & bhs.IMMEDIATE:
            return True
        if cmd_sn != self.exp_cmd_sn or serial_lt(self.max_cmd_sn, cmd_sn):
            return False
        self.exp_cmd_sn = (cmd_sn + 1) & _MASK
        if self._given_up:
            self._skip()
        return True

    def may_wait(self, cmd_sn: int) -> bool:
        """Whether a PDU that ``accept`` did not take is to wait for those before it."""
        return (
            serial_lt(self.exp_cmd_sn, cmd_sn)
            and not serial_lt(self.max_cmd_sn, cmd_sn)
            and cmd_sn not in self._early
            and cmd_sn not in self._given_up
        )

    def note(self, cmd_sn: int) -> None:
        """The PDU with this number waits."""
        self._early.add(cmd_sn)
        self.waiting += 1

    def forget(self, cmd_sn: int) -> None:
        """The PDU with this number waits no more: ``accept`` is to take it, or another one."""
        self._early.remove(cmd_sn)
        self.waiting -= 1

    def skip(self, cmd_sn: int) -> None:
        """Count a command as received, though it will never be accepted."""
        self._given_up.add(cmd_sn)
        self._skip()

    def give_up(self, ref_cmd_sn: int, cmd_sn: int) -> bool:
        """Handle an ABORT TASK (with ``cmd_sn``) of an unknown command, ``ref_cmd_sn``. True: the
        command never came, and now counts as received; otherwise the target would accept no
        command after it (11.6.1 b)."""
        if (
            serial_lt(ref_cmd_sn, self.exp_cmd_sn)
            or serial_lt(self.max_cmd_sn, ref_cmd_sn)
            or not serial_lt(ref_cmd_sn, cmd_sn)
            or ref_cmd_sn in self._early
        ):
            return False
        self.skip(ref_cmd_sn)
        return True

    def _skip(self) -> None:
        while self.exp_cmd_sn in self._given_up:
            self._given_up.remove(self.exp_cmd_sn)
            self.exp_cmd_sn = (self.exp_cmd_sn + 1) & _MASK
            self.max_cmd_sn = (self.max_cmd_sn + 1) & _MASK

    def ended(self, immediate: int) -> None:
        """Open the window by one: a PDU that ``accept`` took has ended. A PDU with the I bit
        (``immediate``) does not move the window."""
        if not immediate:
            self.max_cmd_sn = (self.max_cmd_sn + 1) & _MASK


class Numbers:
    """The sequence numbers of a connection: its StatSN, and those of its session (``window``).
    Implements SessionNumbers."""

    __slots__ = ("stat_sn", "window")

    def __init__(self, window: CommandWindow) -> None:
        self.window = window
        self.stat_sn = 0

    @property
    def exp_cmd_sn(self) -> int:
        return self.window.exp_cmd_sn

    @property
    def max_cmd_sn(self) -> int:
        return self.window.max_cmd_sn

    def take_stat_sn(self) -> int:
        stat_sn = self.stat_sn
        self.stat_sn = (stat_sn + 1) & _MASK
        return stat_sn
