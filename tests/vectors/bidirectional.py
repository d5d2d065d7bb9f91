"""Golden bytes of a bidirectional command, derived by hand from the specifications' text.

XDWRITEREAD(10) of 2 blocks of 512 bytes at LBA 5 (SBC-3), as the first command behind one that had
CmdSN 1. What an implementation may choose freely is a keyword: tags, STags, offsets.
"""

from __future__ import annotations


def _bytes(text: str) -> bytes:
    """The hexadecimal digits of each line, up to its comment."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


def command(
    itt: int = 10,
    read_length: int = 1024,
    edtl: int = 1024,
    exp_stat_sn: int = 1,
    flags: int = 0xE1,
) -> bytes:
    return _bytes(
        f"""
        01                    # 0     opcode: SCSI Command, no I bit        7143 11.3
        {flags:02x}                    # 1     F, R, W; ATTR 1: Simple               7143 11.3.1
        0000                  # 2-3   reserved
        02                    # 4     TotalAHSLength: two words             7143 11.2.1.5
        000000                # 5-7   DataSegmentLength                     7143 11.2.1.6
        0000000000000000      # 8-15  LUN 0
        {itt:08x}              # 16-19 Initiator Task Tag
        {edtl:08x}              # 20-23 EDTL: of the write transfer           7143 11.3.4
        00000002              # 24-27 CmdSN                                 7143 11.3.2
        {exp_stat_sn:08x}              # 28-31 ExpStatSN                             7143 11.3.3
        53 00 00000005 00 0002 00 000000000000  # 32-47 CDB, with padding  SBC-3
        0005                  # 48-49 AHSLength: 5                          7143 11.2.2.4
        02                    # 50    AHSType: bidirectional read length    7143 11.2.2.1
        00                    # 51    reserved
        {read_length:08x}              # 52-55 Bidirectional Read Expected Data Transfer Length
        """
    )


def iser_header(write_stag: int, write_base: int, read_stag: int, read_base: int) -> bytes:
    """The iSER header in front of the command (7145 9.2, with the Base Offsets)."""
    return _bytes(
        f"""
        1c                    # 0     0001b: control-type PDU; WSV, RSV     7145 9.2, 9.5.3
        000000                # 1-3   reserved
        {write_stag:08x}              # 4-7   Write STag                            7145 7.3.1
        {write_base:016x}      # 8-15  Write Base Offset
        {read_stag:08x}              # 16-19 Read STag
        {read_base:016x}      # 20-27 Read Base Offset
        """
    )


# The header in front of a response: no STag (7145 9.2). The STag that the response invalidates
# travels in the Send with Invalidate.
ISER_HEADER_OF_RESPONSE = _bytes("10000000" + 24 * "00")


def r2t(ttt: int, stat_sn: int, itt: int = 10) -> bytes:
    """The only R2T: all of the write transfer. R2Ts and Data-Ins are numbered together (7143
    4.2.2.4, 11.7.5, 11.8.2), and this is the first of them. The example in 7143 A.3.3 numbers them
    apart, against all three; it counts as an error there. Linux's initiator, too, expects the
    numbers of the text."""
    return _bytes(
        f"""
        31 80 0000 00 000000  # 0-7   opcode: R2T; F                        7143 11.8
        0000000000000000      # 8-15  LUN
        {itt:08x}              # 16-19 Initiator Task Tag
        {ttt:08x}              # 20-23 Target Transfer Tag
        {stat_sn:08x}              # 24-27 StatSN: the next one                  7143 11.8.3
        00000003              # 28-31 ExpCmdSN
        00000081              # 32-35 MaxCmdSN: 128 commands from CmdSN 2 on
        00000000              # 36-39 R2TSN                                 7143 11.8.2
        00000000              # 40-43 Buffer Offset
        00000400              # 44-47 Desired Data Transfer Length
        """
    )


def data_in(length: int = 1024, itt: int = 10) -> bytes:
    """The header of the only Data-In. It carries no status, as that of a bidirectional command must
    come in a SCSI Response (7143 11.7.3)."""
    return _bytes(
        f"""
        25                    # 0     opcode: SCSI Data-In                  7143 11.7
        80                    # 1     F: the last of its sequence; no S     7143 11.7.3
        00 00                 # 2-3   reserved; status: reserved without S
        00 {length:06x}             # 4-7   DataSegmentLength
        0000000000000000      # 8-15  LUN: reserved without A               7143 11.7.4
        {itt:08x}              # 16-19 Initiator Task Tag
        ffffffff              # 20-23 Target Transfer Tag: none             7143 11.7.4
        00000000              # 24-27 StatSN: reserved without S            7143 11.7
        00000003              # 28-31 ExpCmdSN
        00000082              # 32-35 MaxCmdSN: the command has ended
        00000001              # 36-39 DataSN: behind the R2T                7143 11.7.5
        00000000              # 40-43 Buffer Offset
        00000000              # 44-47 Residual Count: reserved without S
        """
    )


def response(
    stat_sn: int,
    exp_data_sn: int = 2,
    flags: int = 0x80,
    bidi_residual: int = 0,
    residual: int = 0,
    itt: int = 10,
) -> bytes:
    """GOOD. ``flags``: o 0x10, u 0x08, O 0x04, U 0x02 beside bit 0 (7143 11.4.1)."""
    return _bytes(
        f"""
        21                    # 0     opcode: SCSI Response                 7143 11.4
        {flags:02x}                    # 1     o, u: of the read; O, U: of the write 7143 11.4.1
        00 00                 # 2-3   Command Completed at Target; GOOD     7143 11.4.2, 11.4.3
        00 000000             # 4-7   no AHS, no data segment
        0000000000000000      # 8-15  reserved
        {itt:08x}              # 16-19 Initiator Task Tag
        00000000              # 20-23 SNACK Tag
        {stat_sn:08x}              # 24-27 StatSN
        00000003              # 28-31 ExpCmdSN
        00000082              # 32-35 MaxCmdSN
        {exp_data_sn:08x}              # 36-39 ExpDataSN: R2Ts and Data-Ins together 7143 11.4.8
        {bidi_residual:08x}              # 40-43 Bidirectional Read Residual Count     7143 11.4.6
        {residual:08x}              # 44-47 Residual Count: of the write          7143 11.4.5
        """
    )
