"""A write with unsolicited data over iSER, field by field from the text of the specifications.

WRITE (10) of 40 blocks of 512 bytes, at LBA 0 of LUN 1, as the second command after login (CmdSN 2,
ExpStatSN 100, ITT 0x1000). ImmediateData=Yes, InitialR2T=No, FirstBurstLength=65536,
TargetRecvDataSegmentLength=8192: so 8192 bytes are immediate data, and 8192 and 4096 bytes follow
in Data-Outs. Each field is hexadecimal; behind it the section that gives its value.
"""

from __future__ import annotations

from typing import NamedTuple

SEGMENT = 8192  # TargetRecvDataSegmentLength
LENGTH = 20480  # Expected Data Transfer Length
DATA = bytes((7 * j + (j >> 8)) & 255 for j in range(LENGTH))

_ISER_HEADER = (
    ("1", "opcode: control-type PDU; RFC 7145 9.2"),
    ("0", "WSV and RSV 0: all data is unsolicited, so no STag is advertised; 9.2, 7.3.1"),
    ("000000", "reserved; 9.2"),
    ("00000000", "Write STag: 0, as WSV is 0; 9.2"),
    ("0000000000000000", "Write Base Offset: 0, as WSV is 0; 9.2"),
    ("00000000", "Read STag: 0, as RSV is 0; 9.2"),
    ("0000000000000000", "Read Base Offset: 0, as RSV is 0; 9.2"),
)

_ISER_HEADER_5046 = (
    ("1", "opcode: control-type PDU; RFC 5046 9.2"),
    ("0", "WSV and RSV 0: no STag is advertised; 9.2, 7.3.1"),
    ("000000", "reserved; 9.2"),
    ("00000000", "Write STag: 0, as WSV is 0; 9.2"),
    ("00000000", "Read STag: 0, as RSV is 0; 9.2"),
)

_COMMAND = (
    ("01", "I 0, opcode: SCSI Command; RFC 7143 11.3, 11.2.1.2"),
    ("21", "F 0: unsolicited Data-Outs follow; R 0, W 1, ATTR 1 (simple); 11.3.1"),
    ("0000", "reserved; 11.3"),
    ("00", "TotalAHSLength; 11.2.1.5"),
    ("002000", "DataSegmentLength: a whole TargetRecvDataSegmentLength; RFC 7145 7.3.1"),
    ("0001000000000000", "LUN 1; RFC 7143 11.2.1.7, SAM peripheral addressing"),
    ("00001000", "Initiator Task Tag; 11.2.1.8"),
    ("00005000", "Expected Data Transfer Length; 11.3.4"),
    ("00000002", "CmdSN; 11.3.2"),
    ("00000064", "ExpStatSN; 11.3.3"),
    ("2a00 00000000 00 0028 00 000000000000", "CDB: WRITE (10), 40 blocks at 0; 11.3.5"),
)

_FIRST = (
    ("05", "opcode: SCSI Data-Out; RFC 7143 11.7"),
    ("00", "F 0: not the last PDU of unsolicited data; 11.7.1"),
    ("0000", "reserved; 11.7"),
    ("00", "TotalAHSLength; 11.2.1.5"),
    ("002000", "DataSegmentLength: exactly TargetRecvDataSegmentLength; RFC 7145 7.3.4"),
    ("0000000000000000", "LUN: reserved, as no Target Transfer Tag is provided; 11.7.4"),
    ("00001000", "Initiator Task Tag: of the command; 11.7"),
    ("ffffffff", "Target Transfer Tag: not supplied; 11.7.4"),
    ("00000000", "reserved; 11.7"),
    ("00000064", "ExpStatSN; 11.7"),
    ("00000000", "reserved; 11.7"),
    ("00000000", "DataSN: 0 for the first Data-Out of the command; 11.7.5"),
    ("00002000", "Buffer Offset: behind the immediate data; 11.7.6"),
    ("00000000", "reserved; 11.7"),
)

_LAST = (
    ("05", "opcode: SCSI Data-Out; RFC 7143 11.7"),
    ("80", "F 1: the last PDU of unsolicited data; 11.7.1"),
    ("0000", "reserved; 11.7"),
    ("00", "TotalAHSLength; 11.2.1.5"),
    ("001000", "DataSegmentLength: what is left; RFC 7145 7.3.4"),
    ("0000000000000000", "LUN: reserved, as no Target Transfer Tag is provided; 11.7.4"),
    ("00001000", "Initiator Task Tag: of the command; 11.7"),
    ("ffffffff", "Target Transfer Tag: not supplied; 11.7.4"),
    ("00000000", "reserved; 11.7"),
    ("00000064", "ExpStatSN; 11.7"),
    ("00000000", "reserved; 11.7"),
    ("00000001", "DataSN; 11.7.5"),
    ("00004000", "Buffer Offset; 11.7.6"),
    ("00000000", "reserved; 11.7"),
)


class Vector(NamedTuple):
    """One Send. ``head``: the iSER header and the BHS; ``data``: what follows them. ``solicited``:
    it is a Send with Solicited Event, where the RCaP has that (RFC 7145 7.3.1, 7.3.4)."""

    head: bytes
    data: bytes
    solicited: bool


def _bytes(fields: tuple[tuple[str, str], ...]) -> bytes:
    return bytes.fromhex("".join(value for value, _ in fields))


def _write(header: tuple[tuple[str, str], ...]) -> tuple[Vector, Vector, Vector]:
    return (
        Vector(_bytes(header + _COMMAND), DATA[:8192], True),
        Vector(_bytes(header + _FIRST), DATA[8192:16384], False),
        Vector(_bytes(header + _LAST), DATA[16384:], True),
    )


WRITE = _write(_ISER_HEADER)
WRITE_5046 = _write(_ISER_HEADER_5046)  # behind the 12-byte header
