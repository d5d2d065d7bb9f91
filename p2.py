import sys; sys.path.insert(0,'/tmp/w/mine')
from sub import sub
sub('iserblk/iscsi/login_initiator.py',
('''            wish = self.parameters
            self.parameters = replace(
                config.leading,
                **{key.field: getattr(wish, key.field) for key in map(keys.TABLE.get, _OF_ONE)},
            )
''','''            self.parameters = replace(
                config.leading,
                header_digest=config.header_digest,
                data_digest=config.data_digest,
                target_recv_data_segment_length=config.send_data_segment_length,
                initiator_recv_data_segment_length=config.receive_data_segment_length,
                max_recv_data_segment_length=SAFE_SEGMENT_LENGTH,
                max_ulpdu=0,
            )
'''))
sub('tests/test_iserblk_options.py',
('''        ("busy-poll", "0", "busy_poll_us", 0),
''','''        ("connections", "1", "connections", 1),
        ("error_recovery_level", "0", "error_recovery_level", 0),
        ("busy-poll", "0", "busy_poll_us", 0),
'''),
('''        ("busy-poll", "0000000012000000", "from''','''        ("connections", "0", "from 1 to 8"),
        ("connections", "9", "from 1 to 8"),
        ("connections", "many", "from 1 to 8"),
        ("error-recovery-level", "3", "say 0, 1 or 2"),
        ("error-recovery-level", "two", "say 0, 1 or 2"),
        ("busy-poll", "0000000012000000", "from'''))
s=open('tests/iscsi/logins.py').read()
s=s.replace('''    header_digest: str = "None",
) -> LoginInitiator:''','''    header_digest: str = "None",
    **config: object,
) -> LoginInitiator:''').replace('''            header_digest=header_digest,
        )
    )
''','''            header_digest=header_digest,
            **config,  # type: ignore[arg-type]
        )
    )
''',1)
open('tests/iscsi/logins.py','w').write(s)
open('tests/iscsi/test_login_later.py','w').write('''"""The initiator's login of a session's later connections, and what the leading one agrees on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iserblk.errors import LoginError, RemoteProtocolError
from iserblk.iscsi import keys, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_initiator import LoginInitiator
from tests.iscsi import logins
from tests.iscsi.logins import response, said

LEADING = SessionParameters(
    rdma_extensions=True,
    max_connections=4,
    error_recovery_level=2,
    max_burst_length=65536,
    initial_r2t=False,
    default_time2wait=3,
    default_time2retain=7,
    max_recv_data_segment_length=4096,
    target_recv_data_segment_length=4096,
    target_portal_group_tag=1,
    max_outstanding_unexpected_pdus=9,
)
GROUP = [("TargetPortalGroupTag", "1")]


def later(**config: object) -> LoginInitiator:
    return logins.initiator(
        leading=LEADING, tsih=logins.TSIH, cid=3, cmd_sn=77, receive_data_segment_length=512, **config
    )


def test_a_leading_login_offers_connections_and_a_level() -> None:
    one = logins.initiator(max_connections=4, error_recovery_level=2, time2retain=20)
    offered = said(one.start())
    assert (offered["MaxConnections"], offered["ErrorRecoveryLevel"]) == ("4", "2")
    assert (offered["DefaultTime2Wait"], offered["DefaultTime2Retain"]) == ("0", "20")
    answers = [
        ("RDMAExtensions", "Yes"),
        ("MaxConnections", "2"),
        ("ErrorRecoveryLevel", "1"),
        ("DefaultTime2Wait", "2"),
        ("DefaultTime2Retain", "10"),
    ]
    assert one.receive(*response(answers)) == []
    agreed = one.parameters
    assert (agreed.max_connections, agreed.error_recovery_level) == (2, 1)
    assert (agreed.default_time2wait, agreed.default_time2retain) == (2, 10)


def test_a_target_that_says_nothing_has_one_connection_at_level_0() -> None:
    one = logins.initiator(max_connections=4, error_recovery_level=2)
    one.start()
    one.receive(*response([("RDMAExtensions", "Yes")]))
    assert (one.parameters.max_connections, one.parameters.error_recovery_level) == (1, 0)


@pytest.mark.parametrize("key", ["MaxConnections=5", "ErrorRecoveryLevel=3", "MaxConnections=0"])
def test_a_target_that_agrees_to_more_breaks_the_protocol(key: str) -> None:
    one = logins.initiator(max_connections=4, error_recovery_level=2)
    one.start()
    name, _, value = key.partition("=")
    with pytest.raises(RemoteProtocolError, match=name):
        one.receive(*response([("RDMAExtensions", "Yes"), (name, value)]))


def test_the_request_of_a_later_connection() -> None:
    """It names the session and itself, and has no key that only a leading login may have.

    proves: ISER-5.1-10, ISER-5.1-11
    """
    header, data = later(hello=True, max_ulpdu=9000).start()
    request = pdu.LoginRequest.unpack_from(header)
    assert (request.isid, request.tsih, request.cid) == (logins.ISID, logins.TSIH, 3)
    assert request.cmd_sn == 77
    offered = said((header, data))
    assert not keys.LEADING_ONLY & set(offered)
    assert set(offered) == {
        "InitiatorName",
        "TargetName",
        "HeaderDigest",
        "DataDigest",
        "TargetRecvDataSegmentLength",
        "InitiatorRecvDataSegmentLength",
        keys.MAX_ULPDU,
    }


def test_the_keys_of_the_session_hold_for_a_later_connection() -> None:
    """iSER is on without the key, and the target's segment length is its own.

    proves: ISER-5.1-10
    """
    one = later()
    one.start()
    sizes = [("TargetRecvDataSegmentLength", "2048"), ("InitiatorRecvDataSegmentLength", "512")]
    assert one.receive(*response(GROUP + sizes, exp_cmd_sn=77, max_cmd_sn=99)) == []
    assert one.done
    assert one.parameters == replace(
        LEADING,
        target_recv_data_segment_length=2048,
        initiator_recv_data_segment_length=512,
        max_recv_data_segment_length=8192,
    )
    assert (one.tsih, one.max_cmd_sn) == (logins.TSIH, 99)


def test_a_later_connection_in_traditional_iscsi() -> None:
    one = logins.initiator(
        leading=replace(LEADING, rdma_extensions=False),
        tsih=logins.TSIH,
        cid=1,
        rdma=False,
        header_digest="CRC32C,None",
    )
    offered = said(one.start())
    assert set(offered) == {
        "InitiatorName",
        "TargetName",
        "HeaderDigest",
        "DataDigest",
        "MaxRecvDataSegmentLength",
    }
    answers = [*GROUP, ("HeaderDigest", "CRC32C"), ("MaxRecvDataSegmentLength", "65536")]
    one.receive(*response(answers))
    agreed = one.parameters
    assert (agreed.header_digest, agreed.data_digest) == ("CRC32C", "None")
    assert agreed.target_recv_data_segment_length == 65536
    assert (agreed.max_connections, agreed.error_recovery_level) == (4, 2)


def test_a_portal_of_another_group_is_not_joined() -> None:
    one = later()
    one.start()
    with pytest.raises(LoginError, match="portal group 2"):
        one.receive(*response([("TargetPortalGroupTag", "2")]))


def test_a_connection_in_another_session_is_not_used() -> None:
    one = later()
    one.start()
    with pytest.raises(RemoteProtocolError, match="session 7 into session 8"):
        one.receive(*response(GROUP, tsih=8))


def test_leading_keys_of_the_target_change_nothing() -> None:
    """What it offers is rejected, what it declares has no effect."""
    one = later()
    one.start()
    pairs = [*GROUP, ("MaxBurstLength", "512"), ("MaxOutstandingUnexpectedPDUs", "2")]
    ((_, data),) = one.receive(*response(pairs, following=None))
    assert said((b"", data)) == {"MaxBurstLength": "Reject"}
    one.receive(*response([]))
    assert one.parameters.max_burst_length == 65536
    assert one.parameters.max_outstanding_unexpected_pdus == 9


@pytest.mark.parametrize("status", [0x0206, 0x0209, 0x020A])
def test_a_refusal_of_a_connection(status: int) -> None:
    one = later()
    one.start()
    with pytest.raises(LoginError) as caught:
        one.receive(*response([], status=status))
    assert caught.value.status == status
''')
