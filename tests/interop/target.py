"""Plays the recorded targets (LIO's isert, and the script) against our initiator."""

from __future__ import annotations

import socket
import struct

from iserblk.datamover.iser import CONTROL, RSV, WSV
from iserblk.iscsi import bhs, text
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from tests.interop.recorded import Exchange, Pdu
from tests.interop.wire import PATIENCE_S, Message, Wire
from tests.rcap import streams

_BHS_AT = 28
_DATA_AT = 76
_MINIMA = (
    "InitiatorRecvDataSegmentLength",
    "TargetRecvDataSegmentLength",
    "MaxBurstLength",
    "FirstBurstLength",
)


class RecordedTarget:
    """Listens; ``accept`` takes the initiator under test. All methods block.

    ITT, StatSN, ExpCmdSN, MaxCmdSN (the window as wide as it was), STags and TOs are put in anew;
    all else goes out as it was recorded.
    """

    wire: Wire

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self.port = self._listener.getsockname()[1]
        self._stat_sn = 0x24C4C7AD

    def close(self) -> None:
        self._listener.close()
        if hasattr(self, "wire"):
            self.wire.sock.close()

    # --- start-up ---

    def accept(self, reply: str) -> mpa.MpaParameters:
        """Answer the MPA Request with the recorded Reply; what was asked for."""
        sock, _ = self._listener.accept()
        self.wire = Wire(sock)
        key, flags, revision, private_data = self.wire.receive_start_up()
        understood = mpa.MpaResponder(crc=False).receive_data(
            mpa.HEADER.pack(key, flags, revision, len(private_data)) + private_data
        )
        assert understood is not None
        frame = streams.read(reply)
        self.wire.crc = bool(frame[16] & mpa.CRC)
        self.wire.sock.sendall(frame)
        return understood

    def ready_to_receive(self, set_name: str) -> None:
        """The initiator's first frame is the RTR that the Reply asked for."""
        (recorded,) = streams.frames(f"{set_name}/01b_rtr.i2t.bin")
        message = self.wire.receive()
        assert message is not None
        assert message.opcode == recorded.header.control & rdmap.OPCODE_MASK
        if message.opcode == rdmap.WRITE:
            assert message.payload == b""
            return
        wanted = rdmap.ReadRequest.unpack_untrusted(message.payload)
        assert wanted.size == 0
        (answer,) = streams.frames(f"{set_name}/01b_rtr.t2i.bin")
        self.wire.send(answer, stag=wanted.sink_stag, to=wanted.sink_to)

    # --- exchanges ---

    def login(self, exchange: Exchange) -> None:
        """Answer the Login Request. Keys that the recorded initiator offered and ours does not
        are left out of the recorded answer; those that the target declared by itself stay. Where
        the smaller number counts, it is that of our offer and the recorded answer."""
        request = self._request()
        assert request.bhs[0] == exchange.request.bhs[0]  # immediate
        assert request.bhs[1] == exchange.request.bhs[1]  # T, CSG, NSG
        assert request.bhs[14:16] == b"\0\0"  # TSIH: a new session
        offered = dict(text.decode_untrusted(request.data))
        theirs = dict(text.decode_untrusted(exchange.request.data))
        pairs = [
            (key, str(min(int(offered[key]), int(value))) if key in _MINIMA else value)
            for key, value in text.decode_untrusted(exchange.answer.data)
            if key in offered or key not in theirs
        ]
        assert ("RDMAExtensions", "Yes") in pairs
        data = text.encode(pairs)
        self._answer(exchange, request, data=data, isid=request.bhs[8:14])

    def play(self, exchange: Exchange) -> None:
        """Take the request, compare it with the recorded one, do as the recorded target did."""
        request, recorded = self._request(), exchange.request
        assert request.iser.flags == recorded.iser.flags
        assert request.bhs[:4] == recorded.bhs[:4]
        assert request.data == recorded.data
        if request.opcode == bhs.SCSI_COMMAND:
            assert request.bhs[8:16] == recorded.bhs[8:16]  # LUN
            assert request.edtl == recorded.edtl
            assert request.cdb == recorded.cdb
        elif request.opcode == bhs.LOGOUT_REQUEST:
            assert request.bhs[20:22] == recorded.bhs[20:22]  # CID
        for message in exchange.transfers:
            if message.opcode == rdmap.WRITE:
                self._write(message, request, recorded)
            else:
                self._read(message, exchange, request)
        self._answer(exchange, request)

    def _request(self) -> Pdu:
        message = self.wire.receive()
        assert message is not None, "the initiator closed"
        assert message.opcode == rdmap.SEND_SE
        return Pdu(message)

    def _write(self, message: Message, request: Pdu, recorded: Pdu) -> None:
        """Data-In as it was cut, to where the initiator wants it."""
        iser = request.iser
        assert iser == (CONTROL | RSV, 0, 0, iser.read_stag, iser.read_base)
        for frame in message.frames:
            assert isinstance(frame.header, ddp.TaggedHeader)
            offset = frame.header.to - recorded.iser.read_base
            self.wire.send(frame, stag=request.iser.read_stag, to=request.iser.read_base + offset)

    def _read(self, message: Message, exchange: Exchange, request: Pdu) -> None:
        """Data-Out: ask for it as recorded; what comes is what the recorded initiator sent."""
        iser = request.iser
        assert iser == (CONTROL | WSV, iser.write_stag, iser.write_base, 0, 0)
        wanted = rdmap.ReadRequest.unpack_untrusted(message.payload)
        offset = wanted.source_to - exchange.request.iser.write_base
        ours = wanted._replace(
            source_stag=request.iser.write_stag, source_to=request.iser.write_base + offset
        )
        (frame,) = message.frames
        self.wire.send(frame, ours.pack())
        response = self.wire.receive()
        assert response is not None and response.opcode == rdmap.READ_RESPONSE
        assert isinstance(response.header, ddp.TaggedHeader)
        assert (response.header.stag, response.header.to) == (wanted.sink_stag, wanted.sink_to)
        at = len(exchange.request.data) + offset
        assert response.payload == exchange.written[at : at + wanted.size]

    def _answer(
        self, exchange: Exchange, request: Pdu, data: bytes | None = None, isid: bytes = b""
    ) -> None:
        recorded = exchange.answer
        cmd_sn = request.number(24) + (0 if request.bhs[0] & bhs.IMMEDIATE else 1)
        window = recorded.number(32) - recorded.number(28)
        payload = bytearray(recorded.message.payload)
        if data is not None:
            payload[_DATA_AT:] = data
            payload[_BHS_AT + 5 : _BHS_AT + 8] = len(data).to_bytes(3, "big")
        if isid:
            payload[_BHS_AT + 8 : _BHS_AT + 14] = isid
        if recorded.opcode == bhs.REJECT:
            payload[_DATA_AT:] = request.bhs  # the header of what is rejected
        else:
            struct.pack_into(">I", payload, _BHS_AT + 16, request.itt)
        struct.pack_into(
            ">III", payload, _BHS_AT + 24, self._stat_sn, cmd_sn, (cmd_sn + window) & 0xFFFFFFFF
        )
        self._stat_sn += 1
        (frame,) = recorded.message.frames
        fields = {}
        if recorded.message.invalidate:
            fields["invalidate"] = request.iser.read_stag or request.iser.write_stag
        self.wire.send(frame, bytes(payload), **fields)

    def play_reject(self, exchange: Exchange) -> None:
        """Answer the next PDU, of any kind, with the recorded Reject."""
        self._answer(exchange, self._request())

    def end(self) -> None:
        """The initiator closes."""
        assert self.wire.receive() is None
