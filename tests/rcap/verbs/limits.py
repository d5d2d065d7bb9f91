"""Tests of the contract suite that devices, or some of them, cannot pass: with the reasons."""

from __future__ import annotations

ALWAYS = {
    "solicited": "a work completion does not tell whether the message was solicited",
    "exact private data": "connection management pads private data with zeros",
    "seen reads": "the device answers RDMA Reads without telling the program",
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
SIW = {
    "blame": "siw does not tell whether the peer broke a rule or left",
    "read rights": "Linux siw answers RDMA Reads from regions without the right to be read",
    "reads in turn": "Linux siw looks up what an RDMA Read asks for in the thread that answers it, "
    "and takes what follows meanwhile",
}


# Of a faultless device, by mode.
DEVICES_CANNOT = {"region": ALWAYS | REGION, "window": ALWAYS}
