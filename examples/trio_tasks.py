"""Reads 64 blocks at the same time, with a task of trio for each.

Run it by `python3 examples/trio_tasks.py iser://HOST/IQN/LUN`.
"""

import sys

import trio

import iserblk

URL = sys.argv[1]


async def main():
    async with iserblk.aio.open_disks([URL]) as disks:
        disk = disks.disks["lun0"]
        buffers = [bytearray(4096) for _ in range(64)]
        async with trio.open_nursery() as nursery:
            for index, buffer in enumerate(buffers):
                nursery.start_soon(disk.read_into, memoryview(buffer), 4096 * index)
        print(sum(map(len, buffers)), "bytes")


trio.run(main)
