"""iSER over a device: what travels in one post, and which end invalidates each STag, once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from iserblk.datamover.iser import BHS_LENGTH
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.seam import PduSlot, TargetSlot
from iserblk.errors import Busy
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.verbs import api
from iserblk.scsi.tasks import BIDIRECTIONAL, READ, WRITE
from tests.rcap.verbs.fake import fake_pair, link_of

MODES = pytest.mark.parametrize("windows", [False, True], ids=["region", "window"])
RECEIVE_SIZE = 28 + 48 + 256


class Ends:
    """An initiator and a target, told of PDUs by their slots' numbers."""

    def __init__(self, windows: bool, *, invalidate: bool = True, **options: object) -> None:
        self.pairs = fake_pair(windows, eager=False, receive_size=RECEIVE_SIZE, **options)  # type: ignore[arg-type]
        self.links = [link_of(pair) for pair in self.pairs]
        self.commands: deque[int] = deque()
        self.responses: deque[tuple[int, int]] = deque()
        self.initiator = IserInitiator(self.pairs[0], 256)
        self.initiator.user = self
        self.slots = [PduSlot(index) for index in range(16)]
        self.initiator.allocate_connection_resources(self.slots, 4)
        self.target = IserTarget(self.pairs[1], invalidate)
        self.side = _TargetSide(self)
        self.target.user = self.side
        self.answers = [TargetSlot(index) for index in range(16)]
        self.target.allocate_connection_resources(self.answers, 256, 32)

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        self.responses.append((message[at + BHS_LENGTH - 1], invalidated))

    def sent_notify(self, slot: PduSlot) -> None:
        """There are no Data-Outs here."""

    def command(self, index: int, direction: int, data: bytearray | bytes) -> None:
        slot = self.slots[index]
        slot.direction, slot.data = direction, memoryview(data)
        slot.bhs[:] = bytes(BHS_LENGTH - 1) + bytes((index,))
        self.initiator.send_control(slot)

    def turn(self) -> None:
        self.initiator.flush()
        self.target.progress(0.0)
        self.target.flush()
        self.initiator.progress(0.0)
        self.target.progress(0.0)

    def respond(self, index: int) -> None:
        answer = self.answers[index]
        answer.bhs[:] = bytes(BHS_LENGTH - 1) + bytes((index,))
        self.target.send_control(answer, True)

    def close(self) -> None:
        self.initiator.connection_terminate()
        self.target.connection_terminate()


class _TargetSide:
    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self.filled: list[int] = []

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        index = message[at + BHS_LENGTH - 1]
        self._ends.target.map_task(self._ends.answers[index])
        self._ends.commands.append(index)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        self.filled.append(slot.index)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        """Nothing here asks for one."""

    def discarded_notify(self, head: memoryview) -> None:
        raise AssertionError("over iSER nothing is discarded")

    def sent_notify(self, slot: PduSlot) -> None:
        """Nothing waits for it."""


@pytest.fixture
def ends() -> object:
    made: list[Ends] = []

    def make(*arguments: object, **options: object) -> Ends:
        made.append(Ends(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()  # which checks that no memory and no window is left


@MODES
def test_a_hello_settles_the_reads_of_a_device(ends: Callable[..., Ends], windows: bool) -> None:
    """The device has agreed on more; the target has one RDMA Read at a time under way.

    proves: ISER-5.1.3-4, ISER-8.2-1, ISER-GEN-2.1.7-1
    """
    both = ends(windows, ird=4, ord=4)
    both.pairs[0].limit_reads(1, 4)
    agreed = SessionParameters(rdma_extensions=True, iser_hello_required=True)
    final = TargetSlot(16)
    both.target.add_resources([final], 256, 0)
    for end in (both.initiator, both.target):
        end.notice_key_values(agreed)
    both.target.enable_datamover(final)
    both.initiator.progress(0.0)  # the final Login Response
    both.initiator.enable_datamover()
    assert not both.initiator.greeted and not both.target.greeted
    both.turn()
    assert both.initiator.greeted and both.target.greeted
    assert (both.pairs[0].ird, both.pairs[1].ord) == (1, 1)
    sources = [bytes((index,)) * 100 for index in range(3)]
    sinks = [bytearray(100) for _ in sources]
    for index, source in enumerate(sources):
        both.command(index, WRITE, source)
    both.turn()
    for index, sink in enumerate(sinks):
        both.target.get_data(both.answers[index], memoryview(sink), 0)
    side = both.side
    seen = []
    while len(side.filled) < 3:
        before = len(side.filled)
        both.target.flush()
        both.target.progress(0.0)
        seen.append(len(side.filled) - before)
    assert max(seen) == 1 and [bytes(sink) for sink in sinks] == sources


@MODES
def test_a_command_and_its_window_leave_in_one_post(
    ends: Callable[..., Ends], windows: bool
) -> None:
    both = ends(windows)
    before = both.links[0].posts
    buffers = [bytearray(100) for _ in range(4)]
    for index, buffer in enumerate(buffers):
        both.command(index, READ, buffer)
    both.initiator.flush()
    assert both.links[0].posts == before + 1
    both.turn()
    assert list(both.commands) == [0, 1, 2, 3]


@MODES
@pytest.mark.parametrize("invalidate", [True, False])
def test_a_read_and_a_write(ends: Callable[..., Ends], windows: bool, invalidate: bool) -> None:
    both = ends(windows, invalidate=invalidate and windows)
    into, source = bytearray(b"\xee" * 5000), bytes(range(250)) * 20
    both.command(0, READ, into)
    both.command(1, WRITE, source)
    both.turn()
    sink = bytearray(5000)
    both.target.put_data(both.answers[0], memoryview(source)[:4000], 10)
    both.target.get_data(both.answers[1], memoryview(sink), 0)
    both.respond(0)
    both.respond(1)
    both.turn()
    assert sink == source
    for index, invalidated in both.responses:
        stag = both.slots[index].stag
        assert invalidated == (stag if invalidate and windows else 0)
        both.initiator.deallocate_task_resources(both.slots[index], invalidated)
    # What the target did not write is as it was.
    assert into == b"\xee" * 10 + source[:4000] + b"\xee" * 990
    assert both.links[0].local_invalidations == (0 if invalidate or not windows else 2)
    if windows:
        assert not both.links[0].open


@MODES
@pytest.mark.parametrize("invalidate", [True, False])
def test_a_bidirectional_command(
    ends: Callable[..., Ends], windows: bool, invalidate: bool
) -> None:
    """Two keys in one header. The target can invalidate one of them only, the Read STag; when the
    command has ended, no window is open.

    proves: ISER-7.3.2-11, ISER-9.5.3-1
    """
    both = ends(windows, invalidate=invalidate and windows)
    source, sink = bytes(range(250)) * 20, bytearray(5000)
    given, into = source[::-1][:3000], bytearray(b"\xee" * 3000)
    slot, answer = both.slots[0], both.answers[0]
    slot.data_in = memoryview(into)
    slot.inline_length = 0
    both.command(0, BIDIRECTIONAL, source)
    both.turn()
    assert answer.write_stag == slot.stag and answer.read_stag == slot.stag_in
    assert answer.write_stag != answer.read_stag
    both.target.get_data(answer, memoryview(sink), 0)
    both.turn()
    assert both.side.filled == [0] and sink == source
    both.target.put_data(answer, memoryview(given), 0)
    both.respond(0)
    both.turn()
    ((_, invalidated),) = both.responses
    assert invalidated == (slot.stag_in if invalidate and windows else 0)
    both.initiator.deallocate_task_resources(slot, invalidated)
    assert into == given and (slot.stag, slot.stag_in) == (0, 0)
    into.clear()  # BufferError while a view of it is left
    if windows:
        assert not both.links[0].open


@MODES
def test_without_memory_for_both_buffers_none_is_advertised(
    ends: Callable[..., Ends], windows: bool
) -> None:
    """Busy; when another command ends, there is room for both."""
    both = ends(windows, invalidate=windows, budget=16384)
    slot, into = both.slots[4], bytearray(4096)
    for index in range(4):
        both.command(index, READ, bytearray(4096))
    slot.data_in = memoryview(into)
    slot.inline_length = 0
    with pytest.raises(Busy):
        both.command(4, BIDIRECTIONAL, bytes(4096))
    assert (slot.stag, slot.stag_in) == (0, 0)
    both.turn()
    assert list(both.commands) == [0, 1, 2, 3]
    both.respond(1)
    both.turn()
    index, invalidated = both.responses.popleft()
    both.initiator.deallocate_task_resources(both.slots[index], invalidated)
    both.command(4, BIDIRECTIONAL, bytes(4096))
    both.turn()
    assert both.commands[-1] == 4 and slot.stag and slot.stag_in
    both.initiator.deallocate_task_resources(slot, 0)


@MODES
def test_an_stag_is_a_key_of_the_device(ends: Callable[..., Ends], windows: bool) -> None:
    """The header of a command names the R_Key of a region or of a window, and the address that goes
    with it. (The fake device looks at the L_Keys of what is sent.)

    proves: ISER-GEN-2.1.3-1, ISER-IB00-2.1.3-1
    """
    both = ends(windows)
    both.command(0, READ, bytearray(5000))
    both.command(1, WRITE, bytes(3000))
    both.turn()
    reading, writing = both.answers[:2]
    for stag, base, size, right in (
        (reading.read_stag, reading.read_base, 5000, api.REMOTE_WRITE),
        (writing.write_stag, writing.write_base, 3000, api.REMOTE_READ),
    ):
        area = both.links[0].open[stag]
        assert area.window is windows
        assert area.allows(base, size, right)
        assert not area.allows(base, size, api.REMOTE_READ ^ api.REMOTE_WRITE ^ right)


@MODES
def test_which_stags_are_kept(ends: Callable[..., Ends], windows: bool) -> None:
    """A region keeps its key when its task has ended, until the connection ends: the peer may still
    use it, and finds memory that belongs to no caller. Windows, which are used where the device has
    them, are closed with their task.

    proves: ISER-7145-1.5.1-5
    """
    both = ends(windows, invalidate=windows)
    buffer = bytearray(5000)
    both.command(0, READ, buffer)
    both.turn()
    stag, base = both.answers[0].read_stag, both.answers[0].read_base
    both.target.put_data(both.answers[0], memoryview(b"in time"), 0)
    both.respond(0)
    both.turn()
    index, invalidated = both.responses.popleft()
    both.initiator.deallocate_task_resources(both.slots[index], invalidated)
    assert (stag in both.links[0].open) is not windows
    buffer[:7] = b"the end"
    if not windows:
        both.answers[1].read_stag, both.answers[1].read_base = stag, base
        both.target.put_data(both.answers[1], memoryview(b"too late"), 0)
        both.target.flush()
        both.turn()
        assert not both.links[0].broken
    assert buffer[:8] == b"the end\0"
    both.close()
    assert not both.links[0].open


@MODES
def test_no_invalidation_is_done_twice(ends: Callable[..., Ends], windows: bool) -> None:
    """Responses that invalidate or do not, tasks that end early: the fake device checks."""
    rng = random.Random(5)
    both = ends(windows)
    buffer = bytearray(600)
    free, ended = list(range(16)), set[int]()
    for _ in range(600):
        if free and rng.random() < 0.5:
            index = free.pop(rng.randrange(len(free)))
            both.command(index, rng.choice([READ, WRITE]), buffer)
        if both.commands and rng.random() < 0.6:
            both.target.send_invalidate = windows and rng.random() < 0.5
            both.respond(both.commands.popleft())
        running = [i for i in range(16) if i not in free and i not in ended]
        if running and rng.random() < 0.05:
            index = rng.choice(running)
            if not windows:  # its late response would end the connection, with a window
                both.initiator.deallocate_task_resources(both.slots[index], 0)
                ended.add(index)
        both.turn()
        while both.responses:
            index, invalidated = both.responses.popleft()
            if index in ended:
                ended.discard(index)
            else:
                both.initiator.deallocate_task_resources(both.slots[index], invalidated)
            free.append(index)


def test_a_task_that_ends_without_a_response_closes_its_window(ends: Callable[..., Ends]) -> None:
    both = ends(True)
    buffer = bytearray(100)
    both.command(0, READ, buffer)
    both.turn()
    stag = both.slots[0].stag
    assert stag in both.links[0].open
    both.initiator.deallocate_task_resources(both.slots[0], 0)
    assert stag not in both.links[0].open
    assert both.links[0].local_invalidations == 0, "the response may be on its way"
    buffer.clear()


def test_a_pool_that_is_used_up_is_said(ends: Callable[..., Ends]) -> None:
    """A refused command queues nothing; the next works when another task has ended."""
    both = ends(True, budget=16384)
    for index in range(4):
        both.command(index, READ, bytearray(4096))
    with pytest.raises(Busy):
        both.command(4, READ, bytearray(4096))
    both.turn()
    assert list(both.commands) == [0, 1, 2, 3]
    both.respond(2)
    both.turn()
    index, invalidated = both.responses.popleft()
    both.initiator.deallocate_task_resources(both.slots[index], invalidated)
    both.command(4, READ, bytearray(4096))
    both.turn()
    assert both.commands[-1] == 4
