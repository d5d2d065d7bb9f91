"""The threads of a loop: how many there are, and when they end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from iserblk.loop.work import Limit
from iserblk.loop.workers import Workers
from tests.support.until import until_blocking

WAIT_S = 30


class Loop:
    """As far as workers need it: the test runs what threads have sent."""

    def __init__(self) -> None:
        self.sent: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.name = f"worker of {id(self)}"
        self.workers = Workers(self.sent.put, self.name)
        self.ended = 0

    def run(self, count: int) -> None:
        for _ in range(count):
            self.sent.get(timeout=WAIT_S)()

    def begin(self, work: Callable[[], object], limit: Limit) -> None:
        def ended(error: BaseException | None) -> None:
            assert error is None
            self.ended += 1

        self.workers.begin(work, ended, limit)

    def threads(self) -> list[threading.Thread]:
        return [each for each in threading.enumerate() if each.name == self.name]


def test_a_thread_is_used_again() -> None:
    loop = Loop()
    limit = Limit(16)
    seen: set[int] = set()
    for _ in range(20):
        loop.begin(lambda: seen.add(threading.get_ident()), limit)
        loop.run(1)
    assert len(seen) == 1 and loop.ended == 20
    assert (loop.workers.busy, loop.workers.idle) == (0, 1)
    loop.workers.close()
    for thread in loop.threads():
        thread.join(WAIT_S)
    assert not loop.threads()


def test_no_more_threads_than_work() -> None:
    loop = Loop()
    go = threading.Event()
    for _ in range(5):
        loop.begin(lambda: go.wait(WAIT_S), Limit(16))
    assert len(loop.threads()) == 5
    assert (loop.workers.busy, loop.workers.idle) == (5, 0)
    go.set()
    loop.run(5)
    for _ in range(5):
        loop.begin(lambda: None, Limit(1))
    assert len(loop.threads()) == 5
    loop.run(5)
    loop.workers.close()


def test_threads_that_were_not_needed_end() -> None:
    """Those that were busy at any time since the last look stay."""
    loop = Loop()
    go = threading.Event()
    limit = Limit(16)
    for _ in range(5):
        loop.begin(lambda: go.wait(WAIT_S), limit)
    go.set()
    loop.run(5)
    loop.workers.retire()
    assert loop.workers.idle == 5
    loop.begin(lambda: None, limit)
    loop.run(1)
    loop.workers.retire()
    assert loop.workers.idle == 1
    loop.workers.retire()
    assert loop.workers.idle == 0
    for thread in loop.threads():
        thread.join(WAIT_S)
    loop.begin(lambda: None, limit)  # it begins anew
    loop.run(1)
    assert loop.ended == 7
    loop.workers.close()


def test_nothing_is_kept_of_work_that_has_ended() -> None:
    """The buffer of a command, for instance, by a thread that waits for the next."""

    class Buffer:
        pass

    loop = Loop()
    buffer = Buffer()
    gone = weakref.ref(buffer)

    def work(_buffer: Buffer = buffer) -> None: ...

    loop.begin(work, Limit(1))
    del work, buffer
    loop.run(1)
    until_blocking(lambda: gone() is None)
    loop.workers.close()
