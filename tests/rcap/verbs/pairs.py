"""Connected queue pairs over a real device, both ends in this process; for tests in the lab."""

from __future__ import annotations

import select
from time import monotonic

from iserblk.rcap.verbs.connecting import VerbsConnector, VerbsListener
from iserblk.rcap.verbs.queuepair import VerbsQueuePair
from tests.rcap.verbs.fake import bind_at_once

PATIENCE_S = 30.0
RECEIVES = 16


def verbs_pair(
    address: str,
    mode: str,
    *,
    ird: int = 64,
    ord: int = 64,
    receive_size: int = 8268,
    private_data: tuple[bytes, bytes] = (b"", b""),
    receives: int = RECEIVES,
) -> tuple[VerbsQueuePair, VerbsQueuePair]:
    """The connecting and the listening end. One depth of RDMA Reads holds both ways."""
    depth = min(ird, ord)
    listener = VerbsListener(
        address,
        0,
        receive_size=receive_size,
        receives=receives,
        ird=depth,
        reply=lambda _data: private_data[1],
        mode=mode,
    )
    try:
        connector = VerbsConnector(
            address,
            listener.port,
            private_data=private_data[0],
            receive_size=receive_size,
            receives=receives,
            ird=depth,
            mode=mode,
            timeout=PATIENCE_S,
        )
        first: VerbsQueuePair | None = None
        second: VerbsQueuePair | None = None
        end = monotonic() + PATIENCE_S
        while (first is None or second is None) and monotonic() < end:
            waiting = [listener] if first is not None else [listener, connector]
            select.select(waiting, [], [], 1)  # type: ignore[type-var]
            if first is None:
                first = connector.progress(monotonic())
            for qp in listener.progress(monotonic()):
                second = qp
        assert first is not None and second is not None, "not connected"
        connector.close()
    finally:
        listener.close()
    if mode == "window":
        for qp in (first, second):
            bind_at_once(qp)
    return first, second
