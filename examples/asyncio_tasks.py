"""Writes 64 blocks at the same time from asyncio, and reads the last one.

Run it by `python3 examples/asyncio_tasks.py iser://HOST/IQN/LUN`. What the disk has there is
lost.
"""

import asyncio
import sys

import iserblk

URL = sys.argv[1]


async def main():
    async with iserblk.asyncio.open_disks([URL]) as disks:
        disk = disks.disks["lun0"]
        data = [bytes([number]) * 4096 for number in range(64)]
        writes = [disk.write(memoryview(each), 4096 * at) for at, each in enumerate(data)]
        await asyncio.gather(*writes)
        await disk.flush()
        found = bytearray(4096)
        async with asyncio.timeout(10):
            await disk.read_into(memoryview(found), 4096 * 63)
        print(found == data[63])


asyncio.run(main())
