"""Strands: when each is resumed, and that no buffer in use is let go of."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from iserblk.loop import strands
from iserblk.loop.strands import Strand, elsewhere, open_strands, park, pause


class Turns(trio.abc.Instrument):
    def __init__(self) -> None:
        self.count = 0

    def before_io_wait(self, timeout: float) -> None:
        self.count += 1


def me() -> Strand:
    running = strands.here().running
    assert running is not None
    return running


async def test_they_wait_for_each_other_without_a_turn_of_the_loop() -> None:
    said: list[str] = []
    parked: list[Strand] = []

    async def speak(name: str) -> None:
        for _ in range(100):
            if parked:
                parked.pop().wake()
            said.append(name)
            parked.append(me())
            await park()

    turns = Turns()
    async with open_strands() as group:
        group.start_soon(speak, "a")
        group.start_soon(speak, "b")
        trio.lowlevel.add_instrument(turns)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(turns)
        assert said == ["a", "b"] * 100
        assert turns.count < 10
        assert strands.here().running is None
        parked.pop().wake()


async def test_it_ends_with_the_last_one() -> None:
    ended: list[str] = []

    async def work(name: str, pauses: int) -> None:
        for _ in range(pauses):
            await pause()
        ended.append(name)

    async with open_strands() as group:
        group.start_soon(work, "slow", 20)
        group.start_soon(work, "quick", 1)
    assert ended == ["quick", "slow"]
    async with open_strands():
        pass


async def test_pausing_lets_tasks_run() -> None:
    stop = False

    async def spin() -> None:
        while not stop:
            await pause()

    with trio.fail_after(10):
        async with open_strands() as group:
            group.start_soon(spin)
            group.start_soon(spin)
            for _ in range(20):
                await trio.lowlevel.checkpoint()
            stop = True


async def test_each_thread_has_its_own() -> None:
    """A strand of another thread runs while this thread looks, wakes its own strand, and resumes
    it."""
    inside, may_end = threading.Event(), threading.Event()
    woken: list[str] = []

    async def other() -> None:
        async def waits() -> None:
            inside.set()
            may_end.wait(20)
            woken.append("other")

        async with open_strands() as group:
            group.start_soon(waits)

    async def mine() -> None:
        await park()
        woken.append("mine")

    thread = threading.Thread(target=trio.run, args=(other,))
    async with open_strands() as group:
        strand = group.start_soon(mine)
        await trio.testing.wait_all_tasks_blocked()
        thread.start()
        assert inside.wait(20)
        assert strands.here().running is None
        strand.wake()
        await group.finish()
        assert woken == ["mine"]
        may_end.set()
    thread.join(20)
    assert woken == ["mine", "other"]


async def test_one_strand_is_stopped() -> None:
    """Where it is parked, behind what it has to wait for; before it has begun; while something is
    done for it elsewhere. Nothing wakes it any more, and the others go on."""
    order: list[str] = []
    may_end = trio.Event()
    begun: list[Strand] = []

    async def parked() -> None:
        begun.append(me())
        try:
            await park()
        finally:
            order.append("parked")

    async def waits() -> None:
        try:
            await elsewhere(may_end.wait)
        finally:
            order.append("elsewhere")

    async def abandon(_waiter: object) -> None:
        await may_end.wait()
        order.append("abandoned")

    async def other() -> None:
        await elsewhere(may_end.wait)
        order.append("other")

    with trio.fail_after(10):
        async with open_strands() as group, trio.open_nursery() as nursery:
            first, second = group.start_soon(parked), group.start_soon(waits)
            group.start_soon(other)
            await trio.testing.wait_all_tasks_blocked()
            assert begun == [first]
            first.abandon = abandon
            never = group.start_soon(parked)
            assert await group.stop(never) and await group.stop(second)
            nursery.start_soon(group.stop, first)
            await trio.testing.wait_all_tasks_blocked()
            assert not await group.stop(first)  # it is being stopped
            first.wake()
            assert order == ["elsewhere"]
            may_end.set()
            await trio.testing.wait_all_tasks_blocked()
            assert not await group.stop(first) and not await group.stop(second)
    assert sorted(order) == ["abandoned", "elsewhere", "other", "parked"]
    assert order.index("abandoned") < order.index("parked")


async def test_a_strand_is_being_stopped_while_its_group_is_closed() -> None:
    """The group is left when it has ended."""
    order: list[str] = []
    may_end = trio.Event()

    async def parked() -> None:
        try:
            await park()
        finally:
            order.append("parked")

    async def abandon(_waiter: object) -> None:
        await may_end.wait()
        order.append("abandoned")

    async def later() -> None:
        await trio.testing.wait_all_tasks_blocked()
        may_end.set()

    with trio.fail_after(10):
        async with trio.open_nursery() as outer:
            with pytest.raises(BaseExceptionGroup):
                async with trio.open_nursery() as nursery, open_strands() as group:
                    strand = group.start_soon(parked)
                    await trio.testing.wait_all_tasks_blocked()
                    strand.abandon = abandon
                    nursery.start_soon(group.stop, strand)
                    await trio.testing.wait_all_tasks_blocked()
                    outer.start_soon(later)
                    raise KeyError
            assert order == ["abandoned", "parked"]


async def test_what_is_done_elsewhere() -> None:
    """``elsewhere`` hands back the result or error; other strands run meanwhile."""
    order: list[object] = []
    others_ran = trio.Event()

    async def waits(name: str) -> str:
        await others_ran.wait()
        order.append(name)
        return name.upper()

    async def broken() -> None:
        await trio.lowlevel.checkpoint()
        raise OSError("broken")

    async def work() -> None:
        order.append(await elsewhere(waits, "x"))
        with pytest.raises(OSError, match="broken"):
            await elsewhere(broken)

    async def other() -> None:
        order.append("other")
        others_ran.set()

    with trio.fail_after(10):
        async with open_strands() as group:
            group.start_soon(work)
            group.start_soon(other)
    assert order == ["other", "x", "X"]
    assert await elsewhere(waits, "task") == "TASK"


async def test_an_error_of_one_ends_all() -> None:
    closed: list[str] = []

    async def wait(name: str) -> None:
        try:
            await park()
        finally:
            closed.append(name)

    async def fail() -> None:
        await pause()
        raise ValueError("no")

    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_strands() as group:
            group.start_soon(wait, "a")
            group.start_soon(fail)
            group.start_soon(wait, "b")
    assert raised.group_contains(ValueError, match="no")
    assert sorted(closed) == ["a", "b"]


async def test_trio_s_own_functions_are_refused() -> None:
    async def mistaken() -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_strands() as group:
            group.start_soon(mistaken, name="mistaken")
    assert raised.group_contains(RuntimeError, match="mistaken: a strand cannot wait for")


async def test_closed_only_when_the_target_has_let_go() -> None:
    """When cancelled: strands that are woken meanwhile start nothing new."""
    events: list[str] = []

    async def abandon(waiter: object) -> None:
        assert waiter == "its waiter"
        events.append("abandoning")
        reading.wake()
        idle.wake()
        await trio.testing.wait_all_tasks_blocked()
        events.append("let go")

    async def read() -> None:
        nonlocal reading  # type: ignore[misc]
        reading = me()
        reading.waiter, reading.abandon = "its waiter", abandon
        try:
            await park()
            events.append("resumed")
        finally:
            events.append("closed")

    async def wait() -> None:
        nonlocal idle  # type: ignore[misc]
        idle = me()
        await park()
        events.append("resumed")

    async def sleep() -> None:
        try:
            await elsewhere(trio.sleep_forever)
        finally:
            events.append("closed")

    reading = idle = Strand(wait(), None, "")  # type: ignore[arg-type]
    reading.coroutine.close()
    with trio.CancelScope() as scope:
        async with open_strands() as group:
            for function in (read, wait, sleep):
                group.start_soon(function)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert sorted(events) == ["abandoning", "closed", "closed", "let go"]
    assert events[-2:] == ["let go", "closed"]
    strands.here().run()
    assert "resumed" not in events


async def test_a_strand_that_waits_for_its_turn_is_closed_as_well() -> None:
    """A later ``run`` does not resume it."""
    resumed = False

    async def wait() -> None:
        nonlocal parked, resumed  # type: ignore[misc]
        parked = me()
        await park()
        resumed = True

    parked = Strand(wait(), None, "")  # type: ignore[arg-type]
    parked.coroutine.close()
    with trio.CancelScope() as scope:
        async with open_strands() as group:
            group.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            strands.here().held = True
            parked.wake()
            scope.cancel()
    strands.here().held = False
    assert strands.here().run() == 0
    assert not resumed


async def test_whoever_holds_them_runs_them() -> None:
    resumed = False

    async def wait() -> None:
        nonlocal parked, resumed  # type: ignore[misc]
        parked = me()
        await park()
        resumed = True

    parked: Strand | None = None
    async with open_strands() as group:
        group.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert parked is not None
        strands.here().held = True
        parked.wake()
        strands.here().held = False
        await trio.testing.wait_all_tasks_blocked()
        assert not resumed
        assert strands.here().run() == 1
        assert resumed


async def test_a_pause_ends_the_run() -> None:
    """``run`` tells a caller that calls it in a loop when other tasks shall have their turn."""
    turns: list[int] = []

    async def work() -> None:
        for _ in range(3):
            await pause()

    async with open_strands() as group:
        group.start_soon(work)
        while not turns or turns[-1] == 0:
            turns.append(strands.here().run())
            assert len(turns) < 10
    assert turns == [0, 0, 0, 1]
