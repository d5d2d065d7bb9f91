"""The text keys: one table, and how each is negotiated (RFC 7143 section 13, RFC 7145 section 6).

Over iSER, digests are forced to None and markers to No whatever is said; data lengths are those of
TargetRecvDataSegmentLength and InitiatorRecvDataSegmentLength, and MaxRecvDataSegmentLength counts
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

# How the answer follows from the offer and the own wish.
AND = "and"  # Yes only if both say Yes
OR = "or"  # Yes if one says Yes
MINIMUM = "minimum"
MAXIMUM = "maximum"
LIST = "list"  # the first of the offer that is acceptable
DECLARE = "declare"  # no answer

NOT_UNDERSTOOD = "NotUnderstood"
IRRELEVANT = "Irrelevant"
REJECT = "Reject"
_ANSWERS = (NOT_UNDERSTOOD, IRRELEVANT, REJECT)

_MAXIMUM_LENGTH = (1 << 24) - 1
_MAXIMUM_NUMBER = (1 << 32) - 1


@dataclass(slots=True)
class SessionParameters:
    """What login agreed on. Lengths are bytes, times seconds. Defaults are the standards'."""

    rdma_extensions: bool = False
    max_connections: int = 1
    initial_r2t: bool = True
    immediate_data: bool = True
    max_burst_length: int = 262144
    first_burst_length: int = 65536
    default_time2wait: int = 2
    default_time2retain: int = 20
    max_outstanding_r2t: int = 1
    data_pdu_in_order: bool = True
    data_sequence_in_order: bool = True
    error_recovery_level: int = 0
    header_digest: str = "None"
    data_digest: str = "None"
    if_marker: bool = False
    of_marker: bool = False
    target_recv_data_segment_length: int = 8192
    initiator_recv_data_segment_length: int = 8192
    max_outstanding_unexpected_pdus: int = 0
    max_ahs_length: int = 256
    tagged_buffer_for_solicited_data_only: bool | None = None  # None: never said
    iser_hello_required: bool = False
    max_recv_data_segment_length: int = 8192
    target_portal_group_tag: int = 0
    target_alias: str = ""
    target_address: str = ""
    initiator_alias: str = ""


class Key(NamedTuple):
    """One row. ``low``, ``high``: range of a number; ``discovery``: has a meaning there."""

    name: str
    kind: str
    field: str
    low: int = 0
    high: int = 0
    discovery: bool = True


_ROWS = (
    Key("RDMAExtensions", AND, "rdma_extensions", discovery=False),
    Key("HeaderDigest", LIST, "header_digest"),
    Key("DataDigest", LIST, "data_digest"),
    Key("MaxConnections", MINIMUM, "max_connections", 1, 65535, discovery=False),
    Key("InitialR2T", OR, "initial_r2t", discovery=False),
    Key("ImmediateData", AND, "immediate_data", discovery=False),
    Key("MaxBurstLength", MINIMUM, "max_burst_length", 512, _MAXIMUM_LENGTH, discovery=False),
    Key("FirstBurstLength", MINIMUM, "first_burst_length", 512, _MAXIMUM_LENGTH, discovery=False),
    Key("DefaultTime2Wait", MAXIMUM, "default_time2wait", 0, 3600),
    Key("DefaultTime2Retain", MINIMUM, "default_time2retain", 0, 3600),
    Key("MaxOutstandingR2T", MINIMUM, "max_outstanding_r2t", 1, 65535, discovery=False),
    Key("DataPDUInOrder", OR, "data_pdu_in_order", discovery=False),
    Key("DataSequenceInOrder", OR, "data_sequence_in_order", discovery=False),
    Key("ErrorRecoveryLevel", MINIMUM, "error_recovery_level", 0, 2),
    Key("IFMarker", AND, "if_marker"),
    Key("OFMarker", AND, "of_marker"),
    Key(
        "TargetRecvDataSegmentLength",
        MINIMUM,
        "target_recv_data_segment_length",
        512,
        _MAXIMUM_LENGTH,
    ),
    Key(
        "InitiatorRecvDataSegmentLength",
        MINIMUM,
        "initiator_recv_data_segment_length",
        512,
        _MAXIMUM_LENGTH,
    ),
    Key(
        "MaxOutstandingUnexpectedPDUs",
        DECLARE,
        "max_outstanding_unexpected_pdus",
        0,
        _MAXIMUM_NUMBER,
    ),
    Key("MaxAHSLength", DECLARE, "max_ahs_length", 0, _MAXIMUM_NUMBER),
    Key("TaggedBufferForSolicitedDataOnly", DECLARE, "tagged_buffer_for_solicited_data_only"),
    Key("iSERHelloRequired", DECLARE, "iser_hello_required"),
    Key("MaxRecvDataSegmentLength", DECLARE, "max_recv_data_segment_length", 512, _MAXIMUM_LENGTH),
    Key("TargetPortalGroupTag", DECLARE, "target_portal_group_tag", 0, 65535),
    Key("TargetAlias", DECLARE, "target_alias"),
    Key("TargetAddress", DECLARE, "target_address"),
    Key("InitiatorAlias", DECLARE, "initiator_alias"),
)
TABLE = {row.name: row for row in _ROWS}
_BOOLEANS = frozenset(
    row.name for row in _ROWS if isinstance(getattr(SessionParameters(), row.field), bool)
) | {"TaggedBufferForSolicitedDataOnly"}

# 1 is no legal number of unexpected PDUs or of AHS bytes: 0 means no limit, else 2 and more.
_NOT_ONE = ("MaxOutstandingUnexpectedPDUs", "MaxAHSLength")

# Forced whatever is asked for: iSER has its own integrity, and no stream to mark.
_FORCED: dict[str, str | bool] = {
    "HeaderDigest": "None",
    "DataDigest": "None",
    "IFMarker": False,
    "OFMarker": False,
}


def _parse(key: Key, text: str) -> int | bool | str:
    """A value of ``key``. Raises RemoteProtocolError when it is none."""
    if key.name in _BOOLEANS:
        if text not in ("Yes", "No"):
            raise RemoteProtocolError("iSCSI", f"{key.name}={text[:40]}: Yes or No")
        return text == "Yes"
    if not key.high:
        return text
    try:
        value = int(text, 16) if text[:2] in ("0x", "0X") else _decimal(text)
    except ValueError:
        raise RemoteProtocolError("iSCSI", f"{key.name}={text[:40]}: not a number") from None
    if not key.low <= value <= key.high or (value == 1 and key.name in _NOT_ONE):
        raise RemoteProtocolError(
            "iSCSI", f"{key.name}={value}: outside of {key.low} to {key.high}"
        )
    return value


def _decimal(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20:
        raise ValueError(text)
    return int(text)


def text_of(value: int | bool | str | None) -> str:
    if isinstance(value, bool):
        return "Yes" if value else "No"
    return str(value)


_COMBINE: dict[str, Callable[[int, int], int]] = {
    AND: lambda a, b: a and b,
    OR: lambda a, b: a or b,
    MINIMUM: min,
    MAXIMUM: max,
}


def answer(wish: SessionParameters, name: str, offer: str, discovery: bool) -> str | None:
    """The responder's side: settle ``name`` in ``wish``, which becomes the outcome key by key.

    Returns the value to answer with, None for declarations. Raises RemoteProtocolError for a
    value that the key cannot have.
    """
    key = TABLE.get(name)
    if key is None:
        return NOT_UNDERSTOOD
    if discovery and not key.discovery:
        # RDMAExtensions is the exception that running code makes: it answers No.
        return "No" if name == "RDMAExtensions" else IRRELEVANT
    if key.kind == LIST:
        if "None" not in offer.split(","):
            return REJECT  # only None is possible over iSER
        return "None"
    value = _parse(key, offer)
    if key.kind == DECLARE:
        setattr(wish, key.field, value)
        return None
    assert not isinstance(value, str)
    own = _FORCED.get(name, getattr(wish, key.field))
    assert not isinstance(own, str)
    result = _COMBINE[key.kind](value, own)
    setattr(wish, key.field, result)
    return text_of(result)


def accept(offered: SessionParameters, name: str, result: str) -> None:
    """The originator's side: take the target's answer to a key that we offered.

    Raises RemoteProtocolError for an answer that does not follow from the offer.
    """
    key = TABLE[name]
    if result in _ANSWERS:
        if name in ("MaxRecvDataSegmentLength", *_FORCED) or key.kind == DECLARE:
            return
        if result == NOT_UNDERSTOOD and name not in (
            "RDMAExtensions",
            "TargetRecvDataSegmentLength",
            "InitiatorRecvDataSegmentLength",
        ):
            raise RemoteProtocolError("iSCSI", f"the target answered {name}={result}")
        # The key has no effect: its default holds.
        setattr(offered, key.field, getattr(SessionParameters(), key.field))
        return
    if key.kind == LIST:
        if result != "None":
            raise RemoteProtocolError("iSCSI", f"the target chose {name}={result[:40]}")
        return
    value = _parse(key, result)
    if key.kind in _COMBINE:
        assert not isinstance(value, str)
        own = getattr(offered, key.field)
        # Legal answers are those that some wish of the target leads to.
        if _COMBINE[key.kind](value, own) != value:
            raise RemoteProtocolError(
                "iSCSI", f"{name}={text_of(own)} was offered, {name}={result[:40]} answered"
            )
    setattr(offered, key.field, value)
