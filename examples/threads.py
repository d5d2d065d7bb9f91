"""Writes to a disk and reads it back, from a thread.

Run it by `python3 examples/threads.py iser://HOST/IQN/LUN`. What the disk has there is
lost.
"""

import sys

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL]) as disks:
    disk = disks.disks["lun0"]
    disk.write(memoryview(b"data" * 128), 0)
    disk.flush()
    buffer = bytearray(512)
    disk.read_into(memoryview(buffer), 0)
    print(disk.size, disk.info.block_size, buffer[:8])
