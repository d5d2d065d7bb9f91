"""TASK REASSIGN at the initiator's datamovers: what is advertised anew, and what goes on."""

from __future__ import annotations

from contextlib import suppress

import pytest

from iserblk.datamover.iser import RSV, WSV
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import INLINE, PduSlot
from iserblk.errors import RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, WRITE
from tests.initiator.peer import INLINE as INLINE_SIZE
from tests.initiator.peer import PAIRS, Heard, Peer

ITT = 0x1234
CONTROL_ITT = 0x77
SIZE = 4096


class User:
    """Implements InitiatorUser; nothing is to come."""

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        raise AssertionError("nothing was sent")

    def sent_notify(self, slot: PduSlot) -> None:
        raise AssertionError("there are no Data-Outs")


class Ends:
    """A datamover, and its far end."""

    def __init__(self, kind: str) -> None:
        ours, theirs = PAIRS[kind]()
        self.datamover = IserInitiator(ours, INLINE_SIZE)
        self.datamover.user = User()
        self.slots = [PduSlot(index) for index in range(2)]
        self.datamover.allocate_connection_resources(self.slots, 4)
        self.peer = Peer(theirs)

    def heard(self) -> Heard:
        self.datamover.flush()
        for _ in range(100):
            self.datamover.progress(0.0)
            self.peer.poll()
            if self.peer.heard:
                return self.peer.heard.pop()
        raise AssertionError("nothing came")

    def close(self) -> None:
        self.datamover.connection_terminate()
        self.peer.close()

    def turn(self) -> None:
        for _ in range(20):
            self.peer.poll()
            self.datamover.progress(0.0)


def command(slot: PduSlot, direction: int) -> None:
    """Fill ``slot`` with a SCSI command."""
    pdu.ScsiCommand(
        flags=0x81,
        lun=bytes(8),
        itt=ITT,
        edtl=SIZE,
        cmd_sn=1,
        exp_stat_sn=1,
        cdb=bytes(16),
    ).pack_into(slot.bhs)
    slot.direction = direction
    slot.data = None if direction == NO_DATA else memoryview(bytearray(b"d") * SIZE)
    slot.data_in = memoryview(bytearray(SIZE)) if direction == BIDIRECTIONAL else None


def reassigned(kind: str, direction: int) -> tuple[Ends, Ends, PduSlot, Heard, Heard]:
    """A task that is sent on one connection, and reassigned to another: both, its slot, its command
    and the TASK REASSIGN as they came."""
    old, new = Ends(kind), Ends(kind)
    slot = PduSlot(0)
    slot.take_memory(old.slots[0])
    command(slot, direction)
    old.datamover.send_control(slot)
    first = old.heard()
    old.datamover.connection_terminate()
    slot.take_memory(new.slots[0])
    bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, ITT)
    control = new.slots[1]
    pdu.TaskManagementRequest(
        function=pdu.TMF_TASK_REASSIGN,
        lun=bytes(8),
        itt=CONTROL_ITT,
        referenced_task_tag=ITT,
        cmd_sn=2,
        exp_stat_sn=1,
    ).pack_into(control.bhs)
    if slot.direction == INLINE:
        slot.direction = WRITE
    new.datamover.reassign(slot, control, old.datamover)
    return old, new, slot, first, new.heard()


kind = pytest.mark.parametrize("kind", ["memory", "iwarp"])


@kind
@pytest.mark.parametrize("direction", [READ, WRITE, BIDIRECTIONAL, NO_DATA])
def test_new_stags_are_advertised_in_the_header(kind: str, direction: int) -> None:
    """One for each direction that has data.

    proves: ISER-7.3.3-2, ISER-7.3.3-3, ISER-7.3.3-5, ISER-7.3.3-6, ISER-7.3.3-8, ISER-7.3.3-9,
        ISER-3.3-5
    """
    old, new, _, _, heard = reassigned(kind, direction)
    request = pdu.TaskManagementRequest.unpack_from(heard.bhs)
    assert request.function == pdu.TMF_TASK_REASSIGN and request.exp_data_sn == 0
    assert (request.itt, request.referenced_task_tag) == (CONTROL_ITT, ITT)
    flags = heard.head.flags & (WSV | RSV)
    expected = {READ: RSV, WRITE: WSV, BIDIRECTIONAL: WSV | RSV, NO_DATA: 0}[direction]
    assert flags == expected
    assert (heard.head.write_stag != 0, heard.head.read_stag != 0) == (
        bool(expected & WSV),
        bool(expected & RSV),
    )
    old.close()
    new.close()


@kind
def test_data_moves_by_the_new_stag(kind: str) -> None:
    """The local mapping belongs to the task: its end retires the new STag.

    proves: ISER-7.3.3-7, ISER-10.2.2-2
    """
    old, new, slot, _, heard = reassigned(kind, READ)
    sink = slot.data
    assert sink is not None
    new.peer.write(heard.head.read_stag, heard.head.read_base, b"fresh")
    new.turn()
    assert bytes(sink[:5]) == b"fresh"
    new.datamover.deallocate_task_resources(slot, 0)
    assert slot.stag == 0 and slot.data is None
    new.peer.write(heard.head.read_stag, heard.head.read_base, b"later")
    with suppress(TransportError, RemoteProtocolError):  # it names an STag that there is not
        new.turn()
    assert bytes(sink[:5]) == b"fresh"
    old.close()
    new.close()


@kind
def test_the_old_stag_is_dead(kind: str) -> None:
    """Nothing that the old connection still delivers reaches the buffer.

    proves: ISER-7.3.3-4, ISER-8.3.1-2
    """
    old, new, slot, first, heard = reassigned(kind, READ)
    sink = slot.data
    assert sink is not None
    before = bytes(sink)
    old.peer.write(first.head.read_stag, first.head.read_base, b"stale")
    old.peer.poll()
    assert bytes(sink) == before
    assert heard.head.read_stag
    old.close()
    new.close()


@kind
def test_a_write_advertises_all_of_its_buffer(kind: str) -> None:
    """Also where its data had gone with the command: some may be missing at the target.

    proves: ISER-10.2.2-2
    """
    old, new, slot, _, heard = reassigned(kind, WRITE)
    sink = bytearray(SIZE)
    new.peer.read(heard.head.write_stag, heard.head.write_base, sink)
    for _ in range(50):
        new.turn()
        if new.peer.completed:
            break
    assert slot.data is not None and sink == slot.data
    old.close()
    new.close()
