"""A session that reinstates another waits for the writes that the older session still runs."""

from __future__ import annotations

import pytest

from iserblk.errors import ConnectionLost
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import status as sam
from iserblk.target.iscsi.tasks.slot import TargetTask
from tests.target.iser_client import IserClient, rw10


def test_held_writes_wait_and_then_come() -> None:
    """Nothing reaches the store, or is fetched, while the session is held; in order afterwards."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    head = bytearray(28)
    head[0] = 0x10
    old, new = b"old" + bytes(509), b"new" + bytes(509)
    client.connection.session.pause()
    for itt, data in ((20, old), (21, new)):
        client.send(bytes(head) + client.scsi(rw10(0x2A, 512), 0xA0, 512, itt, 512) + data)
    client.run()
    assert not client.sent and not any(call[0] == "write" for call in client.store.calls)
    client.connection.session.go_on()
    client.run()
    assert [heard.number(16) for heard in client.heard[-2:]] == [20, 21]
    assert bytes(client.store.content[:3]) == b"new"


def test_a_preempted_session_answers_what_it_had_not_begun() -> None:
    """Its commands for that LUN end with TASK ABORTED, and never reach the store."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    head = bytearray(28)
    head[0] = 0x10
    client.connection.session.pause()
    for itt in (20, 21):
        client.send(bytes(head) + client.scsi(rw10(0x2A, 512), 0xA0, 512, itt, 512) + bytes(512))
    client.run()
    outputs: list[bool] = []
    client.owner.output_waits = lambda: outputs.append(True)
    assert client.connection.session.end_tasks(1, lambda: None) == 0
    client.run()
    assert not client.sent, "of another LUN"
    assert client.connection.session.end_tasks(0, lambda: None) == 0, "none is in a thread"
    client.run()
    answers = [(heard.number(16), heard.bhs[3]) for heard in client.heard[-2:]]
    assert answers == [(20, sam.TASK_ABORTED), (21, sam.TASK_ABORTED)]
    assert outputs
    client.connection.session.go_on()
    client.run()
    assert not any(call[0] == "write" for call in client.store.calls)


def test_of_a_session_that_was_cut_off_only_what_runs_is_waited_for() -> None:
    """A preemptor hears once of each write that a thread is executing, and of no other command."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    connection = client.connection
    head = bytearray(28)
    head[0] = 0x10
    running: list[TargetTask] = []
    client.owner.offload = running.append
    fua = b"\x2a\x08" + rw10(0x2A, 512)[2:]
    for itt in (20, 21):
        client.send(bytes(head) + client.scsi(fua, 0xA0, 512, itt, 512) + bytes(512))
    client.run()
    assert len(running) == 2
    told: list[bool] = []
    connection.abandon()
    connection.finish(running[0])
    assert connection.session.end_tasks(0, lambda: told.append(True)) == 1
    assert not told
    connection.finish(running[1])
    assert told == [True]
    assert connection.session.end_tasks(0, lambda: told.append(True)) == 0


def test_nothing_that_was_received_already_begins_when_the_session_is_cut_off() -> None:
    """A command may lie in the receive buffer when another session takes the name."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    head = bytearray(28)
    head[0] = 0x10
    client.send(bytes(head) + client.scsi(rw10(0x2A, 512), 0xA0, 512, 20, 512) + bytes(512))
    client.connection.abandon()
    with pytest.raises(ConnectionLost):
        while True:
            client.connection.progress(0.0)
    assert not any(call[0] == "write" for call in client.store.calls)


def test_a_logout_is_answered_when_nothing_is_written_any_more() -> None:
    """Commands that wait for data or for their turn end; the target waits for a command that a
    thread is executing. It does not look at what follows the Logout."""
    client = IserClient().logged_in([("ImmediateData", "Yes"), ("InitialR2T", "No")])
    connection = client.connection
    head = bytearray(28)
    head[0] = 0x10
    running: list[TargetTask] = []
    client.owner.offload = running.append
    fua = b"\x2a\x08" + rw10(0x2A, 512)[2:]
    client.send(bytes(head) + client.scsi(fua, 0xA0, 512, 20, 512) + bytes(512))
    client.send(bytes(head) + client.scsi(rw10(0x2A, 1024), 0x20, 1024, 21))
    logout = pdu.LogoutRequest(reason=0, itt=30, cmd_sn=client.cmd_sn, exp_stat_sn=0)
    client.send(bytes(head) + logout.pack())
    behind = pdu.DataOut(
        flags=0x80, data_length=1024, lun=bytes(8), itt=21, exp_stat_sn=0, data_sn=0,
        buffer_offset=0,
    )  # fmt: skip
    client.send(bytes(head) + behind.pack() + bytes(1024))
    client.send(bytes(head) + client.scsi(rw10(0x2A, 512), 0xA0, 512, 22, 512) + bytes(512))
    client.run()
    told: list[bool] = []
    client.owner.ended = lambda: told.append(True)
    assert not client.sent and not connection.done and len(running) == 1
    connection.finish(running[0])
    assert connection.done and told
    client.run()
    assert [each.opcode for each in client.heard[-1:]] == [bhs.LOGOUT_RESPONSE]
    assert len(client.sent) == 1
    assert not any(call[0] == "write" for call in client.store.calls)


@pytest.mark.parametrize("how", ["ABORT TASK", "reset", "another's reset", "cut off"])
def test_what_takes_long_is_told_that_nobody_wants_it(how: str) -> None:
    """A task that a thread is executing has ``cancelled`` set, for each way to end it early."""
    client = IserClient().logged_in([("ImmediateData", "Yes")])
    connection = client.connection
    head = bytearray(28)
    head[0] = 0x10
    running: list[TargetTask] = []
    client.owner.offload = running.append
    client.send(bytes(head) + client.scsi(rw10(0x2F, 512), 0x80, 0, 20))
    client.run()
    assert [slot.task.cancelled for slot in running] == [False]
    functions = {"ABORT TASK": pdu.TMF_ABORT_TASK, "reset": pdu.TMF_LOGICAL_UNIT_RESET}
    if how in functions:
        request = pdu.TaskManagementRequest(
            function=functions[how],
            lun=bytes(8),
            itt=30,
            referenced_task_tag=20,
            cmd_sn=client.cmd_sn,
            exp_stat_sn=0,
        )
        client.send(bytes(head) + request.pack())
        client.run()
    elif how == "cut off":
        connection.abandon()
    else:
        assert connection.session.end_tasks(0, lambda: None) == 1
    assert [slot.task.cancelled for slot in running] == [True]


@pytest.mark.parametrize("function", [pdu.TMF_LOGICAL_UNIT_RESET, pdu.TMF_CLEAR_TASK_SET])
def test_a_reset_is_answered_when_other_sessions_write_no_more(function: int) -> None:
    """CLEAR TASK SET, too, acts on all sessions: a LUN has one task set (TST 0). The answer leaves
    as soon as the task that a thread is executing has ended."""
    other = IserClient().logged_in([("ImmediateData", "Yes")])
    client = IserClient(device=other.device, store=other.store, isid=b"\x80other").logged_in()
    head = bytearray(28)
    head[0] = 0x10
    running: list[TargetTask] = []
    other.owner.offload = running.append
    fua = b"\x2a\x08" + rw10(0x2A, 512)[2:]
    other.send(bytes(head) + other.scsi(fua, 0xA0, 512, 20, 512) + bytes(512))
    other.run()
    reset = pdu.TaskManagementRequest(
        function=function, lun=bytes(8), itt=30, cmd_sn=2, exp_stat_sn=0
    )
    client.send(bytes(head) + reset.pack())
    client.run()
    assert not client.sent
    other.connection.finish(running[0])
    assert len(client.sent) == 1
    client.run()
    answer = client.heard[-1]
    assert (answer.opcode, answer.bhs[2]) == (bhs.TASK_MANAGEMENT_RESPONSE, pdu.TMF_COMPLETE)
