"""A command that never came, and that its initiator aborts: it counts as received, so that what
comes behind it is taken (RFC 7143 sections 7.11 and 11.6.1 b)."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.target.iscsi.numbers import CommandWindow
from tests.support import logs
from tests.target.iscsi.test_connection import READ_10, Client, cdb10

pytestmark = pytest.mark.logs(logs.IGNORED)

TOP = 0xFFFFFFFF


def numbers(exp_cmd_sn: int, window: int = 4) -> CommandWindow:
    made = CommandWindow()
    made.exp_cmd_sn = exp_cmd_sn
    made.max_cmd_sn = (exp_cmd_sn + window - 1) & TOP
    return made


@pytest.mark.parametrize("start", [7, TOP - 1, TOP])
def test_in_any_order(start: int) -> None:
    made = numbers(start)
    one, two, three, four = ((start + i) & TOP for i in range(4))
    assert made.give_up(two, four)
    assert made.exp_cmd_sn == one  # the first is missing still
    assert made.give_up(one, four)
    assert made.exp_cmd_sn == three
    assert made.max_cmd_sn == (start + 5) & TOP
    assert made.accept(1, three) and not made.accept(1, one)


def test_one_behind_the_next() -> None:
    made = numbers(7)
    assert made.give_up(8, 10)
    assert made.accept(1, 7)
    assert made.exp_cmd_sn == 9


@pytest.mark.parametrize(("missing", "cmd_sn"), [(6, 9), (11, 12), (9, 9), (9, 8)])
def test_others_do_not_exist(missing: int, cmd_sn: int) -> None:
    """A number that came long ago, is outside the window, or is not older than the request."""
    made = numbers(7)
    assert not made.give_up(missing, cmd_sn)
    assert (made.exp_cmd_sn, made.max_cmd_sn) == (7, 10)


def test_the_session_goes_on() -> None:
    client = Client()
    lost = client.cmd_sn
    client.cmd_sn += 1  # a command that is lost on its way
    client.cmd_sn += 1  # and another one
    for itt, missing in ((5, lost), (6, lost + 1)):
        client.send(
            pdu.TaskManagementRequest(
                opcode=bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE,
                function=pdu.TMF_ABORT_TASK,
                lun=bytes(8),
                itt=99,
                referenced_task_tag=itt,
                cmd_sn=client.cmd_sn,
                exp_stat_sn=1,
                ref_cmd_sn=missing,
            )
        )
        answer = pdu.TaskManagementResponse.unpack_from(client.heard.pop()[0])
        assert answer.response == pdu.TMF_COMPLETE
        assert answer.exp_cmd_sn == missing + 1
    client.command(cdb10(READ_10, 1), bhs.FLAG_FINAL | bhs.FLAG_READ, 512, itt=7)
    assert client.opcodes() == [bhs.DATA_IN]
    client.close()
