"""Login on a byte stream: whether the connection becomes iSER, or goes on in Traditional iSCSI."""

from __future__ import annotations

import pytest

from iserblk.errors import IserRefused, LoginError
from iserblk.iscsi import pdu
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.iscsi.login_target import INITIATOR_ERROR, LoginTarget
from iserblk.iscsi.text import decode_untrusted
from tests.iscsi import logins
from tests.vectors import streaming_login as golden

STREAM = 262144  # MaxRecvDataSegmentLength on a byte stream


def initiator(**config: object) -> LoginInitiator:
    return LoginInitiator(
        LoginInitiatorConfig(
            logins.INITIATOR,
            logins.TARGET,
            logins.ISID,
            max_recv_data_segment_length=STREAM,
            **config,  # type: ignore[arg-type]
        )
    )


def target(**config: object) -> LoginTarget:
    return logins.target(
        receive_data_segment_length=16384, max_recv_data_segment_length=131072, **config
    )


def test_both_speak_iser() -> None:
    """Digests are None, and the lengths are those of iSER's keys, in both ends."""
    one, other = initiator(header_digest="CRC32C,None", data_digest="CRC32C"), target()
    assert logins.login(one, other) == 1
    for agreed in (one.parameters, other.parameters):
        assert agreed.rdma_extensions
        assert (agreed.header_digest, agreed.data_digest) == ("None", "None")
        assert agreed.target_recv_data_segment_length == 8192
        assert agreed.initiator_recv_data_segment_length == 8192


def test_the_first_key_is_rdma_extensions() -> None:
    """And the keys of both modes are offered at once (RFC 7145 section 6.3)."""
    names = [name for name, _ in decode_untrusted(initiator().start()[1])]
    assert names[3] == "RDMAExtensions"
    assert {"MaxRecvDataSegmentLength", "InitiatorRecvDataSegmentLength"} <= set(names)


def test_golden_bytes() -> None:
    """The answers to a login that is written from the standards."""
    (answer,) = logins.target(max_recv_data_segment_length=STREAM).receive(
        golden.LOGIN_REQUEST[:48], golden.LOGIN_REQUEST[48 : 48 + 182]
    )
    padding = -len(answer[1]) & 3
    assert answer[0] + answer[1] + bytes(padding) == golden.LOGIN_RESPONSE


# shows: SYSTEM-5
@pytest.mark.parametrize("says", ["No", "NotUnderstood", "Irrelevant", None])
def test_a_target_without_iser(says: str | None) -> None:
    """The same login ends in Traditional iSCSI."""
    one = initiator(needs_rdma=False, header_digest="CRC32C,None")
    one.start()
    answers = [("MaxRecvDataSegmentLength", "65536"), ("HeaderDigest", "CRC32C")]
    one.receive(*logins.response([*answers, *([("RDMAExtensions", says)] if says else [])]))
    agreed = one.parameters
    assert one.done and not agreed.rdma_extensions
    assert (agreed.header_digest, agreed.data_digest) == ("CRC32C", "None")
    assert agreed.target_recv_data_segment_length == 65536
    assert agreed.initiator_recv_data_segment_length == STREAM


def test_a_user_who_wants_iser_only() -> None:
    one = initiator()
    one.start()
    with pytest.raises(IserRefused):
        one.receive(*logins.response([("RDMAExtensions", "No")]))


def test_digests_that_traditional_iscsi_needs() -> None:
    one = initiator(needs_rdma=False, header_digest="CRC32C")
    one.start()
    with pytest.raises(LoginError, match="header-digest"):
        one.receive(*logins.response([("RDMAExtensions", "No"), ("HeaderDigest", "None")]))


@pytest.mark.parametrize("discovery", [False, True])
def test_an_initiator_of_traditional_iscsi(discovery: bool) -> None:
    """It is told nothing of iSER, and may have digests."""
    one = LoginInitiator(
        LoginInitiatorConfig(
            logins.INITIATOR,
            "" if discovery else logins.TARGET,
            logins.ISID,
            rdma=False,
            discovery=discovery,
            header_digest="CRC32C",
            receive_data_segment_length=STREAM,
        )
    )
    other = target()
    (answer,) = other.receive(*one.start())
    assert "RDMAExtensions" not in logins.said(answer)
    assert logins.said(answer)["MaxRecvDataSegmentLength"] == "131072"
    one.receive(*answer)
    for agreed in (one.parameters, other.parameters):
        assert not agreed.rdma_extensions and agreed.header_digest == "CRC32C"
        assert agreed.target_recv_data_segment_length == 131072
        assert agreed.initiator_recv_data_segment_length == STREAM


def test_a_discovery_session_stays_a_byte_stream() -> None:
    one, other = initiator(discovery=True), target()
    logins.login(one, other)
    assert not one.parameters.rdma_extensions and not other.parameters.rdma_extensions


def test_a_portal_group_of_traditional_iscsi() -> None:
    """RDMAExtensions=Yes is answered No, and the login goes on."""
    one, other = initiator(needs_rdma=False, header_digest="CRC32C,None"), target(takes_iser=False)
    (answer,) = other.receive(*one.start())
    assert logins.said(answer)["RDMAExtensions"] == "No"
    one.receive(*answer)
    for agreed in (one.parameters, other.parameters):
        assert not agreed.rdma_extensions and agreed.header_digest == "CRC32C"
    assert one.done and other.done


def test_a_portal_group_of_iser() -> None:
    """A login that does not ask for iSER is refused, but discovery is not."""
    one, other = initiator(), target(takes_traditional=False)
    logins.login(one, other)
    assert one.parameters.rdma_extensions and other.parameters.rdma_extensions
    other = target(takes_traditional=False)
    who = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
    ((header, _),) = other.receive(*logins.request(who))
    assert pdu.LoginResponse.unpack_from(header).status == INITIATOR_ERROR
    assert other.failed and "takes iSER only" in other.problem
    one, other = initiator(discovery=True), target(takes_traditional=False)
    logins.login(one, other)
    assert one.done and other.done


def test_an_offer_that_comes_too_late() -> None:
    """The key belongs into the first text of the operational stage; later it is answered No."""
    other = target()
    who = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
    other.receive(*logins.request([*who, ("HeaderDigest", "CRC32C")], following=None))
    (answer,) = other.receive(*logins.request([("RDMAExtensions", "Yes")]))
    assert logins.said(answer)["RDMAExtensions"] == "No"
    assert other.done and other.parameters.header_digest == "CRC32C"


def test_a_security_stage_comes_first() -> None:
    other = target()
    who = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
    other.receive(
        *logins.request([*who, ("AuthMethod", "None")], pdu.SECURITY_STAGE, pdu.OPERATIONAL_STAGE)
    )
    (answer,) = other.receive(*logins.request([("RDMAExtensions", "Yes")]))
    assert logins.said(answer)["RDMAExtensions"] == "Yes"
    assert other.done and other.parameters.rdma_extensions


def test_out_of_resources() -> None:
    """The refusal takes the place of the final response, with its StatSN.

    proves: ISER-10.1.3.1-4
    """
    other = logins.target(max_recv_data_segment_length=STREAM)
    other.receive(golden.LOGIN_REQUEST[:48], golden.LOGIN_REQUEST[48 : 48 + 182])
    assert other.done
    header, data = other.out_of_resources("no memory")
    # (The command window is open already, which means nothing in a refusal.)
    assert header[:32] + header[36:] == golden.OUT_OF_RESOURCES[:32] + golden.OUT_OF_RESOURCES[36:]
    assert data == b"" and other.failed and not other.done
    assert other.problem == "no connection resources: no memory"
    one = logins.initiator()
    one.start()
    answer = logins.response(status=int.from_bytes(header[36:38], "big"), following=None)
    with pytest.raises(LoginError, match=r"0302|resources") as error:
        one.receive(*answer)
    assert error.value.status == 0x0302
