"""What the captured conversations say, phase by phase."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from iserblk.datamover.iser import HEADER_LENGTH, MINIMUM_LENGTH, ControlHeader
from iserblk.iscsi import bhs
from iserblk.rcap.iwarp import ddp, rdmap
from tests.interop.wire import Message, messages
from tests.rcap import streams

READ_10, READ_16, WRITE_10, WRITE_16 = 0x28, 0x88, 0x2A, 0x8A
BLOCK = 512


def phases(name: str) -> list[str]:
    """The phases of a set whose streams are there in both directions, in order, MPA left out."""
    found: dict[str, set[str]] = {}
    paths = (streams.STREAMS / name).glob("*.bin")
    # Login comes first, in spite of its number: the kernel's phases are numbered by message.
    for path in sorted(paths, key=lambda path: ("02_login" not in path.name, path.name)):
        phase, direction, _ = path.name.rsplit(".", maxsplit=2)
        if path.stat().st_size and "01_mpa" not in phase:
            found.setdefault(phase, set()).add(direction)
    return [phase for phase, directions in found.items() if directions == {"i2t", "t2i"}]


@dataclass
class Pdu:
    """One control-type PDU, with the iSER header before it."""

    message: Message

    @property
    def iser(self) -> ControlHeader:
        return ControlHeader.unpack_from(self.message.payload)

    @property
    def bhs(self) -> bytes:
        return self.message.payload[HEADER_LENGTH:MINIMUM_LENGTH]

    @property
    def opcode(self) -> int:
        return self.bhs[0] & bhs.OPCODE_MASK

    @property
    def data(self) -> bytes:
        length = int.from_bytes(self.bhs[5:8], "big")
        return self.message.payload[MINIMUM_LENGTH : MINIMUM_LENGTH + length]

    def number(self, offset: int) -> int:
        """The 32-bit field of the BHS at ``offset``."""
        (value,) = struct.unpack_from(">I", self.bhs, offset)
        return int(value)

    @property
    def itt(self) -> int:
        return self.number(16)

    @property
    def edtl(self) -> int:
        return self.number(20)

    @property
    def cdb(self) -> bytes:
        return self.bhs[32:48]

    @property
    def blocks(self) -> tuple[int, int]:
        """(first block, blocks) of a READ or WRITE."""
        if self.cdb[0] in (READ_10, WRITE_10):
            return int.from_bytes(self.cdb[2:6], "big"), int.from_bytes(self.cdb[7:9], "big")
        return int.from_bytes(self.cdb[2:10], "big"), int.from_bytes(self.cdb[10:14], "big")


@dataclass
class Exchange:
    """One request, its data transfers and its answer.

    ``placed``: what the recorded target wrote, by offset in the read buffer. ``fetches``: (offset
    in the write buffer behind the immediate data, bytes), as it read them.
    """

    request: Pdu
    transfers: list[Message]  # RDMA Writes and Read Requests of the target
    answer: Pdu
    placed: dict[int, bytes]
    fetches: list[tuple[int, bytes]]

    @property
    def written(self) -> bytes:
        """Data-Out, whole."""
        behind = bytearray(self.request.edtl - len(self.request.data))
        for offset, data in self.fetches:
            behind[offset : offset + len(data)] = data
        return self.request.data + bytes(behind)

    @property
    def read(self) -> bytes:
        """Data-In, whole."""
        data = bytearray(max((at + len(part) for at, part in self.placed.items()), default=0))
        for at, part in self.placed.items():
            data[at : at + len(part)] = part
        return bytes(data)


def exchanges(name: str, phase: str) -> list[Exchange]:
    """The requests of a phase with their answers; they were sent one after the other."""
    sent = messages(f"{name}/{phase}.i2t.bin")
    requests = [Pdu(message) for message in sent if message.is_send]
    responses = [message for message in sent if message.opcode == rdmap.READ_RESPONSE]
    received = messages(f"{name}/{phase}.t2i.bin")
    found = []
    for request in requests:
        if not received:
            break  # its answer is in a stream that was left out
        transfers = []
        placed: dict[int, bytes] = {}
        fetches = []
        while not received[0].is_send:
            message = received.pop(0)
            transfers.append(message)
            if message.opcode == rdmap.WRITE:
                assert isinstance(message.header, ddp.TaggedHeader)
                placed[message.header.to - request.iser.read_base] = message.payload
            else:
                wanted = rdmap.ReadRequest.unpack_untrusted(message.payload)
                offset = wanted.source_to - request.iser.write_base
                data = responses.pop(0).payload if responses else _left_out(name, request)
                fetches.append((offset, data))
                assert len(data) == wanted.size
        found.append(Exchange(request, transfers, Pdu(received.pop(0)), placed, fetches))
    assert not received and not responses
    return found


def _left_out(name: str, request: Pdu) -> bytes:
    """Solicited data of a write whose own stream was left out: it was read back later."""
    for phase in phases(name):
        if f"_{READ_10:x}_{request.edtl}" in phase:
            (exchange,) = exchanges(name, phase)
            if exchange.request.blocks == request.blocks:
                assert exchange.read.startswith(request.data)
                return exchange.read[len(request.data) :]
    raise AssertionError(f"{name}: no stream has the data of {request.cdb.hex()}")


def sense_triple(pdu: Pdu) -> tuple[int, int, int]:
    """(sense key, ASC, ASCQ) of a SCSI Response with fixed-format sense data."""
    sense = pdu.data[2:]
    return sense[2] & 15, sense[12], sense[13]
