"""The queue in which owners take turns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from iserblk.initiator.session.fair_queue import FairQueue

OWNERS = (None, "a", "b", "c")


def test_owners_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for thing in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.add(thing, thing[0])
    assert queue.head() == "a1"
    assert [queue.pop() for _ in range(4)] == ["a1", "b1", "c1", "a2"]
    queue.add("c2", "c")
    assert [queue.pop() for _ in range(3)] == ["b2", "a3", "c2"]
    assert not queue.entries


def test_what_is_put_first_comes_first_and_once() -> None:
    queue: FairQueue[str] = FairQueue()
    for thing in ("a1", "a2", "b1"):
        queue.add(thing, thing[0])
    queue.put_first(["x", "b1"])
    queue.put_first(["y", "x"])
    queue.add_first("z")
    assert queue.clear() == ["z", "y", "x", "b1", "a1", "a2"]
    assert not queue.entries


def test_what_is_removed_does_not_come() -> None:
    queue: FairQueue[str] = FairQueue()
    for thing in ("a1", "a2", "b1", "b2"):
        queue.add(thing, thing[0])
    assert queue.remove("a2") and not queue.remove("a2")
    assert queue.clear() == ["a1", "b1", "b2"]


class Thing:
    def __init__(self, owner: object) -> None:
        self.owner = owner


@given(st.lists(st.one_of(st.sampled_from(OWNERS), st.sampled_from([0, 1, 2, 3, 4, 5]))))
def test_order_and_bound(script: list[object]) -> None:
    """Owners add things; numbers take, remove, and put first. Things of an owner come in order. One
    that is its owner's first meets at most two of each other owner. And owners who have nothing
    there are forgotten."""
    queue: FairQueue[Thing] = FairQueue()
    there: list[Thing] = []  # in the order of coming
    first: list[Thing] = []
    passed: dict[Thing, Counter[object]] = {}
    for step in script:
        if not isinstance(step, int):
            thing = Thing(step)
            queue.add(thing, step)
            if not any(each.owner == step for each in there):
                passed[thing] = Counter()
            there.append(thing)
        elif step == 0 and there:
            gone = there.pop(len(there) // 2)
            assert queue.remove(gone)
        elif step == 5:
            first.insert(0, Thing(None))
            queue.add_first(first[0])
        elif step == 1 and there:
            moved = there.pop(len(there) // 2)
            passed.pop(moved, None)
            queue.put_first([moved])
            first.insert(0, moved)
        elif there or first:
            expected = queue.head()
            taken = queue.pop()
            assert taken is expected
            if first:
                assert taken is first.pop(0)
                continue
            assert taken is next(each for each in there if each.owner == taken.owner)
            there.remove(taken)
            passed.pop(taken, None)
            for thing, counts in passed.items():
                if thing in there:
                    counts[taken.owner] += 1
                    assert counts[taken.owner] <= 2
        assert queue.owners == {each.owner for each in there}
    assert len(queue.entries) == len(there) + len(first)
    assert len(queue.clear()) == len(there) + len(first)
