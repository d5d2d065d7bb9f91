"""Disks for trio: a short name for ``iserblk.disk.aio``."""

from iserblk.disk.aio import open_disks as open_disks  # noqa: PLC0414 (for mypy, too)
