"""iSCSI PDUs out of the captured streams (captured from Linux siw/LIO, 2026-11)."""

from __future__ import annotations

from iserblk.datamover.iser import BHS_LENGTH, CONTROL, HEADER_LENGTH
from iserblk.iscsi import bhs
from iserblk.rcap.iwarp import ddp
from tests.rcap import streams

LIO_LOGIN = "lo64k_crc/02_login"
LIO_DISCOVERY = "discovery_crc/02_login"
KERNEL_LOGIN = "kernel_initiator_v2/conn1_02_login"


def headers(name: str) -> list[bytes]:
    """The BHSs in one direction of a phase, also of Sends whose other segments follow."""
    return [message[:BHS_LENGTH] for message in _messages(name)]


def pdus(name: str) -> list[tuple[bytes, bytes]]:
    """(BHS, data segment) of the PDUs in one direction of a phase, all of one segment."""
    return [
        (message[:BHS_LENGTH], bytes(bhs.data_segment_untrusted(memoryview(message))))
        for message in _messages(name)
    ]


def _messages(name: str) -> list[bytes]:
    found = []
    for frame in streams.frames(name):
        header = frame.header
        if (
            isinstance(header, ddp.UntaggedHeader)
            and header.qn == ddp.QN_SEND
            and header.mo == 0
            and frame.payload[0] & 0xF0 == CONTROL
        ):
            found.append(frame.payload[HEADER_LENGTH:])
    return found


def names() -> list[str]:
    """Streams that carry FPDUs, all of them good."""
    return [
        name
        for name in streams.names()
        if not streams.is_mpa(name) and "mpa_reject" not in name and name != streams.BAD_CRC
    ]
