"""The keys of RFC 7145 section 6, offered to our two ends."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from iserblk.errors import LoginError, RemoteProtocolError
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.iscsi import keys
from iserblk.iscsi.chap import Credentials
from iserblk.iscsi.keys import SessionParameters
from iserblk.secret import Secret
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, request, response, said, target

WHO: Pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
YES: Pairs = [("RDMAExtensions", "Yes")]


class Offer(NamedTuple):
    """An offer of a key. ``answer``: ours; None: a declaration, which is not answered. ``outcome``:
    the value of ``field`` that follows."""

    name: str
    value: str
    answer: str | None
    field: str
    outcome: object


# Every key of RFC 7145 section 6, and in RFC 7143 for the keys that it takes from there.
EACH_KEY = [
    Offer("HeaderDigest", "CRC32C,None", "None", "header_digest", "None"),  # 6.1
    Offer("DataDigest", "CRC32C,None", "None", "data_digest", "None"),
    Offer("MaxRecvDataSegmentLength", "512", None, "max_recv_data_segment_length", 512),  # 6.2
    Offer("RDMAExtensions", "Yes", "Yes", "rdma_extensions", True),  # 6.3
    # 6.4, 6.5: the minimum of both ends
    Offer("TargetRecvDataSegmentLength", "4096", "4096", "target_recv_data_segment_length", 4096),
    Offer(
        "InitiatorRecvDataSegmentLength", "4096", "4096", "initiator_recv_data_segment_length", 4096
    ),
    Offer("OFMarker", "Yes", "No", "of_marker", False),  # 6.6
    Offer("IFMarker", "Yes", "No", "if_marker", False),
    Offer("MaxOutstandingUnexpectedPDUs", "16", None, "max_outstanding_unexpected_pdus", 16),  # 6.7
    Offer("MaxAHSLength", "512", None, "max_ahs_length", 512),  # 6.8
]
OF_THE_INITIATOR = [
    Offer(
        "TaggedBufferForSolicitedDataOnly",
        "Yes",
        None,
        "tagged_buffer_for_solicited_data_only",
        True,
    ),  # 6.9
    Offer("iSERHelloRequired", "No", None, "iser_hello_required", False),  # 6.10
]


# shows: SYSTEM-4
@pytest.mark.parametrize("offer", [*EACH_KEY, *OF_THE_INITIATOR], ids=lambda each: each.name)
def test_target_knows_every_key(offer: Offer) -> None:
    """Each has its answer, and takes effect.

    proves: ISER-3.3-8, ISER-3.3-9, ISER-7145-12-1
    """
    other = target()
    pairs = WHO + (YES if offer.name != "RDMAExtensions" else []) + [(offer.name, offer.value)]
    ((header, data),) = other.receive(*request(pairs))
    answer = said((header, data)).get(offer.name)
    assert other.done
    assert getattr(other.parameters, offer.field) == offer.outcome
    if offer.name == "MaxOutstandingUnexpectedPDUs":
        assert answer is not None and int(answer) >= 2  # its own declaration
    else:
        assert answer == offer.answer


# shows: SYSTEM-4
@pytest.mark.parametrize("offer", EACH_KEY, ids=lambda each: each.name)
def test_initiator_knows_every_key(offer: Offer) -> None:
    """Also keys that it has not offered itself: its answer is in its next request. To what it has
    offered, the same words are the target's answer.

    proves: ISER-3.3-8, ISER-3.3-9, ISER-7145-12-1
    """
    one = logins.initiator()
    asked = said(one.start())
    value = offer.value if offer.name not in asked else offer.answer or offer.value
    pairs = [*(YES if offer.name != "RDMAExtensions" else []), (offer.name, value)]
    (message,) = one.receive(*response(pairs, 1, None))
    assert said(message).get(offer.name) == (None if offer.name in asked else offer.answer)
    assert one.receive(*response()) == []
    assert one.done and getattr(one.parameters, offer.field) == offer.outcome


@pytest.mark.parametrize("offer", OF_THE_INITIATOR, ids=lambda each: each.name)
def test_initiator_alone_declares_these(offer: Offer) -> None:
    """A target that sends one breaks the protocol; ours answers it with nothing.

    proves: ISER-7145-6.9-1
    """
    one = logins.initiator()
    one.start()
    with pytest.raises(RemoteProtocolError, match="wrong side"):
        one.receive(*response([*YES, (offer.name, offer.value)], 1, None))
    for value in ("Yes", "No") if offer.name.startswith("Tagged") else ("No",):
        other = target()
        ((header, data),) = other.receive(*request([*WHO, *YES, (offer.name, value)]))
        assert other.done and offer.name not in said((header, data))
        assert getattr(other.parameters, offer.field) is (value == "Yes")


@pytest.mark.parametrize(
    ("said", "config", "meant"),
    [
        ([], {}, None),  # by running code, which does not know the key: Yes
        ([], {"solicited_only": False}, False),
        ([("iSERHelloRequired", "Yes")], {}, False),  # this initiator knows RFC 7145
        ([("TaggedBufferForSolicitedDataOnly", "Yes")], {"solicited_only": False}, True),
        ([("TaggedBufferForSolicitedDataOnly", "No")], {}, False),
    ],
)
def test_what_silence_means(said: Pairs, config: dict[str, object], meant: bool | None) -> None:
    """The default of TaggedBufferForSolicitedDataOnly is No, but for initiators that are not of the
    specification. proves: ISER-7145-6.9-1"""
    other = target(**config)
    other.receive(*request([*WHO, *YES, *said]))
    assert other.done
    assert other.parameters.tagged_buffer_for_solicited_data_only is meant


def test_data_lengths_are_declared_by_nobody() -> None:
    """MaxRecvDataSegmentLength is not said; where the peer says it, it has no effect.

    proves: ISER-6.2-1, ISER-6.2-2, ISER-7145-6.2-1
    """
    one, other = logins.initiator(), target()
    first = one.start()
    assert "MaxRecvDataSegmentLength" not in said(first)
    header, data = request([*said(first).items(), ("MaxRecvDataSegmentLength", "512")])
    ((_, text),) = other.receive(header, data)
    assert "MaxRecvDataSegmentLength" not in said((b"", text))
    assert one.receive(*response(text + b"MaxRecvDataSegmentLength=512\0")) == []
    for agreed in (one.parameters, other.parameters):
        assert agreed.max_recv_data_segment_length == 512
        assert agreed.initiator_recv_data_segment_length == 8192
        assert agreed.target_recv_data_segment_length == 8192


@pytest.mark.parametrize("word", ["Yes", "No"])
def test_hello_is_required_by_nobody_who_does_not_say_so(word: str) -> None:
    """iSERHelloRequired: the initiator declares it, the default is No; ours does not want it.

    proves: ISER-7145-6.10-1
    """
    assert not SessionParameters().iser_hello_required
    assert "iSERHelloRequired" not in said(logins.initiator().start())
    wish = SessionParameters()
    assert keys.answer(wish, "iSERHelloRequired", word, discovery=False) is None
    assert wish.iser_hello_required is (word == "Yes")


@pytest.mark.parametrize(
    ("word", "required"), [(None, True), ("Yes", True), ("No", False), ("NotUnderstood", None)]
)
def test_hello_is_declared(word: str | None, required: bool | None) -> None:
    """A target that does not know the key, or says No, gets no Hello; the login goes on, as our
    initiator has allocated its resources before it.

    proves: ISER-7145-5.1.1-1, ISER-7145-5.1.3-3, ISER-7145-6.10-2
    """
    one = logins.initiator(hello=True)
    assert said(one.start())["iSERHelloRequired"] == "Yes"
    pairs = YES if word is None else [*YES, ("iSERHelloRequired", word)]
    assert one.receive(*response(pairs)) == []
    assert one.done and one.parameters.iser_hello_required is required


def test_both_ends_agree_on_a_hello() -> None:
    one, other = logins.initiator(hello=True), target()
    logins.login(one, other)
    assert one.parameters.iser_hello_required and other.parameters.iser_hello_required


# shows: SYSTEM-7
def test_no_hello_in_a_discovery_session() -> None:
    assert "iSERHelloRequired" not in said(logins.initiator(hello=True, discovery=True).start())


def test_error_recovery_level_0_is_what_we_ask_for() -> None:
    """proves: ISER-RC-22"""
    one, other = logins.initiator(), target()
    assert said(one.start())["ErrorRecoveryLevel"] == "0"
    one = logins.initiator()
    logins.login(one, other)
    assert one.parameters.error_recovery_level == other.parameters.error_recovery_level == 0


@pytest.mark.parametrize("digests", ["CRC32C", "CRC32C,None", "None"])
def test_digests_that_are_asked_for(digests: str) -> None:
    """With RDMAExtensions=Yes there are no digests, in spite of the keys.

    proves: ISER-6.1-1, ISER-5.1-12, ISER-GEN-8.1.6.1-2, ISER-GEN-8.1.3-1, ISER-IB00-3.1.6.1-4
    """
    other = target()
    asked = [("HeaderDigest", digests), ("DataDigest", digests)]
    ((header, data),) = other.receive(*request(WHO + YES + asked))
    answer = said((header, data))
    assert other.done
    for name in ("HeaderDigest", "DataDigest"):
        assert answer[name] == ("None" if "None" in digests else "Irrelevant")
    assert other.parameters.header_digest == other.parameters.data_digest == "None"


@pytest.mark.parametrize("name", ["HeaderDigest", "DataDigest"])
def test_digests_that_nobody_asked_for(name: str) -> None:
    """Our initiator offers None alone, and takes no other answer.

    proves: ISER-5.1-12, ISER-GEN-8.1.3-1, ISER-IB00-3.1.6.1-4
    """
    one = logins.initiator()
    assert said(one.start())[name] == "None"
    with pytest.raises(RemoteProtocolError, match=name):
        one.receive(*response([*YES, (name, "CRC32C")]))
    assert not one.done


def test_no_iser_no_session() -> None:
    """RDMAExtensions=No on either side ends the login: the connection is iSER's already.

    proves: ISER-3.3-2, ISER-RC-11
    """
    other = target()
    ((header, _),) = other.receive(*request([*WHO, ("RDMAExtensions", "No")]))
    assert other.failed and header[36] == 2
    one = logins.initiator()
    one.start()
    with pytest.raises(LoginError):
        one.receive(*response([("RDMAExtensions", "No")]))
    assert not one.done


# -- the mode is settled first -------------------------------------------------------------------


def test_an_offer_of_the_target_is_answered_at_once() -> None:
    """In the next request, whatever the stage of the login: by an initiator of Traditional iSCSI
    with No, and by one that has not come to its own offer yet with Yes.

    proves: ISER-6.3-7
    """
    plain = logins.initiator(rdma=False)
    assert "RDMAExtensions" not in said(plain.start())
    (message,) = plain.receive(*response(YES, 1, None))
    assert said(message)["RDMAExtensions"] == "No"
    assert plain.receive(*response()) == [] and not plain.parameters.rdma_extensions

    one = logins.initiator(credentials=Credentials("host", Secret("hush-hush-hush")))
    one.start()
    one.receive(*response([("AuthMethod", "CHAP")], 0, None))
    challenge = [("CHAP_A", "5"), ("CHAP_I", "7"), ("CHAP_C", "0x" + "a5" * 16)]
    one.receive(*response(challenge, 0, None))
    (message,) = one.receive(*response(YES, 0, 1))
    assert said(message)["RDMAExtensions"] == "Yes"
    assert one.receive(*response()) == []
    assert one.done and one.parameters.rdma_extensions


def test_some_values_depend_on_the_mode() -> None:
    """InitialR2T and the lengths of data segments are offered as the mode has them.

    proves: ISER-6.3-9
    """
    iser, plain = (
        said(logins.initiator(rdma=rdma, immediate_data=True).start()) for rdma in (True, False)
    )
    of_iser = {"TargetRecvDataSegmentLength", "InitiatorRecvDataSegmentLength"}
    assert of_iser <= set(iser) and not of_iser & set(plain)
    assert "MaxRecvDataSegmentLength" in plain and "MaxRecvDataSegmentLength" not in iser
    assert (iser["InitialR2T"], plain["InitialR2T"]) == ("Yes", "No")


@pytest.mark.parametrize("offered", [False, True], ids=["no offer", "No"])
def test_without_iser_the_login_goes_on(offered: bool) -> None:
    """On a byte stream, where the target offers iSER, or the initiator says No to it: the same
    login ends in Traditional iSCSI, under its own rules (digests, MaxRecvDataSegmentLength).

    proves: ISER-5.1-4, ISER-2.2-1
    """
    one = logins.initiator(rdma=False, header_digest="CRC32C")
    one.start()
    (message,) = one.receive(*response(YES, 1, None))
    assert said(message)["RDMAExtensions"] == "No"
    rest = [("HeaderDigest", "CRC32C"), ("MaxRecvDataSegmentLength", "4096")]
    assert one.receive(*response(rest)) == []
    assert one.done and not one.parameters.rdma_extensions
    assert one.parameters.header_digest == "CRC32C"
    assert one.parameters.target_recv_data_segment_length == 4096

    other = target(rdma=False)
    pairs = [*WHO, *([("RDMAExtensions", "No")] if offered else []), ("HeaderDigest", "CRC32C")]
    ((header, data),) = other.receive(*request(pairs))
    answer = said((header, data))
    assert other.done and not other.failed
    assert answer["HeaderDigest"] == "CRC32C" and "MaxRecvDataSegmentLength" in answer
    assert not other.parameters.rdma_extensions
    assert other.parameters.header_digest == "CRC32C"


def test_both_take_more_unexpected_pdus_than_normal_operation_has() -> None:
    """What each end declares: the other may send any PDU beside commands, at any time, as far as
    its own slots for such PDUs go. proves: ISER-6.7-2"""
    asked = said(logins.initiator().start())
    (answer,) = target().receive(*request(list(asked.items())))
    ours, theirs = (int(each["MaxOutstandingUnexpectedPDUs"]) for each in (asked, said(answer)))
    assert ours == theirs == 32
    assert theirs >= CONTROL_SLOTS  # of an initiator: pings, their answers, task management, logout
