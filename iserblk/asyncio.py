"""asyncio's face of a disk: a short name for ``iserblk.disk.asyncio``."""

from iserblk.disk.asyncio import open_disks as open_disks  # noqa: PLC0414 (for mypy, too)
