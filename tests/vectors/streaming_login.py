"""A connection that begins as a byte stream, and becomes iSER: every byte of it, both ways.

Written by hand from the standards, field by field: RFC 7143 sections 11.12, 11.13, 11.18, 11.19
(PDUs) and 6.2 (text), RFC 7145 sections 5.1, 6 (keys) and 9.2 (the header), RFC 5044 section 7.1.1
and RFC 6581 section 9 (MPA start-up), RFC 5044 section 4.3 (FPDU), RFC 5041 section 4.3 and RFC
5040 section 4.2 (DDP and RDMAP). The MPA CRC is off, so the CRC fields may have any value (RFC
5044 section 4.1): they are the last four bytes of an FPDU, and zero here. MPA start-up is that of
RFC 5044, or the enhanced one of RFC 6581.

Login has no digests.
"""

from __future__ import annotations

_ISID = "80 61 62 63 64 65"


def _hex(*fields: str) -> bytes:
    return bytes.fromhex(" ".join(fields))


# -- login: TCP streaming mode -------------------------------------------------------------------

REQUEST_TEXT = (
    b"InitiatorName=iqn.2026-11.example:host\0"  # 39 bytes
    b"TargetName=iqn.2026-11.example:disk\0"  # 36
    b"SessionType=Normal\0"  # 19
    b"RDMAExtensions=Yes\0"  # 19; RFC 7145 section 6.3
    b"TargetRecvDataSegmentLength=8192\0"  # 33; section 6.4
    b"InitiatorRecvDataSegmentLength=8192\0"  # 36; section 6.5
    b"\0\0"  # padding: 182 bytes before it
)

LOGIN_REQUEST = (
    _hex(
        "43",  # I bit, opcode 0x03
        "87",  # T 1, C 0, CSG 01 (LoginOperationalNegotiation), NSG 11 (FullFeaturePhase)
        "00 00",  # Version-max, Version-min
        "00",  # TotalAHSLength
        "00 00 b6",  # DataSegmentLength: 182
        _ISID,  # ISID, T 10 (random)
        "00 00",  # TSIH: a new session
        "00 00 00 05",  # Initiator Task Tag
        "00 00",  # CID
        "00 00",  # reserved
        "00 00 00 64",  # CmdSN: 100
        "00 00 00 09",  # ExpStatSN: 9
        "00" * 16,  # reserved
    )
    + REQUEST_TEXT
)

RESPONSE_TEXT = (
    b"TargetPortalGroupTag=1\0"  # 23 bytes
    b"RDMAExtensions=Yes\0"  # 19
    b"TargetRecvDataSegmentLength=8192\0"  # 33
    b"InitiatorRecvDataSegmentLength=8192\0"  # 36
    b"\0"  # padding: 111 bytes
)

LOGIN_RESPONSE = (
    _hex(
        "23",  # opcode 0x23
        "87",  # T 1, C 0, CSG 01, NSG 11
        "00 00",  # Version-max, Version-active
        "00",  # TotalAHSLength
        "00 00 6f",  # DataSegmentLength: 111
        _ISID,
        "00 07",  # TSIH: 7, chosen by the target
        "00 00 00 05",  # Initiator Task Tag
        "00 00 00 00",  # reserved
        "00 00 00 09",  # StatSN: the initiator's ExpStatSN
        "00 00 00 64",  # ExpCmdSN: 100
        "00 00 00 e3",  # MaxCmdSN: 100 + 128 - 1
        "00 00",  # Status-Class, Status-Detail: success
        "00" * 10,  # reserved
    )
    + RESPONSE_TEXT
)

# A refusal for lack of resources (RFC 7145 section 10.1.3.1): Status-Class 3, Status-Detail 2.
OUT_OF_RESOURCES = _hex(
    "23",
    "00",  # T 0: no transition; the other bits are reserved where the status is not success
    "00 00",
    "00",
    "00 00 00",  # no text
    _ISID,
    "00 00",  # TSIH: no session
    "00 00 00 05",
    "00 00 00 00",
    "00 00 00 09",
    "00 00 00 64",  # ExpCmdSN
    "00 00 00 64",  # MaxCmdSN: the window during login
    "03 02",  # Target Error: Out of resources
    "00" * 10,
)

# -- MPA start-up: the initiator sends the Request -----------------------------------------------

MPA_REQUEST = b"MPA ID Req Frame" + _hex(
    "00",  # M 0 (no markers), C 0 (no CRC), R 0
    "01",  # Rev
    "00 00",  # PD_Length: no private data
)
MPA_REPLY = b"MPA ID Rep Frame" + _hex("00", "01", "00 00")

# RFC 6581: S 1 announces the IRD and ORD in front of the private data.
ENHANCED_REQUEST = b"MPA ID Req Frame" + _hex(
    "10",  # S 1
    "02",
    "00 04",  # PD_Length
    "80 40",  # A 1 (peer-to-peer), B 0 (no RTR by Send), IRD 64
    "c0 40",  # C 1, D 1 (RTR by RDMA Write or RDMA Read), ORD 64
)
ENHANCED_REPLY = b"MPA ID Rep Frame" + _hex("10", "02", "00 04", "80 40", "80 40")
# The RTR that both agree on: an RDMA Write of no bytes (RFC 6581 section 9.2).
RTR = _hex(
    "00 0e",  # ULPDU_Length: 14
    "c1",  # tagged, L 1, DV 1
    "40",  # RV 1, RDMA Write
    "00 00 00 01",  # STag: not checked, as there is no data
    "00 00 00 00 00 00 00 00",  # TO
    "00 00 00 00",  # CRC
)

# -- full feature phase: FPDUs -------------------------------------------------------------------


def _send(pdu: bytes) -> bytes:
    """An FPDU with a Send with Solicited Event of MSN 1: a control-type PDU without STags."""
    message = _hex("10", "00 00 00", "00 00 00 00", "00" * 8, "00 00 00 00", "00" * 8) + pdu
    return (
        _hex(
            "00 5e",  # ULPDU_Length: 18 + 28 + 48
            "41",  # untagged, L 1, DV 1
            "45",  # RV 1, Send with SE
            "00 00 00 00",  # Invalidate STag: none
            "00 00 00 00",  # QN 0
            "00 00 00 01",  # MSN
            "00 00 00 00",  # MO
        )
        + message
        + _hex("00 00 00 00")  # CRC; 96 bytes before it need no padding
    )


PING = _send(
    _hex(
        "40",  # I bit, opcode 0x00: NOP-Out
        "80",
        "00 00",
        "00",
        "00 00 00",
        "00" * 8,  # LUN
        "00 00 00 4d",  # Initiator Task Tag: 77, so an answer is wanted
        "ff ff ff ff",  # Target Transfer Tag
        "00 00 00 64",  # CmdSN: not advanced by an immediate PDU
        "00 00 00 0a",  # ExpStatSN
        "00" * 16,
    )
)
PONG = _send(
    _hex(
        "20",  # NOP-In
        "80",
        "00 00",
        "00",
        "00 00 00",
        "00" * 8,
        "00 00 00 4d",
        "ff ff ff ff",
        "00 00 00 0a",  # StatSN: next after the Login Response
        "00 00 00 64",
        "00 00 00 e3",
        "00" * 12,
    )
)
# The target's own ping, which answers nothing: an unexpected control-type PDU.
UNASKED = _send(
    _hex(
        "20",
        "80",
        "00 00",
        "00",
        "00 00 00",
        "00" * 8,
        "ff ff ff ff",  # Initiator Task Tag: none
        "00 00 00 01",  # Target Transfer Tag
        "00 00 00 0a",
        "00 00 00 64",
        "00 00 00 e3",
        "00" * 12,
    )
)

# What each end sends, in this order; each waits for the other at the commas.
INITIATOR_SENDS = (LOGIN_REQUEST, MPA_REQUEST, PING)
TARGET_SENDS = (LOGIN_RESPONSE, MPA_REPLY, PONG)
