"""A queue pair of an RDMA device: ``iserblk.rcap.seam.QueuePair`` on the objects of a ``link``.

Threads. One lock guards all state. It is held for non-blocking calls, and for the copies between
the caller's memory and registered memory. ``disconnect`` does not take it.

Endings. The first failure decides what ``progress`` raises, once it has returned all that completed
before: a work completion with an error, an rdma_cm event, or ``disconnect`` at this end. A device
does not tell its own side which rule the peer broke: the violation shows only as flushed receives.
"""

from __future__ import annotations

import errno
import os
from threading import Lock

from iserblk.errors import (
    Busy,
    ConnectFailed,
    ConnectionLost,
    LocalProtocolError,
    NotSupported,
    RemoteProtocolError,
    TransportError,
)
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.loop.gathering import Gathering
from iserblk.rcap import seam
from iserblk.rcap.verbs import api, memlock, open_pairs, statuses
from iserblk.rcap.verbs.link import REGION, WINDOW, Link
from iserblk.rcap.verbs.memory import Shelf, as_bytes, remote_access
from iserblk.rcap.verbs.pool import PoolChunk, Strip
from iserblk.rcap.verbs.receiving import RECEIVE, Inbox
from iserblk.rcap.verbs.sending import Sender

BATCH = 32  # completions that one ``progress`` takes at most
POOL_BYTES = 128 << 20  # of each pool, at most; registered as needed
LEAST_POOL_BYTES = 1 << 20  # with less a connection is refused
HEADER_STEP = 64 << 10
DRAIN_S = 0.02  # seconds that ``close`` waits for posted requests to leave


def pool_budget(receives: int, receive_size: int) -> int:
    """Bytes that each pool of a new connection may have. Raises NotSupported when the limit on
    locked memory is too small for a connection."""
    left = memlock.lockable()
    if left is None:
        return POOL_BYTES
    other = receives * receive_size + 4 * HEADER_STEP + (1 << 20)  # queues of the device
    problem = memlock.shortage(other + 2 * LEAST_POOL_BYTES, "an RDMA connection")
    if problem is not None:
        raise NotSupported(problem)
    return min(POOL_BYTES, (left - other) // 2)


class VerbsQueuePair:
    """Implements ``seam.QueuePair``. Owns ``link`` from construction on."""

    provider = "verbs"
    max_ulpdu = 0
    inline_size = 8192
    plain_headers = False

    def __init__(self, link: Link, *, receive_size: int, receives: int, budget: int) -> None:
        """Posts ``receives`` receives in advance: the first ``receives`` of ``post_receive`` are
        these. ``budget``: bytes of each pool. The queue pair need not be connected yet; call
        ``connected`` when it is.

        Raises OSError when memory cannot be registered; then ``link`` is closed.
        """
        self._link = link
        self._engine = link.engine
        self._device = link.device
        self.iwarp = link.device.iwarp
        self.mode = WINDOW if link.windows else REGION
        self.can_receive_invalidate = link.windows
        self.solicits = link.device.iwarp  # InfiniBand and RoCE do not oblige receivers to it
        self.ird = 0
        self.ord = 0
        self.peer_private_data = b""
        self.receive_size = receive_size
        self._lock = Lock()
        self._shelf = Shelf(link.register, budget, windows=link.windows, iwarp=link.device.iwarp)
        self._heads = Strip(link.register, 0, HEADER_STEP)
        self._inbox = Inbox(
            link.engine, link.register, size=receive_size, room=link.receive_room, spare=BATCH
        )
        self._sender = Sender(link.engine, self._shelf, link.send_room, iwarp=link.device.iwarp)
        self._peer_invalidates = False
        self._completions: list[seam.Completion] = []
        self._more = False  # there may be completions that no event announces
        self._armed = True  # ``link`` has armed the completion queue
        self._error: TransportError | None = None
        self._refusing = False  # a message was refused; none behind it is delivered
        self._hangup = ""  # the reason that rdma_cm gave for the end of the connection
        self._disconnected = False
        self._closed = False
        self._peer = ""
        self._connected = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bell_lock = Lock()
        self._gathering = Gathering()
        for descriptor in (link.completion_fd, link.channel.fd, self._bell):
            self._gathering.add(descriptor)
        try:
            self._inbox.begin(receives)
        except BaseException:
            self._release()
            raise
        open_pairs.opened(self)

    def connected(self, ird: int, ord: int, private_data: bytes, peer: str) -> None:
        """Note that the connection is established. ``ird``, ``ord``: RDMA Read depths.
        ``private_data``: what the peer sent. ``peer``: its address, for ``describe``."""
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
            "solicits": self.solicits,
            "compiled": api.gaps() is not None,
        }

    def allow_ulpdu(self, size: int) -> None:
        """Does nothing: the device makes its own segments."""

    def limit_reads(self, ird: int, ord: int) -> None:
        """See the seam. What the device refuses is settled when it connects: a lower IRD is only
        noted."""
        if ird > self.ird or ord > self.ord:
            raise LocalProtocolError(f"IRD {ird} and ORD {ord} are more than was agreed on")
        with self._lock:
            self.ird, self.ord = ird, ord
            self._sender.most_reads = ord

    # --- memory ---

    def alloc_headers(self, count: int, size: int) -> list[seam.HeaderSlot]:
        """See the seam. Raises ConnectionLost once the connection has ended, and Busy when the
        memory cannot be registered; the connection goes on then."""
        slots = []
        with self._lock:
            self._check()
            try:
                for index in range(count):
                    view, address, key = self._heads.cut(size, (count - index) * (size + 64))
                    slots.append(seam.HeaderSlot(view, (address, key), index))
            except OSError as error:
                raise Busy(str(self._refused(error))) from None
        return slots

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        """See the seam. The Base Offset is an address. When memory for the buffer can never be
        registered, the connection ends. Raises ConnectionLost after ``close``."""
        buffer = as_bytes(buffer, rights)
        with self._lock:
            if self._closed:
                raise ConnectionLost("the connection is closed")
            if self._error is not None or self._disconnected:
                raise Busy("the connection has ended")
            if self._link.windows and not self._sender.room():
                raise Busy("the device's send queue is full")
            try:
                chunk = self._shelf.take(len(buffer), rights)
                chunk.view[: len(buffer)] = buffer
                stag = chunk.rkey
                if self._link.windows:
                    stag = self._bind(chunk)
            except NotSupported as error:
                self._fail(ConnectionLost(str(error)))
                raise Busy("the connection has ended") from None
            except OSError as error:
                self._fail(self._refused(error))
                raise Busy("the connection has ended") from None
            chunk.buffer = buffer
            chunk.received = self._inbox.received
            self._shelf.show(chunk, stag)
            return stag, chunk.address

    def _bind(self, chunk: PoolChunk) -> int:
        """Prepare the binding of a window. It reaches the device before the requests that are
        posted next. Returns the key. Raises OSError."""
        try:
            if chunk.window is None:
                chunk.window = self._link.make_window()
            return self._engine.bind(
                *self._sender.next(False),
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

    def _unbind(self, chunk: PoolChunk) -> None:
        """End a window that may still be valid, as ``memory`` describes. Raises OSError."""
        self._engine.post()  # the binding itself may not be posted yet
        silent = self._inbox.received == chunk.received
        if self._peer_invalidates or silent or not self._sender.room():
            self._link.close_window(chunk.window)
            chunk.window = None
            self._shelf.give(chunk)
        else:
            self._sender.invalidate(chunk)

    # --- work ---

    def post_receive(self, count: int) -> None:
        with self._lock:
            if not self._closed and self._error is None:
                try:
                    self._inbox.add(count)
                except OSError as error:
                    self._fail(self._refused(error))

    def post(self, requests: list[seam.WorkRequest]) -> None:
        """See the seam. Requests that the device has no room for wait in order."""
        with self._lock:
            self._check()
            if not self.ord and any(request.opcode == seam.RDMA_READ for request in requests):
                raise LocalProtocolError("an RDMA Read, but the ORD of the connection is 0")
            self._sender.requests.extend(requests)
            self._start()
            if self._error is not None:
                raise ConnectionLost(f"the connection has ended: {self._error}")

    def _start(self) -> None:
        """Give the device the requests that it has room for. Lock held."""
        try:
            self._sender.start()
        except NotSupported as error:
            self._fail(ConnectionLost(str(error)))
        except OSError as error:
            self._fail(self._refused(error))

    # --- completions ---

    def progress(self, now: float) -> list[seam.Completion]:
        with self._lock:
            if self._error is None and not self._closed:
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
        """Take completions and rdma_cm events. Lock held."""
        engine = self._engine
        self._inbox.recycle()
        try:
            if self._armed and engine.event():
                self._armed = False
            entries = engine.poll(BATCH)
            if len(entries) < BATCH and not self._armed:
                engine.arm()
                self._armed = True
                # No event announces what completed between poll and arm.
                entries += engine.poll(BATCH - len(entries))
        except OSError as error:
            self._fail(self._refused(error))
            return
        self._more = len(entries) == BATCH
        for entry in entries:
            self._take(entry)
        try:
            self._inbox.settle()
        except OSError as error:
            self._fail(self._refused(error))
        if not entries and self._error is None:
            self._listen()
        if self._disconnected and self._error is None:
            self._fail(ConnectionLost("the connection was ended by this side"))
        if self._sender.requests and self._error is None:
            self._start()

    def _take(self, entry: tuple[int, int, int, int, int, int]) -> None:
        """Handle one work completion. Lock held."""
        number, status, count, flags, key, vendor = entry
        if status:
            if self._error is None:
                receive = bool(number & RECEIVE)
                self._fail(self._verdict(status, receive, vendor))
                # Linux siw goes on to deliver messages behind a bad invalidation.
                self._refusing = receive and status != statuses.FLUSHED
            return
        if not number & RECEIVE:
            self._sender.finish(number, self._completions)
            return
        if self._refusing:
            return
        invalidated = 0
        if flags & api.WC_INVALIDATED:
            chunk = self._shelf.open.get(key)
            if chunk is not None:
                chunk.valid = False
            # One of the two bits has another meaning on some devices.
            if chunk is not None or flags & api.WC_WITH_INV:
                invalidated = key
                self._peer_invalidates = True
        message = self._inbox.take(number, count)
        self._completions.append(seam.Completion(seam.RECEIVE, None, message, invalidated))

    def _verdict(self, code: int, receive: bool, vendor: int) -> TransportError:
        """The error of the connection that follows from a work completion with an error."""
        if code == statuses.FLUSHED:
            # The queue pair had failed before: the peer left, or broke a rule.
            self._listen()
            if self._error is not None:
                return self._error
            if self._device.iwarp or self._disconnected:
                return ConnectionLost("the connection broke, or the peer closed it")
            return RemoteProtocolError(
                "RDMA",
                f"{self._device.name} ended the connection: the peer broke a rule of RDMA, most "
                "likely by access to memory that is not open to it",
            )
        status = statuses.status(code)
        text = f"{status.words} ({self._device.name}: {status.name}, vendor error {vendor:#x})"
        if receive and (status.peer or code == statuses.OPERATION_FAILED):
            # rxe gives OPERATION_FAILED for a message that is larger than its receive.
            return RemoteProtocolError("RDMA", text)
        if status.peer:
            return ConnectionLost(f"the peer's device refused a request of ours: {text}")
        return ConnectionLost(text)

    def _listen(self) -> None:
        """Take the events of rdma_cm. After an event that ends the connection, the error is set
        once the completion queue is empty. Lock held."""
        try:
            while (event := self._link.channel.take()) is not None:
                kind = event.kind
                event.close()
                if kind == statuses.DEVICE_REMOVAL:
                    self._hangup = f"{statuses.event(kind)} ({self._device.name})"
                elif kind in (statuses.DISCONNECTED, statuses.CONNECT_ERROR, statuses.UNREACHABLE):
                    self._hangup = statuses.event(kind)
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
        """The error of a connection that cannot go on because the system refused something."""
        text = f"RDMA device {self._device.name}: {error.strerror or error}"
        if error.errno == errno.ENOMEM:
            text += f"; if that is the locked-memory limit: {memlock.REMEDY}"
        return ConnectionLost(text)

    def _fail(self, error: TransportError) -> None:
        """End the connection: tell the peer, and wake the thread that waits for ``fileno``. Lock
        held."""
        if self._error is None:
            self._error = error
            self._sender.requests.clear()
            self._link.disconnect()
            self._ring()

    def fileno(self) -> int:
        return -1 if self._closed else self._gathering.fileno()

    def wants_write(self) -> bool:
        return False

    def next_deadline(self) -> float | None:
        """0.0, which means at once, while completions or an error wait to be picked up."""
        return 0.0 if self._more or self._completions or self._error is not None else None

    def disconnect(self) -> None:
        self._disconnected = True
        self._ring()

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """See the seam. While the connection is up, waits up to 20 ms for posted requests to
        leave."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connected and self._error is None:
                self._drain()
                self._link.disconnect()
            self._more = False
            open_pairs.closed(self)
            self._release()

    def _drain(self) -> None:
        """Wait until the peer has all posted requests, DRAIN_S at most."""
        try:
            number = self._sender.mark()
            end = monotonic() + DRAIN_S
            while self._sender.finished < number and monotonic() < end:
                for entry in self._engine.poll(BATCH):
                    if entry[1]:
                        return
                    if not entry[0] & RECEIVE:
                        self._sender.finished = max(self._sender.finished, entry[0])
                sleep(DRAIN_S / 100)
        except OSError:
            return  # the connection has ended already

    def _release(self) -> None:
        """Let go of all memory of callers, and close all device objects."""
        self._sender.drop()
        self._completions.clear()
        self._shelf.forget()
        self._gathering.close()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        self._link.close(self._close_memory)

    def _close_memory(self) -> None:
        self._shelf.close()
        self._heads.close()
        self._inbox.close()
