"""Load on the plain Python API of iserblk: no front-end, one trio loop.

    python -P api.py URL PATTERN BLOCK DEPTH SECONDS

Prints {"ios": …, "bytes": …, "seconds": …}. PATTERN is one of fio's: read, write, randread,
randwrite. Writes overwrite the LUN.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator

import trio

from iserblk.disk.aio import open_disks
from iserblk.disk.seam import AsyncDisk


def offsets(size: int, block: int, scattered: bool) -> Iterator[int]:
    """Block-aligned offsets, for ever: at random, or round and round."""
    blocks = size // block
    if scattered:
        generator = random.Random(1)  # the same order in every run
        while True:
            yield generator.randrange(blocks) * block
    while True:
        yield from range(0, blocks * block, block)


async def run(url: str, pattern: str, block: int, depth: int, seconds: float) -> dict[str, float]:
    """Keep ``depth`` requests in flight for so long; returns what was done."""
    done = 0
    async with open_disks([url], {}) as disks:
        disk: AsyncDisk = disks.disks[disks.default]
        places = offsets(disk.size, block, pattern.startswith("rand"))
        writes = pattern.endswith("write")
        start = time.perf_counter()
        deadline = start + seconds

        async def worker() -> None:
            nonlocal done
            buffer = memoryview(bytearray(os.urandom(block)))
            while time.perf_counter() < deadline:
                if writes:
                    await disk.write(buffer, next(places))
                else:
                    await disk.read_into(buffer, next(places))
                done += 1

        async with trio.open_nursery() as nursery:
            for _ in range(depth):
                nursery.start_soon(worker)
        elapsed = time.perf_counter() - start
    return {"ios": done, "bytes": done * block, "seconds": elapsed}


if __name__ == "__main__":
    _url, _pattern, _block, _depth, _seconds = sys.argv[1:]
    print(json.dumps(trio.run(run, _url, _pattern, int(_block), int(_depth), float(_seconds))))
