"""A TCP connection in memory, whose lines delay, split, damage and lose what a seed says."""

from __future__ import annotations

from random import Random
from typing import Final

from iserblk.crc import crc32c
from iserblk.errors import ConnectionLost
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import MASK32, serial_lt

_DIGEST: Final = 4
# What SNACKs and R2Ts bring back. (A command, a ping or a task management request that is lost is
# the session's to send again, and unsolicited data the target's to ask for.)
_COMES_AGAIN: Final = frozenset(
    (
        bhs.DATA_IN,
        bhs.DATA_OUT,
        bhs.NOP_IN,
        bhs.R2T,
        bhs.REJECT,
        bhs.SCSI_RESPONSE,
        bhs.SNACK_REQUEST,
        bhs.TASK_MANAGEMENT_RESPONSE,
    )
)


def word(head: bytes, at: int) -> int:
    return int.from_bytes(head[at : at + 4], "big")


def data_length(head: bytes) -> int:
    return word(head, bhs.LENGTHS_OFFSET) & 0xFFFFFF


class Faults:
    """What the lines of a world do to PDUs. ``damage``, ``drop``: the share of PDUs. ``once``: no
    PDU is lost a second time, and none that recovery is made of. ``damaged``, ``dropped``: how many
    there were, ``damaged_in`` of them on the way to the initiator. ``over``: no more of them.
    ``fatal``: why the connection may end. ``data``, ``statuses``: what was lost of them: ITT and
    DataSN or R2TSN; StatSN. ``outs``: ITTs whose Data-Outs were lost. ``uncounted``: responses tell
    no ExpDataSN, as of some targets."""

    def __init__(
        self, chance: Random, damage: float = 0.0, drop: float = 0.0, once: bool = False
    ) -> None:
        self.chance = chance
        self.damage = damage
        self.drop = drop
        self.once = once
        self.damaged = 0
        self.damaged_in = 0
        self.dropped = 0
        self.over = False
        self.fatal = ""
        self.data: set[tuple[int, int]] = set()
        self.statuses: set[int] = set()
        self.outs: set[int] = set()
        self.uncounted = False
        self._known: set[bytes] = set()

    def spares(self, head: bytes) -> bool:
        """Whether this PDU has to come."""
        if self.over:
            return True
        if not self.once:
            return False
        opcode = head[0] & bhs.OPCODE_MASK
        key = head[:1] + head[16:24] + head[36:44]
        spared = key in self._known or opcode in (bhs.SNACK_REQUEST, bhs.REJECT, bhs.NOP_IN)
        spared = spared or (opcode == bhs.SCSI_RESPONSE and word(head, 24) in self.statuses)
        self._known.add(key)
        return spared

    def lose(self, head: bytes) -> None:
        """A PDU is lost."""
        opcode, itt = head[0] & bhs.OPCODE_MASK, word(head, 16)
        if opcode == bhs.DATA_OUT:
            self.outs.add(itt)
        if opcode < bhs.NOP_IN:
            return
        if opcode in (bhs.DATA_IN, bhs.R2T):
            self.data.add((itt, word(head, 36)))
        status = opcode != bhs.DATA_IN or head[1] & bhs.DATA_IN_STATUS
        if status and opcode != bhs.R2T and (opcode != bhs.NOP_IN or itt != bhs.NO_TAG):
            self.statuses.add(word(head, 24))


class Rules:
    """What a PDU on the wire has to be like, whatever the other end makes of it (RFC 7143 sections
    4.2.2, 11.3 to 11.8): lengths, the F bit, and numbers. ``heard``: the ExpStatSN that the
    initiator may send, because it was notified of all before; ``lenient``: there may have been
    more, of tasks that have ended. ``bytes_in``, ``bytes_out``: of all Data-In, and of solicited
    Data-Outs. ``snacks``: DataACKs do not count."""

    def __init__(self, parameters: SessionParameters, faults: Faults, lun: bytes) -> None:
        self._parameters = parameters
        self._faults = faults
        self._lun = lun
        self.heard = 0
        self.lenient = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.snacks = 0
        self._exp_stat_sn: int | None = None
        self._max_cmd_sn: int | None = None
        self._next: dict[int, int] = {}  # by ITT: DataSN or R2TSN
        self.asked: set[int] = set()  # TTTs of A bits
        self.acknowledged: set[int] = set()  # the same of DataACKs
        self._rooms: dict[int, int] = {}  # by ITT: how long a read may be
        self._last: dict[int, int] = {}  # by ITT: DataSN of what is seen to be the last
        self._data_outs: dict[int, tuple[int, int]] = {}  # by TTT: DataSN and offset of the next
        self._r2ts: dict[int, tuple[int, int]] = {}  # by TTT: offset and length

    def check(self, head: bytes) -> None:
        opcode, size = head[0] & bhs.OPCODE_MASK, data_length(head)
        keys = self._parameters
        if opcode < bhs.NOP_IN:
            most = keys.max_recv_data_segment_length
            acknowledged, self._exp_stat_sn = self._exp_stat_sn, word(head, 28)
            lacks = serial_lt(self.heard, self._exp_stat_sn)
            assert not lacks or self.lenient, "it acknowledges what it lacks"
            if acknowledged is not None and not self.lenient:
                assert not serial_lt(self._exp_stat_sn, acknowledged), "an old ExpStatSN"
        else:
            most = keys.initiator_recv_data_segment_length
            last, self._max_cmd_sn = self._max_cmd_sn, word(head, 32)
            assert last is None or not serial_lt(self._max_cmd_sn, last), "an old MaxCmdSN"
        assert size <= most, f"{size} bytes for an end that takes {most}"
        if opcode == bhs.SCSI_COMMAND and not head[1] & bhs.FLAG_WRITE:
            self._rooms[word(head, 16)] = word(head, 20)
        if opcode == bhs.DATA_OUT:
            self._check_data_out(head, size)
        elif opcode == bhs.R2T:
            offset, length = word(head, 40), word(head, 44)
            assert 0 < length <= keys.max_burst_length
            known = self._r2ts.setdefault(word(head, 20), (offset, length))
            assert known == (offset, length), "another R2T with its tag"
            assert head[8:16] == self._lun
            self._count(word(head, 16), word(head, 36))
        elif opcode == bhs.DATA_IN and size:
            self._check_data_in(head, size)
        elif opcode == bhs.SNACK_REQUEST:
            self._check_snack(head)
        elif opcode == bhs.SCSI_RESPONSE:
            counted = word(head, 36)
            assert counted == self._next.get(word(head, 16), counted), "another ExpDataSN"

    def _count(self, itt: int, sn: int) -> None:
        expected = self._next.setdefault(itt, sn)
        assert sn <= expected, "a number was left out"
        self._next[itt] = max(expected, sn + 1)

    def _check_snack(self, head: bytes) -> None:
        """It asks for what was lost, and for nothing else."""
        kind, itt, ttt = head[1] & 0x7F, word(head, 16), word(head, 20)
        begin, count = word(head, 40), word(head, 44)
        if kind == pdu.SNACK_DATA_ACK:
            assert itt == bhs.NO_TAG and ttt in self.asked and not count
            assert head[8:16] == self._lun
            self.acknowledged.add(ttt)
            return
        self.snacks += 1
        assert ttt == bhs.NO_TAG and not any(head[8:16])
        if kind == pdu.SNACK_STATUS:
            assert itt == bhs.NO_TAG and count
            assert {begin + at & MASK32 for at in range(count)} <= self._faults.statuses
        else:
            assert kind == pdu.SNACK_DATA
            assert {(itt, begin + at) for at in range(count)} <= self._faults.data
            # Targets take the number behind the last Data-In for one that is too high.
            assert not count or begin + count <= self._last.get(itt, begin + count)

    def _check_data_out(self, head: bytes, size: int) -> None:
        ttt, data_sn, offset = word(head, 20), word(head, 36), word(head, 40)
        assert size and head[8:16] == (bhs.NO_LUN if ttt == bhs.NO_TAG else self._lun)
        if ttt == bhs.NO_TAG:
            assert offset + size <= self._parameters.first_burst_length
            return
        begin, length = self._r2ts[ttt]
        expected_sn, expected_offset = self._data_outs.get(ttt, (0, begin))
        assert (data_sn, offset) == (expected_sn, expected_offset), "out of order"
        last = offset + size == begin + length
        assert bool(head[1] & bhs.FLAG_FINAL) is last
        assert last or size == self._parameters.max_recv_data_segment_length
        self.bytes_out += size
        self._data_outs[ttt] = (data_sn + 1, offset + size)
        if last:
            del self._data_outs[ttt]

    def _check_data_in(self, head: bytes, size: int) -> None:
        flags = head[1]
        self.bytes_in += size
        self._count(word(head, 16), word(head, 36))
        end = word(head, 40) + size
        if flags & bhs.DATA_IN_STATUS or end == self._rooms.get(word(head, 16)):
            self._last[word(head, 16)] = word(head, 36)
        asks = word(head, 20) != bhs.NO_TAG
        assert asks is (flags & bhs.DATA_IN_ACKNOWLEDGE != 0)
        assert head[8:16] == (self._lun if asks else bhs.NO_LUN)
        if asks:
            self.asked.add(word(head, 20))
        if flags & bhs.DATA_IN_STATUS:
            assert flags & bhs.FLAG_FINAL and not head[3], "a status of a Data-In is GOOD here"
        else:
            assert not flags & bhs.RESIDUAL_FLAGS and word(head, 24) == word(head, 44) == 0
        most = min(
            self._parameters.initiator_recv_data_segment_length, self._parameters.max_burst_length
        )
        assert size <= most and (flags & bhs.FLAG_FINAL or size == most)


class Line:
    """One end of a connection. Implements ByteStream. ``peer``: the other end. What it sends goes
    through ``faults``, once ``begin`` was called. ``inbox``: what has come, ``way``: what was sent
    and has not. ``ended``: nothing more comes. ``sent``: how many PDUs of each opcode."""

    def __init__(self, faults: Faults, room: int) -> None:
        self.peer: Line
        self.sent: dict[int, int] = {}
        self._faults = faults
        self._chance = faults.chance
        self._room = room
        self.inbox = bytearray()
        self._held = bytearray()  # of a PDU that has not left whole
        self.way = bytearray()
        self._keys: SessionParameters | None = None
        self._rules: Rules | None = None
        self.closed = False
        self.ended = False

    def begin(self, keys: SessionParameters, rules: Rules) -> None:
        """Full feature phase: from now on PDUs are looked at."""
        self._keys, self._rules = keys, rules

    # -- ByteStream -------------------------------------------------------------------------------

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        if self.closed or self.peer.closed or self.ended:
            raise ConnectionLost("connection lost: reset")
        whole = b"".join(buffers)
        assert len(whole) == size
        room = self._room - len(self.way)
        if room <= 0:
            return -1
        if self._chance.random() < 0.2:
            room = self._chance.randint(1, room)
        self._held += whole[:room]
        self._look()
        return min(room, size)

    def receive(self, buffers: list[memoryview]) -> int:
        if self.closed:
            raise ConnectionLost("the connection is closed")
        inbox = self.inbox
        if not inbox:
            return 0 if self.ended else -1
        at = 0
        for buffer in buffers:
            count = min(len(buffer), len(inbox) - at)
            buffer[:count] = inbox[at : at + count]
            at += count
        del inbox[:at]
        return at

    def fileno(self) -> int:
        return -1

    def disconnect(self, discard: bool = False) -> None:
        self.ended = self.peer.ended = True

    def close(self) -> None:
        self.closed = True
        self.peer.ended = True

    def describe(self) -> dict[str, object]:
        return {"provider": "memory"}

    # -- the network ------------------------------------------------------------------------------

    def carry(self, all_of_it: bool = False) -> bool:
        """Some of what is on its way comes. Whether there was anything."""
        way = self.way
        if not way or self.ended:
            return False
        count = len(way)
        if not all_of_it and self._chance.random() < 0.5:
            count = self._chance.randint(1, count)
        self.peer.inbox += way[:count]
        del way[:count]
        return True

    def cut(self) -> None:
        """The connection is lost, both ways, in the middle of what is on its way."""
        for line in (self, self.peer):
            line.peer.inbox += line.way[: self._chance.randint(0, len(line.way))]
            line.way.clear()
            line.ended = True

    def _look(self) -> None:
        """Let whole PDUs go, as the faults will have it."""
        held, keys, rules = self._held, self._keys, self._rules
        if keys is None or rules is None:
            self.way += held
            held.clear()
            return
        while len(held) >= bhs.BHS_LENGTH:
            head = bytes(held[: bhs.BHS_LENGTH])
            data = bhs.BHS_LENGTH + head[4] * 4 + _DIGEST * (keys.header_digest != "None")
            end = data
            if size := data_length(head):
                end += (size + 3 & ~3) + _DIGEST * (keys.data_digest != "None")
            if len(held) < end:
                return
            unit = held[:end]
            del held[:end]
            opcode = head[0] & bhs.OPCODE_MASK
            self.sent[opcode] = self.sent.get(opcode, 0) + 1
            rules.check(head)
            self._check_digests(unit, data, size)
            if opcode == bhs.SCSI_RESPONSE and self._faults.uncounted:
                unit[36:40] = bytes(4)
                if keys.header_digest != "None":
                    unit[data - _DIGEST : data] = _digest(unit[: data - _DIGEST])
            self._pass(head, unit, data)

    def _check_digests(self, unit: bytearray, data: int, size: int) -> None:
        keys = self._keys
        assert keys is not None
        if keys.header_digest != "None":
            assert unit[data - _DIGEST : data] == _digest(unit[: data - _DIGEST])
        padded = data + (size + 3 & ~3)
        assert not any(unit[data + size : padded])
        if size and keys.data_digest != "None":
            assert unit[padded:] == _digest(unit[data:padded])

    def _pass(self, head: bytes, unit: bytearray, data: int) -> None:
        faults, chance, keys = self._faults, self._chance, self._keys
        assert keys is not None
        opcode = head[0] & bhs.OPCODE_MASK
        recovers = keys.error_recovery_level > 0
        lot = 1.0 if faults.spares(head) else chance.random()
        if lot < faults.drop:
            unsolicited = opcode == bhs.DATA_OUT and word(head, 20) == bhs.NO_TAG
            if recovers and opcode in _COMES_AGAIN and not unsolicited:
                faults.dropped += 1
                faults.lose(head)
                return
        elif lot < faults.drop + faults.damage:
            if recovers and len(unit) > data and keys.data_digest != "None":
                unit[chance.randrange(data, len(unit))] ^= 1 << chance.randrange(8)
                faults.damaged += 1
                faults.damaged_in += opcode >= bhs.NOP_IN
                faults.lose(head)
            elif keys.header_digest != "None" and chance.random() < 0.1:
                unit[chance.randrange(data)] ^= 1 << chance.randrange(8)
                faults.fatal = "a damaged header"
            elif not recovers and len(unit) > data and keys.data_digest != "None":
                unit[chance.randrange(data, len(unit))] ^= 1 << chance.randrange(8)
                faults.fatal = "damaged data"
        self.way += unit


def _digest(data: bytearray) -> bytes:
    return crc32c(data).to_bytes(_DIGEST, "little")


def lines(faults: Faults, room: int) -> tuple[Line, Line]:
    """Both ends of a connection. ``room``: bytes of one direction that may be on their way."""
    left, right = Line(faults, room), Line(faults, room)
    left.peer, right.peer = right, left
    return left, right
