"""RDMA Reads under way, in both directions: what the receive and the send side share.

Each deque has one side that appends and one that pops, so no lock is needed (deque operations are
atomic): ``OutstandingRead``s are appended by the send side when the request is framed and popped by
the receive side; ``ReadResponse``s the other way round.
"""

from __future__ import annotations

from iserblk.rcap.stags import NOTHING, Region

# Token of an RDMA Read that is the RTR indication of RFC 6581: it completes for nobody.
RTR_TOKEN = object()


class ReadResponse:
    """A Read Response that the peer asked for.

    ``view``: the source, a piece of ``region``'s memory until ``detach``.
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
        """Answer from a copy, taken now: the owner of the memory wants it back."""
        self.view = memoryview(bytes(self.view))
        self.region = None


class OutstandingRead:
    """An RDMA Read of ours whose response is awaited; ``placed`` bytes of it have come."""

    __slots__ = ("length", "placed", "sink", "stag", "token")

    def __init__(self, stag: int, sink: memoryview | None, token: object) -> None:
        self.stag = stag
        self.sink = NOTHING if sink is None else sink
        self.length = len(self.sink)
        self.placed = 0
        self.token = token
