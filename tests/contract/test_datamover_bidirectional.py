"""The datamover contract for bidirectional commands: two buffers, and over iSER two STags."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from iserblk.datamover.iser import RSV, WSV
from iserblk.datamover.seam import INLINE, TargetSlot
from iserblk.errors import RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, WRITE
from tests.contract.datamovers import EVERY_WAY, ISER_WAYS, WAYS, Ends, drive

SIZES = [(1, 1), (512, 4096), (4096, 512), (65536, 65537), (1 << 20, 300_000)]


@pytest.fixture(params=list(EVERY_WAY))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(EVERY_WAY[request.param])
    yield both
    both.close()


@pytest.fixture(params=list(WAYS))
def unforgiving(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """ErrorRecoveryLevel 0."""
    both = Ends(WAYS[request.param])
    yield both
    both.close()


@pytest.fixture(params=list(ISER_WAYS))
def iser(request: pytest.FixtureRequest) -> Iterator[Ends]:
    both = Ends(ISER_WAYS[request.param])
    yield both
    both.close()


def _fetch(ends: Ends, answer: TargetSlot, sink: bytearray) -> None:
    """Get all of Data-Out, burst by burst."""
    for at in range(0, len(sink), ends.way.max_burst_length):
        part = memoryview(sink)[at : at + ends.way.max_burst_length]
        ends.target.get_data(answer, part, at)
        ends.until(lambda: bool(ends.down.filled))
        ends.down.filled.clear()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_transfers(ends: Ends, sizes: tuple[int, int]) -> None:
    """The Data-Out comes as that of a write, the Data-In as that of a read; then both buffers are
    free. Nothing goes unasked.

    proves: ISER-9.5.3-1, ISER-7.3.2-11, ISER-2.4.1-4, ISER-2.4.1-3
    """
    out, back = (
        bytearray(i * step & 255 for i in range(size))
        for size, step in zip(sizes, (3, 5), strict=True)
    )
    given = bytes(i * 7 & 255 for i in range(len(back)))
    answer = ends.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    ((head, behind, _),) = ends.down.pdus
    assert head[4:8] == b"\2\0\0\0" and behind[:8] == b"\0\5\2\0" + sizes[1].to_bytes(4, "big")
    sink = bytearray(len(out))
    _fetch(ends, answer, sink)
    assert sink == out
    ends.target.put_data(answer, memoryview(given), 0)
    ends.respond(0)
    ends.until(lambda: bool(ends.up.pdus))
    assert back == given
    slot = ends.slots[0]
    stags = (slot.stag, slot.stag_in)
    assert ends.up.pdus[0][2] in (0, stags[1])
    ends.initiator.deallocate_task_resources(slot, ends.up.pdus[0][2])
    assert (slot.data, slot.data_in, slot.stag, slot.stag_in) == (None, None, 0, 0)
    ends.until(lambda: bool(ends.down.sent))
    ends.target.deallocate_task_resources(answer)
    for buffer in (out, back):
        buffer.clear()  # BufferError while a view of it is left


# shows: SYSTEM-36
@pytest.mark.parametrize("invalidates", [True, False])
@pytest.mark.parametrize("late", ["Data-Out", "Data-In"])
def test_both_stags_end_with_the_command(iser: Ends, late: str, invalidates: bool) -> None:
    """The Send with Invalidate names the Read STag only; the initiator invalidates the other. Late
    use of either ends the connection, and touches no memory.

    proves: ISER-7.3.2-11, ISER-2.4.1-4, ISER-7145-1.5.1-2
    """
    out, back = bytearray(b"out!" * 128), bytearray(512)
    answer = iser.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    advertised = answer.write_stag, answer.write_base, answer.read_stag, answer.read_base
    assert answer.write_stag and answer.read_stag and answer.write_stag != answer.read_stag
    iser.respond(0) if invalidates else iser.target.send_control(_answered(iser))
    iser.until(lambda: bool(iser.up.pdus))
    invalidated = iser.up.pdus[0][2]
    assert invalidated == (answer.read_stag if invalidates else 0)
    iser.initiator.deallocate_task_resources(iser.slots[0], invalidated)
    iser.until(lambda: bool(iser.down.sent))
    answer.write_stag, answer.write_base, answer.read_stag, answer.read_base = advertised
    sink = bytearray(512)
    if late == "Data-In":
        iser.target.put_data(answer, memoryview(b"late" * 128), 0)
    else:
        iser.target.get_data(answer, memoryview(sink), 0)
    iser.target.flush()
    with pytest.raises(TransportError):
        drive(iser.initiator)
    assert not any(back) and not any(sink)


def _answered(ends: Ends) -> TargetSlot:
    """The slot of task 0 with a response, for a Send without Invalidate."""
    answer = ends.answers[0]
    answer.inline_length = 0
    answer.bhs[:] = pdu.ScsiResponse(
        status=0, itt=0, stat_sn=100, exp_cmd_sn=5, max_cmd_sn=50
    ).pack()
    return answer


def test_an_aborted_command_frees_both_buffers(unforgiving: Ends) -> None:
    """Without a response. proves: ISER-8.3.2-2, ISER-8.3.2-3, ISER-7145-1.5.1-2"""
    out, back = bytearray(65536), bytearray(65536)
    answer = unforgiving.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    unforgiving.initiator.deallocate_task_resources(unforgiving.slots[0], 0)
    for buffer in (out, back):
        buffer.clear()  # BufferError while a view of it is left
    unforgiving.target.put_data(answer, memoryview(b"too late"), 0)
    unforgiving.respond(0)
    unforgiving.target.flush()
    with pytest.raises(TransportError):
        drive(unforgiving.initiator)


def test_the_end_frees_both_buffers(ends: Ends) -> None:
    out, back = bytearray(65536), bytearray(65536)
    ends.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    ends.close()
    slot = ends.slots[0]
    slot.data = slot.data_in = None
    for buffer in (out, back):
        buffer.clear()  # BufferError while a view of it is left


def test_the_write_stag_must_not_be_invalidated(iser: Ends) -> None:
    """The response names the Read STag, where there are both (RFC 7145 section 7.3.2)."""
    out, back = bytearray(512), bytearray(512)
    iser.commanded(0, BIDIRECTIONAL, memoryview(out), memoryview(back))
    slot = iser.slots[0]
    with pytest.raises(RemoteProtocolError, match="not its task's"):
        iser.initiator.deallocate_task_resources(slot, slot.stag)
    for buffer in (out, back):
        buffer.clear()


@pytest.mark.parametrize(
    ("direction", "out", "back", "flags"),
    [
        (NO_DATA, 0, None, 0),
        (INLINE, 512, None, 0),
        (READ, 512, None, RSV),
        (WRITE, 512, None, WSV),
        (BIDIRECTIONAL, 512, 512, RSV | WSV),
        (BIDIRECTIONAL, 0, 512, RSV),
        (BIDIRECTIONAL, 512, 0, WSV),
        (BIDIRECTIONAL, 0, 0, 0),
    ],
)
def test_how_many_stags(iser: Ends, direction: int, out: int, back: int | None, flags: int) -> None:
    """None, one or two, by direction, and by whether any data is solicited. A flag of the header
    says that its STag is there, and the STag is 0 otherwise.

    proves: ISER-8.3.1-1
    """
    data = memoryview(bytearray(out))
    if direction == INLINE:
        iser.slots[0].inline[:out] = data
        iser.slots[0].inline_length = out
    answer = iser.commanded(
        0, direction, data, None if back is None else memoryview(bytearray(back))
    )
    assert bool(answer.write_stag) == bool(flags & WSV)
    assert bool(answer.read_stag) == bool(flags & RSV)
    header = iser.slots[0].header.view
    assert header[0] & (RSV | WSV) == flags
    slot = iser.slots[0]
    assert (slot.stag != 0) + (slot.stag_in != 0) == (answer.write_stag != 0) + (
        answer.read_stag != 0
    )


def test_missing_data_in_is_a_bidirectional_residual() -> None:
    """Over TCP the initiator counts what has come, whatever the target says, and the residual of
    the write transfer stays as it is."""
    ends = Ends(WAYS["tcp-plain"])
    answer = ends.commanded(0, BIDIRECTIONAL, memoryview(bytes(512)), memoryview(bytearray(512)))
    ends.target.put_data(answer, memoryview(b"x" * 100), 0)
    ends.respond(0, flags=bhs.FLAG_FINAL | bhs.RESIDUAL_OVERFLOW, residual=7)
    ends.until(lambda: bool(ends.up.pdus))
    found = pdu.ScsiResponse.unpack_from(ends.up.pdus[0][0])
    assert found.flags == bhs.FLAG_FINAL | bhs.RESIDUAL_OVERFLOW | bhs.BIDI_UNDERFLOW
    assert (found.residual, found.bidi_residual) == (7, 412)
    ends.close()
