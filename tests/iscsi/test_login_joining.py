"""The target's login of a connection that joins a session, without a session."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from iserblk.iscsi import pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_target import (
    CANNOT_INCLUDE,
    OUT_OF_RESOURCES,
    SESSION_DOES_NOT_EXIST,
    TOO_MANY_CONNECTIONS,
    LoginTarget,
)
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, request, said
from tests.iscsi.test_login_chap import (
    ACCOUNTS,
    CHAP,
    OPERATIONAL,
    SECURITY,
    WHO,
    agreed,
    ask,
    proof,
    status,
)

TSIH = 77


@dataclass
class Session:
    """Implements Joinable."""

    initiator_name: str = logins.INITIATOR
    isid: bytes = logins.ISID
    user: str = ""
    portal_group: int = 1
    parameters: SessionParameters = field(
        default_factory=lambda: SessionParameters(
            rdma_extensions=True, error_recovery_level=2, initial_r2t=True
        )
    )
    exp_cmd_sn: int = 500
    max_cmd_sn: int = 510
    depth: int = 128
    done: bool = False
    room: bool = True

    def takes(self, cid: int) -> bool:
        return self.room


def target(session: Session, **config: object) -> LoginTarget:
    return logins.target(find_session={TSIH: session}.get, **config)


@pytest.mark.parametrize("rdma", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_the_mode_is_inherited(rdma: bool, stream: bool) -> None:
    """By a connection that begins as a byte stream, and one that has no choice. Responses carry the
    session's command window, and its TSIH.

    proves: ISER-5.1-10
    """
    session = Session()
    session.parameters.rdma_extensions = rdma
    most = 262144 if stream else 0
    other = target(session, rdma=rdma or stream, max_recv_data_segment_length=most)
    answer = ask(other, request(WHO, tsih=TSIH, cid=3))
    response = pdu.LoginResponse.unpack_from(answer[0])
    assert (response.status, response.tsih) == (0, TSIH)
    assert (response.exp_cmd_sn, response.max_cmd_sn) == (500, 510)
    assert other.done and other.joined is session and other.cid == 3
    assert other.parameters.rdma_extensions is rdma
    assert other.parameters.error_recovery_level == 2
    assert "RDMAExtensions" not in said(answer)
    assert ("MaxRecvDataSegmentLength" in said(answer)) is not rdma


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"done": True}, SESSION_DOES_NOT_EXIST),
        ({"isid": b"\x80other"}, SESSION_DOES_NOT_EXIST),
        ({"initiator_name": "iqn.2026-11.example:other"}, SESSION_DOES_NOT_EXIST),
        ({"user": "host"}, SESSION_DOES_NOT_EXIST),
        ({"portal_group": 2}, CANNOT_INCLUDE),
        ({"parameters": SessionParameters(rdma_extensions=False)}, CANNOT_INCLUDE),
        ({"room": False}, TOO_MANY_CONNECTIONS),
    ],
)
def test_refused(changes: dict[str, object], expected: int) -> None:
    session = Session(**changes)  # type: ignore[arg-type]
    other = target(session)
    answer = ask(other, request(WHO, tsih=TSIH))
    assert (status(answer), answer[1]) == (expected, b"")
    assert other.failed and not other.joined


@pytest.mark.parametrize(
    ("change", "expected"), [("done", SESSION_DOES_NOT_EXIST), ("room", TOO_MANY_CONNECTIONS)]
)
def test_the_session_changes_while_a_connection_logs_in(change: str, expected: int) -> None:
    session = Session()
    other = target(session)
    assert status(ask(other, request(WHO, OPERATIONAL, None, tsih=TSIH))) == 0
    setattr(session, change, change == "done")
    assert status(ask(other, request([], tsih=TSIH))) == expected


def test_a_window_that_is_open_already_may_be_too_wide() -> None:
    """Each connection must have room for the unsolicited Data-Outs of all commands."""
    session = Session()
    session.parameters.initial_r2t = False
    other = target(session)
    small: Pairs = [("TargetRecvDataSegmentLength", "512")]
    assert status(ask(other, request(WHO + small, tsih=TSIH))) == OUT_OF_RESOURCES
    session.depth = 8
    assert status(ask(target(session), request(WHO + small, tsih=TSIH))) == 0


@pytest.mark.parametrize(("user", "expected"), [("host", 0), ("", SESSION_DOES_NOT_EXIST)])
def test_only_an_authenticated_initiator_learns_of_sessions(user: str, expected: int) -> None:
    """And only the user that began a session may join it."""
    session = Session(user=user)
    other = target(session, accounts=ACCOUNTS)
    first = ask(other, request(WHO + CHAP, SECURITY, OPERATIONAL, tsih=TSIH))
    assert status(first) == 0 and not other.joined
    challenge = said(ask(other, request([("CHAP_A", "5")], SECURITY, OPERATIONAL, tsih=TSIH)))
    third = ask(other, request(proof(challenge), SECURITY, OPERATIONAL, tsih=TSIH))
    assert status(third) in (0, expected)
    if not status(third):
        assert status(ask(other, request([], tsih=TSIH))) == expected
    assert other.done is (expected == 0)
    plain = logins.target(accounts=ACCOUNTS)
    assert agreed(plain)  # a login without a TSIH goes on as ever


@pytest.mark.parametrize(
    ("offer", "agreed_on"),
    [
        ([("ErrorRecoveryLevel", "2")], ("2", 20, 20)),
        ([("DefaultTime2Retain", "60"), ("ErrorRecoveryLevel", "2")], ("2", 20, 20)),
        ([("ErrorRecoveryLevel", "2"), ("DefaultTime2Retain", "5")], ("2", 5, 5)),
        ([("ErrorRecoveryLevel", "2"), ("DefaultTime2Retain", "0")], ("2", 0, 0)),
        (
            [
                ("ErrorRecoveryLevel", "2"),
                ("DefaultTime2Retain", "60"),
                ("DefaultTime2Wait", "3600"),
            ],
            ("2", 0, 0),
        ),
        (
            [("ErrorRecoveryLevel", "2"), ("DefaultTime2Retain", "60"), ("DefaultTime2Wait", "25")],
            ("2", 15, 15),
        ),
        ([("ErrorRecoveryLevel", "1"), ("DefaultTime2Retain", "60")], ("1", 0, 0)),
        ([("ErrorRecoveryLevel", "0"), ("DefaultTime2Retain", "60")], ("0", 0, 0)),
        ([("DefaultTime2Retain", "60")], (None, 0, 0)),
    ],
)
def test_what_is_kept(offer: Pairs, agreed_on: tuple[str | None, int, int]) -> None:
    """Tasks are kept at level 2 only, whichever key comes first.

    proves: ISER-10.2-1
    """
    other = logins.target(error_recovery_level=2, max_connections=8)
    answer = said(ask(other, request([*WHO, ("RDMAExtensions", "Yes"), *offer])))
    level, retain, outcome = agreed_on
    assert answer.get("ErrorRecoveryLevel") == level
    if any(name == "DefaultTime2Retain" for name, _ in offer):
        assert answer["DefaultTime2Retain"] == str(retain)
    assert other.parameters.default_time2retain == outcome
    assert other.parameters.max_connections == 1  # the default of a key that was not offered
