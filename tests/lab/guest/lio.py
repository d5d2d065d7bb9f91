"""LIO's target portal group, taken away from its initiators and given back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.lab.guest.attached import run

_WAIT_S = 60.0


def _group() -> Path:
    return Path(os.environ["LAB_TPG"])


def _portal() -> Path:
    return _group() / "np" / f"{os.environ['LAB_ADDRESS']}:{os.environ['LAB_PORT']}"


def disable() -> None:
    """Ends its sessions; nobody listens any more."""
    (_group() / "enable").write_text("0")


def enable() -> None:
    (_group() / "enable").write_text("1")


def remove_portal() -> None:
    """Nobody listens there any more. Sessions stay."""
    _portal().rmdir()


def add_portal() -> None:
    """As the set-up made it."""
    if Path("/run/netns/lio").exists():
        run("nsenter", "--net=/run/netns/lio", "mkdir", _portal())
        (_portal() / "iser").write_text("1")
    else:
        _portal().mkdir()


def reservation() -> str:
    """Who holds the first LUN, in LIO's words."""
    return (_group().parents[2] / "core/fileio_0/disk0/pr/res_holder").read_text()


def rdma_objects() -> dict[str, int]:
    """How many there are on the device; of connection ids those of processes only: LIO keeps the id
    of each request that it refused because its portal had just been made (seen with ``rdma
    resource show cm_id``: one for each "refused by the target"). Without contexts and completion
    queues: one and two of them stayed when the first connection had ended, and no more after later
    ones. Most likely they are librdmacm's and the kernel's; that was not traced."""
    device = os.environ["LAB_DEVICE"]
    words = run("rdma", "resource", "show", device).split(":", 2)[2].split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    ids = run("rdma", "resource", "show", "cm_id", "link", device).splitlines()
    counts["cm_id"] = sum(" pid " in line for line in ids)
    return {name: counts[name] for name in ("pd", "qp", "cm_id", "mr")}


def settled(
    expected: dict[str, int], count: Callable[[], dict[str, int]] = rdma_objects
) -> dict[str, int]:
    """What is counted, once it is as ``expected`` or will not be."""
    deadline = time.monotonic() + _WAIT_S
    while (found := count()) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
