"""Keeps 32 reads in flight from one task of trio.

Run it by `python3 examples/trio_queue.py iser://HOST/IQN/LUN`.
"""

import sys

import trio

import iserblk

URL = sys.argv[1]


async def main():
    async with (
        iserblk.aio.open_disks([URL]) as disks,
        iserblk.aio.open_queue(disks.disks["lun0"]) as queue,
    ):
        for index in range(32):
            queue.read(memoryview(bytearray(4096)), 4096 * index, tag=index)
        begun, sizes = 32, {}
        while queue.open:
            for request in await queue.ended():
                if request.error is not None:
                    raise request.error
                sizes[request.tag] = len(request.buffer)
                if begun < 100:  # the buffer is free: use it for the next one
                    queue.read(request.buffer, 4096 * begun, tag=begun)
                    begun += 1
        print(len(sizes), "requests,", sum(sizes.values()), "bytes")


trio.run(main)
