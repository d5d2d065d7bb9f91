"""The datamover of an initiator whose connection begins as a byte stream (RFC 7145 section 5.1.1).

Login PDUs travel on the stream. Enable_Datamover, called with the final Login Response, ends this
object: its successor is the iSER datamover, whose RCaP is enabled on the same connection, or, where
RDMAExtensions is not Yes, the one of Traditional iSCSI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import InitiatorDatamover, InitiatorUser, Losses, PduSlot
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_stream import ByteStream
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.seam import QueuePair, StreamingPair


class StreamInitiator:
    """Implements InitiatorDatamover until ``enable_datamover``, for one thread.

    ``stream`` and ``qp`` are of the same connection, and ``iser`` uses ``qp``. ``receive_data``:
    the MaxRecvDataSegmentLength that login declares for Traditional iSCSI."""

    def __init__(
        self, stream: ByteStream, qp: StreamingPair, iser: IserInitiator, receive_data: int
    ) -> None:
        self._qp = qp
        self._tcp = TcpInitiator(stream, iser.inline_size, receive_data)
        self._iser = iser
        self.greeted = True  # there is no Hello before the end of the login
        self.losses = Losses()
        self._parameters = SessionParameters()
        qp.on_started = self._started

    def _started(self, pair: QueuePair) -> None:
        self._iser.qp = pair

    @property
    def user(self) -> InitiatorUser:
        return self._tcp.user

    @user.setter
    def user(self, user: InitiatorUser) -> None:
        self._tcp.user = user
        self._iser.user = user

    @property
    def on_unfinished(self) -> Callable[[], None]:
        return self._iser.on_unfinished

    @on_unfinished.setter
    def on_unfinished(self, tell: Callable[[], None]) -> None:
        self._iser.on_unfinished = tell

    # -- down -------------------------------------------------------------------------------------

    def allocate_connection_resources(self, slots: list[PduSlot], unexpected: int) -> None:
        """See the seam. To be called before the login: the slots serve both successors, and the
        receives are there before the target may send PDUs that answer nothing (RFC 7145 section
        5.1.3, "early" allocation)."""
        self._tcp.allocate_connection_resources([], 0)
        self._iser.allocate_connection_resources(slots, unexpected)

    @property
    def adds_resources(self) -> bool:
        return self._iser.adds_resources

    def add_resources(self, slots: list[PduSlot], receives: int) -> None:
        """See the seam."""
        self._iser.add_resources(slots, receives)

    def allocate_data_outs(self, count: int, size: int) -> list[PduSlot]:
        """See the seam. They serve iSER; Traditional iSCSI needs none."""
        return self._iser.allocate_data_outs(count, size)

    def notice_key_values(self, parameters: SessionParameters) -> None:
        """See the seam. RDMAExtensions chooses the successor."""
        self._parameters = parameters
        if parameters.rdma_extensions:
            self._iser.notice_key_values(parameters)
        else:
            self._tcp.notice_key_values(parameters)

    def enable_datamover(self) -> InitiatorDatamover:
        """See the seam. With iSER the caller then calls ``progress`` of the queue pair until MPA
        start-up is complete (``StreamingPair.established``)."""
        if not self._parameters.rdma_extensions:
            return self._tcp.enable_datamover()
        successor = self._iser.enable_datamover()
        self._qp.start(*self._tcp.leave_stream())
        return successor

    @property
    def queued(self) -> Collection[object]:
        return self._tcp.queued

    def send_control(self, slot: PduSlot) -> None:
        self._tcp.send_control(slot)

    def reassign(self, slot: PduSlot, control: PduSlot, before: InitiatorDatamover) -> None:
        """See the seam: there are no tasks during login."""
        self._tcp.reassign(slot, control, before)

    def flush(self) -> bool:
        return self._tcp.flush()

    def deallocate_task_resources(self, slot: PduSlot, invalidated: int) -> None:
        """See the seam: there are no tasks during login."""
        slot.data = None

    def disconnect(self) -> None:
        self._qp.disconnect()

    def connection_terminate(self) -> None:
        self._tcp.connection_terminate()
        self._iser.connection_terminate()

    # -- up ---------------------------------------------------------------------------------------

    def progress(self, now: float) -> int:
        return self._tcp.progress(now)

    def tick(self) -> None:
        """Does nothing: the RCaP loses nothing."""

    def describe(self) -> dict[str, object]:
        return self._tcp.describe()

    def fileno(self) -> int:
        return self._tcp.fileno()

    def wants_write(self) -> bool:
        return self._tcp.wants_write()
