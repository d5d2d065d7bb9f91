"""The key by which two ends of ours agree on frames that are larger than a TCP segment."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import keys
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from tests.iscsi import logins
from tests.iscsi.logins import Pairs, login, request, response, said, target

KEY = keys.MAX_ULPDU
WHO: Pairs = [("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]
YES: Pairs = [("RDMAExtensions", "Yes")]


def initiator(max_ulpdu: int, discovery: bool = False) -> LoginInitiator:
    return LoginInitiator(
        LoginInitiatorConfig(
            initiator_name=logins.INITIATOR,
            target_name="" if discovery else logins.TARGET,
            isid=logins.ISID,
            max_ulpdu=max_ulpdu,
            discovery=discovery,
        )
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        (65535, 65535, (65535, 65535)),
        (65535, 0, (0, 0)),
        (0, 65535, (0, 0)),
        (9000, 65535, (65535, 9000)),
    ],
)
def test_each_end_learns_what_the_other_takes(
    ours: int, theirs: int, outcome: tuple[int, int]
) -> None:
    """Each end learns the other's limit if both declare one. It costs no round trip."""
    one, other = initiator(ours), target(max_ulpdu=theirs)
    assert login(one, other) == 1
    assert (one.parameters.max_ulpdu, other.parameters.max_ulpdu) == outcome


def test_target_that_does_not_know_the_key_is_logged_in_to() -> None:
    one = initiator(65535)
    assert said(one.start())[KEY] == "65535"
    assert one.receive(*response([*YES, (KEY, "NotUnderstood")])) == []
    assert one.done
    assert one.parameters.max_ulpdu == 0


def test_target_that_passes_over_the_key_is_logged_in_to() -> None:
    one = initiator(65535)
    one.start()
    assert one.receive(*response(YES)) == []
    assert one.done
    assert one.parameters.max_ulpdu == 0


def test_discovery_does_not_ask() -> None:
    assert KEY not in said(initiator(65535, discovery=True).start())


@pytest.mark.parametrize("value", ["8191", "65536", "0", "big", ""])
def test_bad_values(value: str) -> None:
    one = initiator(65535)
    one.start()
    with pytest.raises(RemoteProtocolError, match=KEY):
        one.receive(*response([*YES, (KEY, value)]))
    other = target(max_ulpdu=65535)
    ((header, data),) = other.receive(*request([*WHO, *YES, (KEY, value)]))
    assert said((header, data))[KEY] == "Reject"
    assert other.parameters.max_ulpdu == 0


# --- TargetRecvDataSegmentLength, which allows larger messages ---


@pytest.mark.parametrize(
    ("offered", "answered", "believed"),
    [
        (32768, "16384", 16384),
        (32768, "32768", 8192),  # LIO: an echo, while its receives stay as they are
        (32768, "4096", 4096),
        (32768, None, 8192),
        (8192, "8192", 8192),
        (4096, "4096", 4096),
    ],
)
def test_an_echo_of_what_was_offered_is_no_word_of_the_target(
    offered: int, answered: str | None, believed: int
) -> None:
    one = LoginInitiator(
        LoginInitiatorConfig(
            initiator_name=logins.INITIATOR,
            target_name=logins.TARGET,
            isid=logins.ISID,
            send_data_segment_length=offered,
        )
    )
    assert said(one.start())["TargetRecvDataSegmentLength"] == str(offered)
    answer = [("TargetRecvDataSegmentLength", answered)] if answered else []
    assert one.receive(*response([*YES, *answer])) == []
    assert one.parameters.target_recv_data_segment_length == believed
