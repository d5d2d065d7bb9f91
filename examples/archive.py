"""Writes a tar archive on a disk, and reads it, by a file object.

Run it by `python3 examples/archive.py iser://HOST/IQN/LUN`. What the disk has there is
lost.
"""

import io
import sys
import tarfile

import iserblk

URL = sys.argv[1]

with iserblk.open_disks([URL]) as disks:
    disk = disks.disks["lun0"]
    with disk.open("wb") as file, tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("hello")
        member.size = 5
        archive.addfile(member, io.BytesIO(b"world"))
    with disk.open() as file, tarfile.open(fileobj=file) as archive:
        print(archive.getnames(), archive.extractfile("hello").read())
