"""The far end of a session as a bare queue pair: a test plays the target, byte by byte."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from iserblk.commands.command import Operation
from iserblk.commands.session import CommandSession
from iserblk.datamover.iser import BHS_LENGTH, HEADER_LENGTH, ControlHeader
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import LunInfo
from iserblk.errors import TransportError
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.rcap.inprocess import memory_pair
from iserblk.scsi.luns import encode
from tests.rcap.wire import iwarp_pair
from tests.support.until import until

INLINE = 8192
RECEIVE = HEADER_LENGTH + BHS_LENGTH + INLINE
BLOCK = 512
SIZE = 1 << 20
CONTROL = bytes((0x10,)) + bytes(HEADER_LENGTH - 1)

PAIRS: dict[str, Callable[[], tuple[seam.QueuePair, seam.QueuePair]]] = {
    "memory": lambda: memory_pair(receive_size=RECEIVE),
    "iwarp": lambda: iwarp_pair(receive_size=RECEIVE),
    "iwarp-nocrc": lambda: iwarp_pair(receive_size=RECEIVE, crc=False),
}


@dataclass(frozen=True)
class Heard:
    """One PDU of the initiator."""

    head: ControlHeader
    bhs: bytes
    data: bytes

    @property
    def opcode(self) -> int:
        return self.bhs[0] & bhs.OPCODE_MASK

    @property
    def itt(self) -> int:
        return int.from_bytes(self.bhs[16:20], "big")

    @property
    def cmd_sn(self) -> int:
        return int.from_bytes(self.bhs[24:28], "big")

    @property
    def operation(self) -> int:
        """The operation code of the CDB."""
        return self.bhs[bhs.CDB_OFFSET]


class Peer:
    """The far end of a session. ``heard``: PDUs that came, oldest first; ``poll`` adds to it. The
    test decides what is sent."""

    def __init__(self, pair: seam.QueuePair) -> None:
        self.pair = pair
        self.heard: list[Heard] = []
        self.completed: list[object] = []  # tokens of signaled requests and Reads
        self.error: TransportError | None = None
        self.closed = False
        self.sent = bytearray()  # in Data-Outs, over TCP
        self._stat_sn = 100
        pair.post_receive(1 << 16)

    def next_stat_sn(self) -> int:
        self._stat_sn += 1
        return self._stat_sn

    def poll(self) -> None:
        try:
            for done in self.pair.progress(0.0):
                if done.opcode == seam.RECEIVE:
                    assert done.data is not None
                    self.heard.append(
                        Heard(
                            ControlHeader.unpack_from(done.data),
                            bytes(done.data[HEADER_LENGTH : HEADER_LENGTH + BHS_LENGTH]),
                            bytes(done.data[HEADER_LENGTH + BHS_LENGTH :]),
                        )
                    )
                else:
                    self.completed.append(done.token)
        except TransportError as error:
            self.error = error

    async def run(self, act: Callable[[Heard], None] | None = None) -> None:
        """Listen until the connection ends; ``act`` on each PDU."""
        with suppress(trio.ClosedResourceError):
            while self.error is None:
                await trio.lowlevel.wait_readable(self.pair.fileno())
                seen = len(self.heard)
                self.poll()
                for heard in self.heard[seen:]:
                    if act is not None:
                        act(heard)

    async def hears(self, count: int) -> None:
        """Return when ``count`` PDUs have come. ``run`` must be running."""
        await until(lambda: len(self.heard) >= count)

    def _post(self, request: seam.WorkRequest) -> None:
        with suppress(TransportError):  # an end that sends too much is disconnected
            self.pair.post([request])

    def send(self, message: bytes, invalidate: int = 0) -> None:
        """A Send of any bytes."""
        request = seam.WorkRequest(seam.SEND_SE_INVALIDATE if invalidate else seam.SEND_SE)
        request.data = memoryview(message)
        request.stag = invalidate
        self._post(request)

    def say(self, unit: pdu.Pdu, data: bytes = b"", invalidate: int = 0) -> None:
        """Send a PDU, behind the header that iSER wants."""
        self.send(CONTROL + unit.pack() + data, invalidate)

    def respond(
        self, heard: Heard, *, sense: bytes = b"", invalidate: int = 0, **fields: int
    ) -> None:
        """Send a SCSI Response: GOOD unless ``fields`` say something else."""
        data = len(sense).to_bytes(2, "big") + sense if sense else b""
        self._stat_sn += 1
        values = {"flags": 0x80, "status": 0, "exp_cmd_sn": 1, "max_cmd_sn": 1 << 20, **fields}
        self.say(
            pdu.ScsiResponse(itt=heard.itt, stat_sn=self._stat_sn, data_length=len(data), **values),
            data,
            invalidate,
        )

    def complete(self, heard: Heard, response: int = pdu.TMF_COMPLETE) -> None:
        """Answer a Task Management Request."""
        self._stat_sn += 1
        self.say(
            pdu.TaskManagementResponse(
                response=response,
                itt=heard.itt,
                stat_sn=self._stat_sn,
                exp_cmd_sn=1,
                max_cmd_sn=1 << 20,
            )
        )

    def goodbye(self, heard: Heard) -> None:
        """Answer a Logout Request, and end the connection, as a target does."""
        self._stat_sn += 1
        self.say(
            pdu.LogoutResponse(
                response=0, itt=heard.itt, stat_sn=self._stat_sn, exp_cmd_sn=1, max_cmd_sn=1 << 20
            )
        )
        self.pair.disconnect()

    def write(self, stag: int, to: int, data: bytes) -> None:
        """An RDMA Write."""
        request = seam.WorkRequest(seam.RDMA_WRITE)
        request.stag, request.to, request.data = stag, to, memoryview(data)
        self._post(request)

    def read(self, stag: int, to: int, sink: bytearray) -> None:
        """An RDMA Read; ``completed`` tells when it has come."""
        request = seam.WorkRequest(seam.RDMA_READ, token=sink)
        request.stag, request.to, request.data = stag, to, memoryview(sink)
        self._post(request)

    def close(self) -> None:
        self.closed = True
        self.pair.close()


def linked(
    pair: str = "memory",
    depth: int = 4,
    io_timeout: float = 30.0,
    window: int = 1 << 16,
    immediate: bool = False,
    level: int = 0,
) -> tuple[Session, Peer]:
    """A session in full feature phase, still without a driver, and its far end."""
    ours, theirs = PAIRS[pair]()
    datamover = IserInitiator(ours, INLINE)
    slots = [TaskSlot(index) for index in range(depth + CONTROL_SLOTS)]
    datamover.allocate_connection_resources(list(slots), UNEXPECTED)
    parameters = SessionParameters(
        rdma_extensions=True,
        max_outstanding_unexpected_pdus=0,
        immediate_data=immediate,
        error_recovery_level=level,
    )
    session = Session(datamover, slots, parameters, "portal:3260", io_timeout)
    session.start(1, 1, window, 100)
    return session, Peer(theirs)


def answering(peer: Peer, act: Callable[[Heard], None]) -> threading.Thread:
    """A thread that plays the target: ``act`` on each PDU, until the connection ends."""

    def listen() -> None:
        done = 0
        while peer.error is None:
            try:
                select.select([peer.pair.fileno()], [], [])
            except (OSError, ValueError):
                if not peer.closed:
                    raise
                return
            peer.poll()
            for heard in peer.heard[done:]:
                done += 1
                act(heard)

    thread = threading.Thread(target=listen)
    thread.start()
    return thread


def answering_slowly(peer: Peer) -> threading.Thread:
    """A thread that plays the target, as ``answering``: answers each command and the Logout Request
    after a millisecond."""

    def act(heard: Heard) -> None:
        time.sleep(0.001)
        (peer.goodbye if heard.opcode == bhs.LOGOUT_REQUEST else peer.respond)(heard)

    return answering(peer, act)


def disk_of(
    session: Session, write_cache: bool = True, fua: bool = True, long_cdbs: bool = True
) -> DiskCore:
    """LUN 0 of the session: 1 MiB in blocks of 512 bytes. It is the same LUN at each look, for
    which nothing is sent."""
    info = LunInfo(
        name="lun0",
        url="iser://portal/iqn/0",
        target="iqn",
        lun=0,
        size=SIZE,
        block_size=BLOCK,
        physical_block_size=BLOCK,
        read_only=False,
        rotational=False,
        write_cache=write_cache,
        fua=fua,
        can_trim=True,
        can_zero=True,
        zero_by_unmap=True,
        can_extents=True,
        vendor="",
        product="",
        revision="",
        serial="",
        identifiers=(),
        max_transfer=SIZE // 4,
        optimal_transfer=0,
    )
    core = DiskCore(session, encode(0), info, Geometry(block=BLOCK, long_cdbs=long_cdbs))

    def look(_session: CommandSession) -> Operation[tuple[LunInfo, Geometry]]:
        yield from ()
        return core.info, core.geometry

    core.look = look
    return core
