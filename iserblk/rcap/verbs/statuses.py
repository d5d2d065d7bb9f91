"""Texts for the statuses of devices and the events of rdma_cm, with the remedy where one exists.

Sources: ibv_poll_cq(3), rdma_get_cm_event(3), InfiniBand Architecture volume 1 section 12.6.7.2
(reject reasons).
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Status(NamedTuple):
    """One work completion status. ``peer``: the peer broke a rule, or reported that we did."""

    name: str
    words: str
    peer: bool = False


OPERATION_FAILED = 2
FLUSHED = 5
RNR_EXCEEDED = 13

WC_STATUS = {
    0: Status("SUCCESS", "done"),
    1: Status("LOC_LEN_ERR", "a message was larger than the receive posted for it", True),
    2: Status("LOC_QP_OP_ERR", "the device could not execute a work request"),
    3: Status("LOC_EEC_OP_ERR", "the device could not execute a work request"),
    4: Status("LOC_PROT_ERR", "a work request named memory that is not registered for it"),
    5: Status("WR_FLUSH_ERR", "the queue pair had failed, its work was flushed"),
    6: Status("MW_BIND_ERR", "a memory window could not be bound"),
    7: Status("BAD_RESP_ERR", "the peer answered with a packet that makes no sense", True),
    8: Status("LOC_ACCESS_ERR", "the peer's access to our memory was refused", True),
    9: Status(
        "REM_INV_REQ_ERR",
        "an invalid request: one that the receiver has no room, no memory window or no rights for",
        True,
    ),
    10: Status(
        "REM_ACCESS_ERR",
        "an access to memory that is not, or no longer, open to the requester",
        True,
    ),
    11: Status("REM_OP_ERR", "the peer's device could not execute an operation"),
    12: Status(
        "RETRY_EXC_ERR",
        "the peer no longer acknowledges: is the peer down, or the network on the way?",
    ),
    13: Status("RNR_RETRY_EXC_ERR", "the peer had no receive posted for a message"),
    14: Status("LOC_RDD_VIOL_ERR", "reliable datagram domain violation"),
    15: Status("REM_INV_RD_REQ_ERR", "invalid reliable datagram request", True),
    16: Status("REM_ABORT_ERR", "the peer aborted the operation"),
    17: Status("INV_EECN_ERR", "invalid end-to-end context number"),
    18: Status("INV_EEC_STATE_ERR", "invalid end-to-end context state"),
    19: Status("FATAL_ERR", "the device failed"),
    20: Status("RESP_TIMEOUT_ERR", "the peer's device did not respond in time"),
    21: Status("GENERAL_ERR", "transport error"),
}


def status(code: int) -> Status:
    """The Status of ``code``. Accepts any number."""
    return WC_STATUS.get(code) or Status(f"status {code}", "unknown work completion status")


# rdma_cm_event_type
ADDR_RESOLVED = 0
ADDR_ERROR = 1
ROUTE_RESOLVED = 2
ROUTE_ERROR = 3
CONNECT_REQUEST = 4
CONNECT_RESPONSE = 5
CONNECT_ERROR = 6
UNREACHABLE = 7
REJECTED = 8
ESTABLISHED = 9
DISCONNECTED = 10
DEVICE_REMOVAL = 11
MULTICAST_JOIN = 12
MULTICAST_ERROR = 13
ADDR_CHANGE = 14
TIMEWAIT_EXIT = 15

CM_EVENT = {
    ADDR_RESOLVED: "address resolved",
    ADDR_ERROR: "no RDMA device leads to the address, or no host there answers ARP",
    ROUTE_RESOLVED: "route resolved",
    ROUTE_ERROR: "no route: is a subnet manager running?",
    CONNECT_REQUEST: "connection request",
    CONNECT_RESPONSE: "connection response",
    CONNECT_ERROR: "the connection could not be set up",
    UNREACHABLE: "the address cannot be reached, or the portal does not answer",
    REJECTED: "the portal rejected the connection",
    ESTABLISHED: "established",
    DISCONNECTED: "the peer closed the connection",
    DEVICE_REMOVAL: "the RDMA device was removed",
    MULTICAST_JOIN: "multicast group joined",
    MULTICAST_ERROR: "multicast group could not be joined",
    ADDR_CHANGE: "the address moved to another device",
    TIMEWAIT_EXIT: "the connection has ended",
}

# Reasons in an InfiniBand CM REJ message; rdma_cm reports them as a positive status.
REJECT_REASON = {
    1: "no queue pair available there",
    2: "no end-to-end context available there",
    3: "no resources available there",
    4: "it timed out there",
    5: "unsupported request",
    6: "invalid communication ID",
    7: "invalid communication instance",
    8: "no program listens on that port: is the portal up, and does it speak iSER?",
    9: "invalid transport service type",
    10: "stale connection: try again in a minute",
    11: "RDC does not exist",
    12: "primary GID rejected",
    13: "primary LID rejected",
    14: "invalid primary service level",
    15: "invalid primary traffic class",
    16: "invalid primary hop limit",
    17: "invalid primary packet rate",
    24: "it redirects connections to another port",
    28: "refused by the target",
    30: "duplicate local communication ID",
}
CONSUMER_REJECT = 28


def event(kind: int) -> str:
    """An rdma_cm event in words. Accepts any number."""
    return CM_EVENT.get(kind) or f"rdma_cm event {kind}"


def failure(kind: int, code: int) -> str:
    """The text for an rdma_cm event that ends an attempt to connect. ``code``: its status, 0 when
    unknown; a positive status is a reject reason, a negative one an error number."""
    words = event(kind)
    if kind == REJECTED and code > 0:
        return f"{words}: {REJECT_REASON.get(code) or f'reason {code}'}"
    if code < 0:
        return f"{words} ({os.strerror(-code)})"
    return words
