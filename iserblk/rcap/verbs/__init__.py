"""Queue pairs of RDMA devices (InfiniBand, RoCE, iWARP adapters) through rdma_cm and pyverbs.

This module does not import pyverbs. ``available`` tells whether pyverbs and a device can be used.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from iserblk.installation import no_pyverbs

CM_DEVICE = "/dev/infiniband/rdma_cm"
DEVICES = Path("/sys/class/infiniband")
VERBS_DEVICES = Path("/dev/infiniband")


def available() -> str | None:
    """None when RDMA devices can be used on this host, else one line that says why not.

    Cheap: opens nothing. ``connecting.RouteProbe`` finds out whether a device leads to an address.
    """
    # Each connection asks. Most hosts have no device: there no module is looked for, which takes
    # system calls for each directory of Python's path.
    try:
        devices = os.listdir(DEVICES)
    except OSError:
        devices = []
    if not devices:
        return "no RDMA device (none in /sys/class/infiniband)"
    if importlib.util.find_spec("pyverbs") is None:
        return f"pyverbs is not installed ({no_pyverbs()})"
    if not os.path.exists(CM_DEVICE):
        return f"no {CM_DEVICE}: run modprobe rdma_ucm"
    users = [CM_DEVICE, *map(str, VERBS_DEVICES.glob("uverbs*"))]
    if len(users) == 1:
        return f"no {VERBS_DEVICES}/uverbs*: run modprobe ib_uverbs"
    for path in users[:2]:
        if not os.access(path, os.R_OK | os.W_OK):
            return f"no permission on {path}: run as root, or give a group access (a udev rule)"
    return None
