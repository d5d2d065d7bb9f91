"""How Data-In is cut into PDUs, and that they are laid out when they can leave."""

from __future__ import annotations

import pytest

from iserblk.datamover.data_in import DataIns, offset_of, pdus_of
from iserblk.datamover.seam import TargetSlot
from iserblk.datamover.tcp_stream import PduSender
from iserblk.iscsi import bhs, pdu
from tests.datamover.test_tcp_stream import Stream

LARGE = 16 << 20


def made(sender: PduSender, size: int, most: int, burst: int, *part: int) -> DataIns:
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    found = DataIns(sender, TargetSlot(0), data, most, burst, *part)
    found.itt = 7
    return found


def laid_out(series: DataIns) -> list[pdu.DataIn]:
    found = series.following()
    while found and found[-1].rest is not None:
        assert found[-1].rest is series
        found += series.following()
    return [pdu.DataIn.unpack_from(each.buffers[0]) for each in found]


CUTS = pytest.mark.parametrize(
    ("size", "most", "burst", "cut"),
    [
        (0, 4, 8, []),
        (3, 4, 8, [(0, 3, True)]),
        (8, 4, 8, [(0, 4, False), (4, 4, True)]),
        (9, 4, 8, [(0, 4, False), (4, 4, True), (8, 1, True)]),
        # A burst that is no multiple of a PDU ends with a shorter one.
        (12, 4, 6, [(0, 4, False), (4, 2, True), (6, 4, False), (10, 2, True)]),
        (5, 8, 2, [(0, 2, True), (2, 2, True), (4, 1, True)]),
    ],
)


@CUTS
def test_how_it_is_cut(size: int, most: int, burst: int, cut: list[tuple[int, int, bool]]) -> None:
    found = laid_out(made(PduSender(Stream()), size, most, burst))
    assert [(x.buffer_offset, x.data_length, x.flags == bhs.FLAG_FINAL) for x in found] == cut
    assert pdus_of(size, most, burst) == len(cut)
    assert [offset_of(number, most, burst) for number in range(len(cut))] == [
        at for at, _, _ in cut
    ]
    assert [x.data_sn for x in found] == list(range(len(cut)))


@CUTS
def test_a_part_is_the_same_pdus(
    size: int, most: int, burst: int, cut: list[tuple[int, int, bool]]
) -> None:
    whole = laid_out(made(PduSender(Stream()), size, most, burst))
    for begin in range(len(cut)):
        for end in range(begin + 1, len(cut) + 1):
            part = laid_out(made(PduSender(Stream()), size, most, burst, begin, end))
            assert part == whole[begin:end]


def test_the_last_of_all_has_what_belongs_to_the_end() -> None:
    series = made(PduSender(Stream()), 3000, 512, 2048)
    series.first_sn, series.offset = 5, 100
    series.status, series.stat_sn, series.residual = (
        bhs.DATA_IN_STATUS | bhs.RESIDUAL_UNDERFLOW,
        9,
        4,
    )
    series.ttt, series.lun = 77, b"lunfield"
    *others, last = laid_out(series)
    assert last.flags == 0xC1 | bhs.RESIDUAL_UNDERFLOW  # F, A and S
    assert (last.stat_sn, last.residual, last.ttt, last.lun) == (9, 4, 77, b"lunfield")
    assert (last.data_sn, last.buffer_offset, series.end_sn) == (10, 2660, 11)
    for each in others:
        assert (each.stat_sn, each.residual, each.ttt, each.lun) == (0, 0, bhs.NO_TAG, bytes(8))
        assert not each.flags & 0x41


def test_no_more_is_laid_out_than_is_to_leave_next() -> None:
    """16 MiB in segments of 512 bytes."""
    stream = Stream(0)
    sender = PduSender(stream)
    series = made(sender, LARGE, 512, LARGE)
    token = series.token = object()
    sender.queued.extend(series.following())
    sender.queued.append(sender.frame(b"r" * 48, None, None, token))
    sender.flush()
    sender.flush()
    assert sender.blocked
    (following, *_) = laid_out(series)
    assert following.data_sn <= 256
    sender.close()


def test_a_turn_sends_a_part_and_the_next_ones_the_rest() -> None:
    """Also if the socket takes all: other connections go on in between."""
    stream = Stream()
    sender = PduSender(stream)
    series = made(sender, LARGE, 512, LARGE)
    token = series.token = object()
    sender.queued.extend(series.following())
    sender.queued.append(sender.frame(b"r" * 48, None))
    sender.flush()
    turns = 1
    while sender.blocked:
        assert len(stream.out) < turns * (2 << 20)
        assert not sender.sent
        sender.resume()
        turns += 1
    assert turns >= 16 and list(sender.sent) == [token]
    assert len(stream.out) == LARGE + 48 * (LARGE // 512) + 48
    assert stream.out[-48:] == b"r" * 48
    received = memoryview(stream.out)
    data = b"".join(received[at + 48 : at + 560] for at in range(0, len(received) - 48, 560))
    assert data == series.data
    received.release()
