"""The text keys: one table, and how each is negotiated (RFC 7143 section 13, RFC 7145 section 6).

Over iSER, digests are None and markers No whatever is said; data lengths are those of
TargetRecvDataSegmentLength and InitiatorRecvDataSegmentLength, and MaxRecvDataSegmentLength counts
for nothing. Traditional iSCSI has digests, and each side declares its MaxRecvDataSegmentLength.

A key that means nothing in the session at hand is still answered with a value, not with
Irrelevant, wherever a legal value exists: running initiators take that word for a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError

# How the answer follows from the offer and the own wish.
AND = "and"  # Yes only if both say Yes
OR = "or"  # Yes if one says Yes
MINIMUM = "minimum"
MAXIMUM = "maximum"
LIST = "list"  # ours, if the offer has it
DECLARE = "declare"  # no answer
OBSOLETE = "obsolete"  # always Reject: obsolete, or not for login

# Who may send a key; EITHER: both.
EITHER = "either"
INITIATOR = "initiator"
TARGET = "target"

# What a value looks like.
BOOLEAN = "boolean"
NUMBER = "number"
TEXT = "text"

NOT_UNDERSTOOD = "NotUnderstood"
IRRELEVANT = "Irrelevant"
REJECT = "Reject"
ANSWER_WORDS = (NOT_UNDERSTOOD, IRRELEVANT, REJECT)

# A key of our own (RFC 7143 section 13.22): bytes of the largest ULPDU that its sender takes over
# software iWARP, wherever TCP cuts it up. It has to be said, because receivers are bound to take
# no more than what fits into a TCP segment (RFC 5044 section 4.5), and some lose the CRC of what
# does not. Offered by the initiator alone; a peer that does not know it says NotUnderstood.
MAX_ULPDU = "X-io.github.iserblk.MaxULPDULength"
SMALLEST_ULPDU = 8192  # less is no gain, but work

_MAXIMUM_LENGTH = (1 << 24) - 1
_MAXIMUM_NUMBER = (1 << 32) - 1

Value = int | bool | str


@dataclass(slots=True)
class SessionParameters:
    """What login agreed on. Lengths are bytes, times seconds. Defaults are the standards'.

    What is only declared is the peer's: ``max_outstanding_unexpected_pdus`` and
    ``max_ahs_length`` are what it takes (0: no limit).
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
    max_ulpdu: int = 0  # 0: never said
    tagged_buffer_for_solicited_data_only: bool | None = None  # None: never said
    iser_hello_required: bool = False
    max_recv_data_segment_length: int = 8192
    target_portal_group_tag: int = 0
    target_alias: str = ""
    target_address: str = ""
    initiator_alias: str = ""
    node_architecture: str = ""


class Key(NamedTuple):
    """One row. ``low``, ``high``: range of a number. ``discovery``: has a meaning there."""

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

# 1 is no legal number of unexpected PDUs or of AHS bytes: 0 means no limit, else 2 and more.
_NOT_ONE = ("MaxOutstandingUnexpectedPDUs", "MaxAHSLength")

# Over iSER nobody wishes for digests: it has its own integrity.
_DIGESTS = ("HeaderDigest", "DataDigest")
_NO_DIGEST = "None"
# Obsolete, and refused whatever is asked for.
FORCED_NO = ("IFMarker", "OFMarker")

# Keys of RFC 7145, which a peer need not know; RFC 7143 demands that all its own are known.
_MAY_BE_UNKNOWN = frozenset(
    ("RDMAExtensions", "TargetRecvDataSegmentLength", "InitiatorRecvDataSegmentLength")
)

_NUMERICAL_VALUE = re.compile("[0-9]{1,20}|0[xX][0-9a-fA-F]{1,16}")

_COMBINE: dict[str, Callable[[int, int], int]] = {
    AND: lambda a, b: a and b,
    OR: lambda a, b: a or b,
    MINIMUM: min,
    MAXIMUM: max,
}


def parse(key: Key, text: str) -> Value | None:
    """A value of ``key``; None when the key cannot have it."""
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
    if isinstance(value, bool):
        return "Yes" if value else "No"
    return str(value)


def answer(
    wish: SessionParameters, name: str, offer: str, discovery: bool, by_target: bool = False
) -> str | None:
    """The responder's side: settle ``name`` in ``wish``, which becomes the outcome key by key.

    ``by_target``: the target has sent it. Returns the value to answer with, None for declarations,
    Reject for a value that the key cannot have. Raises RemoteProtocolError for what must not be
    sent at all: a word that is reserved for answers, a key of the other side.
    """
    if offer in ANSWER_WORDS:
        raise RemoteProtocolError("iSCSI", f"{name[:63]}={offer}, but nothing was asked")
    key = TABLE.get(name)
    if key is None:
        return NOT_UNDERSTOOD
    if key.sender == (INITIATOR if by_target else TARGET):
        raise RemoteProtocolError("iSCSI", f"{name} was sent by the wrong side")
    value = parse(key, offer)
    if value is None or key.kind == OBSOLETE:
        return REJECT
    if key.kind == DECLARE:
        setattr(wish, key.field, value)
        return None
    own = getattr(wish, key.field)
    if key.kind == LIST:
        # The first of theirs that is one of ours (RFC 7143 section 6.2.1).
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
    """The originator's side: take the peer's answer to a key that we offered.

    Raises RemoteProtocolError for an answer that does not follow from the offer.
    """
    key = TABLE[name]
    if key.kind == DECLARE:
        # No answer but a declaration of the peer's own, unless it says that it cannot use ours.
        if result not in ANSWER_WORDS:
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
        # What a target says that has none, offered or not: a login may insist on another.
        setattr(offered, key.field, _NO_DIGEST)
        return
    # Legal answers are those that some wish of the peer leads to.
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
    """A key of ours got no value in answer: the peer keeps to the key's default, and the outcome
    is what that and our offer lead to. So ImmediateData=No holds although nothing but No can
    follow, for which the answer is optional (RFC 7143 section 6.2.2)."""
    key = TABLE[name]
    if key.kind in _COMBINE:
        own = getattr(offered, key.field)
        default = getattr(SessionParameters(), key.field)
        setattr(offered, key.field, _COMBINE[key.kind](own, default))
    elif name in _DIGESTS:
        setattr(offered, key.field, _NO_DIGEST)


def conclude(outcome: SessionParameters, settled: Container[str]) -> None:
    """Login is complete: keys that were offered by nobody, or never answered, get what their
    defaults lead to, and the first burst is no longer than any (RFC 7143 section 13.14)."""
    for name in TABLE:
        if name not in settled:
            not_answered(outcome, name)
    outcome.first_burst_length = min(outcome.first_burst_length, outcome.max_burst_length)
