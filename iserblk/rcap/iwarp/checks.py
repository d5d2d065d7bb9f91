"""The checks of an incoming segment (RFC 5041 section 7.1, RFC 5040 sections 5 and 7).

Each function checks one kind of segment. It returns the ``Fault`` for the first rule that the
segment breaks, or None. A Fault is a text and the (layer, error type, error code) of the Terminate.
"""

from __future__ import annotations

from typing import Final

from iserblk.errors import RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, rdmap
from iserblk.rcap.iwarp.reads import OutstandingRead
from iserblk.rcap.stags import Region

Fault = tuple[str, tuple[int, int, int]]

_LAYERS: Final = ("RDMAP", "DDP", "MPA")

TOO_SHORT: Fault = ("a ULPDU that is shorter than its header", ddp.MPA_LENGTH)
BAD_CRC: Fault = ("the CRC of an FPDU is wrong", ddp.MPA_CRC)


def protocol_error(fault: Fault) -> RemoteProtocolError:
    """The exception for a fault. Its layer is that of the Terminate."""
    text, code = fault
    return RemoteProtocolError(_LAYERS[code[0]], text, code)


def version_fault(control: int) -> Fault | None:
    """Check the DDP version, then the RDMAP version. Reserved bits are ignored."""
    if control & ddp.VERSION_MASK != ddp.VERSION:
        code = ddp.TAGGED_VERSION if control & ddp.TAGGED else ddp.UNTAGGED_VERSION
        return f"DDP version {control >> 8 & 3}, not 1", code
    if control & rdmap.VERSION_MASK != rdmap.VERSION:
        return f"RDMAP version {control >> 6 & 3}, not 1", rdmap.INVALID_VERSION
    return None


def opcode_fault(control: int) -> Fault:
    """The fault of an opcode that is not allowed in a segment of this kind."""
    kind = "tagged" if control & ddp.TAGGED else "untagged"
    opcode = control & rdmap.OPCODE_MASK
    return f"opcode {opcode} in a {kind} segment", rdmap.UNEXPECTED_OPCODE


def write_fault(region: Region | None, stag: int, to: int, size: int) -> Fault | None:
    """Check an RDMA Write segment of ``size`` > 0 bytes. ``region``: the valid region of ``stag``,
    None if there is none."""
    if region is None:
        return f"RDMA Write to STag 0x{stag:08x}, which is not valid", ddp.INVALID_STAG
    if not region.rights & seam.REMOTE_WRITE:
        return f"RDMA Write to STag 0x{stag:08x}, which is read-only", rdmap.ACCESS_RIGHTS
    if to + size - 1 > ddp.MAX_TO:
        return f"RDMA Write of {size} bytes at 0x{to:x}: the TO wraps", ddp.TO_WRAP
    if to + size > region.length:
        return f"RDMA Write up to {to + size} of {region.length} bytes", ddp.BASE_OR_BOUNDS
    return None


def read_request_fault(
    length: int, control: int, qn: int, msn: int, expected_msn: int, mo: int
) -> Fault | None:
    """Check the framing of a Read Request: one segment of 28 bytes on queue 1, in sequence."""
    if qn != ddp.QN_READ_REQUEST:
        return f"a Read Request on queue {qn}", ddp.INVALID_QN
    if msn != expected_msn:
        return f"Read Request with MSN {msn}, expected {expected_msn}", ddp.MSN_RANGE
    if mo or not control & ddp.LAST:
        return "a Read Request in segments", ddp.INVALID_MO
    payload = length + ddp.LENGTH_SIZE - ddp.UNTAGGED_SIZE
    if payload != rdmap.READ_REQUEST_SIZE:
        return f"a Read Request of {payload} bytes", ddp.MESSAGE_TOO_LONG
    return None


def source_fault(region: Region | None, stag: int, to: int, size: int) -> Fault | None:
    """Check the source of a Read Request of ``size`` > 0 bytes. ``region``: as for a Write."""
    if region is None:
        return f"Read Request from STag 0x{stag:08x}, which is not valid", rdmap.INVALID_STAG
    if not region.rights & seam.REMOTE_READ:
        return f"Read Request from STag 0x{stag:08x}, which is write-only", rdmap.ACCESS_RIGHTS
    if to + size - 1 > ddp.MAX_TO:
        return f"Read Request of {size} bytes at 0x{to:x}: the TO wraps", rdmap.TO_WRAP
    if to + size > region.length:
        return f"Read Request up to {to + size} of {region.length} bytes", rdmap.BASE_OR_BOUNDS
    return None


def response_fault(
    read: OutstandingRead | None, size: int, control: int, stag: int, to: int
) -> Fault | None:
    """Check a Read Response segment: it must be the next piece of our oldest Read.

    The STag and TO of an empty segment are not checked (RFC 5041 section 5.2).
    """
    if read is None:
        return "a Read Response, but no RDMA Read is outstanding", rdmap.UNEXPECTED_OPCODE
    if size and stag != read.stag:
        return f"Read Response to STag 0x{stag:08x}, not the Read's", ddp.INVALID_STAG
    end = read.placed + size
    if size and (to != read.placed or end > read.length):
        text = f"Read Response of {size} bytes at {to}, expected {read.placed} of {read.length}"
        return text, ddp.BASE_OR_BOUNDS
    if control & ddp.LAST and end != read.length:
        return f"Read Response ends after {end} of {read.length} bytes", ddp.BASE_OR_BOUNDS
    return None


def send_fault(
    size: int,
    receive_size: int,
    receives: int,
    fields: tuple[int, int, int],
    expected: tuple[int, int],
) -> Fault | None:
    """Check a segment of a Send with ``size`` bytes of payload. ``receives``: receives that are
    posted and unused. ``fields``: its QN, MSN and MO. ``expected``: the MSN and MO that are due."""
    qn, msn, mo = fields
    if size < 0:
        return TOO_SHORT
    if qn != ddp.QN_SEND:
        return f"a Send on queue {qn}", ddp.INVALID_QN
    if msn != expected[0]:
        return f"Send with MSN {msn}, expected {expected[0]}", ddp.MSN_RANGE
    if mo != expected[1]:
        return f"Send with MO {mo}, expected {expected[1]}", ddp.INVALID_MO
    if receives <= 0:
        return "a Send, but no receive is posted", ddp.NO_BUFFER
    if mo + size > receive_size:
        return f"a Send of {mo + size} bytes or more, {receive_size} fit", ddp.MESSAGE_TOO_LONG
    return None
