"""Work requests and completions, in two forms with one behaviour.

``_gaps.Engine``, compiled by scripts/setup, fills arrays of C structures and gives a batch to the
device in one call; ``PlainEngine`` here does with pyverbs' own objects what pyverbs can: no memory
windows, as nothing updates their keys, and several objects per request.

A completion is a tuple: (request number, status, bytes, flags, invalidated key, vendor error).
"""

from __future__ import annotations

from typing import Any, Protocol

from iserblk.errors import NotSupported
from iserblk.rcap.verbs import api

Entry = tuple[int, int, int, int, int, int]


class Engine(Protocol):
    """One queue pair's work. OSError from ``post``, ``post_receives`` and ``poll`` is fatal."""

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
        """Prepare a Send or a transfer of up to two pieces; a length of 0 is no piece."""
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
        """Prepare the binding of a window; returns the key that it will have."""
        ...

    def invalidate(self, number: int, flags: int, key: int) -> None:
        """Prepare a local invalidation. Never of a key that is invalid already: rxe panics."""
        ...

    def post(self) -> None:
        """Give what was prepared to the device."""
        ...

    def receive(self, number: int, address: int, length: int, key: int) -> None:
        """Prepare a receive."""
        ...

    def post_receives(self) -> None: ...

    def poll(self, limit: int) -> list[Entry]: ...

    def event(self) -> bool:
        """Take a completion event from the channel if there is one. Never blocks."""
        ...

    def arm(self) -> None:
        """Ask for an event with the next completion."""
        ...


class PlainEngine:
    """Implements Engine with pyverbs' objects. ``empty``: (address, key) of any registered memory:
    pyverbs wants at least one piece in every request."""

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
        for piece in pieces:  # copied: what is not closed is never freed
            piece.close()
        if opcode == api.WR_SEND_WITH_INV:
            request.imm_data = stag  # one union in C
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
        "run scripts/setup"
    )
