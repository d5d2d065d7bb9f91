"""Writes a ZIP archive into a part of a disk, and reads it.

Run it by `python3 examples/part.py iser://HOST/IQN/LUN`. What the disk has there is
lost.
"""

import sys
import zipfile

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL]) as disks:
    disk = disks.disks["lun0"]
    with disk.open("r+b", offset=1 << 20) as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("hello", "world")
        length = file.tell()
    with disk.open(offset=1 << 20, length=length) as file, zipfile.ZipFile(file) as archive:
        print(archive.read("hello"))
