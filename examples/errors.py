"""Tells two errors apart: a wrong call, and a target that does not exist.

Run it by `python3 examples/errors.py iser://HOST/IQN/LUN`.
"""

import sys

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL]) as disks:
    disk = disks.disks["lun0"]
    try:
        disk.read_into(memoryview(bytearray(512)), disk.size)
    except iserblk.OutOfRange as error:
        print(error)
    try:
        iserblk.open_disks([URL.rpartition("/")[0] + "x/0"])
    except iserblk.TargetNotFound as error:
        print(type(error).__name__, error.errno)
