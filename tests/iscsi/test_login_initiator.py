"""The initiator's login against targets that do it their own way, or wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import (
    AuthenticationError,
    LoginError,
    RemoteProtocolError,
    TargetNotFound,
)
from iserblk.iscsi import bhs, keys, pdu
from iserblk.iscsi.login_initiator import MAXIMUM_ROUNDS, LoginInitiator
from iserblk.iscsi.serial import window_size
from tests.iscsi import logins
from tests.iscsi.logins import response, said, stages

SECURITY, OPERATIONAL, FULL = 0, 1, 3
YES = [("RDMAExtensions", "Yes")]


def started() -> LoginInitiator:
    one = logins.initiator()
    one.start()
    return one


def test_first_request() -> None:
    """Operational stage at once, all keys, iSER's own first among them.

    proves: ISER-5.1-9, ISER-6.3-5, ISER-7145-6.7-1
    """
    header, data = logins.initiator().start()
    request = pdu.LoginRequest.unpack_from(header)
    assert header[0] == bhs.LOGIN_REQUEST | bhs.IMMEDIATE
    assert stages(header) == (OPERATIONAL, FULL)
    assert (request.isid, request.tsih, request.cid) == (logins.ISID, 0, 0)
    assert (request.version_max, request.version_min) == (0, 0)
    assert request.data_length == len(data)
    names = list(said((header, data)))
    assert names[:4] == ["InitiatorName", "TargetName", "SessionType", "RDMAExtensions"]
    offered = said((header, data))
    assert offered["InitialR2T"] == "Yes"
    assert offered["ImmediateData"] == "No"
    assert (offered["HeaderDigest"], offered["DataDigest"]) == ("None", "None")
    assert int(offered["MaxOutstandingUnexpectedPDUs"]) >= 2
    # Obsolete keys are not offered (RFC 7143 section 13.25).
    assert not {"IFMarker", "OFMarker", "IFMarkInt", "OFMarkInt"} & set(names)


def test_numbers_of_the_last_response_count() -> None:
    one = started()
    assert one.receive(*response(YES, stat_sn=0xFFFFFFFF, exp_cmd_sn=1, max_cmd_sn=5)) == []
    assert one.done
    assert (one.exp_stat_sn, one.exp_cmd_sn, one.max_cmd_sn) == (0, 1, 5)
    assert one.tsih == logins.TSIH


def test_a_window_that_is_none_is_ignored() -> None:
    """MaxCmdSN below ExpCmdSN - 1 changes nothing (RFC 7143 section 4.2.2.1): no window opens."""
    one = started()
    one.receive(*response(YES, exp_cmd_sn=9, max_cmd_sn=5))
    assert window_size(one.cmd_sn, one.max_cmd_sn) == 0


def test_closed_window() -> None:
    """tgtd begins with a closed window: the first command waits."""
    one = started()
    one.receive(*response(YES, exp_cmd_sn=1, max_cmd_sn=0))
    assert one.done and window_size(one.cmd_sn, one.max_cmd_sn) == 0


def test_more_rounds() -> None:
    """The target does not grant T: we ask again, without keys, until it does. The StatSN of each
    response is acknowledged."""
    one = started()
    for stat_sn in (7, 8, 9):
        (again,) = one.receive(
            *response(YES if stat_sn == 7 else b"", OPERATIONAL, None, stat_sn=stat_sn)
        )
        assert stages(again[0]) == (OPERATIONAL, FULL)
        assert again[1] == b""
        assert pdu.LoginRequest.unpack_from(again[0]).exp_stat_sn == stat_sn + 1
        assert pdu.LoginRequest.unpack_from(again[0]).cmd_sn == 1
    assert one.receive(*response()) == []
    assert one.done


def test_rounds_are_bounded() -> None:
    one = started()
    for _ in range(MAXIMUM_ROUNDS):
        one.receive(*response(b"", OPERATIONAL, None))
    with pytest.raises(RemoteProtocolError, match="no end of login"):
        one.receive(*response(b"", OPERATIONAL, None))


def test_target_offers_keys_of_its_own() -> None:
    """Our next request answers them; declarations need none, unknown keys get NotUnderstood."""
    one = started()
    theirs = [
        ("TargetAlias", "A disk"),
        ("MaxRecvDataSegmentLength", "65536"),
        ("IFMarker", "No"),
        ("TaskReporting", "RFC3720,ResponseFence"),
        ("X-com.example.key", "1"),
    ]
    (answer,) = one.receive(*response(YES + theirs, OPERATIONAL, None))
    assert said(answer) == {
        "IFMarker": "No",
        "TaskReporting": "RFC3720",
        "X-com.example.key": "NotUnderstood",
    }
    assert one.receive(*response()) == []
    agreed = one.parameters
    assert (agreed.target_alias, agreed.max_recv_data_segment_length) == ("A disk", 65536)
    # Declared, and of no effect over iSER. proves: ISER-6.2-2
    assert agreed.initiator_recv_data_segment_length == 8192


def test_last_response_with_offers() -> None:
    """Keys in the last response are good if they need no answer, else a protocol error."""
    one = started()
    assert one.receive(*response([*YES, ("IFMarker", "No"), ("TargetAlias", "x")])) == []
    one = started()
    with pytest.raises(RemoteProtocolError, match="OFMarker"):
        one.receive(*response([*YES, ("OFMarker", "Yes")]))


def test_target_wants_the_security_stage_first() -> None:
    """We follow with AuthMethod=None, and offer again the keys that the target passed over."""
    one = started()
    (security,) = one.receive(*response([("TargetPortalGroupTag", "1")], SECURITY, None))
    assert stages(security[0]) == (SECURITY, OPERATIONAL)
    assert said(security) == {"AuthMethod": "None"}
    (operational,) = one.receive(*response([("AuthMethod", "None")], SECURITY, OPERATIONAL))
    assert stages(operational[0]) == (OPERATIONAL, FULL)
    assert said(operational)["RDMAExtensions"] == "Yes"
    assert "InitiatorName" not in said(operational)
    assert one.receive(*response(YES)) == []
    assert one.done


def test_target_directs_the_security_stage() -> None:
    """The target offers AuthMethod (RFC 7143 appendix B): we answer once."""
    one = started()
    (security,) = one.receive(*response([("AuthMethod", "CHAP,None")], SECURITY, None))
    assert security[1] == b"AuthMethod=None\0"
    (operational,) = one.receive(*response(b"", SECURITY, OPERATIONAL))
    assert "AuthMethod" not in said(operational)


@pytest.mark.parametrize("method", ["CHAP", "KRB5,CHAP", "Reject"])
def test_target_wants_authentication(method: str) -> None:
    one = started()
    with pytest.raises(AuthenticationError, match=f"authentication.*{method}"):
        one.receive(*response([("AuthMethod", method)], SECURITY, None))


def test_text_in_parts() -> None:
    """A response with C is answered by an empty request without T (RFC 7143 section 6.2)."""
    one = started()
    (empty,) = one.receive(*response(b"RDMAExten", OPERATIONAL, None, flags=0x44))
    assert (empty[1], stages(empty[0])) == (b"", (OPERATIONAL, None))
    (again,) = one.receive(*response(b"sions=Yes\0", OPERATIONAL, None))
    assert stages(again[0]) == (OPERATIONAL, FULL)
    assert one.receive(*response()) == []
    assert one.done and one.parameters.rdma_extensions


@pytest.mark.parametrize("said_no", ["No", "NotUnderstood", "Irrelevant", "Reject", None])
def test_target_does_not_agree_to_iser(said_no: str | None) -> None:
    """One No, or none at all, forbids iSER.

    proves: ISER-3.3-2, ISER-5.1-2, ISER-6.3-3, ISER-RC-11
    """
    one = started()
    pairs = [] if said_no is None else [("RDMAExtensions", said_no)]
    with pytest.raises(LoginError, match="does not agree to iSER") as error:
        one.receive(*response(pairs))
    assert error.value.exit_status == 5
    assert not one.done


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (0x0200, LoginError, "found an error"),
        (0x0201, AuthenticationError, "authentication failed"),
        (0x0202, LoginError, "access rules"),
        (0x0203, TargetNotFound, "`iserblk discover HOST` lists"),
        (0x0204, TargetNotFound, "removed"),
        (0x0205, LoginError, "version"),
        (0x0206, LoginError, "too many connections"),
        (0x0207, LoginError, "parameter"),
        (0x0208, LoginError, "session"),
        (0x0209, LoginError, "session type"),
        (0x020A, LoginError, "does not exist"),
        (0x020B, LoginError, "during login"),
        (0x0300, LoginError, "internal error"),
        (0x0301, LoginError, "unavailable"),
        (0x0302, LoginError, "out of resources"),
        (0x02FF, LoginError, "initiator error 02 ff"),
        (0x0399, LoginError, "target error 03 99"),
        (0x0901, LoginError, "status 09 01"),
    ],
)
def test_refused(status: int, kind: type[LoginError], words: str) -> None:
    one = started()
    with pytest.raises(kind, match=words) as error:
        one.receive(*response(status=status))
    assert type(error.value) is kind
    assert error.value.status == status
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "words"), [(0x0101, "temporarily"), (0x0102, "permanently"), (0x0107, "redirection")]
)
def test_redirected(status: int, words: str) -> None:
    one = started()
    moved = [("TargetAddress", "10.0.0.9:3261"), ("TargetAddress", "[::1]")]
    with pytest.raises(LoginError, match=f"{words}.*10.0.0.9:3261") as error:
        one.receive(*response(moved, status=status))
    assert error.value.address == "10.0.0.9:3261"
    one = started()
    with pytest.raises(LoginError, match=words) as error:
        one.receive(*response(status=status))
    assert error.value.address == ""


def test_rejected() -> None:
    reject = pdu.Reject(reason=5, data_length=48, stat_sn=0, exp_cmd_sn=1, max_cmd_sn=1).pack()
    with pytest.raises(LoginError, match="command not supported"):
        started().receive(reject, bytes(48))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (response(YES, itt=4), "another request"),
        (response(YES, isid=b"\x80other"), "another request"),
        (response(YES, OPERATIONAL, OPERATIONAL), "stage 1"),
        (response(YES, SECURITY, FULL), "stage 0"),
        (response(YES, 2, None), "stage 2"),
        (response(YES, FULL, None), "stage 3"),
        (response(YES, opcode=bhs.TEXT_RESPONSE), "opcode 0x24"),
        (response(YES, flags=0xC7), "T and C"),
        (response([("MaxConnections", "2")]), "MaxConnections=2 answered"),
        (response([("MaxConnections", "NotUnderstood")]), "MaxConnections"),
        (response([("X-com.example", "Reject")]), "nothing was asked"),
        (response([("iSERHelloRequired", "Yes")]), "wrong side"),
        (response(b"RDMAExtensions"), "no key=value"),
        (response(b"A=1\0A=2\0"), "twice"),
        ((bytes(47), b""), "47 bytes"),
        ((b"", b""), "0 bytes"),
    ],
)
def test_nonsense(message: tuple[bytes, bytes], words: str) -> None:
    one = started()
    with pytest.raises(RemoteProtocolError, match=words):
        one.receive(*message)
    assert not one.done


def test_a_version_that_we_do_not_speak() -> None:
    with pytest.raises(LoginError, match="version 1"):
        started().receive(*response(YES, version_active=1))


def test_transit_that_was_not_asked_for() -> None:
    one = started()
    one.receive(*response(b"RDMA", OPERATIONAL, None, flags=0x44))
    with pytest.raises(RemoteProtocolError, match="stage 3"):
        one.receive(*response(b"Extensions=Yes\0"))


def test_a_key_in_two_responses() -> None:
    one = started()
    one.receive(*response(YES, OPERATIONAL, None))
    with pytest.raises(RemoteProtocolError, match="RDMAExtensions in two"):
        one.receive(*response(YES))


PAIRS = st.lists(
    st.tuples(
        st.sampled_from([*keys.TABLE, "AuthMethod", "X-a"]),
        st.sampled_from(["Yes", "No", "None", "1", "8192", "CHAP", *keys.ANSWER_WORDS, "x"]),
    ),
    max_size=6,
    unique_by=lambda pair: pair[0],
)
FLAGS = st.sampled_from([0x00, 0x04, 0x44, 0x81, 0x83, 0x87, 0xC7])


@given(st.lists(st.tuples(FLAGS, PAIRS, st.sampled_from([0, 0, 0, 0x0101, 0x0203])), max_size=6))
def test_any_target(script: list[tuple[int, list[tuple[str, str]], int]]) -> None:
    """After any well-formed response there is a request, an end, or a clear error."""
    one = started()
    for flags, pairs, status in script:
        try:
            requests = one.receive(*response(pairs, flags=flags, status=status))
        except (RemoteProtocolError, LoginError):
            return
        assert one.done is (not requests)
        if one.done:
            assert one.parameters.rdma_extensions
            return
        for header, data in requests:
            assert pdu.LoginRequest.unpack_from(header).data_length == len(data)


@given(st.binary(max_size=60), st.binary(max_size=200))
def test_any_bytes(header: bytes, data: bytes) -> None:
    for raw in (header, response(data)[0][:16] + header, response(data)[0]):
        one = started()
        try:
            one.receive(raw, data)
        except (RemoteProtocolError, LoginError):
            assert not one.done
