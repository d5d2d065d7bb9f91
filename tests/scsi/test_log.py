"""LOG SENSE: the pages byte by byte, and the decoder of parameters."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import log


def test_command() -> None:
    """SPC-4, LOG SENSE: PC 01b (cumulative values) and the page code in byte 2, then the subpage,
    the parameter pointer in bytes 5-6, the allocation length in bytes 7-8."""
    assert log.log_sense(0x0C, 0, 2, 64) == bytes.fromhex("4d 00 4c 00 00 0002 0040 00")
    assert log.log_sense(0, 0xFF) == bytes.fromhex("4d 00 40 ff 00 0000 0200 00")


def test_supported_pages() -> None:
    assert log.encode_supported([0x00, 0x0C]) == bytes.fromhex("00 00 0002 00 0c")
    assert log.encode_supported_subpages([(0, 0), (0, 0xFF), (0x0C, 0)]) == bytes.fromhex(
        "40 ff 0006 0000 00ff 0c00"
    )


def test_provisioning() -> None:
    """SBC-3, Logical Block Provisioning log page: each parameter has a code, FORMAT AND LINKING
    11b, eight bytes: RESOURCE COUNT and SCOPE."""
    page = log.encode_provisioning([(1, 0x01020304, 2), (2, 1 << 40, 1)])
    assert page == bytes.fromhex(
        "0c 00 0018  0001 03 08 01020304 02 000000  0002 03 08 ffffffff 01 000000"
    )
    assert list(log.decode_parameters(page)) == [
        (1, bytes.fromhex("0102030402000000")),
        (2, bytes.fromhex("ffffffff01000000")),
    ]
    assert len(list(log.decode_parameters(page[:-1]))) == 1
    assert list(log.decode_parameters(page[:4])) == []


def test_too_short_for_a_header() -> None:
    with pytest.raises(RemoteProtocolError, match="3 bytes"):
        list(log.decode_parameters(b"\x0c\0\0"))
