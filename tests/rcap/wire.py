"""Connected sockets, queue pairs over them, a driver, and an understanding of markers."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from crc32c import crc32c

from iserblk.errors import TransportError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair

PATIENCE_S = 20.0  # of one wait; only a test that fails ever waits that long


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Two ends of one TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        second, _ = listener.accept()
    return first, second


def start_up(
    initiator: mpa.MpaInitiator, responder: mpa.MpaResponder, reply_data: bytes = b""
) -> tuple[mpa.MpaParameters, mpa.MpaParameters]:
    """Run MPA start-up between the two; returns the parameters of both."""
    theirs = responder.receive_data(initiator.data_to_send())
    assert theirs is not None
    responder.accept(reply_data)
    ours = initiator.receive_data(responder.data_to_send())
    assert ours is not None
    return ours, theirs


def iwarp_pair(
    *,
    crc: bool = True,
    markers: bool = False,
    ird: int = 64,
    ord: int = 64,
    rtr: int = mpa.RTR_WRITE | mpa.RTR_READ,
    receive_size: int = 8268,
    emss: int | None = None,
    private_data: tuple[bytes, bytes] = (b"", b""),
    small_buffers: bool = False,
) -> tuple[IwarpQueuePair, IwarpQueuePair]:
    """Initiator and responder over loopback.

    ``small_buffers``: the kernel soon takes no more. ``markers``: the initiator sends them, and a
    relay takes them out again, because our own receivers never want any.
    """
    first, second = connected_sockets()
    if small_buffers:
        for sock in (first, second):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    initiator = mpa.MpaInitiator(crc=crc, ird=ird, ord=ord, rtr=rtr, private_data=private_data[0])
    responder = mpa.MpaResponder(crc=crc, ird=ird, ord=ord)
    ours, theirs = start_up(initiator, responder, private_data[1])
    if markers:
        ours.markers = True
        middle = second
        onward, second = connected_sockets()
        relay(middle, onward, Unmarker(crc=crc).feed)
    return (
        IwarpQueuePair(first, ours, initiator=True, receive_size=receive_size, emss=emss),
        IwarpQueuePair(second, theirs, initiator=False, receive_size=receive_size, emss=emss),
    )


def relay(first: socket.socket, second: socket.socket, change: Callable[[bytes], bytes]) -> None:
    """Pass bytes between two sockets, those from ``first`` through ``change``, until both end."""

    def pump(source: socket.socket, sink: socket.socket, through: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(through(data))
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def both() -> None:
        with first, second:
            back = threading.Thread(target=pump, args=(second, first, bytes))
            back.start()
            pump(first, second, change)
            back.join()

    threading.Thread(target=both, daemon=True).start()


class Unmarker:
    """Takes a stream with markers and returns it without; checks each marker on the way.

    Written from RFC 5044 sections 4.3 and 4.4, apart from the code under test.
    """

    def __init__(self, *, crc: bool) -> None:
        self.crc = crc
        self.position = 0
        self.raw = bytearray()  # of the FPDU so far, markers included
        self.body = bytearray()
        self.start = 0
        self.markers = 0

    def feed(self, data: bytes) -> bytes:
        out = bytearray()
        for at in range(0, len(data)):
            out += self._byte(data[at : at + 1])
        return bytes(out)

    def _byte(self, byte: bytes) -> bytes:
        in_interval = self.position % 512
        self.position += 1
        self.raw += byte
        if in_interval < 4:
            if in_interval == 3:
                self.markers += 1
                pointer = int.from_bytes(self.raw[-4:], "big")
                expected = self.position - 4 - self.start if self.body else 0
                assert pointer == expected, f"marker {pointer} at {self.position}, not {expected}"
            return b""
        if not self.body:
            self.start = self.position - 1
        self.body += byte
        if len(self.body) < 2:
            return b""
        covered = (int.from_bytes(self.body[:2], "big") + 5) & ~3
        if len(self.body) < covered + 4:
            return b""
        field = bytes(self.body[covered:])
        if self.crc:
            # The CRC field itself is never cut: markers stand at multiples of four.
            assert field == crc32c(self.raw[:-4]).to_bytes(4, "little")
        clean = bytes(self.body[:covered])
        self.raw.clear()
        self.body.clear()
        return clean + (crc32c(clean) if self.crc else 0).to_bytes(4, "little")


@dataclass
class Event:
    """A completion, with its data copied."""

    opcode: int
    token: object
    data: bytes
    invalidated: int
    solicited: bool


class Driver:
    """Drives queue pairs from one thread. ``events[i]``, ``errors[i]``: of the i-th."""

    def __init__(self, *pairs: seam.QueuePair) -> None:
        self.pairs = pairs
        self.events: list[list[Event]] = [[] for _ in pairs]
        self.errors: list[TransportError | None] = [None for _ in pairs]

    def step(self, index: int) -> None:
        """One call of progress."""
        pair = self.pairs[index]
        if self.errors[index] is not None:
            return
        try:
            completions = pair.progress(0.0)
        except TransportError as error:
            self.errors[index] = error
            return
        for completion in completions:
            data = b"" if completion.data is None else bytes(completion.data)
            self.events[index].append(
                Event(
                    completion.opcode,
                    completion.token,
                    data,
                    completion.invalidated,
                    completion.solicited,
                )
            )

    def run(self, until: Callable[[], bool]) -> None:
        """Drive all until ``until()``; fails when nothing happens for long."""
        while not until():
            poll = select.poll()
            timeout = PATIENCE_S
            by_descriptor: dict[int, int] = {}
            for index, pair in enumerate(self.pairs):
                if pair.fileno() < 0 or self.errors[index] is not None:
                    continue
                by_descriptor[pair.fileno()] = index
                mask = select.POLLIN | (select.POLLOUT if pair.wants_write() else 0)
                poll.register(pair.fileno(), mask)
                if pair.next_deadline() is not None:
                    timeout = 0.0
            ready = {by_descriptor[descriptor] for descriptor, _ in poll.poll(timeout * 1000)}
            waiting = {
                index
                for index, pair in enumerate(self.pairs)
                if self.errors[index] is None and pair.next_deadline() is not None
            }
            assert ready or waiting, f"nothing happens: {self.events} {self.errors}"
            for index in ready | waiting:
                self.step(index)

    def received(self, index: int) -> list[Event]:
        return [event for event in self.events[index] if event.opcode == seam.RECEIVE]


def send_request(
    pair: seam.QueuePair,
    header: bytes = b"",
    data: bytes | None = None,
    opcode: int = seam.SEND,
    stag: int = 0,
    slot_size: int | None = None,
) -> seam.WorkRequest:
    """A Send with its own slot."""
    request = seam.WorkRequest(opcode)
    if header or slot_size:
        size = slot_size or len(header)
        request.header = pair.alloc_headers(1, size)[0]
        request.header.view[: len(header)] = header
        request.header_length = len(header)
    if data is not None:
        request.data = memoryview(data)
    request.stag = stag
    return request


def signaled_send(pair: seam.QueuePair, header: bytes, token: object) -> seam.WorkRequest:
    """As ``send_request``; its Completion carries ``token``."""
    request = send_request(pair, header)
    request.signaled = True
    request.token = token
    return request


def rdma_request(
    opcode: int, data: memoryview | bytes | None, stag: int, to: int, token: object = None
) -> seam.WorkRequest:
    """An RDMA Write or Read."""
    request = seam.WorkRequest(opcode, token)
    request.data = None if data is None else memoryview(data)
    request.stag = stag
    request.to = to
    return request


def busy(pair: seam.QueuePair) -> bool:
    """Whether there is something to send, or something has come."""
    return pair.wants_write() or bool(select.select([pair.fileno()], [], [], 0)[0])


_BLOCK = bytes((7 * j + (j >> 8)) & 255 for j in range(65536))


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that are different everywhere nearby. It costs little: in an emulated machine, too."""
    block = _BLOCK[:size].translate(bytes((value + seed) & 255 for value in range(256)))
    return (block * (size // len(_BLOCK) + 1))[:size]


def fpdu(header: ddp.TaggedHeader | ddp.UntaggedHeader, payload: bytes = b"") -> bytes:
    """One FPDU with its right CRC."""
    return ddp.encode_fpdu(header, payload, crc=True)
