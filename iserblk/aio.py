"""trio's face of a disk: short names for ``iserblk.disk.aio`` and ``iserblk.disk.request_queue``.

For programs that run in trio's loop. ``iserblk.open_disks`` is the face for threads,
``iserblk.asyncio`` that for asyncio.
"""

from iserblk.disk.aio import open_disks as open_disks  # noqa: PLC0414 (for mypy, too)
from iserblk.disk.request_queue import open_queue as open_queue  # noqa: PLC0414
