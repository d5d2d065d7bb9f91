"""Slots are given their memory when they are first used: a session that has little to do holds
little."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from iserblk.commands.command import QUEUED, SENT
from iserblk.datamover.seam import BARE, PduSlot
from iserblk.errors import ConnectionLost
from iserblk.initiator.session.connection import FIRST_SLOTS, Connection
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from tests.initiator.fake import (
    CountingWaiter,
    FakeDatamover,
    cmd_sn_of,
    command,
    driver_of,
    response,
    session,
)
from tests.initiator.several import Polled
from tests.support import logs

DEPTH = 20
WINDOW = 1000  # commands


class Lender(Polled):
    """Has memory for the first slots, as after a login. ``added``: the indices of those that it was
    given later, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.adds_resources = True
        self.added: list[list[int]] = []
        self.exhausted = False
        self.receives = 0  # that were posted for those

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        first = slots[:-CONTROL_SLOTS][:FIRST_SLOTS] + slots[-CONTROL_SLOTS:]
        super().allocate_connection_resources(first, unexpected)

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        assert all(slot.bhs is BARE for slot in slots)
        self.receives += receives
        if self.exhausted:
            raise OSError(12, "Cannot allocate memory")
        self.added.append([slot.index for slot in slots])
        super().allocate_connection_resources(slots, 0)


def opened(depth: int = DEPTH) -> tuple[Session, Lender]:
    lender = Lender()
    made, _ = session(depth, WINDOW, datamover=lender)
    return made, lender


def with_memory_of(slots: Sequence[PduSlot]) -> list[int]:
    return [slot.index for slot in slots if slot.bhs is not BARE]


def with_memory(made: Session) -> list[int]:
    return with_memory_of(made.queue.slots)


def end(made: Session, datamover: FakeDatamover, slots: list[TaskSlot]) -> None:
    datamover.inbox.extend(response(slot.itt, max_cmd_sn=WINDOW) for slot in slots)
    made.progress(1.0)
    for slot in slots:
        assert slot.error is None and slot.waiter.pending == 0
        made.queue.release(slot)


def test_memory_comes_with_the_first_use() -> None:
    """Some slots at a time; never for more than are in flight, and once for each."""
    made, lender = opened()
    controls = list(range(DEPTH, DEPTH + CONTROL_SLOTS))
    assert with_memory(made) == [*range(FIRST_SLOTS), *controls]
    for _ in range(3 * DEPTH):  # one after the other
        end(made, lender, [command(made, CountingWaiter())])
    assert not lender.added
    slots = [command(made, CountingWaiter()) for _ in range(FIRST_SLOTS)]
    assert not lender.added
    slots.append(command(made, CountingWaiter()))
    assert lender.added == [[8, 9, 10, 11, 12, 13, 14, 15]]
    slots += [command(made, CountingWaiter()) for _ in range(DEPTH - len(slots))]
    assert lender.added[1:] == [[16, 17, 18, 19]]  # and none of those for control PDUs
    assert [sent[0] for sent in lender.sent[-DEPTH:]] == slots
    assert len({id(slot.bhs.obj) for slot in slots}) == DEPTH
    end(made, lender, slots)
    end(made, lender, [command(made, CountingWaiter()) for _ in range(DEPTH)])
    assert len(lender.added) == 2


def test_without_memory_a_command_waits() -> None:
    """It uses no CmdSN, and goes out when there is memory, at the latest with the next answer."""
    made, lender = opened()
    slots = [command(made, CountingWaiter()) for _ in range(FIRST_SLOTS)]
    lender.exhausted = True
    late = [command(made, CountingWaiter()) for _ in range(2)]
    assert [slot.state for slot in late] == [QUEUED] * 2 and len(lender.sent) == FIRST_SLOTS
    end(made, lender, slots[:1])
    assert [slot.state for slot in late] == [QUEUED] * 2
    lender.exhausted = False
    end(made, lender, slots[1:2])
    assert [slot.state for slot in late] == [SENT] * 2
    assert [cmd_sn_of(sent) for sent in lender.sent] == list(range(1, FIRST_SLOTS + 3))
    end(made, lender, slots[2:] + late)


@pytest.mark.logs(logs.RECONNECTED)
def test_the_next_connection_gives_memory_to_what_is_sent_again() -> None:
    """A fresh session has used a few of its slots; the one that goes on with its connection may
    have more in flight."""
    made, lost = opened()
    driver_of(made).reconnect = lambda: None
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(FIRST_SLOTS + 2)]
    before = [slot.bhs for slot in slots]
    lost.inbox.append(ConnectionLost("the wire was cut"))
    made.progress(1.0)
    assert made.suspended is not None
    fresh, kept = opened()
    made.offer(fresh)
    made.progress(2.0)
    assert [sent[0] for sent in kept.sent] == slots
    assert kept.added == [[8, 9, 10, 11, 12, 13, 14, 15]]
    assert not {id(view.obj) for view in before} & {id(slot.bhs.obj) for slot in slots}
    assert made.queue.slots[15].bhs is BARE  # its turn has not come
    slots += [command(made, waiter) for _ in range(DEPTH - len(slots))]
    assert kept.added[1:] == [[16, 17, 18, 19]]
    assert len({id(slot.bhs.obj) for slot in slots}) == DEPTH
    end(made, kept, slots)


def test_each_connection_has_memory_for_its_own_commands() -> None:
    lenders = [Lender(), Lender()]
    made, _ = session(DEPTH, WINDOW, datamover=lenders[0], max_connections=2)
    memory = [PduSlot(slot.index) for slot in made.queue.slots]
    lenders[1].allocate_connection_resources(memory, 0)
    made.offer_connection(Connection(lenders[1], memory, made.parameters, "portal:3260", 1))
    made.progress(1.0)
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(FIRST_SLOTS)]
    assert [len(each.sent) for each in lenders] == [4, 4]
    assert not lenders[0].added and not lenders[1].added
    slots += [command(made, waiter) for _ in range(2)]
    assert [each.added for each in lenders] == [[list(range(8, 16))]] * 2
    assert len({id(slot.bhs.obj) for slot in slots}) == len(slots)
    for connection, lender in zip(made.queue.connections, lenders, strict=True):
        lender.inbox.extend(
            response(slot.itt, max_cmd_sn=WINDOW) for slot in slots if slot.connection is connection
        )
    made.progress(2.0)
    for slot in slots:
        made.queue.release(slot)
    ticks(made, 2)
    assert [len(with_memory_of(each.memory)) for each in made.queue.connections] == [
        FIRST_SLOTS + CONTROL_SLOTS
    ] * 2
    assert len(with_memory(made)) <= FIRST_SLOTS + CONTROL_SLOTS
    slots = [command(made, waiter) for _ in range(DEPTH)]
    assert len({id(slot.bhs.obj) for slot in slots}) == DEPTH
    for lender in lenders:
        lender.connection_terminate()


def ticks(made: Session, count: int) -> None:
    ladder = Ladder(made)
    for _ in range(count):
        ladder.tick(1.0)


def test_memory_is_given_back_when_the_session_is_idle() -> None:
    """Only if nothing was sent for a tick, and nothing is in flight or still to be sent."""
    made, lender = opened()
    queue = made.queue
    kept = with_memory(made)
    slots = [command(made, CountingWaiter()) for _ in range(DEPTH)]
    ticks(made, 3)
    assert len(with_memory(made)) == len(queue.slots)  # all of them are in flight
    end(made, lender, slots[1:])
    ticks(made, 3)
    assert len(with_memory(made)) == len(queue.slots)  # and one of them still is
    end(made, lender, slots[:1])
    lender.full = True
    ticks(made, 3)
    assert len(with_memory(made)) == len(queue.slots)  # it may be on its way to the network
    lender.full = False
    command_ended = command(made, CountingWaiter())
    end(made, lender, [command_ended])
    ticks(made, 1)
    assert len(with_memory(made)) == len(queue.slots)  # it was not idle since the tick before
    ticks(made, 1)
    assert with_memory(made) == kept
    slots = [command(made, CountingWaiter()) for _ in range(DEPTH)]
    assert len({id(slot.bhs.obj) for slot in slots}) == DEPTH
    assert lender.receives == DEPTH - FIRST_SLOTS  # those of the first time are there still
    assert len(lender.added) == 4
    end(made, lender, slots)
