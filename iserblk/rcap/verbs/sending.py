"""The sending side of a queue pair: turns the seam's work requests into those of the device.

The caller's data is copied into a chunk of registered memory when the device takes the request.
The data of an RDMA Read is copied out of its chunk when the Read completes. Requests for which the
device or the pool has no room wait in order.

Work requests of the device are numbered as they are posted. The completion of a signaled request
tells that all requests before it are complete, too, with two exceptions. Both are for Linux siw,
where a Send or an RDMA Write is complete when TCP has it.

- An RDMA Read is complete by its own completion alone: siw tells that requests behind it are
  complete while its data are still to come.
- On iWARP a request whose data lie in a chunk is always signaled: siw copies the data of those, but
  may let TCP send others from the chunk, after requests behind them are complete.

Threads: the queue pair calls all of it under its lock.
"""

from __future__ import annotations

from collections import deque

from iserblk.errors import Busy
from iserblk.rcap import seam
from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.engine import Engine
from iserblk.rcap.verbs.memory import Shelf
from iserblk.rcap.verbs.pool import PoolChunk

SIGNAL_EVERY = 64  # requests: at least each 64th is signaled, as that frees the device's queue
PIECE = 1 << 20  # bytes of one RDMA Write or Read of the device, at most
NOTHING = (0, 0, 0)

_OPCODES = {
    seam.SEND: (api.WR_SEND, 0),
    seam.SEND_SE: (api.WR_SEND, api.SOLICITED),
    seam.SEND_INVALIDATE: (api.WR_SEND_WITH_INV, 0),
    seam.SEND_SE_INVALIDATE: (api.WR_SEND_WITH_INV, api.SOLICITED),
    seam.RDMA_WRITE: (api.WR_RDMA_WRITE, 0),
    seam.RDMA_READ: (api.WR_RDMA_READ, 0),
}


class Posted:
    """A work request at the device that a caller waits for, or that uses a chunk.

    ``number``: its number. ``sink``: the caller's buffer for the data of an RDMA Read.
    ``retired``: the chunk whose window it invalidates."""

    __slots__ = ("chunk", "completion", "number", "retired", "sink")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunk: PoolChunk | None = None
        self.sink: memoryview | None = None
        self.completion: seam.Completion | None = None
        self.retired: PoolChunk | None = None


class Sender:
    """The send queue of one queue pair. ``requests``: work requests that are not at the device.
    ``most_reads``: RDMA Reads that may be at the device at a time, where that is fewer than the
    device itself has under way."""

    def __init__(self, engine: Engine, shelf: Shelf, room: int, *, iwarp: bool) -> None:
        """``room``: work requests that the device can hold at a time. ``iwarp``: it may be siw."""
        self._engine = engine
        self._shelf = shelf
        self._capacity = room
        self._iwarp = iwarp
        self._signal_every = max(1, min(SIGNAL_EVERY, room // 2))
        self._offset = 0  # into the data of the first request
        self._posted: deque[Posted] = deque()  # but RDMA Reads
        self._reads: dict[int, Posted] = {}  # RDMA Reads at the device, by number, in order
        self._number = 0  # of the last work request posted
        self._signaled = 0  # of the last that was signaled
        self.finished = 0  # of the last known to be complete, as are all before it but Reads
        self.requests: deque[seam.WorkRequest] = deque()
        self.most_reads = room

    def room(self) -> bool:
        read = next(iter(self._reads), self._number + 1)
        return self._number - min(self.finished, read - 1) < self._capacity

    def next(self, tell: bool) -> tuple[int, int]:
        """Number and flags of the next work request. ``tell``: it must be signaled. Some others are
        signaled, too, so that free places in the device's queue become known."""
        self._number += 1
        if tell or self._number - self._signaled >= self._signal_every:
            self._signaled = self._number
            return self._number, api.SIGNALED
        return self._number, 0

    def start(self) -> None:
        """Post the requests that the device and the pool have room for. Raises OSError; and
        NotSupported for data that the pool can never hold."""
        requests = self.requests
        while requests and self._prepare(requests[0]):
            requests.popleft()
        self._engine.post()

    def _prepare(self, request: seam.WorkRequest) -> bool:
        """Prepare a request, or the rest of it. False when it has to wait."""
        opcode, flags = _OPCODES[request.opcode]
        data = request.data
        size = 0 if data is None else len(data)
        if request.opcode <= seam.SEND_SE_INVALIDATE:
            address = key = 0
            head = request.header_length if request.header is not None else 0
            if request.header is not None and head:
                address, key = request.header.frame  # type: ignore[misc]  # of alloc_headers
            return self._piece(request, opcode, flags, data, size, (address, head, key))
        while True:
            count = min(PIECE, size - self._offset)
            piece = None if data is None else data[self._offset : self._offset + count]
            if not self._piece(request, opcode, flags, piece, count, NOTHING):
                return False
            self._offset += count
            if self._offset == size:
                self._offset = 0
                return True

    def _piece(
        self,
        request: seam.WorkRequest,
        opcode: int,
        flags: int,
        data: memoryview | None,
        size: int,
        head: tuple[int, int, int],
    ) -> bool:
        """Prepare one work request of the device. ``data``: of this piece. False: as
        ``_prepare``."""
        read = opcode == api.WR_RDMA_READ
        if not self.room() or (read and len(self._reads) >= self.most_reads):
            return False
        chunk = None
        if size and data is not None:
            try:
                chunk = self._shelf.take(size, 0)
            except Busy:
                return False
            if not read:
                chunk.view[:size] = data
        last = request.data is None or self._offset + size == len(request.data)
        tell = request.signaled or read or (chunk is not None and not self._told_by_next())
        number, signal = self.next(tell)
        if chunk is not None or tell:
            posted = Posted(number)
            posted.chunk = chunk
            if last and (request.signaled or read):
                posted.completion = seam.Completion(request.opcode, request.token)
            if read:
                posted.sink = data
                self._reads[number] = posted
            else:
                self._posted.append(posted)
        tail = NOTHING if chunk is None else (chunk.address, size, chunk.lkey)
        to = (request.to + self._offset) & 0xFFFFFFFFFFFFFFFF
        self._engine.send(number, opcode, flags | signal, request.stag, to, *head, *tail)
        return True

    def _told_by_next(self) -> bool:
        """Whether the request behind the first is signaled and needs no chunk: its completion then
        tells that both are complete."""
        requests = self.requests
        return (
            not self._iwarp
            and len(requests) > 1
            and requests[1].signaled
            and requests[1].data is None
        )

    def invalidate(self, chunk: PoolChunk) -> None:
        """Invalidate the window of ``chunk``, which goes back to its pool when that is complete.
        Raises OSError."""
        number, flags = self.next(True)
        posted = Posted(number)
        posted.retired = chunk
        self._posted.append(posted)
        self._engine.invalidate(number, flags, chunk.stag)
        self._engine.post()

    def finish(self, number: int, completions: list[seam.Completion]) -> None:
        """The work request ``number`` and all before it but RDMA Reads are complete: copy the data
        of a Read, give chunks back, and append what callers wait for to ``completions``."""
        self.finished = max(self.finished, number)  # siw tells of a Read after what is behind it
        posted = self._posted
        while posted and posted[0].number <= number:
            self._done(posted.popleft(), completions)
        read = self._reads.pop(number, None)
        if read is not None:
            self._done(read, completions)

    def _done(self, done: Posted, completions: list[seam.Completion]) -> None:
        chunk = done.chunk
        if chunk is not None:
            if done.sink is not None:
                done.sink[:] = chunk.view[: len(done.sink)]
            self._shelf.give(chunk)
        if done.retired is not None:
            self._shelf.give(done.retired)
        if done.completion is not None:
            completions.append(done.completion)

    def mark(self) -> int:
        """Post an empty RDMA Write: it completes when all requests before it have reached the peer
        (on siw: when TCP has them). Returns its number; 0 when there is no room. Raises
        OSError."""
        if not self.room():
            return 0
        number, flags = self.next(True)
        self._engine.send(number, api.WR_RDMA_WRITE, flags, 0, 0, *NOTHING, *NOTHING)
        self._engine.post()
        return number

    def drop(self) -> None:
        """Let go of all memory of callers."""
        self.requests.clear()
        self._posted.clear()
        self._reads.clear()
