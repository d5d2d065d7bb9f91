"""Changed PDUs and FPDUs of a session: one field is changed, and the CRC is made right again."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.faults.behaviours import Corrupt
from tests.support.faults.framing import Unit

_BHS = 48
_FPDU_HEADS = (2, 20 + 28 + 48)  # bytes behind ULPDU_Length: DDP, iSER header, BHS
_EDGES = (0, 1, 2, 0x7F, 0x80, 0xFF)
# A CRC or a digest would show the change: FPDUs get a new CRC, and PDUs must have no digest.


def lie(transport: str, seed: int, chance: float) -> Corrupt:
    """Each unit is changed in its headers with this ``chance``: lengths, tags, offsets, sequence
    numbers, residuals, opcodes, flags."""
    choices = random.Random(f"lie {seed}")
    low, high = (0, _BHS) if transport == "iscsi" else _FPDU_HEADS

    def change(data: bytearray) -> None:
        for _ in range(choices.randint(1, 2)):
            width = choices.choice((1, 1, 2, 4))
            at = choices.randrange(low, max(low + 1, min(high, len(data) - 4 - width)))
            value = bytes(choices.choice((*_EDGES, choices.randrange(256))) for _ in range(width))
            data[at : at + width] = value[: len(data) - at]

    return Corrupt(
        _after_start(), nth=None, chance=chance, seed=seed, change=change, mend=transport != "iscsi"
    )


def _after_start() -> Callable[[Unit], bool]:
    """Whole frames only, and not the MPA start-up frame, whose end is no CRC."""
    return lambda unit: len(unit.data) >= 24 and not unit.data.startswith(b"MPA ID Re")
