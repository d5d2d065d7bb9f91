"""Commands: what they are at first, and which may be sent again."""

from __future__ import annotations

import pytest

from iserblk.commands.command import ANYTHING, FREE, NOBODY, Command, PlainCommand, owner_of
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, SIMPLE, WRITE
from tests.initiator.fake import CountingWaiter

KINDS = (PlainCommand, TaskSlot)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_command_is_free_and_changes_nothing(kind: type[Command]) -> None:
    command = kind(3)  # type: ignore[call-arg]
    assert (command.index, command.state, command.waiter) == (3, FREE, NOBODY)
    assert command.last < command.first and command.attribute == SIMPLE
    assert command.error is None and not command.deadline


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_is_whole_as_long_as_it_has_its_buffer(kind: type[Command]) -> None:
    command = kind(0)  # type: ignore[call-arg]
    assert command.direction == NO_DATA and command.complete
    for direction in (READ, WRITE):
        command.direction = direction
        command.data = None
        assert not command.whole and not command.complete
        command.data = memoryview(bytearray(8))
        assert command.whole and command.complete


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_have_done_anything_is_not_sent_again(kind: type[Command]) -> None:
    command = kind(0)  # type: ignore[call-arg]
    command.last = ANYTHING
    assert command.once and command.whole and not command.complete
    command.last = -1
    command.direction = BIDIRECTIONAL
    command.data_in = memoryview(bytearray(8))
    assert command.once and command.whole and not command.complete


@pytest.mark.parametrize("kind", KINDS)
def test_the_deadline_is_kept(kind: type[Command]) -> None:
    command = kind(0)  # type: ignore[call-arg]
    command.deadline = 2.5
    assert command.deadline == 2.5


def test_the_owner_is_that_of_the_waiter() -> None:
    waiter = CountingWaiter()
    assert owner_of(waiter) is None
    assert owner_of(NOBODY) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_takes_no_attribute_that_it_does_not_have(kind: type[Command]) -> None:
    """In both forms: what sets a name of before is noticed."""
    command = kind(0)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        command.flags = 0x80  # type: ignore[attr-defined]
