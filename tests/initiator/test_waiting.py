"""The blocking driver: who is woken, and by what."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

from iserblk.initiator.waiting import BlockingDriver, ThreadWaiter
from tests.initiator import fake


class _Poll:
    """poll(2), recorded: ``results`` has what each call returned; ``entered`` is set in each."""

    def __init__(self, poll: Any) -> None:
        self._poll = poll
        self.entered = threading.Event()
        self.results: list[list[tuple[int, int]]] = []

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.entered.set()
        found: list[tuple[int, int]] = self._poll.poll(20 * timeout)
        self.results.append(found)
        return found


def _driver() -> tuple[BlockingDriver, _Poll, int]:
    """A driver of a session whose descriptor never becomes readable; the pipe's other end."""
    session, datamover = fake.session()
    quiet, other = os.pipe()
    datamover.fileno = lambda: quiet  # type: ignore[method-assign]
    driver = BlockingDriver(session)
    poll = driver._poll = _Poll(driver._poll)  # type: ignore[assignment]
    return driver, poll, other


def test_a_leader_that_waits_for_another_thread_is_woken() -> None:
    """It polls the connection, but what it waits for (a slot, a range lock) comes from a thread."""
    driver, poll, _ = _driver()
    waiters: list[ThreadWaiter] = []
    made = threading.Event()

    def lead() -> None:
        waiter = driver.waiter()
        waiter.pending = 1
        waiters.append(waiter)
        made.set()
        driver.wait(waiter)

    thread = threading.Thread(target=lead)
    thread.start()
    assert made.wait(20) and poll.entered.wait(20)
    waiters[0].task_done()
    thread.join(60)
    assert not thread.is_alive()
    # Every poll returned because of an event, none because its time was over.
    assert [[kind for _, kind in found] for found in poll.results] == [[select.POLLIN]]
