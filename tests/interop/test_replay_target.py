"""The captured conversations, their initiators' side played against our target.

Compared with what LIO (and, for the kernel's initiator, the script) answered: opcodes, flags,
response, status, residual, sense, invalidated STags, and the data that was placed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.iscsi import bhs, text
from iserblk.rcap.iwarp import mpa, rdmap
from iserblk.scsi import sense
from iserblk.scsi import status as sam
from tests.interop.initiator import Outcome, RecordedInitiator
from tests.interop.recorded import (
    BLOCK,
    READ_10,
    READ_16,
    WRITE_10,
    WRITE_16,
    Exchange,
    exchanges,
    phases,
    sense_triple,
)
from tests.rcap import streams
from tests.rcap.wire import Unmarker
from tests.support.target import running_target

MIB = 1 << 20
SCRIPT_IQN = "iqn.2026-11.lab:t0"
KERNEL_IQN = "iqn.2026-11.lab:py"
KERNEL = "kernel_initiator_v2"
SCRIPTS = ("lo64k_crc", "lo64k_nocrc", "veth1500_crc", "veth1500_crc_noinv")
VARIANTS = ("mpa_p2p_write_rtr", "mpa_p2p_read_rtr", "mpa_rev1_crc")
INQUIRY, READ_CAPACITY_16 = 0x12, 0x9E

# siw wrote the solicited data to a wrong place of LIO's buffer, unnoticed: what was read
# back is not what had been written. Ours is compared with what had been written.
CORRUPTED = "write64k_imm512"
# Commands that the script's target refused and ours has.
MORE_THAN_THE_SCRIPT = ("conn1_005_cmd_12_4", "conn1_011_cmd_a3_10")


@contextmanager
def connected(place: Path, name: str) -> Iterator[RecordedInitiator]:
    """A fresh target with a LUN of the recorded size, and a connection to it."""
    kernel = name == KERNEL
    size = 16 * MIB if kernel else 256 * MIB
    spec = f"{place}/lun:size={size}"
    iqn = KERNEL_IQN if kernel else SCRIPT_IQN
    with (
        running_target([spec], place / "target.log", iqn=iqn) as target,
        RecordedInitiator(target.port) as initiator,
    ):
        yield initiator


def mpa_stream(name: str, direction: str) -> str:
    prefix = "conn1_" if name == KERNEL else ""
    return f"{name}/{prefix}01_mpa.{direction}.bin"


def started(initiator: RecordedInitiator, name: str) -> None:
    """Start-up as recorded; the Reply says the same as the recorded one."""
    flags, revision, private_data = initiator.start_up(mpa_stream(name, "i2t"))
    recorded = streams.read(mpa_stream(name, "t2i"))
    _, their_flags, their_revision, _ = mpa.HEADER.unpack_from(recorded)
    theirs = recorded[mpa.HEADER_SIZE :]
    assert (flags, revision) == (their_flags, their_revision)
    assert len(private_data) == len(theirs)
    assert private_data[-4:] == theirs[-4:]  # the iSER connection flags
    if flags & mpa.ENHANCED_CONNECTION:
        ird, ord_ = mpa.ENHANCED.unpack_from(private_data)
        their_ird, their_ord = mpa.ENHANCED.unpack_from(theirs)
        # Each implementation chooses its depths, as far as was asked for; the bits above are fixed.
        assert ird & ~mpa.DEPTH_MASK == their_ird & ~mpa.DEPTH_MASK
        assert ord_ & ~mpa.DEPTH_MASK == their_ord & ~mpa.DEPTH_MASK
        asked_ird, _ = mpa.ENHANCED.unpack_from(
            streams.read(mpa_stream(name, "i2t")), mpa.HEADER_SIZE
        )
        assert 0 < ord_ & mpa.DEPTH_MASK <= asked_ird & mpa.DEPTH_MASK


def logged_in(
    initiator: RecordedInitiator, name: str, patch: dict[bytes, bytes] | None = None
) -> None:
    phase = next(phase for phase in phases(name) if "02_login" in phase)
    (exchange,) = exchanges(name, phase)
    answer = initiator.play(exchange, patch).answer
    recorded = exchange.answer
    assert answer.bhs[:4] == recorded.bhs[:4]  # opcode, T CSG NSG, versions
    assert answer.bhs[8:14] == recorded.bhs[8:14]  # ISID
    assert answer.number(16) == recorded.number(16)
    assert answer.bhs[36:38] == recorded.bhs[36:38] == b"\0\0"  # status
    discovery = name == "discovery_crc"
    tsih = int.from_bytes(answer.bhs[14:16], "big")
    assert tsih or discovery
    ours = dict(text.decode_untrusted(answer.data))
    asked = dict(text.decode_untrusted(exchange.request.data))
    # Every key that was offered to be negotiated has an answer, and none is refused.
    assert "Reject" not in ours.values() and "NotUnderstood" not in ours.values()
    for key in ("InitialR2T", "ImmediateData", "ErrorRecoveryLevel", "MaxOutstandingR2T"):
        if not discovery:
            assert key in ours or asked[key] in ("No", "Yes", "0", "1")
    if not discovery:
        assert ours["RDMAExtensions"] == "Yes"
        assert int(ours["TargetRecvDataSegmentLength"]) == 8192


def compare(name: str, phase: str, exchange: Exchange, outcome: Outcome) -> None:
    """Compare the answers, except where implementations may differ."""
    answer, recorded, request = outcome.answer, exchange.answer, exchange.request
    assert answer.iser == recorded.iser
    assert answer.bhs[0] == recorded.bhs[0]
    assert answer.itt == recorded.itt == request.itt
    assert answer.message.invalidate == recorded.message.invalidate
    if answer.opcode != bhs.SCSI_RESPONSE:
        assert answer.bhs[1:4] == recorded.bhs[1:4]
        return
    moved = len(outcome.placed) if exchange.placed else sum(n for _, n in outcome.fetched)
    moved += len(request.data)
    status = answer.bhs[3]
    flags, residual = answer.bhs[1], answer.number(44)
    assert answer.bhs[2] == recorded.bhs[2] == 0
    if phase in MORE_THAN_THE_SCRIPT:
        assert status == sam.GOOD
        moved = len(outcome.placed)
    else:
        assert status == recorded.bhs[3]
    if status == sam.CHECK_CONDITION:
        assert sense_triple(answer) == sense_triple(recorded)
        moved = 0
        # LIO leaves the residual out; the script's target, as RFC 7143 section 11.4.5, does not.
        if recorded.number(44):
            assert (flags, residual) == (recorded.bhs[1], recorded.number(44))
    elif request.cdb[0] != INQUIRY and phase not in MORE_THAN_THE_SCRIPT:
        assert (flags, residual) == (recorded.bhs[1], recorded.number(44))
    # In every case the residual tells what was not moved.
    assert residual == request.edtl - moved
    assert flags == bhs.FLAG_FINAL | (bhs.RESIDUAL_UNDERFLOW if residual else 0)


def is_power_on(outcome: Outcome) -> bool:
    answer = outcome.answer
    return (
        answer.opcode == bhs.SCSI_RESPONSE
        and answer.bhs[3] == sam.CHECK_CONDITION
        and sense_triple(answer) == (sense.UNIT_ATTENTION, 0x29, 0x00)
    )


def play_phase(initiator: RecordedInitiator, name: str, phase: str, model: bytearray) -> None:
    for exchange in exchanges(name, phase):
        outcome = initiator.play(exchange)
        if is_power_on(outcome):
            # Ours tells every new session so once; the recorded ones had told it before.
            outcome = initiator.play(exchange)
        compare(name, phase, exchange, outcome)
        request = exchange.request
        if request.opcode != bhs.SCSI_COMMAND:
            continue
        code = request.cdb[0]
        if code in (WRITE_10, WRITE_16):
            first, _ = request.blocks
            model[first * BLOCK : first * BLOCK + request.edtl] = exchange.written
            fetched = sorted(outcome.fetched)
            assert sum(length for _, length in fetched) == request.edtl - len(request.data)
        elif code in (READ_10, READ_16) and outcome.answer.bhs[3] == sam.GOOD:
            first, blocks = request.blocks
            assert outcome.placed == model[first * BLOCK : (first + blocks) * BLOCK]
            if phase != CORRUPTED:
                assert outcome.placed == exchange.read
        elif code == READ_CAPACITY_16:
            assert outcome.placed[:12] == exchange.read[:12]
        elif code == INQUIRY and outcome.placed and phase not in MORE_THAN_THE_SCRIPT:
            assert outcome.placed[0] == exchange.read[0]  # a disk, connected


def ended(initiator: RecordedInitiator) -> None:
    """After the logout the target closes, as the recorded ones do."""
    assert initiator.wire.receive() is None


# shows: SYSTEM-4
@pytest.mark.parametrize("name", [*SCRIPTS, *VARIANTS, KERNEL])
def test_a_conversation(tmp_path: Path, name: str) -> None:
    # proves: ISER-5.2.2-3, ISER-7.3.1-16, ISER-7.3.2-5, ISER-7.3.2-6, ISER-7.3.2-7, ISER-7.3.2-8
    # proves: ISER-7.3.5-3, ISER-7.3.5-6, ISER-7.3.6-4, ISER-7.3.6-14, ISER-7145-2.1-1
    # proves: ISER-A.4-1, ISER-A.6-1, ISER-A.8-1, ISER-GEN-5.3-1, ISER-GEN-5.3-2
    # proves: ISER-2.3-2, ISER-5.1-1, ISER-5.2.2-4, ISER-5.2.2-6, ISER-7.3.2-1, ISER-7.3.5-5
    # proves: ISER-7.3.6-10, ISER-7.3.6-11, ISER-7145-1.6-1, ISER-7145-5.1-1, ISER-RC-4
    # proves: ISER-RC-5, ISER-RC-15
    model = bytearray(4 * MIB)
    with connected(tmp_path, name) as initiator:
        started(initiator, name)
        if "rtr" in name:
            play_rtr(initiator, name)
        logged_in(initiator, name)
        played = [phase for phase in phases(name) if "login" not in phase and "rtr" not in phase]
        for phase in played:
            play_phase(initiator, name, phase, model)
        assert "logout" in played[-1]
        ended(initiator)
    if name in SCRIPTS:
        assert len(played) == 9
        # As the captures' own description says: byte j is (7·j + (j>>8) + i) & 255.
        with (tmp_path / "lun").open("rb") as lun:
            for index, length in enumerate((4096, 65536)):
                lun.seek(index * 4096 * BLOCK)
                pattern = bytes((7 * j + (j >> 8) + index) & 255 for j in range(length))
                assert lun.read(length) == pattern


def play_rtr(initiator: RecordedInitiator, name: str) -> None:
    """Send the recorded Ready To Receive frame, and check the answer if one was recorded."""
    (sent,) = streams.frames(f"{name}/01b_rtr.i2t.bin")
    initiator.wire.send(sent)
    recorded = streams.frames(f"{name}/01b_rtr.t2i.bin")
    if recorded:
        message = initiator.wire.receive()
        assert message is not None and message.opcode == rdmap.READ_RESPONSE
        assert message.frames[0].header == recorded[0].header
        assert message.payload == b""


@pytest.mark.parametrize("length", [512, 4096, 8192])
def test_writes_with_immediate_data(tmp_path: Path, length: int) -> None:
    """The Write Base Offset names the first byte that did not come with the command."""
    name, phase = "lo64k_crc_immediate", f"write64k_imm{length}"
    model = bytearray(4 * MIB)
    with connected(tmp_path, name) as initiator:
        started(initiator, "lo64k_crc")
        logged_in(initiator, "lo64k_crc", {b"ImmediateData=No": b"ImmediateData=Yes"})
        play_phase(initiator, name, phase, model)


def test_discovery(tmp_path: Path) -> None:
    name = "discovery_crc"
    with connected(tmp_path, name) as initiator:
        started(initiator, name)
        logged_in(initiator, name)
        (exchange,) = exchanges(name, "03_sendtargets")
        outcome = initiator.play(exchange)
        compare(name, "03_sendtargets", exchange, outcome)
        pairs = text.decode_untrusted(outcome.answer.data)
        assert pairs[0] == text.decode_untrusted(exchange.answer.data)[0]
        assert pairs[0] == ("TargetName", SCRIPT_IQN)
        port = initiator.wire.sock.getpeername()[1]
        assert pairs[1] == ("TargetAddress", f"127.0.0.1:{port},1")
        (exchange,) = exchanges(name, "04_logout")
        compare(name, "04_logout", exchange, initiator.play(exchange))
        ended(initiator)


def test_send_targets_in_a_normal_session(tmp_path: Path) -> None:
    """LIO rejects it; RFC 7143 appendix C wants it answered, for this target alone."""
    name = "sendtargets_normal"
    with connected(tmp_path, name) as initiator:
        started(initiator, name)
        logged_in(initiator, name)
        (exchange,) = exchanges(name, "03_sendtargets")
        answer = initiator.play(exchange).answer
        assert exchange.answer.opcode == bhs.REJECT
        assert answer.opcode == bhs.TEXT_RESPONSE
        assert dict(text.decode_untrusted(answer.data))["TargetName"] == SCRIPT_IQN


@pytest.mark.parametrize("name", ["mpa_reject_markers", "mpa_reject_markers_rev1"])
def test_markers_are_sent_where_siw_refuses(tmp_path: Path, name: str) -> None:
    """A sender must insert markers where its peer asks for them (RFC 5044)."""
    assert streams.read(mpa_stream(name, "t2i"))[16] & mpa.REJECT
    with connected(tmp_path, name) as initiator:
        flags, revision, _ = initiator.start_up(mpa_stream(name, "i2t"))
        request = streams.read(mpa_stream(name, "i2t"))
        assert flags == request[16] & ~mpa.MARKERS  # we want none ourselves
        assert revision == request[17]
        unmarker = Unmarker(crc=True)
        initiator.wire.clean = unmarker.feed
        logged_in(initiator, "lo64k_crc")
        model = bytearray(4 * MIB)
        play_phase(initiator, "lo64k_crc", "04_readcap16", model)
        assert unmarker.markers > 0


@pytest.mark.parametrize("name", ["err_badcrc", "err_badmsn"])
def test_frames_that_end_the_connection(tmp_path: Path, name: str) -> None:
    """The same layer, type and code in the Terminate as siw has, in the order of RFC 5040."""
    with connected(tmp_path, name) as initiator:
        started(initiator, "lo64k_crc")
        logged_in(initiator, "lo64k_crc")
        initiator.wire.sock.sendall(streams.read(f"{name}/terminate.i2t.bin"))
        ours = initiator.terminated()
        (frame,) = streams.frames(f"{name}/terminate.t2i.bin")
        theirs = rdmap.Terminate.unpack_untrusted(frame.payload)
        assert (ours.layer, ours.etype, ours.code) == (theirs.layer, theirs.etype, theirs.code)
        assert theirs.swapped and not ours.swapped
