"""Notices of transfers, and the order of the calls that set a connection up: every datamover."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import replace

import pytest

from iserblk.datamover.seam import PduSlot, TargetSlot
from iserblk.errors import LocalProtocolError, RemoteProtocolError
from iserblk.rcap.inprocess import READ_RESPONSE, MemoryQueuePair, Message, memory_pair
from iserblk.rcap.seam import RDMA_READ, RDMA_WRITE, SEND_SE_INVALIDATE
from iserblk.scsi.tasks import READ, WRITE
from tests.contract.datamovers import (
    INLINE_SIZE,
    ISER,
    ISER_WAYS,
    RECEIVE_SIZE,
    RECEIVES,
    WAYS,
    Ends,
    Numbers,
    Recorder,
    Way,
    final_response,
    over_rdma,
)

ACKNOWLEDGED = {
    f"{name}-level-{level}": Way(way.make, replace(ISER, error_recovery_level=level))
    for name, way in ISER_WAYS.items()
    for level in (1, 2)
}


@pytest.fixture(params=list(WAYS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(WAYS[request.param])
    yield both
    both.close()


@pytest.fixture
def connect() -> Iterator[Callable[[Way], Ends]]:
    made: list[Ends] = []

    def make(way: Way) -> Ends:
        made.append(Ends(way))
        return made[-1]

    yield make
    for one in made:
        one.close()


def so_many(things: Sized, count: int) -> Callable[[], bool]:
    return lambda: len(things) == count


def watch(pair: MemoryQueuePair, lost: int | None = None) -> list[Message]:
    """Every message that leaves this end; those of kind ``lost`` never arrive."""
    left: list[Message] = []

    def see(message: Message) -> bool:
        left.append(message)
        return message.kind != lost

    pair.intercept = see
    return left


# -- Notify_Enable ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8192, 200_000])
def test_put_data_with_notify_enable(ends: Ends, size: int) -> None:
    """One notice, with task and DataSN, before the response is known to have left.

    proves: ISER-3.1.2-2, ISER-3.2.2-1, ISER-7.1-2, ISER-7.3.5-8, ISER-7.3.5-9
    """
    buffer, source = bytearray(size), bytes(i * 3 & 255 for i in range(size))
    answer = ends.commanded(0, READ, memoryview(buffer))
    order: list[str] = []
    completed, sent = ends.down.data_completion_notify, ends.down.sent_notify

    def on_complete(slot: PduSlot, sn: int) -> None:
        order.append("completed")
        completed(slot, sn)

    def on_sent(slot: PduSlot) -> None:
        order.append("sent")
        sent(slot)

    ends.down.data_completion_notify = on_complete  # type: ignore[method-assign]
    ends.down.sent_notify = on_sent  # type: ignore[method-assign]
    ends.target.put_data(answer, memoryview(source), 0, notify_enable=True)
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus) and bool(ends.down.sent))
    assert bytes(buffer) == source
    assert order == ["completed", "sent"] and answer.busy == 0
    ((slot, sn),) = ends.down.completed
    assert slot is answer
    # The DataSN of the only Data-In, or of the last of those that Traditional iSCSI makes of it.
    iser = ends.way.rdma_extensions
    assert sn == (0 if iser else -(-size // ends.way.initiator_recv_data_segment_length) - 1)


def test_data_sns_and_r2t_sns_count_on(ends: Ends) -> None:
    """Each notice has the number of its own transfer, and the next task begins at 0 again.

    proves: ISER-3.2.2-1, ISER-7.3.5-8
    """
    source, sink = bytearray(b"w" * 65536), bytearray(3 * 512)
    for turn in range(2):
        answer = ends.commanded(turn, WRITE, memoryview(source))
        for part in range(3):
            at = 16384 + part * 512
            ends.target.get_data(answer, memoryview(sink)[part * 512 :][:512], at)
            ends.until(so_many(ends.down.completed, part + 1))
        assert ends.down.completed == [(answer, sn) for sn in range(3)]
        ends.down.completed.clear()
        ends.respond(turn)
        ends.until(so_many(ends.up.pdus, turn + 1))


def test_get_data_without_notify_enable(ends: Ends) -> None:
    """The sink is filled and no longer busy, and nothing is notified; with Notify_Enable it is.

    proves: ISER-3.1.3-2, ISER-7.3.6-17, ISER-7.3.6-18
    """
    source, sink = bytearray(b"y" * 65536), bytearray(4096)
    answer = ends.commanded(0, WRITE, memoryview(source))
    ends.target.get_data(answer, memoryview(sink), 16384, notify_enable=False)
    assert answer.busy == 1
    ends.until(lambda: answer.busy == 0)
    assert sink == b"y" * 4096 and not ends.down.completed
    ends.target.get_data(answer, memoryview(sink), 20480, notify_enable=True)
    ends.until(lambda: bool(ends.down.completed))
    assert ends.down.completed == [(answer, 1)]


def test_put_data_without_notify_enable(ends: Ends) -> None:
    """Nothing is notified, also not for a task whose slot was used with Notify_Enable before.

    proves: ISER-3.1.2-2, ISER-7.3.6-18
    """
    buffer = bytearray(8)
    for turn, notify in enumerate((True, False)):
        answer = ends.commanded(turn, READ, memoryview(buffer))
        ends.next = 0  # the same slot of the target once more
        ends.answers[turn] = answer
        ends.target.put_data(answer, memoryview(b"%8d" % turn), 0, notify)
        ends.respond(turn)
        ends.until(so_many(ends.down.sent, turn + 1))
        assert len(ends.down.completed) == 1
        ends.target.deallocate_task_resources(answer)


# -- Data_ACK_Notify (RFC 7145 section 7.3.5) ------------------------------------------------------


# shows: SYSTEM-40
@pytest.mark.parametrize("name", list(ACKNOWLEDGED))
def test_an_acknowledged_put_data(connect: Callable[[Way], Ends], name: str) -> None:
    """The notice has the DataSN of the task's next Data-In, and the data is there by then.

    proves: ISER-3.2.3-1, ISER-7.3.5-12
    """
    ends = connect(ACKNOWLEDGED[name])
    buffer = bytearray(300_000)
    answer = ends.commanded(0, READ, memoryview(buffer))
    for part in range(2):
        data = bytes((part + 1,)) * 150_000
        ends.target.put_data(answer, memoryview(data), part * 150_000, acknowledge=True)
        ends.until(so_many(ends.down.acknowledged, part + 1))
        assert ends.down.acknowledged[part] == (answer, part + 1)
        if name.endswith("2"):  # at level 1 it has only left
            assert buffer[part * 150_000 :][:150_000] == data
    assert not ends.down.completed and answer.busy == 0
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert bytes(buffer) == b"\1" * 150_000 + b"\2" * 150_000


# shows: SYSTEM-42
@pytest.mark.parametrize(("level", "reads"), [(None, 1), (2, 1), (1, 0)])
def test_a_read_of_nothing_acknowledges(
    connect: Callable[[Way], Ends], level: int | None, reads: int
) -> None:
    """A zero-length RDMA Read behind the Write, unless the level is known to be 1. Its answer is
    what acknowledges: none, no notice.

    proves: ISER-7.3.5-13, ISER-7.3.5-14, ISER-7.3.5-15, ISER-7.3.5-16, ISER-10.2-2
    """
    pair = memory_pair(receive_size=RECEIVE_SIZE)
    known = replace(ISER, error_recovery_level=level or 0)
    ends = connect(Way(lambda: over_rdma(pair), known))
    if level is None:  # Notice_Key_Values did not tell
        ends.target = over_rdma(pair)[1]
        ends.target.user = ends.down
        ends.target.allocate_connection_resources(ends.answers, INLINE_SIZE, RECEIVES)
        ends.target.enable_datamover(final_response(ends.target))
        ends.until(lambda: bool(ends.up.pdus))
        ends.up.pdus.clear()
        ends.down.sent.clear()
    ours, theirs = watch(pair[0], lost=READ_RESPONSE), watch(pair[1])
    answer = ends.commanded(0, READ, memoryview(bytearray(8)))
    ends.target.put_data(answer, memoryview(b"answered"), 0, True, acknowledge=True)
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus) and bool(ends.down.sent))
    kinds = [RDMA_WRITE, *[RDMA_READ] * reads, SEND_SE_INVALIDATE]
    assert [message.kind for message in theirs] == kinds
    assert [message.size for message in theirs[:-1]] == [8, *[0] * reads]
    assert ends.down.completed == [(answer, 0)]
    assert [message.kind for message in ours].count(READ_RESPONSE) == reads
    assert ends.down.acknowledged == ([] if reads else [(answer, 1)])
    assert answer.busy == reads


def test_no_acknowledgements_at_error_recovery_level_0(ends: Ends) -> None:
    """Nothing is queued, and the task goes on. proves: ISER-7.3.5-18"""
    buffer = bytearray(4)
    answer = ends.commanded(0, READ, memoryview(buffer))
    with pytest.raises(LocalProtocolError, match="ErrorRecoveryLevel"):
        ends.target.put_data(answer, memoryview(b"late"), 0, acknowledge=True)
    assert answer.busy == 0
    ends.target.put_data(answer, memoryview(b"data"), 0)
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert buffer == b"data" and not ends.down.acknowledged


def test_no_acknowledgement_from_an_initiator_that_takes_no_reads(
    connect: Callable[[Way], Ends],
) -> None:
    pair = memory_pair(receive_size=RECEIVE_SIZE, ird=0, ord=0)
    ends = connect(Way(lambda: over_rdma(pair), replace(ISER, error_recovery_level=2)))
    answer = ends.commanded(0, READ, memoryview(bytearray(4)))
    with pytest.raises(RemoteProtocolError, match="IRD 0"):
        ends.target.put_data(answer, memoryview(b"data"), 0, acknowledge=True)
    assert answer.busy == 0 and answer.sn == 0


# -- Allocate_Connection_Resources and Enable_Datamover --------------------------------------------


def fresh(way: Way) -> Ends:
    """Both ends, before any call."""
    ends = object.__new__(Ends)
    ends.initiator, ends.target = way.make()
    ends.up, ends.down = Recorder(), Recorder()
    ends.initiator.user, ends.target.user = ends.up, ends.down
    ends.target.notice_numbers(Numbers())
    return ends


@pytest.mark.parametrize("name", list(WAYS))
def test_enable_datamover_needs_resources(name: str) -> None:
    """It is refused before they are allocated, and for a second time; then nothing has changed.

    proves: ISER-3.1.6-1
    """
    ends = fresh(WAYS[name])
    try:
        with pytest.raises(LocalProtocolError, match="without resources"):
            ends.initiator.enable_datamover()
        with pytest.raises(LocalProtocolError, match="without resources"):
            ends.target.enable_datamover(TargetSlot(0))
        with pytest.raises(LocalProtocolError, match="without resources"):
            ends.target.add_resources([TargetSlot(0)], 8, 1)
        ends.initiator.allocate_connection_resources([PduSlot(0)], 1)
        ends.target.allocate_connection_resources([TargetSlot(0)], 8, 1)
        ends.initiator.enable_datamover()
        with pytest.raises(LocalProtocolError, match="full feature phase"):
            ends.initiator.enable_datamover()
        ends.target.enable_datamover(final_response(ends.target))
        with pytest.raises(LocalProtocolError, match="full feature phase"):
            ends.target.enable_datamover(TargetSlot(0))
    finally:
        ends.close()


@pytest.mark.parametrize("name", list(WAYS))
def test_a_second_allocation_changes_nothing(name: str) -> None:
    """It succeeds, before full feature phase and in it. The slots keep their memory, and no receive
    is added. proves: ISER-3.1.4-1"""
    ends = fresh(WAYS[name])
    slots, answers = [PduSlot(0)], [TargetSlot(0)]
    seen = []

    def posted() -> list[int]:
        pairs = [getattr(side, "qp", None) for side in (ends.initiator, ends.target)]
        return [pair.posted for pair in pairs if isinstance(pair, MemoryQueuePair)]

    try:
        for turn in range(3):
            if turn == 2:
                ends.initiator.enable_datamover()
                ends.target.enable_datamover(final_response(ends.target))
            before = posted()
            ends.initiator.allocate_connection_resources(slots, 8)
            ends.target.allocate_connection_resources(answers, INLINE_SIZE, RECEIVES)
            added = [after - each for after, each in zip(posted(), before, strict=True)]
            seen.append((slots[0].bhs, answers[0].bhs))
            if name.startswith("iser-memory"):
                assert added == ([9, RECEIVES] if turn == 0 else [0, 0])
        first = seen[0]
        assert all(again[0] is first[0] and again[1] is first[1] for again in seen)
    finally:
        ends.close()
