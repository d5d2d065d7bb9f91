"""The contract suite's providers over real devices, and what no device, or not this one, can do."""

from __future__ import annotations

import os
from typing import Any

from iserblk.rcap.verbs.queuepair import VerbsQueuePair
from tests.contract.conftest import Provider
from tests.rcap.verbs.pairs import RECEIVES, verbs_pair

ALWAYS = {
    "solicited": "a work completion does not tell whether the message was solicited",
    "exact private data": "connection management pads private data with zeros",
    "seen reads": "the device answers RDMA Reads, and tells nobody",
    "missing receive": "the sender is told, not the receiver, and it is patient",
}
REGION = {
    "invalidate": "there is no Send with Invalidate towards plain memory regions",
    "fresh stags": "a region keeps its key: what is retired stays in its chunk, unused",
    "exact bounds": "a region is a chunk: its bounds are those of a power of two",
}
RXE_WINDOW = {
    "exact bounds": "Linux rxe checks against the region behind a window, not the window",
    "second invalidation": "Linux rxe panics when a window is invalidated twice",
}


def lab_address() -> str:
    """Where the device of this guest is."""
    return os.environ["LAB_ADDRESS"]


def provider(device: str, mode: str) -> Provider:
    cannot = dict(ALWAYS)
    cannot |= REGION if mode == "region" else {}
    cannot |= RXE_WINDOW if device == "rxe" and mode == "window" else {}

    def make(**options: Any) -> tuple[VerbsQueuePair, VerbsQueuePair]:
        return verbs_pair(lab_address(), mode, receives=RECEIVES, **options)

    name = f"verbs-{device}-{mode}"
    return Provider(name, make, codes=False, flow_control=False, cannot=cannot)
