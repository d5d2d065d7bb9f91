"""Task slots: what they are at first, and when they can be sent again."""

from __future__ import annotations

from iserblk.commands.command import FREE
from iserblk.datamover.seam import INLINE
from iserblk.initiator.session.slots import INDEX_BITS, INDEX_MASK, ITT_MASK, TaskSlot
from iserblk.iscsi.bhs import NO_TAG
from iserblk.scsi.tasks import NO_DATA, READ, WRITE


def test_a_fresh_slot_is_free_and_changes_nothing() -> None:
    slot = TaskSlot(5)
    assert slot.state == FREE and slot.last < slot.first
    assert slot.itt & INDEX_MASK == 5


def test_no_tag_is_the_reserved_one() -> None:
    """Bit 31 stays 0, whatever the index and the generation."""
    assert ITT_MASK < NO_TAG and (1 << INDEX_BITS) - 1 == INDEX_MASK
    assert INDEX_MASK & ~ITT_MASK == 0


def test_complete_is_what_still_has_its_data() -> None:
    slot = TaskSlot(0)
    slot.direction = NO_DATA
    assert slot.complete
    for direction in (READ, WRITE, INLINE):
        slot.direction = direction
        slot.data = None
        assert not slot.complete
        slot.data = memoryview(bytearray(8))
        assert slot.complete


def test_memory_of_another_connection_is_taken_over() -> None:
    """The slot keeps its command; the other slot's buffers and work request are now this slot's."""
    slot, fresh = TaskSlot(1), TaskSlot(1)
    for each in (slot, fresh):
        each.bhs = memoryview(bytearray(48))
        each.inline = memoryview(bytearray(16))
    slot.cdb[:1] = b"\x28"
    request = fresh.request
    slot.take_memory(fresh)
    assert slot.bhs is fresh.bhs and slot.inline is fresh.inline
    assert slot.request is request and request.token is slot
    assert slot.cdb[0] == 0x28
