"""Answers leave while commands that came with theirs are still carried out: a few at a time, and of
many commands a quarter at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.datamover.iser import CONTROL, CONTROL_LAYOUT, RSV
from iserblk.datamover.iser_target import EARLY, IserTarget
from iserblk.datamover.seam import PduSlot, TargetSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message, memory_pair
from tests.contract.datamovers import Numbers, final_response

DATA = memoryview(b"8 bytes.")
MOST = 200  # commands at a time
FEW = EARLY // 2  # reads


class Target:
    """Answers each read at once. ``gone``: how many answers had left when each came."""

    def __init__(self) -> None:
        self.theirs, ours = memory_pair()
        self.gone: list[int] = []
        self._left: list[Message] = []
        ours.intercept = self._note
        self._dm = dm = IserTarget(ours, False)
        self._free = [TargetSlot(index) for index in range(2 * MOST)]
        dm.user = self
        dm.notice_numbers(Numbers())
        dm.allocate_connection_resources(self._free, 512, MOST)
        dm.notice_key_values(SessionParameters(rdma_extensions=True))
        dm.enable_datamover(final_response(dm))
        dm.flush()
        dm.progress(0.0)
        self._left.clear()
        self.theirs.post_receive(2 * MOST + 1)
        self._stag, self._base = self.theirs.advertise(memoryview(bytearray(8)), seam.REMOTE_WRITE)

    def _note(self, message: Message) -> bool:
        if message.kind != seam.RDMA_WRITE:
            self._left.append(message)
        return True

    def read(self, count: int) -> list[int]:
        """So many commands come together. Returns ``gone``."""
        self.gone.clear()
        self._left.clear()
        head = CONTROL_LAYOUT.pack(CONTROL | RSV, 0, 0, self._stag, self._base)
        requests = []
        for itt in range(count):
            command = pdu.ScsiCommand(
                flags=bhs.FLAG_FINAL | bhs.FLAG_READ,
                lun=bytes(8),
                itt=itt,
                edtl=len(DATA),
                cmd_sn=itt,
                exp_stat_sn=1,
                cdb=bytes(16),
            )
            request = seam.WorkRequest(seam.SEND_SE)
            request.data = memoryview(head + command.pack())
            requests.append(request)
        self.theirs.post(requests)
        self._dm.progress(0.0)
        self._dm.flush()
        assert len(self._left) == count
        return self.gone

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        self.gone.append(len(self._left))
        slot = self._free.pop()
        self._dm.map_task(slot)
        slot.bhs[:] = pdu.ScsiResponse(
            status=0, itt=len(self.gone), stat_sn=1, exp_cmd_sn=5, max_cmd_sn=50
        ).pack()
        self._dm.put_data(slot, DATA, 0)
        self._dm.send_control(slot)

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None: ...

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None: ...

    def discarded_notify(self, head: memoryview) -> None: ...

    def sent_notify(self, slot: PduSlot) -> None: ...

    def close(self) -> None:
        self._dm.connection_terminate()
        self.theirs.close()


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 32, 64, 160])
def test_answers_leave_a_few_at_a_time(target: Target, count: int) -> None:
    """At depth 32 that is four times, as at greater depths."""
    target.read(count)
    batch = max(FEW, count // 4)
    assert target.read(count) == [number // batch * batch for number in range(count)]


def test_the_first_commands_of_all(target: Target) -> None:
    """There was nothing before them; an eighth is no more than a quarter."""
    assert target.read(160) == [number // 20 * 20 for number in range(160)]
