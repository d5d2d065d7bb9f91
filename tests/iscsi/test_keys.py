"""Negotiation, key by key: what is answered, what is accepted, what comes out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import keys
from iserblk.iscsi.keys import SessionParameters

LENGTH = (1 << 24) - 1
NUMBER = (1 << 32) - 1

# name, kind, default, lowest, highest (RFC 7143 section 13, RFC 7145 section 6), written down from
# the standards once more.
STANDARD = [
    ("RDMAExtensions", "and", False, None, None),
    ("HeaderDigest", "list", "None", None, None),
    ("DataDigest", "list", "None", None, None),
    ("MaxConnections", "minimum", 1, 1, 65535),
    ("InitialR2T", "or", True, None, None),
    ("ImmediateData", "and", True, None, None),
    ("MaxBurstLength", "minimum", 262144, 512, LENGTH),
    ("FirstBurstLength", "minimum", 65536, 512, LENGTH),
    ("DefaultTime2Wait", "maximum", 2, 0, 3600),
    ("DefaultTime2Retain", "minimum", 20, 0, 3600),
    ("MaxOutstandingR2T", "minimum", 1, 1, 65535),
    ("DataPDUInOrder", "or", True, None, None),
    ("DataSequenceInOrder", "or", True, None, None),
    ("ErrorRecoveryLevel", "minimum", 0, 0, 2),
    ("IFMarker", "and", False, None, None),
    ("OFMarker", "and", False, None, None),
    ("TaskReporting", "list", "RFC3720", None, None),
    ("iSCSIProtocolLevel", "minimum", 1, 0, 31),
    ("TargetRecvDataSegmentLength", "minimum", 8192, 512, LENGTH),
    ("InitiatorRecvDataSegmentLength", "minimum", 8192, 512, LENGTH),
    ("MaxOutstandingUnexpectedPDUs", "declare", 0, 0, NUMBER),
    ("MaxAHSLength", "declare", 256, 0, NUMBER),
    ("MaxRecvDataSegmentLength", "declare", 8192, 512, LENGTH),
    ("TargetPortalGroupTag", "declare", 0, 0, 65535),
]
NUMBERS = [row for row in STANDARD if row[4] is not None]
TARGETS_OWN = ("TargetPortalGroupTag", "TargetAlias", "TargetAddress")


def of(name: str, parameters: SessionParameters) -> object:
    return getattr(parameters, keys.TABLE[name].field)


@pytest.mark.parametrize(("name", "kind", "default", "low", "high"), STANDARD)
def test_table(name: str, kind: str, default: object, low: int | None, high: int | None) -> None:
    """proves: ISER-6.3-1, ISER-6.4-1, ISER-6.5-1, ISER-6.7-1, ISER-7145-6.8-1"""
    row = keys.TABLE[name]
    assert row.kind == kind
    assert of(name, SessionParameters()) == default
    assert (row.low, row.high) == (low or 0, high or 0)


def ask(name: str, offer: str, wish: SessionParameters | None = None, **flags: bool) -> str | None:
    by_target = name in TARGETS_OWN
    return keys.answer(
        wish or SessionParameters(), name, offer, flags.get("discovery", False), by_target
    )


@pytest.mark.parametrize(("name", "kind", "default", "low", "high"), NUMBERS)
def test_range_of_numbers(name: str, kind: str, default: object, low: int, high: int) -> None:
    """A value outside the key's range is rejected, and changes nothing. That of a declaration which
    is not used is passed over: targets send TargetPortalGroupTag=-1 with their last response."""
    answer = None if name == "TargetPortalGroupTag" else "Reject"
    bad = [str(high + 1), "", "-1", "+5", "1.5", "0x", "0x1_0", "ten", "1~2", " 5", "5 ", "٥"]
    bad += ["9" * 21, "0x" + "f" * 17, "0x" + "f" * 8000]
    bad += [str(low - 1)] if low else []
    for offer in bad:
        wish = SessionParameters()
        assert ask(name, offer, wish) == answer
        assert wish == SessionParameters()
    for offer in (low, high):  # type: ignore[assignment]
        for text in (str(offer), hex(offer), f"0X{offer:X}"):  # type: ignore[arg-type]
            assert ask(name, text) != "Reject"


def test_one_unexpected_pdu_is_no_number_of_them() -> None:
    """0 is no limit, 1 is not allowed. proves: ISER-6.7-1, ISER-7145-6.8-1"""
    for name in ("MaxOutstandingUnexpectedPDUs", "MaxAHSLength"):
        wish = SessionParameters()
        assert ask(name, "1", wish) == "Reject"
        assert ask(name, "0", wish) is None
        assert ask(name, "2", wish) is None
        assert of(name, wish) == 2


@pytest.mark.parametrize(
    ("name", "own", "offer", "result"),
    [
        ("RDMAExtensions", True, "Yes", "Yes"),
        ("RDMAExtensions", True, "No", "No"),
        ("RDMAExtensions", False, "Yes", "No"),
        ("InitialR2T", True, "No", "Yes"),
        ("InitialR2T", False, "No", "No"),
        ("InitialR2T", False, "Yes", "Yes"),
        ("ImmediateData", True, "Yes", "Yes"),
        ("ImmediateData", False, "Yes", "No"),
        ("ImmediateData", True, "yes", "Reject"),
        ("MaxBurstLength", 1 << 20, "262144", "262144"),
        ("MaxBurstLength", 65536, "262144", "65536"),
        ("DefaultTime2Wait", 0, "2", "2"),
        ("DefaultTime2Wait", 5, "2", "5"),
        ("HeaderDigest", "None", "CRC32C,None", "None"),
        ("HeaderDigest", "None", "None", "None"),
        ("HeaderDigest", "None", "CRC32C", "Irrelevant"),
        ("DataDigest", "None", "Y-com.example.md5", "Irrelevant"),
        ("IFMarker", False, "Yes", "No"),
        ("OFMarker", True, "Yes", "No"),  # always No
        ("IFMarkInt", None, "2048~65535", "Reject"),
        ("OFMarkInt", None, "Whatever", "Reject"),
        ("SendTargets", None, "All", "Reject"),
        ("TaskReporting", "RFC3720", "FastAbort,ResponseFence,RFC3720", "RFC3720"),
        ("TaskReporting", "RFC3720", "FastAbort", "Reject"),
        ("iSCSIProtocolLevel", 1, "2", "1"),
        ("X-com.example.bar.foo", None, "3", "NotUnderstood"),
        ("FutureKey", None, "3", "NotUnderstood"),
    ],
)
def test_answers(name: str, own: object, offer: str, result: str) -> None:
    """proves: ISER-6-1, ISER-6.1-1, ISER-6.3-2, ISER-6.3-3, ISER-6.6-1, ISER-7143-6.2-1,
    ISER-7143-6.2-2, ISER-7143-13.25-1"""
    wish = SessionParameters()
    if own is not None:
        setattr(wish, keys.TABLE[name].field, own)
    assert ask(name, offer, wish) == result
    if result in ("Yes", "No"):
        assert of(name, wish) is (result == "Yes") or name in keys.FORCED_NO
    assert wish.header_digest == wish.data_digest == "None"
    assert not wish.if_marker


def test_a_declared_key_has_no_answer() -> None:
    wish = SessionParameters()
    assert ask("InitiatorAlias", "a host", wish) is None
    assert ask("TaggedBufferForSolicitedDataOnly", "Yes", wish) is None
    assert ask("X#NodeArchitecture", "x/1,y/2", wish) is None
    assert (wish.initiator_alias, wish.tagged_buffer_for_solicited_data_only) == ("a host", True)


@pytest.mark.parametrize("word", keys.ANSWER_WORDS)
@pytest.mark.parametrize("name", ["MaxBurstLength", "X-com.example", "InitiatorAlias"])
def test_reserved_words_are_no_offers(name: str, word: str) -> None:
    """RFC 7143 section 6.2: they may only be answers."""
    with pytest.raises(RemoteProtocolError, match=word):
        ask(name, word)


@pytest.mark.parametrize(
    ("name", "by_target"),
    [
        ("InitiatorAlias", True),
        ("iSERHelloRequired", True),
        ("TaggedBufferForSolicitedDataOnly", True),
        ("TargetAlias", False),
        ("TargetPortalGroupTag", False),
        ("TargetAddress", False),
    ],
)
def test_keys_of_the_other_side(name: str, by_target: bool) -> None:
    with pytest.raises(RemoteProtocolError, match="wrong side"):
        keys.answer(SessionParameters(), name, "Yes", False, by_target)


def test_discovery_is_not_iser() -> None:
    """RDMAExtensions is answered with No, as Linux's target does.

    proves: ISER-5.1-6, ISER-6.3-1
    """
    wish = SessionParameters(rdma_extensions=True)
    assert ask("RDMAExtensions", "Yes", wish, discovery=True) == "No"
    assert not wish.rdma_extensions


@pytest.mark.parametrize(
    ("name", "own", "result", "outcome"),
    [
        ("RDMAExtensions", True, "Yes", True),
        ("RDMAExtensions", True, "No", False),
        ("RDMAExtensions", True, "NotUnderstood", False),
        ("RDMAExtensions", True, "Irrelevant", False),
        ("InitialR2T", True, "Yes", True),
        ("InitialR2T", False, "No", False),
        ("ImmediateData", False, "No", False),
        ("ImmediateData", False, "Irrelevant", False),
        ("ImmediateData", False, "Reject", False),
        ("ImmediateData", True, "Reject", True),
        ("MaxBurstLength", 1 << 20, "262144", 262144),
        ("MaxBurstLength", 1 << 20, "0x1000", 4096),
        ("MaxBurstLength", 1 << 20, "Reject", 262144),
        ("MaxBurstLength", 4096, "Reject", 4096),
        ("DefaultTime2Wait", 0, "7", 7),
        ("DefaultTime2Wait", 0, "Irrelevant", 2),
        ("TargetRecvDataSegmentLength", 8192, "NotUnderstood", 8192),
        ("HeaderDigest", "None", "None", "None"),
        ("HeaderDigest", "None", "Irrelevant", "None"),
        ("MaxOutstandingUnexpectedPDUs", 0, "16", 16),
        ("MaxOutstandingUnexpectedPDUs", 0, "NotUnderstood", 0),
        ("MaxRecvDataSegmentLength", 8192, "262144", 262144),
    ],
)
def test_accepted(name: str, own: object, result: str, outcome: object) -> None:
    """proves: ISER-6.3-2, ISER-6.3-3"""
    offered = SessionParameters()
    setattr(offered, keys.TABLE[name].field, own)
    keys.accept(offered, name, result)
    assert of(name, offered) == outcome


@pytest.mark.parametrize(
    ("name", "own", "result"),
    [
        ("RDMAExtensions", False, "Yes"),
        ("ImmediateData", False, "Yes"),
        ("InitialR2T", True, "No"),
        ("MaxBurstLength", 65536, "65537"),
        ("MaxBurstLength", 65536, "511"),
        ("MaxBurstLength", 65536, "0x" + "f" * 8000),
        ("DefaultTime2Wait", 5, "4"),
        ("HeaderDigest", "None", "CRC32C"),
        ("HeaderDigest", "None", "None,CRC32C"),
        ("MaxConnections", 1, "NotUnderstood"),
        ("MaxConnections", 1, "one"),
        ("MaxOutstandingUnexpectedPDUs", 0, "1"),
    ],
)
def test_not_accepted(name: str, own: object, result: str) -> None:
    """An answer that cannot follow from our offer is a protocol error."""
    offered = SessionParameters()
    setattr(offered, keys.TABLE[name].field, own)
    with pytest.raises(RemoteProtocolError, match=name):
        keys.accept(offered, name, result)


def test_what_nobody_settles() -> None:
    """Linux's target leaves ImmediateData=No and InitialR2T=Yes unanswered, as it may
    (RFC 7143 section 6.2.2): that must not turn them into their defaults."""
    outcome = SessionParameters(
        rdma_extensions=True,
        immediate_data=False,
        max_burst_length=1 << 20,
        first_burst_length=1 << 20,
        default_time2wait=0,
        target_recv_data_segment_length=65536,
        max_outstanding_unexpected_pdus=9,
    )
    keys.conclude(outcome, {"FirstBurstLength"})
    assert outcome == SessionParameters(
        rdma_extensions=False,
        immediate_data=False,
        max_burst_length=262144,
        first_burst_length=262144,  # never longer than any burst
        default_time2wait=2,
        target_recv_data_segment_length=8192,
        max_outstanding_unexpected_pdus=9,
    )


NAMES = st.sampled_from(sorted(keys.TABLE))
TEXTS = st.one_of(
    st.text(max_size=20),
    st.integers(0, 1 << 40).map(str),
    st.sampled_from(["Yes", "No", "None", "CRC32C,None", *keys.ANSWER_WORDS]),
)


@given(NAMES, TEXTS, st.booleans(), st.booleans())
def test_any_offer(name: str, offer: str, discovery: bool, by_target: bool) -> None:
    """Every offer gets an answer that the originator accepts."""
    ours, theirs = SessionParameters(rdma_extensions=True), SessionParameters()
    try:
        answer = keys.answer(ours, name, offer, discovery, by_target)
    except RemoteProtocolError:
        return
    if answer is None or keys.TABLE[name].kind in (keys.OBSOLETE, keys.LIST):
        return
    if answer != keys.REJECT:
        value = keys.parse(keys.TABLE[name], offer)
        setattr(theirs, keys.TABLE[name].field, value)
    keys.accept(theirs, name, answer)
    if answer != keys.REJECT:
        assert of(name, theirs) == keys.parse(keys.TABLE[name], answer)


@given(NAMES, TEXTS)
def test_any_answer(name: str, result: str) -> None:
    if keys.TABLE[name].kind == keys.OBSOLETE:
        return  # never offered
    offered = SessionParameters()
    try:
        keys.accept(offered, name, result)
    except RemoteProtocolError:
        assert offered == SessionParameters()
