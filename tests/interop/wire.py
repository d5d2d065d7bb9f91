"""One end of an iWARP connection, by hand: frames in and out of a blocking socket.

What is played comes from the captured streams; only what belongs to the connection is put in
anew: MSNs here, tags and numbers by the players.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from iserblk.rcap.iwarp import ddp, rdmap
from tests.rcap import streams
from tests.rcap.fpdu import Fpdu, decode_fpdu

PATIENCE_S = 20.0  # of one receive; only a test that fails ever waits that long
SENDS = (rdmap.SEND, rdmap.SEND_SE, rdmap.SEND_INVALIDATE, rdmap.SEND_SE_INVALIDATE)


@dataclass
class Message:
    """All segments of one DDP message."""

    frames: list[Fpdu]

    @property
    def header(self) -> ddp.TaggedHeader | ddp.UntaggedHeader:
        return self.frames[0].header

    @property
    def opcode(self) -> int:
        return self.header.control & rdmap.OPCODE_MASK

    @property
    def payload(self) -> bytes:
        return b"".join(frame.payload for frame in self.frames)

    @property
    def is_send(self) -> bool:
        return self.opcode in SENDS

    @property
    def invalidate(self) -> int:
        """The STag that a Send with Invalidate names, 0 for another Send."""
        if self.opcode not in (rdmap.SEND_INVALIDATE, rdmap.SEND_SE_INVALIDATE):
            return 0
        assert isinstance(self.header, ddp.UntaggedHeader)
        return self.header.invalidate


def messages(name: str) -> list[Message]:
    """The messages of a captured stream, in the order of their first segments."""
    found: list[Message] = []
    for frame in streams.frames(name):
        if found and not found[-1].frames[-1].header.control & ddp.LAST:
            found[-1].frames.append(frame)
        else:
            found.append(Message([frame]))
    return found


class Wire:
    """``clean``: takes what is received before it is decoded (for markers)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.crc = True
        self.clean: Callable[[bytes], bytes] = bytes
        self._data = b""
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        sock.settimeout(PATIENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # --- MPA start-up ---

    def receive_start_up(self) -> tuple[bytes, int, int, bytes]:
        """(key, flags, revision, private data) of the peer's frame."""
        head = self._exactly(20)
        length = int.from_bytes(head[18:], "big")
        return head[:16], head[16], head[17], self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        while len(self._data) < count:
            more = self.sock.recv(count - len(self._data))
            assert more, "the peer closed during start-up"
            self._data += more
        found, self._data = self._data[:count], self._data[count:]
        return found

    # --- frames ---

    def send(self, frame: Fpdu, payload: bytes | None = None, **fields: int) -> None:
        """The frame with ``fields`` of its header and its payload replaced, the next MSN if it
        begins or continues an untagged message, and the CRC made anew."""
        header = frame.header._replace(**fields)
        if isinstance(header, ddp.UntaggedHeader):
            msn = self._sent.get(header.qn, 0) + 1
            header = header._replace(msn=msn)
            if header.control & ddp.LAST:
                self._sent[header.qn] = msn
        data = frame.payload if payload is None else payload
        size = ddp.TAGGED_SIZE if isinstance(header, ddp.TaggedHeader) else ddp.UNTAGGED_SIZE
        header = header._replace(length=size - ddp.LENGTH_SIZE + len(data))
        self.sock.sendall(ddp.encode_fpdu(header, data, crc=self.crc))

    def receive(self) -> Message | None:
        """The next message, whose MSN and MOs are checked; None at the orderly end."""
        frames: list[Fpdu] = []
        while True:
            frame = self._frame()
            if frame is None:
                assert not frames, "the peer closed in the middle of a message"
                return None
            header = frame.header
            if isinstance(header, ddp.UntaggedHeader):
                assert header.msn == self._received.get(header.qn, 0) + 1
                assert header.mo == sum(len(each.payload) for each in frames)
            frames.append(frame)
            if header.control & ddp.LAST:
                if isinstance(header, ddp.UntaggedHeader):
                    self._received[header.qn] = header.msn
                return Message(frames)

    def _frame(self) -> Fpdu | None:
        while (decoded := decode_fpdu(self._data, crc=self.crc)) is None:
            more = self.sock.recv(1 << 20)
            if not more:
                assert not self._data, "the peer closed in the middle of a frame"
                return None
            self._data += self.clean(more)
        self._data = self._data[decoded[1] :]
        return decoded[0]
