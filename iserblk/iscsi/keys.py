"""The table of text keys, and their negotiation (RFC 7143 section 13, RFC 7145 section 6).

Over iSER, digests are None and markers No, whatever the peer offers. Data lengths are those of
TargetRecvDataSegmentLength and InitiatorRecvDataSegmentLength; MaxRecvDataSegmentLength has no
effect. Traditional iSCSI has digests, and each side declares its MaxRecvDataSegmentLength.

A key that has no meaning in a session is still answered with a value, wherever a legal value
exists. It is not answered with Irrelevant: some initiators take that answer for a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

# Kinds of keys: how the answer follows from the peer's offer and our own wish.
AND = "and"  # Yes if both sides say Yes
OR = "or"  # Yes if at least one side says Yes
MINIMUM = "minimum"
MAXIMUM = "maximum"
LIST = "list"  # the first value of the offer that is in our list
DECLARE = "declare"  # no answer
OBSOLETE = "obsolete"  # always answered Reject: obsolete, or not for login

# Which side may send a key.
EITHER = "either"
INITIATOR = "initiator"
TARGET = "target"

# Types of values.
BOOLEAN = "boolean"
NUMBER = "number"
TEXT = "text"

NOT_UNDERSTOOD = "NotUnderstood"
IRRELEVANT = "Irrelevant"
REJECT = "Reject"
ANSWER_WORDS = (NOT_UNDERSTOOD, IRRELEVANT, REJECT)

# A private key (RFC 7143 section 13.22): bytes of the largest ULPDU that its sender takes over
# software iWARP, wherever TCP cuts it up. It must be declared, because a receiver need not take a
# ULPDU that does not fit into a TCP segment (RFC 5044 section 4.5), and some receivers lose the CRC
# of such a ULPDU. Only the initiator offers it; a peer that does not know it answers NotUnderstood.
MAX_ULPDU = "X-io.github.iserblk.MaxULPDULength"
SMALLEST_ULPDU = 8192  # a smaller value gains nothing

_MAXIMUM_LENGTH = (1 << 24) - 1
_MAXIMUM_NUMBER = (1 << 32) - 1

Value = int | bool | str


@dataclass(slots=True)
class SessionParameters:
    """The values of the keys that login agreed on.

    Lengths are bytes, times are seconds, defaults are those of the standards. Keys that are only
    declared have the value of the peer: ``max_outstanding_unexpected_pdus`` and ``max_ahs_length``
    are what the peer takes (0: no limit). ``chap``, ``chap_algorithm``: of an initiator's login,
    how CHAP was carried out: one-way or mutual, and by which hash; "none" and "": it was not.
    """

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
    task_reporting: str = "RFC3720"
    protocol_level: int = 1
    target_recv_data_segment_length: int = 8192
    initiator_recv_data_segment_length: int = 8192
    max_outstanding_unexpected_pdus: int = 0
    max_ahs_length: int = 256
    max_ulpdu: int = 0  # 0: not declared
    tagged_buffer_for_solicited_data_only: bool | None = None  # None: not declared
    iser_hello_required: bool | None = None  # None: not declared, or not understood
    max_recv_data_segment_length: int = 8192
    target_portal_group_tag: int = 0
    target_alias: str = ""
    target_address: str = ""
    initiator_alias: str = ""
    node_architecture: str = ""
    chap: str = field(default="none", compare=False)  # nothing that both ends have agreed on
    chap_algorithm: str = field(default="", compare=False)


class Key(NamedTuple):
    """One row of the table. ``kind``: how it is negotiated. ``field``: of SessionParameters.
    ``value``: type of its value. ``low``, ``high``: range of a number. ``discovery``: the key has
    a meaning in a discovery session."""

    name: str
    kind: str
    field: str
    value: str
    low: int = 0
    high: int = 0
    sender: str = EITHER
    discovery: bool = True


def _boolean(name: str, kind: str, field: str, *, discovery: bool, sender: str = EITHER) -> Key:
    return Key(name, kind, field, BOOLEAN, sender=sender, discovery=discovery)


def _number(
    name: str, kind: str, field: str, low: int, high: int, *, discovery: bool, sender: str = EITHER
) -> Key:
    return Key(name, kind, field, NUMBER, low, high, sender, discovery)


def _text(name: str, kind: str, field: str, sender: str = EITHER) -> Key:
    return Key(name, kind, field, TEXT, sender=sender)


_ROWS = (
    _boolean("RDMAExtensions", AND, "rdma_extensions", discovery=False),
    _text("HeaderDigest", LIST, "header_digest"),
    _text("DataDigest", LIST, "data_digest"),
    _number("MaxConnections", MINIMUM, "max_connections", 1, 65535, discovery=False),
    _boolean("InitialR2T", OR, "initial_r2t", discovery=False),
    _boolean("ImmediateData", AND, "immediate_data", discovery=False),
    _number("MaxBurstLength", MINIMUM, "max_burst_length", 512, _MAXIMUM_LENGTH, discovery=False),
    _number(
        "FirstBurstLength", MINIMUM, "first_burst_length", 512, _MAXIMUM_LENGTH, discovery=False
    ),
    _number("DefaultTime2Wait", MAXIMUM, "default_time2wait", 0, 3600, discovery=True),
    _number("DefaultTime2Retain", MINIMUM, "default_time2retain", 0, 3600, discovery=True),
    _number("MaxOutstandingR2T", MINIMUM, "max_outstanding_r2t", 1, 65535, discovery=False),
    _boolean("DataPDUInOrder", OR, "data_pdu_in_order", discovery=False),
    _boolean("DataSequenceInOrder", OR, "data_sequence_in_order", discovery=False),
    _number("ErrorRecoveryLevel", MINIMUM, "error_recovery_level", 0, 2, discovery=True),
    _boolean("IFMarker", AND, "if_marker", discovery=True),
    _boolean("OFMarker", AND, "of_marker", discovery=True),
    Key("IFMarkInt", OBSOLETE, "", TEXT),
    Key("OFMarkInt", OBSOLETE, "", TEXT),
    Key("SendTargets", OBSOLETE, "", TEXT, sender=INITIATOR),
    Key("TaskReporting", LIST, "task_reporting", TEXT, discovery=False),
    _number("iSCSIProtocolLevel", MINIMUM, "protocol_level", 0, 31, discovery=False),
    _number(
        "TargetRecvDataSegmentLength",
        MINIMUM,
        "target_recv_data_segment_length",
        512,
        _MAXIMUM_LENGTH,
        discovery=False,
    ),
    _number(
        "InitiatorRecvDataSegmentLength",
        MINIMUM,
        "initiator_recv_data_segment_length",
        512,
        _MAXIMUM_LENGTH,
        discovery=False,
    ),
    _number(
        "MaxOutstandingUnexpectedPDUs",
        DECLARE,
        "max_outstanding_unexpected_pdus",
        0,
        _MAXIMUM_NUMBER,
        discovery=False,
    ),
    _number("MaxAHSLength", DECLARE, "max_ahs_length", 0, _MAXIMUM_NUMBER, discovery=False),
    _boolean(
        "TaggedBufferForSolicitedDataOnly",
        DECLARE,
        "tagged_buffer_for_solicited_data_only",
        discovery=False,
        sender=INITIATOR,
    ),
    _boolean(
        "iSERHelloRequired", DECLARE, "iser_hello_required", discovery=False, sender=INITIATOR
    ),
    _number(
        "MaxRecvDataSegmentLength",
        DECLARE,
        "max_recv_data_segment_length",
        512,
        _MAXIMUM_LENGTH,
        discovery=True,
    ),
    _number(
        "TargetPortalGroupTag",
        DECLARE,
        "target_portal_group_tag",
        0,
        65535,
        discovery=True,
        sender=TARGET,
    ),
    _text("TargetAlias", DECLARE, "target_alias", TARGET),
    _text("TargetAddress", DECLARE, "target_address", TARGET),
    _text("InitiatorAlias", DECLARE, "initiator_alias", INITIATOR),
    _text("X#NodeArchitecture", DECLARE, "node_architecture"),
    _number(MAX_ULPDU, DECLARE, "max_ulpdu", SMALLEST_ULPDU, 65535, discovery=False),
)
TABLE = {row.name: row for row in _ROWS}

# Only the leading login of a session may send these (RFC 7143 section 13, RFC 7145 section 6).
LEADING_ONLY: frozenset[str] = frozenset(
    (
        "RDMAExtensions",
        "MaxConnections",
        "InitialR2T",
        "ImmediateData",
        "MaxBurstLength",
        "FirstBurstLength",
        "DefaultTime2Wait",
        "DefaultTime2Retain",
        "MaxOutstandingR2T",
        "DataPDUInOrder",
        "DataSequenceInOrder",
        "ErrorRecoveryLevel",
        "TaskReporting",
        "iSCSIProtocolLevel",
        "MaxOutstandingUnexpectedPDUs",
        "MaxAHSLength",
        "TaggedBufferForSolicitedDataOnly",
        "iSERHelloRequired",
    )
)

# Numbers of unexpected PDUs or AHS bytes: 0 means no limit, and 1 is not allowed.
_NOT_ONE = ("MaxOutstandingUnexpectedPDUs", "MaxAHSLength")

# Over iSER neither side asks for digests: the RCaP protects the data.
_DIGESTS = ("HeaderDigest", "DataDigest")
_NO_DIGEST = "None"
# Obsolete: No, whatever the peer offers.
FORCED_NO = ("IFMarker", "OFMarker")

# Keys of RFC 7145, which a peer need not know. RFC 7143 demands that a peer knows all of its keys.
_MAY_BE_UNKNOWN = frozenset(
    ("RDMAExtensions", "TargetRecvDataSegmentLength", "InitiatorRecvDataSegmentLength")
)

# What a target says of itself, and an initiator makes no use of: a wrong value (-1) does no harm.
_NOT_USED = ("TargetPortalGroupTag",)

_NUMERICAL_VALUE = re.compile("[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}")

_COMBINE: dict[str, Callable[[int, int], int]] = {
    AND: lambda a, b: a and b,
    OR: lambda a, b: a or b,
    MINIMUM: min,
    MAXIMUM: max,
}


def parse(key: Key, text: str) -> Value | None:
    """The value of ``key`` that ``text`` means; None when the key cannot have it."""
    if key.value == BOOLEAN:
        return {"Yes": True, "No": False}.get(text)
    if key.value == TEXT:
        return text
    if not _NUMERICAL_VALUE.fullmatch(text):
        return None
    value = int(text, 16 if text[:2] in ("0x", "0X") else 10)
    if not key.low <= value <= key.high or (value == 1 and key.name in _NOT_ONE):
        return None
    return value


def text_of(value: Value | None) -> str:
    """The text of a value, as it is sent."""
    if isinstance(value, bool):
        return "Yes" if value else "No"
    return str(value)


def answer(
    wish: SessionParameters, name: str, offer: str, discovery: bool, by_target: bool = False
) -> str | None:
    """The side that answers: settle an offered key.

    ``wish`` holds our wishes and is changed, key by key, into the outcome. ``by_target``: the
    target sent the offer. Returns the value to answer with; None for declarations; Reject for a
    value that the key cannot have. Raises RemoteProtocolError for an offer that must not be sent:
    a word that is reserved for answers, or a key that only the other side may send.
    """
    if offer in ANSWER_WORDS:
        raise RemoteProtocolError("iSCSI", f"{name[:63]}={offer}, but nothing was asked")
    key = TABLE.get(name)
    if key is None:
        return NOT_UNDERSTOOD
    if key.sender == (INITIATOR if by_target else TARGET):
        raise RemoteProtocolError("iSCSI", f"{name} was sent by the wrong side")
    value = parse(key, offer)
    if value is None and name in _NOT_USED:
        return None
    if value is None or key.kind == OBSOLETE:
        return REJECT
    if key.kind == DECLARE:
        setattr(wish, key.field, value)
        return None
    own = getattr(wish, key.field)
    if key.kind == LIST:
        # The first value of the offer that is in our list (RFC 7143 section 6.2.1).
        for each in offer.split(","):
            if each in own.split(","):
                setattr(wish, key.field, each)
                return each
        if name in _DIGESTS:
            setattr(wish, key.field, _NO_DIGEST)
            return IRRELEVANT
        return REJECT
    assert not isinstance(value, str)
    if name in FORCED_NO or (name == "RDMAExtensions" and discovery):
        own = False
    result = _COMBINE[key.kind](value, own)
    setattr(wish, key.field, result)
    return text_of(result)


def accept(offered: SessionParameters, name: str, result: str) -> None:
    """The side that offered: take the peer's answer into ``offered``.

    Raises RemoteProtocolError for an answer that does not follow from the offer.
    """
    key = TABLE[name]
    if key.kind == DECLARE:
        # Not an answer but the peer's own declaration, unless it is a word like NotUnderstood. A
        # key that only the initiator declares then has no effect.
        if result in ANSWER_WORDS:
            if key.sender == INITIATOR:
                setattr(offered, key.field, getattr(SessionParameters(), key.field))
        else:
            value = parse(key, result)
            if value is None:
                raise RemoteProtocolError("iSCSI", f"{name}={result[:40]} is no value of it")
            setattr(offered, key.field, value)
        return
    if result in ANSWER_WORDS:
        if result == NOT_UNDERSTOOD and name not in _MAY_BE_UNKNOWN:
            raise RemoteProtocolError("iSCSI", f"{name}={result}, but it has to be understood")
        not_answered(offered, name)
        return
    own = getattr(offered, key.field)
    value = parse(key, result)
    if name in _DIGESTS and value == _NO_DIGEST:
        # A target without digests answers so, offered or not. A login that needs one checks later.
        setattr(offered, key.field, _NO_DIGEST)
        return
    # An answer is legal when some wish of the peer leads to it.
    if value is None or (
        value not in own.split(",")
        if key.kind == LIST
        else _COMBINE[key.kind](int(value), own) != value
    ):
        raise RemoteProtocolError(
            "iSCSI", f"{name}={text_of(own)} was offered, {name}={result[:40]} answered"
        )
    setattr(offered, key.field, value)


def not_answered(offered: SessionParameters, name: str) -> None:
    """Settle a key that we offered and the peer did not answer with a value.

    The peer then has the default of the key as its wish, and the outcome follows from the default
    and our offer. So our ImmediateData=No holds without an answer, which is optional where only No
    can be the outcome (RFC 7143 section 6.2.2)."""
    key = TABLE[name]
    if key.kind in _COMBINE:
        own = getattr(offered, key.field)
        default = getattr(SessionParameters(), key.field)
        setattr(offered, key.field, _COMBINE[key.kind](own, default))
    elif name in _DIGESTS:
        setattr(offered, key.field, _NO_DIGEST)


def conclude(outcome: SessionParameters, settled: Container[str]) -> None:
    """Complete the outcome at the end of login. Keys that neither side offered, or that were not
    answered, are settled by their defaults. The first burst becomes no longer than any burst
    (RFC 7143 section 13.14)."""
    for name in TABLE:
        if name not in settled:
            not_answered(outcome, name)
    outcome.first_burst_length = min(outcome.first_burst_length, outcome.max_burst_length)
