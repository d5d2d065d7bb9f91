"""Both ends of a connection at ErrorRecoveryLevel 1, and a wire between them that loses PDUs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace

from iserblk.crc import crc32c
from iserblk.datamover.seam import TargetSlot
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import NO_DATA, READ
from iserblk.sockets.stream import SocketStream
from tests.contract.datamovers import INLINE_SIZE, TCP_WAYS, Ends, Way

LEVEL_1 = replace(TCP_WAYS["digests"], error_recovery_level=1, initial_r2t=False)
PASS, DROP, DAMAGE = "pass", "drop", "damage"

# What becomes of a PDU, by its BHS.
Fate = Callable[[bytes], str]


def passing(_header: bytes) -> str:
    return PASS


class LossyStream:
    """Implements ByteStream, and sends what ``fate`` says. ``sent``: the headers of all PDUs that
    were to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = stream = SocketStream(sock)
        self.receive = stream.receive
        self.fileno = stream.fileno
        self.disconnect = stream.disconnect
        self.close = stream.close
        self.describe = stream.describe
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.fate: Fate | None = None  # None: there are no digests yet
        self.sent: list[bytes] = []
        self.change: Callable[[bytes], bytes] | None = None  # of a BHS
        self._held = b""

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        self._held += b"".join(buffers)
        out = b"" if self.fate else self._held
        if not self.fate:
            self._held = b""
        while len(self._held) >= 48 and self.fate is not None:
            header = self._held[:48]
            data = int.from_bytes(header[5:8], "big")
            head = 48 + header[4] * 4 + 4
            whole = head + (data + 3) // 4 * 4 + (4 if data else 0)
            if len(self._held) < whole:
                break
            unit, self._held = bytearray(self._held[:whole]), self._held[whole:]
            self.sent.append(header)
            fate = self.fate(header)
            if self.change is not None:
                unit[:48] = self.change(header)
                unit[head - 4 : head] = crc32c(unit[: head - 4]).to_bytes(4, "little")
            if fate == DAMAGE and data:
                unit[head] ^= 0x10
            if fate != DROP:
                out += bytes(unit)
        if out:
            assert self._stream.send([out], len(out)) == len(out), (
                "the socket's buffer is too small"
            )
        return size


class LossyEnds(Ends):
    """``up_wire``, ``down_wire``: what the initiator and the target send. The target's layer above
    answers SNACKs and PDUs that were dropped, as the real one does."""

    def __init__(self, parameters: SessionParameters = LEVEL_1) -> None:
        left, right = socket.socketpair()
        self.up_wire, self.down_wire = LossyStream(left), LossyStream(right)
        super().__init__(Way(self._make, replace(parameters)))
        self.keeps = True
        self._spare: list[TargetSlot] = []
        self.down.on_pdu = self._came
        self.down.discarded_notify = self._discarded  # type: ignore[method-assign]
        self.up_wire.fate = self.down_wire.fate = passing
        self.reasons: list[tuple[int, int]] = []  # of Rejects

    def _make(self) -> tuple[TcpInitiator, TcpTarget]:
        return (
            TcpInitiator(self.up_wire, INLINE_SIZE, 262144),
            TcpTarget(self.down_wire, 262144),
        )

    def _came(self, unit: bytes) -> None:
        if unit[0] & bhs.OPCODE_MASK == bhs.SNACK_REQUEST:
            reason, data_sn = self.target.retransmit(pdu.SnackRequest.unpack_from(unit))
            if reason:
                self.reject(unit, reason, data_sn)
        elif unit[0] & bhs.OPCODE_MASK == bhs.NOP_OUT:
            if pdu.NopOut.unpack_from(unit).itt != bhs.NO_TAG:
                self.pong(pdu.NopOut.unpack_from(unit).itt)
        else:
            self._map(unit)

    def _discarded(self, head: memoryview) -> None:
        self.down.discarded.append(bytes(head))
        self.reject(bytes(head), pdu.REJECT_DATA_DIGEST_ERROR)

    def _take_stat_sn(self) -> int:
        self.numbers.stat_sn += 1
        return self.numbers.stat_sn - 1

    def spare(self, data: bytes = b"") -> TargetSlot:
        """A slot for a PDU of the target that is no SCSI Response."""
        free = [slot for slot in self._spare if not slot.busy]
        if not free:
            free = [TargetSlot(100 + index) for index in range(16)]
            self.target.add_resources(free, INLINE_SIZE, 0)
            self._spare += free
        free[0].inline[: len(data)] = data
        free[0].inline_length = len(data)
        return free[0]

    def reject(self, unit: bytes, reason: int, data_sn: int = 0) -> None:
        self.reasons.append((reason, data_sn))
        slot = self.spare(unit)
        slot.bhs[:] = pdu.Reject(
            reason=reason,
            data_length=48,
            data_sn=data_sn,
            stat_sn=self._take_stat_sn(),
            exp_cmd_sn=5,
            max_cmd_sn=50,
        ).pack()
        self.target.send_control(slot)

    def pong(self, itt: int) -> None:
        slot = self.spare()
        slot.bhs[:] = pdu.NopIn(
            itt=itt, stat_sn=self._take_stat_sn(), exp_cmd_sn=5, max_cmd_sn=50
        ).pack()
        self.target.send_control(slot)

    def ping(self, itt: int, index: int = 7) -> None:
        """From the initiator, with the ExpStatSN that it has."""
        slot = self.slots[index]
        slot.direction, slot.data = NO_DATA, None
        slot.bhs[:] = pdu.NopOut(itt=itt, cmd_sn=0, exp_stat_sn=self.exp_stat_sn).pack()
        self.initiator.send_control(slot)

    @property
    def exp_stat_sn(self) -> int:
        """What the layer above the initiator acknowledges: all that it has heard of."""
        last = 99
        for head, _, _ in self.up.pdus:
            header = pdu.TargetHeader.unpack_from(head)
            if header.advances_stat_sn:
                last = header.stat_sn
        return last + 1

    def acknowledge(self, index: int = 7) -> None:
        self.ping(bhs.NO_TAG, index)

    def settle(self) -> None:
        """Drive both ends until nothing is under way."""
        quiet = 0
        while quiet < 3:
            self.initiator.flush()
            self.target.flush()
            count = self.target.progress(0.0) + self.initiator.progress(0.0)
            busy = count or self.initiator.queued or self.target.wants_write()
            quiet = 0 if busy else quiet + 1

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.initiator.tick()
            self.target.tick()
            self.settle()

    def read(self, index: int, size: int) -> bytearray:
        """Send a read; returns its buffer."""
        buffer = bytearray(size)
        self.command(index, READ, memoryview(buffer))
        self.settle()
        return buffer

    def answer(self, index: int, data: bytes, **how: bool) -> None:
        """Data-In and GOOD for the task in answer ``index``, which is its ITT, too."""
        self.target.put_data(self.answers[index], memoryview(data), 0, **how)
        self.respond(index)
        self.settle()

    def snacks(self) -> list[pdu.SnackRequest]:
        return [
            pdu.SnackRequest.unpack_from(header)
            for header in self.up_wire.sent
            if header[0] & bhs.OPCODE_MASK == bhs.SNACK_REQUEST
        ]

    def responses(self) -> list[int]:
        """The ITTs of the SCSI Responses that came up, in their order."""
        return [
            int.from_bytes(head[16:20], "big")
            for head, _, _ in self.up.pdus
            if head[0] == bhs.SCSI_RESPONSE
        ]


class Once:
    """A fate: ``what`` happens to the ``nth`` PDU (from 0) with this opcode, which ``when`` picks;
    all others pass."""

    def __init__(
        self,
        what: str,
        opcode: int,
        nth: int = 0,
        when: Callable[[bytes], bool] = lambda _: True,
        times: int = 1,
    ) -> None:
        self._what, self._opcode, self._nth, self._when = what, opcode, nth, when
        self._times = times
        self._seen = 0

    def __call__(self, header: bytes) -> str:
        if header[0] & bhs.OPCODE_MASK != self._opcode or not self._when(header):
            return PASS
        self._seen += 1
        return self._what if 0 <= self._seen - 1 - self._nth < self._times else PASS
