"""The threads of a loop: how many there are, and when they end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from iserblk.loop import workers
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


class Refusing(threading.Thread):
    """``refused``: the system starts no thread."""

    refused = False

    def start(self) -> None:
        if self.refused:
            raise RuntimeError("can't start new thread")
        super().start()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> type[Refusing]:
    monkeypatch.setattr(workers, "Thread", Refusing)
    monkeypatch.setattr(Refusing, "refused", False)
    return Refusing


def test_without_any_thread_the_work_has_failed(system: type[Refusing]) -> None:
    """It is told as all else that ends: in the loop, and never inside ``begin``. Nothing is left
    behind that a later thread would do."""
    loop = Loop()
    limit = Limit(1)
    done: list[int] = []
    found: list[BaseException | None] = []
    system.refused = True
    for number in range(2):
        loop.workers.begin(lambda number=number: done.append(number), found.append, limit)  # type: ignore[misc]
    assert not found and (limit.busy, limit.waiting) == (1, 1)
    loop.run(1)
    system.refused = False
    loop.run(1)
    assert [type(each) for each in found] == [RuntimeError, RuntimeError]
    assert not done and (limit.busy, limit.waiting) == (0, 0)
    loop.begin(lambda: done.append(2), limit)
    loop.run(1)
    assert done == [2] and (loop.workers.busy, loop.workers.idle) == (0, 1)
    loop.workers.close()


def test_where_no_further_thread_starts_those_that_there_are_do_the_work(
    system: type[Refusing],
) -> None:
    loop = Loop()
    go = threading.Event()
    loop.begin(lambda: go.wait(WAIT_S), Limit(16))
    system.refused = True
    for _ in range(3):
        loop.begin(lambda: None, Limit(16))
    assert len(loop.threads()) == 1 and loop.workers.busy == 4
    go.set()
    loop.run(4)
    assert loop.ended == 4
    system.refused = False
    go.clear()
    for _ in range(3):
        loop.begin(lambda: go.wait(WAIT_S), Limit(16))
    assert len(loop.threads()) == 3
    go.set()
    loop.run(3)
    loop.workers.close()


def test_what_is_begun_behind_the_end_is_not_kept_waiting_by_what_hangs() -> None:
    """Of a loop that ends for a bug, while what it served is cleaned up."""
    loop = Loop()
    go = threading.Event()
    loop.begin(lambda: go.wait(WAIT_S), Limit(1))
    loop.workers.close()
    loop.begin(lambda: None, Limit(1))
    loop.run(1)
    assert loop.ended == 1
    go.set()
    loop.run(1)
    loop.workers.close()
    for thread in loop.threads():
        thread.join(WAIT_S)
    assert not loop.threads()
