"""An initiator of bare PDUs with several connections to one target, over TCP or iSER."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import pytest

from iserblk.datamover.iser import (
    CONTROL,
    MINIMUM_LENGTH,
    RSV,
    WSV,
    ControlHeader,
)
from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.text import encode
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message, memory_pair
from iserblk.scsi.reservations import TransportId
from iserblk.sockets.stream import SocketStream
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.slot import TargetTask
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.target.fake_store import FakeStore
from tests.target.owner import Owner

INITIATOR, IQN = "iqn.2026-11.example:host", "iqn.2026-11.example:disk"
ISID = b"\x80abcde"
SIZE = 1 << 20
BLOCK = 512
READ_10, WRITE_10, SYNCHRONIZE_CACHE, TEST_UNIT_READY = 0x28, 0x2A, 0x35, 0x00
READS = bhs.FLAG_FINAL | bhs.FLAG_READ | bhs.ATTR_SIMPLE
WRITES = bhs.FLAG_FINAL | bhs.FLAG_WRITE | bhs.ATTR_SIMPLE
PLAIN = bhs.FLAG_FINAL | bhs.ATTR_SIMPLE

Pairs = list[tuple[str, str]]
HOSTS: list[Host] = []  # that a test has made; what follows it ends them


def cdb10(opcode: int, blocks: int, lba: int = 0) -> bytes:
    return bytes((opcode, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0)).ljust(
        16, b"\0"
    )


@dataclass
class Host:
    """The target, and the initiator's session with it: ``cmd_sn`` is the next CmdSN. ``running``:
    tasks that threads carry out, until ``finish``; with ``threads`` False they end at once."""

    level: int = 2
    max_connections: int = 8
    time2retain: int = 20
    receives: int = 8192  # bytes of data in one PDU, over TCP
    cmd_sn: int = 1
    tsih: int = 0
    threads: bool = False
    budget: DataBudget = field(default_factory=DataBudget)
    store: FakeStore = field(default_factory=lambda: FakeStore(SIZE))
    running: list[TargetTask] = field(default_factory=list)
    sessions: dict[int, TargetSession] = field(default_factory=dict)
    over: list[int] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unit = LogicalUnit(self.store, serial="S", block=BLOCK)
        self.device = DeviceServer({0: self.unit}, IQN)
        self._next_tsih = 0
        HOSTS.append(self)

    def end(self) -> None:
        """End all connections. Nothing of any session may be left: no memory, no nexus."""
        for peer in self.peers:
            peer.hang_up()
        self.run()
        for peer in list(self.peers):
            peer.connection.abandon()
            peer.close()
        while self.running:
            self.finish()
        for session in self.sessions.values():
            for connection in list(session.lost):
                session.expire(connection)
        assert sorted(self.over) == sorted(self.sessions)
        assert not self.nexuses
        assert not self.budget.used and not self.budget.waiting
        assert not self.budget.free and not self.budget.beside
        assert not self.device.task_sets.active

    @property
    def nexuses(self) -> list[TransportId]:
        """The initiator's ports with a session, as the device server tells reservations."""
        return self.unit.reservations.nexuses.known(INITIATOR)

    @property
    def session(self) -> TargetSession:
        return self.sessions[self.tsih]

    def login(self, rdma: bool) -> LoginTarget:
        self._next_tsih += 1
        return LoginTarget(
            LoginTargetConfig(
                IQN,
                self._next_tsih,
                receive_data_segment_length=self.receives,
                rdma=rdma,
                find_session=self.sessions.get,
                max_connections=self.max_connections,
                error_recovery_level=self.level,
                time2retain=self.time2retain,
            )
        )

    def logged_in(self, connection: TargetConnection, owner: Owner) -> None:
        """``owner``: of the connection, and of the session that it begins."""
        tsih = connection.login.tsih
        if connection.login.joined is None:
            self.tsih = tsih
            self.sessions[tsih] = connection.session
            owner.session_over = lambda: self.over.append(tsih)
            connection.session.owner = owner

    def offload(self, slot: TargetTask) -> None:
        self.running.append(slot)
        if not self.threads:
            self.finish()

    def finish(self) -> None:
        """Let the oldest thread finish."""
        slot = self.running.pop(0)
        self.device.run(slot.task, slot.buffer)
        connection = slot.connection
        connection.finish(slot)
        connection.wake()
        self.run()

    def run(self) -> None:
        for _ in range(6):
            for peer in self.peers:
                peer.turn()

    def take_cmd_sn(self) -> int:
        cmd_sn = self.cmd_sn
        self.cmd_sn = (cmd_sn + 1) & 0xFFFFFFFF
        return cmd_sn


class Peer(ABC):
    """One connection. ``heard``: the PDUs of the target since login, header and data, oldest first.
    ``acknowledges``: its PDUs carry the ExpStatSN that they should."""

    def __init__(self, host: Host, cid: int = 0) -> None:
        self.host = host
        self.cid = cid
        self.heard: list[tuple[bytes, bytes]] = []
        self.acknowledges = True
        self.exp_stat_sn = 0
        self.error: TransportError | None = None
        self.ended = False
        self.owner = Owner(host.offload)
        self.owner.ended = self._done
        self.connection: TargetConnection
        host.peers.append(self)

    def _made(self, connection: TargetConnection) -> None:
        self.connection = connection
        connection.driver = self.owner

    def _done(self) -> None:
        self.ended = True

    # -- bytes ------------------------------------------------------------------------------------

    def say_data_out(
        self, data: bytes, offset: int, ttt: int, sn: int = 0, final: bool = True, itt: int = 1
    ) -> None:
        self.say(
            pdu.DataOut(
                flags=bhs.FLAG_FINAL if final else 0,
                data_length=len(data),
                lun=bytes(8),
                itt=itt,
                ttt=ttt,
                exp_stat_sn=self.exp_stat_sn,
                data_sn=sn,
                buffer_offset=offset,
            ),
            data,
        )
        self.host.run()

    @abstractmethod
    def put(self, message: bytes) -> None:
        """Send bytes to the target as they are."""

    @abstractmethod
    def take(self) -> list[tuple[bytes, bytes]]:
        """What has come from the target since the last call: header and data of each PDU."""

    @abstractmethod
    def hang_up(self) -> None:
        """End the connection at this side. It may have ended already."""

    def turn(self) -> None:
        """What the owner of the connection does, and this initiator."""
        connection = self.connection
        if not connection.done:
            try:
                connection.progress(0.0)
            except TransportError as error:
                self.error = error
                connection.abandon()
        for head, data in self.take():
            self.heard.append((head, data))
            known = pdu.TargetHeader.unpack_from(head)
            counts = known.advances_stat_sn and head[0] != bhs.R2T
            if self.acknowledges and counts and (head[0] != bhs.DATA_IN or head[1] & 1):
                self.exp_stat_sn = known.stat_sn + 1 & 0xFFFFFFFF

    def lose(self, close: bool = True) -> None:
        """The connection fails."""
        self.hang_up()
        self.host.run()
        assert self.connection.done
        if close:
            self.close()

    def close(self) -> None:
        """What the owner does when the connection is done."""
        assert self.connection.done
        self.hang_up()
        self.connection.close()
        self.host.peers.remove(self)
        self.host.run()

    # -- PDUs -------------------------------------------------------------------------------------

    @abstractmethod
    def say(self, unit: pdu.Pdu, data: bytes = b"", header: ControlHeader | None = None) -> None:
        """Send a PDU. ``header``: its iSER header, where there is one."""

    def log_in(self, *more: tuple[str, str], tsih: int | None = None, rdma: bool = False) -> int:
        """Log in; ``tsih`` None: to the host's session, if it has one. Returns the status."""
        host = self.host
        tsih = host.tsih if tsih is None else tsih
        pairs: Pairs = [("InitiatorName", INITIATOR), ("TargetName", IQN)]
        if not tsih:
            if rdma:
                pairs.append(("RDMAExtensions", "Yes"))
            pairs += [
                ("MaxConnections", "8"),
                ("ErrorRecoveryLevel", "2"),
                ("DefaultTime2Wait", "0"),
                ("DefaultTime2Retain", "60"),
            ]
        named = {name for name, _ in more}
        text = encode([pair for pair in pairs if pair[0] not in named] + list(more))
        self.say(
            pdu.LoginRequest(
                flags=pdu.TRANSIT | pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT | pdu.FULL_FEATURE_PHASE,
                data_length=len(text),
                isid=ISID,
                tsih=tsih,
                itt=0,
                cid=self.cid,
                cmd_sn=host.cmd_sn,
                exp_stat_sn=0,
            ),
            text,
        )
        host.run()
        head, self.login_text = self.heard.pop()
        assert head[0] == bhs.LOGIN_RESPONSE
        response = pdu.LoginResponse.unpack_from(head)
        if not response.status:
            host.logged_in(self.connection, self.owner)
            assert response.tsih == host.tsih
        return response.status

    def ready(self) -> None:
        """Take the unit attention of a new session."""
        self.command(bytes(16))
        assert self.heard.pop()[0][3] == 2

    def command(
        self,
        cdb: bytes,
        flags: int = PLAIN,
        edtl: int = 0,
        data: bytes = b"",
        *,
        itt: int = 1,
        cmd_sn: int | None = None,
        header: ControlHeader | None = None,
        immediate: int = 0,
    ) -> None:
        """A SCSI Command, by default with the next CmdSN."""
        self.say(
            pdu.ScsiCommand(
                opcode=bhs.SCSI_COMMAND | immediate,
                flags=flags,
                data_length=len(data),
                lun=bytes(8),
                itt=itt,
                edtl=edtl,
                cmd_sn=self.host.take_cmd_sn() if cmd_sn is None else cmd_sn,
                exp_stat_sn=self.exp_stat_sn,
                cdb=cdb,
            ),
            data,
            header,
        )
        self.host.run()

    def manage(
        self,
        function: int,
        referenced: int = bhs.NO_TAG,
        *,
        itt: int = 90,
        ref_cmd_sn: int = 0,
        exp_data_sn: int = 0,
        header: ControlHeader | None = None,
        cmd_sn: int | None = None,
    ) -> None:
        """A task management request; with ``cmd_sn`` it is not immediate."""
        opcode = bhs.TASK_MANAGEMENT_REQUEST
        self.say(
            pdu.TaskManagementRequest(
                opcode=opcode | bhs.IMMEDIATE if cmd_sn is None else opcode,
                function=function,
                lun=bytes(8),
                itt=itt,
                referenced_task_tag=referenced,
                cmd_sn=self.host.cmd_sn if cmd_sn is None else cmd_sn,
                exp_stat_sn=self.exp_stat_sn,
                ref_cmd_sn=ref_cmd_sn,
                exp_data_sn=exp_data_sn,
            ),
            b"",
            header,
        )
        self.host.run()

    def log_out(self, reason: int, cid: int | None = None) -> None:
        self.say(
            pdu.LogoutRequest(
                reason=reason,
                itt=80,
                cid=self.cid if cid is None else cid,
                cmd_sn=self.host.cmd_sn,
                exp_stat_sn=self.exp_stat_sn,
            )
        )
        self.host.run()

    def acknowledge(self) -> None:
        """A NOP-Out that wants no answer, with the present ExpStatSN."""
        self.say(pdu.NopOut(itt=bhs.NO_TAG, cmd_sn=self.host.cmd_sn, exp_stat_sn=self.exp_stat_sn))
        self.host.run()

    def answer(self, opcode: int) -> tuple[bytes, bytes]:
        """The only PDU that was heard, which is taken away."""
        assert [head[0] for head, _ in self.heard] == [opcode]
        return self.heard.pop()

    def managed(self) -> int:
        """The response to the only request, if nothing else was heard."""
        return pdu.TaskManagementResponse.unpack_from(
            self.answer(bhs.TASK_MANAGEMENT_RESPONSE)[0]
        ).response

    def logged_out(self) -> pdu.LogoutResponse:
        return pdu.LogoutResponse.unpack_from(self.answer(bhs.LOGOUT_RESPONSE)[0])

    def opcodes(self) -> list[int]:
        return [head[0] for head, _ in self.heard]


class TcpPeer(Peer):
    def __init__(self, host: Host, cid: int = 0) -> None:
        super().__init__(host, cid)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._received = b""
        self._made(
            TargetConnection(
                TcpTarget(SocketStream(theirs), host.receives),
                host.device,
                host.login(False),
                self.owner,
                portal="10.0.0.1:3260",
                budget=host.budget,
                at_once=False,
            )
        )

    def say(self, unit: pdu.Pdu, data: bytes = b"", header: ControlHeader | None = None) -> None:
        self.put(unit.pack() + data + bytes(-len(data) & 3))

    def put(self, message: bytes) -> None:
        self.socket.sendall(message)

    def take(self) -> list[tuple[bytes, bytes]]:
        with contextlib.suppress(OSError):
            self._received += self.socket.recv(1 << 21)
        found = []
        while len(self._received) >= bhs.BHS_LENGTH:
            size = int.from_bytes(self._received[5:8], "big")
            end = bhs.BHS_LENGTH + (size + 3 & ~3)
            if len(self._received) < end:
                break
            data = self._received[bhs.BHS_LENGTH : bhs.BHS_LENGTH + size]
            found.append((self._received[: bhs.BHS_LENGTH], data))
            self._received = self._received[end:]
        return found

    def hang_up(self) -> None:
        self.socket.close()


class IserPeer(Peer):
    """``placed``: RDMA that left the target, kind and STag, oldest first."""

    def __init__(self, host: Host, cid: int = 0, ord: int = 64) -> None:
        super().__init__(host, cid)
        self.ours, self.theirs = memory_pair(ord=ord, receive_size=MINIMUM_LENGTH + 8192)
        self.placed: list[Message] = []
        self.theirs.intercept = self._left
        self.ours.post_receive(1000)
        self._made(
            TargetConnection(
                IserTarget(self.theirs, True),
                host.device,
                host.login(True),
                self.owner,
                portal="10.0.0.1:3260",
                budget=host.budget,
                at_once=False,
            )
        )

    def _left(self, message: Message) -> bool:
        if message.kind in (seam.RDMA_WRITE, seam.RDMA_READ):
            self.placed.append(message)
        return True

    def log_in(self, *more: tuple[str, str], tsih: int | None = None, rdma: bool = True) -> int:
        return super().log_in(*more, tsih=tsih, rdma=rdma)

    def say(self, unit: pdu.Pdu, data: bytes = b"", header: ControlHeader | None = None) -> None:
        head = bytearray(28)
        (header or ControlHeader(CONTROL, 0, 0, 0, 0)).pack_into(memoryview(head))
        self.put(bytes(head) + unit.pack() + data)

    def put(self, message: bytes) -> None:
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(message)
        self.ours.post([request])

    def take(self) -> list[tuple[bytes, bytes]]:
        found = []
        with contextlib.suppress(TransportError):
            for event in self.ours.progress(0.0):
                assert event.opcode == seam.RECEIVE and event.data is not None
                message = bytes(event.data)
                found.append((message[28:MINIMUM_LENGTH], message[MINIMUM_LENGTH:]))
        return found

    def hang_up(self) -> None:
        self.ours.close()

    def reads_into(self, buffer: bytearray) -> ControlHeader:
        """Advertise a buffer for Data-In."""
        stag, base = self.ours.advertise(memoryview(buffer), seam.REMOTE_WRITE)
        return ControlHeader(CONTROL | RSV, 0, 0, stag, base)

    def writes_from(self, data: bytes) -> ControlHeader:
        """Advertise a buffer for Data-Out."""
        stag, base = self.ours.advertise(memoryview(data), seam.REMOTE_READ)
        return ControlHeader(CONTROL | WSV, stag, base, 0, 0)


KINDS = pytest.mark.parametrize("kind", [TcpPeer, IserPeer])
Kind = type[TcpPeer] | type[IserPeer]


def two(kind: Kind, host: Host) -> tuple[Peer, Peer]:
    """A session with the connections 0 and 1."""
    first = kind(host, 0)
    assert first.log_in() == 0
    first.ready()
    second = kind(host, 1)
    assert second.log_in() == 0
    return first, second
