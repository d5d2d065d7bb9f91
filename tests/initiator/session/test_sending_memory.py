"""Commands wait in order while no memory is free to advertise their data from."""

from __future__ import annotations

from iserblk.commands.command import QUEUED, SENT
from iserblk.datamover.seam import PduSlot
from iserblk.errors import Busy
from tests.initiator.fake import (
    CountingWaiter,
    FakeDatamover,
    cmd_sn_of,
    command,
    itt_of,
    response,
    session,
)


def limited(dm: FakeDatamover, places: int) -> list[int]:
    """Let at most ``places`` commands have memory at a time. The returned list holds the number of
    free places; a test may change it."""
    left = [places]
    send_control, deallocate = dm.send_control, dm.deallocate_task_resources

    def send(slot: PduSlot) -> None:
        if not left[0]:
            raise Busy("no memory")
        left[0] -= 1
        send_control(slot)

    def end(slot: PduSlot, invalidated: int) -> None:
        left[0] += 1
        deallocate(slot, invalidated)

    dm.send_control = send  # type: ignore[method-assign]
    dm.deallocate_task_resources = end  # type: ignore[method-assign]
    return left


def test_they_go_out_in_order_as_others_end() -> None:
    made, dm = session(depth=8)
    limited(dm, 2)
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(6)]
    assert [slot.state for slot in slots] == [SENT] * 2 + [QUEUED] * 4
    for index in range(6):
        dm.inbox.append(response(itt_of(dm.sent[index]), exp_cmd_sn=index + 2))
        made.progress(1.0)
        assert len(dm.sent) == min(6, index + 3)
    assert [sent[0] for sent in dm.sent] == slots
    assert [cmd_sn_of(sent) for sent in dm.sent] == list(range(1, 7))
    assert waiter.woken == 1 and waiter.pending == 0


def test_memory_that_comes_back_later_is_noticed() -> None:
    """Commands are sent when memory becomes free without an answer of the target: the invalidation
    of a memory window completed."""
    made, dm = session()
    left = limited(dm, 0)
    slot = command(made, CountingWaiter())
    made.progress(1.0)
    assert slot.state == QUEUED and not dm.sent
    left[0] = 1
    made.progress(2.0)
    assert slot.state == SENT and cmd_sn_of(dm.sent[0]) == 1


def test_one_that_waits_can_be_aborted() -> None:
    made, dm = session()
    limited(dm, 0)
    waiter = CountingWaiter()
    slot = command(made, waiter)
    made.queue.end_aborted(slot, Busy("given up"))
    assert waiter.woken == 1 and isinstance(slot.error, Busy)
    made.progress(1.0)
    assert not dm.sent
