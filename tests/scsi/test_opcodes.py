"""Commands by their names."""

from __future__ import annotations

import pytest

from iserblk.scsi import opcodes


@pytest.mark.parametrize(
    ("cdb", "name"),
    [
        ("28", "READ(10)"),
        ("88", "READ(16)"),
        ("42", "UNMAP"),
        ("93", "WRITE SAME(16)"),
        ("9e 10", "READ CAPACITY(16)"),
        ("9e 12", "GET LBA STATUS"),
        ("9e f2", "GET LBA STATUS"),  # the service action has five bits
        ("a3 0a", "REPORT TARGET PORT GROUPS"),
        ("5f 05", "PERSISTENT RESERVE OUT, PREEMPT AND ABORT"),
        ("9e 1f", "command 0x9e/0x1f"),
        ("ff", "command 0xff"),
        ("", "an empty CDB"),
    ],
)
def test_name(cdb: str, name: str) -> None:
    """SPC-4 annex of operation codes."""
    assert opcodes.name(bytes.fromhex(cdb)) == name


def test_every_cdb_has_a_name_on_one_line() -> None:
    for opcode in range(256):
        for action in (0, 0x1F):
            assert opcodes.name(bytes((opcode, action))).isprintable()
