"""The outages: what happens to the target, and for how long it is away; and the targets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """``away_s``: from the beginning of the outage until the target can be reached again.

    ``cut``: no packet passes meanwhile. ``down``: the target's configuration is taken down, as by a
    stop of its service, and made again. ``lost``: its disks have lost what was not flushed.
    ``moved``: it comes back on another address, to which its name leads then.
    """

    name: str
    about: str
    away_s: int
    cut: bool = False
    down: bool = False
    lost: bool = False
    moved: bool = False


CASES = {
    case.name: case
    for case in (
        Case("network", "the network is cut for two minutes", 120, cut=True),
        Case("longer", "the network is cut for two and a half minutes", 150, cut=True),
        Case(
            "reboot",
            "the target's machine loses its power, and its cache, for two minutes",
            120,
            cut=True,
            down=True,
            lost=True,
        ),
        Case("restart", "the target's service is restarted: away for 20 seconds", 20, down=True),
        Case(
            "moved",
            "the target comes back after 20 seconds on another portal, under its old name",
            20,
            down=True,
            moved=True,
        ),
    )
}

# The name of each at scripts/peers; "": it is part of the kernel.
TARGETS = {"LIO": "", "tgtd": "tgt", "istgt": "istgt"}
