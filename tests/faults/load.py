"""Writes and reads side by side, while the network or the target misbehave."""

from __future__ import annotations

import random

import trio

from iserblk.initiator.session.session import Session
from tests.support.cores import session_of
from tests.support.faces import one_disk, read, write

WORKERS = 8
SHARE = 1 << 20  # bytes of each
BLOCK = 512
TURNS = 12


async def load(url: str, seed: int) -> Session:
    """Writes and reads side by side; each read finds what was written. Returns the session, which
    has ended."""
    async with one_disk("async", url) as disk, trio.open_nursery() as nursery:

        async def work(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            start = number * SHARE
            model = bytearray(SHARE)
            await write(disk, bytes(model), start)
            for _ in range(TURNS):
                at = chance.randrange(SHARE // BLOCK) * BLOCK
                size = min(SHARE - at, chance.choice((1, 8, 16, 64, 200, 300)) * BLOCK)
                model[at : at + size] = data = chance.randbytes(size)
                await write(disk, data, start + at)
                at = chance.randrange(SHARE // BLOCK) * BLOCK
                size = min(SHARE - at, chance.choice((1, 8, 64, 500)) * BLOCK)
                assert await read(disk, start + at, size) == bytes(model[at : at + size])
            assert await read(disk, start, SHARE) == bytes(model)

        for number in range(WORKERS):
            nursery.start_soon(work, number)
    return session_of(disk)
