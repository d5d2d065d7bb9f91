"""Empties a part of a thin LUN, and lists its holes.

Run it by `python3 examples/extents.py iser://HOST/IQN/LUN`. What the disk has there is
lost.
"""

import sys

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL], {"io_timeout": "60"}) as disks:
    disk = disks.disks["lun0"]
    disk.zero(0, 1 << 20, may_trim=True)
    for offset, length, flags in disk.extents(0, 1 << 20):
        print(offset, length, "hole" if flags else "data")
