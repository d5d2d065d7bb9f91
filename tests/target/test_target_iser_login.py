"""What RFC 7145 asks of a target before and at the end of login, seen by an initiator: which
resources it allocates, and when."""

from __future__ import annotations

import pytest

from iserblk.datamover.iser import MINIMUM_LENGTH
from iserblk.iscsi import bhs, keys, pdu
from iserblk.iscsi.chap import Accounts, Credentials
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.rcap.inprocess import Message
from iserblk.secret import Secret
from iserblk.target.iscsi.login import LOGIN_SLOTS, UNEXPECTED
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from tests.target.iser_client import INITIATOR, IQN, IserClient

SECRET = Secret("hush-hush-hush")
ACCOUNTS = Accounts({"host": SECRET})
# At the beginning of the login for its PDUs, at its end for the full feature phase.
RESOURCES = ("allocate_connection_resources", "add_resources")


def allocations(client: IserClient) -> list[int]:
    """Where, among the calls of the target's datamover, resources were allocated."""
    calls = client.datamover.calls
    return [place for place, (name, _) in enumerate(calls) if name in RESOURCES]


CHECK_CONDITION = 2


def by_chap(client: IserClient, secret: Secret) -> LoginInitiator:
    """Log in with this secret, as far as it goes."""
    one = LoginInitiator(
        LoginInitiatorConfig(INITIATOR, IQN, b"\x80abcde", credentials=Credentials("host", secret))
    )
    requests = [one.start()]
    while requests and not client.connection.done:
        answer = client.ask(*requests.pop())
        if not client.connection.done:
            requests = one.receive(answer.bhs, answer.data)
    return one


# shows: SYSTEM-32
def test_the_end_of_login_is_in_order() -> None:
    """Allocate_Connection_Resources has succeeded, the key values are noticed and the datamover is
    enabled before the last Login Response leaves; each is called once for the full feature phase.

    proves: ISER-5.1.2-8, ISER-5.1.2-9, ISER-3.1.8-1
    """
    client = IserClient()
    calls = client.datamover.calls
    client.login([("AuthMethod", "None")], stage=0, following=1)
    assert "enable_datamover" not in [name for name, _ in calls]
    del calls[:]
    client.on_send = lambda message: calls.append(("left", (message,)))
    client.login([("MaxBurstLength", "65536"), ("MaxOutstandingR2T", "4")])
    names = [name for name, _ in calls]
    for name in ("notice_key_values", "enable_datamover", "left"):
        assert names.count(name) == 1
    assert allocations(client)[-1] < names.index("enable_datamover") < names.index("left")
    assert names.index("notice_key_values") < names.index("left")
    ((parameters,),) = [given for name, given in calls if name == "notice_key_values"]
    assert isinstance(parameters, keys.SessionParameters)
    assert parameters.rdma_extensions and parameters.max_burst_length == 65536
    assert (parameters.error_recovery_level, parameters.max_outstanding_r2t) == (0, 1)


# shows: SYSTEM-46
@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_nothing_is_allocated_for_a_stranger(right: bool) -> None:
    """While an initiator has not proved who it is, the target has the few buffers of a login, and
    nothing else; with a wrong secret it stays so.

    proves: ISER-5.1.2-3, ISER-11-7, ISER-7145-11-1
    """
    client = IserClient(accounts=ACCOUNTS)
    allocated: list[tuple[int, int]] = []

    def left(_: Message) -> None:
        allocated.append((len(allocations(client)), client.receives))

    client.on_send = left
    first = len(allocations(client))
    assert client.receives == LOGIN_SLOTS
    one = by_chap(client, SECRET if right else Secret("loud-loud-loud"))
    assert one.done is right
    *early, last = allocated
    assert len(early) == (3 if right else 2)
    assert {count for count, _ in early} == {first}
    assert max(receives for _, receives in early) <= LOGIN_SLOTS
    if right:
        assert last[0] > first and client.receives >= QUEUE_DEPTH + UNEXPECTED
    else:
        assert last[0] == first and client.receives <= LOGIN_SLOTS
        assert client.connection.done and client.connection.parameters is None


# shows: SYSTEM-45
def test_a_session_with_chap_works_as_any() -> None:
    """proves: ISER-11-2, ISER-GEN-8.1.6.4-1"""
    client = IserClient(accounts=ACCOUNTS)
    one = by_chap(client, SECRET)
    assert one.done and one.parameters.rdma_extensions
    assert client.connection.login.user == "host"
    assert client.command(bytes(6)).bhs[3] == CHECK_CONDITION  # the unit attention of each session
    data = bytes(range(256)) * 2
    assert client.write(data).bhs[3] == 0 and client.store.content[:512] == data


@pytest.mark.parametrize("digests", ["CRC32C", "CRC32C,None"])
def test_no_message_has_a_digest(digests: str) -> None:
    """Though the initiator asked for digests: each message is a header, a BHS and its data, and no
    bytes behind are taken for a digest. proves: ISER-10.1.4.2-1"""
    client = IserClient().logged_in([("HeaderDigest", digests), ("DataDigest", digests)])
    data = b"ping"
    ping = pdu.NopOut(lun=bytes(8), itt=77, ttt=bhs.NO_TAG, cmd_sn=0, exp_stat_sn=0).pack()
    answer = client.ask(ping[:4] + len(data).to_bytes(4, "big") + ping[8:], data)
    assert (answer.opcode, answer.data) == (bhs.NOP_IN, data)
    assert [each.size for each in client.sent] == [MINIMUM_LENGTH + len(data)]
    assert client.command(bytes(6)).bhs[3] == 0
    assert client.sent[-1].size == MINIMUM_LENGTH
    assert client.connection.parameters is not None
    assert client.connection.parameters.header_digest == "None"
