"""In the guest: writes numbered records to PATH, and tells the host of each that is on stable
storage.

    records.py PORT PATH OFFSET

Record n is the block of 512 bytes at OFFSET + 512 n of PATH; PORT is a virtio port, which gets a
line with n after the fsync of record n. A later run goes on behind the records that are there. Ends
with an error when a record cannot be written.
"""

import itertools
import os
import sys
import time

BLOCK = 512
PAUSE_S = 0.2


def record(number: int) -> bytes:
    """Record ``number``; its number is all over it."""
    return f"{number:015}\n".encode() * (BLOCK // 16)


def main(port: str, path: str, offset: int) -> None:
    told = os.open(port, os.O_WRONLY)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    number = 0
    while os.pread(file, BLOCK, offset + BLOCK * number) == record(number):
        number += 1
    print(f"going on with record {number}", flush=True)
    for each in itertools.count(number):
        if os.pwrite(file, record(each), offset + BLOCK * each) != BLOCK:
            raise OSError("written in part")
        os.fsync(file)
        os.write(told, f"{each}\n".encode())
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
