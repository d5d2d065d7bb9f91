"""All rows, by name; and a row with a bug, which is none of them."""

from __future__ import annotations

from tests.fuzz import (
    rows_files,
    rows_iscsi,
    rows_nbd,
    rows_recovery,
    rows_scsi,
    rows_services,
    rows_stack,
)
from tests.fuzz.engine import decoder

ALL = (
    *rows_scsi.ROWS,
    *rows_iscsi.ROWS,
    *rows_stack.ROWS,
    *rows_recovery.ROWS,
    *rows_services.ROWS,
    *rows_nbd.ROWS,
    *rows_files.ROWS,
)
ROWS = {row.name: row for row in ALL}


def planted(data: bytes) -> None:
    """Too many steps for chance, and a few for what is guided by coverage."""
    if len(data) < 9:
        return
    if data[0] != 0xB0:
        return
    if data[1] ^ data[0] != 0x5A:
        return
    if data[2] + data[1] != 0x101:
        return
    if data[3] != 0x77:
        return
    raise IndexError("the planted bug")


PLANTED = decoder("planted bug", planted, b"harmless")
