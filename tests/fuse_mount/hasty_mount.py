"""``python3 -m tests.fuse_mount.hasty_mount``: fuse_mount, which gives up a target that is away at
once where its end is asked for, and asks for that often."""

from __future__ import annotations

import sys

from fuse_mount.__main__ import main
from iserblk.initiator.session import ending
from iserblk.loop import stopping

if __name__ == "__main__":
    vars(ending)["AWAY_S"] = 0.5
    stopping.LOOK_S = 0.05
    sys.exit(main())
