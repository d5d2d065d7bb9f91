"""RangeGuard: which commands wait for which."""

from __future__ import annotations

import threading

from iserblk.target.scsi.guard import RangeGuard


def test_writers_do_not_exclude_each_other() -> None:
    guard = RangeGuard()
    for _ in range(3):
        assert guard.enter((0, 10), nowait=True)
    for _ in range(3):
        guard.leave((0, 10))


def test_touching_spans_do_not_overlap() -> None:
    guard = RangeGuard()
    with guard.exclusive((10, 20)):
        assert guard.enter((0, 10), nowait=True)
        assert guard.enter((20, 30), nowait=True)
        for overlapping in ((0, 11), (19, 30), (12, 13), (0, 30)):
            assert not guard.enter(overlapping, nowait=True)
    assert guard.enter((0, 30), nowait=True)


def test_the_exclusive_one_waits_for_the_writers_there_are_and_lets_no_new_one_in() -> None:
    guard = RangeGuard()
    order: list[str] = []
    assert guard.enter((0, 10), nowait=False)

    def exclusive() -> None:
        with guard.exclusive((5, 15)):
            order.append("exclusive")

    thread = threading.Thread(target=exclusive)
    thread.start()
    # It has announced itself as soon as a new writer is turned away.
    while thread.is_alive() and guard.enter((10, 12), nowait=True):
        guard.leave((10, 12))
    order.append("writer")
    guard.leave((0, 10))
    thread.join()
    assert order == ["writer", "exclusive"]
    assert guard.enter((10, 12), nowait=True)


def test_exclusive_ones_take_turns() -> None:
    guard = RangeGuard()
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(50):
            with guard.exclusive((0, 10)):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert guard.enter((0, 10), nowait=True)
