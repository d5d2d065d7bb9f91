"""Disks for trio: short names for ``iserblk.disk.aio`` and ``iserblk.disk.request_queue``."""

from iserblk.disk.aio import open_disks as open_disks  # noqa: PLC0414 (for mypy, too)
from iserblk.disk.request_queue import open_queue as open_queue  # noqa: PLC0414
