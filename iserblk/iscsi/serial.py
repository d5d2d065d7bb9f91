"""Serial number arithmetic on 32 bits (RFC 1982, SERIAL_BITS = 32), for CmdSN, StatSN and others.

Sequence numbers are compared here alone.
"""

from __future__ import annotations

from typing import Final

MASK32: Final = 0xFFFFFFFF
_HALF: Final = 0x80000000


def serial_lt(a: int, b: int) -> bool:
    """Whether ``a`` comes before ``b``. Both are 0..2**32-1.

    Numbers exactly half the space apart have no order (RFC 1982 section 3.2): False both ways.
    """
    return 0 < ((b - a) & MASK32) < _HALF


def window_size(cmd_sn: int, max_cmd_sn: int) -> int:
    """How many commands from ``cmd_sn`` on the target takes; 0 or less: the window is closed. Less
    than 0: MaxCmdSN comes before ``cmd_sn`` - 1."""
    size = (max_cmd_sn - cmd_sn + 1) & MASK32
    return size if size < _HALF else size - (1 << 32)
