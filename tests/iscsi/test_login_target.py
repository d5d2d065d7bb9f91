"""The target's login against initiators that do it their own way, or wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, keys, login_target, pdu
from iserblk.iscsi.login_target import LoginTarget
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, is_continued, request, said, stages, target

SECURITY, OPERATIONAL, FULL = 0, 1, 3
WHO: Pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
YES: Pairs = [("RDMAExtensions", "Yes")]


def ask(other: LoginTarget, message: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """The target's only response to a request."""
    (answer,) = other.receive(*message)
    return answer


def status(answer: tuple[bytes, bytes]) -> int:
    return pdu.LoginResponse.unpack_from(answer[0]).status


def test_one_round() -> None:
    other = target()
    header, data = ask(other, request(WHO + YES))
    response = pdu.LoginResponse.unpack_from(header)
    assert stages(header) == (OPERATIONAL, FULL)
    assert (response.isid, response.itt, response.tsih) == (logins.ISID, 5, logins.TSIH)
    # CmdSN and StatSN begin where the initiator says; the window is the queue's depth.
    assert (response.stat_sn, response.exp_cmd_sn, response.max_cmd_sn) == (9, 100, 227)
    assert (other.stat_sn, other.exp_cmd_sn, other.max_cmd_sn) == (10, 100, 227)
    assert said((header, data)) == {"TargetPortalGroupTag": "1", "RDMAExtensions": "Yes"}
    assert other.done and other.parameters.rdma_extensions


def test_keys_that_nobody_offers_have_their_defaults() -> None:
    other = target()
    ask(other, request(WHO + YES))
    agreed = other.parameters
    assert (agreed.max_burst_length, agreed.first_burst_length) == (262144, 65536)
    assert (agreed.default_time2wait, agreed.default_time2retain) == (2, 0)
    assert agreed.initiator_recv_data_segment_length == 8192
    assert agreed.tagged_buffer_for_solicited_data_only is None


def test_window_wraps() -> None:
    other = target()
    ask(other, request(WHO + YES, cmd_sn=0xFFFFFFFF))
    assert (other.exp_cmd_sn, other.max_cmd_sn) == (0xFFFFFFFF, 126)


def test_security_stage_first() -> None:
    """libiscsi's way: it says twice who it is, and AuthMethod offers CHAP and None."""
    other = target()
    first = ask(other, request([*WHO, ("AuthMethod", "CHAP,None")], SECURITY, OPERATIONAL))
    assert stages(first[0]) == (SECURITY, OPERATIONAL)
    assert said(first) == {"TargetPortalGroupTag": "1", "AuthMethod": "None"}
    assert pdu.LoginResponse.unpack_from(first[0]).tsih == 0
    second = ask(other, request(WHO + YES))
    assert stages(second[0]) == (OPERATIONAL, FULL)
    assert said(second) == {"RDMAExtensions": "Yes"}
    assert pdu.LoginResponse.unpack_from(second[0]).tsih == logins.TSIH
    assert other.done


def test_security_stage_and_then_full_feature_phase() -> None:
    """The operational stage cannot be passed over: iSER has to be agreed on."""
    other = target()
    first = ask(other, request(WHO, SECURITY, FULL))
    assert stages(first[0]) == (SECURITY, OPERATIONAL)
    assert not other.done
    assert stages(ask(other, request(YES))[0]) == (OPERATIONAL, FULL)


def test_discovery_goes_straight_from_the_security_stage() -> None:
    other = target()
    pairs = [("InitiatorName", logins.INITIATOR), ("SessionType", "Discovery")]
    assert stages(ask(other, request(pairs, SECURITY, FULL))[0]) == (SECURITY, FULL)
    assert other.done and other.discovery and not other.parameters.rdma_extensions


def test_several_rounds() -> None:
    other = target()
    first = ask(other, request(WHO + YES, OPERATIONAL, None))
    assert stages(first[0]) == (OPERATIONAL, None)
    second = ask(other, request([("MaxBurstLength", "65536")], OPERATIONAL, None))
    assert said(second) == {"MaxBurstLength": "65536"}
    last = ask(other, request([]))
    assert (stages(last[0]), last[1]) == ((OPERATIONAL, FULL), b"")
    assert [pdu.LoginResponse.unpack_from(a[0]).stat_sn for a in (first, second, last)] == [
        9,
        10,
        11,
    ]


def test_target_offers_iser() -> None:
    """Where the initiator does not, in the first response of the operational stage; and the login
    does not end before the answer. proves: ISER-6.3-6"""
    other = target()
    first = ask(other, request(WHO))
    assert stages(first[0]) == (OPERATIONAL, None)
    assert said(first)["RDMAExtensions"] == "Yes"
    last = ask(other, request(YES))
    assert (stages(last[0]), last[1]) == ((OPERATIONAL, FULL), b"")
    assert other.done and other.parameters.rdma_extensions


@pytest.mark.parametrize("answer", ["No", "NotUnderstood", "Irrelevant", "Reject", None])
def test_initiator_does_not_agree_to_iser(answer: str | None) -> None:
    """proves: ISER-3.3-2, ISER-6.3-3"""
    other = target()
    ask(other, request(WHO))
    pairs = [] if answer is None else [("RDMAExtensions", answer)]
    assert status(ask(other, request(pairs))) == 0x0200
    assert other.failed and not other.done


def test_initiator_refuses_iser() -> None:
    other = target()
    assert status(ask(other, request([*WHO, ("RDMAExtensions", "No")]))) == 0x0200
    assert other.failed


@pytest.mark.parametrize(("word", "required"), [("Yes", True), ("No", False), (None, None)])
def test_hello_is_required_where_the_initiator_says_so(
    word: str | None, required: bool | None
) -> None:
    """It only declares that: there is no answer. proves: ISER-7145-6.10-2"""
    other = target()
    pairs = [] if word is None else [("iSERHelloRequired", word)]
    answer = ask(other, request([*WHO, *YES, *pairs]))
    assert status(answer) == 0 and "iSERHelloRequired" not in said(answer)
    assert other.parameters.iser_hello_required is required


def test_text_in_parts() -> None:
    """C is answered by an empty response without T; the parts may break a key."""
    other = target()
    whole = logins.encode(WHO + YES)
    for cut in (1, 20, len(whole) - 1):
        other = target()
        first = ask(other, request(whole[:cut], flags=0x44))
        assert (first[1], stages(first[0])) == (b"", (OPERATIONAL, None))
        assert not is_continued(first[0])
        last = ask(other, request(whole[cut:]))
        assert said(last)["RDMAExtensions"] == "Yes"
        assert other.done


def test_text_in_parts_is_bounded() -> None:
    other = target()
    for _ in range(login_target.MAXIMUM_LOGIN // 8192):
        assert status(ask(other, request(bytes(8192), flags=0x44))) == 0
    assert status(ask(other, request(b"\0", flags=0x44))) == 0x0200
    assert other.failed


def test_unexpected_pdus_are_declared_to_those_who_know_the_key() -> None:
    """RFC 7145 section 6.7: it should be, but others take a key that they do not know amiss.

    proves: ISER-7145-6.7-1
    """
    other = target(unexpected_pdus=20)
    answer = ask(other, request([*WHO, *YES, ("MaxOutstandingUnexpectedPDUs", "8")]))
    assert said(answer)["MaxOutstandingUnexpectedPDUs"] == "20"
    assert other.parameters.max_outstanding_unexpected_pdus == 8


def test_tagged_buffer_key() -> None:
    for value in (True, False):
        other = target()
        pair = ("TaggedBufferForSolicitedDataOnly", "Yes" if value else "No")
        ask(other, request([*WHO, *YES, pair]))
        assert other.parameters.tagged_buffer_for_solicited_data_only is value


def test_declared_twice_alike() -> None:
    """libiscsi declares keys twice, which is taken; a negotiated key must not come again."""
    other = target()
    ask(other, request([*WHO, *YES, ("InitiatorAlias", "a")], OPERATIONAL, None))
    assert stages(ask(other, request([*WHO, ("InitiatorAlias", "a")]))[0]) == (OPERATIONAL, FULL)


NAME = [("InitiatorName", logins.INITIATOR)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (request([]), 0x0207),
        (request([("TargetName", logins.TARGET)]), 0x0207),
        (request(NAME), 0x0207),
        (request([("InitiatorName", ""), WHO[1]]), 0x0207),
        (request([("InitiatorName", "iqn." + "x" * 220), WHO[1]]), 0x0207),
        (request([("InitiatorName", "iqn." + "\u0430" * 110), WHO[1]]), 0x0207),  # 224 bytes
        (request([("InitiatorName", "\u0130" * 111), WHO[1]]), 0x0200),  # 333 in lower case
        (request([*NAME, ("TargetName", "iqn.2026-11.example:other")]), 0x0203),
        (request([*WHO, ("SessionType", "Odd")]), 0x0209),
        (request(WHO, version_min=1, version_max=1), 0x0205),
        (request(WHO, tsih=1), 0x020A),
        (request([*WHO, ("AuthMethod", "CHAP")], SECURITY, OPERATIONAL), 0x0201),
        (request([*WHO, ("AuthMethod", "CHAP,KRB5")], SECURITY, OPERATIONAL), 0x0201),
        (request([*WHO, ("AuthMethod", "None")]), 0x0200),  # not in that stage
        (request(WHO, 2, 3), 0x0200),
        (request(WHO, FULL, None), 0x0200),
        (request(WHO, OPERATIONAL, OPERATIONAL), 0x0200),
        (request(WHO, OPERATIONAL, SECURITY), 0x0200),
        (request(WHO, SECURITY, 2), 0x0200),
        (request(WHO, flags=0xC7), 0x0200),  # T and C
        (request([*WHO, ("MaxBurstLength", "Reject")]), 0x0200),
        (request([*WHO, ("TargetAlias", "mine")]), 0x0200),
        (request(b"InitiatorName\0"), 0x0200),
        (request([("InitiatorName", "iqn.x:y\nanother line"), WHO[1]]), 0x0200),
        (request([*WHO, ("InitialR2T", "Yes"), ("InitialR2T", "Yes")]), 0x0200),
        (request([*WHO, *((f"X-{i:060}", "") for i in range(200))]), 0x0200),
    ],
)
def test_refused(message: tuple[bytes, bytes], expected: int) -> None:
    """The response says why, and nothing else; the connection is to be closed.

    proves: ISER-10.1.4.6-7
    """
    other = target()
    answer = ask(other, message)
    assert (status(answer), answer[1]) == (expected, b"")
    assert stages(answer[0]) == (0, None)
    assert other.failed and not other.done


@pytest.mark.parametrize(
    "second",
    [
        request([], SECURITY, OPERATIONAL),
        request([], isid=b"\x80other"),
        request([], itt=6),
        request([], cid=1),
        request([], tsih=1),
        request(YES),
        request([("InitiatorName", "iqn.2026-11.example:other")]),
        request([("TargetName", "iqn.2026-11.example:other")]),
        request([("SessionType", "Discovery"), ("SessionType", "Normal")]),
    ],
)
def test_refused_in_the_second_round(second: tuple[bytes, bytes]) -> None:
    """No way back, no other session's PDUs, no key again (RFC 7143 section 6.3)."""
    other = target()
    assert status(ask(other, request(WHO + YES, OPERATIONAL, None))) == 0
    assert status(ask(other, second)) in (0x0200, 0x020A)
    assert other.failed


def test_rounds_are_bounded() -> None:
    other = target()
    ask(other, request(WHO, OPERATIONAL, None))
    for _ in range(login_target.MAXIMUM_ROUNDS - 1):
        ask(other, request([], OPERATIONAL, None))
    with pytest.raises(RemoteProtocolError, match="no end of login"):
        other.receive(*request([], OPERATIONAL, None))


@pytest.mark.parametrize("stage", [SECURITY, OPERATIONAL])
@pytest.mark.parametrize("continued", [False, True])
def test_the_bytes_of_a_login_are_bounded(stage: int, continued: bool) -> None:
    """In all its rounds together: its keys are remembered, and anybody may begin one."""
    other = target()
    ask(other, request(WHO, stage, None))
    flags = stage << pdu.CSG_SHIFT | (bhs.FLAG_CONTINUE if continued else 0)
    taken = 0
    while not other.failed:
        pairs = [(f"X-{taken}-{each}", "v" * 200) for each in range(9)]
        header, data = request(pairs, stage, None, flags=flags)
        answer = ask(other, (header, data))
        taken += len(data)
    assert status(answer) == 0x0200 and "16384 bytes" in other.problem
    assert 16384 < taken < 20000


@pytest.mark.parametrize("opcode", [bhs.SCSI_COMMAND, bhs.TEXT_REQUEST, bhs.LOGIN_RESPONSE])
def test_other_pdus_are_no_login(opcode: int) -> None:
    with pytest.raises(RemoteProtocolError, match="opcode"):
        target().receive(*request(WHO, opcode=opcode))


def test_whole_headers_only() -> None:
    header, data = request(WHO + YES)
    for cut in range(bhs.BHS_LENGTH):
        with pytest.raises(RemoteProtocolError):
            target().receive(header[:cut], data)


PAIRS = st.lists(
    st.tuples(
        st.sampled_from([*keys.TABLE, "AuthMethod", "InitiatorName", "TargetName", "X-a"]),
        st.sampled_from(["Yes", "No", "None", "1", "8192", *keys.ANSWER_WORDS, logins.TARGET]),
    ),
    max_size=6,
)
FLAGS = st.sampled_from([0x00, 0x04, 0x44, 0x81, 0x83, 0x87, 0xC7, 0x8F])


@given(st.lists(st.tuples(FLAGS, PAIRS), max_size=6))
def test_any_initiator(script: list[tuple[int, Pairs]]) -> None:
    """Each request has one response, of bounded length, until the login succeeds or fails."""
    other = target()
    for number, (flags, pairs) in enumerate(script):
        header, data = ask(other, request([*(WHO if not number else []), *pairs], flags=flags))
        response = pdu.LoginResponse.unpack_from(header)
        assert response.data_length == len(data) <= 8192
        assert (response.status != 0) is other.failed
        if other.failed or other.done:
            assert other.failed or other.parameters.rdma_extensions
            return


@given(st.binary(max_size=60), st.binary(max_size=300))
def test_any_bytes(header: bytes, data: bytes) -> None:
    for raw in (header, request(data)[0][:20] + header, request(data)[0]):
        other = target()
        try:
            (answer,) = other.receive(raw, data)
        except RemoteProtocolError:
            continue
        assert other.failed is (status(answer) != 0)
