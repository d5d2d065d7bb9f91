"""A queue pair over a device: ``iserblk.rcap.seam.QueuePair`` on what ``link`` made.

Threads. One lock, held for a few non-blocking calls at most; copying between the caller's memory
and the registered one is done outside it. ``disconnect`` takes none.

Endings. The first failure decides what ``progress`` raises once all that completed before it was
handed out: a work completion with an error, an rdma_cm event, or ``disconnect`` here. The device
tells a side that broke, but not by what: the peer's violation shows as flushed receives.
"""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from threading import Lock
from time import monotonic, sleep

from iserblk.errors import (
    Busy,
    ConnectFailed,
    ConnectionLost,
    LocalProtocolError,
    NotSupported,
    RemoteProtocolError,
    TransportError,
)
from iserblk.rcap import seam
from iserblk.rcap.verbs import api, memlock, words
from iserblk.rcap.verbs.link import REGION, WINDOW, Link
from iserblk.rcap.verbs.memory import Shelf, as_bytes, remote_access
from iserblk.rcap.verbs.pool import Chunk, Strip

BATCH = 32  # completions that one ``progress`` takes at most
RECEIVE = 1 << 62  # in the number of a request: it is a receive
SIGNAL_EVERY = 64  # Sends that nobody wants to hear of: the device's queue is freed by the next
PIECE = 1 << 20  # bytes of one RDMA Write or Read of ours
POOL_BYTES = 128 << 20  # of each pool, at most; registered as needed
LEAST_POOL_BYTES = 1 << 20  # without which no connection is worth while
HEADER_STEP = 64 << 10
DRAIN_S = 0.02  # ``close`` lets what was posted leave, for this long

_OPCODES = {
    seam.SEND: (api.WR_SEND, 0),
    seam.SEND_SE: (api.WR_SEND, api.SOLICITED),
    seam.SEND_INVALIDATE: (api.WR_SEND_WITH_INV, 0),
    seam.SEND_SE_INVALIDATE: (api.WR_SEND_WITH_INV, api.SOLICITED),
    seam.RDMA_WRITE: (api.WR_RDMA_WRITE, 0),
    seam.RDMA_READ: (api.WR_RDMA_READ, 0),
}

_NOTHING = (0, 0, 0)


class _Posted:
    """A request at the device that somebody waits for, or that holds memory. ``number``: of the
    last work request that belongs to it. ``sink``: where the data of an RDMA Read goes."""

    __slots__ = ("chunk", "completion", "number", "retired", "sink")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunk: Chunk | None = None
        self.sink: memoryview | None = None
        self.completion: seam.Completion | None = None
        self.retired: Chunk | None = None  # its window is being invalidated


def pool_budget(receives: int, receive_size: int) -> int:
    """Bytes that each pool of a new connection may have. Raises NotSupported when the limit on
    locked memory is too small for any."""
    left = memlock.lockable()
    if left is None:
        return POOL_BYTES
    other = receives * receive_size + 4 * HEADER_STEP + (1 << 20)  # queues of the device
    problem = memlock.shortage(other + 2 * LEAST_POOL_BYTES, "an RDMA connection")
    if problem is not None:
        raise NotSupported(problem)
    return min(POOL_BYTES, (left - other) // 2)


class VerbsQueuePair:
    """Implements QueuePair. Owns ``link`` from here on."""

    provider = "verbs"

    def __init__(self, link: Link, *, receive_size: int, receives: int, budget: int) -> None:
        """Posts ``receives`` receives in advance: the first of ``post_receive`` count as these.
        The queue pair need not be connected yet; ``connected`` says when it is.

        Raises OSError when memory cannot be registered.
        """
        self._link = link
        self._engine = link.engine
        self._device = link.device
        self.mode = WINDOW if link.windows else REGION
        self.can_receive_invalidate = link.windows
        self.ird = 0
        self.ord = 0
        self.peer_private_data = b""
        self.receive_size = receive_size
        self._lock = Lock()
        self._shelf = Shelf(link.register, budget, windows=link.windows, iwarp=link.device.iwarp)
        self._heads = Strip(link.register, 0, HEADER_STEP)
        self._inbox = Strip(link.register, api.LOCAL_WRITE, 0)
        self._buffers: list[tuple[memoryview, int, int]] = []  # of receives: view, address, key
        self._free_buffers: list[int] = []
        self._lent: list[int] = []  # handed out by the last ``progress``
        self._at_device = 0  # receives
        self._advance = 0  # of them, posted before anybody asked
        self._owed = 0  # receives that did not fit
        self._received = 0
        self._peer_invalidates = False
        self._requests: deque[seam.WorkRequest] = deque()
        self._offset = 0  # into the data of the first of them
        self._posted: deque[_Posted] = deque()
        self._number = 0  # of the last work request posted
        self._finished = 0  # of the last known to be done
        self._signaled = 0  # of the last that tells
        self._completions: list[seam.Completion] = []
        self._more = False  # there may be completions that no event announces
        self._armed = True  # ``link`` did
        self._error: TransportError | None = None
        self._hangup = ""  # why rdma_cm says that it is over
        self._disconnected = False
        self._closed = False
        self._peer = ""
        self._connected = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = Lock()
        self._epoll = select.epoll()
        for descriptor in (link.completion_fd, link.channel.fd, self._bell):
            self._epoll.register(descriptor, select.EPOLLIN)
        try:
            self._give_receives(receives)
        except BaseException:
            self._release()
            raise
        self._advance = receives

    def connected(self, ird: int, ord: int, private_data: bytes, peer: str) -> None:
        """It is: with these RDMA Read depths, and this from the peer of that name."""
        self.ird = ird
        self.ord = ord
        self.peer_private_data = private_data
        self._peer = peer
        self._connected = True

    def describe(self) -> dict[str, object]:
        return {
            "provider": self.provider,
            "device": self._device.name,
            "transport": self._device.transport,
            "mode": self.mode,
            "peer": self._peer,
            "ird": self.ird,
            "ord": self.ord,
            "receive_size": self.receive_size,
            "receive_invalidate": self.can_receive_invalidate,
            "compiled": api.gaps() is not None,
        }

    # --- memory ---

    def alloc_headers(self, count: int, size: int) -> list[seam.HeaderSlot]:
        """Raises ConnectionLost once the connection has ended, or the memory cannot be had."""
        slots = []
        with self._lock:
            self._check()
            try:
                for index in range(count):
                    view, address, key = self._heads.cut(size, (count - index) * (size + 64))
                    slots.append(seam.HeaderSlot(view, (address, key), index))
            except OSError as error:
                raise self._refused(error) from None
        return slots

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """The Base Offset is an address. In window mode the peer can use the STag from the next
        ``post`` on. Raises Busy when no registered memory is free until something is retired,
        NotSupported when none ever will be, ConnectionLost at the end."""
        buffer = as_bytes(buffer, rights)
        with self._lock:
            self._check()
            if self._link.windows and not self._room():
                raise Busy("the device's send queue is full")
            try:
                chunk = self._shelf.take(len(buffer), rights)
                chunk.view[: len(buffer)] = buffer
                stag = chunk.rkey
                if self._link.windows:
                    stag = self._bind(chunk)
            except OSError as error:
                raise self._refused(error) from None
            chunk.buffer = buffer
            chunk.received = self._received
            self._shelf.show(chunk, stag)
            return stag, chunk.address

    def _bind(self, chunk: Chunk) -> int:
        """Prepare the binding of a window; it reaches the device ahead of what is posted next.
        Returns the key. Raises OSError."""
        try:
            if chunk.window is None:
                chunk.window = self._link.make_window()
            return self._engine.bind(
                *self._next(False),
                chunk.window,
                chunk.registration.region,
                chunk.address,
                max(chunk.length, 1),
                remote_access(chunk.rights),
            )
        except OSError:
            self._shelf.give(chunk)
            raise

    def retire(self, stag: int) -> bool:
        with self._lock:
            chunk = self._shelf.owned(stag)
            valid = chunk.valid
            chunk.valid = False
            if self._closed:
                return valid
            if chunk.buffer is not None and chunk.rights & seam.REMOTE_WRITE:
                chunk.buffer[:] = chunk.view[: chunk.length]
            chunk.buffer = None
            if self._link.windows and valid and self._error is None:
                try:
                    self._unbind(chunk)
                except OSError as error:
                    self._fail(self._refused(error))
            else:
                self._shelf.give(chunk)
            return valid

    def _unbind(self, chunk: Chunk) -> None:
        """The window is, for all we know, still valid: see ``memory``. Raises OSError."""
        self._engine.post()  # the binding itself may still wait
        if self._peer_invalidates or self._received == chunk.received or not self._room():
            self._link.close_window(chunk.window)
            chunk.window = None
            self._shelf.give(chunk)
            return
        number, flags = self._next(True)
        posted = _Posted(number)
        posted.retired = chunk
        self._posted.append(posted)
        self._engine.invalidate(number, flags, chunk.stag)
        self._engine.post()

    # --- work ---

    def post_receive(self, count: int) -> None:
        with self._lock:
            ahead = min(count, self._advance)
            self._advance -= ahead
            if self._closed or self._error is not None:
                return
            self._give_receives(count - ahead)

    def _give_receives(self, count: int) -> None:
        """Post as many as the device takes; the rest when there is room again. Lock held."""
        count += self._owed
        now = min(count, self._link.receive_room - self._at_device)
        self._owed = count - now
        if now <= 0:
            return
        engine, free, buffers = self._engine, self._free_buffers, self._buffers
        try:
            while len(free) < now:
                missing = now - len(free)
                expected = (missing + BATCH) * (self.receive_size + 64)
                buffers.append(self._inbox.cut(self.receive_size, expected))
                free.append(len(buffers) - 1)
            for _ in range(now):
                index = free.pop()
                _, address, key = buffers[index]
                engine.receive(RECEIVE | index, address, self.receive_size, key)
            engine.post_receives()
            self._at_device += now
        except OSError as error:
            self._fail(self._refused(error))

    def post(self, requests: list[seam.WorkRequest]) -> None:
        """See the seam. What the device has no room for waits here, in order."""
        with self._lock:
            self._check()
            if not self.ord and any(request.opcode == seam.RDMA_READ for request in requests):
                raise LocalProtocolError("an RDMA Read, but the ORD of the connection is 0")
            self._requests.extend(requests)
            self._start()
            if self._error is not None:
                raise ConnectionLost(f"the connection has ended: {self._error}")

    def _start(self) -> None:
        """Give the device what it has room for. Lock held."""
        requests = self._requests
        try:
            while requests and self._prepare(requests[0]):
                requests.popleft()
            self._engine.post()
        except NotSupported as error:
            self._fail(ConnectionLost(str(error)))
        except OSError as error:
            self._fail(self._refused(error))

    def _prepare(self, request: seam.WorkRequest) -> bool:
        """One request, or what is left of it. False when it has to wait. Raises OSError."""
        opcode, flags = _OPCODES[request.opcode]
        data = request.data
        size = 0 if data is None else len(data)
        if request.opcode <= seam.SEND_SE_INVALIDATE:
            address = key = 0
            head = request.header_length if request.header is not None else 0
            if request.header is not None and head:
                address, key = request.header.frame  # type: ignore[misc]  # ours: a pair
            return self._prepare_piece(request, opcode, flags, data, size, (address, head, key))
        while True:
            count = min(PIECE, size - self._offset)
            piece = None if data is None else data[self._offset : self._offset + count]
            if not self._prepare_piece(request, opcode, flags, piece, count, _NOTHING):
                return False
            self._offset += count
            if self._offset == size:
                self._offset = 0
                return True

    def _prepare_piece(
        self,
        request: seam.WorkRequest,
        opcode: int,
        flags: int,
        data: memoryview | None,
        size: int,
        head: tuple[int, int, int],
    ) -> bool:
        """One work request of the device, as ``_prepare``. ``data``: of this piece."""
        if not self._room():
            return False
        chunk = None
        if size and data is not None:
            try:
                chunk = self._shelf.take(size, 0)
            except Busy:
                return False
            if opcode != api.WR_RDMA_READ:
                chunk.view[:size] = data
        whole = request.data is None or self._offset + size == len(request.data)
        read = opcode == api.WR_RDMA_READ
        tell = request.signaled or read or (chunk is not None and not self._told_by_next())
        number, signal = self._next(tell)
        if chunk is not None or tell:
            posted = _Posted(number)
            posted.chunk = chunk
            if read:
                posted.sink = data
            if whole and (request.signaled or read):
                posted.completion = seam.Completion(request.opcode, request.token)
            self._posted.append(posted)
        if chunk is None:
            self._engine.send(
                number, opcode, flags | signal, request.stag, request.to + self._offset, *head,
                0, 0, 0,
            )  # fmt: skip
        else:
            self._engine.send(
                number, opcode, flags | signal, request.stag, request.to + self._offset, *head,
                chunk.address, size, chunk.lkey,
            )  # fmt: skip
        return True

    def _told_by_next(self) -> bool:
        """The request behind the first goes out in any case, and tells when both are done."""
        requests = self._requests
        return len(requests) > 1 and requests[1].signaled and requests[1].data is None

    def _room(self) -> bool:
        return self._number - self._finished < self._link.send_room

    def _next(self, tell: bool) -> tuple[int, int]:
        """Number and flags of the next work request; some tell only so that the device's queue
        is known to be free again."""
        self._number += 1
        if tell or self._number - self._signaled >= SIGNAL_EVERY:
            self._signaled = self._number
            return self._number, api.SIGNALED
        return self._number, 0

    # --- completions ---

    def progress(self, now: float) -> list[seam.Completion]:
        with self._lock:
            if self._error is None and not self._closed:
                if self._lent:
                    self._free_buffers += self._lent
                    self._lent.clear()
                if self._owed:
                    self._give_receives(0)
                self._collect()
            completions = self._completions
            if completions:
                self._completions = []
                return completions
            if self._error is not None:
                raise self._error
            if self._closed:
                raise ConnectionLost("the connection is closed")
            return completions

    def _collect(self) -> None:
        """Take what has completed; see what rdma_cm has to say. Lock held."""
        engine = self._engine
        try:
            if self._armed and engine.event():
                self._armed = False
            entries = engine.poll(BATCH)
            if len(entries) < BATCH and not self._armed:
                engine.arm()
                self._armed = True
                # What came between the two is announced by nothing.
                entries += engine.poll(BATCH - len(entries))
        except OSError as error:
            self._fail(self._refused(error))
            return
        self._more = len(entries) == BATCH
        for entry in entries:
            self._take(entry)
        if not entries and self._error is None:
            self._listen()
        if self._disconnected and self._error is None:
            self._fail(ConnectionLost("the connection was ended by this side"))
        if self._requests and self._error is None:
            self._start()

    def _take(self, entry: tuple[int, int, int, int, int, int]) -> None:
        """One work completion. Lock held."""
        number, status, count, flags, key, vendor = entry
        if status:
            if self._error is None:
                self._fail(self._verdict(status, bool(number & RECEIVE), vendor))
            return
        if number & RECEIVE:
            index = number ^ RECEIVE
            self._lent.append(index)
            self._at_device -= 1
            self._received += 1
            invalidated = 0
            if flags & api.WC_INVALIDATED:
                chunk = self._shelf.open.get(key)
                if chunk is not None:
                    chunk.valid = False
                # One of the bits means something else on other devices.
                if chunk is not None or flags & api.WC_WITH_INV:
                    invalidated = key
                    self._peer_invalidates = True
            view = self._buffers[index][0]
            self._completions.append(seam.Completion(seam.RECEIVE, None, view[:count], invalidated))
            return
        self._finished = number
        posted = self._posted
        while posted and posted[0].number <= number:
            done = posted.popleft()
            chunk = done.chunk
            if chunk is not None:
                if done.sink is not None:
                    done.sink[:] = chunk.view[: len(done.sink)]
                self._shelf.give(chunk)
            if done.retired is not None:
                self._shelf.give(done.retired)
            if done.completion is not None:
                self._completions.append(done.completion)

    def _verdict(self, code: int, receive: bool, vendor: int) -> TransportError:
        """What a work completion with an error means for the connection."""
        if code == words.FLUSHED:
            # Something else broke the queue pair before: the peer's end, or its doing.
            self._listen()
            if self._error is not None:
                return self._error
            if self._device.iwarp or self._disconnected:
                return ConnectionLost("the connection broke, or the peer closed it")
            return RemoteProtocolError(
                "RDMA",
                f"{self._device.name} ended the connection: the peer broke its rules, by access "
                "to memory that is not open to it, most likely",
            )
        status = words.status(code)
        text = f"{status.words} ({self._device.name}: {status.name}, vendor error {vendor:#x})"
        if receive and (status.peer or code == words.OPERATION_FAILED):
            # rxe says the latter of a message that is larger than its receive.
            return RemoteProtocolError("RDMA", text)
        if status.peer:
            return ConnectionLost(f"the peer's device refused a request of ours: {text}")
        return ConnectionLost(text)

    def _listen(self) -> None:
        """Take rdma_cm's events; one that ends the connection is final once nothing more is in
        the completion queue. Lock held."""
        try:
            while (event := self._link.channel.take()) is not None:
                kind = event.kind
                event.close()
                if kind == words.DEVICE_REMOVAL:
                    self._hangup = f"{words.event(kind)} ({self._device.name})"
                elif kind in (words.DISCONNECTED, words.CONNECT_ERROR, words.UNREACHABLE):
                    self._hangup = words.event(kind)
            if self._hangup:
                for entry in self._engine.poll(BATCH):
                    if not entry[1]:
                        self._more = True
                        self._take(entry)
                if not self._more:
                    self._fail(ConnectionLost(self._hangup))
        except (ConnectFailed, OSError) as error:
            self._fail(ConnectionLost(str(error)))

    # --- the end ---

    def _check(self) -> None:
        """Raises ConnectionLost once the connection has ended. Lock held."""
        if self._closed or self._error is not None or self._disconnected:
            raise ConnectionLost(f"the connection has ended: {self._error or 'it was closed'}")

    def _refused(self, error: OSError) -> ConnectionLost:
        """The system refused something that the connection cannot go on without."""
        text = f"RDMA device {self._device.name}: {error.strerror or error}"
        if error.errno == errno.ENOMEM:
            text += f"; if that is the locked-memory limit: {memlock.REMEDY}"
        return ConnectionLost(text)

    def _fail(self, error: TransportError) -> None:
        """The connection has ended: tell the peer, and whoever waits here. Lock held."""
        if self._error is None:
            self._error = error
            self._requests.clear()
            self._link.disconnect()
            self._ring()

    def fileno(self) -> int:
        return -1 if self._closed else self._epoll.fileno()

    def wants_write(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        """0.0, that is at once, while completions or an error wait to be picked up."""
        return 0.0 if self._more or self._completions or self._error is not None else None

    def disconnect(self) -> None:
        self._disconnected = True
        self._ring()

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """See the seam; gives what was posted 20 ms to leave, when the peer still acknowledges."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connected and self._error is None:
                self._drain()
                self._link.disconnect()
            self._more = False
            self._release()

    def _drain(self) -> None:
        """Wait a moment until the peer has what was posted."""
        try:
            if not self._room():
                return
            number, _ = self._next(True)
            self._engine.send(number, api.WR_RDMA_WRITE, api.SIGNALED, 0, 0, *_NOTHING, *_NOTHING)
            self._engine.post()
            end = monotonic() + DRAIN_S
            while self._finished < number and monotonic() < end:
                for entry in self._engine.poll(BATCH):
                    if entry[1]:
                        return
                    if not entry[0] & RECEIVE:
                        self._finished = entry[0]
                sleep(DRAIN_S / 100)
        except OSError:
            return  # then it has ended already

    def _release(self) -> None:
        """Give everything back."""
        self._requests.clear()
        self._posted.clear()
        self._completions.clear()
        self._shelf.forget()
        self._epoll.close()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        self._link.close(self._close_memory)
        self._buffers.clear()

    def _close_memory(self) -> None:
        self._shelf.close()
        self._heads.close()
        self._inbox.close()
