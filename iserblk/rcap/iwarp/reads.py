"""RDMA Reads under way, in both directions: the objects that receive side and send side share.

They lie in two deques. For each, one side appends and the other side pops. The send side appends
an ``OutstandingRead`` when it frames the request, and the receive side pops it. With
``ReadResponse`` it is the other way round.
"""

from __future__ import annotations

from typing import Final

from iserblk.rcap.stags import NOTHING, Region

# Token of the request that is the RTR indication of RFC 6581: the caller sees no completion of it.
RTR_TOKEN: Final = object()


class ReadResponse:
    """A Read Response that the peer asked for.

    ``view``: the source, a piece of the memory of ``region`` until ``detach``.
    """

    __slots__ = ("region", "sink_stag", "sink_to", "size", "view")

    def __init__(
        self, sink_stag: int, sink_to: int, view: memoryview, region: Region | None
    ) -> None:
        self.sink_stag = sink_stag
        self.sink_to = sink_to
        self.size = len(view)
        self.view = view
        self.region = region

    def detach(self) -> None:
        """Copy the source now and answer from the copy: the owner of the memory wants it back."""
        self.view = memoryview(bytes(self.view))
        self.region = None


class OutstandingRead:
    """An RDMA Read of ours that has no complete response yet; ``placed`` bytes have come."""

    __slots__ = ("length", "placed", "sink", "stag", "token")

    def __init__(self, stag: int, sink: memoryview | None, token: object) -> None:
        self.stag = stag
        self.sink = NOTHING if sink is None else sink
        self.length = len(self.sink)
        self.placed = 0
        self.token = token
