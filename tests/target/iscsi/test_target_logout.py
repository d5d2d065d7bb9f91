"""Logouts at the target: what ends, and when they are answered."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from tests.support import logs
from tests.target.iscsi.several import KINDS, Host, Kind
from tests.target.iscsi.tasks.test_reassigning import begun, flush, joined
from tests.target.iscsi.test_connection import Client, width

pytestmark = pytest.mark.logs(logs.IGNORED)


@KINDS
@pytest.mark.parametrize("level", [0, 2])
def test_a_logout_of_one_connection(kind: Kind, level: int) -> None:
    """Its tasks end, those of the others do not; the answer waits for threads."""
    host = Host(level=level, threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    flush(first, 1)
    flush(second, 2)
    first.log_out(pdu.LOGOUT_CLOSE_CONNECTION)
    assert not first.heard
    host.finish()
    assert first.logged_out().response == 0 and first.ended
    first.close()
    assert not host.over and not second.connection.done
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]
    second.heard.clear()
    second.log_out(pdu.LOGOUT_CLOSE_CONNECTION)
    assert second.logged_out().response == 0
    second.close()
    assert host.over == [host.tsih]


@KINDS
def test_a_logout_of_another_connection(kind: Kind) -> None:
    host = Host(level=0, threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    flush(first, 1)
    second.log_out(pdu.LOGOUT_CLOSE_CONNECTION, 0)
    assert first.ended and not second.heard
    first.close()
    assert not second.heard
    host.finish()
    assert second.logged_out().response == 0


@KINDS
def test_a_logout_of_the_session(kind: Kind) -> None:
    """All connections end, and all tasks; the answer comes last."""
    host = Host(threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    third = joined(kind, host, 2)
    flush(second)
    flush(third, 3)
    third.lose()
    first.log_out(pdu.LOGOUT_CLOSE_SESSION)
    assert second.ended and not first.heard
    second.close()
    host.finish()
    assert not first.heard
    host.finish()
    assert first.logged_out().response == 0 and first.ended
    first.close()
    assert host.over == [host.tsih]


@pytest.mark.parametrize("number", [-1, 128, 0x40000000, -0x40000000])
@pytest.mark.parametrize("cid", [0, 777], ids=["own", "other"])
def test_a_logout_outside_of_the_window_is_ignored(cid: int, number: int) -> None:
    """It is not carried out, not answered, and opens no window (RFC 7143 section 4.2.2.1)."""
    client = Client()

    def say(unit: pdu.Pdu) -> list[bytes]:
        client.heard.clear()
        client.send(unit)
        return [head for head, _ in client.heard]

    for _ in range(3):
        logout = pdu.LogoutRequest(
            opcode=bhs.LOGOUT_REQUEST,
            reason=pdu.LOGOUT_CLOSE_CONNECTION,
            itt=5,
            cid=cid,
            cmd_sn=(client.cmd_sn + number) & 0xFFFFFFFF,
            exp_stat_sn=1,
        )
        assert say(logout) == []
    assert not client.connection.done
    ping = pdu.NopOut(opcode=bhs.NOP_OUT, itt=6, lun=bytes(8), cmd_sn=client.cmd_sn, exp_stat_sn=1)
    (head,) = say(ping)
    assert width(head) == QUEUE_DEPTH
    client.close()
