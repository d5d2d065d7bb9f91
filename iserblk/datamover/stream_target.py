"""The datamover of a target whose connection begins as a byte stream (RFC 7145 section 5.1.2).

Login PDUs travel on the stream. Enable_Datamover sends the final Login Response there, and ends
this object: its successor is the iSER datamover, whose RCaP is enabled on the same connection, or,
where RDMAExtensions is not Yes, the one of Traditional iSCSI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.seam import (
    Resumption,
    SessionNumbers,
    TargetDatamover,
    TargetSlot,
    TargetUser,
)
from iserblk.datamover.tcp_stream import ByteStream
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.iscsi import pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import QueuePair, StreamingPair


class StreamTarget:
    """Implements TargetDatamover until ``enable_datamover``.

    ``stream`` and ``qp`` are of the same connection, and ``iser`` uses ``qp``. ``receive_data``:
    the MaxRecvDataSegmentLength that login declares for Traditional iSCSI."""

    def __init__(
        self, stream: ByteStream, qp: StreamingPair, iser: IserTarget, receive_data: int
    ) -> None:
        self._qp = qp
        self._tcp = TcpTarget(stream, receive_data)
        self._iser = iser
        self.greeted = True  # there is no Hello before the end of the login
        self._parameters: SessionParameters | None = None
        self._enabled: IserTarget | None = None
        qp.on_started = self._started

    def _started(self, pair: QueuePair) -> None:
        self._iser.qp = pair

    @property
    def user(self) -> TargetUser:
        return self._tcp.user

    @user.setter
    def user(self, user: TargetUser) -> None:
        self._tcp.user = user
        self._iser.user = user

    @property
    def on_unfinished(self) -> Callable[[], None]:
        return self._iser.on_unfinished

    @on_unfinished.setter
    def on_unfinished(self, tell: Callable[[], None]) -> None:
        self._iser.on_unfinished = tell

    # -- down -------------------------------------------------------------------------------------

    @property
    def acknowledges(self) -> bool:
        return False

    def _traditional(self) -> bool:
        return self._parameters is not None and not self._parameters.rdma_extensions

    def allocate_connection_resources(
        self, slots: Sequence[TargetSlot], inline_size: int, receives: int
    ) -> None:
        """See the seam. Slots of the login serve both successors."""
        self._tcp.allocate_connection_resources((), 0, 0)
        self._iser.allocate_connection_resources(slots, inline_size, receives)

    def add_resources(self, slots: Sequence[TargetSlot], inline_size: int, receives: int) -> None:
        """See the seam. To be called behind ``notice_key_values``, which chooses the successor."""
        if self._traditional():
            self._tcp.add_resources(slots, inline_size, receives)
        else:
            self._iser.add_resources(slots, inline_size, receives)

    def notice_numbers(self, numbers: SessionNumbers) -> None:
        self._tcp.notice_numbers(numbers)
        self._iser.notice_numbers(numbers)

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """See the seam. RDMAExtensions chooses the successor."""
        self._parameters = parameters
        if self._traditional():
            self._tcp.notice_key_values(parameters)
        else:
            self._iser.notice_key_values(parameters)

    def enable_datamover(self, final: TargetSlot) -> TargetDatamover:
        """See the seam. The final Login Response and the end of the stream are one step: the next
        byte that the initiator sends is already of MPA start-up. Raises ConnectionLost."""
        if self._traditional():
            return self._tcp.enable_datamover(final)
        self._iser.enable_behind_stream()
        self._tcp.send_control(final)
        self._tcp.flush()
        self._qp.start(*self._tcp.leave_stream())
        self._enabled = self._iser
        return self._iser

    def map_task(self, slot: TargetSlot) -> None:
        """Does nothing: there are no tasks during login. The same holds for their other calls."""

    def reassign_task(self, slot: TargetSlot, fresh: TargetSlot, how: Resumption) -> int:
        """Does nothing."""
        return 0

    def put_data(
        self,
        slot: TargetSlot,
        data: memoryview,
        buffer_offset: int,
        notify_enable: bool = False,
        acknowledge: bool = False,
    ) -> None:
        """Does nothing."""

    def get_data(
        self,
        slot: TargetSlot,
        sink: memoryview,
        buffer_offset: int,
        notify_enable: bool = True,
    ) -> None:
        """Does nothing."""

    def cancel_data(self, slot: TargetSlot) -> bool:
        return True

    def send_control(self, slot: TargetSlot, invalidate: bool = False) -> None:
        self._tcp.send_control(slot)

    def flush(self) -> None:
        self._tcp.flush()

    def deallocate_task_resources(self, slot: TargetSlot) -> None:
        self._iser.deallocate_task_resources(slot)

    def disconnect(self) -> None:
        self._qp.disconnect()

    def connection_terminate(self) -> None:
        self._tcp.connection_terminate()
        self._iser.connection_terminate()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        """See the seam. Bytes that came with the last Login Request are handed on at once: perhaps
        no other event comes."""
        count = self._tcp.progress(now)
        if self._enabled is not None:
            count += self._enabled.progress(now)
        return count

    def retransmit(self, snack: pdu.SnackRequest) -> tuple[int, int]:
        """There are no SNACKs here (RFC 7145 section 7.3.11)."""
        return pdu.REJECT_PROTOCOL_ERROR, 0

    def forget_kept(self) -> None:
        """Nothing is kept."""

    @property
    def kept_bytes(self) -> int:
        return 0

    @property
    def unacknowledged(self) -> int | None:
        return None

    def tick(self) -> None:
        """Does nothing."""

    def describe(self) -> dict[str, object]:
        return self._tcp.describe()

    def fileno(self) -> int:
        return self._tcp.fileno()

    def wants_write(self) -> bool:
        return self._tcp.wants_write()

    def next_deadline(self) -> float | None:
        return self._tcp.next_deadline()
