"""Login to Traditional iSCSI: no RDMAExtensions, digests, MaxRecvDataSegmentLength."""

from __future__ import annotations

import pytest

from iserblk.errors import LoginError
from iserblk.iscsi import pdu
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.iscsi.text import decode_untrusted
from tests.iscsi import logins


def initiator(**config: object) -> LoginInitiator:
    return LoginInitiator(
        LoginInitiatorConfig(
            logins.INITIATOR,
            logins.TARGET,
            logins.ISID,
            receive_data_segment_length=262144,
            rdma=False,
            **config,  # type: ignore[arg-type]
        )
    )


def test_what_both_agree_on() -> None:
    one = initiator(immediate_data=True)
    other = logins.target(rdma=False, receive_data_segment_length=131072)
    assert logins.login(one, other) == 1
    assert one.done and other.done
    for agreed in (one.parameters, other.parameters):
        assert not agreed.rdma_extensions
        assert (agreed.header_digest, agreed.data_digest) == ("None", "None")
        assert (agreed.initial_r2t, agreed.immediate_data) == (False, True)
        assert (agreed.max_burst_length, agreed.first_burst_length) == (1 << 20, 65536)
        assert agreed.target_recv_data_segment_length == 131072
        assert agreed.initiator_recv_data_segment_length == 262144
        assert agreed.data_pdu_in_order and agreed.data_sequence_in_order
        assert agreed.max_outstanding_r2t == 1
    assert one.parameters.max_recv_data_segment_length == 131072
    assert other.parameters.max_recv_data_segment_length == 262144


def test_nothing_of_iser_is_said() -> None:
    """An iserblk that prefers Traditional iSCSI does not offer RDMAExtensions.

    proves: ISER-5.1-8, ISER-6.3-4
    """
    names = {name for name, _ in decode_untrusted(initiator().start()[1])}
    assert not names & {
        "RDMAExtensions",
        "TargetRecvDataSegmentLength",
        "InitiatorRecvDataSegmentLength",
        "MaxOutstandingUnexpectedPDUs",
    }


@pytest.mark.parametrize(
    ("header", "data"),
    [("CRC32C", "None"), ("None,CRC32C", "CRC32C,None"), ("CRC32C,None", "CRC32C")],
)
def test_digests(header: str, data: str) -> None:
    one, other = initiator(header_digest=header, data_digest=data), logins.target(rdma=False)
    logins.login(one, other)
    for agreed in (one.parameters, other.parameters):
        assert agreed.header_digest == header.partition(",")[0]
        assert agreed.data_digest == data.partition(",")[0]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([("HeaderDigest", "Reject")], "header-digest=crc32c,none"),
        ([("HeaderDigest", "None")], "header-digest=crc32c,none"),
        ([], "header digests"),
    ],
)
def test_digests_that_the_target_has_not(answer: logins.Pairs, words: str) -> None:
    one = initiator(header_digest="CRC32C")
    one.start()
    with pytest.raises(LoginError, match=words):
        one.receive(*logins.response(answer))
    other = initiator(header_digest="CRC32C,None")
    other.start()
    other.receive(*logins.response(answer))
    assert other.done and other.parameters.header_digest == "None"


def test_an_initiator_that_offers_rdma_extensions_on_a_stream() -> None:
    """The target answers No; the initiator goes on with Traditional iSCSI, or ends."""
    other = logins.target(rdma=False)
    pairs = [
        ("InitiatorName", logins.INITIATOR),
        ("TargetName", logins.TARGET),
        ("RDMAExtensions", "Yes"),
    ]
    ((header, data),) = other.receive(*logins.request(pairs))
    assert ("RDMAExtensions", "No") in decode_untrusted(data)
    assert other.done and not other.parameters.rdma_extensions
    assert pdu.LoginResponse.unpack_from(header).status == 0


def test_the_target_declares_what_it_takes_once() -> None:
    other = logins.target(rdma=False, receive_data_segment_length=131072)
    pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
    ((_, data),) = other.receive(*logins.request(pairs, following=None))
    assert ("MaxRecvDataSegmentLength", "131072") in decode_untrusted(data)
    ((_, data),) = other.receive(*logins.request([]))
    assert not decode_untrusted(data) and other.done
    # The initiator did not declare one: the default.
    assert other.parameters.initiator_recv_data_segment_length == 8192
