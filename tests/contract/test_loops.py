"""What each loop does for the code that it runs (iserblk/loop/seam.py)."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from iserblk.loop import guest
from iserblk.loop.epoll import EpollLoop
from iserblk.loop.here import hosts, loop_here
from iserblk.loop.seam import Watch
from iserblk.loop.strands import open_strands, pause
from iserblk.loop.work import Limit
from tests.simulation.running import Simulation
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.until import until

MANY = 100
WAIT_S = 5  # only a test that fails waits that long
SIMULATED = "simulated"
# What has no meaning where there are no threads, descriptors and signals.
NOT_SIMULATED = {
    "test_a_number_that_is_used_again_at_once": "dup2 and read are the system's",
    "test_a_descriptor_that_cannot_be_watched": "a file is the system's",
    "test_a_descriptor_that_was_closed_behind_the_loop": "descriptors are the system's",
    "test_no_room_to_let_go_of_a_descriptor": "the limit is the system's",
    "test_the_number_of_a_descriptor_that_was_closed_behind_the_loop": "dup2 is the system's",
    "test_a_file_has_the_number_of_a_descriptor_that_was_closed": "dup2 is the system's",
    "test_functions_without_end_keep_nothing_waiting": "one of them is a thread",
    "test_a_thread_wakes_a_loop_that_sleeps": "a thread",
    "test_a_handler_of_a_signal_wakes_a_loop_that_sleeps": "a timer of the system",
    "test_work_is_done_elsewhere_and_told_here": "a thread does it",
    "test_a_limit_holds_up_only_its_own_work": "a thread hangs",
}


@dataclass
class Run:
    """Runs a coroutine function to its end; ``loop_here`` is one of the loops there."""

    by: Callable[[Callable[[], Awaitable[Any]]], Any]
    simulation: Simulation | None = None

    def __call__(self, body: Callable[[], Awaitable[Any]]) -> Any:
        return self.by(body)


@pytest.fixture(params=["inside trio", "epoll, with trio as its guest", SIMULATED])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == SIMULATED:
        if reason := NOT_SIMULATED.get(request.function.__name__):
            pytest.skip(f"not simulated: {reason}")
        simulation = Simulation(request.function.__name__)
        return Run(simulation.run, simulation)
    return Run(trio.run if request.param == "inside trio" else guest.run)


@pytest.fixture
def lines(request: pytest.FixtureRequest) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connected sockets, of the world in which ``run`` runs."""
    run = request.getfixturevalue("run") if "run" in request.fixturenames else None
    simulation = None if run is None else run.simulation
    with ExitStack() as stack:
        pairs: Lines = []
        for _ in range(MANY):
            if simulation is None:
                here, there = socket.socketpair()
            else:
                here, there = simulation.network.pair()
            here.setblocking(False)
            pairs.append((stack.enter_context(here), stack.enter_context(there)))
        yield pairs


def test_what_is_not_simulated_is_tested_with_real_loops() -> None:
    assert NOT_SIMULATED.keys() <= globals().keys()


Lines = list[tuple[socket.socket, socket.socket]]


async def turns(count: int) -> None:
    """Let so many turns of the loop go by."""
    for _ in range(count):
        passed = trio.Event()
        loop_here().call_soon(passed.set)
        await passed.wait()


# -- descriptors -----------------------------------------------------------------------------------


def test_what_comes_is_handled(run: Run, lines: Lines) -> None:
    """From each descriptor, again and again, without a task for any of them."""
    heard = [b""] * MANY

    def ready(number: int) -> None:
        heard[number] += lines[number][0].recv(1)

    async def body() -> None:
        watches = [
            loop_here().watch(here.fileno(), lambda number=number: ready(number))  # type: ignore[misc]
            for number, (here, _) in enumerate(lines)
        ]
        before = trio.lowlevel.current_statistics().tasks_living
        for _, there in lines:
            there.sendall(b"abc")  # what is left after a call makes another one
        await until(lambda: heard == [b"abc"] * MANY)
        for _, there in lines:
            there.sendall(b"d")
        await until(lambda: heard == [b"abcd"] * MANY)
        assert trio.lowlevel.current_statistics().tasks_living <= before + 1
        for watch in watches:
            watch.close()

    run(body)


def test_tasks_have_their_turn_though_all_descriptors_stay_ready(run: Run, lines: Lines) -> None:
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1

    async def body() -> None:
        watches = [loop_here().watch(here.fileno(), ready) for here, _ in lines]
        for _, there in lines:
            there.sendall(b"x")
        seen = 0
        while calls < 10 * MANY:
            await trio.lowlevel.checkpoint()
            seen += 1
        assert seen >= 10
        for watch in watches:
            watch.close()

    run(body)


def test_one_ends_another(run: Run, lines: Lines) -> None:
    """Both have something; the first that is called closes the other, and nothing is called for a
    descriptor that is closed."""
    (first, one), (second, other) = lines[:2]
    called: list[socket.socket] = []
    watches: dict[socket.socket, Watch] = {}

    def ready(mine: socket.socket, theirs: socket.socket) -> None:
        called.append(mine)
        mine.recv(1)
        if theirs.fileno() >= 0:
            watches[theirs].close()
            theirs.close()

    async def body() -> None:
        watches[first] = loop_here().watch(first.fileno(), lambda: ready(first, second))
        watches[second] = loop_here().watch(second.fileno(), lambda: ready(second, first))
        one.sendall(b"x")
        other.sendall(b"x")
        await until(lambda: called)
        await turns(5)
        assert len(called) == 1
        watches[called[0]].close()
        assert watches[called[0]].fd == -1
        watches[called[0]].close()

    run(body)


def test_a_number_that_is_used_again_at_once(run: Run, lines: Lines) -> None:
    """Two have something; the first that is called closes the other, and opens a descriptor that
    gets its number: that has nothing, and hears of nothing."""
    (first, one), (second, other) = lines[:2]
    silent, _ = lines[2]
    called: list[str] = []
    watches: dict[str, Watch] = {}
    numbers = {"first": first.fileno(), "second": second.fileno()}

    def ready(mine: str, theirs: str) -> None:
        called.append(mine)
        os.read(numbers[mine], 1)
        if len(called) == 1:
            watches[theirs].close()
            os.dup2(silent.fileno(), numbers[theirs])
            watches["new"] = loop_here().watch(numbers[theirs], lambda: called.append("new"))

    async def body() -> None:
        watches["first"] = loop_here().watch(numbers["first"], lambda: ready("first", "second"))
        watches["second"] = loop_here().watch(numbers["second"], lambda: ready("second", "first"))
        one.sendall(b"x")
        other.sendall(b"x")
        await until(lambda: called)
        await turns(5)
        assert len(called) == 1
        lines[2][1].sendall(b"now")
        await until(lambda: "new" in called)
        watches["new"].close()
        watches[called[0]].close()

    run(body)


def watched() -> set[int]:
    """The inodes of all that epoll instances of this process have."""
    found: set[int] = set()
    for info in Path("/proc/self/fdinfo").iterdir():
        with suppress(FileNotFoundError):  # of the directory itself
            lines = info.read_text().splitlines()
            for line in lines:
                if line.startswith("tfd:"):
                    found.add(int(line.partition(" ino:")[2].split()[0], 16))
    return found


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("by", ["close", "want"])
def test_a_descriptor_that_was_closed_behind_the_loop(
    run: Run, lines: Lines, copied: bool, by: str
) -> None:
    """Its watch raises nothing. Where a copy is left, as in a child process, the kernel would go
    on to report it, and the loop would never sleep again."""
    (here, there), (other, beyond) = lines[:2]
    heard: list[bytes] = []
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1

    async def body() -> None:
        watch = loop_here().watch(here.fileno(), ready)
        silent = loop_here().watch(other.fileno(), lambda: heard.append(other.recv(9)))
        silent.want(readable=False, writable=False)
        inode = os.fstat(here.fileno()).st_ino
        with here.dup() if copied else nullcontext():
            here.close()
            there.sendall(b"x") if copied else None
            await turns(3)
            if by == "close":
                watch.close()
            else:
                watch.want(readable=True, writable=True)
            assert watch.fd == -1
            watch.want(readable=True, writable=False)
            watch.close()
            before = calls
            await turns(3)
            assert calls == before
            assert inode not in watched()
        beyond.sendall(b"a")
        await turns(3)
        assert not heard  # what another watch waits for has not changed
        silent.want(readable=True, writable=False)
        await until(lambda: heard == [b"a"])
        silent.close()

    run(body)


def test_no_room_to_let_go_of_a_descriptor(run: Run, lines: Lines) -> None:
    """At the limit of open files: a later turn lets go of it."""
    (here, there), (other, _) = lines[:2]

    async def body() -> None:
        watch = loop_here().watch(here.fileno(), lambda: None)
        last = loop_here().watch(other.fileno(), lambda: None)
        inode = os.fstat(here.fileno()).st_ino
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with here.dup():
            here.close()
            there.sendall(b"x")
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                watch.close()
                await turns(3)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert inode in watched()
            await until(lambda: inode not in watched())
        last.close()

    run(body)


@pytest.mark.parametrize("copied", [False, True])
def test_the_number_of_a_descriptor_that_was_closed_behind_the_loop(
    run: Run, lines: Lines, copied: bool
) -> None:
    """Another descriptor has it, and is watched: the old watch does nothing to that."""
    (here, there), (other, beyond) = lines[:2]
    heard: list[bytes] = []
    called: list[str] = []

    async def body() -> None:
        old = loop_here().watch(here.fileno(), lambda: called.append("old"))
        number = here.fileno()
        inode = os.fstat(number).st_ino
        with here.dup() if copied else nullcontext():
            os.dup2(other.fileno(), number)
            new = loop_here().watch(number, lambda: heard.append(os.read(number, 9)))
            assert old.fd == -1
            old.want(readable=False, writable=False)
            old.close()
            there.sendall(b"x") if copied else None
            await turns(3)
            assert not called
            assert not heard  # ``new`` is not told of what the copy has
            beyond.sendall(b"a")
            await until(lambda: heard == [b"a"])
            assert inode not in watched()
            new.close()

    run(body)


def test_a_file_has_the_number_of_a_descriptor_that_was_closed(run: Run, lines: Lines) -> None:
    """Two were closed behind the loop. When it finds out about the first, it does not begin to
    watch the socket that has the number of the second."""
    (here, _), (second, _), (unwatched, beyond) = lines[:3]
    called: list[str] = []

    async def body() -> None:
        first = loop_here().watch(here.fileno(), lambda: called.append("first"))
        other = loop_here().watch(second.fileno(), lambda: called.append("second"))
        rest = loop_here().watch(lines[3][0].fileno(), lambda: called.append("rest"))
        here.close()
        os.dup2(unwatched.fileno(), second.fileno())
        beyond.sendall(b"x")
        first.close()
        await turns(3)
        assert not called
        assert other.fd == -1
        rest.close()

    run(body)


def test_output(run: Run, lines: Lines) -> None:
    """``ready`` is called for a socket that takes more as long as that is wanted."""
    here = lines[0][0]
    watches: list[Watch] = []
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            watches[0].want(readable=True, writable=False)

    async def body() -> None:
        watches.append(loop_here().watch(here.fileno(), ready))
        (watch,) = watches
        watch.want(readable=True, writable=True)
        await until(lambda: calls >= 3)
        await turns(5)
        assert calls == 3
        watch.close()

    run(body)


def test_a_watch_that_wants_nothing_hears_of_the_end_once_at_most(run: Run, lines: Lines) -> None:
    """The kernel tells of the end in any case: it must not be all that the loop does."""
    here, there = lines[0]
    calls = 0

    def ready() -> None:
        nonlocal calls
        calls += 1

    async def body() -> None:
        watch = loop_here().watch(here.fileno(), ready)
        watch.want(readable=False, writable=False)
        there.sendall(b"x")
        await turns(5)
        assert calls == 0
        there.close()
        await turns(20)
        assert calls <= 1
        watch.want(readable=True, writable=False)
        before = calls
        await until(lambda: calls > before)
        watch.close()

    run(body)


def test_a_descriptor_that_cannot_be_watched(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        before = descriptors()
        with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="not permitted"):
            loop_here().watch(file.fileno(), lambda: None)
        assert descriptors() == before

    run(body)


def test_a_message_that_is_expected(run: Run, lines: Lines) -> None:
    """Whether the processor stays awake for it or not, it is handled; and so is all else."""
    here, there = lines[0]
    heard: list[bytes] = []
    watches: list[Watch] = []

    def ready() -> None:
        heard.append(here.recv(9))
        watches[0].expect(loop_here().now() + 3600.0)

    async def body() -> None:
        watches.append(loop_here().watch(here.fileno(), ready))
        (watch,) = watches
        watch.expect(0.0)
        for number in range(50):
            there.sendall(b"x")
            await until(lambda number=number: len(heard) > number)  # type: ignore[misc]
        ended = trio.Event()
        loop_here().call_at(loop_here().now() + 0.001, ended.set)
        await ended.wait()
        watch.close()

    run(body)


def test_messages_that_are_expected_without_end_let_tasks_go_on(run: Run, lines: Lines) -> None:
    here, there = lines[0]
    watches: list[Watch] = []

    def ready() -> None:
        here.recv(9)
        there.sendall(b"x")
        watches[0].expect(loop_here().now() + 3600.0)

    async def body() -> None:
        watches.append(loop_here().watch(here.fileno(), ready))
        there.sendall(b"x")
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        watches[0].close()

    run(body)


def test_nothing_is_kept_of_an_owner_that_has_closed(run: Run, lines: Lines) -> None:
    """Thousands of connections may come and go before Python finds circles."""

    class Owner:
        def __init__(self) -> None:
            self.watch = loop_here().watch(lines[0][0].fileno(), self.ready)

        def ready(self) -> None: ...

    async def body() -> None:
        owner = Owner()
        owner.watch.expect(loop_here().now() + 3600.0)
        await turns(2)
        owner.watch.close()
        gone = weakref.ref(owner)
        del owner
        await turns(2)
        assert gone() is None

    gc.disable()
    try:
        run(body)
    finally:
        gc.enable()


# -- functions that are called later ---------------------------------------------------------------


def test_soon_is_in_order_and_in_the_next_turn(run: Run) -> None:
    called: list[int] = []

    async def body() -> None:
        loop = loop_here()

        def first() -> None:
            called.append(1)
            loop.call_soon(lambda: called.append(3))

        loop.call_soon(first)
        loop.call_soon(lambda: called.append(2))
        assert not called
        await until(lambda: len(called) == 3)
        assert called == [1, 2, 3]

    run(body)


def test_timers(run: Run) -> None:
    """By time, and those of one time in the order in which they were given; none too early."""
    called: list[str] = []

    async def body() -> None:
        loop = loop_here()
        now = loop.now()
        when = now + 0.02

        def at(name: str) -> Callable[[], None]:
            return lambda: called.append(name if loop.now() >= when or name == "past" else "early")

        loop.call_at(when + 0.01, at("third"))
        loop.call_at(when, at("first"))
        loop.call_at(when, at("second"))
        never = loop.call_at(when, at("never"))
        loop.call_at(now - 1.0, at("past"))
        never.cancel()
        await until(lambda: len(called) == 4)
        assert called == ["past", "first", "second", "third"]
        never.cancel()

    run(body)


def test_a_timer_that_another_one_cancels(run: Run) -> None:
    """Both are due."""
    called: list[str] = []

    async def body() -> None:
        loop = loop_here()
        when = loop.now() - 1.0

        def first() -> None:
            called.append("one")
            other.cancel()

        loop.call_at(when, first)
        other = loop.call_at(when, lambda: called.append("other"))
        await until(lambda: called)
        await turns(5)
        assert called == ["one"]
        again = loop.call_at(loop.now(), lambda: called.append("again"))
        await until(lambda: len(called) == 2)
        again.cancel()  # it has been called: nothing
        loop.call_at(loop.now(), lambda: called.append("last"))
        await until(lambda: called[-1] == "last")

    run(body)


def test_functions_without_end_keep_nothing_waiting(run: Run, lines: Lines) -> None:
    """Each calls for its next turn. Descriptors, timers, other threads and tasks have theirs."""
    here, there = lines[0]
    going = True
    happened: set[str] = set()

    def again() -> None:
        if going:
            loop_here().call_soon(again)

    async def body() -> None:
        nonlocal going
        loop = loop_here()
        loop.call_soon(again)

        def foreign() -> None:
            loop.wake(come)

        def come() -> None:
            happened.add("thread")
            if going:
                foreign()

        watch = loop.watch(here.fileno(), lambda: happened.add(here.recv(1).decode()))
        loop.call_at(loop.now() + 0.001, lambda: happened.add("timer"))
        thread = threading.Thread(target=foreign)
        thread.start()
        there.sendall(b"d")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.lowlevel.checkpoint)
        await until(lambda: happened == {"d", "timer", "thread"})
        going = False
        thread.join()
        watch.close()

    run(body)


def test_functions_without_end_do_not_keep_a_descriptor_waiting(run: Run, lines: Lines) -> None:
    """A connection that always has more, such as that of a peer that floods, and another one that
    speaks again and again."""
    flood, (here, there) = lines[0], lines[1]
    heard: list[bytes] = []
    going = True

    async def body() -> None:
        nonlocal going
        loop = loop_here()

        def again() -> None:
            if going:
                loop.call_soon(again)

        def more() -> None:
            flood[0].recv(9)
            again()

        watches = [
            loop.watch(flood[0].fileno(), more),
            loop.watch(here.fileno(), lambda: heard.append(here.recv(1))),
        ]
        flood[1].sendall(b"x")
        try:
            for number in range(3):
                await turns(3)
                there.sendall(b"d")
                with trio.fail_after(WAIT_S):
                    await until(lambda number=number: len(heard) > number)  # type: ignore[misc]
        finally:
            going = False
        for watch in watches:
            watch.close()

    run(body)


# -- from elsewhere --------------------------------------------------------------------------------


def test_a_thread_wakes_a_loop_that_sleeps(run: Run) -> None:
    async def body() -> None:
        loop, home = loop_here(), threading.get_ident()
        seen: list[bool] = []
        ended = trio.Event()

        def come() -> None:
            seen.append(threading.get_ident() == home)
            if len(seen) == MANY:
                ended.set()

        def work() -> None:
            for _ in range(MANY):
                loop.wake(come)

        thread = threading.Thread(target=work)
        thread.start()
        await ended.wait()
        thread.join()
        assert seen == [True] * MANY

    run(body)


def test_a_handler_of_a_signal_wakes_a_loop_that_sleeps(run: Run) -> None:
    before = signal.getsignal(signal.SIGALRM)

    async def body() -> None:
        loop, ended = loop_here(), trio.Event()
        signal.signal(signal.SIGALRM, lambda *_: loop.wake(ended.set))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        await ended.wait()

    try:
        run(body)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_waking_a_loop_that_has_ended_does_nothing(run: Run) -> None:
    async def body() -> Any:
        return loop_here()

    loop = run(body)
    loop.wake(lambda: pytest.fail("it has ended"))


# -- offloaded work --------------------------------------------------------------------------------


def test_work_is_done_elsewhere_and_told_here(run: Run) -> None:
    async def body() -> None:
        home = threading.get_ident()
        found: list[tuple[bool, bool, BaseException | None]] = []
        problem = ValueError("it breaks")

        elsewhere: list[bool] = []

        def work(breaks: bool) -> None:
            elsewhere.append(threading.get_ident() != home)
            if breaks:
                raise problem

        limit = Limit(1)
        for breaks in (False, True):
            loop_here().offload(
                lambda breaks=breaks: work(breaks),  # type: ignore[misc]
                lambda error: found.append((elsewhere.pop(), threading.get_ident() == home, error)),
                limit,
            )
        await until(lambda: len(found) == 2)
        assert found == [(True, True, None), (True, True, problem)]
        assert (limit.busy, limit.waiting) == (0, 0)

    run(body)


def test_a_limit_holds_up_only_its_own_work(run: Run) -> None:
    """A disk hangs: as many commands as it may have wait in threads, the others before them, and
    those of another disk go on."""

    async def body() -> None:
        go = threading.Event()
        hanging, other = Limit(3), Limit(3)
        ended: list[str] = []
        under_way: set[int] = set()

        def hang(number: int) -> None:
            under_way.add(number)
            go.wait()

        for number in range(8):
            loop_here().offload(
                lambda number=number: hang(number),  # type: ignore[misc]
                lambda _error: ended.append("hanging"),
                hanging,
            )
        for _ in range(8):
            loop_here().offload(lambda: None, lambda _error: ended.append("other"), other)
        await until(lambda: len(ended) == 8)
        assert set(ended) == {"other"}
        assert under_way == {0, 1, 2}
        assert (hanging.busy, hanging.waiting) == (3, 5)
        go.set()
        await until(lambda: len(ended) == 16)
        assert under_way == set(range(8))
        assert (hanging.busy, hanging.waiting) == (0, 0)

    run(body)


# -- with trio -------------------------------------------------------------------------------------


def test_all_in_one_loop_share_it(run: Run) -> None:
    async def body() -> None:
        async def task() -> None:
            assert loop_here() is mine

        mine = loop_here()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)

    run(body)
    assert hosts.loop is None


def test_nothing_is_left_of_it(run: Run, lines: Lines) -> None:
    before = descriptors_to_begin_with()
    threads = threading.active_count()

    async def body() -> str:
        loop_here().watch(lines[0][0].fileno(), lambda: None)
        loop_here().call_at(loop_here().now() + 3600.0, lambda: None)
        done = trio.Event()
        loop_here().offload(lambda: None, lambda _error: done.set(), Limit(1))
        await done.wait()
        return "its value"

    assert run(body) == "its value"
    assert descriptors() == before
    for thread in threading.enumerate():
        if thread.name == "worker of a loop":
            thread.join()
    assert threading.active_count() <= threads + 1  # trio keeps one for its next use


def test_a_watch_that_outlives_its_loop(run: Run, lines: Lines) -> None:
    """As that of a session whose owner was left to Python to clean up."""
    here = lines[0][0]

    async def body() -> Watch:
        return loop_here().watch(here.fileno(), lambda: None)

    watch = run(body)
    assert watch.fd == -1
    watch.want(readable=True, writable=True)
    watch.close()


def test_what_is_cleaned_up_behind_the_body_closes_its_watch(run: Run, lines: Lines) -> None:
    """trio ends asynchronous generators when the body has ended."""
    closed: list[int] = []

    async def owner() -> AsyncIterator[None]:
        watch = loop_here().watch(lines[0][0].fileno(), lambda: None)
        try:
            yield
        finally:
            watch.close()
            closed.append(watch.fd)

    async def body() -> None:
        kept.append(owner())
        async for _ in kept[0]:
            break

    kept: list[AsyncIterator[None]] = []
    run(body)
    assert closed == [-1]


def test_strands_run_on_it(run: Run) -> None:
    seen: list[int] = []

    async def strand(number: int) -> None:
        for _ in range(3):
            seen.append(number)
            await pause()

    async def body() -> None:
        async with open_strands() as group:
            for number in range(3):
                group.start_soon(strand, number)

    run(body)
    assert sorted(seen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_body_that_is_cancelled(run: Run) -> None:
    async def body() -> str:
        with trio.CancelScope() as scope:
            loop_here().call_soon(scope.cancel)
            await trio.sleep_forever()
        return "after it"

    assert run(body) == "after it"


def test_what_the_body_raises(run: Run) -> None:
    async def body() -> None:
        raise ValueError("it breaks")

    with pytest.raises(ValueError, match="it breaks"):
        run(body)


def test_an_interrupt_is_for_the_body_and_never_for_a_function(run: Run) -> None:
    """It comes while a function runs, which goes on."""
    steps: list[str] = []

    def function() -> None:
        steps.append("begun")
        signal.raise_signal(signal.SIGINT)
        steps.append("ended")

    async def body() -> None:
        loop_here().call_soon(function)
        try:
            await trio.sleep_forever()
        finally:
            steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        run(body)
    assert steps == ["begun", "ended", "cleaned up"]


def test_a_function_that_raises_ends_the_run(run: Run) -> None:
    """The body cleans up before that."""
    cleaned: list[bool] = []
    problem = ValueError("it breaks")

    def function() -> None:
        raise problem

    async def body() -> None:
        loop_here().call_soon(function)
        try:
            await trio.sleep_forever()
        finally:
            cleaned.append(True)

    with pytest.raises((ValueError, trio.TrioInternalError)) as caught:
        run(body)
    inside: BaseException | None = caught.value.__cause__ or caught.value
    while isinstance(inside, BaseExceptionGroup):
        (inside,) = inside.exceptions
    assert inside is problem
    assert cleaned == [True]


def test_behind_a_function_that_raises_the_others_are_called(run: Run) -> None:
    """What cleans up may wait for them."""
    called: list[bool] = []

    def function() -> None:
        raise ZeroDivisionError

    async def body() -> None:
        ended = trio.Event()
        loop_here().call_soon(function)
        loop_here().call_soon(ended.set)
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(WAIT_S, shield=True):
                await ended.wait()
                called.append(True)

    with pytest.raises((ZeroDivisionError, trio.TrioInternalError)):
        run(body)
    assert called == [True]


def test_a_function_that_raises_while_the_body_returns() -> None:
    """The body has its value already, and meets no cancellation any more. (Inside trio, trio itself
    sees to it.)"""
    problem = ValueError("it breaks")

    async def body() -> str:
        ready = trio.Event()

        def function() -> None:
            ready.set()
            raise problem

        loop_here().call_soon(function)
        with trio.CancelScope(shield=True):
            await ready.wait()
        return "its value"

    with pytest.raises(ValueError, match="it breaks") as caught:
        guest.run(body)
    assert caught.value is problem


def test_a_guest_that_may_not_begin_leaves_the_one_that_runs() -> None:
    """A call of ``run`` inside of ``run`` is an error of the caller's."""

    async def body() -> None:
        mine = loop_here()
        with pytest.raises(RuntimeError, match="from inside"):
            guest.run(body)
        assert loop_here() is mine

    guest.run(body)


def test_a_descriptor_whose_function_always_raises_ends_the_run(lines: Lines) -> None:
    """What is there to be read stays there: the others have their turns all the same."""
    cleaned: list[str] = []

    def breaks() -> None:
        raise ZeroDivisionError

    async def body() -> None:
        loop_here().watch(lines[0][0].fileno(), breaks)
        lines[0][1].sendall(b"x")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await turns(3)
            cleaned.append("all")

    with pytest.raises(ZeroDivisionError):
        guest.run(body)
    assert cleaned == ["all"]


def test_a_loop_that_ends_while_a_thread_wakes_it(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its descriptor may be that of a file by then, into which the thread would
    write."""
    loop = EpollLoop()
    write = os.eventfd_write
    valid: list[bool] = []

    def body() -> None:
        loop.run()
        loop.close()

    def late(fd: int, value: int) -> None:
        lines[0][1].sendall(b"x")  # meanwhile something else ends the loop
        host.join(0.1)  # it waits for this function; without a lock, it is over by then
        valid.append(host.is_alive())
        write(fd, value)

    loop.watch(lines[0][0].fileno(), lambda: setattr(loop, "stopped", True))
    monkeypatch.setattr(os, "eventfd_write", late)
    host = threading.Thread(target=body)
    host.start()
    while not valid:
        loop.wake(lambda: None)
    host.join()
    assert valid == [True]
    loop.wake(lambda: pytest.fail("it has ended"))
