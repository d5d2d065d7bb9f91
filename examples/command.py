"""Sends SCSI commands of its own: INQUIRY, and a READ (10) beyond the end.

Run it by `python3 examples/command.py iser://HOST/IQN/LUN`.
"""

import sys

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL]) as disks:
    disk = disks.disks["lun0"]
    answer = bytearray(96)
    result = disk.command(bytes([0x12, 0, 0, 0, 96, 0]), answer)  # INQUIRY
    print(result, result.residual, answer[8:16])
    result = disk.command(bytes([0x28, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 1, 0]), bytearray(512))
    print(result.status, hex(result.decoded.key), result)
