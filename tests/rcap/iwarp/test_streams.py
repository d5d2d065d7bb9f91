"""Every frame of every captured stream, decoded and encoded again."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from iserblk.rcap.iwarp.receive import ReceiveCore
from iserblk.rcap.stags import StagTable
from tests.rcap import streams
from tests.rcap.fpdu import Fpdu, decode_fpdu

FPDU_STREAMS = [
    name for name in streams.names() if not streams.is_mpa(name) and name != streams.BAD_CRC
]
MPA_STREAMS = [name for name in streams.names() if streams.is_mpa(name)]


def _payload_again(frame: Fpdu) -> bytes:
    """The payload, through the codec of its opcode where it has one."""
    opcode = frame.header.control & rdmap.OPCODE_MASK
    if opcode == rdmap.READ_REQUEST:
        return rdmap.ReadRequest.unpack_untrusted(frame.payload).pack()
    if opcode == rdmap.TERMINATE:
        return rdmap.Terminate.unpack_untrusted(frame.payload).pack()
    return frame.payload


# shows: SYSTEM-13
@pytest.mark.parametrize("name", FPDU_STREAMS)
def test_every_frame_is_encoded_again_byte_for_byte(name: str) -> None:
    again = b""
    for frame in streams.frames(name):
        crc = streams.has_crc(name)
        body = ddp.encode_fpdu(frame.header, _payload_again(frame), crc=crc)
        # Without CRC the field may hold anything, so it is taken over.
        again += body if crc else body[:-4] + ddp.CRC.pack(frame.crc)
    assert again == streams.read(name)


# shows: SYSTEM-14
def test_the_frame_with_a_bad_crc_is_refused() -> None:
    data = streams.read(streams.BAD_CRC)
    with pytest.raises(RemoteProtocolError) as caught:
        decode_fpdu(data, crc=True)
    assert caught.value.terminate == ddp.MPA_CRC
    assert decode_fpdu(data, crc=False) is not None


@pytest.mark.parametrize("name", MPA_STREAMS)
def test_every_start_up_frame_is_understood_and_encoded_again(name: str) -> None:
    data = streams.read(name)
    key, flags, revision, length = mpa.HEADER.unpack_from(data)
    assert len(data) == mpa.HEADER_SIZE + length
    private_data = data[mpa.HEADER_SIZE :]
    assert mpa.HEADER.pack(key, flags, revision, len(private_data)) + private_data == data
    if ".i2t." in name:
        responder = mpa.MpaResponder(crc=False)
        result = responder.receive_data(data)
        responder.accept(b"")
    else:
        initiator = mpa.MpaInitiator(crc=False, ird=128, ord=16)
        if flags & mpa.REJECT:
            with pytest.raises(RemoteProtocolError, match="rejected"):
                initiator.receive_data(data)
            return
        result = initiator.receive_data(data)
    assert result is not None
    assert result.crc is bool(flags & mpa.CRC)
    assert result.markers is bool(flags & mpa.MARKERS)
    assert result.revision == revision
    assert result.enhanced is bool(flags & mpa.ENHANCED_CONNECTION)


@pytest.mark.parametrize("name", [n for n in FPDU_STREAMS if "02_login" in n])
@pytest.mark.parametrize("chunk", [1, 7, 100_000])
def test_captured_login_through_the_receive_core(name: str, chunk: int) -> None:
    """MSNs begin at 1, so a fresh core takes the stream; RTR frames count where there are some."""
    core = ReceiveCore(
        StagTable(), crc=streams.has_crc(name), ird=1, receive_size=9000, settle=lambda: 0
    )
    core.posted = 10
    messages = []
    data = streams.read(name)
    while data:
        buffer = core.get_buffers()[0]
        count = min(chunk, len(data))
        buffer[:count] = data[:count]
        data = data[count:]
        core.received(count)
        messages += [bytes(completion.data or b"") for completion in core.completions]
        core.completions.clear()
    expected = [frame.payload for frame in streams.frames(name)]
    assert b"".join(messages) == b"".join(expected)
    assert len(messages) == sum(
        1 for frame in streams.frames(name) if frame.header.control & ddp.LAST
    )


# shows: SYSTEM-49
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("err_badcrc/terminate.t2i.bin", "MPA: CRC mismatch"),
        ("err_badmsn/terminate.t2i.bin", "DDP: message sequence number out of range"),
    ],
)
def test_terminates_of_siw_are_understood(name: str, words: str) -> None:
    core = ReceiveCore(StagTable(), crc=True, ird=1, receive_size=9000, settle=lambda: 0)
    data = streams.read(name)
    core.get_buffers()[0][: len(data)] = data
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        core.received(len(data))
    assert caught.value.terminate is None
    assert core.terminate == b""


def test_captured_read_of_4_kib_is_placed() -> None:
    """RDMA Write and Send with Invalidate of LIO, with its STag opened here."""
    name = "veth1500_crc/06_read_4k.t2i.bin"
    frames = streams.frames(name)
    first, last = frames[0].header, frames[-1].header
    assert isinstance(first, ddp.TaggedHeader) and isinstance(last, ddp.UntaggedHeader)
    stags = StagTable()
    memory = bytearray(4096)
    stag = stags.advertise(memoryview(memory), seam.REMOTE_WRITE)
    core = ReceiveCore(stags, crc=True, ird=1, receive_size=9000, settle=lambda: 0)
    core.posted = 1
    for frame in frames:
        header = frame.header
        if isinstance(header, ddp.TaggedHeader):
            header = header._replace(stag=stag, to=header.to - first.to)
        else:
            header = header._replace(invalidate=stag, msn=1)
        data = ddp.encode_fpdu(header, frame.payload, crc=True)
        core.get_buffers()[0][: len(data)] = data
        core.received(len(data))
    (completion,) = core.completions
    assert completion.invalidated == stag
    assert memory == bytes((7 * j + (j >> 8)) & 255 for j in range(4096))
