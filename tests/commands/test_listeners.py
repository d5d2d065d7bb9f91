"""Listeners to the commands of one LUN: each hears of its own LUN alone."""

from __future__ import annotations

from iserblk.commands.command import Command, Operation
from iserblk.commands.listeners import LunListener, LunListeners
from iserblk.initiator.session.slots import TaskSlot
from iserblk.scsi.luns import encode
from tests.initiator.fake import CountingWaiter

LUN, OTHER = encode(0), encode(1)


class Listener(LunListener):
    def __init__(self) -> None:
        self.heard: list[Command] = []
        self.retries = 0
        self.gone = False

    def hear(self, slot: Command) -> None:
        self.heard.append(slot)

    def retried(self) -> None:
        self.retries += 1

    def before_logout(self) -> Operation[None]:
        yield 0.5
        self.gone = True


def slot_of(lun: bytes) -> TaskSlot:
    slot = TaskSlot(0)
    slot.lun = lun
    slot.waiter = CountingWaiter()
    return slot


def test_each_hears_of_its_own_lun() -> None:
    listeners, one, other = LunListeners(), Listener(), Listener()
    listeners.add(LUN, one)
    listeners.add(OTHER, other)
    slot = slot_of(LUN)
    listeners.hear(slot)
    listeners.retried(OTHER)
    assert (one.heard, one.retries) == ([slot], 0)
    assert (other.heard, other.retries) == ([], 1)


def test_a_lun_that_nothing_follows() -> None:
    listeners = LunListeners()
    listeners.hear(slot_of(LUN))
    listeners.retried(LUN)


def test_several_for_one_lun_and_none_twice() -> None:
    listeners, one, two = LunListeners(), Listener(), Listener()
    for listener in (one, two, one):
        listeners.add(LUN, listener)
    listeners.hear(slot_of(LUN))
    assert len(one.heard) == len(two.heard) == 1


def test_one_that_was_removed_hears_no_more() -> None:
    listeners, one, two = LunListeners(), Listener(), Listener()
    listeners.add(LUN, one)
    listeners.add(LUN, two)
    listeners.remove(LUN, one)
    listeners.hear(slot_of(LUN))
    assert not one.heard and two.heard


def test_all_say_goodbye_one_after_another() -> None:
    listeners, one, two = LunListeners(), Listener(), Listener()
    listeners.add(LUN, one)
    listeners.add(OTHER, two)
    before_logout = listeners.before_logout()
    assert next(before_logout) == 0.5 and not one.gone
    assert next(before_logout) == 0.5 and one.gone and not two.gone
    assert list(before_logout) == [] and two.gone


def test_a_listener_that_leaves_out_what_it_does_not_need() -> None:
    class Deaf(LunListener):
        def hear(self, slot: Command) -> None:
            """Ignores every command."""

    listeners = LunListeners()
    listeners.add(LUN, Deaf())
    listeners.retried(LUN)
    assert list(listeners.before_logout()) == []
