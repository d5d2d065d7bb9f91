"""Task sets: which task may begin, in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.scsi.tasks import ACA, HEAD_OF_QUEUE, ORDERED, SIMPLE, UNTAGGED
from iserblk.target.task_set import TaskSets

LUN = 3


@dataclass
class Lun:
    """The tasks of one LUN, by number; younger tasks have higher numbers."""

    present: dict[int, int] = field(default_factory=dict)  # attributes
    enabled: list[int] = field(default_factory=list)
    newest: int = 0

    def __post_init__(self) -> None:
        self.sets = TaskSets(lambda lun: list(self.present) if lun == LUN else [])

    def arrive(self, attribute: int) -> int:
        self.newest += 1
        task = self.newest
        self.present[task] = attribute
        if attribute not in (SIMPLE, UNTAGGED) or self.sets.active:
            if self.sets.enter(LUN, task, attribute, partial(self.enabled.append, task)):
                self.enabled.append(task)
        else:
            self.enabled.append(task)
        return task

    def end(self, task: int) -> None:
        del self.present[task]
        self.sets.leave(LUN, task)
        self.sets.enable_ready()


@pytest.fixture
def lun() -> Lun:
    return Lun()


def test_simple_tasks_alone_keep_no_set(lun: Lun) -> None:
    for attribute in (SIMPLE, UNTAGGED, 7):
        lun.arrive(attribute)
    assert lun.enabled == [1, 2, 3] and not lun.sets.active
    lun.end(2)
    assert not lun.sets.active


def test_an_ordered_task_waits_for_all_older_ones_and_younger_ones_for_it(lun: Lun) -> None:
    for attribute in (SIMPLE, SIMPLE, ORDERED, SIMPLE, UNTAGGED, ORDERED, SIMPLE):
        lun.arrive(attribute)
    assert lun.enabled == [1, 2]
    lun.end(2)
    assert lun.enabled == [1, 2]
    lun.end(1)
    assert lun.enabled == [1, 2, 3]
    lun.end(3)
    assert lun.enabled == [1, 2, 3, 4, 5]
    lun.end(4)
    assert lun.enabled == [1, 2, 3, 4, 5]
    lun.end(5)
    lun.end(6)
    assert lun.enabled == [1, 2, 3, 4, 5, 6, 7] and not lun.sets.active


def test_an_ordered_task_alone_does_not_wait(lun: Lun) -> None:
    lun.arrive(ORDERED)
    assert lun.enabled == [1]
    lun.end(1)
    assert not lun.sets.active


def test_a_head_of_queue_task_begins_at_once_and_holds_up_what_is_dormant(lun: Lun) -> None:
    for attribute in (SIMPLE, ORDERED, HEAD_OF_QUEUE, HEAD_OF_QUEUE, SIMPLE):
        lun.arrive(attribute)
    assert lun.enabled == [1, 3, 4]
    for task in (1, 3):
        lun.end(task)
    assert lun.enabled == [1, 3, 4], "another HEAD OF QUEUE task has not ended"
    lun.end(4)
    assert lun.enabled == [1, 3, 4, 2]
    lun.end(2)
    assert lun.enabled == [1, 3, 4, 2, 5]


def test_a_dormant_task_that_leaves_is_not_waited_for(lun: Lun) -> None:
    for attribute in (SIMPLE, ORDERED, SIMPLE, ORDERED):
        lun.arrive(attribute)
    lun.end(2)
    assert lun.enabled == [1, 3]
    lun.end(4)
    assert not lun.sets.active
    lun.end(1)
    lun.end(3)
    assert lun.enabled == [1, 3]


def test_a_task_that_leaves_when_its_turn_has_come_does_not_begin(lun: Lun) -> None:
    """Tasks are not begun while others are being ended, perhaps with them."""
    for attribute in (ORDERED, ORDERED, SIMPLE):
        lun.arrive(attribute)
    lun.sets.leave(LUN, 1)
    assert lun.enabled == [1] and lun.sets.ready
    lun.sets.leave(LUN, 2)
    lun.sets.enable_ready()
    assert lun.enabled == [1, 3] and not lun.sets.ready and not lun.sets.active


def test_tasks_that_end_at_once_do_not_nest(lun: Lun) -> None:
    """A long queue of ORDERED tasks, each of which ends as soon as it begins."""
    depth = most = 0

    def begin(task: int) -> None:
        nonlocal depth, most
        depth += 1
        most = max(most, depth)
        lun.enabled.append(task)
        lun.end(task)
        depth -= 1

    first = lun.arrive(ORDERED)
    for task in range(first + 1, 3000):
        lun.present[task] = ORDERED
        assert not lun.sets.enter(LUN, task, ORDERED, partial(begin, task))
    lun.end(first)
    assert lun.enabled == list(range(1, 3000)) and most == 1
    assert not lun.sets.active


def test_luns_have_sets_of_their_own(lun: Lun) -> None:
    lun.arrive(SIMPLE)
    lun.arrive(ORDERED)
    assert lun.sets.enter(LUN + 1, "other", ORDERED, lambda: None)
    lun.sets.leave(LUN + 1, "other")
    assert lun.enabled == [1] and list(lun.sets.active) == [LUN]


def test_a_lun_that_is_gone_leaves_nothing_to_the_next_one(lun: Lun) -> None:
    """Its tasks may run on for long."""
    running = lun.arrive(SIMPLE)
    lun.end(lun.arrive(ORDERED))
    head = lun.arrive(HEAD_OF_QUEUE)
    lun.present.clear()
    lun.sets.forget(LUN)
    lun.sets.forget(LUN)
    assert not lun.sets.active
    new = lun.arrive(ORDERED)
    assert lun.enabled[-1] == new
    for old in (running, head):
        lun.sets.leave(LUN, old)
    assert list(lun.sets.active) == [LUN]
    lun.end(new)
    assert not lun.sets.active and not lun.sets.ready


def test_strangers_may_leave(lun: Lun) -> None:
    lun.sets.leave(LUN, "nobody")
    lun.arrive(ORDERED)
    lun.sets.leave(LUN, "nobody")
    assert list(lun.sets.active) == [LUN]


def may_begin(tasks: dict[int, int], task: int) -> bool:
    """The rules of SAM-5, word for word, of a task that is dormant."""
    others = [attribute for other, attribute in tasks.items() if other != task]
    older = [attribute for other, attribute in tasks.items() if other < task]
    if tasks[task] == HEAD_OF_QUEUE:
        return True
    if HEAD_OF_QUEUE in others:
        return False
    return not older if tasks[task] == ORDERED else ORDERED not in older


@given(
    st.lists(
        st.one_of(
            st.sampled_from((UNTAGGED, SIMPLE, SIMPLE, ORDERED, HEAD_OF_QUEUE)),
            st.tuples(st.integers(0, 30), st.booleans()),
        ),
        max_size=60,
    )
)
def test_any_order_of_events_keeps_to_the_rules(
    steps: list[int | tuple[int, bool]],
) -> None:
    """A task begins as soon as the rules allow, never before, and never twice. The steps are tasks
    that arrive, and that end or, where they are dormant, are aborted."""
    lun = Lun()
    begun: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            lun.arrive(step)
        else:
            which, dormant_too = step
            choice = [task for task in lun.present if dormant_too or task in begun]
            if choice:
                lun.end(choice[which % len(choice)])
        allowed = {task for task in lun.present if may_begin(lun.present, task)}
        # What has begun goes on, whatever arrives later.
        begun = {task for task in begun | allowed if task in lun.present}
        assert begun == {task for task in lun.present if task in lun.enabled}
        assert len(set(lun.enabled)) == len(lun.enabled)
        ranked = any(each in (ORDERED, HEAD_OF_QUEUE) for each in lun.present.values())
        assert bool(lun.sets.active) == ranked
    assert ACA not in lun.present.values()
