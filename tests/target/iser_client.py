"""An initiator of bare messages, joined to a TargetConnection inside one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from iserblk.datamover.iser import CONTROL, MINIMUM_LENGTH, ControlHeader
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.stream_target import StreamTarget
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.iscsi.text import encode
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message, memory_pair
from iserblk.scsi import luns
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.tasks.slot import TargetTask
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.target.fake_store import FakeStore
from tests.target.owner import Owner

INITIATOR, IQN = "iqn.2026-11.example:host", "iqn.2026-11.example:disk"
PLAIN = ControlHeader(CONTROL, 0, 0, 0, 0)
BLOCK = 512
SIZE = 1 << 20

Pairs = list[tuple[str, str]]
WHO: Pairs = [("InitiatorName", INITIATOR), ("TargetName", IQN)]
YES: Pairs = [("RDMAExtensions", "Yes")]


@dataclass(frozen=True)
class Heard:
    """One message of the target. ``kind``: the work request's opcode."""

    kind: int
    invalidated: int
    header: ControlHeader
    bhs: bytes
    data: bytes

    @property
    def opcode(self) -> int:
        return self.bhs[0] & bhs.OPCODE_MASK

    def number(self, offset: int) -> int:
        return int.from_bytes(self.bhs[offset : offset + 4], "big")


def tasks_of(connection: TargetConnection) -> set[int]:
    """ITTs of the tasks that have not ended."""
    return set(connection.session.tasks)


class Traced:
    """A datamover that keeps the calls that it gets, in ``calls``: names and arguments."""

    def __init__(self, datamover: IserTarget | IserInitiator | StreamTarget) -> None:
        self._datamover = datamover
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    @property
    def user(self) -> Any:
        return self._datamover.user

    @user.setter
    def user(self, user: Any) -> None:
        self._datamover.user = user

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._datamover, name)
        if not callable(call):
            return call

        def kept(*arguments: object) -> object:
            self.calls.append((name, arguments))
            result = call(*arguments)
            return self if result is self._datamover else result

        return kept


class IserClient:
    """``sent``: every message that left the target, RDMA included, oldest first. ``heard``: its
    PDUs. ``store``: the content of LUN 0. ``owner``: of the target's connection; ``budget``: its
    memory for data. ``datamover``: the target's. ``accounts``: its users, if it has any.
    ``device``, ``store``: of another client of the same target. ``lun``: of the only LUN.
    ``max_ulpdu``: what the target declares. ``solicited_only``: of its config. ``at_once``: it
    allocates all slots at login."""

    def __init__(
        self,
        send_invalidate: bool = True,
        ord: int = 64,
        accounts: Accounts | None = None,
        device: DeviceServer | None = None,
        store: FakeStore | None = None,
        port: TargetPort = ONLY_PORT,
        lun: int = 0,
        max_ulpdu: int = 0,
        solicits: bool = True,
        isid: bytes = b"\x80abcde",
        solicited_only: bool = True,
        at_once: bool = True,
    ) -> None:
        self.ours, theirs = memory_pair(
            ord=ord, receive_size=MINIMUM_LENGTH + 8192, solicits=solicits
        )
        self._isid = isid
        self.target_pair = theirs
        self.sent: list[Message] = []
        self.heard: list[Heard] = []
        self.on_send: Callable[[Message], None] = lambda _: None
        self.store = store or FakeStore(SIZE)
        self.device = device or DeviceServer(
            {lun: LogicalUnit(self.store, serial="S", block=BLOCK)}, IQN
        )
        self.budget = DataBudget()
        theirs.intercept = self._left
        self.datamover = Traced(IserTarget(theirs, send_invalidate))
        self.owner = Owner(self._offload)
        self.connection = TargetConnection(
            self.datamover,
            self.device,
            LoginTarget(
                LoginTargetConfig(
                    IQN, 1, accounts=accounts, max_ulpdu=max_ulpdu, solicited_only=solicited_only
                )
            ),
            self.owner,
            portal="10.0.0.1:3260",
            port=port,
            budget=self.budget,
            at_once=at_once,
        )
        self.connection.driver = self.owner
        self.ours.post_receive(1000)
        self.cmd_sn = 1
        self._lun = luns.encode(lun)
        self._kinds: list[int] = []

    @property
    def receives(self) -> int:
        """How many PDUs the target can take at once."""
        return self.target_pair.posted - self.target_pair.consumed

    def _offload(self, slot: TargetTask) -> None:
        self.device.run(slot.task, slot.buffer)
        self.connection.finish(slot)

    def _left(self, message: Message) -> bool:
        self.sent.append(message)
        if message.kind <= seam.SEND_SE_INVALIDATE:
            self._kinds.append(message.kind)
        self.on_send(message)
        return True

    def run(self) -> None:
        """Drive both ends until nothing happens. Raises what the connection raises."""
        busy = True
        while busy:
            before = len(self.sent)
            self.connection.progress(0.0)
            for event in self.ours.progress(0.0):
                assert event.opcode == seam.RECEIVE and event.data is not None
                message = bytes(event.data)
                self.heard.append(
                    Heard(
                        self._kinds[len(self.heard)],
                        event.invalidated,
                        ControlHeader.unpack_from(message),
                        message[28:MINIMUM_LENGTH],
                        message[MINIMUM_LENGTH:],
                    )
                )
            busy = len(self.sent) > before or bool(self.target_pair.inbox)

    def send(self, message: bytes, opcode: int = seam.SEND_SE) -> None:
        request = seam.WorkRequest(opcode)
        request.data = memoryview(message)
        self.ours.post([request])

    def ask(
        self,
        unit: bytes,
        data: bytes = b"",
        header: ControlHeader = PLAIN,
        opcode: int = seam.SEND_SE,
    ) -> Heard:
        """Send a PDU; returns its only answer."""
        before = len(self.heard)
        head = bytearray(28)
        header.pack_into(memoryview(head))
        self.send(bytes(head) + unit + data, opcode)
        self.run()
        assert len(self.heard) == before + 1
        return self.heard[-1]

    # -- PDUs -------------------------------------------------------------------------------------

    def login(self, more: Pairs | None = None, stage: int = 1, following: int = 3) -> Heard:
        data = encode([*WHO, *(YES if stage else []), *(more or [])])
        flags = pdu.TRANSIT | stage << pdu.CSG_SHIFT | following
        request = pdu.LoginRequest(
            flags=flags,
            data_length=len(data),
            isid=self._isid,
            tsih=0,
            itt=5,
            cmd_sn=self.cmd_sn,
            exp_stat_sn=0,
        )
        return self.ask(request.pack(), data)

    def logged_in(self, more: Pairs | None = None) -> IserClient:
        """Log in, and take the unit attention that every session has first."""
        answer = self.login(more)
        assert answer.opcode == bhs.LOGIN_RESPONSE and answer.bhs[36:38] == b"\0\0"
        assert self.connection.parameters is not None
        assert self.command(bytes(6)).bhs[3] == 2
        del self.sent[:]
        return self

    def scsi(self, cdb: bytes, flags: int = 0x80, edtl: int = 0, itt: int = 9, n: int = 0) -> bytes:
        """A SCSI Command with the next CmdSN, and ``n`` bytes of data behind it."""
        cmd_sn, self.cmd_sn = self.cmd_sn, self.cmd_sn + 1
        return bhs.SCSI_COMMAND_FIELDS.pack(
            bhs.SCSI_COMMAND, flags | 1, n, self._lun, itt, edtl, cmd_sn, 0, cdb.ljust(16, b"\0")
        )

    def command(
        self,
        cdb: bytes,
        flags: int = 0x80,
        edtl: int = 0,
        header: ControlHeader = PLAIN,
        data: bytes = b"",
    ) -> Heard:
        return self.ask(self.scsi(cdb, flags, edtl, n=len(data)), data, header)

    def read(self, buffer: bytearray, stag: int | None = None, lba: int = 0) -> Heard:
        """READ (10) of as many blocks as ``buffer`` has, advertised with an STag of its own."""
        base = 0
        if stag is None:
            stag, base = self.ours.advertise(memoryview(buffer), seam.REMOTE_WRITE)
        header = ControlHeader(0x14, 0, 0, stag, base)
        return self.command(rw10(0x28, len(buffer), lba), 0xC0, len(buffer), header)

    def write(self, data: bytes, immediate: int = 0, from_start: bool = False) -> Heard:
        """WRITE (10); ``from_start``: the STag covers the immediate data as well."""
        stag, base = self.ours.advertise(
            memoryview(data if from_start else data[immediate:]), seam.REMOTE_READ
        )
        header = ControlHeader(0x18, stag, base, 0, 0)
        cdb = rw10(0x2A, len(data))
        return self.command(cdb, 0xA0, len(data), header, data[:immediate])


def rw10(code: int, length: int, lba: int = 0) -> bytes:
    blocks = length // BLOCK
    return bytes((code, 0, *lba.to_bytes(4, "big"), 0, *blocks.to_bytes(2, "big"), 0))
