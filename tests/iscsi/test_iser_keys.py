"""The keys of RFC 7145 section 6, offered to our two ends."""

from __future__ import annotations

import pytest

from iserblk.errors import LoginError
from iserblk.iscsi import keys
from iserblk.iscsi.keys import SessionParameters
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, request, response, said, target

WHO: Pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
YES: Pairs = [("RDMAExtensions", "Yes")]

# Name, a value, the answer of our target and of our initiator; None: a declaration, not answered.
NEGOTIATED = [
    ("RDMAExtensions", "Yes", "Yes"),
    ("TargetRecvDataSegmentLength", "4096", "4096"),
    ("InitiatorRecvDataSegmentLength", "4096", "4096"),
    ("IFMarker", "No", "No"),
    ("OFMarker", "No", "No"),
    ("MaxOutstandingUnexpectedPDUs", "16", None),
    ("MaxAHSLength", "512", None),
]
OF_THE_INITIATOR = [
    ("TaggedBufferForSolicitedDataOnly", "Yes", None),
    ("iSERHelloRequired", "No", None),
]


@pytest.mark.parametrize(("name", "offer", "expected"), [*NEGOTIATED, *OF_THE_INITIATOR])
def test_target_knows_every_key(name: str, offer: str, expected: str | None) -> None:
    """proves: ISER-3.3-8, ISER-3.3-9, ISER-7145-12-1"""
    other = target()
    pairs = WHO + (YES if name != "RDMAExtensions" else []) + [(name, offer)]
    ((header, data),) = other.receive(*request(pairs))
    answer = said((header, data)).get(name)
    assert other.done
    if expected is None and name == "MaxOutstandingUnexpectedPDUs":
        assert answer is not None and int(answer) >= 2  # its own declaration
    else:
        assert answer == expected


@pytest.mark.parametrize(("name", "offer", "expected"), NEGOTIATED[3:])
def test_initiator_knows_every_key(name: str, offer: str, expected: str | None) -> None:
    """Also keys that it has not offered before. proves: ISER-3.3-8, ISER-3.3-9, ISER-7145-12-1"""
    one = logins.initiator()
    asked = said(one.start())
    (message,) = one.receive(*response([*YES, (name, offer)], 1, None))
    assert said(message).get(name) == (None if name in asked else expected)
    assert one.receive(*response()) == []


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

    proves: ISER-6.1-1, ISER-5.1-12, ISER-GEN-8.1.6.1-2
    """
    other = target()
    asked = [("HeaderDigest", digests), ("DataDigest", digests)]
    ((header, data),) = other.receive(*request(WHO + YES + asked))
    answer = said((header, data))
    assert other.done
    for name in ("HeaderDigest", "DataDigest"):
        assert answer[name] == ("None" if "None" in digests else "Irrelevant")
    assert other.parameters.header_digest == other.parameters.data_digest == "None"


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
