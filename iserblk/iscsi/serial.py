"""Serial number arithmetic on 32 bits (RFC 1982, SERIAL_BITS = 32), for CmdSN, StatSN and others.

``serial_lt`` is the only place where sequence numbers are compared.
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
