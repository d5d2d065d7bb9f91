"""A target that cannot allocate connection resources refuses the login (RFC 7145, 10.1.3.1); one
that can holds what the session needs now, and no less than it has promised."""

from __future__ import annotations

import errno
import gc
import mmap
import tracemalloc
from collections.abc import Callable

import pytest

from iserblk.datamover.iser import CONTROL, WSV, ControlHeader
from iserblk.errors import Busy, ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs
from iserblk.rcap import seam
from iserblk.rcap.iwarp.queuepair import header_slots
from iserblk.rcap.iwarp.transmit import SlotFrame
from iserblk.rcap.seam import HeaderSlot
from iserblk.target.iscsi.tasks import slots
from iserblk.target.iscsi.tasks.slots import (
    BATCH_SLOTS,
    FEW_COMMANDS,
    QUEUE_DEPTH,
    RESERVE,
    SENSE_INLINE,
    TASK_SLOTS,
)
from tests.datamover.test_stream_target import Target
from tests.target.iser_client import IserClient, rw10, tasks_of
from tests.vectors import streaming_login as golden

FEW = 8  # slots: those of the login
REASONS = (
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
    Busy("RDMA device x: Cannot allocate memory"),
)


@pytest.mark.parametrize("reason", REASONS, ids=lambda error: type(error).__name__)
def test_in_messages(reason: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login has agreed; then memory for the session's slots cannot be had.

    proves: ISER-5.1.2-7, ISER-10.1.3.1-4
    """
    client = IserClient()
    pair = client.target_pair
    alloc = pair.alloc_headers

    def few(count: int, size: int) -> list[HeaderSlot]:
        if count > FEW:
            raise reason
        return alloc(count, size)

    monkeypatch.setattr(pair, "alloc_headers", few)
    client.login()
    (answer,) = client.heard
    assert answer.opcode == bhs.LOGIN_RESPONSE
    assert answer.bhs[36:38] == b"\x03\x02" and not answer.bhs[1] & 0x80
    assert client.connection.done and client.connection.login.failed
    assert "enable_datamover" not in [name for name, _ in client.datamover.calls]
    assert "no connection resources" in client.connection.login.problem
    # Nobody is told of a session that does not exist.
    assert client.connection.parameters is None


def test_on_a_byte_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """proves: ISER-5.1.2-7, ISER-10.1.3.1-4"""
    target = Target()
    alloc = target.qp.alloc_headers

    def few(count: int, size: int) -> list[HeaderSlot]:
        if count > FEW:
            raise MemoryError
        return alloc(count, size)

    monkeypatch.setattr(target.qp, "alloc_headers", few)
    try:
        heard = target.say(golden.LOGIN_REQUEST)
        # (The command window, which means nothing in a refusal, is open already.)
        want = golden.OUT_OF_RESOURCES
        assert heard[:32] + heard[36:] == want[:32] + want[36:]
        assert target.connection.done
    finally:
        target.close()


# -- slots that are made when they are needed ------------------------------------------------------

TEST_UNIT_READY = bytes(6)


def watched(
    client: IserClient, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[int], bool]
) -> list[int]:
    """How many slots the target asks its queue pair for, each time. ``refuse``: there is no memory
    for so many."""
    asked: list[int] = []
    pair = client.target_pair
    alloc = pair.alloc_headers

    def some(count: int, size: int) -> list[HeaderSlot]:
        asked.append(count)
        if refuse(count):
            raise MemoryError
        return alloc(count, size)

    monkeypatch.setattr(pair, "alloc_headers", some)
    return asked


def burst(client: IserClient, count: int = QUEUE_DEPTH) -> list[bytes]:
    """So many commands at once; their answers."""
    before = len(client.heard)
    for itt in range(count):
        client.send(b"\x10" + bytes(27) + client.scsi(TEST_UNIT_READY, itt=itt))
    client.run()
    return [heard.bhs for heard in client.heard[before:]]


def served(answers: list[bytes], count: int = QUEUE_DEPTH) -> bool:
    """Whether each command was answered, and with GOOD."""
    itts = [int.from_bytes(header[16:20], "big") for header in answers]
    return itts == list(range(count)) and {header[2:4] for header in answers} == {b"\0\0"}


def test_an_idle_session_has_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole depth is served when it is wanted; receives for it are there from the beginning."""
    client = IserClient(at_once=False)
    asked = watched(client, monkeypatch, lambda _: False)
    client.logged_in()
    assert [count for count in asked if count] == [BATCH_SLOTS]
    assert client.receives >= QUEUE_DEPTH
    assert served(burst(client))
    assert QUEUE_DEPTH <= sum(asked) <= TASK_SLOTS
    before = sum(asked)
    assert served(burst(client)) and sum(asked) == before


def test_slots_go_when_the_session_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    client = IserClient(at_once=False)
    asked = watched(client, monkeypatch, lambda _: False)
    client.logged_in()
    assert served(burst(client))
    client.connection.trim()  # it was busy
    made = sum(asked)
    assert served(burst(client, FEW_COMMANDS), FEW_COMMANDS)
    keep_completions(client)
    gc.collect()
    before = slots_alive(client)
    client.connection.trim()
    assert slots_alive(client) == BATCH_SLOTS < before  # at once: nothing waits for the collector
    assert served(burst(client)) and sum(asked) > made


def keep_completions(client: IserClient) -> None:
    """As software iWARP does, for the next time that a request completes."""
    for slot in client.connection.slots.all:
        for request in (slot.request, slot.transfer):
            request.done = seam.Completion(request.opcode, request.token)


def slots_alive(client: IserClient) -> int:
    client.datamover.calls.clear()  # with their arguments
    return sum(
        1
        for each in gc.get_objects()
        if type(each).__name__ == "TargetTask"
        and not each.control
        and getattr(each, "connection", None) is client.connection
    )


def test_a_session_that_works_keeps_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose data is under way needs its slot, however long it takes."""
    client = IserClient(at_once=False).logged_in()
    assert served(burst(client))
    client.connection.trim()
    client.ours.hold = True  # the initiator sends no data
    data = bytes(4096)
    stag, base = client.ours.advertise(memoryview(data), 1)
    header = ControlHeader(0x18, stag, base, 0, 0)
    head = bytearray(28)
    header.pack_into(memoryview(head))
    client.send(bytes(head) + client.scsi(rw10(0x2A, len(data)), 0xA0, len(data), itt=77))
    client.connection.progress(0.0)
    before = slots_alive(client)
    client.connection.trim()
    assert slots_alive(client) == before
    client.ours.hold = False
    client.run()
    assert client.heard[-1].bhs[16:20] == (77).to_bytes(4, "big")
    client.connection.trim()
    assert slots_alive(client) == BATCH_SLOTS


def test_the_reserve_keeps_the_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for more slots is refused after the login has promised them: the reserve is given up,
    and all slots are made in its place."""
    refusals = 1
    client = IserClient(at_once=False)

    def refuse(_count: int) -> bool:
        nonlocal refusals
        refusals -= 1
        return refusals == 0

    client.logged_in()
    asked = watched(client, monkeypatch, refuse)
    assert served(burst(client))
    assert asked == [BATCH_SLOTS, TASK_SLOTS - BATCH_SLOTS]
    assert served(burst(client)) and len(asked) == 2


def test_without_any_memory_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: an error of the connection, and none of the target."""
    client = IserClient(at_once=False).logged_in()
    watched(client, monkeypatch, lambda _: True)
    with pytest.raises(ConnectionLost, match="no memory"):
        burst(client)
    client.connection.close()


@pytest.mark.plain("the function that maps memory is replaced")
def test_without_a_reserve_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """proves: ISER-5.1.2-7, ISER-10.1.3.1-4"""

    def refused(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(slots, "mmap", refused)
    client = IserClient(at_once=False)
    client.login()
    (answer,) = client.heard
    assert answer.bhs[36:38] == b"\x03\x02" and client.connection.login.failed


def test_the_reserve_is_as_large_as_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    client = IserClient(at_once=False)
    client.logged_in()
    pair = client.target_pair
    monkeypatch.setattr(pair, "alloc_headers", header_slots)  # those of software iWARP
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        client.connection.slots.make(TASK_SLOTS - BATCH_SLOTS)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # (What is mapped is not traced.)
    mapped = (TASK_SLOTS - BATCH_SLOTS) * SlotFrame.room(28 + bhs.BHS_LENGTH + SENSE_INLINE)
    assert after - before + mapped < RESERVE
    client.connection.close()


def test_all_at_once_where_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    client = IserClient()
    asked = watched(client, monkeypatch, lambda _: False)
    client.logged_in()
    client.connection.trim()
    assert served(burst(client))
    assert [count for count in asked if count] == [TASK_SLOTS]
    client.connection.trim()
    assert slots_alive(client) == TASK_SLOTS


def test_more_commands_than_slots() -> None:
    """Immediate commands need no place in the command window, and these wait for their data: the
    connection ends where the slots do, and no sooner."""
    client = IserClient(at_once=False).logged_in([])
    stag, base = client.ours.advertise(memoryview(bytearray(512)), seam.REMOTE_READ)
    head = bytearray(28)
    ControlHeader(CONTROL | WSV, stag, base, 0, 0).pack_into(memoryview(head))

    def send(itt: int) -> None:
        unit = bytearray(client.scsi(rw10(0x2A, 512), 0xA0, 512, itt))
        unit[0] |= bhs.IMMEDIATE
        client.send(bytes(head + unit))
        client.connection.progress(0.0)  # and none of what is asked for is answered

    for itt in range(TASK_SLOTS):
        send(itt)
    assert len(tasks_of(client.connection)) == TASK_SLOTS
    with pytest.raises(RemoteProtocolError, match="more commands than"):
        send(TASK_SLOTS)
