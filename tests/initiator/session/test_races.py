"""Races of two threads, made certain: the second runs where the first would be preempted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest

from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import NO_DATA
from iserblk.errors import ConnectionLost
from iserblk.initiator.session.slots import TAKEN, TaskSlot
from iserblk.rcap.inprocess import memory_pair
from tests.initiator.fake import CountingWaiter, command, driver_of, session
from tests.support import logs

pytestmark = pytest.mark.logs(logs.RECONNECTED)


class _Lock:
    """A lock that runs ``turn`` once, after its first release, in place of another thread."""

    def __init__(self, turn: Callable[[], object]) -> None:
        self._turn: Callable[[], object] | None = turn

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn()


def test_session_fails_while_a_command_is_submitted() -> None:
    """The leader ends the task; the submitting thread must not end it once more."""
    made, _ = session()
    waiter = CountingWaiter()
    made.queue.lock = _Lock(lambda: made.fail(ConnectionLost("gone")))  # type: ignore[assignment]
    slot = command(made, waiter)
    assert slot.state == TAKEN and isinstance(slot.error, ConnectionLost)
    assert (waiter.pending, waiter.woken) == (0, 1)


def test_commands_are_submitted_while_progress_sends() -> None:
    """No thread waits for the sender's lock: the next sender takes along what was queued."""
    made, datamover = session()
    datamover.busy = True
    command(made, CountingWaiter())
    assert datamover.queued and not datamover.sent
    datamover.busy = False
    command(made, CountingWaiter())
    assert len(datamover.sent) == 2


class _Free(list[TaskSlot]):
    """The list of free slots. Each ``bool`` and ``pop`` of it runs the next of ``turns``."""

    def __init__(self, slots: list[TaskSlot]) -> None:
        super().__init__(slots)
        self.turns: deque[Callable[[], object]] = deque()

    def _looked(self) -> None:
        if self.turns:
            self.turns.popleft()()

    def __bool__(self) -> bool:
        found = len(self) > 0
        self._looked()
        return found

    def pop(self, *at: Any) -> TaskSlot:
        try:
            return super().pop(*at)
        finally:
            self._looked()


def _nothing() -> None:
    pass


@pytest.mark.plain("replaces a list by one that interferes")
def test_last_slot_comes_back_while_a_thread_starts_to_wait() -> None:
    """The thread is woken by the thread that gave the slot back meanwhile, or it has the slot."""
    made, _ = session(depth=1)
    made.queue._free = free = _Free(made.queue._free)
    held = made.queue.take(CountingWaiter())
    assert held is not None
    waiter = CountingWaiter()
    other = threading.Thread(target=made.queue.release, args=(held,))

    def release_elsewhere() -> None:
        other.start()
        other.join(0.2)  # it may have to wait for the session's lock

    free.turns.extend((_nothing, release_elsewhere))
    slot = made.queue.take(waiter)
    other.join(60)
    assert waiter.pending == 0
    assert slot is held or made.queue.take(waiter) is held


@pytest.mark.plain("replaces a list by one that interferes")
def test_free_slot_is_snatched_from_a_thread_that_saw_it() -> None:
    """The thread gets the slot, or waits for it."""
    made, _ = session(depth=1)
    made.queue._free = free = _Free(made.queue._free)
    held = made.queue.take(CountingWaiter())
    assert held is not None
    free.turns.extend((lambda: made.queue.release(held), made.queue.take_now))
    waiter = CountingWaiter()
    if made.queue.take(waiter) is None:
        assert waiter.pending == 1
        made.queue.release(held)
        assert waiter.pending == 0 and made.queue.take(waiter) is held


class _Queue(deque[Any]):
    """PDUs that wait for ``flush``; ``turn`` runs before each is taken."""

    turn: Callable[[], object]

    def popleft(self) -> Any:
        self.turn()
        return super().popleft()


def test_connection_ends_while_a_thread_flushes() -> None:
    """``flush`` raises ConnectionLost, as the seam says."""
    ours, theirs = memory_pair()
    datamover = IserInitiator(ours, 512)
    slots = [TaskSlot(index) for index in range(3)]
    datamover.allocate_connection_resources(list(slots), 0)
    queue = _Queue()
    queue.turn = datamover.connection_terminate
    datamover.queued = queue
    for slot in slots:
        slot.direction = NO_DATA
        datamover.send_control(slot)
    with pytest.raises(ConnectionLost):
        datamover.flush()
    theirs.close()


def test_connection_is_replaced_while_a_thread_sends_on_the_old_one() -> None:
    """The adoption of the new connection finds a sender at work and sends nothing itself; that
    sender goes on with the new connection."""
    made, old = session()
    driver_of(made).reconnect = _nothing
    fresh, new = session()

    def flush() -> None:
        old.inbox.append(ConnectionLost("gone"))
        made.progress(1.0)
        made.offer(fresh)
        made.progress(2.0)
        raise ConnectionLost("closed")

    old.flush = flush  # type: ignore[assignment,method-assign]
    slot = command(made, CountingWaiter())
    assert [sent for sent, _ in new.sent] == [slot] and not new.queued
