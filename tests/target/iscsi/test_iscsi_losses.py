"""ErrorRecoveryLevel 1 at the target, over TCP: damaged data, SNACK, and what is kept."""

from __future__ import annotations

import contextlib

import pytest

from iserblk.crc import crc32c
from iserblk.datamover.kept import LEAST_INLINE, MOST_INLINE, MOST_READS
from iserblk.iscsi import bhs, pdu
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.losses import PATIENCE
from tests.support import logs
from tests.target.iscsi.several import (
    READ_10,
    READS,
    SIZE,
    WRITE_10,
    WRITES,
    Host,
    IserPeer,
    TcpPeer,
    cdb10,
)


class DigestPeer(TcpPeer):
    """With data digests. ``damaged``: the next data segment gets a wrong one."""

    damaged = False
    digests = False

    def joined(self, *more: tuple[str, str]) -> DigestPeer:
        assert self.log_in(("DataDigest", "CRC32C"), ("HeaderDigest", "None"), *more) == 0
        self.digests = True
        self.ready()
        return self

    def put(self, message: bytes) -> None:
        if self.digests and len(message) > bhs.BHS_LENGTH:
            digest = crc32c(message[bhs.BHS_LENGTH :]) ^ self.damaged
            message += digest.to_bytes(4, "little")
            self.damaged = False
        super().put(message)

    def take(self) -> list[tuple[bytes, bytes]]:
        if not self.digests:
            return super().take()
        with contextlib.suppress(OSError):
            self._received += self.socket.recv(1 << 21)
        found = []
        while len(self._received) >= bhs.BHS_LENGTH:
            size = int.from_bytes(self._received[5:8], "big")
            end = bhs.BHS_LENGTH + ((size + 3 & ~3) + 4 if size else 0)
            if len(self._received) < end:
                break
            data = self._received[bhs.BHS_LENGTH : bhs.BHS_LENGTH + size]
            found.append((self._received[: bhs.BHS_LENGTH], data))
            self._received = self._received[end:]
        return found

    def snack(self, kind: int, **fields: int) -> None:
        lun = bytes(8)
        self.say(pdu.SnackRequest(kind=kind, lun=lun, exp_stat_sn=self.exp_stat_sn, **fields))
        self.host.run()

    def rejected(self) -> tuple[int, bytes]:
        """Reason and header of the Reject that was heard first, which is taken away."""
        head, data = self.heard.pop(0)
        assert head[0] == bhs.REJECT
        return pdu.Reject.unpack_from(head).reason, data

    def r2t(self) -> pdu.ReadyToTransfer:
        head, _ = self.heard.pop(0)
        assert head[0] == bhs.R2T
        return pdu.ReadyToTransfer.unpack_from(head)

    def burst(self, data: bytes, r2t: pdu.ReadyToTransfer) -> None:
        """Answer an R2T of the write of ``data``."""
        begin, end = r2t.buffer_offset, r2t.buffer_offset + r2t.desired_length
        for sn, at in enumerate(range(begin, end, 4096)):
            self.say_data_out(data[at : at + 4096], at, r2t.ttt, sn, at + 4096 >= end)

    def status(self) -> int:
        return self.answer(bhs.SCSI_RESPONSE)[0][3]


def ticks(peer: TcpPeer, count: int) -> None:
    for _ in range(count):
        peer.connection.tick()
        peer.host.run()


# -- where there is no SNACK -----------------------------------------------------------------------


def test_at_level_0_a_snack_is_rejected() -> None:
    peer = DigestPeer(Host(level=0)).joined()
    peer.snack(pdu.SNACK_STATUS, beg_run=0, run_length=0)
    assert peer.rejected()[0] == pdu.REJECT_PROTOCOL_ERROR
    peer.command(bytes(16))
    assert peer.status() == 0


def test_at_level_0_damaged_data_ends_the_connection() -> None:
    peer = DigestPeer(Host(level=0)).joined()
    peer.damaged = True
    peer.command(cdb10(WRITE_10, 1), WRITES, 512, b"x" * 512)
    assert peer.error is not None and "data digest" in str(peer.error)


@pytest.mark.parametrize("level", [1, 2])
def test_over_iser_a_snack_is_rejected_at_every_level(level: int) -> None:
    """proves: ISER-7.3.11-2, ISER-7.3.11-4"""
    peer = IserPeer(Host(level=level))
    assert peer.log_in(("ErrorRecoveryLevel", str(level))) == 0
    peer.ready()
    peer.say(pdu.SnackRequest(kind=pdu.SNACK_STATUS, exp_stat_sn=0, beg_run=0, run_length=0))
    peer.host.run()
    head, _ = peer.answer(bhs.REJECT)
    assert pdu.Reject.unpack_from(head).reason == pdu.REJECT_PROTOCOL_ERROR
    peer.command(bytes(16))
    assert peer.answer(bhs.SCSI_RESPONSE)[0][3] == 0


# -- statuses and Data-In --------------------------------------------------------------------------


def test_a_status_comes_again() -> None:
    """As it was, but for ExpCmdSN and MaxCmdSN (11.16); an acknowledged one does not."""
    peer = DigestPeer(Host(level=1)).joined()
    peer.acknowledges = False
    stat_sn = peer.exp_stat_sn
    peer.command(b"\xff" * 16)
    first = peer.answer(bhs.SCSI_RESPONSE)
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn, run_length=1)
    assert peer.answer(bhs.SCSI_RESPONSE) == first and first[1]
    peer.exp_stat_sn += 1
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn, run_length=1)
    assert peer.rejected()[0] == pdu.REJECT_PROTOCOL_ERROR


def test_a_read_is_kept_until_it_is_acknowledged() -> None:
    """What lies in its buffer comes again, whatever is written meanwhile."""
    peer = DigestPeer(Host(level=1)).joined()
    peer.host.store.content[:1024] = b"r" * 1024
    peer.acknowledges = False
    peer.command(cdb10(READ_10, 2), READS, 1024, itt=7)
    first = peer.answer(bhs.DATA_IN)
    assert peer.host.budget.used
    peer.host.store.content[:1024] = b"w" * 1024
    peer.snack(pdu.SNACK_DATA, itt=7, beg_run=0, run_length=1)
    assert peer.answer(bhs.DATA_IN) == first and first[1] == b"r" * 1024
    peer.exp_stat_sn += 1
    peer.acknowledge()
    assert not peer.host.budget.used


def test_an_initiator_that_acknowledges_nothing() -> None:
    """All its commands are answered; of its reads the oldest are kept."""
    peer = DigestPeer(Host(level=1)).joined()
    peer.acknowledges = False
    for number in range(3 * MOST_READS):
        peer.command(cdb10(READ_10, 1), READS, 512, itt=number)
        assert [head[0] for head, _ in peer.heard] == [bhs.DATA_IN]
        asks = peer.heard.pop()[0][1] & 0x40
        assert bool(asks) == (MOST_READS // 2 <= number < MOST_READS)
    peer.snack(pdu.SNACK_DATA, itt=0, beg_run=0, run_length=1)
    assert peer.answer(bhs.DATA_IN)
    peer.snack(pdu.SNACK_DATA, itt=3 * MOST_READS - 1, beg_run=0, run_length=1)
    assert peer.rejected()[0] == pdu.REJECT_SNACK


def test_a_command_that_waits_for_memory_gets_what_is_only_kept() -> None:
    """Where all connections together have no more: at once."""
    peer = DigestPeer(Host(level=1, budget=DataBudget(3 << 20))).joined()
    peer.acknowledges = False
    for number in range(6):
        peer.command(cdb10(READ_10, 1024), READS, 1 << 19, itt=number)
    assert peer.host.budget.used == 3 << 20
    peer.heard.clear()
    peer.command(cdb10(READ_10, 1024), READS, 1 << 19, itt=6)
    assert peer.heard and peer.host.budget.used == 1 << 19
    peer.heard.clear()
    peer.snack(pdu.SNACK_DATA, itt=0, beg_run=0, run_length=1)
    assert peer.rejected()[0] == pdu.REJECT_SNACK


def test_a_status_that_stays_unacknowledged_is_asked_about() -> None:
    """By a ping, whose StatSN shows that there is one (7.1.4.2)."""
    peer = DigestPeer(Host(level=1)).joined()
    peer.acknowledges = False
    peer.command(bytes(16))
    del peer.heard[:]
    ticks(peer, 3)
    head, _ = peer.answer(bhs.NOP_IN)
    ping = pdu.NopIn.unpack_from(head)
    assert ping.itt == bhs.NO_TAG and ping.ttt != bhs.NO_TAG
    assert ping.stat_sn == peer.exp_stat_sn + 1


def test_an_idle_connection_is_left_alone() -> None:
    peer = DigestPeer(Host(level=1)).joined()
    peer.command(bytes(16))
    peer.acknowledge()
    del peer.heard[:]
    ticks(peer, 5)
    assert not peer.heard


# -- data from the initiator -----------------------------------------------------------------------


def test_damaged_immediate_data() -> None:
    """The command uses up no CmdSN, those behind it wait, and it comes again (7.2.1, 7.8)."""
    peer = DigestPeer(Host(level=1)).joined()
    lost = peer.host.cmd_sn
    peer.damaged = True
    peer.command(cdb10(WRITE_10, 1, 0), WRITES, 512, b"a" * 512, itt=1)
    reason, header = peer.rejected()
    assert reason == pdu.REJECT_DATA_DIGEST_ERROR
    assert pdu.ScsiCommand.unpack_from(header).cmd_sn == lost
    peer.command(cdb10(WRITE_10, 1, 0), WRITES, 512, b"b" * 512, itt=2)
    assert not peer.heard and not peer.host.store.content[0]
    peer.command(cdb10(WRITE_10, 1, 0), WRITES, 512, b"a" * 512, itt=1, cmd_sn=lost)
    assert [pdu.ScsiResponse.unpack_from(head).itt for head, _ in peer.heard] == [1, 2]
    assert peer.host.store.content[:512] == b"b" * 512


def test_damaged_solicited_data() -> None:
    """Reject, and a recovery R2T for what is missing; the rest of the old burst is dropped."""
    peer = DigestPeer(Host(level=1)).joined(("MaxBurstLength", "65536"))
    data = bytes(range(256)) * 64
    peer.command(cdb10(WRITE_10, 32), WRITES, len(data))
    first = peer.r2t()
    peer.say_data_out(data[:4096], 0, first.ttt, 0, False)
    peer.damaged = True
    peer.say_data_out(data[4096:8192], 4096, first.ttt, 1, False)
    again = peer.r2t()
    assert peer.rejected()[0] == pdu.REJECT_DATA_DIGEST_ERROR
    assert (again.r2t_sn, again.buffer_offset, again.desired_length) == (1, 4096, 12288)
    assert again.ttt != first.ttt
    peer.say_data_out(bytes(8192), 8192, first.ttt, 2, True)
    assert not peer.heard
    peer.burst(data, again)
    assert peer.status() == 0
    assert peer.host.store.content[: len(data)] == data


def test_a_data_out_that_is_missing() -> None:
    """The next one shows it (7.9)."""
    peer = DigestPeer(Host(level=1)).joined()
    data = bytes(range(256)) * 64
    peer.command(cdb10(WRITE_10, 32), WRITES, len(data))
    first = peer.r2t()
    peer.say_data_out(data[4096:8192], 4096, first.ttt, 1, False)
    again = peer.r2t()
    assert (again.r2t_sn, again.buffer_offset, again.desired_length) == (1, 0, len(data))
    peer.burst(data, again)
    assert peer.status() == 0 and peer.host.store.content[: len(data)] == data


@pytest.mark.parametrize("final", [False, True])
def test_damaged_unsolicited_data(final: bool) -> None:
    """An R2T fetches the rest, when the last of it has come."""
    peer = DigestPeer(Host(level=1)).joined(("InitialR2T", "No"))
    data = bytes(range(256)) * 48
    peer.command(cdb10(WRITE_10, 24), WRITES & ~bhs.FLAG_FINAL, len(data))
    peer.say_data_out(data[:4096], 0, bhs.NO_TAG, 0, False)
    peer.damaged = True
    peer.say_data_out(data[4096:8192], 4096, bhs.NO_TAG, 1, final)
    assert peer.rejected()[0] == pdu.REJECT_DATA_DIGEST_ERROR
    if not final:
        assert not peer.heard
        peer.say_data_out(data[8192:], 8192, bhs.NO_TAG, 2, True)
    r2t = peer.r2t()
    assert (r2t.r2t_sn, r2t.buffer_offset, r2t.desired_length) == (0, 4096, 8192)
    peer.say_data_out(data[4096:], 4096, r2t.ttt, 0, True)
    assert peer.status() == 0 and peer.host.store.content[: len(data)] == data


def test_unsolicited_data_that_does_not_come() -> None:
    """After a while it is fetched; what comes later is dropped."""
    peer = DigestPeer(Host(level=1)).joined(("InitialR2T", "No"))
    data = bytes(range(256)) * 48
    peer.command(cdb10(WRITE_10, 24), WRITES & ~bhs.FLAG_FINAL, len(data))
    peer.say_data_out(data[:4096], 0, bhs.NO_TAG, 0, False)
    ticks(peer, PATIENCE - 1)
    assert not [head for head, _ in peer.heard if head[0] == bhs.R2T]
    ticks(peer, 1)
    peer.heard = [each for each in peer.heard if each[0][0] == bhs.R2T]
    r2t = peer.r2t()
    peer.say_data_out(bytes(8192), 4096, bhs.NO_TAG, 1, True)
    peer.say_data_out(data[4096:], 4096, r2t.ttt, 0, True)
    assert peer.status() == 0 and peer.host.store.content[: len(data)] == data


@pytest.mark.logs(logs.IGNORED)
def test_a_retry_of_a_command_that_has_arrived_is_ignored() -> None:
    """Its initiator had not seen that it was acknowledged (4.2.2.1)."""
    peer = DigestPeer(Host(level=1)).joined()
    cmd_sn = peer.host.cmd_sn
    peer.command(cdb10(WRITE_10, 1), WRITES, 512)
    r2t = peer.r2t()
    peer.command(cdb10(WRITE_10, 1), WRITES, 512, cmd_sn=cmd_sn)
    assert not peer.heard
    peer.say_data_out(b"d" * 512, 0, r2t.ttt)
    assert peer.status() == 0 and peer.host.store.content[:512] == b"d" * 512
    assert len(peer.host.store.content) == SIZE


def test_answers_that_are_never_acknowledged_are_bounded_and_counted() -> None:
    """Those to pings with 8 KiB of data; the oldest come again, the others are not kept."""
    peer = DigestPeer(Host(level=1)).joined()
    peer.acknowledges = False
    stat_sn = peer.exp_stat_sn
    for _ in range(MOST_INLINE // 8192 + 20):
        ping = pdu.NopOut(
            opcode=bhs.NOP_OUT | bhs.IMMEDIATE,
            data_length=8192,
            lun=bytes(8),
            itt=3,
            cmd_sn=peer.host.cmd_sn,
            exp_stat_sn=stat_sn,
        )
        peer.say(ping, b"p" * 8192)
        peer.host.run()
        assert len(peer.answer(bhs.NOP_IN)[1]) == 8192
    peer.connection.tick()
    assert MOST_INLINE <= peer.host.budget.beside < MOST_INLINE + (1 << 20)
    peer.heard.clear()
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn, run_length=1)
    assert peer.answer(bhs.NOP_IN)[1] == b"p" * 8192
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn + MOST_INLINE // 8192 + 2, run_length=1)
    assert peer.rejected()[0] == pdu.REJECT_SNACK
    # Where others want memory, hardly any of it is kept; the oldest again.
    peer.host.budget.press()
    assert peer.host.budget.beside < MOST_INLINE // 2
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn, run_length=1)
    assert peer.answer(bhs.NOP_IN)[1] == b"p" * 8192
    peer.snack(pdu.SNACK_STATUS, beg_run=stat_sn + LEAST_INLINE // 8192 + 2, run_length=1)
    assert peer.rejected()[0] == pdu.REJECT_SNACK
    peer.lose()
    assert peer.host.budget.beside == 0
