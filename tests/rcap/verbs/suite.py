"""The contract suite's providers over the lab's devices."""

from __future__ import annotations

import os
from typing import Any

from iserblk.rcap.verbs.queuepair import VerbsQueuePair
from tests.contract.conftest import Provider
from tests.rcap.verbs.limits import ALWAYS, REGION, RXE_WINDOW, SIW
from tests.rcap.verbs.pairs import RECEIVES, verbs_pair


def lab_address() -> str:
    """The IP address of this guest's device."""
    return os.environ["LAB_ADDRESS"]


def provider(device: str, mode: str) -> Provider:
    cannot = dict(ALWAYS)
    cannot |= REGION if mode == "region" else {}
    cannot |= SIW if device == "siw" else {}
    cannot |= RXE_WINDOW if device == "rxe" and mode == "window" else {}

    def make(**options: Any) -> tuple[VerbsQueuePair, VerbsQueuePair]:
        return verbs_pair(lab_address(), mode, receives=RECEIVES, **options)

    name = f"verbs-{device}-{mode}"
    return Provider(name, make, codes=False, flow_control=False, cannot=cannot)
