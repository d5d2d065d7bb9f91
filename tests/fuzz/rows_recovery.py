"""ErrorRecoveryLevel 1 over TCP, and DDP over SCTP: peers that number, order and repeat as they
like. What the end of a command promises of its data holds all the same."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

from iserblk.crc import crc32c
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, sctp
from iserblk.rcap.iwarp.sctp_association import Association
from iserblk.scsi.tasks import READ, WRITE
from iserblk.sockets.stream import SocketStream
from tests.contract.datamovers import INLINE_SIZE, Ends
from tests.contract.lossy import LEVEL_1
from tests.fuzz.engine import Case, Row
from tests.rcap.iwarp import test_receive as frames
from tests.rcap.sctp import FakeSctp, fake_association
from tests.rcap.sctp_pair import over
from tests.rcap.wire import pattern
from tests.target.iscsi.several import BLOCK, HOSTS, READ_10, READS, WRITE_10, WRITES, Host, cdb10
from tests.target.iscsi.test_iscsi_losses import DigestPeer

_GONE = (RemoteProtocolError, ConnectionLost, BrokenPipeError)
_SIZE = 4096
_PIECE = 512
_WRITTEN = 2048
_DATA = pattern(_SIZE)
_TURNS = 16


class _Numbers:
    """Numbers that mostly follow one another: some are left out, and come later, or twice."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._next = 0

    def take(self) -> int:
        lot = self._chance.random()
        if lot < 0.2 and self._next:
            return self._chance.randrange(self._next)
        self._next += 2 if lot < 0.35 else 1
        return self._next - 1


# -- the datamover of an initiator -----------------------------------------------------------------


class _LyingTarget:
    """What a target says at ErrorRecoveryLevel 1 with data digests, and the layer above the
    datamover, which ends a command when its response comes. Commands: 0 reads, 1 writes, 2 does
    both. ``honest``: each Data-In has had the bytes that belong where it says."""

    def __init__(self, case: Case) -> None:
        self.case, self.chance = case, case.chance
        self.ends = ends = Ends()
        ends.initiator.connection_terminate()
        ours, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        login = TcpInitiator(SocketStream(ours), INLINE_SIZE, 8192)
        login.user = ends.up
        ends.up.on_pdu = self._came
        login.allocate_connection_resources(ends.slots, 8)
        login.notice_key_values(replace(LEVEL_1, header_digest="None", initial_r2t=True))
        self.dm = ends.initiator = login.enable_datamover()
        self.buffers = {0: bytearray(_SIZE), 1: bytearray(), 2: bytearray(_SIZE)}
        ends.command(0, READ, memoryview(self.buffers[0]))
        ends.command(1, WRITE, memoryview(_DATA))
        ends.command_both(2, memoryview(_DATA), memoryview(self.buffers[2]))
        self.ended: dict[int, bytes] = {}
        self.honest = True
        self.statuses = _Numbers(self.chance)
        self.pieces = [_Numbers(self.chance) for _ in range(3)]
        self.asked: list[bytes] = []  # SNACKs that were heard
        self.hear()

    def _came(self, unit: bytes) -> None:
        response = pdu.ScsiResponse.unpack_from(unit)
        itt = response.itt
        if unit[0] != bhs.SCSI_RESPONSE or itt not in self.buffers or itt in self.ended:
            return  # a session refuses a response to what has ended
        buffer = self.buffers[itt]
        short = response.flags & (bhs.BIDI_UNDERFLOW if itt == 2 else bhs.RESIDUAL_UNDERFLOW)
        if self.honest and buffer and not (short or response.response or response.status):
            assert buffer == _DATA, "a read that lacks data passes as whole"
        self.dm.deallocate_task_resources(self.ends.slots[itt], 0)
        self.ended[itt] = bytes(buffer)

    def hear(self) -> None:
        self.dm.flush()
        try:
            heard = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        while len(heard) >= bhs.BHS_LENGTH:
            head, size = heard[: bhs.BHS_LENGTH], int.from_bytes(heard[5:8], "big")
            heard = heard[bhs.BHS_LENGTH + head[4] * 4 + ((size + 3 & ~3) + 4 if size else 0) :]
            if head[0] & bhs.OPCODE_MASK == bhs.SNACK_REQUEST:
                self.asked.append(head)

    def turn(self) -> None:
        head, data = self._unit()
        chance = self.chance
        if chance.random() < 0.05:
            self.honest = False
            head = self.case.mutated(head)[: bhs.BHS_LENGTH].ljust(bhs.BHS_LENGTH, b"\0")
        message = head + data + bytes(-len(data) & 3)
        if data:
            damaged = chance.random() < 0.15
            digest = crc32c(message[bhs.BHS_LENGTH :]) ^ damaged
            message += digest.to_bytes(4, "little")
        cut = chance.randrange(len(message) + 1)
        for piece in (message[:cut], message[cut:]):
            if piece:
                self.socket.sendall(piece)
                self.dm.progress(0.0)
        if chance.random() < 0.2:
            self.dm.tick()
        if chance.random() < 0.05:
            self._give_up(chance.randrange(3))
        self.hear()
        for itt, before in self.ended.items():
            assert bytes(self.buffers[itt]) == before, "written after its command had ended"

    def _give_up(self, itt: int) -> None:
        """The command is aborted."""
        if itt not in self.ended:
            self.dm.deallocate_task_resources(self.ends.slots[itt], 0)
            self.ended[itt] = bytes(self.buffers[itt])

    def _unit(self) -> tuple[bytes, bytes]:
        """The header and data of a PDU that a target might send."""
        chance = self.chance
        lot = chance.random()
        itt = chance.choice((0, 0, 0, 2, 2, 1))
        if lot < 0.6 and itt != 1:
            return self._data_in(itt)
        if lot < 0.7:
            return pdu.ReadyToTransfer(
                lun=bytes(8),
                itt=itt or 1,
                ttt=chance.randrange(9),
                stat_sn=0,
                r2t_sn=self.pieces[itt or 1].take(),
                buffer_offset=chance.choice((0, 512, 1024, 4000)),
                desired_length=96 if chance.random() < 0.95 else 4096,
                exp_cmd_sn=5,
                max_cmd_sn=50,
            ).pack(), b""
        if lot < 0.85:
            return pdu.ScsiResponse(
                flags=bhs.FLAG_FINAL,
                status=chance.choice((0, 0, 0, 2, 8)),
                response=chance.choice((0, 0, 0, 0, 1)),
                itt=itt,
                stat_sn=self.statuses.take(),
                exp_data_sn=chance.choice((0, 0, 8, 9)),
                residual=chance.choice((0, 0, 512)),
                exp_cmd_sn=5,
                max_cmd_sn=50,
            ).pack(), b""
        if lot < 0.87 and self.asked:
            return pdu.Reject(
                reason=pdu.REJECT_SNACK,
                data_length=bhs.BHS_LENGTH,
                stat_sn=self.statuses.take(),
                exp_cmd_sn=5,
                max_cmd_sn=50,
            ).pack(), chance.choice(self.asked)
        answers = chance.choice((bhs.NO_TAG, 99))
        return pdu.NopIn(
            itt=answers, ttt=bhs.NO_TAG, stat_sn=self.statuses.take(), exp_cmd_sn=5, max_cmd_sn=50
        ).pack(), b""

    def _data_in(self, itt: int) -> tuple[bytes, bytes]:
        chance = self.chance
        sn = self.pieces[itt].take()
        at = min(sn * _PIECE, _SIZE - _PIECE)
        if chance.random() < 0.1:
            at = chance.choice((0, 512, 1000, _SIZE - _PIECE))
        data = b"" if chance.random() < 0.1 else _DATA[at : at + _PIECE]
        last = at + _PIECE == _SIZE and itt == 0
        flags = chance.choice((0x81, 0x81, 0x80) if last else (0, 0, 0, 0x40))
        return pdu.DataIn(
            flags=flags,
            data_length=len(data),
            lun=bytes(8),
            itt=itt,
            ttt=5 if flags & 0x40 else bhs.NO_TAG,
            stat_sn=self.statuses.take() if flags & 1 else 0,
            exp_cmd_sn=5,
            max_cmd_sn=50,
            data_sn=sn,
            buffer_offset=at,
        ).pack(), data

    def close(self) -> None:
        self.ends.close()
        self.socket.close()


def _recovering_initiator(case: Case) -> None:
    lying = _LyingTarget(case)
    try:
        for _ in range(_TURNS):
            lying.turn()
    finally:
        lying.close()


# -- a target --------------------------------------------------------------------------------------


def _recovering_target(case: Case) -> None:
    """Writes whose Data-Outs are damaged, left out and repeated, and SNACKs. What a write with GOOD
    has written is what it was given; in the end no memory is left in use."""
    chance = case.chance
    host = Host(level=1)
    try:
        peer = DigestPeer(host).joined(("MaxBurstLength", "1024"), ("InitialR2T", "Yes"))
        peer.acknowledges = chance.random() < 0.7
        peer.command(cdb10(WRITE_10, _WRITTEN // BLOCK), WRITES, _WRITTEN, itt=1)
        if chance.random() < 0.5:
            peer.command(cdb10(READ_10, 4, 100), READS, 4 * BLOCK, itt=2)
        r2ts: list[pdu.ReadyToTransfer] = []
        sent: dict[int, _Numbers] = {}
        for _ in range(_TURNS):
            for head, _ in peer.heard:
                if head[0] == bhs.R2T:
                    r2ts.append(pdu.ReadyToTransfer.unpack_from(head))
                elif head[0] == bhs.SCSI_RESPONSE and head[19] == 1 and not head[3]:
                    assert host.store.content[:_WRITTEN] == _DATA[:_WRITTEN], (
                        "GOOD for what was not written"
                    )
            peer.heard.clear()
            if peer.connection.done:
                return
            lot = chance.random()
            if lot < 0.8 and r2ts:
                _data_out(peer, chance, r2ts[-1] if lot < 0.75 else chance.choice(r2ts), sent)
            elif lot < 0.9:
                _snack(peer, chance)
            elif lot < 0.98:
                peer.connection.tick()
            else:
                unit = pdu.DataOut(
                    data_length=0, lun=bytes(8), itt=1, ttt=1, exp_stat_sn=0, data_sn=0,
                    buffer_offset=0, flags=0,
                ).pack()  # fmt: skip
                peer.put(case.mutated(unit)[: bhs.BHS_LENGTH].ljust(bhs.BHS_LENGTH, b"\0"))
            host.run()
    finally:
        HOSTS.remove(host)
        host.end()


def _data_out(
    peer: DigestPeer,
    chance: random.Random,
    r2t: pdu.ReadyToTransfer,
    sent: dict[int, _Numbers],
) -> None:
    """One that answers ``r2t``, and has the bytes that belong where it says."""
    sn = sent.setdefault(r2t.ttt, _Numbers(chance)).take()
    end = r2t.buffer_offset + r2t.desired_length
    at = min(r2t.buffer_offset + sn * _PIECE, end - 1)
    if chance.random() < 0.05:
        at = chance.choice((0, 512, 1000))
    data = _DATA[at : min(at + _PIECE, end)]
    peer.damaged = chance.random() < 0.1
    final = at + len(data) == end if chance.random() < 0.98 else False
    peer.say_data_out(data, at, r2t.ttt, sn, final)


def _snack(peer: DigestPeer, chance: random.Random) -> None:
    peer.snack(
        chance.choice((pdu.SNACK_DATA, pdu.SNACK_STATUS, pdu.SNACK_DATA_ACK, pdu.SNACK_R_DATA)),
        itt=chance.choice((1, 2, 2, bhs.NO_TAG)),
        ttt=chance.choice((bhs.NO_TAG, 1, 2)),
        beg_run=chance.choice((0, 0, 1, 2, peer.exp_stat_sn, chance.getrandbits(32))),
        run_length=chance.choice((0, 0, 1, 2, chance.getrandbits(32))),
    )


# -- DDP over SCTP ---------------------------------------------------------------------------------

_CONTROLS = (
    bytes.fromhex("0000 0005 0040 0005 80000000"),
    bytes.fromhex("0000 0006 0005 0040 c0000000"),
    bytes.fromhex("0000 0001 80000000"),
    bytes.fromhex("0000 0002 c0000000"),
    bytes.fromhex("0000 0003"),
    bytes.fromhex("0000 0004"),
    bytes.fromhex("0000 0007 00000000"),
)


def _ppid(chance: random.Random, usual: int) -> int:
    return usual if chance.random() < 0.9 else chance.choice((0, 16, 17, 18, 0xFFFFFFFF))


def _first_message(case: Case) -> None:
    """What an end hears before a session, or in answer to its Initiate."""
    chance = case.chance
    announced = 1 if chance.random() < 0.9 else chance.choice((None, 0, 2))
    ours, theirs = fake_association(indications=(1, announced), seed=chance.getrandbits(32))
    association = Association(ours)
    side: sctp.SessionInitiator | sctp.SessionResponder = sctp.SessionResponder(ird=8, ord=8)
    try:
        if chance.random() < 0.5:
            side = sctp.SessionInitiator(ird=8, ord=8)
            association.is_adapted()
            association.send_control(*side.request)
        for _ in range(2):
            theirs.inject(_ppid(chance, sctp.PPID_CONTROL), case.data)
        if (got := association.receive_control()) is None:
            return
        agreed = side.receive(*got)
        assert 0 <= agreed.ird <= 8 and 0 <= agreed.ord <= 8
        assert len(agreed.private_data) <= sctp.MAX_PRIVATE_DATA
        if isinstance(side, sctp.SessionResponder):
            association.send_control(*side.accept())
    finally:
        association.close()
        theirs.close()


def _segment(chance: random.Random, stags: tuple[int, ...], msn: int) -> bytes:
    """A DDP segment, as an FPDU without its length and CRC."""
    stag, payload = chance.choice(stags), chance.randbytes(chance.randrange(40))
    whole = chance.choice(
        (
            frames.tagged(frames.WRITE, stag, chance.randrange(900), payload),
            frames.untagged(frames.SEND, msn, payload),
            frames.read_request(1, (1, 0), 10, (stag, 0)),
        )
    )
    (size,) = ddp.LENGTH.unpack_from(whole)
    return whole[ddp.LENGTH_SIZE : ddp.LENGTH_SIZE + size]


def _segments(case: Case) -> None:
    """Segments and control messages in the middle of a session, in any order."""
    chance = case.chance
    first, second = fake_association(seed=chance.getrandbits(32))
    pair, peer = over(first, second)
    try:
        pair.post_receive(_TURNS)
        memory, kept = bytearray(1000), pattern(1000)
        stags = (
            pair.advertise(memoryview(memory), seam.REMOTE_WRITE)[0],
            pair.advertise(memoryview(bytes(kept)), seam.REMOTE_READ)[0],
            9,
        )
        numbers = _Numbers(chance)
        sends: dict[int, bytes] = {}
        got: list[bytes] = []
        clean = True
        for turn in range(_TURNS):
            if chance.random() < 0.05:
                _inject(second, chance, sctp.PPID_CONTROL, case.data)
                clean = False
            else:
                # The message of number 1 + n has the n-th Send, so that a lost one shows.
                number = numbers.take()
                body = sends.setdefault(number, chance.randbytes(chance.randrange(40)))
                whole = frames.untagged(frames.SEND, number + 1, body)
                message = whole[ddp.LENGTH_SIZE : ddp.LENGTH_SIZE + 18 + len(body)]
                if chance.random() < 0.15:
                    message = case.mutated(_segment(chance, stags, turn + 1))
                    clean = False
                head = sctp.SSN.pack(number + 1)
                _inject(second, chance, sctp.PPID_SEGMENT, head + message)
            got += [
                bytes(each.data or b"")
                for each in pair.progress(0.0)
                if each.opcode == seam.RECEIVE
            ]
            if clean:
                assert got == [sends[number] for number in range(len(got))]
    finally:
        pair.close()
        peer.close()


def _inject(end: FakeSctp, chance: random.Random, ppid: int, message: bytes) -> None:
    end.inject(_ppid(chance, ppid), message)


ROWS = (
    Row("tcp initiator, level 1", _recovering_initiator, (), _GONE, _TURNS),
    Row("tcp target, level 1", _recovering_target, (), _GONE, _TURNS),
    Row("SCTP session", _first_message, _CONTROLS, (RemoteProtocolError, ConnectionLost), 2),
    Row("SCTP segments", _segments, _CONTROLS, (RemoteProtocolError, ConnectionLost), _TURNS),
)
