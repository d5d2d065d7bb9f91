"""RDMA devices that are not there: the two faces of the verbs provider over the in-process pair.

A ``Fabric`` joins the initiator's connectors and the target's listeners of one process. What a
device can do to a connection is set on it; what was asked of it is kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from iserblk.errors import ConnectFailed, IserblkError, NotSupported
from iserblk.initiator.connecting.iwarp import Address
from iserblk.rcap.inprocess import MemoryQueuePair, Message
from iserblk.rcap.seam import HeaderSlot


class Device(MemoryQueuePair):
    """An in-process queue pair that says it belongs to an RDMA device."""

    provider = "verbs"
    has_memory = True

    def __init__(self, said_by_peer: bytes, windows: bool, receives: int, depth: int) -> None:
        super().__init__(
            ird=depth, ord=depth, private_data=said_by_peer, receive_size=8268, solicits=False
        )
        self.can_receive_invalidate = windows
        super().post_receive(receives)
        self._advance = receives

    def alloc_headers(self, count: int, size: int) -> list[HeaderSlot]:
        if not self.has_memory:
            raise NotSupported("no registered memory")
        return super().alloc_headers(count, size)

    def post_receive(self, count: int) -> None:
        """Post receives; as many as were posted in advance are counted off first."""
        ahead = min(count, self._advance)
        self._advance -= ahead
        super().post_receive(count - ahead)

    def describe(self) -> dict[str, object]:
        mode = "window" if self.can_receive_invalidate else "region"
        return {**super().describe(), "device": "fake0", "mode": mode, "transport": "RoCE"}


class Step:
    """A connection or probe under way; ``result`` is called when ``ready`` turns have passed."""

    device = "fake0"

    def __init__(self, fabric: Fabric, result: Callable[[], object]) -> None:
        self._fabric = fabric
        self._result = result
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._turns = fabric.turns
        fabric.open += 1

    def fileno(self) -> int:
        if not self._fabric.silent:
            os.eventfd_write(self._bell, 1)
        return self._bell

    def progress(self, now: float) -> object | None:
        if self._fabric.silent or self._turns:
            self._turns -= 1
            return None
        return self._result()

    def close(self) -> None:
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
            self._fabric.open -= 1


class Fabric:
    """``missing``: what ``available`` says. ``intercept``: sees every message of both ends.
    ``routes``: whether the device leads anywhere. ``error``: what connecting ends with. ``silent``:
    nothing ever answers. ``windows``: the device has memory windows. ``has_memory``: the
    initiator's device can register memory for headers. ``log``: what was asked of it."""

    def __init__(self) -> None:
        self.missing: str | None = None
        self.routes = True
        self.error: IserblkError | None = None
        self.silent = False
        self.windows = True
        self.has_memory = True
        self.intercept: Callable[[Message], bool] | None = None
        self.turns = 2
        self.open = 0  # steps that were not closed
        self.log: list[tuple[object, ...]] = []
        self.pairs: list[tuple[Device, Device]] = []
        self.listeners: dict[int, FakeListener] = {}

    # -- as the initiator's Provider --------------------------------------------------------------

    def available(self) -> str | None:
        return self.missing

    def probe(self, address: Address) -> Step:
        self.log.append(("probe", address.sockaddr[0]))
        return Step(self, lambda: (True, "fake0") if self.routes else (False, "no such device"))

    def connector(
        self,
        address: Address,
        *,
        private_data: Callable[[bool], bytes],
        receives: int,
        ird: int,
        patience: float,
    ) -> Step:
        self.log.append(("connect", address.sockaddr[0]))

        def join() -> object:
            listener = self.listeners.get(address.sockaddr[1])
            if self.error is not None:
                raise self.error
            if listener is None:
                raise ConnectFailed("rejected: nobody listens there by rdma_cm")
            said = private_data(self.windows)
            padded = said + bytes(52)  # as InfiniBand's connection management does
            ours = Device(listener.reply(padded), self.windows, receives, ird)
            theirs = Device(padded, self.windows, listener.receives, ird)
            ours.peer, theirs.peer = theirs, ours
            ours.intercept = theirs.intercept = self.intercept
            ours.has_memory = self.has_memory
            self.pairs.append((ours, theirs))
            if not listener.deaf:
                listener.arrived.append(theirs)
                os.eventfd_write(listener.bell, 1)
            return ours

        return Step(self, join)

    # -- as the target's ----------------------------------------------------------------------

    def listener(
        self,
        host: str,
        port: int,
        *,
        receive_size: int,
        receives: int,
        ird: int,
        reply: Callable[[bytes], bytes],
    ) -> FakeListener:
        self.log.append(("listen", host, port))
        if self.error is not None:
            raise self.error
        return FakeListener(self, port, receives, reply)


class FakeListener:
    """``deaf``: connections are made, and nobody takes them."""

    deaf = False

    def __init__(
        self, fabric: Fabric, port: int, receives: int, reply: Callable[[bytes], bytes]
    ) -> None:
        self._fabric = fabric
        self.port = port
        self.receives = receives
        self.reply = reply
        self.arrived: list[Device] = []
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        fabric.listeners[port] = self

    def fileno(self) -> int:
        return self.bell

    def progress(self, now: float) -> list[Device]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        arrived, self.arrived = self.arrived, []
        return arrived

    def close(self) -> None:
        os.close(self.bell)
        self._fabric.listeners.pop(self.port, None)
