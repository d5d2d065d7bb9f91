"""Framing finds whole units, in whatever pieces the bytes come; other bytes pass unchanged."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from iserblk.iscsi import bhs, pdu, text
from iserblk.rcap.iwarp import ddp, rdmap
from tests.rcap.fpdu import decode_fpdu
from tests.support.faults.framing import Framer, Unit, framers, mended

CONTROL = bytes((0x10,)) + bytes(27)


def command(itt: int, operation: int = 0x2A, data: bytes = b"") -> bytes:
    head = pdu.ScsiCommand(
        flags=0xA0,
        data_length=len(data),
        lun=bytes(8),
        itt=itt,
        edtl=len(data),
        cmd_sn=1,
        exp_stat_sn=1,
        cdb=bytes((operation,)) + bytes(15),
    ).pack()
    return head + data + bytes(-len(data) & 3)


def login_response(*pairs: tuple[str, str]) -> bytes:
    data = text.encode(pairs)
    head = bytearray(48)
    head[0], head[1] = bhs.LOGIN_RESPONSE, 0x87
    head[5:8] = len(data).to_bytes(3, "big")
    return bytes(head) + data + bytes(-len(data) & 3)


LOGIN = bytes((0x43, 0x87)) + bytes(46)


def feed(framer: Framer, data: bytes, seed: int) -> list[Unit]:
    chance = random.Random(seed)
    cuts = sorted(chance.sample(range(len(data)), min(len(data), chance.randint(0, 20))))
    units: list[Unit] = []
    for start, end in pairwise([0, *cuts, len(data)]):
        units += framer.feed(data[start:end])
    return units


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("digests", ["None", "CRC32C"])
def test_pdus(seed: int, digests: str) -> None:
    up, down = framers(LOGIN, "auto")
    extra = 8 if digests == "CRC32C" else 0
    assert [unit.data for unit in feed(up, LOGIN, seed)] == [LOGIN]
    answer = login_response(("HeaderDigest", digests), ("DataDigest", digests))
    assert [unit.data for unit in feed(down, answer, seed)] == [answer]
    first = command(7, data=b"x" * 513) + bytes(extra)
    second = command(8, operation=0x28) + bytes(extra // 2)  # no data digest without data
    found = feed(up, first + second, seed)
    assert [unit.data for unit in found] == [first, second]
    assert [unit.is_write_command for unit in found] == [True, False]
    assert [unit.itt for unit in found] == [7, 8]
    assert [unit.offset for unit in found] == [48, 48 + len(first)]


def fpdu(opcode: int, payload: bytes, mo: int = 0, tagged: bool = False) -> bytes:
    control = ddp.LAST | ddp.VERSION | rdmap.VERSION | opcode
    header: ddp.TaggedHeader | ddp.UntaggedHeader
    if tagged:
        header = ddp.TaggedHeader(len(payload) + 14, control | ddp.TAGGED, 1, 0)
    else:
        header = ddp.UntaggedHeader(len(payload) + 18, control, 0, 0, 1, mo)
    return ddp.encode_fpdu(header, payload, crc=True)


@pytest.mark.parametrize("seed", range(20))
def test_fpdus(seed: int) -> None:
    start = b"MPA ID Req Frame" + bytes((0x40, 1, 0, 4)) + b"priv"
    frames = [
        fpdu(rdmap.SEND_SE, CONTROL + command(1)),
        fpdu(rdmap.SEND_SE, CONTROL + command(2, operation=0x28)),
        fpdu(rdmap.SEND_SE, CONTROL + command(3), mo=100),  # the middle of a message
        fpdu(rdmap.READ_RESPONSE, b"data!", tagged=True),
        fpdu(rdmap.WRITE, b"", tagged=True),
    ]
    up, _ = framers(start[:1], "auto")
    found = feed(up, start + b"".join(frames), seed)
    assert [unit.data for unit in found] == [start, *frames]
    assert [unit.is_write_command for unit in found] == [0, 1, 0, 0, 0, 0]
    assert [unit.is_write_data for unit in found] == [0, 0, 0, 0, 1, 0]


def test_a_mended_fpdu_has_a_right_crc() -> None:
    frame = bytearray(fpdu(rdmap.SEND_SE, CONTROL + command(1)))
    frame[40] ^= 1
    decoded = decode_fpdu(mended(bytes(frame)), crc=True)
    assert decoded is not None and decoded[1] == len(frame)


@pytest.mark.parametrize("first", [b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 300])
def test_rubbish_passes(first: bytes) -> None:
    up, _ = framers(first, "auto")
    assert b"".join(unit.data for unit in up.feed(first)) == first


def test_half_a_unit_is_not_swallowed() -> None:
    up, _ = framers(LOGIN, "auto")
    assert up.feed(LOGIN + b"abc")[0].data == LOGIN
    assert up.rest() == b"abc"
