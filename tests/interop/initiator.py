"""Plays the recorded initiators (the script, and the kernel's ib_iser) against a target."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field

from iserblk.datamover.iser import RSV, WSV
from iserblk.iscsi import bhs
from iserblk.iscsi.serial import window_size
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from tests.interop.recorded import Exchange, Pdu
from tests.interop.wire import Message, Wire
from tests.rcap import streams
from tests.rcap.fpdu import Fpdu

_CMD_SN = 24  # offsets in the BHS
_STAT_SN = 24
_EXP_STAT_SN = 28
_EXP_CMD_SN = 28
_MAX_CMD_SN = 32
_BHS_AT = 28
_SEGMENT = 16384  # of a Read Response

_RESPONSE = ddp.TAGGED | ddp.LAST | ddp.VERSION | rdmap.VERSION | rdmap.READ_RESPONSE


def _patched(payload: bytes, old: bytes, new: bytes) -> bytes:
    """A PDU with ``old`` in its data segment replaced, and DataSegmentLength made to fit."""
    assert old in payload
    length = int.from_bytes(payload[33:36], "big") + len(new) - len(old)
    payload = payload.replace(old, new)
    return payload[:33] + length.to_bytes(3, "big") + payload[36:]


@dataclass
class Outcome:
    """The result of one request. ``placed``: the read buffer, b"" where nothing was
    placed; ``fetched``: its reads of the write buffer."""

    answer: Pdu
    placed: bytes
    fetched: list[tuple[int, int]] = field(default_factory=list)  # offset, length


class RecordedInitiator:
    """A connection to the target under test. CmdSN and ExpStatSN are put in anew; ITTs, STags
    and TOs are the initiator's own, and stay as they were recorded."""

    def __init__(self, port: int) -> None:
        self.wire = Wire(socket.create_connection(("127.0.0.1", port)))
        self._cmd_sn = 0
        self._stat_sn: int | None = None

    def __enter__(self) -> RecordedInitiator:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.sock.close()

    # --- start-up ---

    def start_up(self, name: str) -> tuple[int, int, bytes]:
        """Send the recorded MPA Request; (flags, revision, private data) of the Reply."""
        self.wire.sock.sendall(streams.read(name))
        key, flags, revision, private_data = self.wire.receive_start_up()
        assert key == mpa.REPLY_KEY
        self.wire.crc = bool(flags & mpa.CRC)
        return flags, revision, private_data

    # --- requests ---

    def play(self, exchange: Exchange, patch: dict[bytes, bytes] | None = None) -> Outcome:
        """Send the request as it was recorded, serve what the target asks for, check its numbers.

        ``patch``: texts in the data segment that are replaced by others.
        """
        request = exchange.request
        self._send(request, patch or {})
        buffer = bytearray(request.edtl if request.iser.flags & RSV else 0)
        outcome = Outcome(request, b"")
        placed = 0
        while True:
            message = self.wire.receive()
            assert message is not None, "the target closed instead of answering"
            if message.opcode == rdmap.WRITE:
                offset, data = self._write_to(message, request)
                assert offset + len(data) <= len(buffer)
                buffer[offset : offset + len(data)] = data
                placed = max(placed, offset + len(data))
            elif message.opcode == rdmap.READ_REQUEST:
                outcome.fetched.append(self._serve(message, exchange))
            else:
                assert message.is_send
                break
        outcome.answer = Pdu(message)
        outcome.placed = bytes(buffer[:placed])
        self._check_numbers(outcome.answer)
        return outcome

    def _send(self, request: Pdu, patch: dict[bytes, bytes]) -> None:
        first = request.bhs
        login = request.opcode == bhs.LOGIN_REQUEST
        if login:
            self._cmd_sn = request.number(_CMD_SN)
        expected = request.number(_EXP_STAT_SN)
        if self._stat_sn is not None:
            expected = (self._stat_sn + 1) & 0xFFFFFFFF
        for frame in request.message.frames:
            payload = frame.payload
            assert isinstance(frame.header, ddp.UntaggedHeader)
            if frame.header.mo == 0:
                changed = bytearray(payload)
                struct.pack_into(">II", changed, _BHS_AT + _CMD_SN, self._cmd_sn, expected)
                payload = bytes(changed)
            for old, new in patch.items():
                payload = _patched(payload, old, new)
            self.wire.send(frame, payload)
        if not first[0] & bhs.IMMEDIATE:
            self._cmd_sn = (self._cmd_sn + 1) & 0xFFFFFFFF

    def _check_numbers(self, answer: Pdu) -> None:
        """StatSN counts on, ExpCmdSN is the next one, and the window is open."""
        stat_sn = answer.number(_STAT_SN)
        if self._stat_sn is not None:
            assert stat_sn == (self._stat_sn + 1) & 0xFFFFFFFF
        self._stat_sn = stat_sn
        assert answer.number(_EXP_CMD_SN) == self._cmd_sn
        assert 0 < window_size(self._cmd_sn, answer.number(_MAX_CMD_SN)) < 4096

    def _write_to(self, message: Message, request: Pdu) -> tuple[int, bytes]:
        """An RDMA Write of the target: (offset in the read buffer, data)."""
        header = message.header
        assert isinstance(header, ddp.TaggedHeader)
        assert request.iser.flags & RSV and header.stag == request.iser.read_stag
        return header.to - request.iser.read_base, message.payload

    def _serve(self, message: Message, exchange: Exchange) -> tuple[int, int]:
        """Answer a Read Request with what the recorded initiator sent."""
        asked = message.header
        assert isinstance(asked, ddp.UntaggedHeader) and asked.qn == ddp.QN_READ_REQUEST
        assert len(message.payload) == 28
        wanted = rdmap.ReadRequest.unpack_untrusted(message.payload)
        request = exchange.request
        assert request.iser.flags & WSV and wanted.source_stag == request.iser.write_stag
        offset = wanted.source_to - request.iser.write_base
        data = exchange.written[len(request.data) :][offset : offset + wanted.size]
        assert offset >= 0 and len(data) == wanted.size
        for at in range(0, max(len(data), 1), _SEGMENT):
            part = data[at : at + _SEGMENT]
            last = at + _SEGMENT >= len(data)
            control = _RESPONSE if last else _RESPONSE & ~ddp.LAST
            header = ddp.TaggedHeader(0, control, wanted.sink_stag, wanted.sink_to + at)
            self.wire.send(Fpdu(header, part, 0))
        return offset, wanted.size

    # --- the end ---

    def terminated(self) -> rdmap.Terminate:
        """The Terminate that comes next; then the target closes."""
        message = self.wire.receive()
        assert message is not None and message.opcode == rdmap.TERMINATE
        with suppress(ConnectionResetError):  # it may close with bytes of ours unread
            assert self.wire.receive() is None
        return rdmap.Terminate.unpack_untrusted(message.payload)
