"""Engines post work requests to the device and poll completions. There are two implementations.

``_gaps.Engine``, compiled by scripts/setup, fills arrays of C structures and gives a batch to the
device in one call. ``PlainEngine`` in this module uses only the objects of pyverbs: it makes
several of them for each request, and has no memory windows, because pyverbs cannot update their
keys.

A completion is a tuple: (request number, status, bytes, flags, invalidated key, vendor error).
"""

from __future__ import annotations

from typing import Any, Protocol

from iserblk.errors import NotSupported
from iserblk.installation import no_gaps
from iserblk.rcap.verbs import api

Entry = tuple[int, int, int, int, int, int]


class Engine(Protocol):
    """The work requests and completions of one queue pair.

    ``number`` is chosen by the caller and comes back in the completion. Lengths are bytes of
    registered memory. An OSError is fatal: the queue pair cannot be used any more."""

    def send(
        self,
        number: int,
        opcode: int,
        flags: int,
        stag: int,
        to: int,
        address1: int,
        length1: int,
        key1: int,
        address2: int,
        length2: int,
        key2: int,
    ) -> None:
        """Prepare a Send, RDMA Write or RDMA Read of up to two pieces; length 0 means no piece."""
        ...

    def bind(
        self,
        number: int,
        flags: int,
        window: Any,
        region: Any,
        address: int,
        length: int,
        access: int,
    ) -> int:
        """Prepare the binding of a window; returns the key that the window will have."""
        ...

    def invalidate(self, number: int, flags: int, key: int) -> None:
        """Prepare a local invalidation. The key must still be valid: otherwise rxe panics."""
        ...

    def post(self) -> None:
        """Give the prepared requests to the device."""
        ...

    def receive(self, number: int, address: int, length: int, key: int) -> None:
        """Prepare a receive."""
        ...

    def post_receives(self) -> None:
        """Give the prepared receives to the device."""
        ...

    def poll(self, limit: int) -> list[Entry]:
        """Take up to ``limit`` completions. Never blocks."""
        ...

    def event(self) -> bool:
        """Take a completion event from the channel; False when there is none. Never blocks."""
        ...

    def arm(self) -> None:
        """Ask for an event with the next completion."""
        ...


class PlainEngine:
    """Implements Engine with the objects of pyverbs. ``empty``: (address, key) of any registered
    memory, because pyverbs wants at least one piece in every request."""

    def __init__(self, qp: Any, cq: Any, channel: Any, empty: tuple[int, int]) -> None:
        self._qp = qp
        self._cq = cq
        self._channel = channel
        self._empty = empty
        self._wr = api.pyverbs("wr")
        self._error: type[Exception] = api.pyverbs("pyverbs_error").PyverbsRDMAError
        self._sends: list[Any] = []
        self._receives: list[Any] = []
        self._events = 0

    def send(
        self,
        number: int,
        opcode: int,
        flags: int,
        stag: int,
        to: int,
        address1: int,
        length1: int,
        key1: int,
        address2: int,
        length2: int,
        key2: int,
    ) -> None:
        pieces = [
            self._wr.SGE(address, length, key)
            for address, length, key in ((address1, length1, key1), (address2, length2, key2))
            if length
        ] or [self._wr.SGE(self._empty[0], 0, self._empty[1])]
        request = self._wr.SendWR(
            wr_id=number, opcode=opcode, num_sge=len(pieces), sg=pieces, send_flags=flags
        )
        for piece in pieces:  # pyverbs has copied them, and frees only what is closed
            piece.close()
        if opcode == api.WR_SEND_WITH_INV:
            request.imm_data = stag  # in C, a union with the key to invalidate
        elif opcode != api.WR_SEND:
            request.set_wr_rdma(stag, to)
        self._sends.append(request)

    def bind(
        self,
        number: int,
        flags: int,
        window: Any,
        region: Any,
        address: int,
        length: int,
        access: int,
    ) -> int:
        raise _no_windows()

    def invalidate(self, number: int, flags: int, key: int) -> None:
        raise _no_windows()

    def post(self) -> None:
        requests, self._sends = self._sends, []
        try:
            for request in requests:
                self._qp.post_send(request)
        except self._error as error:
            raise _os_error(error) from None
        finally:
            for request in requests:
                request.close()

    def receive(self, number: int, address: int, length: int, key: int) -> None:
        piece = self._wr.SGE(address, length, key)
        self._receives.append(self._wr.RecvWR(wr_id=number, num_sge=1, sg=[piece]))
        piece.close()

    def post_receives(self) -> None:
        requests, self._receives = self._receives, []
        try:
            for request in requests:
                self._qp.post_recv(request)
        except self._error as error:
            raise _os_error(error) from None
        finally:
            for request in requests:
                request.close()

    def poll(self, limit: int) -> list[Entry]:
        try:
            _, entries = self._cq.poll(limit)
        except self._error as error:
            raise _os_error(error) from None
        return [
            (
                entry.wr_id,
                entry.status,
                entry.byte_len,
                entry.wc_flags,
                entry.imm_data,
                entry.vendor_err,
            )
            for entry in entries
        ]

    def event(self) -> bool:
        try:
            self._channel.get_cq_event(self._cq)
        except self._error:
            return False  # EAGAIN: the descriptor is non-blocking
        self._cq.ack_events(1)
        return True

    def arm(self) -> None:
        self._cq.req_notify(False)


def _os_error(error: Any) -> OSError:
    number = getattr(error, "error_code", None) or 5
    return OSError(number, api.error_words(error))


def _no_windows() -> NotSupported:
    return NotSupported(
        "memory windows need the compiled part of iserblk (pyverbs cannot update their keys): "
        + no_gaps()
    )
