"""FPDUs decoded one by one: the receive core of the queue pair parses in place."""

from __future__ import annotations

from typing import NamedTuple

from iserblk.crc import crc32c
from iserblk.errors import RemoteProtocolError
from iserblk.rcap.iwarp import ddp


class Fpdu(NamedTuple):
    """One decoded FPDU. ``crc`` is the field as it came, right or not."""

    header: ddp.TaggedHeader | ddp.UntaggedHeader
    payload: bytes
    crc: int


def decode_fpdu(data: bytes, *, crc: bool) -> tuple[Fpdu, int] | None:
    """The first FPDU of ``data`` and its size; None when it is not complete.

    Raises RemoteProtocolError for a ULPDU too short for its header, a wrong CRC (if ``crc``), or
    a pad that is not zero.
    """
    if len(data) < ddp.LENGTH_SIZE + 1:
        return None
    (length,) = ddp.LENGTH.unpack_from(data)
    tagged = data[2] & 0x80
    size = ddp.TAGGED_SIZE if tagged else ddp.UNTAGGED_SIZE
    if length + ddp.LENGTH_SIZE < size:
        raise RemoteProtocolError(
            "DDP", f"a ULPDU of {length} bytes is shorter than its header", ddp.MPA_LENGTH
        )
    total = ddp.fpdu_size(length)
    if len(data) < total:
        return None
    (field,) = ddp.CRC.unpack_from(data, total - ddp.CRC_SIZE)
    if crc and crc32c(data[: total - ddp.CRC_SIZE]) != field:
        raise RemoteProtocolError("MPA", "the CRC of an FPDU is wrong", ddp.MPA_CRC)
    end = ddp.LENGTH_SIZE + length
    if any(data[end : total - ddp.CRC_SIZE]):
        raise RemoteProtocolError("MPA", "the pad of an FPDU is not zero", ddp.MPA_LENGTH)
    header: ddp.TaggedHeader | ddp.UntaggedHeader
    if tagged:
        header = ddp.TaggedHeader(*ddp.TAGGED_HEADER.unpack_from(data))
    else:
        header = ddp.UntaggedHeader(*ddp.UNTAGGED_HEADER.unpack_from(data))
    return Fpdu(header, bytes(data[size:end]), field), total
