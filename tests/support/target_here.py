"""A target in this process, in the test's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from iserblk.target import server
from iserblk.target.config import TargetConfig
from iserblk.target.ports import parse_listen
from iserblk.target.scsi.device import DeviceServer, LogicalUnit


async def serve(
    listen: str | Sequence[str],
    iqn: str,
    luns: Mapping[int, LogicalUnit],
    ready: Callable[[str], None],
    logout_s: int = 0,
    make_device: server.MakeDevice = DeviceServer,
    watch: server.Watch | None = None,
    **values: Any,
) -> None:
    """As ``server.serve``, with units that the caller owns. ``listen``: as ``--listen`` has it.
    ``make_device``: ``Device`` of a profile (tests/support/profiles). ``watch``: as there.
    ``values``: of TargetConfig.
    It never stays awake, unless they say so."""
    portals = [parse_listen(each) for each in ([listen] if isinstance(listen, str) else listen)]
    config = TargetConfig(iqn, portals, **{"busy_poll_us": 0, **values})
    await server.serve(config, luns, ready, logout_s=logout_s, make_device=make_device, watch=watch)
